"""A heat map and a table of numbers as data, which each renderer shows in its own form."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution.amounts import (
    amounts_of,
    answers_text,
    probability_text,
    without_text,
)
from noiser.attribution.display import headings, label, labels, visible
from noiser.attribution.regions import (
    ShownRegion,
    picture_name,
    pictures_of,
    region_columns,
)
from noiser.attribution.relations import sentences
from noiser.attribution.speakers import role_headings
from noiser.numbers import number_format
from noiser.registry import unversioned
from noiser.tensors import floats
from noiser.text.segments import join_overlapping
from noiser.types import Target, Without

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

_STRONGEST = 5  # units whose scores are put into words
_FAINTEST = 0.005  # the share of the strongest colour below which none is seen
_WITHOUT = 3  # units of which it is put into words what the model says without them

UNASKED = "message {}, a tool's result, speaks for it; the user's words do not"


class Cell(NamedTuple):
    """A piece of the text; without columns and score where it is in no unit, as a template's text.

    Attributes:
        text: not yet made visible.
        columns: the units in it; several where byte-level tokens share a character.
        score: the sum of the units' scores; None without a score for this target.
        weight: the score divided by the largest magnitude of the row; None without a signal, within
            two standard errors of 0.
    """

    text: str
    columns: tuple[int, ...]
    score: float | None
    weight: float | None

    def parts(self) -> tuple[str, str]:
        """The whitespace before the text, which gets no colour, and the rest; both made visible."""
        body = self.text.lstrip() or self.text
        space = self.text[: len(self.text) - len(body)]
        return visible(space), visible(body)


class HeatMap(NamedTuple):
    """One target of an attribution; all texts except the cells' are safe to show.

    Attributes:
        target: its label.
        foil: its label, "" without one.
        cells: the text before the target.
        question: the target's probability, its rank and the foil: facts that hold for every method.
        facts: the question, and the smallest threshold if there is one.
        strongest: for "for" and "against" labels and scores, five in all, the strongest first.
        pairs: lines about units that decide only together, or of which either would do.
        without: lines about what the model says without each of the strongest units.
        alerts: UNASKED, where it holds.
        largest: the largest magnitude of a cell's score, which has the strongest colour; "" without
            one.
        meaning: the colours that occur, in words.
        regions: of pictures, with colours on the same scale as the cells.
    """

    target: str
    foil: str
    cells: list[Cell]
    question: str
    facts: str
    strongest: dict[str, list[tuple[str, str]]]
    pairs: list[str]
    without: list[str]
    alerts: list[str]
    largest: str
    meaning: dict[str, str]
    regions: list[ShownRegion]


def strongest(heat: HeatMap) -> str:
    """The strongest scores in words: "for: Lisbon 6.6 · who 1.9 · against: Germany -4.4".

    Of shares, "for: Lisbon 32 % of all effects · who 9 % · against: Germany -21 %".
    """
    sides: list[str] = []
    for side, units in heat.strongest.items():
        parts = [f"{name} {score}" for name, score in units]
        if not sides and parts[0].endswith("%"):
            parts[0] += " of all effects"
        sides.append(f"{side}: {' · '.join(parts)}")
    return " · ".join(sides) or "no unit has a signal"


def lines_of(heat: HeatMap) -> list[str]:
    """What the model says without the strongest units, pairs, and alerts, a line each."""
    return [*heat.without, *heat.pairs, *heat.alerts]


class NumberRows(NamedTuple):
    """A table of the numbers of one target.

    Attributes:
        head: the kind of the units, then a heading for each column of numbers.
        has_bars: whether the numbers are those of one attribution, which are shown with bars.
        rows: a unit's label, then its numbers as text, "" where there is none.
        weights: for each row and attribution the colour, in [-1, 1]; None without a signal.
        note: how many units were left out, or "".
    """

    head: list[str]
    has_bars: bool
    rows: list[list[str]]
    weights: list[list[float | None]]
    note: str


# ---- a heat map and its captions ----------------------------------------------------------------


def heat_map(att: AttributionRecord, row: int) -> HeatMap:
    """The cells and captions of target `row`."""
    target_cells, regions = cells_and_regions(att, row)
    scores = [cell.score or 0.0 for cell in target_cells]
    scores += [region.score for region in regions if not math.isnan(region.score)]
    largest = max(map(abs, scores), default=0.0)
    question = _question(att, row)
    facts = question
    if att.k_min is not None and not math.isnan(att.k_min[row]):
        facts += f" · k_min {float(att.k_min[row]):.3g}{_end_of_search(att, row)}"
    unasked = [UNASKED.format(message) for message in att.info.get("unasked", ())]
    return HeatMap(
        target=label(att.targets[row].text),
        foil="" if att.foil is None else label(att.foil.text),
        cells=target_cells,
        question=question,
        facts=facts,
        strongest=_strongest_units(att, row),
        pairs=sentences(att, row),
        without=_without_strongest(att, row),
        alerts=unasked,
        # Without its error, by which it would be rounded: the weights are exact shares of it.
        largest=amounts_of(att, row)(largest) if largest else "",
        meaning=_meaning(att, row, [*target_cells, *regions]) if largest else {},
        regions=regions,
    )


def _question(att: AttributionRecord, row: int) -> str:
    """The target's probability and rank, and the foil's; or in how many answers it is."""
    of_answers = answers_text(att.targets[row], att.info)
    if of_answers is not None:
        return of_answers
    question = f"probability {_prediction(att.targets[row], ' · ')}"
    if att.foil is None:
        return question
    foil = f"“{label(att.foil.text)}” ({_prediction(att.foil, ', ')})"
    return f"{question} · rather than {foil}"


def _prediction(target: Target, separator: str) -> str:
    """Probability and rank; of several tokens their largest rank."""
    up_to = "up to " if target.rest and target.rank > 1 else ""
    return f"{probability_text(target)}{separator}rank {up_to}{target.rank}"


def _end_of_search(att: AttributionRecord, row: int) -> str:
    """What k_min says at either end of the interval that was searched; else nothing."""
    for key, meaning in (
        ("near_tie", "hardly any noise: the first guess is nearly tied"),
        ("saturated", "the largest noise: no unit changes the prediction"),
    ):
        told = att.info.get(key, ())
        if row < len(told) and told[row]:
            return f" ({meaning})"
    return ""


def _strongest_units(att: AttributionRecord, row: int) -> dict[str, list[tuple[str, str]]]:
    """Labels and scores of the five strongest units with a signal, "for" before "against"."""
    scores = floats(att.scores[row])
    stderr = errors_of(att, row)
    names = labels(att)
    amounts = amounts_of(att, row)
    sides: dict[str, list[tuple[str, str]]] = {"for": [], "against": []}
    for unit in with_signal(att, row)[:_STRONGEST]:
        side = "for" if scores[unit] > 0 else "against"
        sides[side].append((names[unit], amounts.with_unit(scores[unit], stderr[unit])))
    return {side: units for side, units in sides.items() if units}


def with_signal(att: AttributionRecord, row: int) -> list[int]:
    """The columns of the units with a signal, the strongest first."""
    scores = floats(att.scores[row])
    stderr = errors_of(att, row)
    columns: list[int] = []
    for unit in _order(scores):
        if scores[unit] and has_signal(scores[unit], stderr[unit]):
            columns.append(unit)
    return columns


def _without_strongest(att: AttributionRecord, row: int) -> list[str]:
    """What the model says without each of the strongest units that speak for the target.

    A unit without which the target only gets likelier has no line. It can speak for the target
    among other units that are gone.
    """
    if att.without is None:
        return []
    names = labels(att)
    target = att.targets[row]
    lines: list[str] = []
    for unit in with_signal(att, row):
        entry = att.without[row][unit]
        if entry is None or att.scores[row, unit] <= 0:
            continue
        if entry.leader != target.text or entry.probability < target.probability:
            lines.append(f"without “{names[unit]}”: {without_text(target, entry)}")
    return lines[:_WITHOUT]


def errors_of(att: AttributionRecord, row: int) -> list[float]:
    """The standard errors of a target's scores; NaN where there is none."""
    if att.stderr is None:
        return [math.nan] * len(att.units)
    return floats(att.stderr[row])


