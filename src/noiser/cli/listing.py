"""`noiser methods` and `noiser models`: what there is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from noiser.errors import NoiserError

if TYPE_CHECKING:
    from noiser.model.catalog import BuiltIn
    from noiser.registry import Entry

__all__ = ["methods", "models"]


def methods() -> None:
    """Lists the methods, with their hyper-parameters and defaults."""
    from noiser.methods import METHODS

    for name in METHODS.names():
        entry = METHODS.get(name)
        typer.echo(f"{name}\n  {entry.summary}")
        defaults = _defaults(entry)
        if defaults:
            typer.echo("  " + ", ".join(f"{key}={value}" for key, value in defaults.items()))
    for family in METHODS.families():
        typer.echo(f"{family.prefix}:NAME\n  {family.summary}")


def models() -> None:
    """Lists the built-in models; any other decoder-only model works by folder, .gguf file or hub id."""
    from noiser.model.catalog import BUILT_IN

    for model in BUILT_IN.values():
        typer.echo(f"{model.name}\n  {model.summary}\n  licence: {model.licence}")
        for line in _state(model):
            typer.echo(f"  {line}")
    typer.echo("\nAlso: a local folder, a .gguf file, or the id of a decoder-only model on the Hugging Face hub.")


def _defaults(entry: Entry[Any]) -> dict[str, Any]:
    """The fields of the method as the factory makes it without arguments, where it can."""
    try:
        made = entry.factory()
    except Exception:  # a plugin's method may need an argument
        return {}
    if not dataclasses.is_dataclass(made):
        return {}
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.init}


def _state(model: BuiltIn) -> list[str]:
    from noiser.model.conversion import built_in_entry
    from noiser.model.store import is_whole

    folder = model.folder()
    if folder is None:
        return [f"not installed; install with: {model.install}"]
    try:
        entry = built_in_entry(model).folder
    except NoiserError as error:
        return [f"installed in {folder}, but: {error}"]
    converted = f"converted in {entry}" if is_whole(entry) else "converted on first use, which takes about a minute"
    return [f"installed in {folder}", converted]
