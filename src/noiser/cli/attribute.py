"""`noiser attribute` and `noiser compare`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar, say


def attribute(
    prompt: o.PromptOptions,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "joint",
    set_: o.MethodSettings = None,
    check: o.Check = 0,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    from noiser.attribution.store import dumps
    from noiser.attribution.terminal import to_text
    from noiser.engine import score_of
    from noiser.explain import attribute as run
    from noiser.methods import make_method

    made, question = make_method(method, **o.parse_parameters(set_)), prompt.arguments()
    score: Any = getattr(made, "score", None)
    if question["foil"] is not None and score in ("hellinger", "squared"):  # before the model is loaded
        score_of(score, 0)
    lm = loading.load(model)
    with progress_bar(f"Attributing by {method}") as progress:
        att = run(lm, method=made, check=check, seed=seed, progress=progress, **question)
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
    """Shows the attributions of several methods side by side; exit status 1 where one cannot answer."""
    from noiser.attribution.terminal import to_text
    from noiser.explain import compare as run
    from noiser.files import json_text
    from noiser.methods import make_method

    names, question = o.parse_names("--methods", methods), prompt.arguments()
    for name in names:
        make_method(name)
    lm = loading.load(model)
    with progress_bar("Comparing") as progress:
        found = run(lm, methods=names, seed=seed, progress=progress, **question)
    plain = output.output is not None
    output.write(
        {
            "text": lambda: to_text(found.attributions, plain=plain),
            "json": lambda: json_text([att.to_dict() for att in found]),
            "html": found.to_html,
        }
    )
    for failure in found.failures:
        say(f"noiser: error: {failure}", err=True)
    if found.failures:
        raise typer.Exit(1)
