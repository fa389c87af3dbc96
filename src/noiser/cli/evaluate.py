"""The measurements: `noiser evaluate`, `noiser bench` and `noiser report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from noiser import types
from noiser.cli import options as o
from noiser.cli.terminal import progress_bar, say, write
from noiser.errors import ParameterError, RunError
from noiser.files import json_or_text
from noiser.progress import quicker_ways

bench = typer.Typer(
    no_args_is_help=True, help="Runs benchmarks: plans of models, data sets, methods and metrics."
)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", file_okay=False, help="The benchmark's folder.")
]
NewFolder = Annotated[
    Path, typer.Option("--output", "-o", metavar="DIR", file_okay=False, help="Files go here.")
]


def evaluate(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="-: one per line of stdin.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A data set in place of prompts; see: noiser data list.")
    ] = None,
    data_dir: o.DataFolder = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The most prompts to take.")] = None,
    model: o.Model = "gemma-3-270m",
    method: o.MethodName = "joint",
    set_: o.MethodSettings = None,
    against: Annotated[
        str, typer.Option(help="Other methods on the same prompts, with commas between.")
    ] = "",
    metrics: Annotated[
        str, typer.Option(help="Names, with commas between; see: noiser metrics.")
    ] = "faithfulness",
    metric_set: Annotated[
        o.Pairs, o.pairs("A setting of the metrics, such as masks=32 or k=[1,5]")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="Of answerability: local, local:NAME or openai:NAME.")
    ] = None,
    judge_set: Annotated[
        o.Pairs, o.pairs("A setting of the judge, such as budget_tokens=50000")
    ] = None,
    unit: Annotated[
        Literal[types.UnitName, types.AutoUnit, types.SpanUnit],
        typer.Option(
            help="What gets a score; turn: each message of a chat; spans: those that --data names."
        ),
    ] = "word",
    max_new_tokens: o.MaxNewTokens = 1,
    target_unit: o.TargetUnitOption = "token",
    chat: o.Chat = False,
    seed: o.Seed = 0,
    loading: o.Loading = o.LOADING,
    output: o.Output = o.OUTPUT,
) -> None:
    """Attributes every PROMPT, or those of a data set, and measures whether the attributions can be
    believed.
    """
    if bool(data) == bool(prompts):
        raise ParameterError("Expected either PROMPTs or --data.")
    from noiser.data import load
    from noiser.evaluation import Evaluations
    from noiser.evaluation import evaluate as run
    from noiser.judges import kind_of, make_judge
    from noiser.methods import make_method
    from noiser.metrics import metrics_of

    settings = o.parse_parameters(metric_set, "--metric-set")
    first, *others = o.parse_names("--method and --against", f"{method},{against}")
    methods = {first: make_method(first, **o.parse_parameters(set_))} | {
        name: make_method(name) for name in others
    }
    names = o.parse_names("--metrics", metrics)
    judge_settings = o.parse_parameters(judge_set, "--judge-set")
    metrics_of(names, settings | {"judge": judge})
    examples = load(data, data_dir, limit) if data else _read(prompts or [], chat)[:limit]
    for note in getattr(examples, "notes", ()):
        say(f"{data}: {note}", err=True)
    early = (
        judge and kind_of(judge) != "local"
    )  # whatever it lacks is said before the model is loaded
    asked = make_judge(judge, **judge_settings) if judge and early else None
    lm = loading.load(model)
    asked = make_judge(judge, lm=lm, **judge_settings) if judge and not early else asked
    settings |= {
        "unit": unit,
        "max_new_tokens": max_new_tokens,
        "target_unit": target_unit,
        "seed": seed,
    }
    results = Evaluations()
    for name, one in methods.items():
        quicker = quicker_ways(unit, name)
        with progress_bar(f"Evaluating {name}", quicker=quicker) as progress:
            results[name] = run(
                lm, examples, method=one, metrics=names, judge=asked, progress=progress, **settings
            )
    if paid := getattr(asked, "paid", 0):
        say(f"{paid:,} tokens were paid for at the judge's endpoint", err=True)
    output.write(results)


def compare_evaluations(paths: Sequence[str], output: o.Output, *, others_given: bool) -> None:
    """Shows saved evaluations, and the first minus each of the others; other options would change
    nothing.
    """
    from noiser.evaluation import Evaluations

    for path in paths:
        if not Path(path).is_file():
            raise ParameterError(
                f"{path!r:.60} is not a file. Put quotes around a text of several words, and "
                f"commas "
                "between names; or give files that noiser evaluate -o wrote, such as a.json b.json."
            )
    if others_given:
        raise ParameterError(
            "Saved evaluations are compared as they are. Leave out all options but --format and -o."
        )
    results = Evaluations()
    for path in paths:
        found = Evaluations.load(path)
        for method, evaluation in found.items():
            name = path if len(found) == 1 else f"{path}: {method}"
            if name in results:
                raise ParameterError(f"{path!r} is given twice. Give each file once.")
            results[name] = evaluation
    output.write(results)


def _read(prompts: list[str], chat: bool) -> list[Any]:
    """The prompts; `-` stands for the lines of stdin that are not blank, texts or JSON objects with
    `prompt`.
    """
    read: list[Any] = [
        o.parse_prompt(prompt, chat=chat) for prompt in prompts if prompt != "-" and prompt.strip()
    ]
    for line in filter(str.strip, o.text_of("-").split("\n") if "-" in prompts else ()):
        value = json_or_text(line) if line.lstrip().startswith("{") else None
        read.append(
            value if isinstance(value, dict) and "prompt" in value else o.to_prompt(line, chat)
        )
    return read


def run(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="The plan; see docs/bench.md.")],
    output: NewFolder,
    executor: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Processes of this machine, or actors of a Ray cluster."),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(
            help="How many; 0: this process alone. Unless given, one, or all of the cluster's."
        ),
    ] = None,
    data_dir: o.DataFolder = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Do rows again that are errors.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the plan, and count its rows.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run models' own code, where the plan says so."),
    ] = False,
) -> None:
    """Makes the rows of a plan that are not stored yet.

    Every job is stored as soon as it is finished: stopped in whatever way and started again, no job
    is done twice.
    """
    from noiser.bench.run import keys_sent, most_rows, run_bench

    if dry_run:
        say(f"At most {most_rows(plan, data_dir):,} rows.")
        return
    for line in keys_sent(plan):
        say(line, err=True)
    options: dict[str, Any] = {"executor": executor, "workers": workers, "data_dir": data_dir}
    options |= {"retry_errors": retry_errors, "trust_remote_code": trust_remote_code}
    with progress_bar("rows", patience=0, announced=False) as progress:
        outcome = run_bench(plan, output, **options, progress=progress)
    say(f"Stored {outcome.rows:,} rows in {output}, {outcome.errors:,} of them errors.", err=True)
    if outcome.lost:
        given_up = f"{len(outcome.lost)} jobs were given up: {'; '.join(outcome.lost)}"
        raise RunError(f"{given_up}. Everything else is stored; the same command tries them again.")


def status(folder: Folder) -> None:
    """Shows how far a benchmark is."""
    from noiser.bench.run import status as status_of

    say(status_of(folder))


def pack(folder: Folder, output: NewFolder) -> None:
    """Copies a benchmark's plan and rows without its texts, small enough for git; reports are made
    of it as well.
    """
    from noiser.bench import Store

    for path in Store(folder).pack(output):
        say(path)


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", file_okay=False, help="The benchmark's folder; several are joined."
        ),
    ],
    format_: Annotated[
        Literal["md", "latex", "csv", "all"],
        typer.Option("--format", help="Form of the tables; all writes each."),
    ] = "md",
    figures: Annotated[
        bool, typer.Option("--figures", help="Also figures, as SVG and PNG.")
    ] = False,
    html: Annotated[bool, typer.Option("--html", help="Also one page with everything.")] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Only this method of the plan; repeatable."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Only this metric of the plan; repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", file_okay=False, help="Write files here."),
    ] = None,
) -> None:
    """Tables, figures and a page of the rows that a benchmark stored in DIR. No model runs.

    Several folders, with the same seed and other methods on the same prompts, become one report.
    """
    from noiser.bench import Store
    from noiser.bench.store import inside, write_files
    from noiser.report import FORMATS, join, report_files, select

    store = select(join([*map(Store, folders)]), method or (), metric or ())
    place = output or inside(folders[0], "report")
    with progress_bar("Reporting", announced=False) as progress:
        forms = FORMATS if format_ == "all" else (format_,)
        made = report_files(store, forms, figures=figures, html=html, progress=progress)
    if output or figures or html or format_ == "all":
        for path in write_files(place, made):
            say(path)
    else:
        write(made[FORMATS[format_]].decode(), None, format_)
    if figures and not any(name.endswith(".svg") for name in made):
        say("No figure: no number that is drawn has an interval; that takes six prompts.", err=True)


for name, function in (("run", run), ("status", status), ("pack", pack)):
    bench.command(name, cls=o.Command)(o.command(function))
