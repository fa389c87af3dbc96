"""From what is typed to what the library takes: options that commands share, and how every command begins and ends."""

from __future__ import annotations

import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from noiser import types
from noiser.cli.terminal import say, write
from noiser.errors import NoiserError, ParameterError, PromptError
from noiser.files import json_messages, parse_json
from noiser.types import AutoUnit, Prompt

if TYPE_CHECKING:
    from noiser.model import LanguageModel

PromptUnit = Literal[types.TextUnitName, "turn", AutoUnit]
"""The library's units without "source": a prompt on the command line comes without sources."""

REFUSED, INTERRUPTED, PIPE_CLOSED = 2, 130, 141
"""Exit status after an error that the user can do something about, after Ctrl-C, and when stdout's reader left."""

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="Built-in name, folder, .gguf file, hub id, vllm:NAME or a server's address."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option("--max-new-tokens", min=1, help="Tokens of the greedy continuation to explain; 1 unless given."),
]
TargetUnitName = Annotated[
    types.TargetUnitName,
    typer.Option("--target-unit", help="What is explained: each of these of the continuation, or all of it."),
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
Seed = Annotated[int, typer.Option("--seed", help="Seed of all random numbers.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded: the options that every command with a model has."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type of the weights.")] = (
        "auto"
    )
    device: Annotated[str, typer.Option(help="Such as cpu, cuda, cuda:1.")] = "auto"
    device_map: Annotated[str | None, typer.Option(help="How to spread the model, such as auto.")] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="With vllm:NAME or an address, such as tensor_parallel_size=8; repeatable."
        ),
    ] = None
    chat_template_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="For the chat template of messages, such as enable_thinking=false; repeatable."
        ),
    ] = None

    def load(self, name: str) -> LanguageModel:
        """The model of that name."""
        from noiser.model import load_model

        options = asdict(self)
        engine_args = parse_parameters(options.pop("engine_arg"), "--engine-arg")
        template_kwargs = parse_parameters(options.pop("chat_template_arg"), "--chat-template-arg")
        return load_model(name, chat_template_kwargs=template_kwargs, **engine_args, **options)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is attributed: the options of the commands for one prompt."""

    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.")]
    target: Annotated[str | None, typer.Option(help="The continuation to explain; the greedy one unless given.")] = None
    target_id: Annotated[int | None, typer.Option(min=0, help="Likewise, one token by its id.")] = None
    max_new_tokens: MaxNewTokens = None
    target_unit: TargetUnitName = "token"
    foil: Annotated[str | None, typer.Option(help='"Why the target rather than this?"')] = None
    foil_id: Annotated[int | None, typer.Option(min=0, help="Likewise, one token by its id.")] = None
    unit: Annotated[
        PromptUnit,
        typer.Option(
            help="What gets a score; turn: each message of a chat; auto: sentences, then parts of those that carry the "
            "score. For sources see: noiser cite."
        ),
    ] = "token"
    chat: Chat = False
    seed: Seed = 0

    def arguments(self) -> dict[str, Any]:
        """The arguments of `noiser.attribute`."""
        for name in ("target", "foil"):
            if getattr(self, name) is not None and getattr(self, f"{name}_id") is not None:
                raise ParameterError(f"--{name} and --{name}-id: got both, expected one.")
        target = self.target_id if self.target is None else self.target
        if target is not None and self.max_new_tokens is not None:
            raise ParameterError(
                "The target and --max-new-tokens: got both, expected one. The target says its own length."
            )
        return {
            "prompt": parse_prompt(self.prompt, chat=self.chat),
            "target": target,
            "foil": self.foil_id if self.foil is None else self.foil,
            "max_new_tokens": self.max_new_tokens or 1,
            "target_unit": self.target_unit,
            "unit": self.unit,
            "seed": self.seed,
        }


_Form = Literal["text", "json", "html", "csv", "md"]

_ENDINGS: dict[str, _Form] = {
    "": "text",
    ".txt": "text",
    ".json": "json",
    ".html": "html",
    ".csv": "csv",
    ".md": "md",
}


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a result goes, and in which form; a file that cannot be written is refused before the work."""

    format_: Annotated[
        _Form | None,
        typer.Option("--format", help="Form of the result; unless given, what --output ends in says it, else text."),
    ] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here.")] = None

    def __post_init__(self) -> None:
        if self.output is None:
            return
        if self.output.is_dir():
            raise ParameterError(f"--output: got the folder {self.output}, expected a file. Add a file name.")
        if self.format_ is None and self.output.suffix.lower() not in _ENDINGS:
            raise ParameterError(
                f"--output: got {self.output.name}, expected a name that ends in {', '.join(filter(None, _ENDINGS))}, "
                "or in nothing for text. Rename it, or add --format."
            )
        if self.output.exists() and not self.output.is_file():
            return
        folder = self.output.absolute().parent
        if not folder.is_dir():
            raise ParameterError(f"--output: the folder {folder} does not exist. Make it first.")
        try:
            TemporaryFile(dir=folder).close()
        except OSError as error:
            raise ParameterError(
                f"--output: no file can be made in {folder}: {error.strerror}. Choose another folder."
            ) from error

    def write(self, forms: Mapping[str, Callable[[], str]]) -> None:
        """Writes the result in its form, with one newline at the end."""
        form = self.format_ or _ENDINGS[self.output.suffix.lower() if self.output else ""]
        write(forms[form]().rstrip("\n") + "\n", self.output, form)


