"""Figures with a point a method: faithfulness against answerability, and against cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from noiser.bench.plan import MethodEntry
from noiser.metrics.bootstrap import Estimate
from noiser.report.choices import Source, ordinary, sources, without_boundings
from noiser.report.counts import COSTS
from noiser.report.drawing import COLOURS, INK, MARKERS, Picture, canvas
from noiser.report.names import data_title, method_title
from noiser.report.results import ATTRIBUTION, Cell, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["against_answerability", "against_cost"]


class _Panel(NamedTuple):
    """One scatter plot: what lies along x, and where each method stands."""

    label: str
    x: list[Estimate]
    y: list[Estimate]
    logarithmic: bool = False


def against_answerability(results: Results) -> Iterator[Picture]:
    """The paper's last figure: faithfulness against answerability score and rate."""
    for data in results.data:
        for faithful in sources(results, "faithfulness", data.label):
            for judged in sources(results, "answerability_rate", data.label):
                common = without_boundings(ordinary(results, [faithful], data.label))
                methods = [method for method in ordinary(results, [judged], data.label) if method in common]
                for model in results.models:
                    panels = _judged(results, model.label, data.label, methods, faithful, judged)
                    key = f"answerability-{data.label}{faithful.tail}{judged.tail}-{model.label}"
                    where = f"{data_title(data)}{judged.suffix}, {model.label}"
                    yield from _picture(key, f"Faithfulness against answerability on {where}", methods, panels)


def _judged(
    results: Results,
    model: str,
    data: str,
    methods: Sequence[MethodEntry],
    faithful: Source,
    judged: Source,
) -> list[_Panel]:
    """Answerability score and rate along x."""
    cells = [Cell(model, data, method.label, faithful.measure.label) for method in methods]
    y = [results.estimate(cell, faithful.summaries["faithfulness"]) for cell in cells]
    return [
        _Panel(
            f"answerability {name}",
            [
                results.estimate(cell._replace(metric=judged.measure.label), judged.summaries[f"answerability_{name}"])
                for cell in cells
            ],
            y,
        )
        for name in ("score", "rate")
    ]


def against_cost(results: Results) -> Iterator[Picture]:
    """What faithfulness costs: token-forwards, and seconds on this machine."""
    for data in results.data:
        for source in sources(results, "faithfulness", data.label):
            measure = source.measure
            methods = without_boundings(ordinary(results, [source], data.label))
            for model in results.models:
                cells = [Cell(model.label, data.label, method.label, measure.label) for method in methods]
                y = [results.estimate(cell, source.summaries["faithfulness"]) for cell in cells]
                paid = [cell._replace(metric=ATTRIBUTION) for cell in cells]
                panels = [
                    _Panel(
                        "token-forwards an attribution",
                        [results.estimate(cell, COSTS["token-forwards"]) for cell in paid],
                        y,
                        True,
                    ),
                    _Panel("seconds an attribution", [results.seconds(cell) for cell in paid], y, True),
                ]
                key = f"{source.key('cost', data)}-{model.label}"
                title = f"{source.title('Faithfulness against cost', data)}, {model.label}"
                yield from _picture(key, title, methods, panels)


def _picture(key: str, title: str, methods: Sequence[MethodEntry], panels: Sequence[_Panel]) -> Iterator[Picture]:
    panels = [panel for panel in panels if any(_placed(panel, index) for index in range(len(methods)))]
    if not panels:
        return
    with canvas(2.3 + 3.4 * len(panels), 3.4, len(panels), sharey=True) as (figure, all_axes):
        for axes, panel in zip(all_axes, panels, strict=True):
            _draw(axes, panel, methods)
        all_axes[0].set_ylabel("faithfulness (0: no better than random)")
        known = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in all_axes]
        handles = {label: handle for pairs in known for handle, label in pairs}
        order = [title for title in map(_title, methods) if title in handles]
        figure.legend([handles[name] for name in order], order, loc="outside right upper", handletextpad=0.4)
    said = "; ".join(
        f"{_title(method)} faithfulness {panels[0].y[i].value:.2f}, "
        + ", ".join(f"{panel.label} {panel.x[i].value:.3g}" for panel in panels)
        for i, method in enumerate(methods)
        if all(_placed(panel, i) for panel in panels)
    )
    yield Picture(key, title, f"{said}.", figure)


def _draw(axes: Axes, panel: _Panel, methods: Sequence[MethodEntry]) -> None:
    axes.axhline(0, color=INK, linestyle=(0, (4, 2)), linewidth=0.8)
    for index, method in enumerate(methods):
        if not _placed(panel, index):
            continue
        colour = COLOURS[index % len(COLOURS)]
        for one, across in ((panel.x[index], True), (panel.y[index], False)):
            if math.isfinite(one.low) and (one.low > 0 or not (panel.logarithmic and across)):
                x, y = panel.x[index].value, panel.y[index].value
                ends = ([one.low, one.high], [y, y]) if across else ([x, x], [one.low, one.high])
                axes.plot(*ends, color=colour, linewidth=0.8, alpha=0.6)
        axes.plot(
            panel.x[index].value,
            panel.y[index].value,
            linestyle="none",
            marker=MARKERS[index % len(MARKERS)],
            markersize=7,
            color=colour,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            label=_title(method),
        )
    if panel.logarithmic:
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        digits = "1" if high > 100 * low else "15" if high > 10 * low else "1235"
        for ticks in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in digits else "")
    axes.set_xlabel(panel.label)


def _title(method: MethodEntry) -> str:
    return method_title(method.label)


def _placed(panel: _Panel, index: int) -> bool:
    """Whether a method has a place in a panel: it needs an interval and, on a logarithmic axis, some cost."""
    x, y = panel.x[index].value, panel.y[index].value
    return (
        math.isfinite(x) and math.isfinite(y) and math.isfinite(panel.y[index].low) and (x > 0 or not panel.logarithmic)
    )
