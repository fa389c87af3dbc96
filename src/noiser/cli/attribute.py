"""`noiser attribute` and `noiser compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.methods import Method
    from noiser.model import LanguageModel
    from noiser.question import Question


def attribute(
    prompt: o.PromptOptions,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "noiser",
    set_: o.MethodSettings = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    from noiser.attribution.store import dumps
    from noiser.attribution.terminal import to_text
    from noiser.methods import make_method

    question, chosen = prompt.question(), make_method(method, **o.parse_parameters(set_))
    att = _attribute(loading.load(model), question, chosen, seed, "Attributing")
    plain = output.output is not None
    output.write({"text": lambda: to_text([att], plain=plain), "json": lambda: dumps(att), "html": att.to_html})


def compare(
    prompt: o.PromptOptions,
    methods: Annotated[str, typer.Option(help="Names, with commas between them; see: noiser methods.")] = (
        "joint,noiser,occlusion"
    ),
    model: o.Model = "gemma-3-270m",
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows the attributions of several methods side by side."""
    from noiser.attribution.html import page
    from noiser.attribution.terminal import to_text
    from noiser.files import json_text
    from noiser.methods import make_method

    question = prompt.question()
    chosen = {name: make_method(name) for name in o.parse_names("--methods", methods)}
    lm = loading.load(model)
    attributions = [_attribute(lm, question, one, seed, name) for name, one in chosen.items()]
    plain = output.output is not None
    output.write(
        {
            "text": lambda: to_text(attributions, plain=plain),
            "json": lambda: json_text([att.to_dict() for att in attributions]),
            "html": lambda: page(attributions),
        }
    )


def _attribute(lm: LanguageModel, question: Question, method: Method, seed: int, label: str) -> Attribution:
    from noiser.explain import attribute as run

    with progress_bar(label) as progress:
        return run(
            lm,
            question.prompt,
            method=method,
            target=question.target,
            foil=question.foil,
            max_new_tokens=question.max_new_tokens,
            target_unit=question.target_unit,
            unit=question.unit,
            seed=seed,
            progress=progress,
        )