def has_signal(score: float, stderr: float) -> bool:
    """Whether a score is more than two standard errors away from 0, or has none."""
    return not stderr > 0 or abs(score) > 2 * stderr


def _meaning(
    att: AttributionRecord, row: int, target_cells: Sequence[Cell | ShownRegion]
) -> dict[str, str]:
    """What each colour that occurs says about a unit."""
    orange, blue = _meaning_of_signs(att, row)
    meaning = {"orange": orange}
    if any(cell.weight is not None and cell.weight < -_FAINTEST for cell in target_cells):
        meaning["blue"] = blue
    if any(cell.weight is None for cell in target_cells):
        meaning["grey"] = "no clear effect"
    return meaning


def _meaning_of_signs(att: AttributionRecord, row: int) -> tuple[str, str]:
    """What a positive and what a negative score say about a unit."""
    if "through" in att.info:
        return "the target was written from it, or from what was", ""
    if att.parameters.get("objective") == "hellinger":
        return (
            "without it the model's prediction changes",
            "without it the prediction changes less",
        )
    if "of" in att.info:
        return f"without it {label(str(att.info['of']))} falls", "it rises"
    if att.foil is not None:
        target = label(att.targets[row].text)
        return f"speaks for “{target}”", f"speaks for “{label(att.foil.text)}”"
    if unversioned(att.method) in ("noiser", "noiser_relative"):
        return "noise on it makes the prediction less likely", "more likely"
    if "removal" in att.parameters and "samples" in att.parameters:
        # What the model says without this unit alone may differ from such a mean.
        return (
            "makes the prediction likelier, on average, with other parts there or gone",
            "less likely",
        )
    return "without it the prediction gets less likely", "more likely"


