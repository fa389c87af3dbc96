"""The tables of a report: pivots of the cells, and counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from noiser import numbers
from noiser.bench.plan import Plan, lowest
from noiser.bench.resolve import selections_of
from noiser.bench.rows import ATTRIBUTION
from noiser.report.cells import COSTS, LABELS, Frame, controls, entry_of, rows_of_kind, summaries_of
from noiser.report.joined import Stored
from noiser.report.paper import data_of, model_of, published
from noiser.report.verdicts import standings

DASH = "–"
"""Stands where there is no number; never 0."""

HEADLINES = (
    "faithfulness",
    "area",
    "rank_area",
    "lds",
    "lds_bernoulli",
    "insertion_area",
    "answerability_rate",
    "answerability_top5_rate",
    "minimum_share",
    "drop",
    "hold",
    "naopc",
    "auprc",
    "mrr",
    "critical",
)
"""The numbers of the first table, for metrics that have one of them.

Other metrics are there by their first number.
"""


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


def tables(store: Stored, found: Frame) -> list[Table]:
    """All tables of a report, from a benchmark's store and its `cells`.

    They are in the order that docs/report.md lists.
    """
    plan = store.plan
    by_metric: list[Table] = []
    for (data, metric), part in found.groupby(["data", "metric"], sort=False):
        by_metric.append(_pivot(plan, str(data), metric, part))
    in_paper_profile = in_profile(plan, found)
    failures = _failures(store)
    return [
        _plain("At a glance", glance(plan, in_paper_profile), _GLANCE),
        _plain("Standings", standings(plan, in_paper_profile, HEADLINES), standing_note(plan)),
        _plain("Methods", methods(plan)),
        _plain("Correct predictions", selections(store), _SELECTED),
        *by_metric,
        _plain("What failed", failures, "" if len(failures) else "Nothing failed."),
        _plain("Numbers", _meanings(plan, found)),
    ]


def _failures(store: Stored) -> Frame:
    """How many prompts failed with each error, by the labels of their rows."""
    lines: list[dict[str, str]] = []
    for kind, limit in store.plan.limits().items():
        attribution = kind._replace(metric=ATTRIBUTION)
        if not any(next(store.rows(each, failed=True), None) for each in {kind, attribution}):
            continue
        errors = Counter(row.error for row in rows_of_kind(store, kind, limit) if row.error)
        for error, count in errors.most_common():
            lines.append(kind._asdict() | {"error": error, "prompts": str(count)})
    return pd.DataFrame(lines, columns=[*LABELS, "error", "prompts"])


_GLANCE = (
    "The best method of each number, and methods that are not significantly worse. Random and "
    "position are controls: they never win. Below six prompts there is no interval, and so no best."
)
_STANDINGS = (
    "First: every other method is significantly worse. Level: not significantly worse than the "
    "best value, or the best value with others level. Behind: significantly worse than it. In each "
    "cell, in this order: {}."
)
_SELECTED = (
    "Checked: prompts whose greedy continuation was compared with the answer. Chosen: prompts that "
    "are attributed. The paper counted whole data sets."
)


def standing_note(plan: Plan) -> str:
    """How to read the standings of a plan's models."""
    return _STANDINGS.format(", ".join(plan.labels("models")))


def _plain(title: str, frame: Frame, *notes: str) -> Table:
    bold = pd.DataFrame(data=False, index=frame.index, columns=frame.columns)
    return Table(title, frame, bold, tuple(filter(None, notes)))


def in_profile(plan: Plan, found: Frame) -> Frame:
    """The cells of the methods of the paper's profile."""
    labels = [method.label for method in plan.methods if method.profile == "paper"]
    return found[found["method"].isin(labels)]


def glance(plan: Plan, found: Frame) -> Frame:
    """The best method of each headline number per model and data set, and those level with it."""
    texts: dict[tuple[str, str], dict[str, str]] = {}
    found = found[found["metric"] != ATTRIBUTION]
    for (model, data, metric), part in found.groupby(["model", "data", "metric"], sort=False):
        names = list(part["number"].unique())
        for number in [name for name in names if name in HEADLINES] or names[:1]:
            column = part[part["number"] == number]
            several = found.loc[found["number"] == number, "metric"].nunique() > 1
            name = f"{number} ({metric})" if several else number
            texts.setdefault((model, data), {})[name] = _winner(column, controls(plan))
    keys = pd.MultiIndex.from_tuples(texts, names=["model", "data"])
    return pd.DataFrame(texts.values(), index=keys).fillna(DASH).reset_index()


