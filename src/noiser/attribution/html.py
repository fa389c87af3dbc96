"""Heat maps as HTML that needs nothing else: styles inside, no scripts, no network, every text escaped.

Colour never stands alone: a bar below a unit is a positive score and one above it a negative score, as thick as
the colour is strong, and the numbers are in a table. A long continuation shows one target at a time, a very long one
its first targets.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from noiser.attribution.display import (
    DARK_PAPER,
    Cell,
    asked,
    cells,
    check_comparable,
    check_targets,
    dark_ink,
    facts,
    headings,
    label,
    number_format,
    parameter_texts,
    provenance,
    visible,
)
from noiser.attribution.html_table import joint_table, score_table
from noiser.pages import html_page

if TYPE_CHECKING:
    from noiser.attribution.record import Attribution

__all__ = ["compare_fragment", "compare_html", "css", "fragment", "page"]

_AT_ONCE = 8
"""Targets that are shown below each other; of more, the first is shown, and the others one by one or all on demand."""
_IN_TABLES = 40
"""Units in each table of numbers where there are more targets than that."""
_MOST_CELLS = 20_000
"""Units on a page, over all targets: 3 to 4 MB, which browsers and notebooks show without delay."""


def page(att: Attribution, targets: Sequence[int] | None = None) -> str:
    """A complete page with the heat map of `att`.

    Args:
        att: what is shown.
        targets: indices of the targets to show; None for the first ones, as many as a page holds.

    Raises:
        ParameterError: there is no such target.
    """
    rows = check_targets(att, targets)
    return _page(_body(att, "noiser", rows), f"{label(att.text[: att.prompt_length])[:80]} – {label(att.method)}")


def fragment(att: Attribution) -> str:
    """The heat map as a piece of a page, such as a notebook's output; several can stand on one page."""
    return f"<style>{css()}</style>{_body(att, f'noiser-{secrets.token_hex(6)}')}"


def compare_html(attributions: Sequence[Attribution]) -> str:
    """A complete page with several attributions of one prompt: a row a method, target by target.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    body = _compared_body(attributions, "noiser")
    first = attributions[0]
    return _page(body, f"{label(first.text[: first.prompt_length])[:80]} – {len(attributions)} methods")


def compare_fragment(attributions: Sequence[Attribution], identifier: str | None = None) -> str:
    """The same as a piece of a page; several can stand on one page.

    Args:
        attributions: of one prompt.
        identifier: one that nothing else on the page has, for pages that are the same every time and have the rules
            of `css` already; drawn unless given.

    Raises:
        ParameterError: no attribution, or different prompts.
    """
    if identifier is not None:
        return _compared_body(attributions, identifier)
    return f"<style>{css()}</style>{_compared_body(attributions, f'noiser-{secrets.token_hex(6)}')}"


def _compared_body(attributions: Sequence[Attribution], identifier: str) -> str:
    check_comparable(attributions)
    longest = _longest(attributions)
    rows = _fitting(longest, range(len(longest.targets)), len(attributions))
    most = _in_tables(rows)
    sections = [_compared([att for att in attributions if row < len(att.targets)], row, most) for row in rows]
    names = [label(longest.targets[row].text) for row in rows]
    feet = "".join(_footer(att) for att in attributions)
    return _card(
        f"{_chooser(names, identifier)}{_left_out(longest, rows)}<div class=rows>{''.join(sections)}</div>"
        f"<footer>{feet}</footer>"
    )


def _longest(attributions: Sequence[Attribution]) -> Attribution:
    return max(attributions, key=lambda att: len(att.targets))


@cache
def css() -> str:
    """The rules that heat maps need."""
    sheet = files("noiser.attribution").joinpath("style.css").read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", sheet)


def _page(body: str, title: str) -> str:
    return html_page(title, f":root {{ color-scheme: light dark; }}\nbody {{ margin: 1.5rem; }}\n{css()}", body)


def _card(inner: str) -> str:
    return f'<div class="noiser-att">{inner}</div>'


def _body(att: Attribution, identifier: str, wanted: Sequence[int] | None = None) -> str:
    rows = _fitting(att, range(len(att.targets)), 1) if wanted is None else wanted
    sections = "".join(_section(att, row, place, _in_tables(rows)) for place, row in enumerate(rows, 1))
    chooser = _chooser([label(att.targets[row].text) for row in rows], identifier)
    note = _left_out(att, rows) if wanted is None else ""
    return _card(f"{chooser}{note}<div class=rows>{sections}</div><footer>{_footer(att)}</footer>")


def _fitting(att: Attribution, rows: Sequence[int], count: int) -> Sequence[int]:
    """The first of these targets, as many as a page with `count` heat maps each holds; at least one."""
    cells = (~att.scores[list(rows)].isnan()).sum(-1).cumsum(0) * count
    return rows[: max(1, int((cells <= _MOST_CELLS).sum()))]


def _in_tables(rows: Sequence[int]) -> int | None:
    return _IN_TABLES if len(rows) > _AT_ONCE else None


def _left_out(att: Attribution, rows: Sequence[int]) -> str:
    shown, every = len(rows), len(att.targets)
    if shown == every:
        return ""
    return (
        f"<p class=facts>The first {shown} of {every} targets; <code>to_html(targets=range({shown}, {every}))</code> "
        "shows the others.</p>"
    )


def _chooser(names: Sequence[str], identifier: str) -> str:
    """Radio buttons, with a style rule for each, that leave one target's rows; nothing for a single target."""
    if len(names) < 2:
        return ""
    ids = [f"{identifier}-{index}" for index in range(len(names) + 1)]
    first = 0 if len(names) <= _AT_ONCE else 1
    inputs = "".join(
        f'<input type=radio name="{identifier}" id="{name}"{" checked" if index == first else ""}>'
        for index, name in enumerate(ids)
    )
    labels = "".join(
        f'<label for="{name}" dir=auto>{escape(text)}</label>' for name, text in zip(ids, ["all", *names], strict=True)
    )
    rules = "".join(
        f"#{name}:checked~.chips label[for={name}]{{background:var(--ink);color:var(--paper)}}"
        f"#{name}:focus-visible~.chips label[for={name}]{{outline:2px solid var(--focus);outline-offset:2px}}"
        + (f"#{name}:checked~.rows>:not(.t{index}){{display:none}}" if index else "")
        for index, name in enumerate(ids)
    )
    return f"<style>{rules}</style>{inputs}<div class=chips><span>target</span>{labels}</div>"


