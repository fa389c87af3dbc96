"""A heat map and a table of numbers as data, which every renderer of an attribution shows in its own form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution.display import headings, label, labels, visible
from noiser.attribution.relations import sentences
from noiser.numbers import number_format
from noiser.text.chat import part_texts
from noiser.text.segments import join_overlapping
from noiser.types import Target

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

UNASKED = "message {}, a tool's result, speaks for it; the user's words do not"


class Cell(NamedTuple):
    """A piece of the text; without columns and score where it is in no unit, such as a chat template's text."""

    text: str  # not yet made visible
    columns: tuple[int, ...]  # the units in it; several where byte-level tokens share a character
    score: float | None  # sum of the units' scores; None without a score for this target
    weight: (
        float | None
    )  # score / max |score| of the row; None without a signal, within two standard errors of 0

    def parts(self) -> tuple[str, str]:
        """The whitespace before the text, which gets no colour, and the rest; both made visible."""
        text = visible(self.text)
        body = text.lstrip() or text
        return text[: len(text) - len(body)], body


class HeatMap(NamedTuple):
    """One target of an attribution; every text but the cells' is safe to show."""

    target: str
    foil: str  # "" without one
    cells: list[Cell]  # the text before the target
    question: str  # its probability, its rank and the foil: facts that hold for every method
    facts: str  # the question, and the smallest threshold if there is one
    strongest: dict[
        str, list[tuple[str, str]]
    ]  # "for" and "against": labels and scores, five in all, strongest first
    pairs: list[
        str
    ]  # lines about units that decide only together, or of which either would do, and UNASKED
    largest: str  # the largest magnitude of a cell's score, which has the strongest colour; "" without one
    meaning: dict[str, str]  # the colours that occur, in words


def strongest(heat: HeatMap) -> str:
    """The strongest scores in words: "for: Lisbon 6.6 · who 1.9 · against: Germany -4.4"."""
    sides = [
        f"{side}: {' · '.join(f'{n} {score}' for n, score in top)}"
        for side, top in heat.strongest.items()
    ]
    return " · ".join(sides) or "no unit has a signal"


class Numbers(NamedTuple):
    """A table of the numbers of one target."""

    head: list[str]  # the kind of the units, then a heading for each column of numbers
    rows: list[list[str]]  # a unit's label, then its numbers as text, "" where there is none
    weights: list[
        list[float | None]
    ]  # for each row and attribution the colour, in [-1, 1]; None without a signal
    note: str  # how many units were left out, or ""


def heat_map(att: AttributionRecord, row: int) -> HeatMap:
    """The cells and captions of target `row`."""
    question, foil = f"probability {_prediction(att.targets[row], ' · ')}", ""
    if att.foil is not None:
        foil = label(att.foil.text)
        question += f" · rather than “{foil}” ({_prediction(att.foil, ', ')})"
    k_min = math.nan if att.k_min is None else float(att.k_min[row])
    scores, stderr, shown, names = (
        att.scores[row].tolist(),
        errors_of(att, row),
        cells(att, row),
        labels(att),
    )
    show, largest = (
        number_format(scores),
        max((abs(cell.score or 0.0) for cell in shown), default=0.0),
    )
    strongest: dict[str, list[tuple[str, str]]] = {}
    for i in [i for i in _order(scores) if scores[i] and has_signal(scores[i], stderr[i])][:5]:
        pair = (names[i], show.with_error(scores[i], stderr[i]))
        strongest.setdefault("for" if scores[i] > 0 else "against", []).append(pair)
    return HeatMap(
        target=label(att.targets[row].text),
        foil=foil,
        cells=shown,
        question=question,
        facts=question if math.isnan(k_min) else f"{question} · k_min {k_min:.3g}",
        strongest=dict(sorted(strongest.items(), reverse=True)),
        pairs=[*sentences(att, row), *map(UNASKED.format, att.info.get("unasked", ()))],
        largest=show(largest)
        if largest
        else "",  # not cut at its error: the weights are exact shares of it
        meaning=_meaning(att, row, shown) if largest else {},
    )


