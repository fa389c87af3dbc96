"""Heat maps in a terminal; where there are no colours, aligned tables of scores with bars."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.style import Style
from rich.table import Table as Grid
from rich.text import Text

from noiser.attribution.display import (
    DARK_PAPER,
    Cell,
    Colour,
    Column,
    HeatMap,
    Table,
    check_comparable,
    dark_ink,
    headings,
    heat_map,
    joint_table,
    provenance,
    score_table,
    shared_legend,
    tint,
    visible,
)
from noiser.attribution.record import AttributionRecord

_MOST_TARGETS, _MOST_UNITS = 8, 60
"""Of a longer answer or prompt the rest is folded."""
_BAR = 24
_UNIT, _GAP = 30, 2
"""Characters of the widest unit, and between columns."""
_INK, _SOFT_INK, _WHITE, _BLACK = (225, 228, 235), (150, 155, 165), (255, 255, 255), (0, 0, 0)
_ASCII = str.maketrans(
    {"→": "->", "±": "+/-", "·": "|", "█": "#", "░": "-", "↵": "\\n", "⇥": "\\t", "␣": "_", "…": "..."}
    | {"“": '"', "”": '"', "⟨": "<", "⟩": ">"}
)
"""Stand-ins for the marks used here, for terminals that have no Unicode."""


Section = Callable[[Sequence[AttributionRecord], int, int | None], Iterator[RenderableType]]
"""Attributions, the target, and the width where there are no colours."""


class Comparison:
    """Several attributions of one prompt, for rich to print below each other, target by target.

    Raises:
        ParameterError: no attribution, or different prompts.
    """

    def __init__(self, attributions: Sequence[AttributionRecord]) -> None:
        check_comparable(attributions)
        self.attributions = tuple(attributions)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _shown(self.attributions, console, options.max_width, _compared, _MOST_TARGETS)


def render(att: AttributionRecord, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
    """One heat map per target with its strongest units, then where the numbers come from."""
    return _shown([att], console, options.max_width, _single, _MOST_TARGETS)


def to_text(att: AttributionRecord, *, plain: bool = False) -> str:
    """What `print` shows: escape sequences only if stdout is a terminal and NO_COLOR is not set.

    Args:
        att: what is shown.
        plain: for a file: without escape sequences, in Unicode whatever stdout is, and with all targets.
    """
    return _captured([att], _single, plain)


def compare_text(attributions: Sequence[AttributionRecord], *, plain: bool = False) -> str:
    """Several attributions of one prompt below each other, as `to_text` shows one.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    check_comparable(attributions)
    return _captured(attributions, _compared, plain)


def _captured(attributions: Sequence[AttributionRecord], section: Section, plain: bool) -> str:
    file = io.StringIO() if plain else sys.stdout
    console = Console(file=file, force_jupyter=False)
    if plain or os.environ.get("NO_COLOR") or not console.is_terminal:
        console = Console(file=file, force_jupyter=False, color_system=None, force_terminal=False, width=console.width)
    with console.capture() as capture:
        console.print(Group(*_shown(attributions, console, console.width, section, None if plain else _MOST_TARGETS)))
    text = "\n".join(part.rstrip(" ") for part in capture.get().split("\n")).rstrip("\n")
    if console.encoding.startswith("utf"):
        return text
    return text.translate(_ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)


def _shown(
    attributions: Sequence[AttributionRecord], console: Console, width: int, section: Section, most: int | None
) -> Iterator[RenderableType]:
    """A section for each of the first `most` targets, or for all, then where the numbers come from."""
    colours = console.color_system is not None and not console.no_color
    targets = max(len(att.targets) for att in attributions)
    rows = range(targets)[:most]
    for row in rows:
        if row:
            yield _line("")
        yield from section([att for att in attributions if row < len(att.targets)], row, width if not colours else None)
    if more := targets - len(rows):
        note = (
            f"… {more} more target{'s'[: more > 1]}: all are in to_html() and to_markdown(), and in what -o FILE writes"
        )
        yield _line("")
        yield _line(note, "dim", indent=2)
    for att in attributions:
        yield _line(" · ".join(provenance(att)), "dim", indent=2)


def _single(attributions: Sequence[AttributionRecord], row: int, width: int | None) -> Iterator[RenderableType]:
    heat = heat_map(attributions[0], row)
    yield _prompt_line(heat) if width else _heat_map(heat)
    yield from _facts(heat.question + heat.noise, "" if width else "dim")
    yield from _bars(attributions[0], row) if width else _highest(heat)
    yield from _legend(heat, width)


def _compared(attributions: Sequence[AttributionRecord], row: int, width: int | None) -> Iterator[RenderableType]:
    first, maps = attributions[0], [heat_map(att, row) for att in attributions]
    if width:
        yield _prompt_line(maps[0])
    yield from _facts(maps[0].question, "" if width else "dim")
    if width and all(att.units == first.units for att in attributions):
        most = None if len(first.units) <= _MOST_UNITS else max(1, _MOST_UNITS // len(attributions))
        yield from _columns(joint_table(attributions, row, most), width)
        return
    common = shared_legend(maps)
    for att, heat, heading in zip(attributions, maps, headings(attributions), strict=True):
        yield _line(heading, indent=2) if width else _line(heading, "bold", indent=1)
        yield from _bars(att, row) if width else (_heat_map(heat), *_highest(heat))
        if not common:
            yield from _legend(heat, width)
    if common:
        yield from _legend(common, width)


def _line(text: str, style: str = "", *, indent: int = 0) -> RenderableType:
    """A paragraph of text that rich takes literally: no mark-up, no emoji names."""
    return Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent))


