"""Pairs of units of one target, in words and as arcs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from noiser.attribution.arcs import Arc
from noiser.attribution.display import labels
from noiser.numbers import number_format

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution

MOST = 3  # pairs of each kind that are put into words
WORDS = {"together": ("only together", "with"), "either": ("either would do", "or")}
"""From the kind of a pair to its name, and to the word between its units."""


def sentences(att: Attribution, row: int) -> list[str]:
    """A line for each kind of pair, such as "either would do: “A” or “B” (-1.2 ± 0.1)"; safe to show."""
    lines, names = list[str](), labels(att)
    for kind, (heading, word) in WORDS.items():
        found = [pair for pair in att.pairs if pair.target == row and pair.kind == kind]
        show = number_format([pair.score for pair in found])
        texts = [
            f"“{names[first]}” {word} “{names[second]}” ({show.with_error(score, stderr)})"
            for _, (first, second), score, stderr, _ in found[:MOST]
        ]
        more = [f"{len(found) - MOST} more"] * (len(found) > MOST)
        lines += [f"{heading}: {' · '.join([*texts, *more])}"] * bool(found)
    return lines


def pair_arcs(att: Attribution, row: int) -> tuple[list[tuple[str, str]], list[Arc]]:
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
