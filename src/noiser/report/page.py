"""The tables and figures of a report on one page, which needs no other file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from noiser.files import html_page
from noiser.report.figures import Picture, svg
from noiser.report.formats import READING, one_line
from noiser.report.tables import Table

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: start; white-space: nowrap; border-bottom: 1px solid #8886; }
tr:hover { background: #8882; }
svg { max-width: 100%; height: auto; background: #fff; }
dt { font-weight: bold; float: left; clear: left; margin-right: .6em; }
"""


def page(title: str, about: Sequence[tuple[str, str]], tables: Sequence[Table], pictures: Sequence[Picture]) -> str:
    """The page as HTML: figures after the first table; every text is escaped.

    Args:
        title: of the report.
        about: facts of the run, as (name, value).
        tables: in order.
        pictures: in order.
    """
    written = [(table.title, _table(table)) for table in tables]
    parts = [*written[:1], *((picture.title, _figure(picture)) for picture in pictures), *written[1:]]
    facts = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in about)
    links = "".join(f'<li><a href="#part-{i}">{_text(name)}</a></li>' for i, (name, _) in enumerate(parts))
    sections = (
        f'<section id="part-{i}"><h2>{_text(name)}</h2>{html}</section>' for i, (name, html) in enumerate(parts)
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
    inside = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{picture.key}-", svg(picture).partition("<svg")[2])
    return f'<div class=wide tabindex=0><svg role="img" aria-label="{escape(picture.title)}"{inside}</div>'
