"""Everything on one page that needs nothing else: no scripts, no network, light and dark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from noiser.attribution.html import css as attribution_css
from noiser.attribution.html import fragment
from noiser.errors import DependencyError
from noiser.pages import html_page
from noiser.report.figures import Picture, inline_svg
from noiser.report.heatmaps import PromptAttributions
from noiser.report.table import Quoted, Table, Value, clean, clean_text, format_cell, reading


def page(
    title: str,
    about: Sequence[tuple[str, str]],
    tables: Sequence[Table],
    pictures: Sequence[Picture] = (),
    prompts: Sequence[PromptAttributions] = (),
) -> str:
    """The page, by the template page.html, which escapes every text and shows characters that are not visible.

    Args:
        title: of the report.
        about: facts of the run, as (name, value).
        tables: in order.
        pictures: figures, in order, after the first table.
        prompts: attributions of the plan's own prompts, shown as heat maps.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError as error:
        raise DependencyError("The page needs jinja2; install it with: pip install 'noiser[report]'") from error
    written = [(table.key, table.title, table) for table in tables]
    drawn = [(f"figure-{picture.key}", picture.title, Markup(_figure(picture))) for picture in pictures]
    maps = [("heat-maps", "Heat maps of the plan's own prompts", Markup(_maps(prompts)))] if prompts else []
    environment = Environment(autoescape=True, finalize=clean_text)
    body = environment.from_string(_read("page.html")).render(
        title=title,
        about=about,
        reading=reading(tables),
        tables=written,
        figures=drawn,
        maps=maps,
        parts=[*written[:1], *drawn, *maps, *written[1:]],
        classes=_classes,
        format_cell=format_cell,
    )
    style = (attribution_css() if maps else "") + re.sub(r"\s+", " ", _read("page.css"))
    return html_page(clean(title), style, body)


def _read(name: str) -> str:
    return files("noiser.report").joinpath(name).read_text(encoding="utf-8")


def _classes(table: Table, column: int, value: Value | None = None) -> str:
    """The CSS classes of a cell, or of the head of its column."""
    groups = [head.group for head in table.columns]
    mark = "" if value is None else format_cell(value).mark
    prose = table.is_text(column) if value is None else isinstance(value, str)
    classes = {
        "first": bool(table.groups) and (not column or groups[column] != groups[column - 1]),
        "words": prose,
        "paper": isinstance(value, Quoted),
        "best": mark in ("best", "clear"),
    }
    return " ".join(name for name, applies in classes.items() if applies)


def _figure(picture: Picture) -> str:
    words = f"<details><summary>In words</summary>{escape(picture.description)}</details>"
    return f"<figure>{inline_svg(picture)}<figcaption>{words}</figcaption></figure>"


def _maps(prompts: Sequence[PromptAttributions]) -> str:
    """Heat maps, under a heading for each model."""
    parts: list[str] = []
    for number, prompt in enumerate(prompts):
        if not number or prompt.model != prompts[number - 1].model:
            parts.append(f"<h3>{escape(prompt.model)}</h3>")
        parts.append(fragment(prompt.attributions, f"map-{number}"))
    return "".join(parts)
