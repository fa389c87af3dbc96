"""Attributions as text without colours: an aligned table of scores with bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import cells, label, number_format, strongest, visible

if TYPE_CHECKING:
    from rich.console import RenderableType

    from noiser.attribution.record import Attribution

__all__ = ["ASCII", "bars", "error_text", "line", "prompt_line", "score_columns"]

_MOST_UNITS = 60
_BAR = 24

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
    table.add_column(max_width=30, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="crop")
    for column in chosen:
        bar = ("█" if scores[column] > 0 else "░") * round(_BAR * abs(scores[column]) / largest)
        number = show(scores[column]) + error_text(att, row, column, show)
        table.add_row(Text("  " + label(att.units[column].text)), Text(number), Text(bar))
    return Group(table, *_left_out(len(chosen), scores))


def score_columns(attributions: Sequence[Attribution], row: int) -> RenderableType:
    """Units by methods, for attributions of the same units; of a long prompt the strongest units."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first = attributions[0]
    most = max(1, _MOST_UNITS // len(attributions))
    chosen = sorted({column for att in attributions for column in strongest(att, row, most)})
    if len(first.units) <= _MOST_UNITS:
        chosen = list(range(len(first.units)))
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column(Text(f"  {first.unit}"), max_width=30, no_wrap=True)
    for att in attributions:
        table.add_column(Text(label(att.method)), justify="right", overflow="fold")
    rows: list[list[float]] = [att.scores[row].tolist() for att in attributions]
    shows = [number_format(scores) for scores in rows]
    for column in chosen:
        numbers = [
            "" if math.isnan(scores[column]) else show(scores[column])
            for show, scores in zip(shows, rows, strict=True)
        ]  # fmt: skip
        table.add_row(Text("  " + label(first.units[column].text)), *map(Text, numbers))
    return Group(table, *_left_out(len(chosen), rows[0]))


def error_text(att: Attribution, row: int, column: int, show: Callable[[float], str]) -> str:
    """` ± stderr`, or nothing where there is none."""
    error = math.nan if att.stderr is None else float(att.stderr[row, column])
    return "" if math.isnan(error) else f" ± {show(error)}"


def _left_out(shown: int, scores: Sequence[float]) -> list[RenderableType]:
    present = sum(not math.isnan(score) for score in scores)
    return [line(f"(the {shown} strongest of {present} units)", indent=2)] if present > shown else []
