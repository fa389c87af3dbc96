"""What a visitor asks, and the link that asks it again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast, get_args
from urllib.parse import urlencode

from noiser.errors import ParameterError, PromptError, UnknownNameError
from noiser.files import json_messages
from noiser.methods import METHODS, Method, Noiser, make_method
from noiser.types import Prompt, TargetUnitName, TextUnitName

MOST_TARGETS = 20
"""Continuation tokens that can be asked about at once: every one has a heat map of its own."""

MOST_CHARACTERS = 200_000
"""Of a prompt, a target, a foil or all sources: about 50,000 tokens, which take a tokenizer a second."""

LARGEST_SEED = 2**53 - 1
"""In magnitude: the page's script would round a larger integer, and so ask with another seed."""

_ROLE = re.compile(r"^(system|user|assistant):[ \t]*", re.MULTILINE | re.IGNORECASE)

_RULE = re.compile(r"^-{3,}[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, as the fields of the page say it.

    Attributes:
        prompt: the text; with `chat`, messages as `parse_chat` reads them.
        chat: whether the prompt is a chat.
        model: the name of a model that is served; empty for the first.
        methods: registry names; one that is given twice counts once.
        target: the continuation to explain; empty for the greedy one.
        max_new_tokens: how many tokens of the greedy continuation.
        target_unit: what is explained of the continuation: each "token", "word" or "sentence", or "all" of it.
        foil: "why the target rather than this?"; empty for none.
        unit: "token", "word" or "sentence".
        seed: of all random numbers; at most `LARGEST_SEED` in magnitude.
        all_thresholds: whether Noiser searches every unit's threshold, or only the smallest.
        sources: texts between lines of `---`; if there are any, the prompt is answered from them and they are cited.
    """

    prompt: str = ""
    chat: bool = False
    model: str = ""
    methods: tuple[str, ...] = ("noiser",)
    target: str = ""
    max_new_tokens: int = 1
    target_unit: TargetUnitName = "token"
    foil: str = ""
    unit: TextUnitName = "token"
    seed: int = 0
    all_thresholds: bool = True
    sources: str = ""

    def __post_init__(self) -> None:
        if not self.methods:
            raise ParameterError("No method is chosen; expected at least one, such as noiser.")
        for name in self.methods:
            METHODS.get(name)
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        texts = {"prompt": self.prompt, "target": self.target, "foil": self.foil, "list of sources": self.sources}
        for name, text in texts.items():
            if len(text) > MOST_CHARACTERS:
                raise PromptError(
                    f"The {name} has {len(text):,} characters; expected at most {MOST_CHARACTERS:,}. Shorten it, or "
                    "attribute it on your own machine with: noiser attribute -"
                )
        if not 1 <= self.max_new_tokens <= MOST_TARGETS:
            raise ParameterError(
                f"The number of continuation tokens is {self.max_new_tokens}; expected 1 to {MOST_TARGETS}."
            )
        if abs(self.seed) > LARGEST_SEED:
            raise ParameterError(
                f"The seed is {str(self.seed)[:40]}; expected an integer from -{LARGEST_SEED} to {LARGEST_SEED}."
            )

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of `noiser.attribute`, without the method.

        Raises:
            PromptError: there is no prompt, or the chat cannot be read.
        """
        if not self.prompt.strip():
            raise PromptError("The prompt is empty; type a text, or paste one.")
        prompt: Prompt = parse_chat(self.prompt) if self.chat else self.prompt
        return {
            "prompt": prompt,
            "target": self.target or None,
            "max_new_tokens": self.max_new_tokens,
            "target_unit": self.target_unit,
            "foil": self.foil or None,
            "unit": self.unit,
            "seed": self.seed,
        }

    @property
    def documents(self) -> list[str]:
        """The sources, each by itself."""
        return [text.strip() for text in _RULE.split(self.sources) if text.strip()]

    def threshold_method(self, name: str) -> Method | None:
        """What finds every unit's threshold and nothing else, for a method that finds one; None if not wanted."""
        made = make_method(name)
        if not (self.all_thresholds and isinstance(made, Noiser) and made.bounding == "k_min"):
            return None
        return replace(made, bounding="k_max_per_unit")

    def to_query(self) -> str:
        """What follows the question mark of a link: every field that is not as the page begins."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        texts = {name: _as_text(value) for name, value in changed.items()}
        return urlencode({name: text.encode("utf-8", "replace") for name, text in texts.items()})

    @classmethod
    def from_query(cls, parameters: Mapping[str, str]) -> Question:
        """The question of a link; parameters of other names are left alone.

        Raises:
            ParameterError, UnknownNameError: a value that the page would not have written.
        """
        given = [field for field in fields(cls) if field.name in parameters]
        return cls(**{field.name: _from_text(field.name, parameters[field.name], field.default) for field in given})


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(cast("tuple[str, ...]", value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def _from_text(name: str, text: str, default: Any) -> Any:
    choices = {"unit": get_args(TextUnitName), "target_unit": get_args(TargetUnitName)}.get(name, (text,))
    if text not in choices:
        raise UnknownNameError(name, text, choices)
    if isinstance(default, bool):
        if text not in ("0", "1"):
            raise ParameterError(f"The link says {name}={text[:40]!r}; expected 0 or 1.")
        return text == "1"
    if isinstance(default, tuple):
        return tuple(part for part in text.split(",") if part)
    if isinstance(default, int):
        try:
            return int(text)
        except ValueError:
            raise ParameterError(f"The link says {name}={text[:40]!r}; expected an integer.") from None
    return text


def parse_chat(text: str) -> list[dict[str, str]]:
    r"""Chat messages from a transcript.

    A line that begins with `system:`, `user:` or `assistant:` begins a message; without any, all is one message of
    the user. A JSON list of messages is taken as it is.

    >>> parse_chat("system: Be brief.\nuser: Name a sport.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Name a sport.'}]

    Raises:
        PromptError: there is text before the first role.
    """
    if (messages := json_messages(text)) is not None:
        return messages
    marks = list(_ROLE.finditer(text))
    if not marks:
        return [{"role": "user", "content": text}]
    if before := text[: marks[0].start()].strip():
        raise PromptError(
            f"The chat begins with {before[:40]!r}, before the first role; expected a line that begins with system:, "
            "user: or assistant:. Give that text a role."
        )
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        {"role": mark[1].lower(), "content": text[mark.end() : end].strip("\n")}
        for mark, end in zip(marks, ends, strict=True)
    ]
