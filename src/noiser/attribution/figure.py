"""Attributions as a figure for a paper: vector graphics of matplotlib; words are set from left to
right.

A bar below a unit is a positive score, one above it a negative score, as thick as the colour is
strong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from noiser.attribution.display import Colour, check_comparable, check_targets, headings, tint
from noiser.attribution.heatmap import HeatMap, heat_map
from noiser.errors import DependencyError, ParameterError
from noiser.types import Pair

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from noiser.attribution.record import AttributionRecord

Point = tuple[float, float]

_PAPER: Colour = (255, 255, 255)
_TEXT_SIZE = 9.0
_SMALL_SIZE = 7.0
_LINE = 15.0
_GAP = 8.0
_SCALE_WIDTH = 90.0
_SCALE_STEPS = 60
_MARGIN = 6.0
_ABOVE, _BELOW, _BAR = 1.05, 0.4, 0.18
"""In sizes of the text: how far a tint reaches above and below the baseline, and the thickest
bar.
"""
_WITH_ARCS, _FULL = 1.6, 0.98
"""The height of lines with arcs between them, and the part of a line that is filled: hinting widens
letters.
"""


def figure(
    attributions: Sequence[AttributionRecord], target: int, width: float, *, pairs: bool = False
) -> Figure:
    """A heat map with a colour scale for each attribution of one prompt; see `Attribution.plot`."""
    try:
        from matplotlib.figure import Figure  # without global state
    except ImportError as error:
        raise DependencyError("Figures need matplotlib.", "report") from error
    drawing: Any = Figure()  # matplotlib gives keyword arguments no types
    check_comparable(attributions)
    (row,) = check_targets(attributions[0], [target])
    if not width > 1:
        raise ParameterError(
            f"width is {width!r}; expected inches, more than 1, such as 3.3 for a column."
        )
    axes = drawing.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    line = _LINE * _WITH_ARCS if pairs else _LINE
    page = _Page(axes, 72 * width - 2 * _MARGIN, line)
    for att, heading in zip(attributions, headings(attributions), strict=True):
        found = [pair for pair in att.pairs if pair.target == row] if pairs else []
        page.add(heat_map(att, row), heading if len(attributions) > 1 else "", found)
    across = min(72 * width, page.right + 2 * _MARGIN)
    down = page.y - _LINE
    drawing.set_size_inches(across / 72, down / 72)
    axes.set(xlim=(-_MARGIN, across - _MARGIN), ylim=(down, 0))
    return drawing


class _Page:
    """Axes in points from the upper left, and the place of the next text: x, and y of the
    baseline.
    """

    def __init__(self, axes: Any, width: float, line: float) -> None:
        self.axes = axes
        self.width = width
        self.line = line
        self.x = 0.0
        self.y = line
        self.right = 0.0

    def add(self, heat: HeatMap, heading: str, pairs: Sequence[Pair]) -> None:
        """A heading, the text before the target with its colours, the target, arcs of pairs, and
        the colour scale.
        """
        tops: dict[int, Point] = {}
        if heading:
            self.line_of(heading, bold=True)
        for cell in heat.cells:
            space, body = cell.parts()
            self.write(space)
            colour = None if cell.score is None else tint(cell.weight, _PAPER)
            tops |= dict.fromkeys(cell.columns, self.write(body, colour, cell.weight or 0.0))
        self.write(" → ")
        self.write(heat.target, bold=True)
        self.line_of(f" rather than {heat.foil}" if heat.foil else "")
        largest = max((abs(pair.score) for pair in pairs), default=1.0)
        for pair in (pair for pair in pairs if tops.keys() >= {*pair.units}):
            start, end = (tops[unit] for unit in pair.units)
            self._arc(
                start,
                end,
                0.5 + abs(pair.score) / largest,
                "dashed" if pair.kind == "either" else "solid",
            )
        for line in heat.pairs if pairs else ():
            self.line_of(line, size=_SMALL_SIZE)
        if heat.largest:
            self._scale(f"-{heat.largest}" if "blue" in heat.meaning else "0", heat.largest)
            self.line_of(
                "  ".join(f"{colour}: {words}" for colour, words in heat.meaning.items()),
                size=_SMALL_SIZE,
            )
        self.y += _GAP

    def line_of(self, text: str, **style: Any) -> None:
        self.write(text, **style)
        self.new_line()

    def write(
        self,
        text: str,
        colour: Colour | None = None,
        bar: float = 0.0,
        *,
        size: float = _TEXT_SIZE,
        bold: bool = False,
    ) -> Point:
        """The middle of the upper edge of a text that is now at the cursor, continued below where
        it does not fit.
        """
        top = None
        weight = "bold" if bold else "normal"
        for word in re.findall(r"\n|[^\S\n]+|\S+", text):
            for piece in _broken(word, _FULL * self.width, size, bold):
                width = _text_width(piece, size, bold)
                if piece == "\n" or (self.x and self.x + width > self.width):
                    self.new_line()
                if not piece.strip() and not self.x:
                    continue
                self._paint(self.x, width, size, colour, bar)
                if piece.strip():
                    self.axes.text(
                        self.x,
                        self.y,
                        piece,
                        size=size,
                        weight=weight,
                        parse_math=False,
                        usetex=False,
                    )
                if top is None:
                    top = (self.x + width / 2, self.y - _ABOVE * size)
                self.x += width
        return top or (self.x, self.y)

    def new_line(self) -> None:
        self.x = 0.0
        self.y = self.y + self.line

    def _paint(
        self, x: float, width: float, size: float, colour: Colour | None, bar: float
    ) -> None:
        """A colour and its bar, as thick as a weight says, behind a text."""
        from matplotlib.patches import Rectangle

        self.right = max(self.right, x + width)
        if colour is None:
            return
        top = self.y - _ABOVE * size
        bottom = self.y + _BELOW * size
        thickness = _BAR * size * bar
        face = tuple(value / 255 for value in colour)
        self.axes.add_patch(
            Rectangle((x, top), width, bottom - top, facecolor=face, edgecolor="none")
        )
        middle = (bottom if thickness > 0 else top) - thickness / 2
        self.axes.hlines(
            middle, x, x + width, colors="black", linewidths=abs(thickness), snap=False
        )

    def _arc(self, start: Point, end: Point, width: float, style: str) -> None:
        """A curve above two points."""
        from matplotlib import patches, path

        middle = (start[0] + end[0]) / 2
        highest = min(start[1], end[1])
        bend = (middle, highest - 2 * (_WITH_ARCS - 1) * _LINE)
        curve = path.Path(
            [start, bend, end], [path.Path.MOVETO, path.Path.CURVE3, path.Path.CURVE3]
        )
        self.axes.add_patch(
            patches.PathPatch(
                curve, fill=False, linewidth=width, linestyle=style, edgecolor="black"
            )
        )

    def _scale(self, low: str, high: str) -> None:
        """The colours from the lowest to the highest score, as long as there is room."""
        ends = sum(_text_width(text, _SMALL_SIZE, bold=False) for text in (low, "  ", "  ", high))
        room = _FULL * self.width - ends
        step = max(0.0, min(_SCALE_WIDTH, room)) / (_SCALE_STEPS + 1)
        self.write(f"{low}  ", size=_SMALL_SIZE)
        first = 0.0 if low == "0" else -1.0
        for index in range(_SCALE_STEPS):
            weight = first + (1 - first) * index / (_SCALE_STEPS - 1)
            # A little wider than a step: viewers show a seam between rectangles that only touch.
            self._paint(
                self.x + index * step, 1.5 * step, _SMALL_SIZE, tint(weight, _PAPER), weight
            )
        self.x += (_SCALE_STEPS + 1) * step
        self.line_of(f"  {high}", size=_SMALL_SIZE)


def _broken(word: str, width: float, size: float, bold: bool) -> list[str]:
    """A word in parts that are not wider than a line."""
    if _text_width(word, size, bold) <= width:
        return [word]
    parts = [""]
    for letter in word:
        longer = parts[-1] + letter
        if parts[-1] and _text_width(longer, size, bold) > width:
            parts.append(letter)
        else:
            parts[-1] = longer
    return parts


def _text_width(text: str, size: float, bold: bool) -> float:
    """In points. Spaces, whose ink has no width, count as much as in most fonts."""
    from matplotlib import font_manager, textpath

    if text.isspace():
        return 0.32 * size * len(text)
    font = font_manager.FontProperties(size=size, weight="bold" if bold else "normal")
    return textpath.text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]
