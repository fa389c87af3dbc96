"""`noiser data`: which data sets there are, fetching them, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from noiser.cli import options as o
from noiser.cli.progress import progress_bar
from noiser.cli.running import command

if TYPE_CHECKING:
    from noiser.data import Example

__all__ = ["data"]

data = typer.Typer(no_args_is_help=True, help="Lists, fetches and shows data sets.")


def list_() -> None:
    """Lists the data sets, where they come from and whether they are there."""
    from noiser.data import DATA_SETS, cache_folder
    from noiser.data.files import find_file
    from noiser.data.loading import data_folder
    from noiser.errors import DataError

    own = data_folder()
    for name in DATA_SETS.names():
        entry = DATA_SETS.get(name)
        source = entry.factory().source
        typer.echo(f"{name}\n  {entry.summary}\n  licence: {source.licence}\n  cite: {source.citation}")
        for file in source.files:
            place = cache_folder(name) / file.name
            if own is not None:  # every command takes it from there, or from nowhere
                try:
                    place = find_file(file, own, data_set=name)
                except DataError:
                    place = own / file.name
            state = f"fetched: {place}" if place.is_file() else f"not fetched: {file.url} ({_size(file.size)})"
            typer.echo(f"  {state}")


def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME|all", help="A data set; see: noiser data list.")],
    data_dir: o.DataFolder = None,
    debug: o.Debug = False,
) -> None:
    """Fetches the upstream files of a data set, or of all; files that are there already are checked and kept."""
    from noiser.data import DATA_SETS
    from noiser.data import fetch as run
    from noiser.errors import DataError

    failed: list[DataError] = []
    for each in DATA_SETS.names() if name == "all" else [name]:
        try:
            with progress_bar(f"Fetching {each}") as progress:
                paths = run(each, data_dir, progress=progress)
        except DataError as error:  # the other data sets may be within reach
            failed.append(error)
            continue
        for path in paths:
            typer.echo(f"{each}: {path} ({_size(path.stat().st_size)}, checksum right)")
        typer.echo(f"  licence: {DATA_SETS.get(each).factory().source.licence}")
    if failed:
        raise DataError(" ".join(str(error) for error in failed)) from failed[0]


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set; see: noiser data list.")],
    limit: Annotated[int, typer.Option(min=1, help="The most examples to show.")] = 5,
    category: Annotated[str | None, typer.Option(help="Only this category, such as capital-world.")] = None,
    seed: Annotated[int | None, typer.Option(help="Takes a random sample, rather than the first ones.")] = None,
    as_published: Annotated[
        bool, typer.Option("--as-published", help="Leave what is wrong in the published file as it is.")
    ] = False,
    data_dir: o.DataFolder = None,
    debug: o.Debug = False,
) -> None:
    """Shows examples of a data set, and what was done to the published file."""
    from noiser.data import load

    with progress_bar(f"Fetching {name}") as progress:
        found = load(name, data_dir, limit, seed, as_published, category=category, progress=progress)
    typer.echo(f"{found.name}: {found.total} examples")
    for line in (*found.notes, f"licence: {found.source.licence}", f"cite: {found.source.citation}"):
        typer.echo(f"  {line}")
    for example in found:
        typer.echo("\n" + _shown(example))


def _shown(example: Example) -> str:
    lines = [f"{example.id}  {example.category}".rstrip(), f"  {example.prompt}"]
    if example.target is not None:
        lines.append(f"  target: {example.target}")
    for name, spans in example.spans.items():
        lines.append(f"  {name}: " + " · ".join(example.prompt[start:end] for start, end in spans))
    return "\n".join(lines)


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{size / 1e3:.1f} kB"


for name, function in (("list", list_), ("fetch", fetch), ("show", show)):
    data.command(name)(command(function))
