"""Attributions as text without colours: an aligned table of scores with bars."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import cells, headings, label, number_format, strongest, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from noiser.attribution.record import Attribution

__all__ = ["ASCII", "bars", "error_text", "line", "prompt_line", "score_columns"]

_MOST_UNITS = 60
_BAR = 24
_UNIT, _GAP = 30, 2
"""Characters of the widest unit, and between columns."""

ASCII = str.maketrans(
    {"→": "->", "±": "+/-", "·": "|", "█": "#", "░": "-", "↵": "\\n", "⇥": "\\t", "␣": "_", "…": "..."}
    | {"“": '"', "”": '"', "⟨": "<", "⟩": ">"}
)
"""Stand-ins for the marks used here, for terminals that have no Unicode."""


def line(text: str, style: str = "", *, indent: int = 0) -> RenderableType:
    """A paragraph of text that rich takes literally: no mark-up, no emoji names."""
    from rich.padding import Padding
    from rich.text import Text

    return Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, indent))


def prompt_line(att: Attribution, row: int) -> RenderableType:
    """The text before a target, and the target."""
    text = visible("".join(piece.text for piece in cells(att, row)).lstrip(" "))
    return line(f"{text} → {label(att.targets[row].text)}")


def bars(att: Attribution, row: int) -> RenderableType:
    """A table of units, scores and bars, solid for positive scores; of a long prompt the strongest units."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    scores: list[float] = att.scores[row].tolist()
    chosen = strongest(att, row, _MOST_UNITS)
    if not chosen:
        return line("no unit stands before this target", indent=2)
    show = number_format(scores)
    largest = max(abs(scores[column]) for column in chosen) or 1.0
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=_UNIT, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for column in chosen:
        bar = ("█" if scores[column] > 0 else "░") * round(_BAR * abs(scores[column]) / largest)
        number = show(scores[column]) + error_text(att, row, column, show)
        table.add_row(Text("  " + label(att.units[column].text)), Text(number), Text(bar))
    return Group(table, *_left_out(len(chosen), scores))


def score_columns(attributions: Sequence[Attribution], row: int, width: int) -> Iterator[RenderableType]:
    """Units by methods, for attributions of the same units; of a long prompt the strongest units.

    Numbers stay whole: where `width` is too small for all methods, headings are folded, and then what does not fit is
    in further tables.
    """
    from rich.cells import cell_len

    first, every = attributions[0], len(attributions)
    chosen = sorted({column for att in attributions for column in strongest(att, row, max(1, _MOST_UNITS // every))})
    if len(first.units) <= _MOST_UNITS:
        chosen = list(range(len(first.units)))
    units = [f"  {first.unit}", *("  " + label(first.units[column].text) for column in chosen)]
    methods = [
        [heading, *_numbers(att.scores[row].tolist(), chosen)]
        for att, heading in zip(attributions, headings(attributions), strict=True)
    ]
    widths = [max(map(cell_len, texts)) for texts in methods]
    widest = min(_UNIT, max(map(cell_len, units)))
    if widest + sum(widths) + _GAP * (every + 1) > width:
        widths = [max(map(cell_len, [*_pieces(texts[0]), *texts[1:]])) for texts in methods]
    widest = max(2, min(widest, width - max(widths) - 2 * _GAP))
    for index, places in enumerate(_fitting(widths, width - widest - _GAP)):
        if index:
            yield line("")
        yield _table([(units, widest), *((methods[i], widths[i]) for i in places)])
    yield from _left_out(len(chosen), first.scores[row].tolist())


def _numbers(scores: list[float], chosen: Sequence[int]) -> list[str]:
    show = number_format(scores)
    return ["" if math.isnan(scores[column]) else show(scores[column]) for column in chosen]


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


def _fitting(widths: Sequence[int], room: int) -> list[list[int]]:
    """The columns of each table, in order; at least one."""
    tables: list[list[int]] = [[]]
    for index, width in enumerate(widths):
        if tables[-1] and sum(widths[i] + _GAP for i in tables[-1]) + width + _GAP > room:
            tables.append([])
        tables[-1].append(index)
    return tables


def _table(columns: Sequence[tuple[list[str], int]]) -> RenderableType:
    """A table of columns, heading first, with their widths; the first has texts, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="")
    for index, (texts, width) in enumerate(columns):
        heading = Text("\n".join(_folded(texts[0], width)) if index else texts[0], no_wrap=True)
        table.add_column(heading, justify="right" if index else "left", width=width)
    for texts in zip(*(texts[1:] for texts, _ in columns), strict=True):
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in texts))
    return table


def error_text(att: Attribution, row: int, column: int, show: Callable[[float], str]) -> str:
    """` ± stderr`, or nothing where there is none."""
    error = math.nan if att.stderr is None else float(att.stderr[row, column])
    return "" if math.isnan(error) else f" ± {show(error)}"


def _left_out(shown: int, scores: Sequence[float]) -> list[RenderableType]:
    present = sum(not math.isnan(score) for score in scores)
    return [line(f"(the {shown} strongest of {present} units)", indent=2)] if present > shown else []
