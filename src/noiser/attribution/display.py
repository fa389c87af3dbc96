"""What every renderer of an attribution shows: safe text, cells with weights, tables, captions. No mark-up."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

from noiser.attribution.record import AttributionRecord
from noiser.errors import ParameterError
from noiser.types import Target

Colour = tuple[int, int, int]
"""Red, green and blue of sRGB, 0 to 255."""

DARK_PAPER = (24, 26, 32)
_POSITIVE, _NEGATIVE = (230, 159, 0), (86, 180, 233)  # orange and sky blue of Okabe and Ito, for colour-blind readers

_KEPT_FORMATS = frozenset("\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u08e2")  # joiners, Arabic signs


class Cell(NamedTuple):
    """A piece of the text as a heat map shows it.

    Attributes:
        text: its characters, not yet made visible.
        columns: the units that it stands for; several where byte-level tokens share a character; none for text
            that has no unit, such as a chat template.
        score: sum of the scores of these units, or None without a score for this target.
        weight: score / max |score| of the row, in [-1, 1]; 0 without a score.
    """

    text: str
    columns: tuple[int, ...]
    score: float | None
    weight: float

    def parts(self) -> tuple[str, str]:
        """The text made visible, in two: the whitespace before it, which has no colour, and the rest."""
        text = visible(self.text)
        body = text.lstrip() or text
        return text[: len(text) - len(body)], body


class NumberFormat(NamedTuple):
    """How numbers that stand together are written.

    Attributes:
        decimals: of a number without an error; one with an error has at most one more. None for scientific notation.
    """

    decimals: int | None

    def __call__(self, value: float, stderr: float = math.nan) -> str:
        """The value, rounded to the first digit of its standard error, or to the second where the first is 1.

        >>> NumberFormat(4)(-0.01863, 0.0123), NumberFormat(4)(-0.01863, 0.0723), NumberFormat(4)(-0.01863)
        ('-0.019', '-0.02', '-0.0186')
        """
        if self.decimals is None:
            return f"{value:z.2e}"
        decimals = self.decimals
        if stderr > 0 and math.isfinite(stderr):
            digits, exponent = f"{stderr:.1e}".split("e")
            decimals = min(decimals + 1, max(0, (digits < "2") - int(exponent)))
        return f"{value:z.{decimals}f}"

    def with_error(self, value: float, stderr: float) -> str:
        """The value and its standard error, both rounded; the value alone if the error is NaN."""
        return self(value) if math.isnan(stderr) else f"{self(value, stderr)} ± {self(stderr, stderr)}"


@dataclass(frozen=True, kw_only=True)
class HeatMap:
    """One target of an attribution; every text is safe to show.

    Attributes:
        target: the target's label.
        cells: the text before it.
        question: its probability, its rank and the foil: what attributions by several methods share.
        noise: the smallest threshold, if there is one.
        highest: the units of the five highest scores above 0, as label and score.
        largest: the largest magnitude of a cell's score, which has the strongest colour; "" without one.
        meaning: what a positive and what a negative score say; only the first without negative ones.
    """

    target: str
    cells: list[Cell]
    question: list[str]
    noise: list[str]
    highest: list[tuple[str, str]]
    largest: str
    meaning: list[str]


class Column(NamedTuple):
    """Numbers as texts, "" where there is none, and weights in [-1, 1] where they are to be coloured."""

    heading: str
    texts: list[str]
    weights: list[float] | None = None


class Table(NamedTuple):
    """The numbers of a heat map, one line per unit.

    Attributes:
        unit: heading of the labels.
        labels: of the units.
        columns: their numbers.
        bars: weights in [-1, 1] of bars beside them; empty for none.
        note: how many units were left out, or "".
    """

    unit: str
    labels: list[str]
    columns: list[Column]
    bars: list[float]
    note: str


def heat_map(att: AttributionRecord, row: int) -> HeatMap:
    """What is shown of target `row`."""
    question = _prediction(att.targets[row], "probability ")
    if att.foil is not None:
        known = ", ".join(_prediction(att.foil))
        question.append(f"rather than “{label(att.foil.text)}”" + (f" ({known})" if known else ""))
    stderr = _errors(att, row)
    show = number_format(att.scores[row].tolist())
    shown = cells(att, row)
    strongest = max(shown, key=lambda cell: abs(cell.score or 0.0), default=None)
    largest = ""
    if strongest is not None and strongest.score:
        largest = show(abs(strongest.score))  # not cut at its error: the weights are exact shares of it
    top = [unit for unit in att.top(5, row) if unit.score > 0]
    k_min = math.nan if att.k_min is None else float(att.k_min[row])
    return HeatMap(
        target=label(att.targets[row].text),
        cells=shown,
        question=question,
        noise=[] if math.isnan(k_min) else [f"k_min {k_min:.3g}"],
        highest=[(label(unit.text), show.with_error(unit.score, stderr[unit.index])) for unit in top],
        largest=largest,
        meaning=_meaning(att, row)[: 2 if any(cell.weight < 0 for cell in shown) else 1],
    )


def _errors(att: AttributionRecord, row: int) -> list[float]:
    return [math.nan] * len(att.units) if att.stderr is None else att.stderr[row].tolist()


def _meaning(att: AttributionRecord, row: int) -> list[str]:
    """What a positive and what a negative score say of the unit."""
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
    """The heat map whose colours' meaning is that of all; None where there is none."""
    fullest = max(maps, key=lambda heat: len(heat.meaning))
    return fullest if all(heat.meaning == fullest.meaning[: len(heat.meaning)] for heat in maps) else None


