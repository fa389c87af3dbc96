"""`noiser evaluate`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from noiser.cli import options as o
from noiser.cli.parsing import check_writable, parse_parameters, parse_prompt, read_stdin
from noiser.cli.progress import progress_bar
from noiser.errors import ParameterError
from noiser.types import Prompt

if TYPE_CHECKING:
    from noiser.data import Example

__all__ = ["evaluate"]


@o.loads_a_model
def evaluate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; - reads one a line from stdin.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A data set in place of prompts; see: noiser data list.")] = None,
    data_dir: o.DataFolder = None,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "noiser",
    set_: o.MethodSettings = None,
    metrics: Annotated[str, typer.Option(help="Names, with commas between them.")] = "faithfulness",
    judge: Annotated[str | None, typer.Option(help="Of answerability: local or openai:MODEL.")] = None,
    judge_set: Annotated[
        list[str] | None,
        typer.Option(
            "--judge-set", metavar="KEY=VALUE", help="A setting of the judge, such as budget_usd=1; repeatable."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The most prompts to take.")] = None,
    category: Annotated[str | None, typer.Option(help="Of --data only this category, such as capital-world.")] = None,
    sample_seed: Annotated[
        int | None, typer.Option("--sample-seed", help="Of --data a random sample of --limit, not the first ones.")
    ] = None,
    unit: o.UnitName = "token",
    max_new_tokens: o.MaxNewTokens = None,
    masks: Annotated[int | None, typer.Option(min=1, help="Mask samples a prompt; 10 unless given.")] = None,
    normalization: Annotated[
        str | None, typer.Option(help="How scores become shares; each metric's own unless given.")
    ] = None,
    profile: Annotated[Literal["paper", "authors"], typer.Option(help="Whose definitions.")] = "paper",
    chat: o.Chat = False,
    seed: o.Seed = 0,
    loading: o.Loading = o.DEFAULT_LOADING,
    format_: o.Format = "text",
    output: o.Output = None,
    debug: o.Debug = False,
) -> None:
    """Attributes every PROMPT, or those of a data set, and measures whether the attributions can be believed."""
    check_writable(output)
    if data and prompts:
        raise ParameterError("PROMPT and --data: got both, expected one of them.")
    _check_company(data, data_dir, category, sample_seed, judge, judge_set, chat=chat)
    asked = _examples(data, data_dir, limit, category, sample_seed) if data else _read(prompts or [], chat=chat)[:limit]
    names = [name.strip() for name in metrics.split(",") if name.strip()]
    parameters, judge_parameters = parse_parameters(set_ or ()), parse_parameters(judge_set or ())
    if (judge or "").startswith("openai:") and "base_url" in judge_parameters and "api_key_env" not in judge_parameters:
        judge_parameters.setdefault("api_key", os.environ.get("OPENAI_API_KEY"))  # for an address that the user types

    from noiser.evaluation import evaluate as run
    from noiser.judges import make_judge
    from noiser.methods import make_method
    from noiser.metrics import METRICS

    chosen = make_method(method, **parameters)
    for name in names:  # before the model is loaded
        METRICS.get(name)
    lm = loading.load(model)
    asks = make_judge(judge, lm=lm, **judge_parameters) if judge else None
    with progress_bar("Evaluating") as progress:
        result = run(
            lm,
            asked,
            method=chosen,
            metrics=names,
            judge=asks,
            unit=unit,
            max_new_tokens=max_new_tokens or 1,
            seed=seed,
            masks=masks,
            normalization=normalization,
            profile=profile,
            progress=progress,
        )
    if bill := getattr(asks, "bill", None):  # what an endpoint was asked, and what it cost
        typer.echo(str(bill), err=True)
    forms = {"text": lambda: str(result), "json": result.dumps, "html": lambda: result.to_html(page=True)}
    text = forms[format_]()
    o.write(text.rstrip("\n") + "\n", output, format_)


def _check_company(
    data: str | None,
    data_dir: Path | None,
    category: str | None,
    sample_seed: int | None,
    judge: str | None,
    judge_set: list[str] | None,
    *,
    chat: bool,
) -> None:
    """Refuses options that would be ignored."""
    if not data and (category is not None or sample_seed is not None):
        raise ParameterError("--category and --sample-seed choose from a data set; expected --data with them.")
    if not data and data_dir is not None:
        raise ParameterError("--data-dir is the folder of a data set; expected --data with it.")
    if data and chat:
        raise ParameterError("--chat says how PROMPT is read; expected no --data with it. Leave one of them out.")
    if not judge and judge_set:
        raise ParameterError("--judge-set is a setting of a judge; expected --judge with it.")


def _examples(
    name: str, data_dir: Path | None, limit: int | None, category: str | None, seed: int | None
) -> list[Example]:
    """The first examples of a data set, or a sample; what was done to them is said on stderr."""
    from noiser.data import load

    with progress_bar(f"Fetching {name}") as progress:
        found = load(name, data_dir, limit, seed, category=category, progress=progress)
    for note in found.notes:
        typer.echo(f"{name}: {note}", err=True)
    return list(found.examples)


def _read(typed: list[str], *, chat: bool) -> list[Prompt]:
    """The prompts; `-` stands for the lines of stdin that are not blank."""
    texts = [text for prompt in typed for text in (read_stdin().splitlines() if prompt == "-" else [prompt])]
    prompts = [parse_prompt(text, chat=chat) for text in texts if text.strip()]
    if not prompts:
        raise ParameterError(
            "There is no prompt; expected at least one, as an argument, a line on stdin, or by --data."
        )
    return prompts
