"""The tables and figures of a report on one page, which needs no other file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from noiser.errors import DependencyError
from noiser.pages import html_page
from noiser.report.figures import Picture, svg
from noiser.report.formats import READING, one_line
from noiser.report.tables import Table

_BODY = """
<h1>{{ title }}</h1>
<dl>{% for name, value in about %}<dt>{{ name }}</dt><dd>{{ value }}</dd>{% endfor %}</dl>
<nav><ul>{% for part in parts %}<li><a href="#part-{{ loop.index }}">{{ part.title }}</a></li>{% endfor %}</ul></nav>
<details open><summary>How to read the tables</summary>{% for text in reading %}<p>{{ text }}</p>{% endfor %}</details>
<main>{% for part in parts %}
<section id="part-{{ loop.index }}"><h2>{{ part.title }}</h2>
<div class=wide tabindex=0>{{ part.html | safe }}</div>
{% for note in part.notes %}<p>{{ note }}</p>{% endfor %}</section>{% endfor %}</main>
"""

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

    Raises:
        DependencyError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise DependencyError("The page needs jinja2.", "report") from error
    written = [{"title": one.title, "notes": list(map(one_line, one.notes)), "html": _table(one)} for one in tables]
    drawn = [{"title": one.title, "notes": (), "html": _figure(one)} for one in pictures]
    body = Environment(autoescape=True).from_string(_BODY)
    facts = [(name, one_line(value)) for name, value in about]
    text = body.render(title=title, about=facts, reading=READING, parts=[*written[:1], *drawn, *written[1:]])
    return html_page(title, _STYLE, text)


def _table(table: Table) -> str:
    frame = table.marked(lambda text: escape(one_line(text)), "<b>{}</b>")
    return frame.to_html(index=False, escape=False, border=0) if len(frame) else ""


def _figure(picture: Picture) -> str:
    """The SVG with ids of its own and a name for screen readers."""
    text = svg(picture)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{picture.key}-", text[text.index("<svg") :])
    return text.replace("<svg", f'<svg role="img" aria-label="{escape(picture.title)}"', 1)
