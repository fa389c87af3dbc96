"""Safe text, captions and colours, without markup, which every renderer of an attribution uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import regex
from torch import Tensor

from noiser.attribution.speakers import message_places, speaker
from noiser.errors import ParameterError
from noiser.registry import unversioned

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

Colour = tuple[int, int, int]  # red, green and blue of sRGB, 0 to 255

DARK_PAPER = (24, 26, 32)
# Orange and sky blue of Okabe and Ito, for colour-blind readers.
_POSITIVE = (230, 159, 0)
_NEGATIVE = (86, 180, 233)
_GREY = (128, 128, 128)

_SHARES = "All effects, for and against, add up to 100 %."

# Invisible characters, except joiners and Arabic signs.
_HIDDEN = regex.compile(
    r"[[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]--[\u200c\u200d\u0600-\u0605\u06dd\u070f\u08e2]]", regex.V1
)


def visible(text: str) -> str:
    r"""The text without invisible characters, and without those that a terminal obeys.

    Each shows as a mark or as its code point.

    >>> visible("a\x1b[2J\tb")
    'a⟨U+001B⟩[2J⇥b'
    """
    marks = {"\n": "↵\n", "\t": "⇥"}

    def mark(match: regex.Match[str]) -> str:
        character = match[0]
        return marks.get(character, f"⟨U+{ord(character):04X}⟩")

    return _HIDDEN.sub(mark, text)


def label(text: str) -> str:
    """A unit or token in one line, without whitespace around it; marks show whitespace alone."""
    stripped = text.strip() or text.replace(" ", "␣")
    return visible(stripped).replace("\n", "") or "∅"


def _without_stop(word: str) -> str:
    """A word without the mark that ends a sentence or a part of one.

    >>> [_without_stop(word) for word in ("Lisbon,", "U.S.", "...", '{"a": 1},')]
    ['Lisbon', 'U.S.', '...', '{"a": 1}']
    """
    bare = word.rstrip(",.;:!?。，；：！？、")
    is_abbreviation = word.endswith(".") and "." in bare
    return word if is_abbreviation or not bare else bare


def labels(att: AttributionRecord) -> list[str]:
    """The units' labels, cut to 30 characters; before a message stands who says it.

    Words are without the comma or full stop after them. Labels that would be equal have the place
    of their first character.
    """
    texts = [shorten(label(unit.text), 30) for unit in att.units]
    if att.unit == "word":
        texts = [_without_stop(text) for text in texts]
    if att.unit == "turn":
        for index, start, end in message_places(att):
            for column, unit in enumerate(att.units):
                if unit.overlaps(start, end):
                    texts[column] = f"{label(speaker(att, index))}: {texts[column]}"
    counts = Counter(texts)
    names: list[str] = []
    for text, unit in zip(texts, att.units, strict=True):
        names.append(f"{text} @{unit.start}" if counts[text] > 1 else text)
    return names


def provenance(*attributions: AttributionRecord) -> str:
    """Methods, model, unit and seed in one line, or a line for each that differs, safe to show."""
    methods: dict[str, list[str]] = {}
    for att in attributions:
        methods.setdefault(_origin(att), []).append(label(method_text(att)))
    lines: list[str] = []
    for origin, names in methods.items():
        lines.append(f"{', '.join(names)} · {origin}")
    return "\n".join(lines)


def _origin(att: AttributionRecord) -> str:
    """The model, the unit and the seed in one line."""
    revision = f" @ {att.model.revision[:12]}" if att.model.revision else ""
    joined = ""
    aggregated = att.info.get("aggregated")
    if aggregated:
        joined = " ({reduce} over {from})".format_map(aggregated)
    facts = (
        f"{att.model.name}{revision} ({att.model.dtype})",
        f"unit {att.unit}{joined}",
        f"seed {att.seed}",
    )
    return " · ".join(map(label, facts))


def notes(*attributions: AttributionRecord) -> list[str]:
    """Sentences below the scores, safe to show.

    They say that time ran out, what became of the first token, and what `check=` found.
    """
    return [*alerts(*attributions), *remarks(*attributions)]


def alerts(*attributions: AttributionRecord) -> list[str]:
    """The notes without which scores would be misread: time ran out, and what `check=` found."""
    sentences: list[str] = []
    for prefix, att in _prefixed(attributions):
        check = att.info.get("check")
        texts = [stop_text(att), check_text(check) if check else ""]
        sentences += [prefix + text for text in texts if text]
    return sentences


def remarks(*attributions: AttributionRecord) -> list[str]:
    """The other notes: what became of the first token, and what a share is."""
    sentences: list[str] = []
    for prefix, att in _prefixed(attributions):
        texts = [first_token_text(att)]
        has_shares = not all(in_nats(att, row) for row in range(len(att.targets)))
        if len(attributions) == 1 and has_shares:
            texts.append(_SHARES)
        sentences += [prefix + text for text in texts if text]
    return sentences


def _prefixed(
    attributions: Sequence[AttributionRecord],
) -> Iterator[tuple[str, AttributionRecord]]:
    """Each attribution, with the beginning of a note that says which one of several it is."""
    for name, att in zip(headings(attributions), attributions, strict=True):
        yield f"{name}: " if len(attributions) > 1 else "", att


def in_nats(att: AttributionRecord, row: int) -> bool:
    """Whether the scores of a target are in nats."""
    units = att.info.get("score_units")
    return bool(units) and units[row] == "nats"


def first_token_text(att: AttributionRecord) -> str:
    """Why a unit that is only the first token has a score of another kind, or none.

    "" if there is no such unit.
    """
    unit = next((unit for unit in att.units if unit.token_indices == (0,)), None)
    outcomes = {
        "kept": "It was always kept and has no score.",
        "deleted": "It was always kept; its own score is the effect of deleting it.",
    }
    outcome = outcomes.get(str(att.info.get("first_token")))
    if unit is None or outcome is None:
        return ""
    return (
        f"“{label(unit.text)}” is the first token of the input, on which the model leans. {outcome}"
    )


def stop_text(att: AttributionRecord) -> str:
    """What the scores mean where the call ran out of time; "" where it did not."""
    unfinished = int(att.info.get("unfinished") or 0)
    if not unfinished:
        return ""
    inputs = "1 input was" if unfinished == 1 else f"{unfinished} inputs were"
    limit = f"{float(att.info.get('max_seconds') or 0):g} s"
    if att.info.get("max_calls") and not att.info.get("max_seconds"):
        limit = f"{int(att.info.get('calls') or 0)} requests"
    return (
        f"Stopped after {limit}, when {inputs} not run yet: "
        "units without a score were not reached, and other scores rest on fewer inputs."
    )


def check_text(check: Mapping[str, Any]) -> str:
    """A check's result in words."""
    units = label(str(check["units"]))
    if check["fewest_units"] < 4:
        return f"Fewer than four {units}: too few for the scores to be checked."
    rho, low, high = check["mean"]
    if rho != rho:
        return (
            f"Scores or predictions did not vary when half of the {units} were removed, so the "
            "scores could not be checked."
        )
    mean = f", mean over {check['targets']} targets" if check["targets"] > 1 else ""
    interval = f"[{low:.2f}, {high:.2f}]"
    correlation = f"ρ = {rho:.2f} {interval}{mean}; {check['masks']} removals"
    if math.isnan(check["p"]):
        return (
            f"Four {units} are too few for a verdict. When two of them are removed: {correlation}."
        )
    share = "less than 1" if check["p"] < 0.01 else f"{100 * check['p']:.0f}"
    if check["predicts"]:
        return (
            f"These scores predict what happens when half of the {units} are removed: of the same "
            f"scores in other orders, {share} % do as well. {correlation}."
        )
    return (
        f"It is not shown that these scores predict what happens when half of the {units} are "
        f"removed: of the same scores in other orders, {share} % do as well. {correlation}."
    )


