"""All numbers of a benchmark as one DataFrame of cells, and the tables that are pivots of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from noiser import numbers
from noiser.bench import Store
from noiser.bench.plan import DataEntry, MetricEntry, Plan, combined
from noiser.bench.samples import Selection
from noiser.bench.store import ATTRIBUTION
from noiser.evaluation import estimated, paired
from noiser.metrics import Summary
from noiser.metrics.bootstrap import holm
from noiser.report.paper import data_of, model_of, printed, published
from noiser.report.results import COSTS, LABELS, Frame, rows_of, scope, summaries_of
from noiser.types import Progress

DASH = "–"
"""Stands where there is no number; never 0."""

HEADLINES = (
    "faithfulness", "area", "rank_area", "lds", "insertion_area", "answerability_rate", "answerability_top5_rate",
    "minimum_share", "drop", "hold", "naopc", "auprc", "mrr", "critical",
)  # fmt: skip
"""The numbers of the first table, for metrics that have one of them; other metrics are there by their first number."""


def cells(store: Store, confidence: float = 0.95, progress: Progress | None = None) -> Frame:
    """Every number of a benchmark, one line per data set, metric, model, method and number that the plan asks for.

    `value`, `low`, `high` and `n` are the estimate over prompts; `failed` counts prompts with an error. `mark` is
    "best" for the best value of its column (one number and model, methods of one profile), among those with an
    interval and at least half of the column's largest n. `gap` and `p` are of the paired difference between the best
    and this method, over the prompts that both have; p is corrected by Holm's method for all p of the data set and
    metric. Methods that are not significantly worse than the best have the mark "level". `paper` is the number that
    the paper printed, `reason` says what is missing.

    Args:
        store: a run's folder, or a packed one.
        confidence: of the intervals; 1 - confidence is the level of the tests.
        progress: called with (done, expected) tables.
    """
    rows, plan = rows_of(store), store.plan
    parts = {labels: part.set_index("example") for labels, part in rows.groupby(LABELS, sort=False)}
    planned = _planned(plan)
    lines: list[dict[str, Any]] = []
    for done, ((data, metric), columns) in enumerate(planned.items()):
        if progress is not None:
            progress(done, len(planned))
        lines += _Table(plan, data, metric, confidence).lines(columns, parts, rows.iloc[:0].set_index("example"))
    return pd.DataFrame(lines)


def _planned(plan: Plan) -> dict[tuple[str, str], dict[tuple[str, str], list[str]]]:
    """By data set and metric, then by model and profile: the methods that the plan has."""
    names = product(plan.labels("data"), [*plan.labels("metrics"), ATTRIBUTION])
    planned: dict[tuple[str, str], dict[tuple[str, str], list[str]]] = {name: {} for name in names}
    for model, data in product(plan.labels("models"), plan.labels("data")):
        for method, metric, _ in plan.kinds(model, data):
            profile = plan.entry("methods", method).profile
            planned[data, metric].setdefault((model, profile), []).append(method)
    return {name: columns for name, columns in planned.items() if columns}


class _Table(NamedTuple):
    """One data set and metric."""

    plan: Plan
    data: str
    metric: str
    confidence: float

    @property
    def entry(self) -> MetricEntry | None:
        return _entry(self.plan, self.metric)

    def lines(
        self, columns: Mapping[tuple[str, str], Sequence[str]], parts: Mapping[Any, Frame], empty: Frame
    ) -> list[dict[str, Any]]:
        """The cells, with p-values corrected for all of them."""
        groups = [
            (model, {method: parts.get((model, self.data, method, self.metric), empty) for method in methods})
            for (model, _), methods in columns.items()
        ]
        measured = {name for _, rows in groups for part in rows.values() for name in part.columns[part.notna().any()]}
        lines: list[dict[str, Any]] = []
        for model, rows in groups:
            for number, summary in summaries_of(self.entry, sorted(measured)).items():
                if not measured or measured.issuperset(summary.columns):
                    lines += self._column(model, number, summary, rows)
        for line, p in zip(lines, holm([line["p"] for line in lines]), strict=True):
            level = not line["mark"] and p >= 1 - self.confidence
            line |= {"p": p, "mark": "level" if level else line["mark"]}
        return lines

    def _column(self, model: str, number: str, summary: Summary, rows: Mapping[str, Frame]) -> list[dict[str, Any]]:
        """One number of one model, by method, with the best marked."""
        rows = {method: scope(part, number) for method, part in rows.items()}
        column = {method: self._cell(model, number, summary, method, part) for method, part in rows.items()}
        best = _best(list(column.values()), summary.scale.higher_is_better)
        for method, cell in column.items():
            if best and cell is not best and not math.isnan(cell["value"]):
                gap = paired(rows[best["method"]], rows[method], summary, confidence=self.confidence)
                worse = gap.is_clear and (gap.value > 0) == summary.scale.higher_is_better
                cell |= {"gap": gap.value, "p": gap.p, "mark": "" if worse else "level"}
        return list(column.values())

    def _cell(self, model: str, number: str, summary: Summary, method: str, rows: Frame) -> dict[str, Any]:
        one, plan = estimated(rows, summary, confidence=self.confidence), self.plan
        if number == "seconds" and _shares(rows, plan.block):
            one = replace(one, low=math.nan, high=math.nan)
        entries = plan.entry("data", self.data), plan.entry("methods", method), self.entry
        labels = {"data": self.data, "metric": self.metric, "model": model, "method": method, "number": number}
        return labels | {
            "value": one.value,
            "low": one.low,
            "high": one.high,
            "n": one.n,
            "failed": int(rows["error"].notna().sum()),
            "gap": math.nan,
            "p": math.nan,
            "mark": "",
            "paper": printed(number, plan.entry("models", model).name, *entries),
            "reason": one.reason,
        }


def _entry(plan: Plan, metric: str) -> MetricEntry | None:
    return None if metric == ATTRIBUTION else plan.entry("metrics", metric)


def _best(column: Sequence[dict[str, Any]], higher: bool | None) -> dict[str, Any] | None:
    """The best cell of a column; None where no better is defined, or all are equal."""
    ranked = [cell for cell in column if not math.isnan(cell["low"])]
    if higher is None or len({cell["value"] for cell in ranked}) < 2:
        return None
    most = max(cell["n"] for cell in ranked)
    key = max if higher else min
    best = key((cell for cell in ranked if 2 * cell["n"] >= most), key=lambda cell: cell["value"])
    best["mark"] = "best"
    return best


def _shares(rows: Frame, block: int) -> bool:
    """Whether prompts of a block have equal shares of their seconds, so that an interval would be too narrow."""
    seconds = rows["seconds"].dropna() if "seconds" in rows else pd.Series(dtype=float)
    return pd.DataFrame({"block": rows["index"].reindex(seconds.index) // block, "seconds": seconds}).duplicated().any()


# ---- tables ---------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table of texts.

    Attributes:
        title: heading.
        frame: a text per cell.
        bold: likewise, whether it is bold.
        notes: sentences below it.
    """

    title: str
    frame: Frame
    bold: Frame
    notes: tuple[str, ...] = ()

    def marked(self, escape: Callable[[str], str], bold: str) -> Frame:
        """The texts, escaped for a format, those in bold put into its form."""
        texts = self.frame.map(escape)
        return texts.where(~self.bold, texts.map(bold.format)).rename(columns=escape)