def _facts(known: Sequence[str], style: str = "") -> Iterator[RenderableType]:
    if known:
        yield _line(" · ".join(known), style, indent=2)


def _note(table: Table) -> Iterator[RenderableType]:
    if table.note:
        yield _line(f"({table.note})", indent=2)


def _prompt_line(heat: HeatMap) -> RenderableType:
    text = visible("".join(cell.text for cell in heat.cells).lstrip(" "))
    return _line(f"{text} → {heat.target}")


def _highest(heat: HeatMap) -> Iterator[RenderableType]:
    if heat.highest:
        yield _line(" · ".join(f"{name} {score}" for name, score in heat.highest), indent=2)


def _legend(heat: HeatMap, width: int | None) -> Iterator[RenderableType]:
    """The colours in words, where there are colours."""
    if heat.largest and not width:
        pairs = zip(("orange", "blue"), heat.meaning, strict=False)
        yield _line("; ".join(f"{colour}: {meaning}" for colour, meaning in pairs), "dim", indent=2)


def _heat_map(heat: HeatMap) -> RenderableType:
    """The text before a target on dark paper, which looks the same in light and in dark terminals."""
    text = Text(style=_style(_INK), overflow="fold")
    for cell in heat.cells:
        space, body = cell.parts()
        text.append(space).append(body, _cell_style(cell))
    text.append(" → ", _style(_SOFT_INK)).append(heat.target, _style(_WHITE, strong=True))
    return Padding(text, (0, 1), style=_style(_INK))


def _cell_style(cell: Cell) -> Style:
    if cell.score is None:
        return _style(_SOFT_INK)
    return _style(_BLACK if dark_ink(cell.weight, DARK_PAPER) else _WHITE, tint(cell.weight, DARK_PAPER))


def _style(colour: Colour, background: Colour = DARK_PAPER, *, strong: bool = False) -> Style:
    """A new style each time: rich renders one only once, whatever the terminal's colours."""
    color, bgcolor = Color.from_rgb(*colour), Color.from_rgb(*background)
    return Style(color=color, bgcolor=bgcolor, bold=strong, underline=strong)


def _bars(att: AttributionRecord, row: int) -> Iterator[RenderableType]:
    """A table of units, scores and bars, solid for positive scores; of a long prompt the strongest units."""
    table = score_table(att, row, _MOST_UNITS)
    if not table.labels:
        yield _line("no unit stands before this target", indent=2)
        return
    numbers = table.columns[0].texts
    if table.columns[1:] and table.columns[1].heading == "±":
        errors = table.columns[1].texts
        numbers = [f"{number} ± {error}" if error else number for number, error in zip(numbers, errors, strict=True)]
    grid = Grid.grid(padding=(0, _GAP, 0, 0))
    grid.add_column(max_width=_UNIT, no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="crop")
    for unit, number, weight in zip(table.labels, numbers, table.bars, strict=True):
        bar = ("█" if weight > 0 else "░") * round(_BAR * abs(weight))
        grid.add_row(*map(Text, (f"  {unit}", number, bar)))
    yield grid
    yield from _note(table)


def _columns(table: Table, width: int) -> Iterator[RenderableType]:
    """Units by methods. Where `width` is too small for all, headings are folded, and the rest is in further tables."""
    units = [f"  {table.unit}", *(f"  {unit}" for unit in table.labels)]
    widest = min(_UNIT, max(map(cell_len, units)))
    widths = [max(map(cell_len, [column.heading, *column.texts])) for column in table.columns]
    if widest + sum(widths) + _GAP * (len(widths) + 1) > width:
        widths = [max(map(cell_len, [*_pieces(column.heading), *column.texts])) for column in table.columns]
    widest = max(2, min(widest, width - max(widths) - 2 * _GAP))
    for index, group in enumerate(_groups(widths, width - widest - _GAP)):
        if index:
            yield _line("")
        yield _grid(units, widest, [(table.columns[i], widths[i]) for i in group])
    yield from _note(table)


def _groups(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns of each table, in order; at least one."""
    groups: list[list[int]] = [[]]
    for index, width in enumerate(widths):
        if groups[-1] and sum(widths[i] + _GAP for i in groups[-1]) + width + _GAP > room:
            groups.append([])
        groups[-1].append(index)
    return groups


def _grid(units: Sequence[str], widest: int, columns: Sequence[tuple[Column, int]]) -> RenderableType:
    grid = Grid(box=None, padding=(0, _GAP, 0, 0), header_style="")
    grid.add_column(Text(units[0], no_wrap=True), width=widest)
    for column, width in columns:
        heading = "\n".join(_folded(column.heading, width))
        grid.add_column(Text(heading, no_wrap=True), justify="right", width=width)
    for texts in zip(units[1:], *(column.texts for column, _ in columns), strict=True):
        grid.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts))
    return grid


def _pieces(heading: str) -> list[str]:
    """What a heading is folded between: words, and parts of a name."""
    return re.findall(r".+?(?:[_ ]|$)", heading)


def _folded(heading: str, width: int) -> list[str]:
    """A heading in lines of at most `width` characters, where its pieces are not longer."""
    lines = [""]
    for piece in _pieces(heading):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]
