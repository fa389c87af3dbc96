"""Heat maps as HTML that needs nothing else, and numbers as Markdown; in both every text is escaped.

Colour never stands alone: a bar below a unit is a positive score and one above it a negative score.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from noiser.attribution import display
from noiser.attribution.display import dark_ink, headings, label, notes, provenance, short
from noiser.attribution.heatmap import (
    Cell,
    HeatMap,
    Numbers,
    has_signal,
    heat_map,
    legends,
    numbers,
)
from noiser.attribution.relations import arcs, pair_arcs, path_arcs
from noiser.html import html_page, html_table
from noiser.numbers import number_format

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

_AT_ONCE, _IN_TABLES, _LONG, _MOST_CELLS = 8, 40, 1500, 20_000
"""Targets that are shown below each other (of more, the first alone, and so many units alone in tables); characters of
a text that comes after its numbers; and units on a page, which browsers show without delay."""


def page(attributions: Sequence[AttributionRecord], targets: Sequence[int] | None = None) -> str:
    """A complete page with one attribution, or with several of one prompt: a row per method, target by target."""
    card, first, count = _card(attributions, "noiser", targets), attributions[0], len(attributions)
    prompt = label(first.text[: first.prompt_length])[:80]
    return page_of_card(
        card, f"{prompt} – {label(first.method) if count == 1 else f'{count} methods'}"
    )


def fragment(attributions: Sequence[AttributionRecord]) -> str:
    """The same as a piece of a page, such as a notebook's output; several can stand on one page."""
    return f"<style>{css()}</style>{_card(attributions, f'noiser-{secrets.token_hex(6)}')}"


@cache
def css(room: str = "attribution", name: str = "style.css") -> str:
    """The rules of a style sheet; unless one is named, those that heat maps need."""
    sheet = files(f"noiser.{room}").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", sheet)


def page_of_card(card: str, title: str, style: str = "") -> str:
    """A complete page with one card, and headings above it for those who do not see it."""
    rules = f":root {{ color-scheme: light dark; }}\nbody {{ margin: 1.5rem; }}\n{css()}\n{style}"
    headings = f'<div class="noiser-unseen"><h1>{escape(title)}</h1><h2>Scores</h2></div>'
    return html_page(title, rules, f"<main>{headings}{card}</main>")


def _card(
    attributions: Sequence[AttributionRecord], identifier: str, targets: Sequence[int] | None = None
) -> str:
    """A section per target; without `targets`, of the first ones, and a note says how to see the rest."""
    display.check_comparable(attributions)
    first, note = attributions[0], ""
    count, units = len(first.targets), (~first.scores.isnan()).sum(-1).cumsum(0) * len(attributions)
    rows = range(count)[: max(1, int((units <= _MOST_CELLS).sum()))]
    if targets is not None:
        rows = display.check_targets(first, targets)
    elif len(rows) < count:
        rest = f"<code>to_html(targets=range({len(rows)}, {count}))</code> shows the others."
        note = f"<p class=facts>The first {len(rows)} of {count} targets; {rest}</p>"
    most = _IN_TABLES if len(rows) > _AT_ONCE else None
    shown = [_section(attributions, row, most) for row in rows]
    sections = "".join(
        f'<section class="t{index}">{each}</section>' for index, each in enumerate(shown, 1)
    )
    chooser = _chooser([label(first.targets[row].text) for row in rows], identifier)
    feet = "".join(f"<p>{escape(text)}</p>" for text in notes(*attributions)) + "".join(
        map(_footer, attributions)
    )
    return f'<div class="noiser-att">{chooser}{note}<div class=rows>{sections}</div><footer>{feet}</footer></div>'


