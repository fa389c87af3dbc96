"""Attributions as Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import notes, provenance, visible
from noiser.attribution.heatmap import heat_map, lines_of, numbers
from noiser.attribution.summary import about, as_markdown

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord


def markdown(att: AttributionRecord) -> str:
    """A table of the scores for each target, and where they come from."""
    paragraphs = [_markdown_section(att, row) for row in range(len(att.targets))]
    paragraphs += [escaped(note) for note in notes(att)]
    paragraphs.append(escaped(provenance(att)))
    return "\n\n".join(paragraphs) + "\n"


def _markdown_section(att: AttributionRecord, row: int) -> str:
    """One target: its sentence, the text before it, facts, the table of scores, and pairs."""
    heat = heat_map(att, row)
    scores = numbers([att], row)
    text = "".join(cell.text for cell in heat.cells)
    prompt = visible(text.strip()).replace("\n", " ")
    prompt_and_target = f"{escaped_line(prompt)} → **{escaped(heat.target)}**"
    first = f"{prompt_and_target}\n({escaped(heat.facts)})"
    table = markdown_table([scores.head, *scores.rows], range(1, len(scores.head)))
    sentence = as_markdown(about([att], row), escaped)
    return "\n\n".join([sentence, first, table, *map(escaped, lines_of(heat))])


def markdown_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """A table of the rows, the heading first, in which nothing is markup.

    Columns in `right` align to the right.
    """
    rule = "|"
    for column in range(len(rows[0])):
        rule += "---:|" if column in right else "---|"
    lines: list[str] = []
    for row in rows:
        cells = " | ".join(map(escaped, row))
        lines.append(f"| {cells} |")
    lines.insert(1, rule)
    return "\n".join(lines)


def escaped_line(text: str) -> str:
    r"""The text as a line of its own: nothing is markup, or begins a list, heading or rule.

    >>> print(escaped_line("1. *a*"), escaped_line("- [b]"), escaped_line("-0.5 <c>"))
    1\. \*a\* \- \[b\] \-0.5 \<c\>
    """
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", escaped(text.lstrip()))


def escaped(text: str) -> str:
    """The text, in which nothing is markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#&~])", r"\\\1", text)
