"""`noiser slim`: a shorter prompt under which every case keeps its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from noiser.checks import is_mapping
from noiser.cli import options as o
from noiser.cli.terminal import progress_bar, say
from noiser.errors import PromptError
from noiser.files import parse_json, write_text
from noiser.types import STAYS


def slim(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file with the prompt.")],
    cases: Annotated[Path, typer.Option(help='Lines of {"user": text} or {"messages": [...]}.')],
    model: o.Model = "gemma-3-270m",
    unit: Annotated[
        Literal["sentence", "line", "paragraph"], typer.Option(help="The parts that can go.")
    ] = "sentence",
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A text whose part always stays; repeatable."),
    ] = None,
    hold_out: Annotated[
        float, typer.Option(help="The share of cases that are only tried at the end.")
    ] = 0.3,
    limit: Annotated[
        float, typer.Option(help="An answer that loses fewer nats than this stays.")
    ] = STAYS,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", help="Tokens of the longest answer.")
    ] = 16,
    prompt_output: Annotated[
        Path | None, typer.Option("-o", metavar="FILE", help="Write the shorter prompt here.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also save the result as JSON.")
    ] = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
) -> None:
    """Shortens a prompt: takes out what no case's answer needs, and tries the rest on other cases.

    Prints what was kept and why, then both texts as a diff. Nothing is written without -o or
    --save.
    """
    from noiser.explain import slim as run

    o.check_place("-o", prompt_output)
    o.check_place("--save", save)
    prompt = o.text_of(file)
    rows = read_cases(cases)
    lm = loading.load(model)
    options: dict[str, Any] = {"unit": unit, "keep": keep or (), "hold_out": hold_out}
    options |= {"limit": limit, "max_new_tokens": max_new_tokens, "seed": seed}
    with progress_bar("Slimming") as progress:
        found = run(lm, prompt, rows, progress=progress, **options)
    say(found.to_text())
    say("")
    say(found.diff())
    if prompt_output is not None:
        write_text(prompt_output, found.after + "\n")
    if save is not None:
        found.save(save)


def read_cases(path: Path) -> list[Any]:
    """The JSON objects of a file's lines. Raises PromptError, with the line, for anything else."""
    rows: list[Any] = []
    for number, line in enumerate(o.text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise PromptError(
                f'{path}, line {number} is not JSON ({error}); expected {{"user": text}}.'
            ) from None
        if not is_mapping(row):
            raise PromptError(
                f'{path}, line {number} is {line.strip()!r:.60}; expected {{"user": text}}.'
            )
        rows.append(row)
    return rows
