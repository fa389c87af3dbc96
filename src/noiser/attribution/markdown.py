"""An attribution as Markdown, for an issue, a README or a chat."""

from __future__ import annotations

import re
from collections.abc import Iterable

from noiser.attribution.display import heat_map, provenance, score_table, visible
from noiser.attribution.record import AttributionRecord


def markdown(att: AttributionRecord) -> str:
    """A table of the scores for each target, and where they come from."""
    sections = [_section(att, row) for row in range(len(att.targets))]
    return "\n\n".join([*sections, _escaped(" · ".join(provenance(att)))]) + "\n"


def _section(att: AttributionRecord, row: int) -> str:
    heat, table = heat_map(att, row), score_table(att, row)
    prompt = visible("".join(cell.text for cell in heat.cells).strip()).replace("\n", " ")
    lines = [f"{escaped_line(prompt)} → **{_escaped(heat.target)}**"]
    if facts := heat.question + heat.noise:
        lines.append(f"({_escaped(' · '.join(facts))})")
    lines += ["", _line([table.unit, *(column.heading for column in table.columns)])]
    lines.append("|---|" + "---:|" * len(table.columns))
    lines += map(_line, zip(table.labels, *(column.texts for column in table.columns), strict=True))
    return "\n".join(lines)


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(map(_escaped, texts))} |"


def escaped_line(text: str) -> str:
    r"""The text as a line of its own, in which nothing is mark-up and which begins no list, heading or rule.

    >>> print(escaped_line("1. *a*"), escaped_line("- [b]"), escaped_line("-0.5 <c>"))
    1\. \*a\* \- \[b\] \-0.5 \<c\>
    """
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _escaped(text))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#&~])", r"\\\1", text)