def _prediction(target: Target, separator: str) -> str:
    each, up_to = ("per token ", "up to " * (target.rank > 1)) if target.rest else ("", "")
    return f"{each}{target.probability:.3g}{separator}rank {up_to}{target.rank}"


def errors_of(att: AttributionRecord, row: int) -> list[float]:
    """The standard errors of a target's scores; NaN where there is none."""
    return [math.nan] * len(att.units) if att.stderr is None else att.stderr[row].tolist()


def has_signal(score: float, stderr: float) -> bool:
    """Whether a score is more than two standard errors away from 0, or has none."""
    return not stderr > 0 or abs(score) > 2 * stderr


def _meaning(att: AttributionRecord, row: int, shown: Sequence[Cell]) -> dict[str, str]:
    target = label(att.targets[row].text)
    if "through" in att.info:
        words = "the target was written from it, or from what was", ""
    elif att.parameters.get("score") == "hellinger":
        words = (
            "without it the model's prediction changes",
            "without it the prediction changes less",
        )
    elif "of" in att.info:
        words = f"without it {label(str(att.info['of']))} falls", "it rises"
    elif att.foil is not None:
        words = f"speaks for “{target}”", f"speaks for “{label(att.foil.text)}”"
    else:
        words = "without it the prediction gets less likely", "more likely"
    there = {
        "orange": (words[0], True),
        "blue": (words[1], any((cell.weight or 0) < 0 for cell in shown)),
        "grey": (
            "no signal, within two standard errors of 0",
            any(cell.weight is None for cell in shown),
        ),
    }
    return {colour: text for colour, (text, is_there) in there.items() if is_there}


def legends(maps: Sequence[HeatMap]) -> list[dict[str, str]]:
    """The colours in words for each heat map; for the last one alone where one legend holds for all."""
    pairs = {pair for heat in maps for pair in heat.meaning.items()}
    common = {
        colour: words
        for name in ("orange", "blue", "grey")
        for colour, words in pairs
        if colour == name
    }
    same = len(common) == len(pairs)
    return (
        [common if heat is maps[-1] else {} for heat in maps]
        if same
        else [heat.meaning for heat in maps]
    )


def cells(att: AttributionRecord, row: int) -> list[Cell]:
    """The text before target `row`, cut into pieces that follow each other without a gap."""
    scores: list[float] = att.scores[row].tolist()
    errors, pieces, roles = (
        errors_of(att, row),
        _pieces(att, _end_of_text(att, row, scores)),
        _roles(att),
    )
    present = [[i for i in columns if not math.isnan(scores[i])] for _, _, columns in pieces]
    totals = [sum(scores[i] for i in columns) if columns else math.nan for columns in present]
    weights = _weights(totals, [math.hypot(*(errors[i] for i in columns)) for columns in present])
    return [
        Cell(
            text if columns else roles.get(start, text),
            columns,
            None if math.isnan(total) else total,
            weight,
        )
        for (start, text, columns), total, weight in zip(pieces, totals, weights, strict=True)
    ]


def _roles(att: AttributionRecord) -> dict[int, str]:
    """For each place of a chat where the template's text begins, the role that it announces, in place of its marks."""
    if isinstance(att.prompt, str):
        return {}
    roles, position = dict[int, str](), 0
    for message in [*att.prompt, None]:
        content = "".join(part_texts(message)).strip() if message else ""
        start = (
            att.text.find(content, position, att.prompt_length) if message else att.prompt_length
        )
        if start < 0 or (message and not content):
            return {}  # the template changes what it is given
        role = str(message.get("role")) if message else "assistant"
        said = re.sub(r"<[^<>]*>|\[/?\w+\]", " ", att.text[position:start]).split()
        own = (
            " ".join(said).removesuffix(role) + "\n" if len(said) > 2 else ""
        )  # more than roles: the template's text
        if start > position:
            roles[position] = f"{chr(10) * (position > 0)}{own}{role}: "
        position = start + len(content)
    return roles


