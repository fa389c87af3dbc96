"""Fields of OpenAI's form that change no answer here: programs send them, so they are taken."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, ValidationInfo, field_validator

from noiser.server.bounds import Body

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "logprobs": (False, None),
    "top_logprobs": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "logit_bias": ({}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "function_call": ("none", "auto", None),
    "response_format": ({"type": "text"}, None),
    "modalities": (["text"], None),
    "audio": (None,),
    "reasoning_effort": ("none", None),
    "verbosity": ("medium", None),
    "web_search_options": (None,),
}
"""The values with which a field changes nothing, by its name."""


def _shown(name: str) -> str:
    """The neutral values of a field, as JSON."""
    return " or ".join(map(json.dumps, _NEUTRAL[name]))


def _only(name: str) -> Any:
    """The default and the description of a field of `_NEUTRAL`."""
    return Field(None, description=f"Only {_shown(name)}.")


class NeutralFields(Body):
    """OpenAI's fields that are taken where they change nothing, and otherwise refused."""

    user: Any = Field(None, description="Ignored.")
    safety_identifier: Any = Field(None, description="Ignored.")
    store: Any = Field(None, description="Ignored: nothing is stored.")
    metadata: Any = Field(None, description="Ignored.")
    service_tier: Any = Field(None, description="Ignored.")
    prompt_cache_key: Any = Field(None, description="Ignored.")
    prompt_cache_retention: Any = Field(None, description="Ignored.")
    prediction: Any = Field(None, description="Ignored.")
    parallel_tool_calls: Any = Field(None, description="Ignored: there are no tools.")
    stream_options: Any = Field(None, description="Ignored: usage is always sent.")
    n: Any = _only("n")
    logprobs: Any = _only("logprobs")
    top_logprobs: Any = _only("top_logprobs")
    frequency_penalty: Any = _only("frequency_penalty")
    presence_penalty: Any = _only("presence_penalty")
    logit_bias: Any = _only("logit_bias")
    tools: Any = _only("tools")
    tool_choice: Any = _only("tool_choice")
    functions: Any = _only("functions")
    function_call: Any = _only("function_call")
    response_format: Any = _only("response_format")
    modalities: Any = _only("modalities")
    audio: Any = _only("audio")
    reasoning_effort: Any = _only("reasoning_effort")
    verbosity: Any = _only("verbosity")
    web_search_options: Any = _only("web_search_options")

    @field_validator(*_NEUTRAL)
    @classmethod
    def _changes_nothing(cls, value: Any, info: ValidationInfo) -> Any:
        name = str(info.field_name)
        if value not in _NEUTRAL[name]:
            raise ValueError(
                f"expected {_shown(name)}; another value would change the answer, and this server "
                "cannot do that"
            )
        return value
