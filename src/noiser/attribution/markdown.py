"""Attributions and tables as Markdown, for an issue, a README or a chat."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import checks, provenance, visible
from noiser.attribution.heatmap import heat_map
from noiser.attribution.heatmap import table as numbers_of

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution


def markdown(att: Attribution) -> str:
    """A table of the scores for each target, and where they come from."""
    sections = [_section(att, row) for row in range(len(att.targets))]
    return "\n\n".join([*sections, *map(_escaped, checks(att)), _escaped(provenance(att))]) + "\n"


def _section(att: Attribution, row: int) -> str:
    heat, numbers = heat_map(att, row), numbers_of([att], row)
    prompt = visible("".join(cell.text for cell in heat.cells).strip()).replace("\n", " ")
    first = f"{escaped_line(prompt)} → **{_escaped(heat.target)}**"
    facts = f"({_escaped(heat.facts)})"
    lines = [first, facts, "", table([numbers.head, *numbers.rows], range(1, len(numbers.head)))]
    return "\n".join([*lines, *(f"\n{_escaped(line)}" for line in heat.pairs)])


def table(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """A table of the rows, the heading first, in which nothing is markup; columns in `numbers` align to the right."""
    rule = "".join("---:|" if column in numbers else "---|" for column in range(len(rows[0])))
    head, *lines = (f"| {' | '.join(map(_escaped, row))} |" for row in rows)
    return "\n".join([head, f"|{rule}", *lines])


def escaped_line(text: str) -> str:
    r"""The text as a line of its own, in which nothing is markup and which begins no list, heading or rule.

    >>> print(escaped_line("1. *a*"), escaped_line("- [b]"), escaped_line("-0.5 <c>"))
    1\. \*a\* \- \[b\] \-0.5 \<c\>
    """
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _escaped(text.lstrip()))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#&~])", r"\\\1", text)