LOADING, OUTPUT = Loading(), Output()


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Makes a function a command.

    A parameter whose type is a dataclass of options becomes these options. Errors and warnings become lines on stderr,
    and the exit status says how the command ended; with `--debug`, an error's traceback is printed too. Any exception
    that is not a `NoiserError` or an `OSError` is a defect of ours and keeps its traceback.
    """
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in signature(function).parameters.items():
        if is_dataclass(group := hints[name]):
            groups[name], types = group, get_type_hints(group, include_extras=True)
            for option in fields(group):
                default = Parameter.empty if option.default is MISSING else option.default
                parameters.append(
                    Parameter(option.name, Parameter.KEYWORD_ONLY, default=default, annotation=types[option.name])
                )
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
    parameters.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    def wrapped(*, debug: bool, **given: Any) -> None:
        if sys.stderr is None:  # closed
            sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the process ends
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                for name, group in groups.items():
                    given[name] = group(**{option.name: given.pop(option.name) for option in fields(group)})
                function(**given)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except BrokenPipeError:  # what is still buffered would raise again when Python exits
                if sys.stdout is not None:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(PIPE_CLOSED) from None
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except (NoiserError, OSError) as error:
                if debug:
                    traceback.print_exc()
                say(f"noiser: error: {str(error) or type(error).__name__}", err=True)
                raise typer.Exit(REFUSED) from None

    functools.update_wrapper(wrapped, function)
    vars(wrapped).pop("__wrapped__")  # whose signature would be taken for this one
    wrapped.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    wrapped.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapped


def _show_warning(message: Warning | str, *_where: Any) -> None:
    say(f"noiser: warning: {message}", err=True)


# ---- values ----------------------------------------------------------------------------------------------------------


def parse_names(option: str, typed: str) -> list[str]:
    """Names with commas between them. Raises ParameterError where there is none, or one twice."""
    names = [name.strip() for name in typed.split(",") if name.strip()]
    if not names:
        raise ParameterError(f"{option}: got {typed!r}, expected names with commas between them.")
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ParameterError(f"{option}: got {repeated[0]!r} twice, expected each name once. Leave one out.")
    return names


def parse_prompt(typed: str, *, chat: bool) -> Prompt:
    """The prompt as `to_prompt` makes it; `-` stands for stdin. Raises PromptError where `to_prompt` does."""
    return to_prompt(read_stdin().removesuffix("\n") if typed == "-" else typed, chat=chat)


def to_prompt(text: str, *, chat: bool) -> Prompt:
    """The text as a prompt. With `chat`, a JSON list of messages, or the text of one user message.

    Raises:
        PromptError: it is not valid Unicode, or only whitespace.
    """
    if not text.strip():  # before a model is loaded
        raise PromptError(f"The prompt is {text!r}; expected text that is more than whitespace. Write something.")
    if wrong := [character for character in text if "\ud800" <= character <= "\udfff"]:
        raise not_text(f"The prompt has bytes that are not text, such as {wrong[0]!r} in Python's spelling")
    return json_messages(text) or [{"role": "user", "content": text}] if chat else text


def read_stdin() -> str:
    """All of stdin. Raises PromptError where it is closed, or not in the encoding that Python expects."""
    if sys.stdin is None:
        raise PromptError("stdin is closed; expected the prompt there. Give it as an argument, or through a pipe.")
    try:
        return sys.stdin.read().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise not_text(f"stdin has bytes that are not text, such as {error.object[error.start]:#04x}") from None


def not_text(what: str) -> PromptError:
    """The error for bytes that are not UTF-8."""
    return PromptError(f"{what}; expected UTF-8. Convert it first, such as by: iconv -f latin1 -t utf-8")


def parse_parameters(pairs: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """Hyper-parameters from `key=value` pairs. A value is read as JSON, else it is the text itself.

    >>> parse_parameters(["samples=20", "bounding=k_max", "exact_norms=false"])
    {'samples': 20, 'bounding': 'k_max', 'exact_norms': False}
    """
    parameters: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ParameterError(f"{option}: got {pair!r}, expected key=value, such as {option} samples=20.")
        if key in parameters:
            raise ParameterError(f"{option}: got {key!r} twice, expected each key once. Leave one out.")
        try:
            parameters[key] = parse_json(value)
        except ValueError:
            parameters[key] = value
    return parameters
