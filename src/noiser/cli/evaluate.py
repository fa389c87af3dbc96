"""`noiser evaluate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from noiser.cli.parsing import check_writable, parse_parameters, parse_prompt
from noiser.cli.progress import progress_bar
from noiser.errors import ParameterError

__all__ = ["evaluate"]


def evaluate(
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT...", help="Prompts; - reads one a line from stdin.", show_default=False),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="Built-in name, folder, .gguf file or hub id.")
    ] = "gemma-3-270m",
    method: Annotated[str, typer.Option(help="A method's name; see: noiser methods.")] = "noiser",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A hyper-parameter of the method; repeatable."),
    ] = None,
    metrics: Annotated[str, typer.Option(help="Names, with commas between them.")] = "faithfulness",
    judge: Annotated[
        str | None, typer.Option(help="Of answerability: local or openai:MODEL.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The most prompts to take.", show_default=False)] = None,
    unit: Annotated[Literal["token", "word", "sentence"], typer.Option(help="What gets a score.")] = "token",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the continuation to explain.")] = 1,
    masks: Annotated[
        int | None, typer.Option(min=1, help="Mask samples a prompt. [default: 10]", show_default=False)
    ] = None,
    normalization: Annotated[
        str | None, typer.Option(help="How scores become shares. [default: the metric's own]", show_default=False)
    ] = None,
    profile: Annotated[Literal["paper", "authors"], typer.Option(help="Whose definitions.")] = "paper",
    chat: Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message, or JSON messages.")] = False,
    seed: Annotated[int, typer.Option(help="Of all random numbers.")] = 0,
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "auto",
    device: Annotated[str, typer.Option(help="Such as cpu, cuda, cuda:1.")] = "auto",
    format_: Annotated[Literal["text", "json", "html"], typer.Option("--format", help="Of the result.")] = "text",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the result here.", show_default=False)
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Attributes every PROMPT and measures whether the attributions can be believed."""
    check_writable(output)
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    asked = [parse_prompt(text, chat=chat) for text in _texts(prompts)][:limit]
    if not asked:
        raise ParameterError("There is no prompt; expected at least one, as an argument or a line on stdin.")
    parameters = parse_parameters(set_ or ())

    from noiser.evaluation import evaluate as run
    from noiser.methods import make_method
    from noiser.metrics import METRICS
    from noiser.model import load_model

    chosen = make_method(method, **parameters)
    for name in names:  # before the model is loaded
        METRICS.get(name)
    lm = load_model(model, dtype=dtype, device=device)
    with progress_bar("Evaluating") as progress:
        result = run(
            lm,
            asked,
            method=chosen,
            metrics=names,
            judge=judge,
            unit=unit,
            max_new_tokens=max_new_tokens,
            seed=seed,
            masks=masks,
            normalization=normalization,
            profile=profile,
            progress=progress,
        )
    text = {"text": str, "json": type(result).dumps, "html": type(result).to_html}[format_](result)
    _write(text if text.endswith("\n") else text + "\n", output)


def _texts(prompts: list[str]) -> list[str]:
    """The prompts; `-` stands for the lines of stdin that are not blank."""
    return [
        text
        for prompt in prompts
        for text in ([line for line in sys.stdin.read().splitlines() if line.strip()] if prompt == "-" else [prompt])
    ]


def _write(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    from noiser.attribution.store import write_text

    write_text(output, text)
