"""Tables as LaTeX, with booktabs' rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from noiser.report.table import LEGENDS, READING, Cell, Table, shown

__all__ = ["document", "escaped", "tabular"]

_COMMANDS = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "≈": r"$\approx$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "ρ": r"$\rho$",
    "τ": r"$\tau$",
    "“": "``",
    "”": "''",
    "’": "'",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\u00a0": "~",
    '"': r"\textquotedbl{}",
} | {character: f"\\{character}" for character in "&%$#_"}

_PROSE = r">{\raggedright\arraybackslash}p{2.2cm}"

PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[margin=2cm]{geometry}
\usepackage{array}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage{rotating}
\setlength{\abovecaptionskip}{0pt}
\setlength{\belowcaptionskip}{6pt}
"""

WIDE = 110
"""Characters of a line above which a table lies on its side; those in small type count for less."""


def escaped(text: str) -> str:
    r"""The text with every character that LaTeX obeys, or that plain fonts lack, as a command.

    >>> escaped("k_max & 5% ↑")
    'k\\_max \\& 5\\% $\\uparrow$'
    """
    return "".join(_COMMANDS.get(character, character) for character in text)


def tabular(table: Table) -> str:
    r"""A `table` environment, to be put into a paper; it needs the packages array, booktabs, graphicx and rotating.

    A wide table is a `sidewaystable`, and what is wider still is scaled down. A table without lines is a paragraph.
    """
    notes = " ".join(escaped(note) for note in (*table.notes, LEGENDS[table.legend])).rstrip()
    if not table.lines:
        return f"\\paragraph{{{escaped(table.title)}.}} {notes}\n"
    spec = "l" + "".join(_PROSE if _is_text(table, column) else "r" for column in range(len(table.heads)))
    body = [
        *_groups(table),
        _row([escaped(table.corner), *(escaped(head.text) for head in table.heads)]),
        r"\midrule",
        *(_row([escaped(line.label), *map(_cell, line.cells)]) for line in table.lines),
    ]
    environment, place = ("sidewaystable", "") if _width(table) > WIDE else ("table", "[t]")
    return "\n".join(
        [
            f"\\begin{{{environment}}}{place}",
            r"\centering",
            r"\small",
            f"\\caption{{\\textbf{{{escaped(table.title)}.}} {notes}}}",
            f"\\label{{tab:{table.key.replace('_', '-')}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            f"\\begin{{tabular}}{{{spec}}}",
            r"\toprule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            f"\\end{{{environment}}}",
            "",
        ]
    )


def document(tables: Iterable[Table], about: Sequence[tuple[str, str]] = (), title: str = "Report") -> str:
    """All tables as a document that can be typeset as it is."""
    known = "".join(f"\\item {escaped(name)}: {escaped(value)}\n" for name, value in about)
    facts = f"\\begin{{itemize}}\n{known}\\end{{itemize}}\n" if known else ""
    reading = "\n\n".join(map(escaped, READING))
    body = "\n".join(tabular(table) for table in tables)
    return (
        f"{PREAMBLE}\\begin{{document}}\n\\section*{{{escaped(title)}}}\n{facts}\n{reading}\n\n{body}"
        "\\clearpage\n\\end{document}\n"
    )


def _groups(table: Table) -> list[str]:
    """The row of what columns share, with a rule under each."""
    if not table.groups:
        return []
    cells, rules, start = [""], [], 2
    for name, width in table.groups:
        cells.append(f"\\multicolumn{{{width}}}{{c}}{{{escaped(name)}}}")
        rules += [f"\\cmidrule(lr){{{start}-{start + width - 1}}}"] if name else []
        start += width
    return [_row(cells), " ".join(rules)]


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _width(table: Table) -> float:
    """About how many characters of ordinary type a line takes."""
    labels = max(map(len, (table.corner, *(line.label for line in table.lines))))
    columns = zip(*(line.cells for line in table.lines), strict=True)
    return labels + sum(
        min(14, max(map(_length, cells))) if _is_text(table, column) else max(len(head.text), *map(_length, cells))
        for column, (head, cells) in enumerate(zip(table.heads, columns, strict=True))
    )


def _length(cell: Cell) -> float:
    value, interval, base, _, unit = shown(cell)
    return len(value + unit) + 0.7 * len(interval + base)


def _is_text(table: Table, column: int) -> bool:
    return any(isinstance(line.cells[column], str) for line in table.lines)


def _cell(cell: Cell) -> str:
    value, interval, base, mark, unit = shown(cell)
    text = escaped(value + unit)
    text = f"\\textbf{{{text}}}" if mark in ("best", "clear") else text
    text += r"\,$\approx$" if mark == "level" else ""
    small = " ".join(escaped(part) for part in (interval, f"({base})" if base else "") if part)
    return f"{text} {{\\scriptsize {small}}}" if small else text
