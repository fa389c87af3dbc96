"""Heat maps in a terminal; where there are no colours, the tables of `plain` take their place."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import (
    DARK_PAPER,
    Cell,
    Colour,
    asked,
    cells,
    check_comparable,
    dark_ink,
    facts,
    headings,
    label,
    number_format,
    provenance,
    tint,
    visible,
)
from noiser.attribution.plain import ASCII, bars, error_text, line, prompt_line, score_columns

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.style import Style

    from noiser.attribution.record import Attribution

__all__ = ["Comparison", "compare_text", "render", "to_text"]

_MOST_TARGETS = 20
_INK, _SOFT_INK, _WHITE, _BLACK = (225, 228, 235), (150, 155, 165), (255, 255, 255), (0, 0, 0)


class Comparison:
    """Several attributions of one prompt, for rich to print below each other, target by target.

    Raises:
        ParameterError: no attribution, or different prompts.
    """

    def __init__(self, attributions: Sequence[Attribution]) -> None:
        check_comparable(attributions)
        self.attributions = tuple(attributions)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(len(att.targets) for att in self.attributions)
        for row in range(min(count, _MOST_TARGETS)):
            present = [att for att in self.attributions if row < len(att.targets)]
            if row:
                yield line("")
            yield from (_compared if _has_colours(console) else _compared_plainly)(present, row, options.max_width)
        yield from _left_out(count)
        for att in self.attributions:
            yield line(" · ".join(provenance(att)), "dim", indent=2)


def to_text(att: Attribution, *, plain: bool = False) -> str:
    """What `print` shows: escape sequences only if stdout is a terminal and NO_COLOR is not set.

    Args:
        att: what is shown.
        plain: without escape sequences and in Unicode whatever stdout is, for a file.
    """
    return _captured(att, plain)


def compare_text(attributions: Sequence[Attribution], *, plain: bool = False) -> str:
    """Several attributions of one prompt below each other, as `to_text` shows one.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    return _captured(Comparison(attributions), plain)


def render(att: Attribution, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:  # noqa: ARG001
    """One heat map a target with its strongest units, then where the numbers come from."""
    for row in range(min(len(att.targets), _MOST_TARGETS)):
        if row:
            yield line("")
        if _has_colours(console):
            yield _heat_map(att, row)
            yield from _facts_line(facts(att, row), "dim")
            yield from _strongest(att, row)
        else:
            yield prompt_line(att, row)
            yield from _facts_line(facts(att, row))
            yield bars(att, row)
    yield from _left_out(len(att.targets))
    yield line(" · ".join(provenance(att)), "dim", indent=2)


def _captured(renderable: RenderableType, plain: bool) -> str:
    from rich.console import Console

    file = io.StringIO() if plain else sys.stdout
    console = Console(file=file, force_jupyter=False)
    if plain or os.environ.get("NO_COLOR") or not console.is_terminal:
        console = Console(file=file, force_jupyter=False, color_system=None, force_terminal=False, width=console.width)
    with console.capture() as capture:
        console.print(renderable)
    text = "\n".join(part.rstrip(" ") for part in capture.get().split("\n")).rstrip("\n")
    if console.encoding.startswith("utf"):
        return text
    return text.translate(ASCII).encode(console.encoding, "backslashreplace").decode(console.encoding)


def _compared(attributions: Sequence[Attribution], row: int, _width: int) -> Iterator[RenderableType]:
    yield from _facts_line(asked(attributions[0], row), "dim")
    for att, heading in zip(attributions, headings(attributions), strict=True):
        yield line(heading, "bold", indent=1)
        yield _heat_map(att, row)
        yield from _strongest(att, row)


def _compared_plainly(attributions: Sequence[Attribution], row: int, width: int) -> Iterator[RenderableType]:
    first = attributions[0]
    yield prompt_line(first, row)
    yield from _facts_line(asked(first, row))
    if all(att.units == first.units for att in attributions):
        yield from score_columns(attributions, row, width)
        return
    for att, heading in zip(attributions, headings(attributions), strict=True):
        yield line(heading, indent=2)
        yield bars(att, row)


def _facts_line(known: Sequence[str], style: str = "") -> Iterator[RenderableType]:
    if known:
        yield line(" · ".join(known), style, indent=2)


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _heat_map(att: Attribution, row: int) -> RenderableType:
    """The text before a target on dark paper, which looks the same in light and in dark terminals."""
    from rich.padding import Padding
    from rich.text import Text

    paper = _style(_INK, DARK_PAPER)
    text = Text(style=paper, overflow="fold")
    for piece in cells(att, row):
        shown = visible(piece.text)
        body = shown.lstrip() or shown
        text.append(shown[: len(shown) - len(body)])
        text.append(body, _cell_style(piece))
    text.append(" → ", _style(_SOFT_INK, DARK_PAPER))
    text.append(label(att.targets[row].text), _style(_WHITE, DARK_PAPER, bold=True, underline=True))
    return Padding(text, (0, 1), style=paper)


def _cell_style(piece: Cell) -> Style:
    if piece.score is None:
        return _style(_SOFT_INK, DARK_PAPER)
    return _style(_BLACK if dark_ink(piece.weight, DARK_PAPER) else _WHITE, tint(piece.weight, DARK_PAPER))


def _style(colour: Colour, background: Colour, *, bold: bool = False, underline: bool = False) -> Style:
    from rich.color import Color
    from rich.style import Style

    return Style(color=Color.from_rgb(*colour), bgcolor=Color.from_rgb(*background), bold=bold, underline=underline)


def _strongest(att: Attribution, row: int) -> Iterator[RenderableType]:
    best = [unit for unit in att.top(5, row) if unit.score > 0]
    show = number_format([unit.score for unit in best])
    if best:
        texts = [f"{label(unit.text)} {show(unit.score)}{error_text(att, row, unit.index, show)}" for unit in best]
        yield line(" · ".join(texts), indent=2)


def _left_out(count: int) -> Iterator[RenderableType]:
    if count > _MOST_TARGETS:
        yield line(f"… and {count - _MOST_TARGETS} more targets: see to_html() or to_dataframe()", "dim", indent=2)