def legends(maps: Sequence[HeatMap]) -> list[dict[str, str]]:
    """The colours in words for each heat map.

    Where one legend holds for all of them, the last one alone has it.
    """
    meanings: dict[str, list[str]] = {"orange": [], "blue": [], "grey": []}
    for heat in maps:
        for colour, words in heat.meaning.items():
            if words not in meanings[colour]:
                meanings[colour].append(words)
    if any(len(words) > 1 for words in meanings.values()):
        return [heat.meaning for heat in maps]
    common = {colour: words[0] for colour, words in meanings.items() if words}
    return [common if heat is maps[-1] else {} for heat in maps]


# ---- the cells ----------------------------------------------------------------------------------


def cells(att: AttributionRecord, row: int) -> list[Cell]:
    """The text before target `row`, cut into pieces that follow each other without a gap."""
    return cells_and_regions(att, row)[0]


def cells_and_regions(att: AttributionRecord, row: int) -> tuple[list[Cell], list[ShownRegion]]:
    """The cells of the text, and the regions of pictures, with colours on one scale."""
    scores = floats(att.scores[row])
    errors = errors_of(att, row)
    roles = {heading.start: heading.words for heading in role_headings(att)}
    texts: list[tuple[str, tuple[int, ...]]] = []
    totals: list[float] = []
    total_errors: list[float] = []
    for start, text, columns in _pieces(att, _end_of_text(att, row, scores)):
        with_score = [column for column in columns if not math.isnan(scores[column])]
        total = sum(scores[column] for column in with_score)
        totals.append(total if with_score else math.nan)
        total_errors.append(math.hypot(*[errors[column] for column in with_score]))
        texts.append((text if columns else roles.get(start, text), columns))
    boxes = region_columns(att)
    region_scores = [scores[column] for column in boxes]
    region_errors = [errors[column] for column in boxes]
    weights = _weights([*totals, *region_scores], [*total_errors, *region_errors])
    target_cells: list[Cell] = []
    for (text, columns), total, weight in zip(texts, totals, weights, strict=False):
        target_cells.append(Cell(text, columns, None if math.isnan(total) else total, weight))
    regions: list[ShownRegion] = []
    for (column, (picture, box)), weight in zip(boxes.items(), weights[len(totals) :], strict=True):
        regions.append(ShownRegion(column, picture, box, scores[column], weight))
    return target_cells, regions


def _end_of_text(att: AttributionRecord, row: int, scores: Sequence[float]) -> int:
    """The number of characters of the text before a target."""
    before = "".join(target.text for target in att.targets[:row])
    end = att.prompt_length
    if att.text.startswith(before, att.prompt_length):
        end += len(before)
    for unit, score in zip(att.units, scores, strict=True):
        if not math.isnan(score):
            end = max(end, unit.end)
    return end


