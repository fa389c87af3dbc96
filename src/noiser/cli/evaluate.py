"""`noiser evaluate`."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from noiser import types
from noiser.checks import check_choice
from noiser.cli import options as o
from noiser.cli.terminal import progress_bar, say
from noiser.errors import ParameterError
from noiser.files import html_page, json_or_text

if TYPE_CHECKING:
    from noiser.evaluation import Evaluation

_STYLE = (
    ":root { color-scheme: light dark; font-family: system-ui, sans-serif; } "
    ".wide { overflow-x: auto; } th, td { padding: 0.2em 0.8em; text-align: start; } caption { text-align: start; }"
)


def evaluate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="-: one per line of stdin.")] = None,
    data: Annotated[str | None, typer.Option(help="A data set in place of prompts; see: noiser data list.")] = None,
    data_dir: o.DataFolder = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The most prompts to take.")] = None,
    category: Annotated[str | None, typer.Option(help="Of --data only this category, such as capital-world.")] = None,
    sample_seed: Annotated[int | None, typer.Option(help="Of --data a random sample of --limit prompts.")] = None,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "joint",
    set_: o.MethodSettings = None,
    against: Annotated[str, typer.Option(help="Other methods on the same prompts, with commas between.")] = "",
    metrics: Annotated[str, typer.Option(help="Names, with commas between; see: noiser metrics.")] = "faithfulness",
    metric_set: Annotated[o.Pairs, o.pairs("A setting of the metrics, such as masks=32 or k=[1,5]")] = None,
    judge: Annotated[str | None, typer.Option(help="Of answerability: local, local:NAME or openai:NAME.")] = None,
    judge_set: Annotated[o.Pairs, o.pairs("A setting of the judge, such as budget_tokens=50000")] = None,
    unit: Annotated[
        Literal[types.UnitName, types.AutoUnit, types.SpanUnit],
        typer.Option(help="What gets a score; turn: each message of a chat; spans: those that --data names."),
    ] = "token",
    max_new_tokens: o.MaxNewTokens = 1,
    target_unit: o.TargetUnitName = "token",
    chat: o.Chat = False,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Attributes every PROMPT, or those of a data set, and measures whether the attributions can be believed."""
    if bool(data) == bool(prompts) or (prompts and (category or sample_seed is not None)):
        raise ParameterError("Expected either PROMPTs or --data, and --category or --sample-seed only with --data.")
    from noiser.evaluation import evaluate as run
    from noiser.judges import kind_of, make_judge
    from noiser.methods import make_method
    from noiser.metrics import SETTINGS

    settings = o.parse_parameters(metric_set, "--metric-set")
    for name in settings:
        check_choice("setting of metrics", name, (*SETTINGS, "profile"))
    first, *others = o.parse_names("--method and --against", f"{method},{against}")
    methods = {first: make_method(first, **o.parse_parameters(set_))} | {name: make_method(name) for name in others}
    names, judge_settings = o.parse_names("--metrics", metrics), o.parse_parameters(judge_set, "--judge-set")
    examples = _load(data, data_dir, limit, category, sample_seed) if data else _read(prompts or [], chat)[:limit]
    early = judge and kind_of(judge) != "local"  # whatever it lacks is said before the model is loaded
    asked = make_judge(judge, **judge_settings) if judge and early else None
    lm = loading.load(model)
    asked = make_judge(judge, lm=lm, **judge_settings) if judge and not early else asked
    settings |= {"unit": unit, "max_new_tokens": max_new_tokens, "target_unit": target_unit, "seed": seed}
    results: dict[str, Evaluation] = {}
    for name, one in methods.items():
        with progress_bar(f"Evaluating {name}") as progress:
            results[name] = run(lm, examples, method=one, metrics=names, judge=asked, progress=progress, **settings)
    if paid := getattr(asked, "paid", 0):
        say(f"{paid:,} tokens were paid for at the judge's endpoint", err=True)
    _show(results, output)


def _show(results: dict[str, Evaluation], output: o.Output) -> None:
    """Writes one evaluation, or several with their differences from the first."""
    from noiser.attribution.store import to_jsonable
    from noiser.evaluation import differences
    from noiser.files import json_text

    (name, first), *others = results.items()
    tables, text, record = [each.to_html() for each in results.values()], str(first), first.to_dict()
    if others:
        gaps: Any = differences(results)
        title = f"{name} minus each other method, prompt by prompt; p_holm is corrected for all lines"
        tables.append(f"<p>{escape(title)}</p>{gaps.to_html(index=False, border=0)}")
        text = "\n\n".join([*map(str, results.values()), title, gaps.to_string(index=False)])
        evaluations = {name: each.to_dict() for name, each in results.items()}
        record = to_jsonable({"evaluations": evaluations, "differences": gaps.to_dict("records")})
    page = html_page("Evaluation", _STYLE, "".join(tables))
    output.write({"text": lambda: text, "json": lambda: json_text(record), "html": lambda: page})


def _load(name: str, data_dir: Path | None, limit: int | None, category: str | None, seed: int | None) -> list[Any]:
    """Examples of a data set; its notes go to stderr."""
    from noiser.data import load

    dataset = load(name, data_dir, limit, seed, category=category)
    for note in dataset.notes:
        say(f"{name}: {note}", err=True)
    return list(dataset.examples)


def _read(prompts: list[str], chat: bool) -> list[Any]:
    """The prompts; `-` stands for the lines of stdin that are not blank, texts or JSON objects with `prompt`."""
    lines = o.text_of("-").split("\n") if "-" in prompts else []
    typed = [o.parse_prompt(prompt, chat=chat) for prompt in prompts if prompt != "-" and prompt.strip()]
    read = [(json_or_text(line), o.to_prompt(line, chat)) for line in lines if line.strip()]
    return [*typed, *(value if isinstance(value, dict) and "prompt" in value else text for value, text in read)]
