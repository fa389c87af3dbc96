"""An assertion for promptfoo: does the answer depend on what it should?

    assert:
      - type: python
        value: file://promptfoo_assert.py
        config:
          model: smollm2-135m-instruct
          depends_on: ["Refunds are possible within 30 days."]

`config` has the model and arguments of `noiser.expect`. The answer that promptfoo's provider gave
is tested on that model, which may be another than the provider's.
"""

from functools import cache
from typing import Any

import noiser
from noiser.errors import ExpectationError
from noiser.files import json_messages


@cache
def model(name: str) -> noiser.LanguageModel:
    """The model; it is loaded once for all assertions."""
    return noiser.load_model(name)


def get_assert(output: str, context: dict[str, Any]) -> dict[str, Any]:
    """What promptfoo asks for: whether the assertion holds, a score, and the reason."""
    expected = dict(context["config"])
    lm = model(expected.pop("model"))
    prompt = json_messages(context["prompt"]) or context["prompt"]
    try:
        result = noiser.expect(lm, prompt, answer=output, **expected)
    except ExpectationError as error:
        return {"pass": False, "score": 0.0, "reason": str(error)}
    return {"pass": True, "score": 1.0, "reason": result.to_text()}
