"""Tables as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from noiser.attribution.display import provenance, visible
from noiser.attribution.heatmap import heat_map, numbers

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

_COMMANDS = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "≈": r"$\approx$",
    "–": "--",
    "−": "$-$",
    "ρ": r"$\rho$",
    "·": r"$\cdot$",
    "τ": r"$\tau$",
    "\u00a0": "~",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "↵": r"$\hookleftarrow$",
    "…": r"\dots{}",
    "→": r"$\rightarrow$",
}
_TABLE = str.maketrans(_COMMANDS)


def latex(att: AttributionRecord) -> str:
    """A table of the scores for each target, with what it is of as caption."""
    tables: list[str] = []
    for row in range(len(att.targets)):
        heat = heat_map(att, row)
        scores = numbers([att], row)
        caption = f"{heat.target} ({heat.facts}). {provenance(att)}"
        tables.append(latex_table([scores.head, *scores.rows], caption))
    return "\n".join(tables)


def latex_escaped(text: str) -> str:
    r"""The text, in which nothing is a command.

    >>> latex_escaped("p_1 < 5 %")
    'p\\_1 \\textless{} 5 \\%'
    """
    return visible(text).replace("\n", " ").translate(_TABLE)


def latex_table(rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of the rows, the heading first; it needs the package booktabs."""
    head, *body = [" & ".join(map(latex_escaped, row)) + r" \\" for row in rows]
    columns = "l" + "r" * (len(rows[0]) - 1)
    lines = [r"\begin{tabular}{" + columns + "}", r"\toprule", head, r"\midrule", *body]
    lines += [r"\bottomrule", r"\end{tabular}"]
    if caption:
        caption_line = r"\caption{" + latex_escaped(caption) + "}"
        lines = [r"\begin{table}", r"\centering", caption_line, *lines, r"\end{table}"]
    return "\n".join([r"% \usepackage{booktabs}", *lines]) + "\n"
