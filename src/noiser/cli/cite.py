"""`noiser cite`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar
from noiser.errors import ParameterError
from noiser.files import csv_text
from noiser.types import CitedUnit


def cite(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="The question; - reads it from stdin.")],
    source: Annotated[list[Path], typer.Option("--source", metavar="FILE", help="A text to answer from; repeatable.")],
    model: o.Model = "gemma-3-270m",
    method: Annotated[
        str | None, typer.Option("--method", help="A method's name; hides one source at a time unless given.")
    ] = None,
    set_: o.MethodSettings = None,
    answer: Annotated[str | None, typer.Option(help="Cite this answer; the model's own unless given.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", min=1, help="Tokens of the longest answer; 128 unless given.")
    ] = None,
    unit: Annotated[
        CitedUnit,
        typer.Option("--unit", help="auto: sources, then sentences of those that carry the score."),
    ] = "auto",
    contrast: Annotated[bool, typer.Option(help="Also ask without the sources.")] = True,
    max_seconds: Annotated[
        float | None, typer.Option(help="With --unit auto: about the most seconds to spend.")
    ] = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Answers QUESTION from the sources and says which of them each sentence was written from."""
    if answer is not None and max_new_tokens is not None:
        raise ParameterError("--answer and --max-new-tokens: got both, expected one. The answer says its own length.")
    asked = str(o.parse_prompt(question, chat=False))
    sources = [(path.name, _read(path)) for path in source]
    parameters = o.parse_parameters(set_)

    from noiser.explain import cite as run
    from noiser.methods import make_method

    defaults = {} if method else {"score": "logprob", "baseline": "hidden"}
    chosen = make_method(method or "occlusion", **defaults | parameters) if method or parameters else None
    lm = loading.load(model)
    with progress_bar("Citing") as progress:
        citations = run(
            lm,
            asked,
            sources,
            method=chosen,
            answer=answer,
            max_new_tokens=max_new_tokens or 128,
            unit=unit,
            contrast=contrast,
            max_seconds=max_seconds,
            seed=seed,
            progress=progress,
        )
    output.write(
        {
            "text": lambda: str(citations),
            "json": citations.to_json,
            "html": citations.to_html,
            "csv": lambda: csv_text(citations.to_dataframe()),
            "md": citations.to_markdown,
        }
    )


def _read(path: Path) -> str:
    """A file's text. Raises PromptError where it is not UTF-8, ParameterError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ParameterError(f"--source: cannot read {path}: {error.strerror}. Expected a text file.") from error
    except UnicodeDecodeError as error:
        raise o.not_text(f"--source: {path} is not valid text at byte {error.start}") from None
