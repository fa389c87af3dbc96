"""`noiser diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar


def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A file with the first version of the prompt.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="A file with the edited version.")],
    model: o.Model = "gemma-3-270m",
    target: Annotated[str | None, typer.Option(help="The answer to explain; the one to AFTER unless given.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens of the longest answer.")] = 16,
    chat: o.Chat = False,
    fail_above: Annotated[
        float | None, typer.Option(help="Exit status 1 if an edit moves the log-probability by more nats than this.")
    ] = None,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Shows which edit of a prompt changed the answer, and by how much."""
    from noiser.explain import diff as run
    from noiser.files import json_text

    one, other = (o.to_prompt(o.text_of(path), chat) for path in (before, after))
    lm = loading.load(model)
    with progress_bar("Comparing") as progress:
        found = run(lm, one, other, target=target, max_new_tokens=max_new_tokens, seed=seed, progress=progress)
    output.write({"text": lambda: str(found), "json": lambda: json_text(found.to_dict()), "html": found.to_html})
    if fail_above is not None and max(abs(edit.score) for edit in found.edits) > fail_above:
        raise typer.Exit(1)