def tables(store: Store, found: Frame) -> list[Table]:
    """All tables of a report: at a glance, correct predictions, one per data set and metric, failures, the numbers.

    Args:
        store: of the benchmark.
        found: its `cells`.
    """
    plan = store.plan
    by_metric = [
        _pivot(plan, str(data), metric, part) for (data, metric), part in found.groupby(LABELS[1::2], sort=False)
    ]
    failures = rows_of(store).dropna(subset="error").groupby(LABELS, sort=False)["error"].value_counts()
    failed = failures.reset_index(name="prompts").astype(str)
    return [
        _plain("At a glance", glance(in_profile(plan, found)), _GLANCE),
        _plain("Correct predictions", selections(store), _SELECTED),
        *by_metric,
        _plain("What failed", failed, "" if len(failed) else "Nothing failed."),
        _plain("Numbers", _meanings(plan, found)),
    ]


_GLANCE = "The best method of each number, and those that are level with it."
_SELECTED = (
    "Checked: prompts whose greedy continuation was compared with the answer. Chosen: prompts that are attributed. The "
    "paper counted whole data sets."
)


def _plain(title: str, frame: Frame, *notes: str) -> Table:
    bold = pd.DataFrame(data=False, index=frame.index, columns=frame.columns)
    return Table(title, frame, bold, tuple(filter(None, notes)))


def in_profile(plan: Plan, found: Frame, profile: str = "paper") -> Frame:
    """The cells of the methods of a profile."""
    return found[found["method"].isin([method.label for method in plan.methods if method.profile == profile])]