def _prediction(target: Target, word: str = "") -> list[str]:
    """Probability and rank; a result of Inseq may lack them."""
    each, up_to = "per token " if target.rest else "", "up to " if target.rest and target.rank > 1 else ""
    probability = [] if math.isnan(target.probability) else [f"{word}{each}{target.probability:.3g}"]
    return probability + ([f"rank {up_to}{target.rank}"] if target.rank else [])


def visible(text: str) -> str:
    r"""The text with every character that is invisible, or that a terminal obeys, as a visible one.

    A newline stays, after a mark. Direction overrides and tag characters, which can hide or reorder text, show as
    their code points.

    >>> visible("a\x1b[2J\tb")
    'a⟨U+001B⟩[2J⇥b'
    """
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == "\n":
        return "↵\n"
    if character == "\t":
        return "⇥"
    hidden = unicodedata.category(character) in {"Cc", "Cf", "Cs", "Zl", "Zp"} and character not in _KEPT_FORMATS
    return f"⟨U+{ord(character):04X}⟩" if hidden else character


def label(text: str) -> str:
    """A unit or token in one line, without the whitespace around it; whitespace alone is shown by marks."""
    stripped = text.strip() or text.replace(" ", "␣")
    return visible(stripped).replace("\n", "") or "∅"


def cells(att: AttributionRecord, row: int) -> list[Cell]:
    """The text before target `row`, cut into pieces that follow each other without a gap."""
    scores: list[float] = att.scores[row].tolist()
    pieces = _pieces(att, _shown_end(att, row))
    totals = [_total([scores[column] for column in columns]) for _, columns in pieces]
    weights = _weights([math.nan if total is None else total for total in totals])
    return [Cell(*piece, total, weight) for piece, total, weight in zip(pieces, totals, weights, strict=True)]


def _weights(scores: Sequence[float]) -> list[float]:
    """Scores divided by the largest magnitude among those that are finite; 0 for NaN."""
    largest = max((abs(score) for score in scores if math.isfinite(score)), default=0.0) or 1.0
    return [0.0 if math.isnan(score) else max(-1.0, min(1.0, score / largest)) for score in scores]


def _shown_end(att: AttributionRecord, row: int) -> int:
    """How much of the text stands before a target."""
    ends = [span.end for span, score in zip(att.units, att.scores[row].tolist(), strict=True) if not math.isnan(score)]
    before = "".join(target.text for target in att.targets[:row])
    if att.text.startswith(before, att.prompt_length):
        ends.append(att.prompt_length + len(before))
    return max([att.prompt_length, *ends])


