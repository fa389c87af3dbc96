"""Figures of the cells: bars with a row per method, and scatter plots with a point per method; as SVG and PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pandas as pd

from noiser.bench.plan import MethodEntry, Plan
from noiser.errors import DependencyError
from noiser.report.cells import Frame
from noiser.report.tables import in_profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, SOFT, LINE = "#14161b", "#59606e", "#d9dde5"
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
MARKERS = (
    "o",
    "s",
    "^",
    "D",
    "v",
    "P",
    "X",
    "*",
    "<",
    ">",
    "p",
    "h",
    "d",
    "H",
    "8",
    "1",
    "2",
    "3",
    "4",
    "+",
    "x",
)
"""One per method, in the order of the plan; colours are of Okabe and Ito, and shapes read without them."""

_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": SOFT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
}
_DASHED: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1}
_BARS: tuple[dict[str, Any], ...] = (
    {"facecolor": "#e69f00", "edgecolor": INK, "linewidth": 0.7},
    {"facecolor": "#56b4e9", "edgecolor": INK, "linewidth": 0.7, "hatch": "////"},
)

BARS: Mapping[str, tuple[str, Mapping[str, str | float | None]]] = {
    "areas": (
        "Mass-matched area above random",
        {"area_minus_random": 0.0, "rank_area_minus_random": 0.0},
    ),
    "localisation": (
        "Where the score lies",
        {"critical": "critical_of_units", "main_part": "main_part_of_units"},
    ),
    "minimum": ("Minimum top-k%", {"minimum_share": None}),
}
"""Title and numbers of each figure of bars, with a dashed line at another number's mean, at a value, or none."""

SCATTERS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "answerability": (
        "Faithfulness against answerability", ("answerability_score", "answerability_rate"), ("faithfulness",)
    ),
    "cost": ("Faithfulness against cost", ("token_forwards", "seconds"), ("faithfulness",)),
    "frontier": (
        "What a larger budget buys",
        ("token_forwards",),
        ("faithfulness", "area", "rank_area", "lds", "insertion_area", "aopc"),
    ),
}  # fmt: skip
"""Title, x and y of each scatter plot; the frontier is drawn for plans that have a method at several budgets."""

_BUDGETS = frozenset({"samples", "permutations", "n_steps", "steps"})
_COSTS = ("token_forwards", "seconds")


class Picture(NamedTuple):
    """A figure: a short name for files, a title, and matplotlib's figure."""

    key: str
    title: str
    figure: Figure


def pictures(plan: Plan, found: Frame) -> Iterator[Picture]:
    """The figures for which there are numbers with intervals among the cells of a plan, data set by data set."""
    lines = families(plan.methods)
    for data, part in in_profile(plan, found).groupby("data", sort=False):
        for key, (title, numbers) in BARS.items():
            if drawn := bars(part, numbers):
                yield Picture(f"{key}-{data}", f"{title} on {data}", drawn)
        for key, (title, across, up) in SCATTERS.items():
            several = len(set(lines.values())) < len(lines)
            if (key != "frontier" or several) and (drawn := scatter(part, across, up, lines)):
                yield Picture(f"{key}-{data}", f"{title} on {data}", drawn)


def families(methods: Sequence[MethodEntry]) -> dict[str, str]:
    """By label, the name of the line that a method is on: methods that differ in nothing but a budget share one."""
    named = [
        (m.name, m.unit, m.profile, {k: v for k, v in m.args.items() if k not in _BUDGETS})
        for m in methods
    ]
    words = [
        ", ".join([name, *(f"{key} = {value}" for key, value in args.items())])
        for name, _, _, args in named
    ]
    return {
        m.label: words[i] if named.count(named[i]) > 1 else m.label for i, m in enumerate(methods)
    }


def _columns(found: Frame, names: Sequence[str]) -> dict[str, dict[str, Frame]]:
    """By number and model, the estimates by method; of several metrics with a number, those of the first."""
    columns: dict[str, dict[str, Frame]] = {}
    for name in names:
        part = found[found["number"] == name]
        if len(part):
            part = part[part["metric"] == part["metric"].iloc[0]].set_index("method")
            columns[name] = dict(list(part.groupby("model", sort=False)))
    return columns


