"""Figures of the tables' numbers: bars and intervals with a row per method, scatter plots with a point per method."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from noiser.bench.plan import DataEntry
from noiser.report.figures import BLUE, INK, ORANGE, PAPER, SOFT, Picture, canvas
from noiser.report.frontier import FORWARDS, NUMBERS, families
from noiser.report.grid import named, topics
from noiser.report.rows import Frame, Results
from noiser.report.table import Table, cells_frame
from noiser.report.tables import CATEGORY, share_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h", "d", "H", "8", "1", "2", "3", "4", "+", "x")
"""One per method, in the order of the plan: shape tells them apart, colour only helps."""

_GAPS = {
    "area_minus_random": ("area − random", "by score"),
    "rank_area_minus_random": ("area by rank − random", "by rank"),
}
_HEIGHT = 0.6
_MAIN: dict[str, Any] = {"facecolor": ORANGE, "edgecolor": INK, "linewidth": 0.7}
_DISTRACTOR: dict[str, Any] = {**_MAIN, "facecolor": BLUE, "hatch": "////"}
_DASHED: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1}


def plots(results: Results, tables: Sequence[Table]) -> list[Picture]:
    """The figures of these tables of a run, in the order of a report. Raises DependencyError without matplotlib."""
    cells = cells_frame(tables)
    draw = (_areas, _localisation, _minimum, _against_answerability, _against_cost, _frontier)
    numbers = [_Numbers([one.label for one in results.models_with(data.label)], cells) for data in results.data]
    about = list(zip(results.data, numbers, strict=True))
    return [picture for one in draw for pair in about for picture in one(results, *pair)]


class _Numbers(NamedTuple):
    """The numbers of tables: labels of the models, and `cells_frame`."""

    models: Sequence[str]
    cells: Frame

    def column(self, key: str, column: str) -> list[Frame]:
        """A column of a table: for each model a DataFrame with value, low, high and n, by titles of all its methods."""
        keys = [key, *(f"{key}-{model}" for model in self.models)]
        cells = self.cells[self.cells["table"].isin(keys) & (self.cells["column"] == column)]
        repeated = cells.groupby(["group", "row"]).cumcount()
        titles = cells["row"] + (" (" + (repeated + 1).astype(str) + ")").where(repeated > 0, "")
        cells = cells.set_index(titles).astype({"value": float, "low": float, "high": float})
        frames = [cells.loc[cells["group"] == model, ["value", "low", "high", "n"]] for model in self.models]
        return [frame.reindex(titles.unique()).fillna({"n": 0}).astype({"n": int}) for frame in frames]


# ---- bars and intervals ---------------------------------------------------------------------------------------------


def _areas(results: Results, data: DataEntry, numbers: _Numbers) -> Iterator[Picture]:
    """Mass-matched area above random, by score and by rank, with intervals: a panel per model."""
    for topic in topics(results, data, *_GAPS):
        key = topic.key("areas")
        columns = [numbers.column(key, _GAPS[name][0]) for name in topic.measures]
        series = [[frame.drop("Random", errors="ignore") for frame in column] for column in columns]
        if not any(frame["low"].notna().any() for frames in series for frame in frames):
            continue
        names = [_GAPS[name][1] for name in topic.measures]
        label, height = "mass-matched area minus random's", 1.4 + 0.36 * len(series[0][0])
        with _panels(numbers, series[0], label, height, sharex=True) as (figure, panels):
            for i, axes in enumerate(panels):
                _intervals(axes, [frames[i] for frames in series])
                axes.margins(x=0.12)
            handles, _ = panels[0].get_legend_handles_labels()
            _legend_below(figure, handles, [f"{name}, with its interval" for name in names], 2)
        words = f"{names[0].capitalize()}: {_in_words(numbers, series[0], '.3f')}"
        yield Picture(key, topic.title("Mass-matched area above random"), words, figure)


def _localisation(results: Results, data: DataEntry, numbers: _Numbers) -> Iterator[Picture]:
    """The paper's LongRA figure: score on country and "capital", and on the main part against the distractor."""
    for topic in named(results, data, "localisation"):
        key = topic.key(f"localisation-{CATEGORY}")
        names = ("critical", "main part", "critical, of units", "distractor, of units")
        columns = [numbers.column(key, name) for name in names]
        for model, critical, *others in zip(numbers.models, *columns, strict=True):
            if critical["low"].notna().any():
                others = [frame.reindex(critical.index) for frame in others]  # a part that is not in the data is NaN
                yield _located(f"{data.label}{topic.tail}-{model}", model, share_of(topic.measure), critical, *others)


