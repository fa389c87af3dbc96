"""Pairs of units, and paths through the continuation: in words, and as arcs to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution.display import label, labels
from noiser.attribution.paths import flow
from noiser.numbers import number_format

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

WORDS = {"together": ("only together", "with"), "either": ("either would do", "or")}
"""From the kind of a pair to its name, and to the word between its units."""

_MOST, _LEAST = 3, 0.05
"""Pairs of each kind that are put into words, and the part of the influence that a path carries which is drawn."""
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
    """The lines, each a number and a plain text, as HTML, with an arc of an SVG on their left for each link."""
    longest, height = (
        max((abs(link.end - link.start) for link in links), default=1),
        _LINE * len(lines),
    )
    paths = "".join(_path(link, longest) for link in sorted(links, key=lambda link: link.weight))
    items = "".join(
        f"<li><span>{escape(number)}</span><bdi>{escape(text)}</bdi></li>" for number, text in lines
    )
    return (
        f'<div class=arcs><svg width={_WIDTH} height={height} viewBox="0 0 {_WIDTH} {height}" aria-hidden=true>'
        f'{paths}</svg><ol style="line-height:{_LINE}px">{items}</ol></div>'
    )


def _path(link: Arc, longest: int) -> str:
    """Half an ellipse, as wide as it is long."""
    top, bottom = sorted(_LINE * (line + 0.5) for line in (link.start, link.end))
    width = 0.95 * _WIDTH * abs(link.end - link.start) / longest
    curve = f"M{_WIDTH} {top:g}A{width:.1f} {(bottom - top) / 2:g} 0 0 0 {_WIDTH} {bottom:g}"
    look = f"stroke-width={0.5 + 5 * link.weight:.2f} opacity={min(1.0, 0.25 + link.weight):.2f}"
    return f'<path class={link.style} d="{curve}" {look}{" stroke-dasharray=5,4" * link.dashed} />'


def sentences(att: AttributionRecord, row: int) -> list[str]:
    """A line for each kind of pair, such as "either would do: “A” or “B” (-1.2 ± 0.1)"; safe to show."""
    lines, names = list[str](), labels(att)
    for kind, (heading, word) in WORDS.items():
        found = [pair for pair in att.pairs if pair.target == row and pair.kind == kind]
        show = number_format([pair.score for pair in found])
        texts = [
            f"“{names[first]}” {word} “{names[second]}” ({show.with_error(score, stderr)})"
            for _, (first, second), score, stderr, _ in found[:_MOST]
        ]
        more = [f"{len(found) - _MOST} more"] * (len(found) > _MOST)
        lines += [f"{heading}: {' · '.join([*texts, *more])}"] * bool(found)
    return lines


def pair_arcs(att: AttributionRecord, row: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """A line for each unit that is in a pair, with its score, and an arc for each pair; dashed for "either"."""
    found = [pair for pair in att.pairs if pair.target == row]
    units = sorted({unit for pair in found for unit in pair.units})
    show, names = number_format(att.scores[row].tolist()), labels(att)
    lines = [(show(float(att.scores[row, unit])), names[unit]) for unit in units]
    largest = max((abs(pair.score) for pair in found), default=1.0)
    looks = {"together": ("p", False), "either": ("n", True)}
    return lines, [
        Arc(units.index(first), units.index(second), abs(score) / largest, *looks[kind])
        for _, (first, second), score, _, kind in found
    ]


def path_arcs(att: AttributionRecord, target: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """Lines and arcs of the paths to one target: the prompt's units and targets, each with the part that leaves it."""
    count, parts = len(att.units), flow(att, target)
    texts = [*(unit.text for unit in att.units), *(each.text for each in att.targets[: target + 1])]
    leaving: list[float] = parts.sum(0).tolist()
    shares = [f"{share:.0%}" for share in leaving[: count + target]]
    found = [
        Arc(start, count + row, weight, "p" if start < count else "n")
        for row, line in enumerate(parts.tolist())
        for start, weight in enumerate(line)
        if weight >= _LEAST
    ]
    return list(zip([*shares, ""], map(label, texts), strict=True)), found