@contextmanager
def _canvas(
    width: float, height: float, rows: int, columns: int, **options: Any
) -> Generator[tuple[Figure, Any]]:
    """A figure of that many inches with a grid of panels, in one style."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise DependencyError("Figures need matplotlib.", "report") from error
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False, **options)
        yield figure, panels
        for axes in panels.flat:
            if axes.get_xscale() == "linear":
                axes.locator_params(axis="x", nbins=5)  # numbers of neighbours do not touch
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # a second layout would differ in the last digits


def bars(found: Frame, numbers: Mapping[str, str | float | None]) -> Figure | None:
    """Horizontal bars with intervals: a panel per model, a row per method, a bar per number; None without intervals.

    Args:
        found: cells of one data set.
        numbers: names, each with a dashed line: at the mean of the number of that name, at a value, or none.
    """
    columns = _columns(
        found, [*numbers, *(name for name in numbers.values() if isinstance(name, str))]
    )
    names = [
        name
        for name in numbers
        if any(part["low"].notna().any() for part in columns.get(name, {}).values())
    ]
    if not names:
        return None
    models = list(columns[names[0]])
    methods = list(
        dict.fromkeys(method for model in models for method in columns[names[0]][model].index)
    )
    size = 2.0 + 3.4 * len(models), 1.4 + 0.32 * len(methods)
    height = 0.7 / len(names)
    with _canvas(*size, 1, len(models), sharey=True) as (figure, (panels,)):
        for axes, model in zip(panels, models, strict=True):
            axes.set(
                title=model,
                yticks=range(len(methods)),
                yticklabels=methods,
                ylim=(len(methods) - 0.4, -0.6),
            )
            axes.tick_params(axis="y", length=0)
            axes.grid(visible=False, axis="y")
            for i, name in enumerate(names):
                part, line = columns[name].get(model, found[:0]).reindex(methods), numbers[name]
                _bars(axes, part, _BARS[i % 2], height, (i - (len(names) - 1) / 2) * height, name)
                level = (
                    columns[line][model]["value"].mean()
                    if isinstance(line, str) and line in columns
                    else line
                )
                if isinstance(level, float) and math.isfinite(level):
                    axes.axvline(level, **_DASHED)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
        return figure


def _bars(
    axes: Axes, part: Frame, style: dict[str, Any], height: float, shift: float, name: str
) -> None:
    rows = [row + shift for row in range(len(part))]
    axes.barh(rows, part["value"].fillna(0.0), height, label=name, **style)
    for row, cell in zip(rows, part.itertuples(), strict=True):
        if pd.isna(cell.value):
            axes.text(0, row, " –", va="center", fontsize=8)
        elif pd.notna(cell.low):
            axes.plot(
                [cell.low, cell.high], [row, row], color=INK, linewidth=1.3, solid_capstyle="butt"
            )


def scatter(
    found: Frame, across: Sequence[str], up: Sequence[str], lines: Mapping[str, str]
) -> Figure | None:
    """Points with intervals: a row of panels per model, a panel for each pair of numbers, a point per method.

    Args:
        found: cells of one data set.
        across: numbers along x; costs are on a logarithmic axis, and methods that cost nothing are level lines.
        up: numbers along y; methods without an interval there are not drawn, and without any there is no figure.
        lines: by method, the name of the line that joins it with others.
    """
    columns = _columns(found, [*across, *up])
    panels: dict[tuple[str, str], dict[str, Frame]] = {}
    for x, y in product(across, up):
        for model in (model for model in columns.get(x, {}) if model in columns.get(y, {})):
            costs, numbers = (columns[name][model][["value", "low", "high"]] for name in (x, y))
            points = numbers.join(costs.add_prefix("x_"), how="inner").dropna(
                subset=["low", "x_value"]
            )
            if len(points):
                panels.setdefault((x, y), {})[model] = points
    if not panels:
        return None
    models = list(dict.fromkeys(model for points in panels.values() for model in points))
    names = list(dict.fromkeys(lines.values()))
    size = 2.6 + 3.4 * len(panels), 0.6 + 3.2 * len(models)
    with _canvas(*size, len(models), len(panels)) as (figure, grid):
        for row, model in zip(grid, models, strict=True):
            for axes, ((x, y), points) in zip(row, panels.items(), strict=True):
                _draw(axes, points.get(model, found[:0]), x in _COSTS, lines, names)
                axes.set(title=model, xlabel=x, ylabel=y)
        drawn = [axes.get_legend_handles_labels() for axes in grid.flat]
        handles = {label: handle for pair in drawn for handle, label in zip(*pair, strict=True)}
        labels = [name for name in names if name in handles]
        wide = math.ceil(len(labels) / (16 * len(models)))
        figure.legend(
            [handles[name] for name in labels], labels, loc="outside right upper", ncols=wide
        )
        return figure


def _draw(
    axes: Axes, points: Frame, cost: bool, lines: Mapping[str, str], names: Sequence[str]
) -> None:
    free = points[points["x_value"] <= 0] if cost else points[:0]
    for i, (method, point) in enumerate(free.iterrows()):
        dashes = ((0, (4, 2)), (0, (1, 1.5)))[i % 2]
        axes.axhline(
            point["value"], color=SOFT, linestyle=dashes, linewidth=1.2, label=lines[method]
        )
    rest = points.drop(free.index)
    for name, part in rest.groupby(lines, sort=False):
        i, part = names.index(name), part.sort_values("x_value")
        colour = COLOURS[i % len(COLOURS)]
        axes.vlines(
            part["x_value"], part["low"], part["high"], colors=colour, linewidth=0.8, alpha=0.6
        )
        axes.hlines(
            part["value"], part["x_low"], part["x_high"], colors=colour, linewidth=0.8, alpha=0.6
        )
        style: dict[str, Any] = {
            "marker": MARKERS[i % len(MARKERS)],
            "markeredgecolor": INK,
            "markeredgewidth": 0.6,
        }
        axes.plot(
            part["x_value"],
            part["value"],
            color=colour,
            label=name,
            markersize=6,
            linewidth=1.2,
            **style,
        )
    if cost and len(rest):
        axes.set_xscale("log")


def saved(picture: Picture, form: Literal["svg", "png"]) -> bytes:
    """The figure as SVG with real text, or as PNG, 200 dots per inch; the same bytes every time."""
    import matplotlib as mpl

    out, metadata = (
        io.BytesIO(),
        {"Title": picture.title, {"svg": "Date", "png": "Software"}[form]: None},
    )
    salted: dict[Any, Any] = {**_STYLE, "svg.hashsalt": picture.key}
    with mpl.rc_context(salted):
        picture.figure.savefig(
            out, format=form, dpi=200 if form == "png" else "figure", metadata=metadata
        )
    return out.getvalue()