def _located(
    key: str, model: str, share: str, critical: Frame, main: Frame, units: Frame, distractor: Frame
) -> Picture:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows, shares = range(len(main)), main["value"]
    with canvas(9.0, 1.6 + 0.34 * len(main), 2) as (figure, (left, right)):
        _bars(left, critical)
        left.axvline(_first(units), **_DASHED)
        left.set_title("country + “capital”")
        right.barh(rows, shares, _HEIGHT, **_MAIN)
        right.barh(rows, 1 - shares, _HEIGHT, left=shares, **_DISTRACTOR)
        right.axvline(1 - _first(distractor), **_DASHED)
        box = {"boxstyle": "round,pad=0.15", "facecolor": PAPER, "edgecolor": "none"}
        for row, value in enumerate(shares):
            if math.isfinite(value):
                right.text(0.02, row, f"{value:.0%}", va="center", fontsize=8, bbox=box)
        right.set_title("main part against distractor")
        left.set_xlim(0, 1.25 * critical["high"].max())
        right.set_xlim(0, 1.1)
        right.set_xticks([0, 0.25, 0.5, 0.75, 1])
        for axes in (left, right):
            _name_rows(axes, critical)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.set_xlabel(share.removesuffix(",").lower())
        right.tick_params(labelleft=False)
        handles = [Patch(**_MAIN), Patch(**_DISTRACTOR), Line2D([], [], **_DASHED)]
        names = ["critical or main part", "distractor", "share of the units: no information"]
        _legend_below(figure, handles, names, 3)
    words = "; ".join(
        f"{name} {value:.0%} on country and capital, {part:.0%} on the main part"
        for name, value, n, part in zip(critical.index, critical["value"], critical["n"], shares, strict=True)
        if n
    )
    return Picture(f"localisation-{key}", f"Where the score lies, {CATEGORY}, {model}", f"{words}.", figure)


def _minimum(results: Results, data: DataEntry, numbers: _Numbers) -> Iterator[Picture]:
    """The paper's figure of the minimum top-k%: a panel per model."""
    for topic in topics(results, data, "minimum_share"):
        key = topic.key("minimum")
        frames = numbers.column(key, "words needed")
        if not any(frame["low"].notna().any() for frame in frames):
            continue
        label, height = "words that the judge needs (less is better)", 1.1 + 0.32 * len(frames[0])
        with _panels(numbers, frames, label, height) as (figure, panels):
            for axes, frame in zip(panels, frames, strict=True):
                _bars(axes, frame)
                axes.set_xlim(0, 1.22)
                axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        yield Picture(key, topic.title("Minimum top-k%"), _in_words(numbers, frames, ".0%"), figure)


@contextmanager
def _panels(
    numbers: _Numbers, frames: Sequence[Frame], label: str, height: float, **options: Any
) -> Generator[tuple[Figure, Sequence[Axes]]]:
    """A panel per model, with names of the rows, a title and the label of the x axis."""
    with canvas(1.8 + 3.4 * len(frames), height, len(frames), sharey=True, **options) as (figure, panels):
        yield figure, panels
        for axes, model, frame in zip(panels, numbers.models, frames, strict=True):
            _name_rows(axes, frame)
            axes.set_title(model)
            axes.set_xlabel(label)


def _bars(axes: Axes, frame: Frame) -> None:
    """Horizontal bars with intervals and their shares written after them; a dash where there is no number."""
    axes.barh(range(len(frame)), frame["value"].fillna(0.0), _HEIGHT, **_MAIN)
    for row, one in enumerate(frame.itertuples()):
        if pd.isna(one.value):
            axes.text(0, row, " –", va="center", fontsize=8)
            continue
        if pd.notna(one.low):
            axes.plot([one.low, one.high], [row, row], color=INK, linewidth=1.3, solid_capstyle="butt")
        end = max(one.value, one.high) if pd.notna(one.high) else one.value
        axes.annotate(f"{one.value:.0%}", (end, row), (3, 0), textcoords="offset points", va="center", fontsize=8)


def _intervals(axes: Axes, series: Sequence[Frame]) -> None:
    """Points with intervals, one series above the other in each row."""
    styles = ({"marker": "o", "color": INK}, {"marker": "D", "color": SOFT, "markerfacecolor": PAPER})
    axes.axvline(0, **_DASHED)
    for number, (frame, style) in enumerate(zip(series, styles, strict=False)):
        shift = 0.16 * (2 * number - 1) if len(series) > 1 else 0.0
        known = frame.assign(row=range(len(frame)))[frame["value"].notna()]
        ends = [(known["value"] - known["low"]).fillna(0.0), (known["high"] - known["value"]).fillna(0.0)]
        points: dict[str, Any] = {"linestyle": "none", "markersize": 4.5, "elinewidth": 1.2, **style}
        axes.errorbar(known["value"], known["row"] + shift, xerr=ends, label=str(number), **points)


