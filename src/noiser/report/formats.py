"""Tables as Markdown and LaTeX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from noiser.attribution.display import visible
from noiser.attribution.markup import escaped_line
from noiser.report.tables import Table

READING = (
    "Value [interval]; n is the number of prompts, and stands beside a number where it is not that of its row. "
    "Intervals are bias-corrected bootstraps over prompts; below six prompts there is none. – stands where nothing is "
    "measured yet, or where a number is not defined on these prompts.",
    "Bold is the best value of its column and model. ≈ marks every other method that is not significantly worse: the "
    "interval of the paired difference, on the prompts that both have, holds 0, or the p-value of a sign-flip test, "
    "corrected by Holm's method for all comparisons of the table, is too large. Intervals are not adjusted for their "
    "number.",
    "A column “paper” has the number that the paper printed for the same model or, for other models, the mean of its "
    "six: a reference, not a replication. Its numbers are of the next token, on whole data sets, and its judge was "
    "Llama-3.3-70B-Instruct-Turbo.",
)
"""How to read the tables, for all formats."""

_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "≈": r"$\approx$",
    "–": "--",
    "−": "$-$",
    "ρ": r"$\rho$",
    "τ": r"$\tau$",
    "\u00a0": "~",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
}


def markdown(made: Sequence[Table], about: Iterable[tuple[str, str]] = (), title: str = "Report") -> str:
    """All tables as a Markdown document; how to read them stands after the first one.

    Args:
        made: the tables.
        about: facts of the run, as (name, value).
        title: of the document.
    """
    facts = "\n".join(f"- {_line(name)}: {_line(value)}" for name, value in about)
    reading = ["## How to read the tables", *map(_line, READING)]
    first, *others = map(_markdown, made)
    return "\n\n".join(filter(None, [f"# {_line(title)}", facts, first, *reading, *others])) + "\n"


def _markdown(table: Table) -> str:
    frame = table.marked(_line, "**{}**")
    lines = [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy().tolist()] if len(frame) else []
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(filter(None, [f"## {_line(table.title)}", body, *map(_line, table.notes)]))


def _line(text: str) -> str:
    """The text in one line, in which nothing is mark-up."""
    return escaped_line(one_line(text))


def one_line(text: str) -> str:
    """The text in one line, with every character that a terminal obeys as a visible one."""
    return visible(re.sub(r"[\n\r\t\v\f\x85\u2028\u2029]+", " ", text))


def latex(made: Iterable[Table], widest: int = 4) -> str:
    r"""All tables by `DataFrame.to_latex`, to be put into a paper; they need the packages booktabs and longtable.

    Args:
        made: the tables.
        widest: the most numbers of a table; one with more becomes several.
    """
    parts = [r"% \usepackage{booktabs,longtable}"]
    for table in made:
        frame = table.marked(_escaped, r"\textbf{{{}}}")
        stub = [name for name in frame.columns if name in ("model", "data", "metric", "method", "n")]
        others = [name for name in frame.columns if name not in stub]
        for start in range(0, len(others) if len(frame) else 0, widest):
            part = frame[[*stub, *others[start : start + widest]]]
            text = part.to_latex(index=False, longtable=True, caption=_escaped(table.title))
            parts.append(f"{{\\scriptsize\n{text}}}")
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    return one_line(text).translate(str.maketrans(_LATEX))
