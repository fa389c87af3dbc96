"""`noiser evaluate`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from noiser.cli import options as o
from noiser.cli.terminal import progress_bar, say
from noiser.errors import ParameterError
from noiser.pages import html_page
from noiser.types import Profile, Prompt, RemovalName, SpanUnit

if TYPE_CHECKING:
    from noiser.data import Example
    from noiser.evaluation import Evaluation


_STYLE = (
    ":root { color-scheme: light dark; font-family: system-ui, sans-serif; } "
    ".wide { overflow-x: auto; } th, td { padding: 0.2em 0.8em; text-align: start; } caption { text-align: start; }"
)


def evaluate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Prompts; - reads one per line from stdin.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="A data set in place of prompts; see: noiser data list.")] = None,
    data_dir: o.DataFolder = None,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "noiser",
    set_: o.MethodSettings = None,
    against: Annotated[
        str, typer.Option(help="Other methods, with commas between them, to compare with on the same prompts.")
    ] = "",
    metrics: Annotated[str, typer.Option(help="Names, with commas between them.")] = "faithfulness",
    judge: Annotated[
        str | None, typer.Option(help="Of answerability: local (the model itself), local:NAME or openai:NAME.")
    ] = None,
    judge_set: Annotated[
        list[str] | None,
        typer.Option(
            "--judge-set", metavar="KEY=VALUE", help="A setting of the judge, such as budget_tokens=50000; repeatable."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The most prompts to take.")] = None,
    category: Annotated[str | None, typer.Option(help="Of --data only this category, such as capital-world.")] = None,
    sample_seed: Annotated[
        int | None, typer.Option("--sample-seed", help="Of --data a random sample of --limit, not the first ones.")
    ] = None,
    unit: Annotated[
        Literal[o.PromptUnit, SpanUnit],
        typer.Option(help="What gets a score; turn: each message of a chat; spans: those that --data names."),
    ] = "token",
    max_new_tokens: o.MaxNewTokens = None,
    target_unit: o.TargetUnitName = "token",
    masks: Annotated[
        int | None, typer.Option(min=1, help="Mask samples per prompt; unless given 10 (lds: 64, profile authors: 1).")
    ] = None,
    draws: Annotated[
        int, typer.Option(min=1, help="Random scores, and permutations, that each reference is the mean of.")
    ] = 10,
    normalization: Annotated[
        str | None, typer.Option(help="How scores become shares; each metric's own unless given.")
    ] = None,
    removal: Annotated[RemovalName, typer.Option(help="How metrics that remove whole units do it.")] = "zero",
    k: Annotated[
        list[int] | None,
        typer.Option("-k", min=1, help="Number of highest units, of top_k and gold_spans; repeatable."),
    ] = None,
    profile: Annotated[Profile, typer.Option(help="Definitions of the paper, or of its authors' script.")] = "paper",
    chat: o.Chat = False,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Attributes every PROMPT, or those of a data set, and measures whether the attributions can be believed."""
    selects = category is not None or sample_seed is not None
    for ignored, reason in (  # options that would be ignored
        (data and prompts, "PROMPT and --data: got both, expected one of them."),
        (not data and selects, "--category and --sample-seed choose from a data set; expected --data with them."),
        (not data and data_dir is not None, "--data-dir is the folder of a data set; expected --data with it."),
        (not data and unit == "spans", "--unit spans are the spans of a data set; expected --data with it."),
        (data and chat, "--chat says how PROMPT is read; expected no --data with it. Leave one of them out."),
        (judge_set and not judge, "--judge-set is a setting of a judge; expected --judge with it."),
    ):
        if ignored:
            raise ParameterError(reason)
    examples = _load(data, data_dir, limit, category, sample_seed) if data else _read(prompts or [], chat=chat)[:limit]
    names = o.parse_names("--metrics", metrics)
    parameters, judge_parameters = o.parse_parameters(set_), o.parse_parameters(judge_set)

    from noiser.evaluation import differences
    from noiser.evaluation import evaluate as run
    from noiser.files import csv_text, json_text
    from noiser.judges import kind_of, make_judge
    from noiser.methods import make_method
    from noiser.metrics import METRICS
    from noiser.metrics.metric import TOP, check_read

    typed = judge_parameters.get("base_url")
    if judge and kind_of(judge) == "openai" and typed and "api_key_env" not in judge_parameters:
        from noiser.endpoint import is_private

        if is_private(str(typed)):  # a server of one's own in a local network works without
            judge_parameters.setdefault("api_key", os.environ.get("OPENAI_API_KEY"))
    others = o.parse_names("--against", against) if against else []
    chosen = {method: make_method(method, **parameters)} | {name: make_method(name) for name in others}
    if len(chosen) <= len(others):
        raise ParameterError(f"--against is {against!r} and --method {method!r}; expected each method once.")
    known = [METRICS.get(name).factory() for name in names]  # before the model is loaded
    settings: dict[str, Any] = {
        "masks": masks,
        "draws": draws,
        "normalization": normalization,
        "removal": removal,
        "k": tuple(k or TOP),
    }
    check_read(known, settings | {"judge": judge}, lambda name: f"-{'-' * (len(name) > 1)}{name}")
    if not judge and (judged := [name for name, metric in zip(names, known, strict=True) if metric.needs_judge]):
        raise ParameterError(f"{judged[0]} needs a judge; expected --judge local, local:NAME or openai:NAME with it.")
    lm = loading.load(model)
    made_judge = make_judge(judge, lm=lm, **judge_parameters) if judge else None
    results: dict[str, Evaluation] = {}
    for name, one in chosen.items():
        with progress_bar(f"Evaluating {name}" if others else "Evaluating") as progress:
            results[name] = run(
                lm,
                examples,
                method=one,
                metrics=names,
                judge=made_judge,
                unit=unit,
                max_new_tokens=max_new_tokens or 1,
                target_unit=target_unit,
                seed=seed,
                **settings,
                profile=profile,
                progress=progress,
            )
    if paid := getattr(made_judge, "paid", 0):
        say(f"{paid:,} tokens were paid for at the judge's endpoint", err=True)
    every = list(results.values())
    gaps: Any = differences(results) if others else None
    title = f"{method} minus each other method, prompt by prompt; p_holm is corrected for all lines"
    text = [] if gaps is None else [f"{title}\n\n{gaps.to_string(index=False)}"]
    table = [] if gaps is None else [f"<p>{escape(title)}</p>{gaps.to_html(index=False, border=0)}"]
    output.write(
        {
            "text": lambda: "\n\n".join([*map(str, every), *text]),
            "json": lambda: every[0].dumps() if gaps is None else json_text(_compared(results, gaps)),
            "html": lambda: html_page("Evaluation", _STYLE, "".join([*(each.to_html() for each in every), *table])),
            "csv": lambda: csv_text(*(each.rows for each in every)),
            "md": lambda: "\n".join([*(each.to_markdown() for each in every), *(f"```\n{one}\n```" for one in text)]),
        }
    )


def _compared(results: Mapping[str, Evaluation], gaps: Any) -> Any:
    from noiser.attribution.store import to_jsonable

    evaluations = {name: each.to_dict() for name, each in results.items()}
    return to_jsonable({"evaluations": evaluations, "differences": gaps.to_dict("records")})


def _load(name: str, data_dir: Path | None, limit: int | None, category: str | None, seed: int | None) -> list[Example]:
    """The first examples of a data set, or a sample; what was done to them is said on stderr."""
    from noiser.data import load

    dataset = load(name, data_dir, limit, seed, category=category)
    for note in dataset.notes:
        say(f"{name}: {note}", err=True)
    return list(dataset.examples)


def _read(typed: list[str], *, chat: bool) -> list[Prompt]:
    """The prompts; `-` stands for the lines of stdin that are not blank."""
    texts = [text for prompt in typed for text in (re.split(r"\r?\n", o.read_stdin()) if prompt == "-" else [prompt])]
    prompts = [o.to_prompt(text, chat=chat) for text in texts if text.strip()]
    if not prompts:
        raise ParameterError(
            "There is no prompt; expected at least one, as an argument, a line on stdin, or by --data."
        )
    return prompts
