"""Pairs of units, and paths through the continuation: in words, and as arcs to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution.amounts import amounts_of
from noiser.attribution.display import label, labels
from noiser.attribution.paths import flow
from noiser.tensors import float_rows, floats

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

WORDS = {"together": ("only together", "with"), "either": ("either would do", "or")}
"""From the kind of a pair to its name, and to the word between its units."""

# Pairs of each kind that are put into words.
_MOST = 3
# The smallest part of the influence for which a path is drawn.
_LEAST = 0.05
# Pixels: the height of a line, and the width of the arcs.
_LINE = 26
_WIDTH = 150


class Arc(NamedTuple):
    """A relation between two lines.

    Attributes:
        start: the number of a line, from 0 on.
        end: the number of another line.
        weight: the strength, 0 to 1, shown as thickness.
        style: the class of the arc, which gives its colour: "p" or "n".
        dashed: whether the arc is broken.
    """

    start: int
    end: int
    weight: float
    style: str = "p"
    dashed: bool = False


def arcs(lines: Sequence[tuple[str, str]], links: Sequence[Arc]) -> str:
    """The lines, each a number and a plain text, as HTML, with an arc on their left per link."""
    longest = max((abs(link.end - link.start) for link in links), default=1)
    height = _LINE * len(lines)
    weakest_first = sorted(links, key=lambda link: link.weight)
    paths = "".join(_path(link, longest) for link in weakest_first)
    items = ""
    for number, text in lines:
        items += f"<li><span>{escape(number)}</span><bdi>{escape(text)}</bdi></li>"
    return (
        f"<div class=arcs><svg width={_WIDTH} height={height} "
        f'viewBox="0 0 {_WIDTH} {height}" aria-hidden=true>'
        f'{paths}</svg><ol style="line-height:{_LINE}px">{items}</ol></div>'
    )


def _path(link: Arc, longest: int) -> str:
    """Half an ellipse, as wide as it is long."""
    top, bottom = sorted(_LINE * (line + 0.5) for line in (link.start, link.end))
    length = abs(link.end - link.start)
    width = 0.95 * _WIDTH * length / longest
    half_height = (bottom - top) / 2
    begin = f"M{_WIDTH} {top:g}"
    arc = f"A{width:.1f} {half_height:g} 0 0 0 {_WIDTH} {bottom:g}"
    thickness = 0.5 + 5 * link.weight
    opacity = min(1.0, 0.25 + link.weight)
    look = f"stroke-width={thickness:.2f} opacity={opacity:.2f}"
    dashes = " stroke-dasharray=5,4" if link.dashed else ""
    return f'<path class={link.style} d="{begin}{arc}" {look}{dashes} />'


def sentences(att: AttributionRecord, row: int) -> list[str]:
    """A line for each kind of pair; safe to show.

    An example is "either would do: “A” or “B” (-12 %)".
    """
    names = labels(att)
    lines: list[str] = []
    for kind, (heading, word) in WORDS.items():
        pairs = [pair for pair in att.pairs if pair.target == row and pair.kind == kind]
        if not pairs:
            continue
        amounts = amounts_of(att, row)
        texts: list[str] = []
        for pair in pairs[:_MOST]:
            first, second = (f"“{names[unit]}”" for unit in pair.units)
            score = amounts.with_unit(pair.score, pair.stderr)
            texts.append(f"{first} {word} {second} ({score})")
        if len(pairs) > _MOST:
            texts.append(f"{len(pairs) - _MOST} more")
        lines.append(f"{heading}: {' · '.join(texts)}")
    return lines


def pair_arcs(att: AttributionRecord, row: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """A line for each unit that is in a pair, with its score, and an arc for each pair.

    The arc of an "either" pair is dashed.
    """
    pairs = [pair for pair in att.pairs if pair.target == row]
    units: set[int] = set()
    for pair in pairs:
        units.update(pair.units)
    in_order = sorted(units)
    show = amounts_of(att, row)
    names = labels(att)
    lines = [(show(float(att.scores[row, unit])), names[unit]) for unit in in_order]
    largest = max((abs(pair.score) for pair in pairs), default=1.0) or 1.0
    links: list[Arc] = []
    for _, (first, second), score, _, kind in pairs:
        is_either = kind == "either"
        links.append(
            Arc(
                start=in_order.index(first),
                end=in_order.index(second),
                weight=abs(score) / largest,
                style="n" if is_either else "p",
                dashed=is_either,
            )
        )
    return lines, links


def path_arcs(att: AttributionRecord, target: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """Lines and arcs of the paths to one target.

    The lines are the prompt's units and the targets, each with the part of the influence that
    leaves it.
    """
    units = len(att.units)
    parts = flow(att, target)
    leaving = floats(parts.sum(0))
    shares = [f"{share:.0%}" for share in leaving[: units + target]]
    shares.append("")  # nothing leaves the last target
    texts = [label(unit.text) for unit in att.units]
    texts += [label(span.text) for span in att.targets[: target + 1]]
    links: list[Arc] = []
    for row, weights in enumerate(float_rows(parts)):
        for start, weight in enumerate(weights):
            if weight >= _LEAST:
                links.append(Arc(start, units + row, weight, "p" if start < units else "n"))
    return list(zip(shares, texts, strict=True)), links
