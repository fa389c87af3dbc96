"""Tables as Markdown and LaTeX, and a report as one page of HTML, which needs no other file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from noiser.attribution.display import visible
from noiser.attribution.latex import latex_escaped
from noiser.attribution.markdown import escaped_line
from noiser.html import html_page
from noiser.report.figures import Picture, saved
from noiser.report.tables import Table

READING = (
    "Value [interval]; n is the number of prompts, and stands beside a number where it is not "
    "that of its row. "
    "Intervals are bias-corrected bootstraps over prompts; below six prompts there is none. – "
    "stands where nothing is "
    "measured yet, or where a number is not defined on these prompts.",
    "Bold is the best value of its column and model. ≈ marks every other method that is not "
    "significantly worse: the "
    "interval of the paired difference, on the prompts that both have, holds 0, or the p-value "
    "of a sign-flip test, "
    "corrected by Holm's method for all comparisons of the table, is too large. Intervals are "
    "not adjusted for their "
    "number.",
    "A column “paper” has the number that the paper printed for the same model or, for other "
    "models, the mean of its "
    "six: a reference, not a replication. Its numbers are of the next token, on whole data sets, "
    "and its judge was "
    "Llama-3.3-70B-Instruct-Turbo.",
)
"""How to read the tables, for all formats."""

LEADING = 2
"""How many tables stand before the text that says how to read them."""

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: start; white-space: nowrap; }
th, td { border-bottom: 1px solid #8886; }
tr:hover { background: #8882; }
svg { max-width: 100%; height: auto; background: #fff; }
dt { font-weight: bold; float: left; clear: left; margin-right: .6em; }
"""


def markdown(
    made: Sequence[Table], about: Iterable[tuple[str, str]] = (), title: str = "Report"
) -> str:
    """All tables as a Markdown document with facts of the run, as (name, value)."""
    facts = "\n".join(f"- {_line(name)}: {_line(value)}" for name, value in about)
    reading = ["## How to read the tables", *map(_line, READING)]
    texts = [*map(_markdown, made)]
    parts = [f"# {_line(title)}", facts, *texts[:LEADING], *reading, *texts[LEADING:]]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown(table: Table) -> str:
    frame = table.marked(_line, "**{}**")
    lines = (
        [list(frame.columns), ["---"] * len(frame.columns), *frame.to_numpy().tolist()]
        if len(frame)
        else []
    )
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(filter(None, [f"## {_line(table.title)}", body, *map(_line, table.notes)]))


def _line(text: str) -> str:
    """The text in one line, in which nothing is mark-up."""
    return escaped_line(one_line(text))


def one_line(text: str) -> str:
    """The text in one line, with every character that a terminal obeys as a visible one."""
    return visible(re.sub(r"[\n\r\t\v\f\x85\u2028\u2029]+", " ", text))


def latex(made: Iterable[Table], widest: int = 4) -> str:
    """All tables by `DataFrame.to_latex`, to be put into a paper; one of more numbers than `widest`
    becomes several.
    """
    parts = [r"% \usepackage{booktabs,longtable}"]
    for table in made:
        frame = table.marked(_escaped, r"\textbf{{{}}}")
        stub = [
            name for name in frame.columns if name in ("model", "data", "metric", "method", "n")
        ]
        others = [name for name in frame.columns if name not in stub]
        for start in range(0, len(others) if len(frame) else 0, widest):
            part = frame[[*stub, *others[start : start + widest]]]
            text = part.to_latex(index=False, longtable=True, caption=_escaped(table.title))
            parts.append(f"{{\\scriptsize\n{text}}}")
    return "\n".join(parts) + "\n"


def _escaped(text: str) -> str:
    return latex_escaped(one_line(text))


def page(
    title: str,
    about: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    pictures: Sequence[Picture],
) -> str:
    """The page as HTML: facts of the run, as (name, value), figures after the first table; every
    text is escaped.
    """
    written = [(table.title, _table(table)) for table in tables]
    parts = [
        *written[:1],
        *((picture.title, _figure(picture)) for picture in pictures),
        *written[1:],
    ]
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in about)
    links = "".join(
        f'<li><a href="#part-{i}">{_text(name)}</a></li>' for i, (name, _) in enumerate(parts)
    )
    sections = (
        f'<section id="part-{i}"><h2>{_text(name)}</h2>{html}</section>'
        for i, (name, html) in enumerate(parts)
    )
    body = (
        f"<h1>{_text(title)}</h1><dl>{facts}</dl><nav><ul>{links}</ul></nav>"
        f"<details open><summary>How to read the tables</summary>{_paragraphs(READING)}</details>"
        f"<main>{''.join(sections)}</main>"
    )
    return html_page(title, _STYLE, body)


def _text(text: str) -> str:
    return escape(one_line(text))


def _paragraphs(texts: Sequence[str]) -> str:
    return "".join(f"<p>{_text(text)}</p>" for text in texts)


def _table(table: Table) -> str:
    marked = table.marked(_text, "<b>{}</b>")
    html = marked.to_html(index=False, escape=False, border=0) if len(marked) else ""
    return f"<div class=wide tabindex=0>{html}</div>{_paragraphs(table.notes)}"


def _figure(picture: Picture) -> str:
    """The SVG with ids of its own and a name for screen readers."""
    drawing = saved(picture, "svg").decode().partition("<svg")[2]
    inside = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{picture.key}-", drawing)
    return (
        f'<div class=wide tabindex=0><svg role="img" '
        f'aria-label="{escape(picture.title)}"{inside}</div>'
    )