def method_text(att: AttributionRecord, *, version: bool = True) -> str:
    """The method, and the quantity that it explains unless that is the prediction."""
    of = f" of {short(att.info['of'])}" if "of" in att.info else ""
    through = " through the continuation" if "through" in att.info else ""
    name = att.method if version else unversioned(att.method)
    return f"{name}{of}{through}"


def headings(attributions: Sequence[AttributionRecord]) -> list[str]:
    """The method of each attribution, safe to show.

    Several by the same method have the parameters in which they differ.
    """
    versioned = {att.method for att in attributions}
    # Versions are shown where two of them are compared.
    has_versions = len(versioned) > len({unversioned(method) for method in versioned})
    texts: list[str] = []
    for att in attributions:
        siblings = [other.parameters for other in attributions if other.method == att.method]
        words = [method_text(att, version=has_versions)]
        for name, parameter in att.parameters.items():
            value = short(parameter)
            if any(value != short(other.get(name)) for other in siblings):
                words.append(f"{name}={value}")
        texts.append(label(" ".join(words)))
    return texts


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns begin below each other.

    >>> aligned([("unit", "n"), ("a", "1")])
    ['unit  n', 'a     1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def short(value: Any) -> str:
    """A hyper-parameter in at most 80 characters; for a tensor, its shape."""
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return shorten(f"{value:g}" if isinstance(value, float) else str(value), 80)


# What a text may end in that was not cut: a sentence's end, a bracket's, or that of a list or code.
_ENDS = '.!?…"”’)]:;|`*>}'


def open_ended(text: str) -> str:
    """The text, with an ellipsis where it stops in the middle of a sentence.

    >>> open_ended("It is the"), open_ended("It is.")
    ('It is the …', 'It is.')
    """
    text = text.rstrip()
    return text if not text or text[-1] in _ENDS else f"{text} …"


def shorten(text: str, most: int) -> str:
    """The text, or its beginning with an ellipsis where it has more than that many characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check_comparable(attributions: Sequence[AttributionRecord]) -> None:
    """Raises ParameterError unless the attributions are of one prompt and the same targets."""
    if not attributions:
        raise ParameterError("There is nothing to compare; expected at least one attribution.")
    first = _prompt_and_targets(attributions[0])
    for att in attributions:
        other = _prompt_and_targets(att)
        if other != first:
            both = f"{first!r:.80} and {other!r:.80}"
            raise ParameterError(f"The attributions are of different prompts or targets, {both}.")


def _prompt_and_targets(att: AttributionRecord) -> tuple[str, list[str]]:
    return att.text[: att.prompt_length], [target.text for target in att.targets]


def check_targets(att: AttributionRecord, targets: Sequence[int]) -> list[int]:
    """Indices of targets from 0 on; indices below 0 count from the end.

    Raises ParameterError unless the attribution has all of the targets.
    """
    count = len(att.targets)
    if not targets or not all(-count <= row < count for row in targets):
        expected = f"indices of the {count} targets, 0 to {count - 1}, or from the end"
        raise ParameterError(f"targets is {targets!r}; expected {expected}.")
    return [row % count for row in targets]


def tint(weight: float | None, paper: Colour) -> Colour:
    """The background of a cell.

    It is the paper's colour at 0, full orange at 1, full blue at -1, and grey for None.
    """
    if weight is None:
        return _mix(paper, _GREY, 0.3)
    hue = _POSITIVE if weight >= 0 else _NEGATIVE
    return _mix(paper, hue, min(1.0, abs(weight)))


def _mix(paper: Colour, hue: Colour, strength: float) -> Colour:
    """The colour between the paper's, at strength 0, and a hue, at 1."""
    red, green, blue = (
        round(low + (high - low) * strength) for low, high in zip(paper, hue, strict=True)
    )
    return red, green, blue


def dark_ink(weight: float | None) -> bool:
    """Whether black is easier to read than white on a cell's tint on dark paper.

    The better of the two has a contrast of at least 4.5.
    """
    return abs(weight or 0.0) > 0.635
