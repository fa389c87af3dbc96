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

from noiser.attribution import display, heatmap
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
from noiser.attribution.heatmap import HeatMap, Numbers, errors_of, has_signal, heat_map, numbers
from noiser.numbers import NumberFormat, number_format

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

_MOST_TARGETS, _MOST_UNITS, _LONG = 8, 60, 1500
"""Of a longer answer or prompt the rest is left out; the numbers of a prompt of so many characters come before it."""
_BAR = 24
_INK, _SOFT_INK, _WHITE, _BLACK = (225, 228, 235), (150, 155, 165), (255, 255, 255), (0, 0, 0)
_ASCII = str.maketrans("→±·█░↵⇥␣…“”⟨⟩", '>~|#-$>_.""<>')
"""Substitutes for terminals that have no Unicode."""


def to_text(attributions: Sequence[AttributionRecord], *, plain: bool = False) -> str:
    """One attribution, or several of one prompt, as text; coloured for a terminal. `plain` text has all targets."""
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
    text = "\n".join(part.rstrip(" ") for part in capture.get().split("\n")).rstrip("\n")
    if console.encoding.startswith("utf"):
        return text
    return (
        text.translate(_ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)
    )


def sections(
    attributions: Sequence[AttributionRecord], console: Console, *, plain: bool = False
) -> Iterator[RenderableType]:
    """The first targets, or all, as a matrix or, to compare, in sections; then where the numbers come from."""
    display.check_comparable(attributions)
    colours = console.color_system is not None and not console.no_color
    count, most = len(attributions[0].targets), None if plain else _MOST_TARGETS
    if len(attributions) == 1 and count > 1:
        yield from _matrix(attributions[0], range(count)[:most], console.width)
    else:
        for row in range(count)[:most]:
            if row:
                yield Text()
            yield from _coloured(attributions, row) if colours else _plain(attributions, row)
    if most and count > most:
        yield Text()
        yield _line(f"… {count - most} more targets; to_html() and to_markdown() show all", "dim")
    yield from map(_line, display.notes(*attributions))
    yield _line(display.provenance(*attributions), "dim")


def _coloured(attributions: Sequence[AttributionRecord], row: int) -> Iterator[RenderableType]:
    maps = [heat_map(att, row) for att in attributions]
    several = len(maps) > 1
    if several:
        yield _line(maps[0].question, "dim")
    for heat, heading, legend in zip(
        maps, headings(attributions), heatmap.legends(maps), strict=True
    ):
        words = "; ".join(f"{colour}: {meaning}" for colour, meaning in legend.items())
        facts = [_line(heat.facts, "dim")] * (not several) + [
            _line(heatmap.strongest(heat))
        ] * bool(heat.largest)
        facts += [*map(_line, heat.pairs), *[_line(words, "dim")] * bool(words)]
        if several:
            yield _line(heading, "bold", indent=1)
        long = sum(len(cell.text) for cell in heat.cells) > _LONG
        yield from [*facts, _heat_map(heat)] if long else [_heat_map(heat), *facts]


