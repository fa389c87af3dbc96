"""Heat maps as HTML that needs nothing else: styles inside, no scripts, no network, every text escaped.

Colour never stands alone: a bar below a unit is a positive score and one above it a negative score, as thick as
the colour is strong, and the numbers are in a table. A long continuation shows one target at a time, a very long one
its first targets.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from noiser.attribution.display import (
    DARK_PAPER,
    Cell,
    Column,
    HeatMap,
    Table,
    check_comparable,
    check_targets,
    dark_ink,
    headings,
    heat_map,
    joint_table,
    label,
    number_format,
    parameter_texts,
    provenance,
    score_table,
    shared_legend,
)
from noiser.attribution.record import AttributionRecord
from noiser.pages import html_page, html_table

_AT_ONCE = 8
"""Targets that are shown below each other; of more, the first is shown, and the others one by one or all on demand."""
_CHIPS = 40
"""Targets that can be chosen at once; the choice of the others is folded."""
_IN_TABLES = 40
"""Units in each table of numbers where there are more targets than that."""
_MOST_CELLS = 20_000
"""Units on a page, over all targets: 3 to 4 MB, which browsers and notebooks show without delay."""


def page(att: AttributionRecord, targets: Sequence[int] | None = None) -> str:
    """A complete page with the heat map of `att`.

    Args:
        att: what is shown.
        targets: indices of the targets to show; None for the first ones, as many as a page holds.

    Raises:
        ParameterError: there is no such target.
    """
    rows = None if targets is None else check_targets(att, targets)
    return _page(_card([att], _single, "noiser", rows), att, label(att.method))


def fragment(att: AttributionRecord) -> str:
    """The heat map as a piece of a page, such as a notebook's output; several can stand on one page."""
    return f"<style>{css()}</style>{_card([att], _single, _identifier())}"


def compare_html(attributions: Sequence[AttributionRecord]) -> str:
    """A complete page with several attributions of one prompt: one row per method, target by target.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    return _page(_card(attributions, _compared, "noiser"), attributions[0], f"{len(attributions)} methods")


def compare_fragment(attributions: Sequence[AttributionRecord], identifier: str | None = None) -> str:
    """The same as a piece of a page; several can stand on one page.

    Args:
        attributions: of one prompt.
        identifier: unique on the page, for pages that are the same every time and have the rules of `css` already;
            random, with the rules, unless given.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    style = "" if identifier is not None else f"<style>{css()}</style>"
    return style + _card(attributions, _compared, _identifier() if identifier is None else identifier)


@cache
def css() -> str:
    """The rules that heat maps need."""
    sheet = files("noiser.attribution").joinpath("style.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", sheet)


def _identifier() -> str:
    return f"noiser-{secrets.token_hex(6)}"


def _page(body: str, att: AttributionRecord, title: str) -> str:
    return page_of_card(body, f"{label(att.text[: att.prompt_length])[:80]} – {title}")


def page_of_card(card: str, title: str, style: str = "") -> str:
    """A complete page with one card, and headings above it for those who do not see it."""
    rules = f":root {{ color-scheme: light dark; }}\nbody {{ margin: 1.5rem; }}\n{css()}\n{style}"
    headings = f'<div class="noiser-unseen"><h1>{escape(title)}</h1><h2>Scores</h2></div>'
    return html_page(title, rules, f"<main>{headings}{card}</main>")


def _card(
    attributions: Sequence[AttributionRecord],
    section: Callable[[Sequence[AttributionRecord], int, int | None], str],
    identifier: str,
    targets: Sequence[int] | None = None,
) -> str:
    """A section per target; without `targets`, of the first ones, and a note says how to see the rest."""
    check_comparable(attributions)
    longest = max(attributions, key=lambda att: len(att.targets))
    rows, note = targets, ""
    if rows is None:
        every = len(longest.targets)
        cells = (~longest.scores.isnan()).sum(-1).cumsum(0) * len(attributions)
        rows = range(every)[: max(1, int((cells <= _MOST_CELLS).sum()))]
        rest = f"<code>to_html(targets=range({len(rows)}, {every}))</code> shows the others."
        note = f"<p class=facts>The first {len(rows)} of {every} targets; {rest}</p>" if len(rows) < every else ""
    most = _IN_TABLES if len(rows) > _AT_ONCE else None
    sections = ""
    for index, row in enumerate(rows, 1):
        present = [att for att in attributions if row < len(att.targets)]
        sections += f'<section class="t{index}">{section(present, row, most)}</section>'
    chooser = _chooser([label(longest.targets[row].text) for row in rows], identifier)
    feet = "".join(map(_footer, attributions))
    return f'<div class="noiser-att">{chooser}{note}<div class=rows>{sections}</div><footer>{feet}</footer></div>'


def _chooser(names: Sequence[str], identifier: str) -> str:
    """Radio buttons, with a style rule for each, that leave one target's rows; nothing for a single target."""
    if len(names) < 2:
        return ""
    inputs = rules = ""
    labels: list[str] = []
    first = 0 if len(names) <= _AT_ONCE else 1
    for index, text in enumerate(["all", *names]):
        name = f"{identifier}-{index}"
        checked = " checked" if index == first else ""
        inputs += f'<input type=radio name="{identifier}" id="{name}"{checked}>'
        labels.append(f'<label for="{name}" dir=auto>{escape(text)}</label>')
        rules += (
            f"#{name}:checked~.chips label[for={name}]{{background:var(--ink);color:var(--paper)}}"
            f"#{name}:focus-visible~.chips label[for={name}]{{outline:2px solid var(--focus);outline-offset:2px}}"
        )
        rules += f"#{name}:checked~.rows>:not(.t{index}){{display:none}}" if index else ""
    shown, folded = "".join(labels[:_CHIPS]), "".join(labels[_CHIPS:])
    if folded:
        shown += f"<details><summary>{len(labels) - _CHIPS} more</summary><div class=chips>{folded}</div></details>"
    return f"<style>{rules}</style>{inputs}<div class=chips><span>target</span>{shown}</div>"


