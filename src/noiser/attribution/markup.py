"""Heat maps as HTML that needs nothing else; every text is escaped.

Colour never stands alone: a bar below a unit is a positive score and one above it a negative score.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache, partial
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from noiser.attribution import display
from noiser.attribution.amounts import amounts_of, without_text
from noiser.attribution.display import (
    alerts,
    dark_ink,
    headings,
    label,
    provenance,
    remarks,
    short,
    shorten,
)
from noiser.attribution.heatmap import (
    Cell,
    HeatMap,
    NumberRows,
    has_signal,
    heat_map,
    legends,
    numbers,
)
from noiser.attribution.picture_html import figures
from noiser.attribution.regions import region_columns
from noiser.attribution.relations import arcs, pair_arcs, path_arcs
from noiser.attribution.speakers import chat_messages
from noiser.attribution.summary import Piece, about, plain_label
from noiser.html import html_page, html_table
from noiser.text.chat import part_texts

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

# Targets that are shown below each other; of more, the first alone.
_AT_ONCE = 8
# Units in each table where there are more targets than that.
_IN_TABLES = 40
# A text of more characters comes after its numbers.
_LONG = 1500
# Units on a page, which browsers show without delay.
_MOST_CELLS = 20_000


# ---- pages --------------------------------------------------------------------------------------


def page(attributions: Sequence[AttributionRecord], targets: Sequence[int] | None = None) -> str:
    """A complete page with one attribution, or with several of one prompt: a row per method."""
    card = _card(attributions, "noiser", targets)
    first = attributions[0]
    prompt = shorten(label(_question_of(first).strip()), 80)
    count = len(attributions)
    what = label(first.method) if count == 1 else f"{count} methods"
    return page_of_card(card, f"{prompt} – {what}")


def _question_of(att: AttributionRecord) -> str:
    """The prompt, or of a chat what its user said last, without the template around it."""
    asked = [each for each in chat_messages(att) if each["role"] == "user"]
    return " ".join(part_texts(asked[-1])) if asked else att.text[: att.prompt_length]


def fragment(attributions: Sequence[AttributionRecord]) -> str:
    """The same as a piece of a page, such as a notebook's output; several can stand on one page."""
    return f"<style>{css()}</style>{_card(attributions, f'noiser-{secrets.token_hex(6)}')}"


@cache
def css(room: str = "attribution", name: str = "style.css") -> str:
    """The rules of a style sheet; unless one is named, those that heat maps need."""
    sheet = files(f"noiser.{room}").joinpath(name).read_text(encoding="utf-8")
    return re.sub(r"\s+", " ", sheet)


def page_of_card(card: str, title: str, style: str = "") -> str:
    """A complete page with one card, and hidden headings above it for screen readers."""
    rules = f":root {{ color-scheme: light dark; }}\nbody {{ margin: 1.5rem; }}\n{css()}\n{style}"
    hidden = f'<div class="noiser-unseen"><h1>{escape(title)}</h1><h2>Scores</h2></div>'
    return html_page(title, rules, f"<main>{hidden}{card}</main>")


def _card(
    attributions: Sequence[AttributionRecord], identifier: str, targets: Sequence[int] | None = None
) -> str:
    """A section per target.

    Without `targets` it has the first ones, and a note says how to see the rest.
    """
    display.check_comparable(attributions)
    first = attributions[0]
    count = len(first.targets)
    note = ""
    if targets is not None:
        rows = display.check_targets(first, targets)
    else:
        rows = list(range(_targets_at_once(attributions)))
        if len(rows) < count:
            call = f"<code>to_html(targets=range({len(rows)}, {count}))</code>"
            note = (
                f"<p class=facts>The first {len(rows)} of {count} targets; {call} shows the "
                "others.</p>"
            )
    most = _IN_TABLES if len(rows) > _AT_ONCE else None
    sections = ""
    for number, row in enumerate(rows, 1):
        sections += f'<section class="t{number}">{_section(attributions, row, most)}</section>'
    chooser = _chooser([label(first.targets[row].text) for row in rows], identifier)
    important = "".join(f"<p>{escape(text)}</p>" for text in alerts(*attributions))
    footer = "".join(f"<p>{escape(text)}</p>" for text in remarks(*attributions))
    footer += "".join(_footer(att) for att in attributions)
    return (
        f'<div class="noiser-att">{chooser}{note}<div class=rows>{sections}</div>{important}'
        f"<details><summary>how this was made</summary><footer>{footer}</footer></details></div>"
    )


