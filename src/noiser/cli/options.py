"""Options that several commands share, and the model that they name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import update_wrapper
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

if TYPE_CHECKING:
    from noiser.model import LanguageModel

__all__ = [
    "DEFAULT_LOADING",
    "AnyUnitName",
    "Chat",
    "DataFolder",
    "Debug",
    "Foil",
    "FoilId",
    "Format",
    "Loading",
    "MaxNewTokens",
    "MethodName",
    "MethodSettings",
    "Model",
    "Output",
    "PromptText",
    "Seed",
    "TargetId",
    "TargetText",
    "UnitName",
    "loads_a_model",
    "write",
]

PromptText = Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")]
Model = Annotated[str, typer.Option("--model", "-m", help="Built-in name, folder, .gguf file or hub id.")]
TargetText = Annotated[
    str | None, typer.Option("--target", help="The continuation to explain; the greedy one unless given.")
]
TargetId = Annotated[int | None, typer.Option("--target-id", min=0, help="Likewise, one token by its id.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Tokens of the greedy continuation to explain; 1 unless given."),
]
Foil = Annotated[str | None, typer.Option("--foil", help='"Why the target rather than this?"')]
FoilId = Annotated[int | None, typer.Option("--foil-id", min=0, help="Likewise, one token by its id.")]
UnitName = Annotated[Literal["token", "word", "sentence"], typer.Option("--unit", help="What gets a score.")]
AnyUnitName = Annotated[
    Literal["token", "word", "sentence", "auto"],
    typer.Option("--unit", help="What gets a score; auto: sentences, then parts of those that carry the score."),
]
MethodName = Annotated[str, typer.Option("--method", help="A method's name; see: noiser methods.")]
MethodSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A hyper-parameter of the method; repeatable.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="The folder of the upstream files; $NOISER_DATA or the cache folder unless given.",
    ),
]
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


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded: the options that every command with a model has."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    device_map: DeviceMap = None
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False

    def load(self, name: str) -> LanguageModel:
        """The model of that name."""
        from noiser.model import load_model

        return load_model(name, **asdict(self))


DEFAULT_LOADING = Loading()


def loads_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `Loading` in place of its parameter `loading`, which it is called with."""
    names = [option.name for option in fields(Loading)]
    hints = get_type_hints(Loading, include_extras=True)
    parameters: list[Parameter] = []
    for parameter in signature(command, eval_str=True).parameters.values():
        if parameter.name == "loading":
            parameters += [
                Parameter(option.name, Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name])
                for option in fields(Loading)
            ]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def loading(**given: Any) -> None:
        chosen = Loading(**{name: given.pop(name) for name in names})
        command(**given, loading=chosen)

    update_wrapper(loading, command)
    vars(loading).pop("__wrapped__")  # whose signature would be taken for this one
    loading.__signature__ = Signature(parameters)
    loading.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return loading


def write(text: str, output: Path | None, format_: str) -> None:
    """A result to a file, all or nothing, or to stdout: text in its encoding, JSON and HTML in UTF-8 always."""
    from noiser.files import write_text

    if output is not None:
        write_text(output, text)
        return
    encoding = sys.stdout.encoding if format_ == "text" else "utf-8"
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode(encoding, "backslashreplace"))
    sys.stdout.buffer.flush()
