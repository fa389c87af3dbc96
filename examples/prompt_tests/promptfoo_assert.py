"""An assertion for promptfoo: does the answer depend on what it should?

    assert:
      - type: python
        value: file://promptfoo_assert.py
        config:
          model: smollm2-135m-instruct
          depends_on: ["Refunds are possible within 30 days."]

`config` has the model and arguments of `noiser.expect`. The answer that promptfoo's provider gave
is tested on that model, which may be another than the provider's; an answer that is no text, such
as a tool call, as JSON.
"""

import json
from functools import cache
from typing import Any

import noiser
from noiser.errors import NoiserError
from noiser.files import json_messages


@cache
def model(name: str) -> noiser.LanguageModel:
    """The model; it is loaded once for all assertions."""
    return noiser.load_model(name)


def get_assert(output: Any, context: dict[str, Any]) -> dict[str, Any]:
    """What promptfoo asks for: whether the assertion holds, a score, and the reason.

    What cannot be tested, such as a clause that is not in the prompt, does not hold.
    """
    expected = dict(context["config"])
    lm = model(expected.pop("model"))
    prompt = json_messages(context["prompt"]) or context["prompt"]
    answer = output if isinstance(output, str) else json.dumps(output)
    try:
        result = noiser.expect(lm, prompt, answer=answer, **expected)
    except NoiserError as error:
        return {"pass": False, "score": 0.0, "reason": str(error)}
    return {"pass": True, "score": 1.0, "reason": result.to_text()}