def _targets_at_once(attributions: Sequence[AttributionRecord]) -> int:
    """The number of first targets whose units fit on a page; at least one."""
    units_per_target = (~attributions[0].scores.isnan()).sum(-1)
    units_so_far = units_per_target.cumsum(0) * len(attributions)
    return max(1, int((units_so_far <= _MOST_CELLS).sum()))


def _chooser(names: Sequence[str], identifier: str) -> str:
    """Radio buttons, with style rules for each, that leave one target's rows.

    Nothing for a single target.
    """
    if len(names) < 2:
        return ""
    inputs = ""
    labels = ""
    rules = ""
    first = 0 if len(names) <= _AT_ONCE else 1
    for index, text in enumerate(["all", *names]):
        name = f"{identifier}-{index}"
        checked = " checked" if index == first else ""
        inputs += f'<input type=radio name="{identifier}" id="{name}"{checked}>'
        labels += f'<label for="{name}" dir=auto>{escape(text)}</label>'
        chip = f"~.chips label[for={name}]"
        rules += f"#{name}:checked{chip}{{background:var(--ink);color:var(--paper)}}"
        rules += f"#{name}:focus-visible{chip}{{outline:2px solid var(--focus);outline-offset:2px}}"
        if index > 0:
            rules += f"#{name}:checked~.rows>:not(.t{index}){{display:none}}"
    return (
        f"<style>{rules}</style>{inputs}<div class=chips><span>part of the "
        f"answer</span>{labels}</div>"
    )


def _footer(att: AttributionRecord) -> str:
    """Where the numbers come from, the hyper-parameters, and the versions."""
    parameters = [label(f"{name}={short(value)}") for name, value in att.parameters.items()]
    versions = [label(f"{name} {version}") for name, version in att.versions.items()]
    texts = (provenance(att), ", ".join(parameters), ", ".join(versions))
    facts = [text for text in texts if text]
    return f"<p>{escape(' · '.join(facts))}</p>"


def lines(attributions: Sequence[AttributionRecord]) -> str:
    """A line in its colours for each prompt and target, as many as browsers show without delay."""
    rows: list[tuple[int, AttributionRecord, int]] = []
    for number, att in enumerate(attributions, 1):
        rows += [(number, att, row) for row in range(len(att.targets))]
    shown: list[str] = []
    cells = 0
    for number, att, row in rows:
        heat = heat_map(att, row)
        cells += len(heat.cells)
        if shown and cells > _MOST_CELLS:
            break
        shown.append(
            f'<p class="map" dir="auto"><span class=x>{number}</span> {_cells(att, row, heat)}'
            f"<span class=to> →&nbsp;</span>{_target(heat)}{_foil(heat)}</p>"
        )
    note = ""
    if len(shown) < len(rows):
        note = f"<p class=facts>The first {len(shown)} of {len(rows)} lines.</p>"
    meaning = (
        "The strongest colour of a line is its largest score. Orange is positive, blue negative; "
        "grey is within two standard errors of 0."
    )
    return f"<p class=facts>{meaning}</p>{''.join(shown)}{note}"


# ---- one target ---------------------------------------------------------------------------------


def _section(attributions: Sequence[AttributionRecord], row: int, most: int | None) -> str:
    """One target: its sentence and heat maps, then captions, drawings and tables, folded.

    Tables have at most `most` units.
    """
    sentence = sentence_html(about(attributions, row))
    tables = "".join(_table(numbers(group, row, most)) for group in _same_units(attributions))
    if len(attributions) > 1:
        scores = f"<details><summary>scores in numbers</summary>{tables}</details>"
        return sentence + _comparison(attributions, row) + scores
    att = attributions[0]
    heat = heat_map(att, row)
    target = f"{_target(heat)}{_foil(heat)}"
    text = _cells(att, row, heat)
    shown = _figures(att, row, heat)
    shown += f'<p class="map" dir="auto">{text}<span class=to> →&nbsp;</span>{target}</p>'
    shown += "".join(f"<p>{escape(line)}</p>" for line in heat.alerts)
    key = f"<p class=facts>{_key(heat.meaning)}{_number_key(att, row)}</p>" if heat.meaning else ""
    facts = f"<details><summary>scores in numbers</summary>{_facts(heat)}{tables}</details>"
    drawings = _drawings(att, row, heat)
    if sum(len(cell.text) for cell in heat.cells) > _LONG:
        return f"{sentence}{facts}{key}{shown}{drawings}"
    return f"{sentence}{shown}{key}{drawings}{facts}"


