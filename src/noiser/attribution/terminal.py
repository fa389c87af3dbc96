"""Heat maps in a terminal; where there are no colours, aligned tables of scores with bars."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.color import Color
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from noiser.attribution.display import (
    DARK_PAPER,
    Colour,
    check_comparable,
    dark_ink,
    headings,
    provenance,
    tint,
    visible,
)
from noiser.attribution.heatmap import HeatMap, Table, heat_map, shared_legend, table

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution

_MOST_TARGETS, _MOST_UNITS = 8, 60
"""Of a longer answer or prompt the rest is left out."""
_BAR = 24
_INK, _SOFT_INK, _WHITE, _BLACK = (225, 228, 235), (150, 155, 165), (255, 255, 255), (0, 0, 0)
_ASCII = str.maketrans("→±·█░↵⇥␣…“”⟨⟩", '>~|#-$>_.""<>')
"""Substitutes for terminals that have no Unicode."""


def to_text(attributions: Sequence[Attribution], *, plain: bool = False) -> str:
    """One attribution, or several of one prompt below each other, as text. Raises ParameterError for different prompts.

    There are escape sequences if stdout is a terminal and NO_COLOR is not set. `plain` text is for a file: it has none,
    is in Unicode whatever stdout is, and has all targets.
    """
    file = io.StringIO() if plain else sys.stdout
    console = Console(file=file, force_jupyter=False)
    if plain or os.environ.get("NO_COLOR") or not console.is_terminal:
        console = Console(file=file, force_jupyter=False, color_system=None, force_terminal=False, width=console.width)
    with console.capture() as capture:
        console.print(Group(*sections(attributions, console, None if plain else _MOST_TARGETS)))
    text = "\n".join(part.rstrip(" ") for part in capture.get().split("\n")).rstrip("\n")
    if console.encoding.startswith("utf"):
        return text
    return text.translate(_ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)


def sections(
    attributions: Sequence[Attribution], console: Console, most: int | None = _MOST_TARGETS
) -> Iterator[RenderableType]:
    """A section for each of the first `most` targets, or for all, then where the numbers come from."""
    check_comparable(attributions)
    colours = console.color_system is not None and not console.no_color
    count = len(attributions[0].targets)
    for row in range(count)[:most]:
        if row:
            yield Text()
        yield from _coloured(attributions, row) if colours else _plain(attributions, row)
    if most and count > most:
        yield Text()
        yield _line(f"… {count - most} more targets; to_html() and to_markdown() show all", "dim")
    for att in attributions:
        yield _line(provenance(att), "dim")


def _coloured(attributions: Sequence[Attribution], row: int) -> Iterator[RenderableType]:
    maps = [heat_map(att, row) for att in attributions]
    several, common = len(maps) > 1, shared_legend(maps)
    if several:
        yield _line(maps[0].question, "dim")
    for heat, heading in zip(maps, headings(attributions), strict=True):
        if several:
            yield _line(heading, "bold", indent=1)
        yield _heat_map(heat)
        if not several:
            yield _line(heat.facts, "dim")
        if heat.highest:
            yield _line(" · ".join(f"{name} {score}" for name, score in heat.highest))
        for line in heat.pairs:
            yield _line(line)
        legend = heat if not common else common if heat is maps[-1] else None
        if legend and legend.largest:
            pairs = zip(("orange", "blue"), legend.meaning, strict=False)
            yield _line("; ".join(f"{colour}: {meaning}" for colour, meaning in pairs), "dim")


def _plain(attributions: Sequence[Attribution], row: int) -> Iterator[RenderableType]:
    heat, several, units = heat_map(attributions[0], row), len(attributions) > 1, attributions[0].units
    text = visible("".join(cell.text for cell in heat.cells).lstrip(" "))
    yield _line(f"{text} → {heat.target}", indent=0)
    yield _line(heat.question if several else heat.facts)
    if several and all(att.units == units for att in attributions):
        most = None if len(units) <= _MOST_UNITS else max(1, _MOST_UNITS // len(attributions))
        yield from _numbers(table(attributions, row, most))
        return
    for att, heading in zip(attributions, headings(attributions), strict=True):
        if several:
            yield _line(heading)
        yield from _numbers(table([att], row, _MOST_UNITS))
        for line in heat_map(att, row).pairs:
            yield _line(line)


def _numbers(numbers: Table) -> Iterator[RenderableType]:
    """Units by methods; or of one method units, scores with their errors and bars, solid for positive scores."""
    if not numbers.rows:
        yield _line("no unit stands before this target")
        return
    rows = [numbers.head, *numbers.rows]
    bars = numbers.head[1] == "score"
    if bars:
        with_error = numbers.head[2:3] == ["±"]
        rows = [[row[0], f"{row[1]} ± {row[2]}" if with_error and row[2] else row[1]] for row in numbers.rows]
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(max_width=30, no_wrap=True)
    for column in range(1, len(rows[0])):
        narrowest = max(len(row[column]) for row in rows[not bars :])  # a heading may be folded
        grid.add_column(justify="right", overflow="fold", min_width=narrowest)
    grid.add_column(no_wrap=True, overflow="crop")
    for index, (unit, *texts) in enumerate(rows):
        weight = numbers.weights[index][0] if bars else 0.0
        bar = ("█" if weight > 0 else "░") * round(_BAR * abs(weight))
        grid.add_row(*map(Text, (f"  {unit}", *texts, bar)))
    yield grid
    if numbers.note:
        yield _line(f"({numbers.note})")


def _line(text: str, style: str = "", *, indent: int = 2) -> RenderableType:
    """A paragraph of text that rich takes literally: no markup, no emoji names."""
    return Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent))


def _heat_map(heat: HeatMap) -> RenderableType:
    """The text before a target on dark paper, which looks the same in light and in dark terminals."""
    text = Text(style=_style(_INK), overflow="fold")
    for cell in heat.cells:
        space, body = cell.parts()
        ink = _SOFT_INK if cell.score is None else _BLACK if dark_ink(cell.weight) else _WHITE
        text.append(space).append(body, _style(ink, tint(cell.weight, DARK_PAPER)))
    text.append(" → ", _style(_SOFT_INK)).append(heat.target, _style(_WHITE, strong=True))
    return Padding(text, (0, 1), style=_style(_INK))


def _style(colour: Colour, background: Colour = DARK_PAPER, *, strong: bool = False) -> Style:
    """A new style each time, because rich caches how a style was rendered, whatever the terminal's colours."""
    color, bgcolor = Color.from_rgb(*colour), Color.from_rgb(*background)
    return Style(color=color, bgcolor=bgcolor, bold=strong, underline=strong)
