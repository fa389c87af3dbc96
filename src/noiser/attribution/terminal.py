"""Heat maps in a terminal; where there are no colours, the same as a table with bars."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import (
    DARK_PAPER,
    Cell,
    Colour,
    cells,
    check_comparable,
    dark_ink,
    facts,
    label,
    number_format,
    provenance,
    strongest,
    tint,
    visible,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.style import Style
    from rich.text import Text

    from noiser.attribution.record import Attribution

__all__ = ["Comparison", "compare_text", "render", "to_text"]

_MOST_TARGETS = 20
_MOST_UNITS = 60
_BAR = 24
_ASCII = str.maketrans(
    {
        "→": "->",
        "±": "+/-",
        "·": "|",
        "█": "#",
        "░": "-",
        "↵": "\\n",
        "⇥": "\\t",
        "␣": "_",
        "“": '"',
        "”": '"',
        "…": "...",
    }
)


class Comparison:
    """Several attributions of one prompt, for rich to print below each other, target by target."""

    def __init__(self, attributions: Sequence[Attribution]) -> None:
        check_comparable(attributions)
        self.attributions = tuple(attributions)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(len(att.targets) for att in self.attributions)
        for row in range(min(count, _MOST_TARGETS)):
            present = [att for att in self.attributions if row < len(att.targets)]
            yield from _compared(present, row, console)
        yield from _left_out(count)
        for att in self.attributions:
            yield _line(" · ".join(provenance(att)), "dim")


def to_text(att: Attribution) -> str:
    """What `print` shows: escape sequences only if stdout is a terminal and NO_COLOR is not set."""
    return _captured(att)


def compare_text(attributions: Sequence[Attribution]) -> str:
    """Several attributions of one prompt below each other, as `to_text` shows one.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    return _captured(Comparison(attributions))


def _captured(renderable: RenderableType) -> str:
    from rich.console import Console

    console = Console(file=sys.stdout, force_jupyter=False, highlight=False, emoji=False, markup=False)
    if os.environ.get("NO_COLOR") or not console.is_terminal:
        console = Console(
            file=sys.stdout, force_jupyter=False, color_system=None, force_terminal=False, width=console.width
        )
    with console.capture() as capture:
        console.print(renderable)
    text = "\n".join(line.rstrip(" ") for line in capture.get().splitlines())
    if console.encoding.startswith("utf"):
        return text
    return text.translate(_ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)