def _pieces(att: AttributionRecord, end: int) -> list[tuple[str, tuple[int, ...]]]:
    """(text, columns), the units that share characters together, in order of the text."""
    pieces: list[tuple[str, tuple[int, ...]]] = []
    position = 0
    for column in sorted(range(len(att.units)), key=lambda i: (att.units[i].start, i)):
        span = att.units[column]
        if span.end > end:
            continue
        if span.start == span.end:  # a special token, which is not in the text
            pieces.append((span.text, (column,)))
        elif span.start >= position:
            pieces += [(att.text[position : span.start], ())] if span.start > position else []
            pieces.append((att.text[span.start : span.end], (column,)))
        else:
            text, columns = pieces.pop()
            pieces.append((text + att.text[position : span.end], (*columns, column)))
        position = max(position, span.end)
    return [*pieces, (att.text[position:end], ())] if position < end else pieces


def _total(scores: Sequence[float]) -> float | None:
    present = [score for score in scores if math.isfinite(score)]
    return math.fsum(present) if present else None


def score_table(att: AttributionRecord, row: int, most: int | None = None) -> Table:
    """Scores, standard errors, thresholds and bars of all units with a score for a target, or the `most` strongest."""
    scores: list[float] = att.scores[row].tolist()
    show = number_format(scores)
    stderr = _errors(att, row)
    columns = [Column("score", _texts(scores, stderr, show))]
    if att.stderr is not None:
        columns.append(Column("±", _texts(stderr, stderr, show)))
    if att.thresholds is not None:
        thresholds: list[float] = att.thresholds[row].tolist()
        columns.append(Column("threshold", _texts(thresholds, repeat(math.nan), number_format(thresholds))))
    return _table(att, columns, _strongest(scores, most), len(_strongest(scores)), bars=_weights(scores))


def joint_table(attributions: Sequence[AttributionRecord], row: int, most: int | None = None) -> Table:
    """Units by methods, for attributions of the same units; each column has a colour scale of its own.

    Of each method the `most` strongest units are there; None for all.
    """
    every = range(len(attributions[0].units))
    scores: list[list[float]] = [att.scores[row].tolist() for att in attributions]
    columns = [
        Column(heading, _texts(values, _errors(att, row), number_format(values)), _weights(values))
        for att, heading, values in zip(attributions, headings(attributions), scores, strict=True)
    ]
    chosen = every if most is None else sorted({index for values in scores for index in _strongest(values, most)})
    return _table(attributions[0], columns, chosen, len(every))


def _table(
    att: AttributionRecord, columns: list[Column], chosen: Sequence[int], present: int, bars: Sequence[float] = ()
) -> Table:
    """The chosen lines of columns that have all units."""

    def only(values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in chosen]

    cut = [Column(name, only(texts), only(weights) if weights else None) for name, texts, weights in columns]
    note = "" if len(chosen) == present else f"the {len(chosen)} strongest of {present} units"
    return Table(label(att.unit), [label(unit.text) for unit in only(att.units)], cut, only(bars) if bars else [], note)


def _strongest(scores: Sequence[float], count: int | None = None) -> list[int]:
    """Columns of the `count` scores of largest magnitude, in order of the text; those without a score are left out."""
    present = [column for column, score in enumerate(scores) if not math.isnan(score)]
    return sorted(sorted(present, key=lambda column: -abs(scores[column]))[:count])


def _texts(values: Sequence[float], stderr: Iterable[float], show: NumberFormat) -> list[str]:
    return ["" if math.isnan(value) else show(value, error) for value, error in zip(values, stderr, strict=False)]


