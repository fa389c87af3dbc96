"""Tables as Markdown, as CSV and as LaTeX with booktabs' rules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from noiser import files
from noiser.report.table import Table, Value, cells_frame, clean, format_cell, reading


def csv_text(tables: Iterable[Table]) -> str:
    """All tables as one CSV: the lines of `cells_frame`.

    Numbers that are not there are empty, never 0; `n` is then 0, or `reason` says why.
    """
    return files.csv_text(cells_frame(tables))


# ---- Markdown -------------------------------------------------------------------------------------------------------

_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_[]<>|"})


def markdown(tables: Sequence[Table], about: Sequence[tuple[str, str]] = (), title: str = "Report") -> str:
    """All tables as a Markdown document. A table without rows is its title and its notes."""
    facts = [_pipes([["", ""], ["---", "---"], *([name, _plain(value)] for name, value in about)])] if about else []
    parts = [
        f"# {_plain(title)}",
        *facts,
        "## How to read the tables",
        *map(_plain, reading(tables)),
        *map(_markdown, tables),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    headers = [f"{c.group}: {c.header}" if table.groups and c.group else c.header for c in table.columns]
    rule = ["---" if table.is_text(i) else "---:" for i in range(len(headers))]
    rows = [[_plain(row.label), *map(_markdown_cell, row.cells)] for row in table.rows]
    lines = [[table.stub_header, *map(_plain, headers)], ["---", *rule], *rows]
    return "\n\n".join([f"## {_plain(table.title)}", *([_pipes(lines)] if rows else []), *map(_plain, table.footnotes)])


def _pipes(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(cell: Value) -> str:
    text, interval, base, mark, unit = format_cell(cell)
    text = _plain(text) + unit
    text = f"**{text}**" if mark in ("best", "clear") else f"{text} ≈" if mark == "level" else text
    return " ".join(part for part in (text, interval, f"({base})" if base else "") if part)


def _plain(text: str) -> str:
    """The text in one line with every character that Markdown obeys escaped."""
    return clean(text).translate(_MARKDOWN)


# ---- LaTeX ----------------------------------------------------------------------------------------------------------

_COMMANDS = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
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
    "⟨": r"$\langle$",
    "⟩": r"$\rangle$",
    "\u00a0": "~",
    '"': r"\textquotedbl{}",
}
_LATEX = str.maketrans(_COMMANDS)

_PREAMBLE = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage[margin=2cm]{geometry}
\usepackage{array}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage{rotating}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\emergencystretch=2em
\setlength{\abovecaptionskip}{0pt}
\setlength{\belowcaptionskip}{6pt}
"""

_PROSE = r">{\raggedright\arraybackslash}p{2.2cm}"
"""The column type of texts."""

_WIDE = 110
"""Characters of a line above which a table is rotated; those in small type count for less."""


def document(tables: Sequence[Table], about: Sequence[tuple[str, str]] = (), title: str = "Report") -> str:
    """All tables as one complete document."""
    facts = "".join(f"\\item {escaped(name)}: {escaped(value)}\n" for name, value in about)
    facts = f"\\begin{{itemize}}\n{facts}\\end{{itemize}}\n" if facts else ""
    explained, body = "\n\n".join(map(escaped, reading(tables))), "\n".join(map(tabular, tables))
    start = f"{_PREAMBLE}\\begin{{document}}\n\\section*{{{escaped(title)}}}\n{facts}"
    return f"{start}\n{explained}\n\n{body}\\clearpage\n\\end{{document}}\n"


def tabular(table: Table) -> str:
    r"""A `table` environment, to be put into a paper; it needs the packages array, booktabs, graphicx and rotating.

    A wide table is a `sidewaystable`, and what is wider still is scaled down. A table without rows is a paragraph.
    """
    notes = " ".join(escaped(note) for note in (*table.notes, table.legend_text)).rstrip()
    if not table.rows:
        return f"\\paragraph{{{escaped(table.title)}.}} {notes}\n"
    columns = "l" + "".join(_PROSE if table.is_text(i) else "r" for i in range(len(table.columns)))
    environment, position = ("sidewaystable", "") if _width(table) > _WIDE else ("table", "[t]")
    return "\n".join(
        [
            f"\\begin{{{environment}}}{position}",
            r"\centering",
            r"\small",
            f"\\caption{{\\textbf{{{escaped(table.title)}.}} {notes}}}",
            f"\\label{{tab:{table.key.replace('_', '-')}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            f"\\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *_group_rows(table),
            _latex_row(map(escaped, [table.stub_header, *(column.header for column in table.columns)])),
            r"\midrule",
            *(_latex_row([escaped(row.label), *map(_latex_cell, row.cells)]) for row in table.rows),
            r"\bottomrule",
            r"\end{tabular}}",
            f"\\end{{{environment}}}",
            "",
        ]
    )


def escaped(text: str) -> str:
    r"""The text in one line with every character that LaTeX obeys, or that plain fonts lack, as a command.

    >>> escaped("k_max & 5% ↑")
    'k\\_max \\& 5\\% $\\uparrow$'
    """
    return clean(text).translate(_LATEX)


def _group_rows(table: Table) -> list[str]:
    """The row of what columns share, with a rule under each."""
    cells, rules, start = [""], [], 2
    for name, width in table.groups:
        cells.append(f"\\multicolumn{{{width}}}{{c}}{{{escaped(name)}}}")
        rules += [f"\\cmidrule(lr){{{start}-{start + width - 1}}}"] if name else []
        start += width
    return [_latex_row(cells), " ".join(rules)] if table.groups else []


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Value) -> str:
    value, interval, base, mark, unit = format_cell(cell)
    text = escaped(value + unit).replace(r"\_", r"\_\allowbreak{}")  # so that long names in texts may break
    text = f"\\textbf{{{text}}}" if mark in ("best", "clear") else text + r"\,$\approx$" * (mark == "level")
    small = " ".join(escaped(part) for part in (interval, f"({base})" if base else "") if part)
    return f"{text} {{\\scriptsize {small}}}" if small else text


def _width(table: Table) -> float:
    """About how many characters of ordinary type a line takes."""
    width = float(max(len(label) for label in (table.stub_header, *(row.label for row in table.rows))))
    for i, column in enumerate(table.columns):
        texts = [format_cell(row.cells[i]) for row in table.rows]
        longest = max(len(one.value + one.unit) + 0.7 * len(one.interval + one.base) for one in texts)
        width += min(14, longest) if table.is_text(i) else max(len(column.header), longest)
    return width