def render(att: Attribution, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:  # noqa: ARG001
    """One heat map a target with its strongest units, then where the numbers come from."""
    for row in range(min(len(att.targets), _MOST_TARGETS)):
        if row:
            yield _line("")
        pieces = cells(att, row)
        if _has_colours(console):
            yield _heat_map(att, row, pieces)
            yield from _below(att, row)
        else:
            yield _plain_prompt(att, row, pieces)
            yield _line("  " + " · ".join(facts(att, row)))
            yield from _bars(att, row)
    yield from _left_out(len(att.targets))
    yield _line("  " + " · ".join(provenance(att)), "dim")


def _compared(attributions: Sequence[Attribution], row: int, console: Console) -> Iterator[RenderableType]:
    first = attributions[0]
    if row:
        yield _line("")
    if _has_colours(console):
        for att in attributions:
            yield _line(label(att.method), "bold")
            yield _heat_map(att, row, cells(att, row))
            yield from _below(att, row)
        return
    yield _plain_prompt(first, row, cells(first, row))
    yield _line("  " + " · ".join(facts(first, row)))
    if any(att.units != first.units for att in attributions):
        for att in attributions:
            yield _line("  " + label(att.method))
            yield from _bars(att, row)
        return
    yield _score_columns(attributions, row)


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _heat_map(att: Attribution, row: int, pieces: Sequence[Cell]) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    paper = _style((225, 228, 235), DARK_PAPER)
    text = Text(style=paper, overflow="fold")
    for piece in pieces:
        shown = visible(piece.text)
        body = shown.lstrip() or shown
        text.append(shown[: len(shown) - len(body)])
        text.append(body, _cell_style(piece))
    text.append(" → ", _style((150, 155, 165), DARK_PAPER))
    text.append(label(att.targets[row].text), _style((255, 255, 255), DARK_PAPER, bold=True, underline=True))
    return Padding(text, (0, 1), style=paper)


def _cell_style(piece: Cell) -> Style:
    if piece.score is None:
        return _style((140, 145, 155), DARK_PAPER)
    ink = (0, 0, 0) if dark_ink(piece.weight, DARK_PAPER) else (255, 255, 255)
    return _style(ink, tint(piece.weight, DARK_PAPER))


def _style(colour: Colour, background: Colour, bold: bool = False, underline: bool = False) -> Style:
    from rich.color import Color
    from rich.style import Style

    return Style(color=Color.from_rgb(*colour), bgcolor=Color.from_rgb(*background), bold=bold, underline=underline)


def _below(att: Attribution, row: int) -> Iterator[Text]:
    yield _line("  " + " · ".join(facts(att, row)), "dim")
    best = [unit for unit in att.top(5, row) if unit.score > 0]
    show = number_format(att.scores[row].tolist())
    errors = None if att.stderr is None else att.stderr[row].tolist()
    shown = [f"{label(unit.text)} {show(unit.score)}{_error(errors, unit.index, show)}" for unit in best]
    if shown:
        yield _line("  " + " · ".join(shown))


def _error(errors: list[float] | None, index: int, show: Callable[[float], str]) -> str:
    if errors is None or math.isnan(errors[index]):
        return ""
    return f" ± {show(errors[index])}"


def _plain_prompt(att: Attribution, row: int, pieces: Sequence[Cell]) -> Text:
    text = visible("".join(piece.text for piece in pieces)).lstrip(" ")
    return _line(f"{text} → {label(att.targets[row].text)}")


def _bars(att: Attribution, row: int) -> Iterator[RenderableType]:
    """An aligned table of units, scores and bars; of a long prompt only the strongest units."""
    from rich.table import Table
    from rich.text import Text

    scores = att.scores[row].tolist()
    chosen = strongest(att, row, _MOST_UNITS)
    if not chosen:
        yield _line("  no unit stands before this target")
        return
    show = number_format(scores)
    largest = max(abs(scores[column]) for column in chosen) or 1.0
    errors = None if att.stderr is None else att.stderr[row].tolist()
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=28, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    for column in chosen:
        length = round(_BAR * abs(scores[column]) / largest)
        bar = ("█" if scores[column] > 0 else "░") * length
        number = show(scores[column]) + _error(errors, column, show)
        table.add_row(Text("  " + label(att.units[column].text)), Text(number), Text(bar))
    yield table
    present = sum(not math.isnan(score) for score in scores)
    if present > len(chosen):
        yield _line(f"  (the {len(chosen)} strongest of {present} units)")


def _score_columns(attributions: Sequence[Attribution], row: int) -> RenderableType:
    """Units by methods, for attributions of the same units."""
    from rich.table import Table
    from rich.text import Text

    first = attributions[0]
    chosen = sorted({column for att in attributions for column in strongest(att, row, _MOST_UNITS)})
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column(Text("  unit"), max_width=28, no_wrap=True)
    for att in attributions:
        table.add_column(Text(label(att.method)), justify="right", overflow="fold")
    shows = [number_format(att.scores[row].tolist()) for att in attributions]
    for column in chosen:
        values = [float(att.scores[row, column]) for att in attributions]
        numbers = ["" if math.isnan(value) else show(value) for show, value in zip(shows, values, strict=True)]
        table.add_row(Text("  " + label(first.units[column].text)), *(Text(number) for number in numbers))
    return table


def _left_out(count: int) -> Iterator[Text]:
    if count > _MOST_TARGETS:
        yield _line(f"  … and {count - _MOST_TARGETS} more targets: see to_html() or to_dataframe()", "dim")


def _line(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(text, style=style, overflow="fold")