def _pieces(att: AttributionRecord, end: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """(start, text, columns) of the units up to `end` and of the text between, in order.

    Units that share characters are one piece.
    """
    regions = region_columns(att)
    columns: list[int] = []
    for column, unit in enumerate(att.units):
        if unit.end <= end and column not in regions:
            columns.append(column)
    columns.sort(key=lambda column: att.units[column].start)
    offsets = [(att.units[column].start, att.units[column].end) for column in columns]
    pieces: list[tuple[int, str, tuple[int, ...]]] = []
    position = 0
    for group in join_overlapping(offsets):
        members = tuple(columns[index] for index in group)
        units = [att.units[column] for column in members]
        start = units[0].start
        stop = max(unit.end for unit in units)
        if start > position:
            pieces += _between(att, position, start)
        text = att.text[start:stop] or units[0].text  # a special token is not in the text
        pieces.append((start, text, members))
        position = max(position, stop)
    if position < end:
        pieces += _between(att, position, end)
    return pieces


def _between(
    att: AttributionRecord, start: int, end: int
) -> list[tuple[int, str, tuple[int, ...]]]:
    """The pieces of text that is in no unit; each picture in it is one, by its name."""
    pieces: list[tuple[int, str, tuple[int, ...]]] = []
    position = start
    for number, picture in enumerate(pictures_of(att)):
        place = int(picture["place"])
        if start <= place < end:
            if place > position:
                pieces.append((position, _without_tags(att.text[position:place]), ()))
            pieces.append((place, f"{picture_name(att, number)} ", ()))
            position = place + 1
    if position < end:
        text = att.text[position:end]
        pieces.append((position, _without_tags(text) if pieces else text, ()))
    return pieces


def _without_tags(text: str) -> str:
    """A template's text beside a picture, without the tokens that begin and end the picture."""
    return re.sub(r"<[^<>\s]+>|\[/?[A-Z_]+\]", "", text)


def _weights(scores: Sequence[float], stderr: Sequence[float]) -> list[float | None]:
    """Scores divided by the largest finite magnitude, 0 for NaN; None without a signal."""
    finite = [abs(score) for score in scores if math.isfinite(score)]
    largest = max(finite, default=0.0) or 1.0
    weights: list[float | None] = []
    for score, error in zip(scores, stderr, strict=True):
        if math.isnan(score):
            weights.append(0.0)
        elif has_signal(score, error):
            weights.append(max(-1.0, min(1.0, score / largest)))
        else:
            weights.append(None)
    return weights


# ---- a table of numbers -------------------------------------------------------------------------


def numbers(
    attributions: Sequence[AttributionRecord], row: int, most: int | None = None
) -> NumberRows:
    """The numbers of the units that have a score for a target.

    With `most`, of so many units of each attribution, the strongest.
    """
    first = attributions[0]
    is_one = len(attributions) == 1
    names: list[str] = []
    columns: list[list[str]] = []
    weights: list[list[float | None]] = []
    with_score: set[int] = set()
    shown: set[int] = set()
    for att, heading in zip(attributions, headings(attributions), strict=True):
        scores = floats(att.scores[row])
        stderr = errors_of(att, row)
        order = _order(scores)
        amounts = amounts_of(att, row)
        unit_of_scores = ", nats" if amounts.heading == "nats" else ""
        names.append(amounts.heading if is_one else f"{heading}{unit_of_scores}")
        columns.append(_texts(scores, stderr, amounts))
        weights.append(_weights(scores, stderr))
        with_score.update(order)
        shown.update(order[:most])
    if is_one and first.thresholds is not None:
        thresholds = floats(first.thresholds[row])
        names.append("threshold")
        columns.append(_texts(thresholds, [math.nan] * len(thresholds), number_format(thresholds)))
    if is_one and first.without is not None:
        names.append("without it")
        columns.append(_without_texts(first, row))
    units = labels(first)
    in_order = sorted(shown)
    note = ""
    if len(shown) < len(with_score):
        note = f"the {len(shown)} strongest of {len(with_score)} units"
    return NumberRows(
        head=[kind_of_units(first), *names],
        has_bars=is_one,
        rows=[[units[unit], *(texts[unit] for texts in columns)] for unit in in_order],
        weights=[[values[unit] for values in weights] for unit in in_order],
        note=note,
    )


def kind_of_units(att: AttributionRecord) -> str:
    """The heading of a column of units."""
    return "unit" if att.unit in ("auto", "spans") or pictures_of(att) else label(att.unit)


def _order(scores: Sequence[float]) -> list[int]:
    """Columns of the scores that are not NaN, the strongest first."""
    columns = [column for column, score in enumerate(scores) if not math.isnan(score)]
    return sorted(columns, key=lambda column: -abs(scores[column]))


def _texts(
    values: Sequence[float], stderr: Sequence[float], show: Callable[[float, float], str]
) -> list[str]:
    """The numbers as text, rounded by their errors; "" for NaN."""
    texts: list[str] = []
    for value, error in zip(values, stderr, strict=True):
        texts.append("" if math.isnan(value) else show(value, error))
    return texts


def _without_texts(att: AttributionRecord, row: int) -> list[str]:
    """What the model says without each unit; "" where it is not known."""
    entries: Sequence[Without | None] = () if att.without is None else att.without[row]
    target = att.targets[row]
    return ["" if entry is None else without_text(target, entry) for entry in entries]