def _chooser(names: Sequence[str], identifier: str) -> str:
    """Radio buttons, with style rules for each, that leave one target's rows; nothing for a single target."""
    if len(names) < 2:
        return ""
    inputs = labels = rules = ""
    first = 0 if len(names) <= _AT_ONCE else 1
    for index, text in enumerate(["all", *names]):
        name = f"{identifier}-{index}"
        inputs += f'<input type=radio name="{identifier}" id="{name}"{" checked" if index == first else ""}>'
        labels += f'<label for="{name}" dir=auto>{escape(text)}</label>'
        rules += (
            f"#{name}:checked~.chips label[for={name}]{{background:var(--ink);color:var(--paper)}}"
            f"#{name}:focus-visible~.chips label[for={name}]{{outline:2px solid var(--focus);outline-offset:2px}}"
        )
        rules += f"#{name}:checked~.rows>:not(.t{index}){{display:none}}" if index else ""
    return f"<style>{rules}</style>{inputs}<div class=chips><span>target</span>{labels}</div>"


def lines(attributions: Sequence[AttributionRecord]) -> str:
    """A line in its colours for each prompt and target, as many as browsers show without delay."""
    shown: list[str] = []
    rows = [
        (number, att, row)
        for number, att in enumerate(attributions, 1)
        for row in range(len(att.targets))
    ]
    cells = 0
    for number, att, row in rows:
        heat = heat_map(att, row)
        cells += len(heat.cells)
        if shown and cells > _MOST_CELLS:
            break
        text = "".join(_cell(att, row, cell) for cell in heat.cells)
        foil = (
            f"<span class=to> rather than <bdi>{escape(heat.foil)}</bdi></span>"
            if heat.foil
            else ""
        )
        target = f"<b class=target dir=auto>{escape(heat.target)}</b>{foil}"
        number_of_prompt = f"<span class=x>{number}</span> "
        shown.append(
            f'<p class="map" dir="auto">{number_of_prompt}{text}<span class=to> → </span>{target}</p>'
        )
    rest = len(rows) - len(shown)
    note = f"<p class=facts>The first {len(shown)} of {len(rows)} lines.</p>" if rest else ""
    meaning = (
        "The strongest colour of a line is its largest score. Orange is positive, blue negative; "
        "grey is within two standard errors of 0."
    )
    return f"<p class=facts>{meaning}</p>{''.join(shown)}{note}"


def _section(attributions: Sequence[AttributionRecord], row: int, most: int | None) -> str:
    att, maps = attributions[0], [heat_map(att, row) for att in attributions]
    heat, target = maps[0], f"<b class=target dir=auto>{escape(maps[0].target)}</b>"
    texts = [
        "".join(_cell(a, row, cell) for cell in heat.cells)
        for a, heat in zip(attributions, maps, strict=True)
    ]
    groups = (
        [[*attributions]]
        if all(each.units == att.units for each in attributions)
        else [[a] for a in attributions]
    )
    tables = "".join(_table(numbers(group, row, most)) for group in groups)
    scores = f"<details><summary>scores in numbers</summary>{tables}</details>"
    if len(attributions) == 1:
        drawn = [("paths to this target", path_arcs)] * ("through" in att.info)
        drawn += [("pairs of units", pair_arcs)] * any(pair.target == row for pair in att.pairs)
        drawings = [
            f"<details open><summary>{name}</summary>{arcs(*of(att, row))}</details>"
            for name, of in drawn
        ]
        other = (
            f"<span class=to> rather than <bdi>{escape(heat.foil)}</bdi></span>"
            if heat.foil
            else ""
        )
        shown = f'<p class="map" dir="auto">{texts[0]}<span class=to> → </span>{target}{other}</p>'
        if sum(len(cell.text) for cell in heat.cells) > _LONG:
            return f"<p>{target}{other}</p>{_facts(heat)}{scores}{shown}{''.join(drawings)}"
        return f"{shown}{_facts(heat)}{''.join(drawings)}{scores}"
    rows = "".join(
        f'<div class=row><h3>{escape(heading)}</h3><p class="map" dir="auto">{text}</p>'
        f"<p class=facts>{_key(legend)}</p></div>"
        for heading, text, legend in zip(headings(attributions), texts, legends(maps), strict=True)
    )
    return f"<p class=facts>{target} {escape(heat.question)}</p>{rows}{scores}"