def _name_rows(axes: Axes, frame: Frame) -> None:
    """Names of the rows, first at the top, and after each its number of prompts."""
    axes.set_yticks(range(len(frame)), list(frame.index))
    axes.set_ylim(len(frame) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    beside: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
    for row, text in [(-0.75, "n"), *enumerate(frame["n"])]:
        axes.text(1.0, row, str(text), fontsize=7.5, color=SOFT, **beside)


def _legend_below(figure: Figure, handles: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    """A legend under all panels."""
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=1.6, columnspacing=1.6)


def _first(frame: Frame) -> float:
    return next(iter(frame["value"].dropna()), math.nan)


def _in_words(numbers: _Numbers, frames: Sequence[Frame], form: str) -> str:
    """The numbers in words, for readers who cannot see the figure."""
    models = [
        f"{model}: " + ", ".join(f"{name} {value:{form}}" for name, value in frame["value"].dropna().items())
        for model, frame in zip(numbers.models, frames, strict=True)
    ]
    return "; ".join(models) + "."


# ---- scatter plots --------------------------------------------------------------------------------------------------


class _Panel(NamedTuple):
    """What lies along x of a scatter plot: its label, the estimates of the methods, and whether it is logarithmic."""

    label: str
    x: Frame
    logarithmic: bool = False


def _against_answerability(results: Results, data: DataEntry, numbers: _Numbers) -> Iterator[Picture]:
    """The paper's last figure: faithfulness against answerability score and rate."""
    pairs = product(*(topics(results, data, name) for name in ("faithfulness", "answerability_rate")))
    for faithful, judged in pairs:
        keys = faithful.key("faithfulness"), judged.key("answerability")
        x = [numbers.column(keys[1], name) for name in ("score", "rate")]
        for model, y, score, rate in zip(numbers.models, numbers.column(keys[0], "faithfulness"), *x, strict=True):
            y = y[y.index.isin(score.index)]
            panels = [_Panel("answerability score", score), _Panel("answerability rate", rate)]
            key = f"answerability-{data.label}{faithful.tail}{judged.tail}-{model}"
            title = f"{judged.title('Faithfulness against answerability')}, {model}"
            yield from _scatter(key, title, y, panels)


def _against_cost(results: Results, data: DataEntry, numbers: _Numbers) -> Iterator[Picture]:
    """What faithfulness costs: token-forwards, and seconds on this machine."""
    x = [numbers.column(f"cost-{data.label}", name) for name in ("token-forwards", "seconds")]
    for topic in topics(results, data, "faithfulness"):
        faithfulness = numbers.column(topic.key("faithfulness"), "faithfulness")
        for model, y, forwards, seconds in zip(numbers.models, faithfulness, *x, strict=True):
            panels = [
                _Panel("token-forwards per attribution", forwards, True),
                _Panel("seconds per attribution", seconds, True),
            ]
            title = f"{topic.title('Faithfulness against cost')}, {model}"
            yield from _scatter(f"{topic.key('cost')}-{model}", title, y, panels)


_LEGEND = 16
"""Methods in a column of a scatter plot's legend, as many as fit beside its panels."""


def _scatter(key: str, title: str, y: Frame, panels: Sequence[_Panel]) -> Iterator[Picture]:
    """A panel per quantity, a point per method of y."""
    panels = [panel._replace(x=panel.x.reindex(y.index)) for panel in panels]
    panels = [panel for panel in panels if _drawn(panel, y).any()]
    if not panels:
        return
    columns = math.ceil(sum(map(any, zip(*(_drawn(panel, y) for panel in panels), strict=True))) / _LEGEND)
    with canvas(2.3 * columns + 3.4 * len(panels), 3.4, len(panels), sharey=True) as (figure, all_axes):
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw(axes, panel, y)
        all_axes[0].set_ylabel("faithfulness (0: no better than random)")
        known = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in all_axes]
        handles = {label: handle for pairs in known for handle, label in pairs}
        order = [name for name in y.index if name in handles]
        placed: dict[str, Any] = {"loc": "outside right upper", "handletextpad": 0.4, "ncols": columns}
        figure.legend([handles[name] for name in order], order, **placed)
    in_all = [all(column) for column in zip(*(_drawn(panel, y) for panel in panels), strict=True)]
    words = "; ".join(
        f"{y.index[i]} faithfulness {y['value'].iloc[i]:.2f}, "
        + ", ".join(f"{panel.label} {panel.x['value'].iloc[i]:.3g}" for panel in panels)
        for i, there in enumerate(in_all)
        if there
    )
    yield Picture(key, title, f"{words}.", figure)


