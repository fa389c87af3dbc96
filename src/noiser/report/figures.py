"""Figures of the cells, as SVG and PNG.

There are bars with a row per method, and scatter plots with a point per method.
"""

from __future__ import annotations

import io
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
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

INK = "#14161b"
SOFT = "#59606e"
LINE = "#d9dde5"
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
MARKERS = tuple("os^DvPX*<>phdH81234+x")
"""One per method, in the order of the plan.

Colours are of Okabe and Ito, and shapes read without them.
"""

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
"""Title and numbers of each figure of bars.

Each number has a dashed line at another number's mean, at a value, or none.
"""

SCATTERS: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "answerability": (
        "Faithfulness against answerability",
        ("answerability_score", "answerability_rate"),
        ("faithfulness",),
    ),
    "cost": ("Faithfulness against cost", ("token_forwards", "seconds"), ("faithfulness",)),
    "frontier": (
        "What a larger budget buys",
        ("token_forwards",),
        ("faithfulness", "area", "rank_area", "lds", "insertion_area", "aopc"),
    ),
}
"""Title, x and y of each scatter plot.

The frontier is drawn for plans that have a method at several budgets.
"""

_BUDGETS = frozenset({"samples", "permutations", "n_steps", "steps"})
_COSTS = ("token_forwards", "seconds")


class Picture(NamedTuple):
    """A figure: a short name for files, a title, and matplotlib's figure."""

    key: str
    title: str
    figure: Figure


def pictures(plan: Plan, found: Frame) -> Iterator[Picture]:
    """The figures of a plan's cells, data set by data set, where there are intervals."""
    lines = families(plan.methods)
    has_budgets = len(set(lines.values())) < len(lines)
    for data, part in in_profile(plan, found).groupby("data", sort=False):
        for key, (title, numbers) in BARS.items():
            figure = bars(part, numbers)
            if figure is not None:
                yield Picture(f"{key}-{data}", f"{title} on {data}", figure)
        for key, (title, across, up) in SCATTERS.items():
            if key == "frontier" and not has_budgets:
                continue
            figure = scatter(part, across, up, lines)
            if figure is not None:
                yield Picture(f"{key}-{data}", f"{title} on {data}", figure)


def families(methods: Sequence[MethodEntry]) -> dict[str, str]:
    """By label, the name of the line that a method is on.

    Methods that differ in nothing but a budget share a line.
    """
    settings: list[tuple[Any, ...]] = []
    for method in methods:
        args = {name: value for name, value in method.args.items() if name not in _BUDGETS}
        settings.append((method.name, method.unit, method.profile, args))
    lines: dict[str, str] = {}
    for method, own in zip(methods, settings, strict=True):
        lines[method.label] = method.label
        if settings.count(own) > 1:
            name, _, _, args = own
            words = [f"{key} = {value}" for key, value in args.items()]
            lines[method.label] = ", ".join([name, *words])
    return lines


def _columns(found: Frame, names: Iterable[str]) -> dict[str, dict[str, Frame]]:
    """The estimates by method, for each number and model.

    If several metrics have a number, the first metric is taken.
    """
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
    """Horizontal bars with intervals: a panel per model, a row per method, a bar per number.

    None where no number has an interval.

    Args:
        found: cells of one data set.
        numbers: names, each with a dashed line: at the mean of the number of that name, at a value,
            or none.
    """
    lines = [line for line in numbers.values() if isinstance(line, str)]
    columns = _columns(found, [*numbers, *lines])
    names = [name for name in numbers if _has_intervals(columns.get(name, {}))]
    if not names:
        return None
    models = list(columns[names[0]])
    methods: list[str] = []
    for model in models:
        methods.extend(columns[names[0]][model].index)
    methods = list(dict.fromkeys(methods))
    bar_height = 0.7 / len(names)
    width = 2.0 + 3.4 * len(models)
    height = 1.4 + 0.32 * len(methods)
    with _canvas(width, height, 1, len(models), sharey=True) as (figure, (panels,)):
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
                part = columns[name].get(model, found[:0]).reindex(methods)
                shift = (i - (len(names) - 1) / 2) * bar_height
                _bars(axes, part, _BARS[i % 2], bar_height, shift, name)
                level = _level(columns, numbers[name], model)
                if isinstance(level, float) and math.isfinite(level):
                    axes.axvline(level, **_DASHED)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
        return figure


def _has_intervals(by_model: Mapping[str, Frame]) -> bool:
    return any(part["low"].notna().any() for part in by_model.values())


def _level(
    columns: Mapping[str, Mapping[str, Frame]], line: str | float | None, model: str
) -> str | float | None:
    """Where a dashed line stands: at the mean of the number that it names, or at its own value."""
    if isinstance(line, str) and line in columns:
        return columns[line][model]["value"].mean()
    return line


