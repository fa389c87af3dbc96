"""Attributions as a figure for a paper: vector graphics of matplotlib, in the colours of the other displays.

Colour never stands alone: a bar below a unit is a positive score and one above it a negative score, as thick as the
colour is strong. Words are set from left to right, whatever their script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution.display import Colour, check_comparable, check_targets, headings, tint
from noiser.attribution.heatmap import HeatMap, heat_map
from noiser.errors import DependencyError, ParameterError
from noiser.types import Pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from noiser.attribution.result import Attribution

_PAPER: Colour = (255, 255, 255)
_TEXT_SIZE, _SMALL_SIZE, _LINE, _GAP = 9.0, 7.0, 15.0, 8.0
_ABOVE, _BELOW, _BAR = 1.05, 0.4, 0.18
"""How far a tint reaches above and below the baseline, and the thickest bar, in sizes of the text."""
_SCALE_WIDTH, _SCALE_STEPS, _MARGIN = 90.0, 60, 6.0
_WITH_ARCS = 1.6
"""The height of lines with arcs between them, in heights of a line."""
_FULL = 0.98
"""How much of a line is filled to its end: hinting makes letters a little wider than planned."""


class _Box(NamedTuple):
    """A text, a weight's colour and bar, or both; x, y (of the baseline) and width in points from the upper left."""

    x: float
    y: float
    width: float
    text: str = ""
    weight: float | None = None
    size: float = _TEXT_SIZE
    bold: bool = False
    signal: bool = True


class _Curve(NamedTuple):
    """Three points of a curve in points from the upper left, its width, and whether it is dashed."""

    points: list[tuple[float, float]]
    width: float
    dashed: bool


def figure(attributions: Sequence[Attribution], target: int, width: float, *, pairs: bool = False) -> Figure:
    """A heat map with a colour scale for each attribution of one prompt; see `Attribution.plot`."""
    page_class = figure_class()
    from matplotlib.patches import PathPatch, Rectangle
    from matplotlib.path import Path

    check_comparable(attributions)
    (row,) = check_targets(attributions[0], [target])
    if not width > 1:
        raise ParameterError(f"width is {width!r}; expected inches, more than 1, such as 3.3 for a column.")
    page = _Page(72 * width - 2 * _MARGIN, _LINE * (_WITH_ARCS if pairs else 1))
    for att, heading in zip(attributions, headings(attributions), strict=True):
        found = [pair for pair in att.pairs if pair.target == row] if pairs else []
        page.add(heat_map(att, row), heading if len(attributions) > 1 else "", found)
    across, down = min(72 * width, max(box.x + box.width for box in page.boxes) + 2 * _MARGIN), page.y - _LINE
    drawing = page_class(figsize=(across / 72, down / 72))
    axes = drawing.add_axes((0, 0, 1, 1), xlim=(-_MARGIN, across - _MARGIN), ylim=(down, 0))
    axes.set_axis_off()
    for box in page.boxes:
        if box.weight is not None:
            top, bottom = box.y - _ABOVE * box.size, box.y + _BELOW * box.size
            thickness = _BAR * box.size * box.weight * box.signal
            colour = tuple(value / 255 for value in tint(box.weight, _PAPER, signal=box.signal))
            axes.add_patch(Rectangle((box.x, top), box.width, bottom - top, facecolor=colour, edgecolor="none"))
            middle = (bottom if thickness > 0 else top) - thickness / 2
            axes.hlines(middle, box.x, box.x + box.width, colors="black", linewidths=abs(thickness), snap=False)
        if box.text.strip():
            weight = "bold" if box.bold else "normal"
            axes.text(box.x, box.y, box.text, size=box.size, weight=weight, parse_math=False, usetex=False)
    for curve in page.curves:
        path = Path(curve.points, [Path.MOVETO, Path.CURVE3, Path.CURVE3])
        style = "dashed" if curve.dashed else "solid"
        axes.add_patch(PathPatch(path, fill=False, linewidth=curve.width, linestyle=style, edgecolor="black"))
    return drawing


