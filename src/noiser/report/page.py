"""Everything on one page that needs nothing else: no scripts, no network, light and dark."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from noiser.attribution.html import compare_fragment
from noiser.attribution.html import css as attribution_css
from noiser.pages import html_page
from noiser.report.about import about, title
from noiser.report.drawing import Picture, inline_svg
from noiser.report.heatmaps import Shown
from noiser.report.names import method_title
from noiser.report.results import Results
from noiser.report.table import LEGENDS, READING, Cell, Head, Quoted, Table, shown

__all__ = ["page", "table_html"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(
    results: Results, tables: Sequence[Table], pictures: Sequence[Picture] = (), prompts: Sequence[Shown] = ()
) -> str:
    """The page.

    Args:
        results: what it is about.
        tables: in order.
        pictures: figures, in order, behind the first table.
        prompts: attributions of the plan's own prompts, shown as heat maps.
    """
    written = [(table.key, table.title, table_html(table)) for table in tables]
    drawn = [(f"figure-{picture.key}", picture.title, _figure(picture)) for picture in pictures]
    maps = [("heat-maps", "Heat maps of the plan's own prompts", _maps(prompts))] if prompts else []
    parts = [*written[:1], *drawn, *maps, *written[1:]]
    body = "".join(
        f'<section class=part id="{escape(key)}"><h2>{escape(name)}</h2>{inner}</section>' for key, name, inner in parts
    )
    known = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in about(results))
    reading = "".join(f"<li>{escape(text)}</li>" for text in READING)
    links = _links("Figures", [*drawn, *maps]) + _links("Tables", written)
    return html_page(
        title(results),
        _css(maps=bool(maps)),
        f"<header class=top><h1>{escape(title(results))}</h1><dl class=about>{known}</dl>"
        f"<details open><summary>How to read the tables</summary><ul class=reading>{reading}</ul></details>"
        f"<nav aria-label=Contents><details><summary>Contents</summary>{links}</details></nav></header>\n"
        f"<main>{body}<footer class=end>Made from stored rows; no model ran for this page.</footer></main>",
        policy=_POLICY,
    )


def _links(name: str, parts: Sequence[tuple[str, str, str]]) -> str:
    items = "".join(f'<li><a href="#{escape(key)}">{escape(title)}</a></li>' for key, title, _ in parts)
    return f"<p>{name}</p><ul>{items}</ul>" if items else ""


def _css(*, maps: bool) -> str:
    own = files("noiser.report").joinpath("page.css").read_text(encoding="utf-8")
    return (attribution_css() if maps else "") + re.sub(r"\s+", " ", own)


def table_html(table: Table) -> str:
    """A table with its notes; every text is escaped."""
    notes = [*table.notes, *([LEGENDS["clear"]] if table.legend == "clear" else [])]
    below = "".join(f"<p class=notes>{escape(note)}</p>" for note in notes)
    if not table.lines:
        return below
    firsts = _firsts(table)
    prose = [any(isinstance(line.cells[i], str) for line in table.lines) for i in range(len(table.heads))]
    heads = "".join(map(_head, table.heads, firsts, prose))
    top = _groups(table)
    corner = f"<th class=corner scope=col{' rowspan=2' if top else ''}>{escape(table.corner)}</th>"
    head = f"<tr>{corner}{top}</tr><tr>{heads}</tr>" if top else f"<tr>{corner}{heads}</tr>"
    rows = "".join(
        f"<tr><th scope=row>{escape(line.label)}</th>"
        + "".join(_cell(cell, first) for cell, first in zip(line.cells, firsts, strict=True))
        + "</tr>"
        for line in table.lines
    )
    name = escape(table.title, quote=True)
    return (
        f'<div class=wide tabindex=0 role=region aria-label="{name}"><table class=grid><caption>{name}</caption>'
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>{below}"
    )


def _firsts(table: Table) -> list[bool]:
    """Whether a column is the first of its group, where there are groups."""
    groups = [head.group for head in table.heads]
    return [bool(table.groups) and (not i or groups[i] != groups[i - 1]) for i in range(len(groups))]


def _groups(table: Table) -> str:
    return "".join(
        f"<th class=group scope=colgroup colspan={width}>{escape(name)}</th>" for name, width in table.groups
    )


def _head(head: Head, first: bool, prose: bool) -> str:
    kinds = " ".join(["first"] * first + ["words"] * prose)
    said = f' aria-label="{escape(head.name, quote=True)}, {head.better} is better"' if head.better else ""
    return f'<th scope=col class="{kinds}"{said}>{escape(head.text)}</th>'


def _cell(cell: Cell, first: bool) -> str:
    value, interval, base, mark, unit = shown(cell)
    kinds = ["first"] * first + ["words"] * isinstance(cell, str) + ["paper"] * isinstance(cell, Quoted)
    kinds += ["best"] if mark in ("best", "clear") else []
    text = escape(value + unit)
    if mark in ("best", "clear"):
        text = f"<b>{text}</b>"
    elif mark == "level":
        text += ' <span class=level title="not told apart from the best">≈</span>'
    rest = "".join(f"<span class=of>{escape(part)}</span>" for part in (interval, base) if part)
    return f'<td class="{" ".join(kinds)}">{text}{rest}</td>' if kinds else f"<td>{text}{rest}</td>"


def _figure(picture: Picture) -> str:
    return (
        f"<figure>{inline_svg(picture)}"
        f"<figcaption><details><summary>In words</summary>{escape(picture.description)}</details></figcaption></figure>"
    )


def _maps(prompts: Sequence[Shown]) -> str:
    """Heat maps, each method under the name that the plan gives it."""
    parts: list[str] = []
    for number, prompt in enumerate(prompts):
        if not number or prompt.model != prompts[number - 1].model:
            parts.append(f"<h3>{escape(prompt.model)}</h3>")
        named = [dataclasses.replace(att, method=method_title(label)) for label, att in prompt.attributions]
        parts.append(compare_fragment(named, f"map-{number}"))
    return "".join(parts)
