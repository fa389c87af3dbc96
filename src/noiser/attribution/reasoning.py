"""The graph of a reasoning as a figure: from the prompt through what was written to one of the targets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from noiser.attribution.display import check_targets, label
from noiser.attribution.figure import figure_class
from noiser.attribution.record import AttributionRecord
from noiser.attribution.through import Paths, flow, paths
from noiser.checks import check_probability
from noiser.errors import ParameterError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINE, _TEXT_SIZE = 20.0, 8.0
"""In points."""
_ARCS, _NUMBERS = 0.3, 0.07
"""Parts of the width: of the arcs on the left, and of the numbers before the texts."""
_PROMPT, _WRITTEN = "#a86f00", "#0b6fae"


class Edge(NamedTuple):
    """What of a target's influence goes from one line to a later one.

    Attributes:
        source: number of the line: the prompt's units first, then the targets.
        target: number of the later line.
        flow: sum of the products of weights over all paths to the target that use this edge, 0 to 1.
    """

    source: int
    target: int
    flow: float


def edges(graph: Paths, target: int) -> list[Edge]:
    """The edges that lead to a target, the strongest last."""
    count = len(graph.columns)
    weights = flow(graph, target).tolist()
    found = [Edge(source, count + row, value) for row, line in enumerate(weights) for source, value in enumerate(line)]
    return sorted((edge for edge in found if edge.flow > 0), key=lambda edge: edge.flow)


def reasoning_figure(att: AttributionRecord, target: int, width: float, least: float) -> Figure:
    """Lines of text with arcs between them; see `noiser.Attribution.plot_through`."""
    page_class = figure_class()
    from matplotlib.patches import Arc

    check_probability("least", least)
    (target,) = check_targets(att, [target])
    if not width > 1:
        raise ParameterError(f"width is {width!r}; expected inches, more than 1, such as 6.5 for a page.")
    graph = paths(att)
    leading = edges(graph, target)
    texts = [*(att.units[column].text for column in graph.columns), *(each.text for each in att.targets)]
    shown = len(graph.columns) + target + 1  # what was written afterwards leads nowhere
    height = _LINE * shown
    drawing = page_class(figsize=(width, height / 72))
    axes = drawing.add_axes((0, 0, 1, 1), xlim=(0, 72 * width), ylim=(height, 0))
    axes.set_axis_off()
    left = 72 * width * _ARCS
    most = int(72 * width * (1 - _ARCS - _NUMBERS) / (0.5 * _TEXT_SIZE))
    for edge in leading:
        if edge.flow < least:
            continue
        top, bottom = (_LINE * (line + 0.5) for line in (edge.source, edge.target))
        size = (2 * left * 0.95 * (edge.target - edge.source) / max(1, shown - 1), bottom - top)
        colour = _PROMPT if edge.source < len(graph.columns) else _WRITTEN
        arc = Arc((left, (top + bottom) / 2), *size, theta1=90, theta2=270, color=colour)
        arc.set(linewidth=0.5 + 5 * edge.flow, alpha=min(1.0, 0.25 + edge.flow))
        axes.add_patch(arc)
    style: dict[str, Any] = {"size": _TEXT_SIZE, "va": "center", "parse_math": False, "usetex": False}
    for line, text in enumerate(texts[:shown]):
        share = sum(edge.flow for edge in leading if edge.source == line)
        y, number = _LINE * (line + 0.5), "" if line == shown - 1 else f"{share:.0%}"
        axes.text(left + 72 * width * _NUMBERS, y, number, ha="right", color="#59606e", **style)
        text = label(text)
        text = text if len(text) <= most else text[: max(1, most - 1)] + "…"
        colour = _PROMPT if line < len(graph.columns) else _WRITTEN
        weight = "bold" if line == shown - 1 else "normal"
        axes.text(left + 72 * width * _NUMBERS + 5, y, text, color=colour, weight=weight, **style)
    return drawing
