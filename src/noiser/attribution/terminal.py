"""Heat maps in a terminal; where there are no colours, aligned tables of scores with bars."""

from __future__ import annotations

import io
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from noiser.attribution import display, heatmap, summary
from noiser.attribution.amounts import Amounts, amounts_of, probability_text
from noiser.attribution.display import (
    DARK_PAPER,
    Colour,
    dark_ink,
    headings,
    label,
    labels,
    shorten,
    tint,
    visible,
)
from noiser.attribution.heatmap import (
    Cell,
    HeatMap,
    NumberRows,
    errors_of,
    has_signal,
    heat_map,
    numbers,
)
from noiser.attribution.regions import grid_of, picture_name, pictures_of
from noiser.tensors import floats, integers

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

# Of a longer answer the rest of the targets is left out, of a longer prompt the rest of the units.
_MOST_TARGETS = 8
_MOST_UNITS = 60
# The numbers of a prompt of more characters come before it.
_LONG = 1500
# Characters of the longest bar.
_BAR = 24
_INK = (225, 228, 235)
_SOFT_INK = (150, 155, 165)
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)
_LEAST_TINT = 0.5  # which sixteen colours show as orange or blue
_ASCII = str.maketrans("→±·█░↵⇥␣…“”⟨⟩", '>~|#-$>_.""<>')
"""Substitutes for terminals that have no Unicode."""


def to_text(attributions: Sequence[AttributionRecord], *, plain: bool = False) -> str:
    """One attribution, or several of one prompt, as text, coloured for a terminal.

    `plain` text has all targets.
    """
    file = io.StringIO() if plain else sys.stdout
    console = Console(file=file, force_jupyter=False)
    if plain or os.environ.get("NO_COLOR") or not console.is_terminal:
        console = Console(
            file=file,
            force_jupyter=False,
            color_system=None,
            force_terminal=False,
            width=console.width,
        )
    with console.capture() as capture:
        console.print(Group(*sections(attributions, console, plain=plain)))
    lines = [line.rstrip(" ") for line in capture.get().split("\n")]
    text = "\n".join(lines).rstrip("\n")
    if console.encoding.startswith("utf"):
        return text
    encoded = text.translate(_ASCII).encode(console.encoding, "backslashreplace")
    return encoded.decode(console.encoding)


def sections(
    attributions: Sequence[AttributionRecord], console: Console, *, plain: bool = False
) -> Iterator[RenderableType]:
    """The first targets, or all, and where the numbers come from.

    One attribution of several targets is a matrix; else each target has a section.
    """
    display.check_comparable(attributions)
    has_colours = console.color_system is not None and not console.no_color
    count = len(attributions[0].targets)
    rows = range(count) if plain else range(count)[:_MOST_TARGETS]
    if len(attributions) == 1 and count > 1:
        yield from _matrix(attributions[0], rows, console.width)
    else:
        # Of sixteen colours, the one next to a weak orange is the grey of no clear effect.
        least = _LEAST_TINT if console.color_system == "standard" else 0.0
        for row in rows:
            if row > 0:
                yield Text()
            if has_colours:
                yield from _coloured(attributions, row, least)
            else:
                yield from _plain(attributions, row)
    hidden = count - len(rows)
    if hidden:
        yield Text()
        yield _line(f"… {hidden} more targets; to_html() and to_markdown() show all", "dim")
    for note in display.notes(*attributions):
        yield _line(note)
    yield _line(display.provenance(*attributions), "dim")


def _coloured(
    attributions: Sequence[AttributionRecord], row: int, least: float
) -> Iterator[RenderableType]:
    """A heat map with its captions for each attribution; long texts come after them."""
    maps = [heat_map(att, row) for att in attributions]
    is_comparison = len(maps) > 1
    yield _sentence(attributions, row)
    if is_comparison:
        yield _line(maps[0].question, "dim")
    names = headings(attributions)
    for heat, name, legend in zip(maps, names, heatmap.legends(maps), strict=True):
        if is_comparison:
            yield _line(name, "bold", indent=1)
        is_long = sum(len(cell.text) for cell in heat.cells) > _LONG
        yield from _picture_grids(attributions[0], row, heat)
        if not is_long:
            yield _heat_map(heat, least)
        if not is_comparison:
            yield _line(heat.facts, "dim")
        if heat.largest:
            yield _line(heatmap.strongest(heat))
        for line in heatmap.lines_of(heat):
            yield _line(line)
        if legend:
            words = "; ".join(f"{colour}: {meaning}" for colour, meaning in legend.items())
            yield _line(words, "dim")
        if is_long:
            yield _heat_map(heat, least)


