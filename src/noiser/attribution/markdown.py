"""Attributions and tables as Markdown, for an issue, a README or a chat."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from noiser.attribution.display import heat_map, provenance, score_table, visible
from noiser.attribution.record import AttributionRecord


def markdown(att: AttributionRecord) -> str:
    """A table of the scores for each target, and where they come from."""
    sections = [_section(att, row) for row in range(len(att.targets))]
    return "\n\n".join([*sections, _escaped(" · ".join(provenance(att)))]) + "\n"


def _section(att: AttributionRecord, row: int) -> str:
    heat, scores = heat_map(att, row), score_table(att, row)
    prompt = visible("".join(cell.text for cell in heat.cells).strip()).replace("\n", " ")
    lines = [f"{escaped_line(prompt)} → **{_escaped(heat.target)}**"]
    if facts := heat.question + heat.noise:
        lines.append(f"({_escaped(' · '.join(facts))})")
    head = [scores.unit, *(column.heading for column in scores.columns)]
    rows = zip(scores.labels, *(column.texts for column in scores.columns), strict=True)
    return "\n".join([*lines, "", table([head, *rows], numbers=range(1, len(head)))])


def table(rows: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """A table, in which nothing is mark-up.

    Args:
        rows: cells, the heading first.
        numbers: columns that are aligned to the right.
    """
    rule = "".join("---:|" if column in numbers else "---|" for column in range(len(rows[0])))
    head, *lines = (f"| {' | '.join(map(_escaped, row))} |" for row in rows)
    return "\n".join([head, f"|{rule}", *lines])


def escaped_line(text: str) -> str:
    r"""The text as a line of its own, in which nothing is mark-up and which begins no list, heading or rule.

    >>> print(escaped_line("1. *a*"), escaped_line("- [b]"), escaped_line("-0.5 <c>"))
    1\. \*a\* \- \[b\] \-0.5 \<c\>
    """
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _escaped(text))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#&~])", r"\\\1", text)