def _single(attributions: Sequence[AttributionRecord], row: int, most: int | None) -> str:
    heat = heat_map(attributions[0], row)
    target = f"<span class=to> → </span>{_target(heat)}"
    return (
        f"{_map(attributions[0], row, heat, target)}{_facts(heat)}{_numbers([score_table(attributions[0], row, most)])}"
    )


def _compared(attributions: Sequence[AttributionRecord], row: int, most: int | None) -> str:
    first, maps = attributions[0], [heat_map(att, row) for att in attributions]
    common = shared_legend(maps)
    rows = "".join(
        f"<div class=row><h3>{escape(heading)}</h3>{_map(att, row, heat)}{'' if common else _legend(heat)}</div>"
        for att, heat, heading in zip(attributions, maps, headings(attributions), strict=True)
    )
    same = all(att.units == first.units for att in attributions)
    tables = [joint_table(attributions, row, most)] if same else [score_table(att, row, most) for att in attributions]
    question = f"<p class=facts>{_target(maps[0])} {escape(' · '.join(maps[0].question))}</p>"
    return f"{question}{rows}{_legend(common) if common else ''}{_numbers(tables)}"


def _target(heat: HeatMap) -> str:
    return f"<b class=target dir=auto>{escape(heat.target)}</b>"


def _map(att: AttributionRecord, row: int, heat: HeatMap, target: str = "") -> str:
    return f'<p class="map" dir="auto">{"".join(_cell(att, row, cell) for cell in heat.cells)}{target}</p>'


def _numbers(tables: Sequence[Table]) -> str:
    return f"<details><summary>scores in numbers</summary>{''.join(map(_table, tables))}</details>"


def _cell(att: AttributionRecord, row: int, cell: Cell) -> str:
    space, body = map(escape, cell.parts())
    if cell.score is None:
        return f"<span class=x>{space}{body}</span>"
    title = "\n".join(_title(att, row, column) for column in cell.columns)
    return (
        f'{space}<span class="u {_tint(cell.weight)} '
        f'tabindex=0 title="{escape(title)}" data-unit={cell.columns[0]}>{body}</span>'
    )


def _tint(weight: float) -> str:
    """The rest of a class attribute and a style for a weight."""
    sign, ink = "n" if weight < 0 else "p", " k" if dark_ink(weight, DARK_PAPER) else ""
    return f'{sign}{ink}" style="--a:{abs(weight):.3f}"'


def _title(att: AttributionRecord, row: int, column: int) -> str:
    score = float(att.scores[row, column])
    stderr = math.nan if att.stderr is None else float(att.stderr[row, column])
    numbers = [f"score {number_format([score]).with_error(score, stderr)}"]
    if att.thresholds is not None and not math.isnan(threshold := float(att.thresholds[row, column])):
        numbers.append(f"threshold {threshold:.3g}")
    return f"{label(att.units[column].text)}: {', '.join(numbers)}"


def _facts(heat: HeatMap) -> str:
    facts = [escape(fact) for fact in heat.question + heat.noise]
    scale = ""
    if heat.largest:
        low, kind = (f"-{heat.largest}", "scale") if len(heat.meaning) > 1 else ("0", "scale one")
        bar = f'<span class="{kind}" role=img aria-label="colour scale"></span>'
        scale = f"<span dir=ltr class=ends>{low}{bar}{heat.largest}</span> {_key(heat)}"
    best = [f"<b><bdi>{escape(name)}</bdi></b> {score}" for name, score in heat.highest]
    lines = [" · ".join(facts), scale, f"highest: {' · '.join(best)}" if best else ""]
    return "".join(f"<p class=facts>{line}</p>" for line in lines if line)


def _legend(heat: HeatMap) -> str:
    return f"<p class=facts>{_key(heat)}</p>"


def _key(heat: HeatMap) -> str:
    """The colours in words."""
    return "; ".join(
        f'<i class="key {sign}"></i>{colour}: {escape(meaning)}'
        for sign, colour, meaning in zip("pn", ("orange", "blue"), heat.meaning, strict=False)
    )


def _table(table: Table) -> str:
    head = [escape(text) for text in (table.unit, *(column.heading for column in table.columns))]
    columns = [[escape(unit) for unit in table.labels], *map(_values, table.columns)]
    if table.bars:
        head.append("")
        columns.append(
            [f'<i class="bar {"n" if bar < 0 else "p"}" style="--a:{abs(bar):.3f}"></i>' for bar in table.bars]
        )
    note = f"<p class=facts>{table.note}</p>" if table.note else ""
    return html_table(head, zip(*columns, strict=True)) + note


def _values(column: Column) -> list[str]:
    if column.weights is None:
        return column.texts
    pairs = zip(column.texts, column.weights, strict=True)
    return [text and f'<span class="v {_tint(weight)}>{text}</span>' for text, weight in pairs]


def _footer(att: AttributionRecord) -> str:
    parameters = ", ".join(parameter_texts(att))
    versions = ", ".join(label(f"{name} {version}") for name, version in att.versions.items())
    texts = [" · ".join(provenance(att)), parameters, versions]
    return f"<p>{escape(' · '.join(text for text in texts if text))}</p>"