def _cell(att: AttributionRecord, row: int, cell: Cell) -> str:
    space, body = map(escape, cell.parts())
    if cell.score is None:
        return f"<span class=x>{space}{body}</span>"
    title = escape("\n".join(_title(att, row, column) for column in cell.columns))
    more = f'tabindex=0 title="{title}" data-unit={cell.columns[0]}'
    return f'{space}<span class="u {_tint(cell.weight)} {more}>{body}</span>'


def _tint(weight: float | None) -> str:
    """The rest of a class attribute and a style for a weight."""
    if weight is None:
        return 'g"'
    return f'{"n" if weight < 0 else "p"}{" k" * dark_ink(weight)}" style="--a:{abs(weight):.3f}"'


def _title(att: AttributionRecord, row: int, column: int) -> str:
    score = float(att.scores[row, column])
    stderr = math.nan if att.stderr is None else float(att.stderr[row, column])
    text = (
        f"{label(att.units[column].text)}: score {number_format([score]).with_error(score, stderr)}"
    )
    if att.thresholds is not None and not math.isnan(
        threshold := float(att.thresholds[row, column])
    ):
        text += f", threshold {threshold:.3g}"
    return text if has_signal(score, stderr) else f"{text}, no signal"


def _facts(heat: HeatMap) -> str:
    low, kind = (f"-{heat.largest}", "scale") if "blue" in heat.meaning else ("0", "scale one")
    bar = f'<span class="{kind}" role=img aria-label="colour scale"></span>'
    scale = (
        f"<span dir=ltr class=ends>{low}{bar}{heat.largest}</span> {_key(heat.meaning)}"
        if heat.largest
        else ""
    )
    best = " · ".join(
        f"{side}: "
        + " · ".join(f"<b><bdi>{escape(name)}</bdi></b> {score}" for name, score in pairs)
        for side, pairs in heat.strongest.items()
    )
    lines = [escape(heat.facts), scale, best or "no unit has a signal", *map(escape, heat.pairs)]
    return "".join(f"<p class=facts>{line}</p>" for line in lines if line)


def _key(meaning: Mapping[str, str]) -> str:
    """The colours in words."""
    signs = {"orange": "p", "blue": "n", "grey": "g"}
    keys = (
        f'<i class="key {signs[colour]}"></i>{colour}: {escape(words)}'
        for colour, words in meaning.items()
    )
    return "; ".join(keys)


def _table(table: Numbers) -> str:
    """One attribution gets a column of bars; the scores of several get colours, as they have a scale each."""
    bars = table.head[1] == "score"
    rows: list[list[str]] = []
    for (unit, *texts), weights in zip(table.rows, table.weights, strict=True):
        values, weight = [*map(escape, texts)], weights[0]
        if not bars:
            values = [
                v and f'<span class="v {_tint(w)}>{v}</span>'
                for v, w in zip(values, weights, strict=True)
            ]
        elif weight is None:
            values.append("no signal")
        else:
            values.append(
                f'<i class="bar {"n" if weight < 0 else "p"}" style="--a:{abs(weight):.3f}"></i>'
            )
        rows.append([escape(unit), *values])
    note = f"<p class=facts>{table.note}</p>" if table.note else ""
    return html_table([*map(escape, table.head), *[""] * bars], rows) + note


def _footer(att: AttributionRecord) -> str:
    parameters = ", ".join(
        label(f"{name}={short(value)}") for name, value in att.parameters.items()
    )
    versions = ", ".join(label(f"{name} {version}") for name, version in att.versions.items())
    return f"<p>{escape(' · '.join(filter(None, (provenance(att), parameters, versions))))}</p>"
