"""`noiser cite`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar
from noiser.types import Accuracy, CitedUnit


def cite(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question; - reads it from stdin.")],
    source: Annotated[list[Path], typer.Option("--source", metavar="FILE", help="A text to answer from; repeatable.")],
    model: o.Model = "gemma-3-270m",
    method: Annotated[str | None, typer.Option(help="Hides one source at a time unless given.")] = None,
    set_: o.MethodSettings = None,
    answer: Annotated[str | None, typer.Option(help="Cite this answer; the model's own unless given.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens of the longest answer.")] = 128,
    unit: Annotated[CitedUnit, typer.Option(help="auto: sources, then sentences of those that matter.")] = "auto",
    accuracy: Annotated[Accuracy, typer.Option(help="fast: in one pass, with a check.")] = "accurate",
    check: o.Check = 0,
    contrast: Annotated[bool, typer.Option(help="Also ask without the sources.")] = True,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Answers QUESTION from the sources and says which of them each sentence was written from."""
    from noiser.explain import cite as run
    from noiser.files import json_text
    from noiser.methods import make_method

    prompt, sources = str(o.parse_prompt(question)), [(path.name, o.text_of(path)) for path in source]
    if (parameters := o.parse_parameters(set_)) and method is None:
        parameters = {"score": "logprob", "baseline": "hidden"} | parameters
    chosen = make_method(method or "occlusion", **parameters) if method or parameters else None
    options: dict[str, Any] = {"answer": answer, "max_new_tokens": max_new_tokens, "unit": unit, "contrast": contrast}
    options |= {"accuracy": accuracy, "check": check}
    lm = loading.load(model)
    with progress_bar("Citing") as progress:
        found = run(lm, prompt, sources, method=chosen, seed=seed, progress=progress, **options)
    output.write({"text": lambda: str(found), "json": lambda: json_text(found.to_dict()), "html": found.to_html})
