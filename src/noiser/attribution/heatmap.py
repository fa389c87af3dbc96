"""A heat map and a table of numbers as data, which every renderer of an attribution shows in its own form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution import pairs
from noiser.attribution.display import headings, label, visible
from noiser.numbers import number_format
from noiser.text.segments import join_overlapping
from noiser.types import Target

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution


class Cell(NamedTuple):
    """A piece of the text; without columns and score where it is in no unit, such as a chat template's text."""

    text: str  # not yet made visible
    columns: tuple[int, ...]  # the units in it; several where byte-level tokens share a character
    score: float | None  # sum of the units' scores; None without a score for this target
    weight: float  # score / max |score| of the row, in [-1, 1]

    def parts(self) -> tuple[str, str]:
        """The whitespace before the text, which gets no colour, and the rest; both made visible."""
        text = visible(self.text)
        body = text.lstrip() or text
        return text[: len(text) - len(body)], body


class HeatMap(NamedTuple):
    """One target of an attribution; every text but the cells' is safe to show."""

    target: str
    cells: list[Cell]  # the text before the target
    question: str  # its probability, its rank and the foil: facts that hold for every method
    facts: str  # the question, and the smallest threshold if there is one
    highest: list[tuple[str, str]]  # label and score of up to five units, highest first, all above 0
    pairs: list[str]  # units that decide only together, or of which either would do: a line for each kind
    largest: str  # the largest magnitude of a cell's score, which has the strongest colour; "" without one
    meaning: list[str]  # legends of a positive and a negative score; only the first without negative scores


class Table(NamedTuple):
    """Numbers of one target."""

    head: list[str]  # the kind of the units, then a heading for each column of numbers
    rows: list[list[str]]  # a unit's label, then its numbers as text, "" where there is none
    weights: list[list[float]]  # for each row the colours, in [-1, 1]: one of one attribution, one for each of several
    note: str  # how many units were left out, or ""


def heat_map(att: Attribution, row: int) -> HeatMap:
    """The cells and captions of target `row`."""
    question = f"probability {_prediction(att.targets[row], ' · ')}"
    if att.foil is not None:
        question += f" · rather than “{label(att.foil.text)}” ({_prediction(att.foil, ', ')})"
    k_min = math.nan if att.k_min is None else float(att.k_min[row])
    show, stderr, shown = number_format(att.scores[row].tolist()), _errors(att, row), cells(att, row)
    strongest = max((abs(cell.score or 0.0) for cell in shown), default=0.0)
    top = [unit for unit in att.top(5, row) if unit.score > 0]
    return HeatMap(
        target=label(att.targets[row].text),
        cells=shown,
        question=question,
        facts=question if math.isnan(k_min) else f"{question} · k_min {k_min:.3g}",
        highest=[(label(unit.text), show.with_error(unit.score, stderr[unit.index])) for unit in top],
        pairs=pairs.sentences(att, row),
        largest=show(strongest) if strongest else "",  # not cut at its error: the weights are exact shares of it
        meaning=_meaning(att, row)[: 2 if any(cell.weight < 0 for cell in shown) else 1],
    )


def _prediction(target: Target, separator: str) -> str:
    each, up_to = ("per token ", "up to " * (target.rank > 1)) if target.rest else ("", "")
    return f"{each}{target.probability:.3g}{separator}rank {up_to}{target.rank}"


def _errors(att: Attribution, row: int) -> list[float]:
    return [math.nan] * len(att.units) if att.stderr is None else att.stderr[row].tolist()


def _meaning(att: Attribution, row: int) -> list[str]:
    if "through" in att.info:
        return ["the target was written from it, or from what was"]
    if att.parameters.get("score") == "hellinger":
        return ["without it the model's prediction changes", "without it the prediction changes less"]
    if "of" in att.info:
        return [f"without it {label(str(att.info['of']))} falls", "it rises"]
    if att.foil is not None:
        return [f"speaks for “{label(text)}”" for text in (att.targets[row].text, att.foil.text)]
    return ["without it the prediction gets less likely", "more likely"]


def shared_legend(maps: Sequence[HeatMap]) -> HeatMap | None:
    """A heat map whose legend holds for all of them, or None if their legends differ."""
    fullest = max(maps, key=lambda heat: len(heat.meaning))
    return fullest if all(heat.meaning == fullest.meaning[: len(heat.meaning)] for heat in maps) else None