def _winner(column: Frame, losers: set[str]) -> str:
    """One number in words: its best method, and those that are level with it."""
    best = column[column["mark"] == "best"]
    level = list(column.loc[column["mark"] == "level", "method"])
    if not len(best):
        return f"{DASH} (n = {column['n'].max()})"
    (cell,) = best.itertuples()
    all_others_are_level = len(level) == column["value"].notna().sum() - 1
    if all_others_are_level and losers & {*level}:
        return f"no method is significantly better (n = {cell.n})"
    text = f"{cell.method} {numbers.number(cell.value)} (n = {cell.n})"
    if not level:
        return text
    others = ", ".join(level) if len(level) < 3 else f"{len(level)} others"
    return f"{text}; level: {others}"


def methods(plan: Plan) -> Frame:
    """The methods with their settings in the plan."""
    lines: list[tuple[str, ...]] = []
    for method in plan.methods:
        arguments = ", ".join(f"{key} = {value}" for key, value in method.args.items())
        settings = (method.unit, method.profile, arguments or "defaults")
        lines.append((method.label, method.name, *settings))
    return pd.DataFrame(lines, columns=["method", "name", "unit", "profile", "hyper-parameters"])


def selections(store: Stored) -> Frame:
    """The number of prompts before and after the filter "the model's own answer is right".

    The paper's counts stand beside them.
    """
    limits = store.plan.pairs()
    lines: list[dict[str, str]] = []
    for pair, selection in selections_of(store.meta, store.path).items():
        if pair not in limits:
            continue
        of_paper = _counts_of_paper(store.plan, *pair)
        counts = {
            "total": selection.total,
            "checked": selection.checked,
            "right": selection.right,
            "chosen": lowest(len(selection.chosen), limits[pair]),
            "paper: right": of_paper[0],
            "paper: total": of_paper[1],
        }
        line = {"model": selection.model, "data": selection.data}
        for name, count in counts.items():
            line[name] = DASH if count is None else f"{count:,.0f}"
        lines.append(line)
    return pd.DataFrame(lines)


def _counts_of_paper(plan: Plan, model: str, data: str) -> tuple[float | None, float | None]:
    """How many answers were right in the paper, of how many; None for a part of a data set."""
    entry = plan.entry("data", data)
    if entry.category or entry.without_category or entry.max_characters:
        return None, None
    path = [data_of(entry.name) or ""]
    name = model_of(plan.entry("models", model).name) or "none"
    right = published("correct_predictions", path, name)
    return right, published("correct_predictions", path, "total")


def _pivot(plan: Plan, data: str, metric: str, part: Frame) -> Table:
    """Models and methods by numbers; n stands beside a number where it differs from the row's."""
    in_paper = set(part.loc[part["paper"].notna(), "number"])
    texts: list[dict[str, str]] = []
    bold: list[dict[str, bool]] = []
    for (model, method), cells in part.groupby(["model", "method"], sort=False):
        largest_n = cells["n"].max()
        failed = cells["failed"].max()
        count = f"{largest_n}, {failed} failed" if failed else f"{largest_n}"
        line = {"model": model, "method": method, "n": count}
        marks: dict[str, bool] = {}
        for cell in cells.itertuples():
            line[cell.number] = cell_text(cell, largest_n)
            marks[cell.number] = cell.mark == "best"
            if cell.number in in_paper:
                printed = DASH if math.isnan(cell.paper) else f"{cell.paper:.4g}"
                line[f"{cell.number}, paper"] = printed
        texts.append(line)
        bold.append(marks)
    frame = pd.DataFrame(texts).fillna(DASH)
    is_bold = pd.DataFrame(bold).reindex(columns=frame.columns).eq(other=True)
    title = "Cost of an attribution" if metric == ATTRIBUTION else metric
    notes: list[str] = []
    entry = entry_of(plan, metric)
    for name in ("judge", "normalization", "removal", "masks", "draws", "rates", "k"):
        value = getattr(entry, name, None)
        if value is not None:
            notes.append(f"{name.capitalize()}: {value}.")
    return Table(f"{title} on {data}", frame, is_bold, tuple(notes))


def cell_text(cell: Any, most: int) -> str:
    """Value, interval, n if it is not the row's `most`, and ≈ where it is level with the best."""
    form = "quantity" if cell.number in COSTS else "decimal"
    parts = [numbers.number(cell.value, form), numbers.interval(cell.low, cell.high, form)]
    if cell.n != most:
        parts.append(f"(n = {cell.n})")
    if cell.mark == "level":
        parts.append("≈")
    return " ".join(filter(None, parts))


def _meanings(plan: Plan, found: Frame) -> Frame:
    """Every number with the way that is better and what it means."""
    lines: dict[str, dict[str, str]] = {}
    for metric, part in found.groupby("metric", sort=False):
        names = list(part["number"].unique())
        for name, summary in summaries_of(entry_of(plan, metric), names).items():
            if name in names:
                scale = summary.scale
                lines[name] = {
                    "number": name,
                    "better": scale.better or DASH,
                    "meaning": scale.meaning,
                }
    return pd.DataFrame(lines.values())
