"""Options that commands share, and the wrapper that turns a function into a command."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from noiser import types
from noiser.cli.terminal import say, write
from noiser.errors import NoiserError, ParameterError, PromptError
from noiser.files import json_messages, json_or_text
from noiser.results import FORMS, Result, form_of

if TYPE_CHECKING:
    from noiser.model import LanguageModel

Pairs = list[str] | None

_OF_ENDPOINTS = (
    "base_url",
    "api_key_env",
    "temperature",
    "repeats",
    "same",
    "concurrency",
    "timeout",
)
"""Settings of chat:NAME that are often taken for options; `noiser.model.chat.load_chat` has all."""


def pairs(help_: str, *names: str) -> Any:
    """A repeatable option of KEY=VALUE."""
    return typer.Option(*names, metavar="KEY=VALUE", help=f"{help_}; repeatable.")


MethodSettings = Annotated[Pairs, pairs("A hyper-parameter of the method", "--set")]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Built-in name, folder, .gguf file, hub id, vllm:NAME, chat:NAME or an address.",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", help="Tokens of the greedy continuation to explain.")
]
TargetUnitOption = Annotated[
    types.TargetUnitName, typer.Option(help="Parts of the continuation to explain.")
]
MethodName = Annotated[
    str | None,
    typer.Option(
        "--method",
        help="A method's name; joint unless given, of chat:NAME search. See: noiser methods.",
    ),
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="FOLDER",
        help="Upstream files; $NOISER_DATA or the cache folder unless given.",
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="The prompt is a user's message, or a JSON list of messages.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of all random numbers.")]


def _check(text: str) -> int:
    """True for "auto", else the number, of which negative ones are refused later."""
    if str(text) == "auto":
        return True
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number of inputs nor auto.") from None


Check = Annotated[
    int,
    typer.Option(
        parser=_check,
        metavar="N|auto",
        help="Test the scores on so many further inputs with half of the units; auto: 20 to 64.",
    ),
]
MaxSeconds = Annotated[
    float | None, typer.Option(help="Show what is there after so many seconds, and say so.")
]
MaxCalls = Annotated[
    int | None, typer.Option(help="Of chat:NAME: the most requests; 100 unless given.")
]
ImageFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--image", metavar="FILE", help="A picture before the prompt, as a chat; repeatable."
    ),
]
ImageUnitOption = Annotated[
    str,
    typer.Option(
        "--image-unit",
        metavar="4x4|image|BOXES",
        help="Parts of a picture: rows x columns, image, none, or boxes of pixels "
        '"left,top,right,bottom;...".',
    ),
]
ImageRemovalOption = Annotated[
    types.ImageRemoval,
    typer.Option(help="How a part is removed: grey or blurred pixels, or as words are."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How a model is loaded: the options that every command with a model has."""

    dtype: Annotated[str, typer.Option(help="Type of the weights: float32, bfloat16, float16.")] = (
        "auto"
    )
    device: Annotated[str, typer.Option(help="Such as cpu, cuda, cuda:1.")] = "auto"
    device_map: Annotated[
        str | None, typer.Option(help="How to spread the model, such as auto.")
    ] = None
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False
    engine_arg: Annotated[
        Pairs, pairs("For vllm:NAME, chat:NAME or an address, such as base_url=http://HOST/v1")
    ] = None
    chat_template_arg: Annotated[
        Pairs, pairs("For the chat template, such as enable_thinking=false")
    ] = None

    def load(self, name: str) -> LanguageModel:
        """The model of that name."""
        from noiser.model import load_model

        options = asdict(self)
        engine_args = parse_parameters(options.pop("engine_arg"), "--engine-arg")
        template_kwargs = parse_parameters(options.pop("chat_template_arg"), "--chat-template-arg")
        return load_model(name, chat_template_kwargs=template_kwargs, **engine_args, **options)