def _plain(attributions: Sequence[AttributionRecord], row: int) -> Iterator[RenderableType]:
    heat, several, units = (
        heat_map(attributions[0], row),
        len(attributions) > 1,
        attributions[0].units,
    )
    yield _line(_text(heat), indent=0)
    yield _line(heat.question if several else heat.facts)
    if several and all(att.units == units for att in attributions):
        most = None if len(units) <= _MOST_UNITS else max(1, _MOST_UNITS // len(attributions))
        yield from _numbers(numbers(attributions, row, most))
        return
    for att, heading in zip(attributions, headings(attributions), strict=True):
        if several:
            yield _line(heading)
        heat = heat_map(att, row)
        yield _line(heatmap.strongest(heat))
        yield from _numbers(numbers([att], row, _MOST_UNITS))
        yield from map(_line, heat.pairs)


def _text(heat: HeatMap, target: str = "") -> str:
    """The text, of a long one its end, and the target."""
    text = visible("".join(cell.text for cell in heat.cells).lstrip(" "))
    return f"{text if len(text) <= _LONG else f'… {text[-_LONG // 4 :]}'} → {target or heat.target}"


def _matrix(att: AttributionRecord, rows: Sequence[int], width: int) -> Iterator[RenderableType]:
    """The text once, then units by targets, as many targets below each other as fit; no signal stands in brackets."""
    said = "".join(att.targets[row].text for row in rows)
    yield _line(
        _text(heat_map(att, 0), f"{label(said)}{'…' * (len(rows) < len(att.targets))}"), indent=0
    )
    units, sizes = labels(att), att.scores.abs().nan_to_num()
    chosen = sorted(sizes[list(rows)].amax(0).argsort(descending=True)[:_MOST_UNITS].tolist())
    step = max(1, (width - 34) // 12)
    for block in (rows[start : start + step] for start in range(0, len(rows), step)):
        columns = [[Text(f"{att.targets[row].probability:.3g}", "dim")] for row in block]
        for column, row in zip(columns, block, strict=True):
            show, errors = number_format(att.scores[row].tolist()), errors_of(att, row)
            largest, scores = float(sizes[row].max()) or 1.0, att.scores[row].tolist()
            column += [
                _number(show, scores[unit], errors[unit], scores[unit] / largest) for unit in chosen
            ]
        names = [Text("  probability", "dim"), *(Text(f"  {units[unit]}") for unit in chosen)]
        heads = (shorten(label(att.targets[row].text), 10) for row in block)
        yield Text()
        yield _grid(
            [f"  {heatmap.kind_of_units(att)}", *heads], [*zip(names, *columns, strict=True)]
        )
    for row in rows:
        yield from (
            _line(f"{label(att.targets[row].text)}: {line}") for line in heat_map(att, row).pairs
        )
    if len(chosen) < len(units):
        yield _line(f"(the {len(chosen)} strongest of {len(units)} units)")


def _number(show: NumberFormat, score: float, stderr: float, weight: float) -> Text:
    """A score on its colour; in brackets if it has no signal, empty if it is none."""
    if math.isnan(score):
        return Text()
    if not has_signal(score, stderr):
        return Text(f"({show(score)})", _style(_INK, tint(None, DARK_PAPER)))
    return Text(show(score), _style(_BLACK if dark_ink(weight) else _INK, tint(weight, DARK_PAPER)))


def _numbers(table: Numbers) -> Iterator[RenderableType]:
    """Units by methods; or of one method units, scores with their errors and bars, solid for positive scores."""
    if not table.rows:
        yield _line("no unit stands before this target")
        return
    rows = [[Text(f"  {unit}"), *map(Text, texts)] for unit, *texts in table.rows]
    if table.head[1] == "score":
        weights = [weight for weight, *_ in table.weights]
        bars = [
            "no signal" if w is None else ("█" if w > 0 else "░") * round(_BAR * abs(w))
            for w in weights
        ]
        yield _grid(
            [], [[*row[:2], Text(bar)] for row, bar in zip(rows, bars, strict=True)], bars=True
        )
    else:
        yield _grid([f"  {table.head[0]}", *table.head[1:]], rows)
    if table.note:
        yield _line(f"({table.note})")


def _grid(head: Sequence[str], rows: Sequence[Sequence[Text]], *, bars: bool = False) -> Table:
    """Columns of labels, of numbers, which are not broken, and of bars in the last one."""
    grid, columns = Table.grid(padding=(0, 2, 0, 0)), [*zip(*rows, strict=True)]
    grid.add_column(max_width=40, no_wrap=True)
    for column in columns[1 : len(columns) - bars]:
        narrowest = max((len(word) for text in column for word in text.plain.split()), default=0)
        grid.add_column(justify="right", overflow="fold", min_width=narrowest)
    if bars:
        grid.add_column(no_wrap=True, overflow="crop")
    for row in [[*map(Text, head)], *rows] if head else rows:
        grid.add_row(*row)
    return grid


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
    if heat.foil:
        text.append(f" rather than {heat.foil}", _style(_SOFT_INK))
    return Padding(text, (0, 1), style=_style(_INK))


def _style(colour: Colour, background: Colour = DARK_PAPER, *, strong: bool = False) -> Style:
    """A new style each time, because rich caches how a style was rendered, whatever the terminal's colours."""
    color, bgcolor = (f"rgb({red},{green},{blue})" for red, green, blue in (colour, background))
    return Style(color=color, bgcolor=bgcolor, bold=strong, underline=strong)