def _section(att: Attribution, row: int, place: int, most: int | None) -> str:
    pieces = cells(att, row)
    return (
        f'<section class="t{place}">{_map(att, row, pieces)}{_facts(att, row, pieces)}'
        f"<details><summary>scores in numbers</summary>{score_table(att, row, most)}</details></section>"
    )


def _map(att: Attribution, row: int, pieces: Sequence[Cell], *, with_target: bool = True) -> str:
    body = "".join(_cell(att, row, piece) for piece in pieces)
    target = f"<b class=target dir=auto>{escape(label(att.targets[row].text))}</b>"
    return f'<p class="map" dir="auto">{body}' + (f"<span class=to> → </span>{target}</p>" if with_target else "</p>")


def _cell(att: Attribution, row: int, piece: Cell) -> str:
    shown = visible(piece.text)
    if piece.score is None:
        return f"<span class=x>{escape(shown)}</span>"
    body = shown.lstrip() or shown
    sign = "n" if piece.weight < 0 else "p"
    ink = " k" if dark_ink(piece.weight, DARK_PAPER) else ""
    title = "\n".join(_title(att, row, column) for column in piece.columns)
    return (
        f'{escape(shown[: len(shown) - len(body)])}<span class="u {sign}{ink}" style="--a:{abs(piece.weight):.3f}" '
        f'tabindex=0 title="{escape(title)}" data-unit={piece.columns[0]}>{escape(body)}</span>'
    )


def _title(att: Attribution, row: int, column: int) -> str:
    numbers = [f"score {_value(float(att.scores[row, column]))}"]
    if att.stderr is not None and not math.isnan(error := float(att.stderr[row, column])):
        numbers[0] += f" ± {_value(error)}"
    if att.thresholds is not None and not math.isnan(threshold := float(att.thresholds[row, column])):
        numbers.append(f"threshold {threshold:.3g}")
    return f"{label(att.units[column].text)}: {', '.join(numbers)}"


def _value(value: float) -> str:
    return f"{value:.3g}"


def _facts(att: Attribution, row: int, pieces: Sequence[Cell]) -> str:
    largest = max((abs(piece.score) for piece in pieces if piece.score is not None), default=0.0)
    known = escape(" · ".join(facts(att, row)))
    if not largest:
        return f"<p class=facts>{known}</p>" if known else ""
    show = number_format([largest])
    negative = any(piece.weight < 0 for piece in pieces)
    low, kind = (show(-largest), "scale") if negative else ("0", "scale one")
    best = [
        f"<b><bdi>{escape(label(unit.text))}</bdi></b> {_value(unit.score)}"
        for unit in att.top(5, row)
        if unit.score > 0
    ]
    strongest = f"<p class=facts>highest: {' · '.join(best)}</p>" if best else ""
    scale = f'<span dir=ltr>{low}<span class="{kind}" role=img aria-label="colour scale"></span>{show(largest)}</span>'
    return f"<p class=facts>{known}{' · ' if known else ''}{scale}</p>{strongest}"


def _footer(att: Attribution) -> str:
    parameters = ", ".join(parameter_texts(att))
    versions = ", ".join(label(f"{name} {version}") for name, version in att.versions.items())
    texts = [" · ".join(provenance(att)), parameters, versions]
    return f"<p>{escape(' · '.join(text for text in texts if text))}</p>"


def _compared(attributions: Sequence[Attribution], row: int, most: int | None) -> str:
    first = attributions[0]
    rows = "".join(
        f"<div class=row><h3>{escape(heading)}</h3>{_map(att, row, cells(att, row), with_target=False)}</div>"
        for att, heading in zip(attributions, headings(attributions), strict=True)
    )
    target = f"<b class=target dir=auto>{escape(label(first.targets[row].text))}</b>"
    known = f"<p class=facts>{target} {escape(' · '.join(asked(first, row)))}</p>"
    same = all(att.units == first.units for att in attributions)
    table = (
        joint_table(attributions, row, most) if same else "".join(score_table(att, row, most) for att in attributions)
    )
    numbers = f"<details><summary>scores in numbers</summary>{table}</details>"
    return f'<section class="t{row + 1}">{known}{rows}{numbers}</section>'
