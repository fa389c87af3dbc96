"""Tables of what no table of the paper has: every other metric, and who leads where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noiser.bench.plan import MethodEntry, MetricEntry
from noiser.metrics.bootstrap import mean
from noiser.metrics.metric import Summary
from noiser.registry import unversioned
from noiser.report.choices import metric_of, named, ordinary, sources, without_boundings
from noiser.report.grid import Asked, grid, mark_best, number
from noiser.report.names import data_title, method_title
from noiser.report.results import Results
from noiser.report.table import DASH, Head, Line, Number, Table, shown

__all__ = ["glance", "others"]

_HEADLINE = {
    "faithfulness": "faithfulness",
    "area": "area",
    "rank_area": "area by rank",
    "answerability_rate": "answerability rate",
    "answerability_top5_rate": "top-5 answerability rate",
    "minimum_share": "minimum top-k%",
}
"""The numbers that the first table is about; metrics with one of them have a table of their own."""

_PERCENT = frozenset({"answerability_rate", "answerability_top5_rate", "minimum_share"})


def glance(results: Results) -> Iterator[Table]:
    """Which method leads, and which are not told apart from it, on one line a model and data set with such a number."""
    heads: dict[str, None] = {}
    found: list[tuple[str, dict[str, str]]] = []
    for model in results.models:
        for data in results.data:
            leaders = {
                one.name: _leader(results, one, methods, model.label, data.label)
                for one, methods in _headline(results, data.label)
            }
            leaders = {name: text for name, text in leaders.items() if text}
            heads |= dict.fromkeys(leaders)
            if leaders:
                found.append((f"{model.label}, {data_title(data)}", leaders))
    lines = [Line(label, tuple(leaders.get(head, DASH) for head in heads)) for label, leaders in found]
    if heads:
        yield Table(
            key="glance",
            title="At a glance",
            corner="model, data",
            heads=tuple(map(Head, heads)),
            lines=tuple(lines),
            notes=(
                "The best method of each column of the tables below, with its value and n, and how many others are "
                "not told apart from it (paired differences, on the prompts that both have).",
            ),
        )


def _headline(results: Results, data: str) -> list[tuple[Asked, list[MethodEntry]]]:
    """The numbers, each with the methods of its table: other boundings are not in that of faithfulness."""
    found: list[tuple[Asked, list[MethodEntry]]] = []
    for name, head in _HEADLINE.items():
        for source in sources(results, name, data):
            methods = ordinary(results, [source], data)
            one = Asked.of(source, name, f"{head}{source.suffix}", "percent" if name in _PERCENT else "decimal")
            found.append((one, without_boundings(methods) if name == "faithfulness" else methods))
    return found


def _leader(results: Results, one: Asked, methods: Sequence[MethodEntry], model: str, data: str) -> str:
    cells = [one.cell(model, data, method.label) for method in methods]
    numbers = mark_best(results, cells, one.summary, [number(results, cell, one) for cell in cells])
    level = [method_title(m.label) for m, found in zip(methods, numbers, strict=True) if found.mark == "level"]
    for method, found in zip(methods, numbers, strict=True):
        if found.mark == "best":
            rest = f"; level with {', '.join(level) if len(level) < 3 else f'{len(level)} others'}" if level else ""
            return f"{method_title(method.label)} {_said(found)}{rest}"
    return ""


def _said(found: Number) -> str:
    value, _, base, _, unit = shown(found)
    return f"{value}{unit} ({base})"


def others(results: Results) -> Iterator[Table]:
    """All numbers of the metrics that have no table of their own."""
    names = dict.fromkeys(unversioned(measure.name) for measure in results.measures)
    for data in results.data:
        for source in (source for name in names for source in named(results, name, data.label)):
            measure = source.measure
            if unversioned(measure.name) == "localisation" or _HEADLINE.keys() & source.summaries.keys():
                continue
            asked, methods = _asked(results, measure, data.label), ordinary(results, [source], data.label)
            if asked and methods:
                yield from grid(
                    results,
                    key=source.key(unversioned(measure.name).replace("_", "-"), data),
                    title=f"{measure.label.replace('_', ' ').capitalize()} on {data_title(data)}",
                    data=data.label,
                    methods=methods,
                    asked=asked,
                    notes=[*(f"{one.name}: {one.summary.scale.meaning}." for one in asked)],
                )


def _asked(results: Results, measure: MetricEntry, data: str) -> list[Asked]:
    metric = metric_of(measure)
    if metric is None:
        return []
    summaries = dict(metric.summaries)
    if metric.others is not None:
        summed = {column for summary in summaries.values() for column in summary.columns}
        columns = results.columns(data, measure.label)
        summaries |= {column: Summary(mean, (column,), metric.others) for column in columns if column not in summed}
    return [Asked(name.replace("_", " "), measure.label, summary) for name, summary in summaries.items()]