def glance(found: Frame) -> Frame:
    """The best method of each headline number per model and data set, with how many are level with it."""
    texts: dict[tuple[str, str], dict[str, str]] = {}
    for (model, data, metric), part in found.groupby(["model", "data", "metric"], sort=False):
        names = list(part["number"].unique())
        for number in [name for name in names if name in HEADLINES] or names[:1]:
            column = part[part["number"] == number]
            level = list(column.loc[column["mark"] == "level", "method"])
            rest = f"; level: {', '.join(level) if len(level) < 3 else f'{len(level)} others'}" if level else ""
            for cell in column[column["mark"] == "best"].itertuples():
                name = (
                    number if found.loc[found["number"] == number, "metric"].nunique() == 1 else f"{number} ({metric})"
                )
                text = f"{cell.method} {numbers.number(cell.value)} (n = {cell.n}){rest}"
                texts.setdefault((model, data), {})[name] = text
    return (
        pd.DataFrame(texts.values(), index=pd.MultiIndex.from_tuples(texts, names=["model", "data"]))
        .fillna(DASH)
        .reset_index()
    )


def selections(store: Store) -> Frame:
    """Prompts before and after the filter "the model's own answer is right", beside the paper's counts."""
    plan, lines = store.plan, list[dict[str, str]]()
    limits = {(model, data.label): data.limit for model in plan.labels("models") for data in plan.data_for(model)}
    for one in (Selection(**each) for each in store.meta.get("selections", ())):
        if (one.model, one.data) not in limits:
            continue
        right = (
            [None, None]
            if _is_part(data := plan.entry("data", one.data))
            else [
                published("correct_predictions", [data_of(data.name) or ""], name)
                for name in (model_of(plan.entry("models", one.model).name) or "none", "total")
            ]
        )
        counts = (one.total, one.checked, one.right, combined((len(one.chosen), limits[one.model, one.data])), *right)
        heads = ("total", "checked", "right", "chosen", "paper: right", "paper: total")
        lines.append(
            {"model": one.model, "data": one.data}
            | {head: DASH if count is None else f"{count:,.0f}" for head, count in zip(heads, counts, strict=True)}
        )
    return pd.DataFrame(lines)


def _is_part(data: DataEntry) -> bool:
    return bool(data.category or data.without_category or data.max_characters)


def _pivot(plan: Plan, data: str, metric: str, part: Frame) -> Table:
    """Models and methods by numbers; n stands beside a number where it differs from the row's."""
    printed_too = set(part.loc[part["paper"].notna(), "number"])
    texts: list[dict[str, str]] = []
    bold: list[dict[str, bool]] = []
    for (model, method), line in part.groupby(["model", "method"], sort=False):
        most, failed = line["n"].max(), line["failed"].max()
        texts.append({"model": model, "method": method, "n": f"{most}" + (f", {failed} failed" if failed else "")})
        bold.append({})
        for cell in line.itertuples():
            texts[-1][cell.number] = cell_text(cell, most)
            bold[-1][cell.number] = cell.mark == "best"
            if cell.number in printed_too:
                texts[-1][f"{cell.number}, paper"] = DASH if math.isnan(cell.paper) else f"{cell.paper:.4g}"
    frame = pd.DataFrame(texts).fillna(DASH)
    marks = pd.DataFrame(bold).reindex(columns=frame.columns).eq(other=True)
    title = "Cost of an attribution" if metric == ATTRIBUTION else metric
    return Table(f"{title} on {data}", frame, marks, tuple(_settings(_entry(plan, metric))))


def cell_text(cell: Any, most: int) -> str:
    """Value, interval, n if it is not the row's `most`, and ≈ where it is level with the best."""
    form = "quantity" if cell.number in COSTS else "decimal"
    parts = [numbers.number(cell.value, form), numbers.interval(cell.low, cell.high, form)]
    parts += ["" if cell.n == most else f"(n = {cell.n})", "≈" if cell.mark == "level" else ""]
    return " ".join(filter(None, parts))


def _settings(entry: MetricEntry | None) -> Iterator[str]:
    """What the plan sets for a metric."""
    names = ("judge", "normalization", "removal", "masks", "draws", "rates", "k")
    for name in names if entry else ():
        if (value := getattr(entry, name)) is not None:
            yield f"{name.capitalize()}: {value}."


def _meanings(plan: Plan, found: Frame) -> Frame:
    """Every number with the way that is better and what it means."""
    lines: dict[str, dict[str, str]] = {}
    for metric, part in found.groupby("metric", sort=False):
        names = list(part["number"].unique())
        for name, summary in summaries_of(_entry(plan, metric), names).items():
            if name in names:
                scale = summary.scale
                lines[name] = {"number": name, "better": scale.better or DASH, "meaning": scale.meaning}
    return pd.DataFrame(lines.values())