def sentence_html(pieces: Sequence[Piece]) -> str:
    """A sentence as the first line of a card."""
    return f"<p class=says dir=auto>{''.join(map(_piece, pieces))}</p>"


def _piece(piece: Piece) -> str:
    """A part of the sentence."""
    text = unbroken(escape(piece.text))
    tags = {"said": "b", "cause": "b", "instead": "em"}
    if not piece.role:
        return text
    tag = tags[piece.role]
    return f"<{tag} class={piece.role}><bdi>{text}</bdi></{tag}>"


def with_breaks(shown: str) -> str:
    """Text that was made visible, as HTML for an element that keeps line breaks: these are seen
    without their marks.
    """
    return escape(shown).replace("↵\n", "\n")


def unbroken(text: str) -> str:
    """The text with numbers that stay on the line of their unit and of their error."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _comparison(attributions: Sequence[AttributionRecord], row: int) -> str:
    """One target with a row per attribution."""
    maps = [heat_map(att, row) for att in attributions]
    rows = ""
    for att, heat, heading, legend in zip(
        attributions, maps, headings(attributions), legends(maps), strict=True
    ):
        text = _cells(att, row, heat)
        drawn = _figures(att, row, heat, with_plain=att is attributions[0])
        rows += (
            f'<div class=row><h3>{escape(heading)}</h3>{drawn}<p class="map" dir="auto">{text}</p>'
            f"<p class=facts>{_key(legend)}{_number_key(att, row) if legend else ''}</p></div>"
        )
    question = (
        f"<details><summary>what was asked</summary><p class=facts>{_target(maps[0])} "
        f"{escape(maps[0].question)}</p></details>"
    )
    return f"{rows}{question}"


def _same_units(
    attributions: Sequence[AttributionRecord],
) -> list[list[AttributionRecord]]:
    """The attributions that share a table: all, or each by itself where their units differ."""
    units = attributions[0].units
    if all(att.units == units for att in attributions):
        return [list(attributions)]
    return [[att] for att in attributions]


def _drawings(att: AttributionRecord, row: int, heat: HeatMap) -> str:
    """Arcs of the paths to a target, and of its pairs of units, where there are some."""
    drawings = ""
    if "through" in att.info:
        drawing = arcs(*path_arcs(att, row))
        drawings += f"<details open><summary>paths to this target</summary>{drawing}</details>"
    if any(pair.target == row for pair in att.pairs):
        lines = "".join(f"<p class=facts>{escape(line)}</p>" for line in heat.pairs)
        drawing = arcs(*pair_arcs(att, row))
        drawings += f"<details><summary>pairs that act together</summary>{lines}{drawing}</details>"
    return drawings


def _target(heat: HeatMap) -> str:
    return f"<b class=target dir=auto>{escape(heat.target)}</b>"


def _foil(heat: HeatMap) -> str:
    """The foil after the target, or nothing."""
    if not heat.foil:
        return ""
    return f"<span class=to> rather than <bdi>{escape(heat.foil)}</bdi></span>"


def _cells(att: AttributionRecord, row: int, heat: HeatMap) -> str:
    """The text before a target in its colours."""
    return "".join(_cell(att, row, cell) for cell in heat.cells)


def _figures(att: AttributionRecord, row: int, heat: HeatMap, *, with_plain: bool = True) -> str:
    """The pictures of the prompt with the colours of their regions; nothing without pictures."""
    title_of = partial(_title, att, row)
    return figures(att, row, heat.regions, title_of, with_plain=with_plain)


def _cell(att: AttributionRecord, row: int, cell: Cell) -> str:
    space, body = cell.parts()
    if cell.score is None:
        return f"<span class=x>{with_breaks(space + body)}</span>"
    space = with_breaks(space)
    # A unit of line breaks alone keeps their marks: there is nothing else to colour.
    body = with_breaks(body) if cell.text.strip() else escape(body)
    title = escape("\n".join(_title(att, row, column) for column in cell.columns))
    attributes = f'tabindex=0 title="{title}" data-unit={cell.columns[0]}'
    return f'{space}<span class="u {_tint(cell.weight)} {attributes}>{body}</span>'


def _tint(weight: float | None) -> str:
    """The rest of a class attribute and a style for a weight."""
    if weight is None:
        return 'g"'
    sign = "n" if weight < 0 else "p"
    ink = " k" if dark_ink(weight) else ""
    return f'{sign}{ink}" style="--a:{abs(weight):.3f}"'


def _title(att: AttributionRecord, row: int, column: int) -> str:
    """What shows where the pointer rests on a unit: what the model says without it, and numbers."""
    score = float(att.scores[row, column])
    stderr = math.nan if att.stderr is None else float(att.stderr[row, column])
    name = plain_label(att.units[column].text)
    text = f"{name}: {amounts_of(att, row).with_unit(score, stderr)}"
    threshold = math.nan if att.thresholds is None else float(att.thresholds[row, column])
    if not math.isnan(threshold):
        text += f", threshold {threshold:.3g}"
    if not has_signal(score, stderr):
        text += ", no signal"
    entry = None if att.without is None else att.without[row][column]
    if entry is None:
        return text
    says = without_text(att.targets[row], entry)
    return f"without “{name}”: {says}\n{text}"


# ---- captions and numbers -----------------------------------------------------------------------


def _facts(heat: HeatMap) -> str:
    """The captions of a heat map: facts, the colour scale, and the strongest units."""
    captions = [unbroken(escape(heat.facts))]
    if heat.largest:
        captions.append(_scale(heat))
    captions.append(_strongest(heat))
    captions += [unbroken(escape(line)) for line in heat.without]
    return "".join(f"<p class=facts>{caption}</p>" for caption in captions if caption)


def _scale(heat: HeatMap) -> str:
    """The colour scale with the scores at its ends, and the colours in words."""
    if "blue" in heat.meaning:
        low = f"-{heat.largest}"
        kind = "scale"
    else:
        low = "0"
        kind = "scale one"
    bar = f'<span class="{kind}" role=img aria-label="colour scale"></span>'
    return f"<span dir=ltr class=ends>{low}{bar}{heat.largest}</span> {_key(heat.meaning)}"


def _strongest(heat: HeatMap) -> str:
    """The strongest units for and against the target, with their scores."""
    sides: list[str] = []
    for side, units in heat.strongest.items():
        names = " · ".join(
            f"<b><bdi>{escape(name)}</bdi></b>\u00a0{unbroken(score)}" for name, score in units
        )
        sides.append(f"{side}: {names}")
    return " · ".join(sides) or "no unit has a signal"


def _key(meaning: Mapping[str, str]) -> str:
    """The colours in words."""
    signs = {"orange": "p", "blue": "n", "grey": "g"}
    keys: list[str] = []
    for colour, words in meaning.items():
        keys.append(f'<i class="key {signs[colour]}"></i>{colour}: {escape(words)}')
    return "; ".join(keys)


def _number_key(att: AttributionRecord, row: int) -> str:
    """What the numbers in the regions of pictures say; nothing without pictures."""
    if not region_columns(att):
        return ""
    if amounts_of(att, row).heading == "nats":
        return "; number in a part: its effect in nats, of which 1 is 2.7 times as likely"
    return "; number in a part: its share of the effects of all parts"


def _table(table: NumberRows) -> str:
    """A table of numbers.

    One attribution gets a column of bars; the scores of several get colours, as each has a scale of
    its own.
    """
    has_bars = table.has_bars
    head = [escape(heading) for heading in table.head]
    if has_bars:
        head.append("")
    rows: list[list[str]] = []
    for (unit, *texts), weights in zip(table.rows, table.weights, strict=True):
        values = [unbroken(escape(text)) for text in texts]
        if has_bars:
            values.append(_bar(weights[0]))
        else:
            pairs = zip(values, weights, strict=True)
            values = [_coloured_number(value, weight) for value, weight in pairs]
        rows.append([escape(unit), *values])
    note = f"<p class=facts>{table.note}</p>" if table.note else ""
    return html_table(head, rows) + note


def _bar(weight: float | None) -> str:
    if weight is None:
        return "no signal"
    sign = "n" if weight < 0 else "p"
    return f'<i class="bar {sign}" style="--a:{abs(weight):.3f}"></i>'


def _coloured_number(value: str, weight: float | None) -> str:
    return f'<span class="v {_tint(weight)}>{value}</span>' if value else ""