@dataclass(frozen=True, kw_only=True)
class QuestionOptions:
    """The options of the commands for one prompt."""

    target: Annotated[
        str | None,
        typer.Option(
            help="The continuation to explain; the greedy one unless given. action: the last call "
            "or answer of a chat; action:4: message 4."
        ),
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the greedy continuation to explain; 1, of a chat's answer 40."
        ),
    ] = None
    target_unit: Annotated[
        types.TargetUnitName | None,
        typer.Option(help="Parts of the continuation to explain; of a chat or a --target all."),
    ] = None
    foil: Annotated[str | None, typer.Option(help='"Why the target rather than this?"')] = None
    unit: Annotated[
        Literal[types.TextUnitName, "turn", types.AutoUnit],
        typer.Option(
            help="What gets a score; auto: sentences, then parts of those that carry the score."
        ),
    ] = "word"
    chat: Chat = False
    image: ImageFiles = None
    image_unit: ImageUnitOption = "4x4"
    image_removal: ImageRemovalOption = "grey"

    def arguments(self, prompt: str) -> dict[str, Any]:
        """The arguments of `noiser.attribute` for a prompt as it was typed."""
        from noiser.types import Question

        asked = with_images(parse_prompt(prompt, chat=self.chat or bool(self.image)), self.image)
        arguments: dict[str, Any] = asdict(self) | {"prompt": asked}
        arguments["image_unit"] = parse_image_unit(self.image_unit)
        del arguments["chat"], arguments["image"]
        Question(**arguments)
        return arguments


def check_place(option: str, path: Path | None) -> None:
    """Raises ParameterError where no file can be written, before a model works for minutes."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ParameterError(f"{option}: the folder {folder} does not exist. Make it first.")
    if path.is_dir():
        raise ParameterError(f"{option}: {path} is a folder; expected a file in it.")


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where a result goes, and in which form."""

    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            help=f"Form of the result: {', '.join(FORMS.names())}; unless given, by --output's "
            f"ending, or text.",
        ),
    ] = None
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result here.")
    ] = None

    def __post_init__(self) -> None:
        self._form()
        check_place("--output", self.output)

    def _form(self) -> str:
        """The name of the form."""
        if self.format_ is None and (self.output is None or not self.output.suffix):
            return "text"
        return form_of(self.output or "", self.format_)

    def write(self, result: Result) -> None:
        """Writes the result in its form, with one newline at the end; on a terminal in colours."""
        form = self._form()
        if form == "text" and self.output is None:
            text = str(result)
        else:
            text = FORMS.get(form).factory().write(result)
        write(text.rstrip("\n") + "\n", self.output, form)
        if self.output:
            say(f"Wrote {self.output}", err=True)


LOADING = Loading()
OUTPUT = Output()
QUESTION = QuestionOptions()


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The function as a command.

    A parameter whose type is a dataclass becomes its fields as options. A `NoiserError`, an
    `OSError` or a warning becomes a line on stderr, an error with exit status 2; any other
    exception is a defect and keeps its traceback.
    """
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in _parameters(function):
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(groups[parameter.name])
        else:
            parameters.append(parameter)
    parameters.append(Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Debug))

    def run(*, debug: bool, **values: Any) -> None:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            try:
                for name, group in groups.items():
                    values[name] = group(
                        **{option.name: values.pop(option.name) for option in fields(group)}
                    )
                if "loading" in groups and isinstance(
                    values["model"], str
                ):  # at once: imports take seconds
                    say(f"Loading {values['model']} ...", err=True)
                function(**values)
            except BrokenPipeError:  # typer ends quietly
                raise
            except (NoiserError, OSError) as error:
                if debug:
                    traceback.print_exc()
                say(f"noiser: error: {error}", err=True)
                raise typer.Exit(2) from None

    functools.update_wrapper(run, function)
    vars(run).pop("__wrapped__")  # else its signature would be taken
    run.__signature__ = Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _show_warning(message: Warning | str, *_where: Any) -> None:
    say(f"noiser: warning: {message}", err=True)


class Command(TyperCommand):
    """A command whose errors of usage suggest the likely intention."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left over."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            message = str(getattr(error, "message", ""))
            got, *known = re.findall("'([^']*)'", message) or [""]
            if "unexpected extra argument" in message:
                message += ". Put quotes around a text of several words, and commas between names."
            elif setting := _setting_of(message):
                message += f". Did you mean --engine-arg {setting}=...?"
            elif near := difflib.get_close_matches(got, known, 1):
                message += f" Did you mean {near[0]!r}?"
            error.message = message  # pyright: ignore[reportAttributeAccessIssue]
            raise


def _setting_of(message: str) -> str | None:
    """The setting of an endpoint that an unknown option is named like; None for others."""
    unknown = re.match(r"No such option: --([\w-]+)", message)
    name = unknown[1].replace("-", "_") if unknown else ""
    return name if name in _OF_ENDPOINTS else None


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function, or the fields of a dataclass, with their types."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in signature(function).parameters.values()
    ]


