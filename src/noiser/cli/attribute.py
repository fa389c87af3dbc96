"""`noiser attribute`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from noiser.cli.parsing import check_writable, parse_parameters, parse_prompt
from noiser.cli.progress import progress_bar
from noiser.errors import ParameterError

if TYPE_CHECKING:
    from noiser.attribution import Attribution

__all__ = ["attribute"]

Format = Literal["text", "json", "html"]


def attribute(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The prompt; - reads it from stdin.", show_default=False)
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Built-in name, folder, .gguf file or hub id.")
    ] = "gemma-3-270m",
    method: Annotated[str, typer.Option(help="A method's name; see: noiser methods.")] = "noiser",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A hyper-parameter of the method; repeatable."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The continuation to explain; the greedy one if left out.", show_default=False)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of the greedy continuation to explain; 1 if left out.", show_default=False),
    ] = None,
    foil: Annotated[str | None, typer.Option(help='"Why the target rather than this?"', show_default=False)] = None,
    unit: Annotated[Literal["token", "word", "sentence"], typer.Option(help="What gets a score.")] = "token",
    chat: Annotated[
        bool, typer.Option("--chat", help="PROMPT is a user's message, or a JSON list of messages.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "auto",
    device: Annotated[str, typer.Option(help="Such as cpu, cuda, cuda:1.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="How to spread the model, such as auto.", show_default=False)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.", show_default=False)] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    format_: Annotated[Format, typer.Option("--format", help="Of the result.")] = "text",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result here.", show_default=False)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,  # noqa: ARG001 - read by what wraps commands
) -> None:
    """Shows which parts of PROMPT made the model say what it says."""
    check_writable(output)
    if target is not None and max_new_tokens is not None:
        raise ParameterError("--target and --max-new-tokens: got both, expected one. The target says its own length.")
    asked, parameters = parse_prompt(prompt, chat=chat), parse_parameters(set_ or ())

    from noiser.methods import attribute as run
    from noiser.methods import make_method
    from noiser.model import load_model

    chosen = make_method(method, **parameters)
    lm = load_model(
        model,
        dtype=dtype,
        device=device,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    with progress_bar("Attributing") as progress:
        att = run(
            lm,
            asked,
            method=chosen,
            target=target,
            foil=foil,
            max_new_tokens=max_new_tokens or 1,
            unit=unit,
            seed=seed,
            progress=progress,
        )
    _show(att, format_, output)


def _show(att: Attribution, format_: Format, output: Path | None) -> None:
    from noiser.attribution.store import dumps, write_text

    if output is None and format_ == "text":
        print(att)
        return
    text = att.to_html() if format_ == "html" else dumps(att) if format_ == "json" else f"{att}\n"
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