def _end_of_text(att: AttributionRecord, row: int, scores: Sequence[float]) -> int:
    """How many characters of the text stand before a target."""
    ends = [
        span.end for span, score in zip(att.units, scores, strict=True) if not math.isnan(score)
    ]
    before = "".join(target.text for target in att.targets[:row])
    said = len(before) if att.text.startswith(before, att.prompt_length) else 0
    return max([att.prompt_length + said, *ends])


def _pieces(att: AttributionRecord, end: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """(start, text, columns) of the units up to `end`, those that share characters together, in order of the text."""
    columns = [column for column, span in enumerate(att.units) if span.end <= end]
    columns.sort(key=lambda column: att.units[column].start)
    pieces, position = list[tuple[int, str, tuple[int, ...]]](), 0
    for group in join_overlapping(
        [(att.units[column].start, att.units[column].end) for column in columns]
    ):
        spans = [att.units[columns[index]] for index in group]
        start, stop = spans[0].start, max(span.end for span in spans)
        pieces += [(position, att.text[position:start], ())] if start > position else []
        text = att.text[start:stop] or spans[0].text  # a special token is not in the text
        pieces.append((start, text, tuple(columns[index] for index in group)))
        position = max(position, stop)
    return [*pieces, (position, att.text[position:end], ())] if position < end else pieces


def _weights(scores: Sequence[float], stderr: Sequence[float]) -> list[float | None]:
    """Scores divided by the largest finite magnitude, 0 for NaN; None without a signal."""
    largest = max((abs(score) for score in scores if math.isfinite(score)), default=0.0) or 1.0
    shares = [
        0.0 if math.isnan(score) else max(-1.0, min(1.0, score / largest)) for score in scores
    ]
    signals = [
        math.isnan(score) or has_signal(score, error)
        for score, error in zip(scores, stderr, strict=True)
    ]
    return [share if signal else None for share, signal in zip(shares, signals, strict=True)]


def numbers(
    attributions: Sequence[AttributionRecord], row: int, most: int | None = None
) -> Numbers:
    """The numbers of all units that have a score for a target, or of the `most` strongest of each attribution."""
    first, single = attributions[0], len(attributions) == 1
    scores: list[list[float]] = [att.scores[row].tolist() for att in attributions]
    stderr = [errors_of(att, row) for att in attributions]
    names = ["score"] if single else headings(attributions)
    columns = [_texts(*pair) for pair in zip(scores, stderr, strict=True)]
    if single and first.thresholds is not None:
        names.append("threshold")
        columns.append(_texts(first.thresholds[row].tolist(), [math.nan] * len(first.units)))
    orders = [_order(values) for values in scores]
    chosen, count = (
        sorted({i for order in orders for i in order[:most]}),
        len({i for order in orders for i in order}),
    )
    units, weights = labels(first), [_weights(*pair) for pair in zip(scores, stderr, strict=True)]
    return Numbers(
        [kind_of_units(first), *names],
        [[units[index], *(texts[index] for texts in columns)] for index in chosen],
        [[values[index] for values in weights] for index in chosen],
        "" if len(chosen) == count else f"the {len(chosen)} strongest of {count} units",
    )


def kind_of_units(att: AttributionRecord) -> str:
    """The heading of a column of units."""
    return "unit" if att.unit in ("auto", "spans") else label(att.unit)


def _order(scores: Sequence[float]) -> list[int]:
    """Columns of the scores that are not NaN, the strongest first."""
    return sorted(
        (i for i, score in enumerate(scores) if not math.isnan(score)),
        key=lambda i: -abs(scores[i]),
    )


def _texts(values: Sequence[float], stderr: Sequence[float]) -> list[str]:
    show = number_format(values)
    return [
        "" if math.isnan(value) else show.with_error(value, e)
        for value, e in zip(values, stderr, strict=True)
    ]
