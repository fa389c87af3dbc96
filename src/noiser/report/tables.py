"""The tables of a report: pivots of the cells, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from noiser import numbers
from noiser.bench.plan import Plan, lowest
from noiser.bench.resolve import selections_of
from noiser.bench.rows import ATTRIBUTION
from noiser.report.cells import COSTS, LABELS, Frame, controls, entry_of, rows_of, summaries_of
from noiser.report.joined import Stored
from noiser.report.paper import data_of, model_of, published
from noiser.report.verdicts import standings

DASH = "–"
"""Stands where there is no number; never 0."""

HEADLINES = (
    "faithfulness", "area", "rank_area", "lds", "lds_bernoulli", "insertion_area", "answerability_rate",
    "answerability_top5_rate", "minimum_share", "drop", "hold", "naopc", "auprc", "mrr", "critical",
)  # fmt: skip
"""The numbers of the first table, for metrics that have one of them; other metrics are there by their first number."""


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
    """All tables of a report, from a benchmark's store and its `cells`, in the order that docs/report.md lists."""
    plan = store.plan
    by_metric = [
        _pivot(plan, str(data), metric, part)
        for (data, metric), part in found.groupby(LABELS[1::2], sort=False)
    ]
    failures = (
        rows_of(store).dropna(subset="error").groupby(LABELS, sort=False)["error"].value_counts()
    )
    failed = failures.reset_index(name="prompts").astype(str)
    return [
        _plain("At a glance", glance(plan, in_profile(plan, found)), _GLANCE),
        _plain(
            "Standings", standings(plan, in_profile(plan, found), HEADLINES), standing_note(plan)
        ),
        _plain("Methods", methods(plan)),
        _plain("Correct predictions", selections(store), _SELECTED),
        *by_metric,
        _plain("What failed", failed, "" if len(failed) else "Nothing failed."),
        _plain("Numbers", _meanings(plan, found)),
    ]


_GLANCE = (
    "The best method of each number, and methods that are not significantly worse. Random and position are controls: "
    "they never win. Below six prompts there is no interval, and so no best."
)
_STANDINGS = (
    "First: every other method is significantly worse. Level: not significantly worse than the best "
    "value, or the best value with others level. Behind: significantly worse than it. In each cell, "
    "in this order: {}."
)
_SELECTED = (
    "Checked: prompts whose greedy continuation was compared with the answer. Chosen: prompts that are attributed. The "
    "paper counted whole data sets."
)


def standing_note(plan: Plan) -> str:
    """How to read the standings of a plan's models."""
    return _STANDINGS.format(", ".join(plan.labels("models")))


def _plain(title: str, frame: Frame, *notes: str) -> Table:
    bold = pd.DataFrame(data=False, index=frame.index, columns=frame.columns)
    return Table(title, frame, bold, tuple(filter(None, notes)))


def in_profile(plan: Plan, found: Frame) -> Frame:
    """The cells of the methods of the paper's profile."""
    return found[
        found["method"].isin([method.label for method in plan.methods if method.profile == "paper"])
    ]


def glance(plan: Plan, found: Frame) -> Frame:
    """The best method of each headline number per model and data set, with how many are level with it."""
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
    best, level = (
        column[column["mark"] == "best"],
        list(column.loc[column["mark"] == "level", "method"]),
    )
    if not len(best):
        return f"{DASH} (n = {column['n'].max()})"
    (cell,) = best.itertuples()
    if len(level) == column["value"].notna().sum() - 1 and losers & {*level}:
        return f"no method is significantly better (n = {cell.n})"
    rest = (
        f"; level: {', '.join(level) if len(level) < 3 else f'{len(level)} others'}"
        if level
        else ""
    )
    return f"{cell.method} {numbers.number(cell.value)} (n = {cell.n}){rest}"


def methods(plan: Plan) -> Frame:
    """The methods with their settings in the plan."""
    hyper = [
        ", ".join(f"{key} = {value}" for key, value in one.args.items()) or "defaults"
        for one in plan.methods
    ]
    lines = [
        (one.label, one.name, one.unit, one.profile, text)
        for one, text in zip(plan.methods, hyper, strict=True)
    ]
    return pd.DataFrame(lines, columns=["method", "name", "unit", "profile", "hyper-parameters"])


def selections(store: Stored) -> Frame:
    """Prompts before and after the filter "the model's own answer is right", beside the paper's counts."""
    plan, lines = store.plan, list[dict[str, str]]()
    limits = plan.pairs()
    heads = ("total", "checked", "right", "chosen", "paper: right", "paper: total")
    for pair, one in selections_of(store.meta, store.path).items():
        if pair in limits:
            data, model = (
                plan.entry("data", one.data),
                model_of(plan.entry("models", one.model).name) or "none",
            )
            is_part = data.category or data.without_category or data.max_characters
            path = [] if is_part else [data_of(data.name) or ""]
            right = [
                published("correct_predictions", path, name) if path else None
                for name in (model, "total")
            ]
            chosen = lowest(len(one.chosen), limits[pair])
            counts = (one.total, one.checked, one.right, chosen, *right)
            texts = [DASH if count is None else f"{count:,.0f}" for count in counts]
            lines.append(
                {"model": one.model, "data": one.data} | dict(zip(heads, texts, strict=True))
            )
    return pd.DataFrame(lines)


def _pivot(plan: Plan, data: str, metric: str, part: Frame) -> Table:
    """Models and methods by numbers; n stands beside a number where it differs from the row's."""
    printed_too = set(part.loc[part["paper"].notna(), "number"])
    texts: list[dict[str, str]] = []
    bold: list[dict[str, bool]] = []
    for (model, method), line in part.groupby(["model", "method"], sort=False):
        most, failed = line["n"].max(), line["failed"].max()
        texts.append(
            {
                "model": model,
                "method": method,
                "n": f"{most}" + (f", {failed} failed" if failed else ""),
            }
        )
        bold.append({})
        for cell in line.itertuples():
            texts[-1][cell.number] = cell_text(cell, most)
            bold[-1][cell.number] = cell.mark == "best"
            if cell.number in printed_too:
                texts[-1][f"{cell.number}, paper"] = (
                    DASH if math.isnan(cell.paper) else f"{cell.paper:.4g}"
                )
    frame = pd.DataFrame(texts).fillna(DASH)
    marks = pd.DataFrame(bold).reindex(columns=frame.columns).eq(other=True)
    title = "Cost of an attribution" if metric == ATTRIBUTION else metric
    names = ("judge", "normalization", "removal", "masks", "draws", "rates", "k")
    settings = [(name, getattr(entry_of(plan, metric), name, None)) for name in names]
    notes = tuple(f"{name.capitalize()}: {value}." for name, value in settings if value is not None)
    return Table(f"{title} on {data}", frame, marks, notes)


def cell_text(cell: Any, most: int) -> str:
    """Value, interval, n if it is not the row's `most`, and ≈ where it is level with the best."""
    form = "quantity" if cell.number in COSTS else "decimal"
    parts = [numbers.number(cell.value, form), numbers.interval(cell.low, cell.high, form)]
    parts += ["" if cell.n == most else f"(n = {cell.n})", "≈" if cell.mark == "level" else ""]
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
