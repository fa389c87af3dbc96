"""Figures with a bar a method: LongRA's critical tokens and distractor, minimum top-k%, mass-matched areas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from noiser.bench.plan import MethodEntry
from noiser.registry import unversioned
from noiser.report.choices import named, ordinary, sources, together
from noiser.report.drawing import BLUE, INK, ORANGE, PAPER, SOFT, Picture, canvas, legend_below
from noiser.report.grid import Asked
from noiser.report.located import CATEGORY, PARTS
from noiser.report.names import method_title
from noiser.report.results import Cell, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from noiser.metrics.bootstrap import Estimate

__all__ = ["areas", "localisation", "minimum"]

_GAPS = {"area_minus_random": "by score", "rank_area_minus_random": "by rank"}
_HEIGHT = 0.6
_EDGE: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.7}


def localisation(results: Results) -> Iterator[Picture]:
    """The paper's LongRA figure: score on country and "capital", and on the main part against the distractor."""
    for data in results.data:
        for source in named(results, "localisation", data.label):
            measure = source.measure
            if CATEGORY not in results.categories(data.label, measure.label):
                continue
            for model in results.models:
                methods = ordinary(results, [source], data.label)
                cells = [Cell(model.label, data.label, m.label, measure.label, CATEGORY) for m in methods]
                found = {name: [results.estimate(cell, part) for cell in cells] for name, part in PARTS.items()}
                if any(math.isfinite(one.low) for one in found["critical"]):
                    yield _located(f"{data.label}{source.tail}-{model.label}", model.label, methods, found)


def _located(key: str, model: str, methods: Sequence[MethodEntry], found: dict[str, list[Estimate]]) -> Picture:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    with canvas(9.0, 1.6 + 0.34 * len(methods), 2) as (figure, (left, right)):
        rows = range(len(methods))
        _bars(left, found["critical"], ORANGE, "", "percent")
        units = _first(found["critical, of units"])
        left.axvline(units, color=INK, linestyle=(0, (4, 2)), linewidth=1)
        left.set_title("country + “capital”")
        main = [one.value for one in found["main part"]]
        right.barh(rows, main, _HEIGHT, color=ORANGE, **_EDGE)
        right.barh(rows, [1 - value for value in main], _HEIGHT, left=main, color=BLUE, hatch="////", **_EDGE)
        right.axvline(1 - _first(found["distractor, of units"]), color=INK, linestyle=(0, (4, 2)), linewidth=1)
        for row, value in enumerate(main):
            if math.isfinite(value):
                right.text(
                    0.02, row, f"{value:.0%}", va="center", fontsize=8,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"},
                )  # fmt: skip
        right.set_title("main part against distractor")
        left.set_xlim(0, 1.25 * max((one.high for one in found["critical"] if math.isfinite(one.high)), default=0.8))
        right.set_xlim(0, 1.1)
        right.set_xticks([0, 0.25, 0.5, 0.75, 1])
        for axes in (left, right):
            _name_rows(axes, methods, found["critical"])
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.set_xlabel("share of the positive scores")
        right.tick_params(labelleft=False)
        handles = [
            Patch(facecolor=ORANGE, **_EDGE),
            Patch(facecolor=BLUE, hatch="////", **_EDGE),
            Line2D([], [], color=INK, linestyle=(0, (4, 2)), linewidth=1),
        ]
        legend_below(figure, handles, ["critical or main part", "distractor", "share of the units: no information"], 3)
    said = "; ".join(
        f"{method_title(m.label)} {one.value:.0%} on country and capital, {part:.0%} on the main part"
        for m, one, part in zip(methods, found["critical"], main, strict=True)
        if one.n
    )
    return Picture(f"localisation-{key}", f"Where the score lies, {CATEGORY}, {model}", f"{said}.", figure)


def minimum(results: Results) -> Iterator[Picture]:
    """The paper's figure of the minimum top-k%: a panel a model."""
    for data in results.data:
        for source in sources(results, "minimum_share", data.label):
            asked = Asked.of(source, "minimum_share", "minimum")
            methods = ordinary(results, [source], data.label)
            found = _estimates(results, asked, data.label, methods)
            if not any(math.isfinite(one.low) for column in found for one in column):
                continue
            with canvas(1.8 + 3.4 * len(found), 1.1 + 0.32 * len(methods), len(found), sharey=True) as (figure, panels):
                for axes, model, column in zip(panels, results.models, found, strict=True):
                    _bars(axes, column, ORANGE, "", "percent")
                    _name_rows(axes, methods, column)
                    axes.set_title(model.label)
                    axes.set_xlim(0, 1.22)
                    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
                    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
                    axes.set_xlabel("words that the judge needs (less is better)")
            title = source.title("Minimum top-k%", data)
            yield Picture(source.key("minimum", data), title, _said(results, methods, found, "percent"), figure)


