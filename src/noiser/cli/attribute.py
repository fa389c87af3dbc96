"""`noiser attribute` and `noiser compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.methods import Method


def attribute(
    prompt: o.PromptOptions,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "joint",
    set_: o.MethodSettings = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    from noiser.attribution.store import dumps
    from noiser.attribution.terminal import to_text
    from noiser.methods import make_method

    chosen = {method: make_method(method, **o.parse_parameters(set_))}
    (att,) = _attributions(prompt, chosen, model, seed, loading)
    plain = output.output is not None
    output.write({"text": lambda: to_text([att], plain=plain), "json": lambda: dumps(att), "html": att.to_html})


def compare(
    prompt: o.PromptOptions,
    methods: Annotated[str, typer.Option(help="Names with commas, such as joint,occlusion:score=logprob.")] = (
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

    chosen = {name: make_method(name) for name in o.parse_names("--methods", methods)}
    attributions, plain = _attributions(prompt, chosen, model, seed, loading), output.output is not None
    output.write(
        {
            "text": lambda: to_text(attributions, plain=plain),
            "json": lambda: json_text([att.to_dict() for att in attributions]),
            "html": lambda: page(attributions),
        }
    )


def _attributions(
    prompt: o.PromptOptions, methods: dict[str, Method], model: str, seed: int, loading: o.Loading
) -> list[Attribution]:
    """An attribution by each method; what can be refused without the model is refused before it is loaded."""
    from noiser.engine import score_of
    from noiser.explain import attribute as run

    question = prompt.arguments()
    for method in methods.values():
        score: Any = getattr(method, "score", None)
        if question["foil"] is not None and score in ("hellinger", "squared"):
            score_of(score, 0)
    lm = loading.load(model)
    attributions: list[Attribution] = []
    for name, method in methods.items():
        with progress_bar(f"Attributing by {name}") as progress:
            attributions.append(run(lm, method=method, seed=seed, progress=progress, **question))
    return attributions
