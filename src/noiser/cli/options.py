"""Options that several commands share, and the model that they name."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from noiser.model import LanguageModel

__all__ = [
    "Chat",
    "Debug",
    "Device",
    "DeviceMap",
    "Dtype",
    "Foil",
    "Format",
    "MaxNewTokens",
    "Model",
    "Output",
    "PromptText",
    "Revision",
    "Seed",
    "TargetText",
    "TrustRemoteCode",
    "UnitName",
    "load",
    "write",
]

PromptText = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, folder, .gguf file or hub id.")]
TargetText = Annotated[
    str | None, typer.Option("--target", help="The continuation to explain; the greedy one unless given.")
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Tokens of the greedy continuation to explain; 1 unless given."),
]
Foil = Annotated[str | None, typer.Option("--foil", help='"Why the target rather than this?"')]
UnitName = Annotated[Literal["token", "word", "sentence"], typer.Option("--unit", help="What gets a score.")]
Chat = Annotated[bool, typer.Option("--chat", help="PROMPT is a user's message, or a JSON list of messages.")]
Seed = Annotated[int, typer.Option("--seed", help="Of all random numbers.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"], typer.Option("--dtype", help="Type of the weights.")
]
Device = Annotated[str, typer.Option("--device", help="Such as cpu, cuda, cuda:1.")]
DeviceMap = Annotated[str | None, typer.Option("--device-map", help="How to spread the model, such as auto.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Format = Annotated[Literal["text", "json", "html"], typer.Option("--format", help="Form of the result.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def load(
    name: str,
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"],
    device: str,
    device_map: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> LanguageModel:
    """The model that the options name."""
    from noiser.model import load_model

    return load_model(
        name,
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )


def write(text: str, output: Path | None) -> None:
    """A result to a file, all or nothing, or to stdout."""
    from noiser.attribution.store import write_text

    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
