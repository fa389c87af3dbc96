"""Lines of text with arcs between them, as HTML with an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_LINE, _WIDTH = 26, 150
"""Pixels: the height of a line, and the width of the arcs."""


class Arc(NamedTuple):
    """A relation between two lines."""

    start: int  # number of a line, from 0 on
    end: int  # number of another line
    weight: float  # strength, 0 to 1, shown as thickness
    style: str = "p"  # class of the arc, which gives its colour: "p" or "n"
    dashed: bool = False


def arcs(lines: Sequence[tuple[str, str]], links: Sequence[Arc]) -> str:
    """The lines, each a number and a plain text, below each other, with an arc on their left for each link."""
    longest = max((abs(link.end - link.start) for link in links), default=1)
    paths = "".join(_path(link, longest) for link in sorted(links, key=lambda link: link.weight))
    height = _LINE * len(lines)
    items = "".join(f"<li><span>{escape(number)}</span><bdi>{escape(text)}</bdi></li>" for number, text in lines)
    return (
        f'<div class=arcs><svg width={_WIDTH} height={height} viewBox="0 0 {_WIDTH} {height}" aria-hidden=true>'
        f'{paths}</svg><ol style="line-height:{_LINE}px">{items}</ol></div>'
    )


def _path(link: Arc, longest: int) -> str:
    """Half an ellipse, as wide as it is long."""
    top, bottom = sorted(_LINE * (line + 0.5) for line in (link.start, link.end))
    width = 0.95 * _WIDTH * abs(link.end - link.start) / longest
    dashes = " stroke-dasharray=5,4" if link.dashed else ""
    return (
        f'<path class={link.style} d="M{_WIDTH} {top:g}A{width:.1f} {(bottom - top) / 2:g} 0 0 0 {_WIDTH} {bottom:g}" '
        f"stroke-width={0.5 + 5 * link.weight:.2f} opacity={min(1.0, 0.25 + link.weight):.2f}{dashes} />"
    )