def figure_class() -> type[Figure]:
    """Matplotlib's class of figures, without its global state. Raises DependencyError where it is not installed."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise DependencyError("Figures need matplotlib.", "report") from error
    return matplotlib.figure.Figure


class _Page:
    """Boxes laid out so far, and the place of the next one."""

    def __init__(self, width: float, line: float) -> None:
        self.width, self.line, self.x, self.y = width, line, 0.0, line
        self.boxes: list[_Box] = []
        self.curves: list[_Curve] = []

    def add(self, heat: HeatMap, heading: str, pairs: Sequence[Pair]) -> None:
        """A heading, the text before the target with its colours, the target, arcs of pairs, and the colour scale."""
        tops: dict[int, tuple[float, float]] = {}
        if heading:
            self.write(heading, bold=True)
            self.new_line()
        for cell in heat.cells:
            space, body = cell.parts()
            self.write(space)
            first = len(self.boxes)
            self.write(body, None if cell.score is None else cell.weight, signal=cell.signal)
            for box in self.boxes[first : first + 1]:
                tops |= dict.fromkeys(cell.columns, (box.x + box.width / 2, box.y - _ABOVE * box.size))
        self.write(" → ")
        self.write(heat.target, bold=True)
        self.write(f" rather than {heat.foil}" if heat.foil else "")
        self.new_line()
        largest = max((abs(pair.score) for pair in pairs), default=1.0)
        for pair in (pair for pair in pairs if tops.keys() >= {*pair.units}):
            (x, y), (to_x, to_y) = (tops[unit] for unit in pair.units)
            middle = ((x + to_x) / 2, min(y, to_y) - 2 * (_WITH_ARCS - 1) * _LINE)
            self.curves.append(
                _Curve([(x, y), middle, (to_x, to_y)], 0.5 + abs(pair.score) / largest, pair.kind == "either")
            )
        for line in heat.pairs if pairs else ():
            self.write(line, size=_SMALL_SIZE)
            self.new_line()
        if heat.largest:
            self._scale(f"-{heat.largest}" if "blue" in heat.meaning else "0", heat.largest)
            for colour, words in heat.meaning.items():
                self.write(f"{colour}: {words}  ", size=_SMALL_SIZE)
            self.new_line()
        self.y += _GAP

    def write(self, text: str, weight: float | None = None, *, size: float = _TEXT_SIZE, **look: bool) -> None:
        """Text at the cursor, continued on the next line where it does not fit. No line begins with a space."""
        for word in re.findall(r"\n|[^\S\n]+|\S+", text):
            for piece in _broken(word, _FULL * self.width, size, look.get("bold", False)):
                width = _text_width(piece, size, look.get("bold", False))
                if piece == "\n" or (self.x and self.x + width > self.width):
                    self.new_line()
                if piece.strip() or self.x:
                    self.boxes.append(_Box(self.x, self.y, width, piece, weight, size, **look))
                    self.x += width

    def new_line(self) -> None:
        self.x, self.y = 0.0, self.y + self.line

    def _scale(self, low: str, high: str) -> None:
        """The colours from the lowest to the highest score, as long as there is room."""
        ends = sum(_text_width(text, _SMALL_SIZE, bold=False) for text in (low, "  ", "  ", high))
        step = max(0.0, min(_SCALE_WIDTH, _FULL * self.width - ends)) / (_SCALE_STEPS + 1)
        self.write(f"{low}  ", size=_SMALL_SIZE)
        first = 0.0 if low == "0" else -1.0
        for index in range(_SCALE_STEPS):
            weight = first + (1 - first) * index / (_SCALE_STEPS - 1)
            # A little wider than a step: viewers show a seam between rectangles that only touch.
            self.boxes.append(_Box(self.x + index * step, self.y, 1.5 * step, weight=weight, size=_SMALL_SIZE))
        self.x += (_SCALE_STEPS + 1) * step
        self.write(f"  {high}", size=_SMALL_SIZE)
        self.new_line()


def _broken(word: str, width: float, size: float, bold: bool) -> list[str]:
    """A word in parts that are not wider than a line."""
    parts = [""]
    for letter in word if _text_width(word, size, bold) > width else [word]:
        if parts[-1] and _text_width(parts[-1] + letter, size, bold) > width:
            parts.append("")
        parts[-1] += letter
    return parts


def _text_width(text: str, size: float, bold: bool) -> float:
    """In points. Spaces, whose ink has no width, count as much as in most fonts."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    if text.isspace():
        return 0.32 * size * len(text)
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