def cells(att: Attribution, row: int) -> list[Cell]:
    """The text before target `row`, cut into pieces that follow each other without a gap."""
    scores: list[float] = att.scores[row].tolist()
    pieces = _pieces(att, _end_of_text(att, row, scores))
    present = [[scores[column] for column in columns if not math.isnan(scores[column])] for _, columns in pieces]
    totals = [sum(values) if values else None for values in present]
    weights = _weights([math.nan if total is None else total for total in totals])
    return [Cell(*piece, total, weight) for piece, total, weight in zip(pieces, totals, weights, strict=True)]


def _end_of_text(att: Attribution, row: int, scores: Sequence[float]) -> int:
    """How many characters of the text stand before a target."""
    ends = [span.end for span, score in zip(att.units, scores, strict=True) if not math.isnan(score)]
    before = "".join(target.text for target in att.targets[:row])
    if att.text.startswith(before, att.prompt_length):
        ends.append(att.prompt_length + len(before))
    return max([att.prompt_length, *ends])


def _pieces(att: Attribution, end: int) -> list[tuple[str, tuple[int, ...]]]:
    """(text, columns) of the units up to `end`, those that share characters together, in order of the text."""
    columns = [column for column, span in enumerate(att.units) if span.end <= end]
    columns.sort(key=lambda column: att.units[column].start)
    pieces: list[tuple[str, tuple[int, ...]]] = []
    position = 0
    for group in join_overlapping([(att.units[column].start, att.units[column].end) for column in columns]):
        spans = [att.units[columns[index]] for index in group]
        start, stop = spans[0].start, max(span.end for span in spans)
        pieces += [(att.text[position:start], ())] if start > position else []
        text = att.text[start:stop] or spans[0].text  # a special token is not in the text
        pieces.append((text, tuple(columns[index] for index in group)))
        position = max(position, stop)
    return [*pieces, (att.text[position:end], ())] if position < end else pieces


def _weights(scores: Sequence[float]) -> list[float]:
    """Scores divided by the largest magnitude among those that are finite; 0 for NaN."""
    largest = max((abs(score) for score in scores if math.isfinite(score)), default=0.0) or 1.0
    return [0.0 if math.isnan(score) else max(-1.0, min(1.0, score / largest)) for score in scores]


def table(attributions: Sequence[Attribution], row: int, most: int | None = None) -> Table:
    """The numbers of all units that have a score for a target, or of the `most` strongest of each attribution.

    Of one attribution: scores, errors and thresholds. Of several of the same units: a column of scores each.
    """
    first, single = attributions[0], len(attributions) == 1
    scores: list[list[float]] = [att.scores[row].tolist() for att in attributions]
    names = ["score"] if single else headings(attributions)
    columns = [_texts(values, _errors(att, row)) for att, values in zip(attributions, scores, strict=True)]
    if single and first.stderr is not None:
        show = number_format(scores[0])
        names.append("±")
        columns.append(["" if math.isnan(error) else show(error, error) for error in _errors(first, row)])
    if single and first.thresholds is not None:
        names.append("threshold")
        columns.append(_texts(first.thresholds[row].tolist(), [math.nan] * len(first.units)))
    orders = [_order(values) for values in scores]
    chosen = sorted({index for order in orders for index in order[:most]})
    count = len({index for order in orders for index in order})
    weights = [_weights(values) for values in scores]
    return Table(
        [label(first.unit), *names],
        [[label(first.units[index].text), *(texts[index] for texts in columns)] for index in chosen],
        [[values[index] for values in weights] for index in chosen],
        "" if len(chosen) == count else f"the {len(chosen)} strongest of {count} units",
    )


def _order(scores: Sequence[float]) -> list[int]:
    """Columns of the scores that are not NaN, the strongest first."""
    return sorted((i for i, score in enumerate(scores) if not math.isnan(score)), key=lambda i: -abs(scores[i]))


def _texts(values: Sequence[float], stderr: Sequence[float]) -> list[str]:
    show = number_format(values)
    return ["" if math.isnan(value) else show(value, error) for value, error in zip(values, stderr, strict=True)]
