"""Tables as LaTeX."""

from __future__ import annotations

from collections.abc import Sequence

from noiser.attribution.display import visible

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