def areas(results: Results) -> Iterator[Picture]:
    """Mass-matched area above random, by score and by rank, with intervals: a panel a model."""
    for data in results.data:
        for sources_ in together(results, _GAPS, data.label):
            source = next(iter(sources_.values()))
            methods = [m for m in ordinary(results, sources_.values(), data.label) if unversioned(m.name) != "random"]
            asked = {number: Asked.of(one, number, number) for number, one in sources_.items()}
            columns = {_GAPS[number]: _estimates(results, one, data.label, methods) for number, one in asked.items()}
            if not any(math.isfinite(one.low) for found in columns.values() for column in found for one in column):
                continue
            count = len(results.models)
            with canvas(1.8 + 3.4 * count, 1.4 + 0.36 * len(methods), count, sharey=True, sharex=True) as (
                figure,
                panels,
            ):
                for place, (axes, model) in enumerate(zip(panels, results.models, strict=True)):
                    _intervals(axes, [found[place] for found in columns.values()])
                    _name_rows(axes, methods, next(iter(columns.values()))[place])
                    axes.set_title(model.label)
                    axes.set_xlabel("mass-matched area minus random's")
                    axes.margins(x=0.12)
                handles, _ = panels[0].get_legend_handles_labels()
                legend_below(figure, handles, [f"{name}, with its interval" for name in columns], 2)
            title = source.title("Mass-matched area above random", data)
            name, found = next(iter(columns.items()))
            said = f"{name.capitalize()}: {_said(results, methods, found, 'decimal')}"
            yield Picture(source.key("areas", data), title, said, figure)


def _estimates(results: Results, asked: Asked, data: str, methods: Sequence[MethodEntry]) -> list[list[Estimate]]:
    return [
        [results.estimate(asked.cell(model.label, data, method.label), asked.summary) for method in methods]
        for model in results.models
    ]


def _bars(axes: Axes, found: Sequence[Estimate], colour: str, hatch: str, form: str) -> None:
    """Horizontal bars with intervals and their values written behind them; nothing where there is no number."""
    values = [one.value if math.isfinite(one.value) else 0.0 for one in found]
    axes.barh(range(len(found)), values, _HEIGHT, color=colour, hatch=hatch, **_EDGE)
    for row, one in enumerate(found):
        if not math.isfinite(one.value):
            axes.text(0, row, " –", va="center", fontsize=8)
            continue
        if math.isfinite(one.low):
            axes.plot([one.low, one.high], [row, row], color=INK, linewidth=1.3, solid_capstyle="butt")
        end = max(one.value, one.high if math.isfinite(one.high) else one.value)
        text = f"{one.value:.0%}" if form == "percent" else f"{one.value:.2f}"
        axes.annotate(text, (end, row), (3, 0), textcoords="offset points", va="center", fontsize=8)


def _intervals(axes: Axes, columns: Sequence[Sequence[Estimate]]) -> None:
    """Points with intervals, one series above the other in each row."""
    styles: tuple[dict[str, Any], ...] = (
        {"marker": "o", "color": INK},
        {"marker": "D", "color": SOFT, "markerfacecolor": PAPER},
    )
    axes.axvline(0, color=INK, linestyle=(0, (4, 2)), linewidth=1)
    for series, (column, style) in enumerate(zip(columns, styles, strict=False)):
        shift = 0.16 * (2 * series - 1) if len(columns) > 1 else 0.0
        rows = [row + shift for row, one in enumerate(column) if math.isfinite(one.value)]
        known = [one for one in column if math.isfinite(one.value)]
        ends = [
            [one.value - one.low if math.isfinite(one.low) else 0.0 for one in known],
            [one.high - one.value if math.isfinite(one.high) else 0.0 for one in known],
        ]
        values = [one.value for one in known]
        axes.errorbar(values, rows, xerr=ends, linestyle="none", markersize=4.5,
                      elinewidth=1.2, label=str(series), **style)  # fmt: skip


def _name_rows(axes: Axes, methods: Sequence[MethodEntry], found: Sequence[Estimate]) -> None:
    """Names of the rows, first at the top, and behind each its number of prompts."""
    axes.set_yticks(range(len(methods)), [method_title(method.label) for method in methods])
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    for row, one in [(-0.75, None), *enumerate(found)]:
        text = "n" if one is None else str(one.n)
        where = axes.get_yaxis_transform()
        axes.text(1.0, row, text, transform=where, ha="right", va="center", fontsize=7.5, color=SOFT)


def _first(found: Sequence[Estimate]) -> float:
    return next((one.value for one in found if math.isfinite(one.value)), math.nan)


def _said(results: Results, methods: Sequence[MethodEntry], found: Sequence[Sequence[Estimate]], form: str) -> str:
    """The numbers in words, for who cannot see the figure."""
    parts: list[str] = []
    for model, column in zip(results.models, found, strict=True):
        numbers = [
            f"{method_title(method.label)} {one.value:.0%}"
            if form == "percent"
            else f"{method_title(method.label)} {one.value:.3f}"
            for method, one in zip(methods, column, strict=True)
            if math.isfinite(one.value)
        ]
        parts.append(f"{model.label}: {', '.join(numbers)}")
    return "; ".join(parts) + "."
