"""The lists: `noiser methods`, `noiser metrics`, `noiser models`; and `noiser data`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Annotated, Any

import typer

from noiser.cli import options as o
from noiser.cli.terminal import say
from noiser.errors import DataError

data = typer.Typer(no_args_is_help=True, help="Lists, fetches and shows data sets.")


def methods() -> None:
    """Lists the methods, with their hyper-parameters and defaults."""
    from noiser.methods import METHODS

    for name in METHODS.names():
        entry = METHODS.get(name)
        say(f"{name}\n  {entry.summary}")
        with contextlib.suppress(
            Exception
        ):  # a plugin's method may need an argument, and may be no dataclass
            method: Any = entry.factory()
            options = [field.name for field in dataclasses.fields(method) if field.init]
            say("  " + ", ".join(f"{option}={getattr(method, option)}" for option in options))
    for family in METHODS.families.values():
        say(f"{family.prefix}:NAME\n  {family.summary}")


def metrics() -> None:
    """Lists the metrics, with what they need and the settings that they read."""
    from noiser.metrics import METRICS

    for name in METRICS.names():
        entry = METRICS.get(name)
        metric = entry.factory()
        say(f"{name}\n  {entry.summary}")
        if metric.reads:
            say(f"  settings: {', '.join(sorted(metric.reads))}")


def models() -> None:
    """Lists the built-in models; any other decoder-only model works by folder, .gguf file or hub
    id.
    """
    from noiser.model.gguf import BUILT_IN

    for model in BUILT_IN.values():
        folder = model.folder()
        state = f"installed in {folder}" if folder else f"not installed. {model.install}"
        say(f"{model.name}\n  {model.summary}\n  licence: {model.licence}\n  {state}")
    say(
        "\nAlso: a local folder, a .gguf file, or the id of a decoder-only model on the Hugging "
        "Face hub."
    )


def list_() -> None:
    """Lists the data sets, where they come from and whether they are there."""
    from noiser.data import DATA_SETS, cache_folder
    from noiser.data.loading import data_folder

    for name in DATA_SETS.names():
        entry = DATA_SETS.get(name)
        source = entry.factory().source
        say(f"{name}\n  {entry.summary}\n  licence: {source.licence}\n  cite: {source.citation}")
        for file in source.files:
            path = next((data_folder() or cache_folder(name)).rglob(file.name), None)
            say(f"  fetched: {path}" if path else f"  not fetched: {file.url} ({_size(file.size)})")


def fetch(
    name: Annotated[
        str, typer.Argument(metavar="NAME|all", help="A data set; see: noiser data list.")
    ],
    data_dir: o.DataFolder = None,
) -> None:
    """Fetches the upstream files of a data set, or of all; files that are there already are checked
    and kept.
    """
    from noiser.data import DATA_SETS
    from noiser.data import fetch as run

    errors: list[DataError] = []
    for data_set in DATA_SETS.names() if name == "all" else [name]:
        try:
            paths = run(data_set, data_dir)
        except DataError as error:  # the other data sets may be within reach
            errors.append(error)
            continue
        for path in paths:
            say(f"{data_set}: {path} ({_size(path.stat().st_size)}, checksum right)")
        say(f"  licence: {DATA_SETS.get(data_set).factory().source.licence}")
    if errors:
        raise DataError(" ".join(map(str, errors))) from errors[0]


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set; see: noiser data list.")],
    limit: Annotated[int, typer.Option(help="The most examples to show.")] = 5,
    category: Annotated[
        str | None, typer.Option(help="Only this category, such as capital-world.")
    ] = None,
    data_dir: o.DataFolder = None,
) -> None:
    """Shows examples of a data set, and what was done to the published file."""
    from noiser.data import load

    dataset = load(name, data_dir, limit, category=category)
    notes = (
        *dataset.notes,
        f"licence: {dataset.source.licence}",
        f"cite: {dataset.source.citation}",
    )
    say("\n  ".join([f"{dataset.name}: {len(dataset)} examples", *notes]))
    for example in dataset:
        say(f"\n{example.id}  {example.category}\n  {example.prompt}")
        if example.target is not None:
            say(f"  target: {example.target}")
        for span, places in example.spans.items():
            say(f"  {span}: " + " · ".join(example.prompt[start:end] for start, end in places))


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1_000_000 else f"{size / 1e3:.1f} kB"


for name, function in (("list", list_), ("fetch", fetch), ("show", show)):
    data.command(name, cls=o.Command)(o.command(function))