def number_format(values: Iterable[float | None]) -> NumberFormat:
    """A format with one number of decimals for all values without an error: three significant digits in the largest."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    if largest and not 1e-4 <= largest < 1e6:
        return NumberFormat(None)
    return NumberFormat(min(6, max(0, 2 - math.floor(math.log10(largest)))) if largest else 2)


def provenance(att: AttributionRecord) -> list[str]:
    """Method, model, unit and seed: one short text each, safe to show."""
    revision = f" @ {att.model.revision[:12]}" if att.model.revision else ""
    unit = f"unit {att.unit}"
    match att.info.get("aggregated"):
        case {"reduce": reduce, "from": finer}:
            unit += f" ({reduce} over {finer})"
        case _:
            pass
    parts = [method_text(att), f"{att.model.name}{revision} ({att.model.dtype})", unit, f"seed {att.seed}"]
    return [label(part) for part in parts]


def method_text(att: AttributionRecord) -> str:
    """The method, and what it explains where that is not the prediction itself."""
    of = f" of {_short(att.info['of'])}" if "of" in att.info else ""
    return f"{att.method}{of}{' through the continuation' if 'through' in att.info else ''}"


def parameter_texts(att: AttributionRecord) -> list[str]:
    """Every hyper-parameter as `name=value`, tensors by their shape, safe to show."""
    return [label(f"{name}={_short(value)}") for name, value in att.parameters.items()]


def headings(attributions: Sequence[AttributionRecord]) -> list[str]:
    """Each one's method, safe to show; of several by the same method, with the parameters in which they differ."""
    texts: list[str] = []
    for att in attributions:
        same = [other.parameters for other in attributions if other.method == att.method]
        values = {name: _short(value) for name, value in att.parameters.items()}
        differing = [name for name in values if any(values[name] != _short(other.get(name)) for other in same)]
        texts.append(label(" ".join([method_text(att), *(f"{name}={values[name]}" for name in differing)])))
    return texts


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def check_comparable(attributions: Sequence[AttributionRecord]) -> None:
    """Raises ParameterError unless there is an attribution, and all are of one prompt and the same targets."""
    if not attributions:
        raise ParameterError("There is nothing to compare; expected at least one attribution.")
    prompts = {att.text[: att.prompt_length] for att in attributions}
    if len(prompts) > 1:
        first, second = sorted(prompts)[:2]
        raise ParameterError(
            f"The attributions are of {len(prompts)} different prompts, such as {first[:60]!r} and {second[:60]!r}; "
            "expected one prompt. Compare them one prompt at a time."
        )
    targets = {tuple(target.token_ids for target in att.targets): att.targets for att in attributions}
    if len(targets) > 1:
        first, second = ([target.text for target in each] for each in [*targets.values()][:2])
        raise ParameterError(
            f"The attributions are of different targets, such as {first!r:.60} and {second!r:.60}; expected the same. "
            "Compare them one question at a time, or attribute again with target=."
        )


def check_targets(att: AttributionRecord, targets: Iterable[int]) -> list[int]:
    """Indices of targets from 0 on; those below 0 count from the end.

    Raises:
        ParameterError: there is none, or `att` does not have them all.
    """
    count = len(att.targets)
    rows = list(targets) if isinstance(targets, Iterable) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    if not rows or not all(-count <= row < count for row in rows):
        raise ParameterError(
            f"targets is {targets!r}; expected indices of the {count} targets, 0 to {count - 1}, or from the end."
        )
    return [row % count for row in rows]


def tint(weight: float, paper: Colour) -> Colour:
    """The background of a cell: the paper's colour at weight 0, full orange at 1, full blue at -1."""
    hue, strength = _POSITIVE if weight >= 0 else _NEGATIVE, min(1.0, abs(weight))
    red, green, blue = (round(low + (high - low) * strength) for low, high in zip(paper, hue, strict=True))
    return red, green, blue


def dark_ink(weight: float, paper: Colour) -> bool:
    """Whether black is easier to read on a cell's tint than white (contrast ratio of WCAG 2.2)."""
    luminance = _luminance(tint(weight, paper))
    return (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05)


def _luminance(colour: Colour) -> float:
    shares = [value / 255 for value in colour]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