def parse_names(option: str, typed: str) -> list[str]:
    """Names with commas between them. Raises ParameterError where there is none, or one twice."""
    names = [name.strip() for name in typed.split(",") if name.strip()]
    if not names:
        raise ParameterError(f"{option}: got {typed!r}, expected names with commas between them.")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ParameterError(
            f"{option}: got {repeated[0]!r} twice, expected each name once. Leave one out."
        )
    return names


def parse_prompt(typed: str, *, chat: bool = False) -> types.Prompt:
    """The prompt as `to_prompt` makes it; `-` stands for stdin. The name of a file is a prompt,
    too, with a hint.
    """
    with contextlib.suppress(OSError):  # most prompts are too long for a name
        if typed != "-" and Path(typed).is_file():
            say(
                f"noiser: warning: the prompt is the name of a file; its text is read by: - < "
                f"{typed}",
                err=True,
            )
    return to_prompt(text_of("-") if typed == "-" else typed, chat)


def documents_of(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """(name, text) of text files, of those in folders, and of stdin for "-"."""
    from noiser.text.documents import read_documents

    documents: list[tuple[str, str]] = []
    for path in paths:
        if path.is_dir():
            documents += read_documents(path)
        else:
            documents.append((path.name, text_of(path)))
    if not documents:
        raise ParameterError("There is no source; expected --source with a text file or a folder.")
    return documents


def text_of(path: Path | str) -> str:
    """A file's text, or that of stdin for "-", without its last newline. Raises PromptError where
    it is not UTF-8.
    """
    file = None if str(path) == "-" else Path(path)
    try:
        data = file.read_bytes() if file else sys.stdin.buffer.read()
        return data.decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n")
    except OSError as error:
        raise PromptError(
            f"{str(file)!r:.60} is no file ({error.strerror}); expected one, or - for stdin."
        ) from None
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{file or 'stdin'} is not UTF-8 at byte {error.start}. Convert it to plain text."
        ) from None


def to_prompt(text: str, chat: bool) -> types.Prompt:
    """The text, or with `chat` a JSON list of messages or one user message."""
    if chat:
        _warn_of_tools(text)
    return json_messages(text) or [{"role": "user", "content": text}] if chat else text


def _warn_of_tools(text: str) -> None:
    """Says that the tools of a request in OpenAI's form are not read with its messages."""
    request = json_or_text(text)
    if isinstance(request, dict) and request.get("tools") and json_messages(text):
        say(
            f"noiser: warning: the request's {len(request['tools'])} tools are not in the prompt; "
            "a template that reads them gets them by --chat-template-arg tools=JSON",
            err=True,
        )


def with_images(prompt: types.Prompt, files: Iterable[Path] | None) -> types.Prompt:
    """The chat with pictures before the text of the user's last message."""
    from noiser.text.pictures import add_pictures

    pictures = [{"type": "image", "path": str(path)} for path in files or ()]
    if not pictures or isinstance(prompt, str):
        return prompt
    return add_pictures(prompt, pictures)


def parse_image_unit(typed: str) -> Any:
    """The unit of pictures as `noiser.attribute` reads it.

    >>> parse_image_unit("3x4"), parse_image_unit("0,0,10,20;10,0,20,20")
    ((3, 4), [(0.0, 0.0, 10.0, 20.0), (10.0, 0.0, 20.0, 20.0)])
    """
    if typed == "none":
        return None
    grid = re.fullmatch(r"(\d+)[x×](\d+)", typed)
    if grid is not None:
        return (int(grid[1]), int(grid[2]))
    if "," not in typed:
        return typed
    try:
        return [tuple(float(number) for number in box.split(",")) for box in typed.split(";")]
    except ValueError:
        raise ParameterError(
            f"--image-unit: got {typed!r:.60}, expected 4x4, image, none, or boxes such as "
            '"0,0,100,50;0,50,100,100".'
        ) from None


def parse_parameters(pairs: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """Hyper-parameters from `key=value` pairs. A value is read as JSON, else it is the text itself.

    >>> parse_parameters(["samples=20", "bounding=k_max", "exact=false"])
    {'samples': 20, 'bounding': 'k_max', 'exact': False}
    """
    parameters: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ParameterError(
                f"{option}: got {pair!r}, expected key=value, such as {option} samples=20."
            )
        if key in parameters:
            raise ParameterError(
                f"{option}: got {key!r} twice, expected each key once. Leave one out."
            )
        parameters[key] = json_or_text(value)
    return parameters
