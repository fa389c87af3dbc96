"""What every picture of an attribution shares: safe text, cells with a weight, captions. No mark-up."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from noiser.errors import ParameterError

if TYPE_CHECKING:
    from noiser.attribution.record import Attribution
    from noiser.types import Target

__all__ = [
    "DARK_PAPER",
    "Cell",
    "Colour",
    "asked",
    "cells",
    "check_comparable",
    "check_targets",
    "dark_ink",
    "facts",
    "headings",
    "label",
    "number_format",
    "parameter_texts",
    "provenance",
    "strongest",
    "tint",
    "visible",
]

Colour = tuple[int, int, int]
"""Red, green and blue of sRGB, 0 to 255."""

DARK_PAPER = (24, 26, 32)
_POSITIVE, _NEGATIVE = (230, 159, 0), (86, 180, 233)  # orange and sky blue of Okabe and Ito, for colour-blind readers

_KEPT_FORMATS = frozenset("\u200c\u200d\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u08e2")  # joiners, Arabic signs


class Cell(NamedTuple):
    """A piece of the text as a picture shows it.

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


def visible(text: str) -> str:
    r"""The text with every character that is invisible, or that a terminal obeys, as a visible one.

    A newline stays, behind a mark. Direction overrides and tag characters, which can hide or reorder text, show as
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


def cells(att: Attribution, row: int) -> list[Cell]:
    """The text before target `row`, cut into pieces that follow each other without a gap."""
    end = _shown_end(att, row)
    raw = att.scores[row].tolist()
    pieces = [(text, columns, _total([raw[i] for i in columns])) for text, columns in _pieces(att, end)]
    largest = max((abs(score) for _, _, score in pieces if score is not None), default=0.0)
    return [
        Cell(text, columns, score, score / largest if score and largest else 0.0) for text, columns, score in pieces
    ]


def _shown_end(att: Attribution, row: int) -> int:
    """How much of the text stands before a target."""
    ends = [span.end for span, score in zip(att.units, att.scores[row].tolist(), strict=True) if not math.isnan(score)]
    before = "".join(target.text for target in att.targets[:row])
    if att.text.startswith(before, att.prompt_length):
        ends.append(att.prompt_length + len(before))
    return max([att.prompt_length, *ends])


def _pieces(att: Attribution, end: int) -> list[tuple[str, tuple[int, ...]]]:
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


def strongest(att: Attribution, row: int, count: int) -> list[int]:
    """Columns of the `count` scores of largest magnitude, in order of the text."""
    raw: list[float] = att.scores[row].tolist()
    present = [column for column, score in enumerate(raw) if not math.isnan(score)]
    return sorted(sorted(present, key=lambda column: -abs(raw[column]))[:count])


def number_format(values: Iterable[float | None]) -> Callable[[float], str]:
    """A format with one number of decimals for all values, four significant digits in the largest."""
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    decimals = min(6, max(0, 3 - math.floor(math.log10(largest)))) if largest else 2
    spec = f"z.{decimals}f" if not largest or 1e-4 <= largest < 1e6 else ".2e"
    return partial(_formatted, spec)


def _formatted(spec: str, value: float) -> str:
    return format(value, spec)


def facts(att: Attribution, row: int) -> list[str]:
    """What is known about a target: probability, rank, the foil's, and the noise used."""
    parts = asked(att, row)
    if att.k_min is not None and not math.isnan(k_min := float(att.k_min[row])):
        parts.append(f"k_min {k_min:.3g}")
    return parts


def asked(att: Attribution, row: int) -> list[str]:
    """The same without the noise: what attributions of one question by several methods share."""
    parts = _prediction(att.targets[row])
    if att.foil is not None:
        known = ", ".join(_prediction(att.foil, ""))
        parts.append(f"rather than “{label(att.foil.text)}”" + (f" ({known})" if known else ""))
    return parts


def _prediction(target: Target, word: str = "probability ") -> list[str]:
    """Probability and rank; a result of Inseq may lack them."""
    probability = [] if math.isnan(target.probability) else [f"{word}{target.probability:.3g}"]
    return probability + ([f"rank {target.rank}"] if target.rank else [])


def provenance(att: Attribution) -> list[str]:
    """Method, model and seed: one short text each, safe to show."""
    revision = f" @ {att.model.revision[:12]}" if att.model.revision else ""
    parts = [att.method, f"{att.model.name}{revision} ({att.model.dtype})", f"unit {att.unit}", f"seed {att.seed}"]
    return [label(part) for part in parts]


def parameter_texts(att: Attribution) -> list[str]:
    """Every hyper-parameter as `name=value`, tensors by their shape, safe to show."""
    return [label(f"{name}={_short(value)}") for name, value in att.parameters.items()]


def headings(attributions: Sequence[Attribution]) -> list[str]:
    """Each one's method, safe to show; of several by the same method, with the parameters in which they differ."""
    texts: list[str] = []
    for att in attributions:
        same = [other.parameters for other in attributions if other.method == att.method]
        own = {name: _short(value) for name, value in att.parameters.items()}
        differing = [name for name in own if any(own[name] != _short(parameters.get(name)) for parameters in same)]
        texts.append(label(" ".join([att.method, *(f"{name}={own[name]}" for name in differing)])))
    return texts


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def check_comparable(attributions: Sequence[Attribution]) -> None:
    """Raises ParameterError unless there is at least one attribution and all are of the same prompt."""
    if not attributions:
        raise ParameterError("There is nothing to compare; expected at least one attribution.")
    prompts = {att.text[: att.prompt_length] for att in attributions}
    if len(prompts) > 1:
        first, second = sorted(prompts)[:2]
        raise ParameterError(
            f"The attributions are of {len(prompts)} different prompts, such as {first[:60]!r} and {second[:60]!r}; "
            "expected one prompt. Compare them one prompt at a time."
        )


def check_targets(att: Attribution, targets: Sequence[int] | None) -> Sequence[int] | None:
    """Indices of targets as they are. Raises ParameterError unless there is at least one and `att` has them all."""
    count = len(att.targets)
    if targets is not None and not (len(targets) and all(0 <= row < count for row in targets)):
        raise ParameterError(f"targets is {targets!r}; expected indices of the {count} targets, 0 to {count - 1}.")
    return targets


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