def _bars(
    axes: Axes, part: Frame, style: dict[str, Any], height: float, shift: float, name: str
) -> None:
    """Draws the bars of one number, with their intervals, and a dash where there is no number."""
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
    """Points with intervals: a row of panels per model, a panel for each pair of numbers.

    Each method is a point.

    Args:
        found: cells of one data set.
        across: numbers along x; costs are on a logarithmic axis, and methods that cost nothing are
            level lines.
        up: numbers along y; methods without an interval there are not drawn, and without any there
            is no figure.
        lines: by method, the name of the line that joins it with others.
    """
    panels = _panels(_columns(found, [*across, *up]), across, up)
    if not panels:
        return None
    models: dict[str, None] = {}  # in the order in which they first have points
    for points_by_model in panels.values():
        models |= dict.fromkeys(points_by_model)
    names = list(dict.fromkeys(lines.values()))
    width = 2.6 + 3.4 * len(panels)
    height = 0.6 + 3.2 * len(models)
    with _canvas(width, height, len(models), len(panels)) as (figure, grid):
        for row, model in zip(grid, models, strict=True):
            for axes, ((x, y), points_by_model) in zip(row, panels.items(), strict=True):
                points = points_by_model.get(model, found[:0])
                _draw(axes, points, x in _COSTS, lines, names)
                axes.set(title=model, xlabel=x, ylabel=y)
        _add_legend(figure, grid, names, len(models))
        return figure


def _panels(
    columns: Mapping[str, Mapping[str, Frame]], across: Sequence[str], up: Sequence[str]
) -> dict[tuple[str, str], dict[str, Frame]]:
    """The points of each panel that has any, by its two numbers and by model."""
    panels: dict[tuple[str, str], dict[str, Frame]] = {}
    for x, y in product(across, up):
        for model, costs in columns.get(x, {}).items():
            numbers = columns.get(y, {}).get(model)
            if numbers is None:
                continue
            costs = costs[["value", "low", "high"]].add_prefix("x_")
            points = numbers[["value", "low", "high"]].join(costs, how="inner")
            points = points.dropna(subset=["low", "x_value"])
            if len(points):
                panels.setdefault((x, y), {})[model] = points
    return panels


def _add_legend(figure: Figure, grid: Any, names: Sequence[str], models: int) -> None:
    """Adds one legend for all panels, with about 16 lines per row of panels in each column."""
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    labels = [name for name in names if name in handles]
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside right upper",
        ncols=math.ceil(len(labels) / (16 * models)),
    )


def _draw(
    axes: Axes, points: Frame, is_cost: bool, lines: Mapping[str, str], names: Sequence[str]
) -> None:
    """Draws the points of a panel; those of one line are joined."""
    # A cost of 0 has no place on a logarithmic axis.
    free = points[points["x_value"] <= 0] if is_cost else points[:0]
    for i, (method, point) in enumerate(free.iterrows()):
        dashes = ((0, (4, 2)), (0, (1, 1.5)))[i % 2]
        axes.axhline(
            point["value"], color=SOFT, linestyle=dashes, linewidth=1.2, label=lines[method]
        )
    paid = points.drop(free.index)
    for name, line in paid.groupby(lines, sort=False):
        _draw_line(axes, line.sort_values("x_value"), name, names.index(name))
    if is_cost and len(paid):
        axes.set_xscale("log")


def _draw_line(axes: Axes, line: Frame, name: str, number: int) -> None:
    """Draws the points of one line with their intervals; its number chooses colour and marker."""
    colour = COLOURS[number % len(COLOURS)]
    interval: dict[str, Any] = {"colors": colour, "linewidth": 0.8, "alpha": 0.6}
    axes.vlines(line["x_value"], line["low"], line["high"], **interval)
    axes.hlines(line["value"], line["x_low"], line["x_high"], **interval)
    axes.plot(
        line["x_value"],
        line["value"],
        color=colour,
        label=name,
        marker=MARKERS[number % len(MARKERS)],
        markersize=6,
        markeredgecolor=INK,
        markeredgewidth=0.6,
        linewidth=1.2,
    )


def saved(picture: Picture, form: Literal["svg", "png"]) -> bytes:
    """The figure as SVG with real text, or as PNG, 200 dots per inch; the same bytes every time."""
    import matplotlib as mpl

    # matplotlib would write the date or its own version, which change the bytes.
    omitted = {"svg": "Date", "png": "Software"}[form]
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": picture.key}
    out = io.BytesIO()
    with mpl.rc_context(style):
        picture.figure.savefig(
            out,
            format=form,
            dpi=200 if form == "png" else "figure",
            metadata={"Title": picture.title, omitted: None},
        )
    return out.getvalue()