def _draw(axes: Axes, panel: _Panel, y: Frame) -> None:
    axes.axhline(0, **_DASHED | {"linewidth": 0.8})
    for i, drawn in enumerate(_drawn(panel, y)):
        if not drawn:
            continue
        across, up, colour = panel.x.iloc[i], y.iloc[i], COLOURS[i % len(COLOURS)]
        line: dict[str, Any] = {"color": colour, "linewidth": 0.8, "alpha": 0.6}
        if across.low > 0 or (pd.notna(across.low) and not panel.logarithmic):
            axes.plot([across.low, across.high], [up.value, up.value], **line)
        axes.plot([across.value, across.value], [up.low, up.high], **line)
        point: dict[str, Any] = {"linestyle": "none", "marker": MARKERS[i % len(MARKERS)], "markersize": 7}
        edge: dict[str, Any] = {"color": colour, "markeredgecolor": INK, "markeredgewidth": 0.7}
        axes.plot(across.value, up.value, **point, **edge, label=y.index[i])
    if panel.logarithmic:
        _logarithmic(axes)
    axes.set_xlabel(panel.label)


def _logarithmic(axes: Axes) -> None:
    """A logarithmic x axis with as many numbers as fit."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    digits = "1" if high > 100 * low else "15" if high > 10 * low else "1235"
    for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        ticks(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in digits else "")


def _drawn(panel: _Panel, y: Frame) -> Frame:
    """Which methods have a point in a panel: they need an interval and, on a logarithmic axis, some cost."""
    return y["low"].notna() & (panel.x["value"] > 0 if panel.logarithmic else panel.x["value"].notna())


# ---- the frontier ---------------------------------------------------------------------------------------------------


def _frontier(results: Results, data: DataEntry, numbers: _Numbers) -> Iterator[Picture]:
    """What each method reaches at each budget: a picture per model, a panel per metric, a line per method."""
    for topic in topics(results, data, *NUMBERS):
        key, titles = topic.key("frontier"), families(topic.methods())
        names = [name for number, name in NUMBERS.items() if number in topic.measures]
        columns = [numbers.column(key, name) for name in (FORWARDS, *names)]
        for model, forwards, *frames in zip(numbers.models, *columns, strict=True):
            known = [(name, frame) for name, frame in zip(names, frames, strict=True) if frame["low"].notna().any()]
            if not known:
                continue
            with canvas(2.6 + 3.4 * len(known), 3.8, len(known)) as (figure, panels):
                for axes, (name, frame) in zip(panels, known, strict=True):
                    _budget_lines(axes, frame.assign(cost=forwards["value"], family=titles))
                    axes.set_ylabel(name)
                    axes.set_xlabel(f"{FORWARDS} per attribution")
                handles, labels = panels[0].get_legend_handles_labels()
                figure.legend(handles, labels, loc="outside right upper", handletextpad=0.4)
            words = "; ".join(
                f"{name}: " + ", ".join(f"{row} {value:.3g}" for row, value in frame["value"].dropna().items())
                for name, frame in known
            )
            title = f"{topic.title('Faithfulness at several budgets')}, {model}"
            yield Picture(f"{key}-{model}", title, f"{words}.", figure)


def _budget_lines(axes: Axes, frame: Frame) -> None:
    """A line per family over the cost of its rows; what needs no model is a horizontal line."""
    paid = frame["cost"].gt(0)
    for i, (family, rows) in enumerate(frame[~paid].dropna(subset="low").groupby("family", sort=False)):
        dashes = ((0, (4, 2)), (0, (1, 1.5)))[i % 2]
        axes.axhline(rows["value"].iloc[0], color=SOFT, linestyle=dashes, linewidth=1.2, label=family)
    for i, (family, rows) in enumerate(frame[paid].groupby("family", sort=False)):
        rows, colour = rows.dropna(subset="low").sort_values("cost"), COLOURS[i % len(COLOURS)]
        if rows.empty:
            continue
        point: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "markeredgecolor": INK, "markeredgewidth": 0.6}
        axes.plot(rows["cost"], rows["value"], **point, color=colour, label=family, markersize=6, linewidth=1.2)
        axes.vlines(rows["cost"], rows["low"], rows["high"], colors=colour, linewidth=0.8, alpha=0.6)
    _logarithmic(axes)