def _plain(attributions: Sequence[AttributionRecord], row: int) -> Iterator[RenderableType]:
    """The text, and tables of numbers: one for attributions of the same units, or one for each."""
    heat = heat_map(attributions[0], row)
    units = attributions[0].units
    is_comparison = len(attributions) > 1
    yield _sentence(attributions, row)
    if not is_comparison:
        yield from _picture_grids(attributions[0], row, heat)
    yield _line(_text(heat), indent=0)
    yield _line(heat.question if is_comparison else heat.facts)
    if is_comparison and all(att.units == units for att in attributions):
        most = None if len(units) <= _MOST_UNITS else max(1, _MOST_UNITS // len(attributions))
        yield from _numbers(numbers(attributions, row, most))
        return
    for att, heading in zip(attributions, headings(attributions), strict=True):
        if is_comparison:
            yield _line(heading)
        heat = heat_map(att, row)
        yield _line(heatmap.strongest(heat))
        yield from _numbers(numbers([att], row, _MOST_UNITS))
        for line in heatmap.lines_of(heat):
            yield _line(line)


def _sentence(attributions: Sequence[AttributionRecord], row: int) -> RenderableType:
    """What the model says, because of what, and what it says without that."""
    return _line(summary.as_text(summary.about(attributions, row)), indent=0)


def _text(heat: HeatMap, target: str = "") -> str:
    """The text, of a long one its end, and the target."""
    text = visible("".join(cell.text for cell in heat.cells).lstrip(" "))
    if len(text) > _LONG:
        text = f"… {text[-_LONG // 4 :]}"
    return f"{text} → {target or heat.target}"


def _matrix(att: AttributionRecord, rows: Sequence[int], width: int) -> Iterator[RenderableType]:
    """The text once, then units by targets, as many targets beside each other as fit."""
    answer = label("".join(att.targets[row].text for row in rows))
    if len(rows) < len(att.targets):
        answer += "…"
    yield _line(_text(heat_map(att, 0), answer), indent=0)
    for row in rows:
        yield _sentence([att], row)
    largest_of_unit = att.scores.abs().nan_to_num()[list(rows)].amax(0)
    strongest_first = integers(largest_of_unit.argsort(descending=True))
    units = sorted(strongest_first[:_MOST_UNITS])
    step = max(1, (width - 34) // 12)  # 34 characters for the labels, 12 for a column of numbers
    for start in range(0, len(rows), step):
        yield Text()
        yield _block(att, rows[start : start + step], units)
    for row in rows:
        heat = heat_map(att, row)
        for line in (*heat.pairs, *heat.alerts):
            yield _line(f"{heat.target}: {line}")
    if len(units) < len(att.units):
        yield _line(f"(the {len(units)} strongest of {len(att.units)} units)")


def _block(att: AttributionRecord, rows: Sequence[int], units: Sequence[int]) -> Table:
    """Units by targets; a score without a signal stands in brackets."""
    names = labels(att)
    head = [f"  {heatmap.kind_of_units(att)}"]
    is_per_token = any("per token" in probability_text(att.targets[row]) for row in rows)
    heading = "  probability per token" if is_per_token else "  probability"
    names_of_units = [Text(f"  {names[unit]}") for unit in units]
    columns = [[Text(heading, "dim"), *names_of_units]]
    for row in rows:
        target = att.targets[row]
        head.append(shorten(label(target.text), 10))
        probability = probability_text(target).removesuffix(" per token")
        columns.append([Text(probability, "dim"), *_column(att, row, units)])
    return _grid(head, list(zip(*columns, strict=True)))


def _column(att: AttributionRecord, row: int, units: Sequence[int]) -> list[Text]:
    """The scores of some units for one target, each on its colour."""
    scores = floats(att.scores[row])
    errors = errors_of(att, row)
    show = amounts_of(att, row)
    largest = float(att.scores[row].abs().nan_to_num().max()) or 1.0
    texts: list[Text] = []
    for unit in units:
        texts.append(_number(show, scores[unit], errors[unit], scores[unit] / largest))
    return texts


def _number(show: Amounts, score: float, stderr: float, weight: float) -> Text:
    """A score on its colour; in brackets if it has no signal, empty if it is none."""
    if math.isnan(score):
        return Text()
    if not has_signal(score, stderr):
        return Text(f"({show(score)})", _style(_INK, tint(None, DARK_PAPER)))
    ink = _BLACK if dark_ink(weight) else _INK
    return Text(show(score), _style(ink, tint(weight, DARK_PAPER)))


def _numbers(table: NumberRows) -> Iterator[RenderableType]:
    """Units by methods; for one method, its scores with their errors and bars.

    The bars of positive scores are solid.
    """
    if not table.rows:
        yield _line("no unit stands before this target")
        return
    rows: list[list[Text]] = []
    for unit, *texts in table.rows:
        rows.append([Text(f"  {unit}"), *map(Text, texts)])
    if table.has_bars:
        with_bars: list[list[Text]] = []
        for row, weights in zip(rows, table.weights, strict=True):
            with_bars.append([*row[:2], Text(_bar(weights[0]))])
        yield _grid([], with_bars, bars=True)
    else:
        yield _grid([f"  {table.head[0]}", *table.head[1:]], rows)
    if table.note:
        yield _line(f"({table.note})")


def _bar(weight: float | None) -> str:
    if weight is None:
        return "no signal"
    character = "█" if weight > 0 else "░"
    return character * round(_BAR * abs(weight))


def _grid(head: Sequence[str], rows: Sequence[Sequence[Text]], *, bars: bool = False) -> Table:
    """Columns of labels, of numbers, which are not broken, and of bars in the last one."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    columns = list(zip(*rows, strict=True))
    number_columns = columns[1:-1] if bars else columns[1:]
    grid.add_column(max_width=40, no_wrap=True)
    for column in number_columns:
        narrowest = max((len(word) for text in column for word in text.plain.split()), default=0)
        grid.add_column(justify="right", overflow="fold", min_width=narrowest)
    if bars:
        grid.add_column(no_wrap=True, overflow="crop")
    if head:
        grid.add_row(*map(Text, head))
    for row in rows:
        grid.add_row(*row)
    return grid


def _line(text: str, style: str = "", *, indent: int = 2) -> RenderableType:
    """A paragraph of text that rich takes literally: no markup, no emoji names."""
    return Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent))


def _heat_map(heat: HeatMap, least: float = 0.0) -> RenderableType:
    """The text before a target on dark paper, in light and in dark terminals.

    A cell that has a signal gets a tint of at least `least`.
    """
    text = Text(style=_style(_INK), overflow="fold")
    for cell in heat.cells:
        space, body = cell.parts()
        weight = cell.weight
        if weight:
            weight = math.copysign(max(abs(weight), least), weight)
        text.append(space).append(body, _style(_ink(cell), tint(weight, DARK_PAPER)))
    text.append(" → ", _style(_SOFT_INK)).append(heat.target, _style(_WHITE, strong=True))
    if heat.foil:
        text.append(f" rather than {heat.foil}", _style(_SOFT_INK))
    return Padding(text, (0, 1), style=_style(_INK))


def _picture_grids(att: AttributionRecord, row: int, heat: HeatMap) -> Iterator[RenderableType]:
    """The scores of the regions of each picture, at their places; those of boxes are in the table.

    A score without a signal stands in brackets.
    """
    for picture in range(len(pictures_of(att))):
        lines = grid_of([region for region in heat.regions if region.picture == picture])
        if not lines or len(lines) * len(lines[0]) < 2:
            continue
        yield _line(f"{picture_name(att, picture)}: each region's score, at its place", "dim")
        grid = Table.grid(padding=(0, 1, 0, 1))
        for _ in lines[0]:
            grid.add_column(justify="right", no_wrap=True)
        errors = errors_of(att, row)
        show = amounts_of(att, row)
        for line in lines:
            texts = [
                _number(show, region.score, errors[region.column], region.weight or 0.0)
                for region in line
            ]
            grid.add_row(*texts)
        yield Padding(grid, (0, 0, 0, 2))


def _ink(cell: Cell) -> Colour:
    """The colour of a cell's text."""
    if cell.score is None:
        return _SOFT_INK
    return _BLACK if dark_ink(cell.weight) else _WHITE


def _style(colour: Colour, background: Colour = DARK_PAPER, *, strong: bool = False) -> Style:
    """A new style each time: rich caches how it was rendered, whatever the terminal's colours."""
    return Style(color=_rgb(colour), bgcolor=_rgb(background), bold=strong, underline=strong)


def _rgb(colour: Colour) -> str:
    red, green, blue = colour
    return f"rgb({red},{green},{blue})"
