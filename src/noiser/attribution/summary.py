"""One sentence about a target: what the model says, because of what, and what without that.

"The model says **Portuguese** (36 %), most of all because of **Lisbon**; without it, it would say
*German* (39 %)."
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from noiser.attribution.amounts import answers_text, probability_text
from noiser.attribution.display import headings, label, method_text, shorten
from noiser.attribution.heatmap import errors_of, with_signal
from noiser.attribution.regions import pictures_of
from noiser.attribution.speakers import chat_messages, message_of_units
from noiser.numbers import percentage
from noiser.registry import unversioned
from noiser.tensors import floats
from noiser.types import ANOTHER_ANSWER, Target, Without

if TYPE_CHECKING:
    from noiser.attribution.record import AttributionRecord

Role = Literal["", "said", "cause", "instead"]

# A unit without which so much of the target's probability is left does not matter much.
_HARDLY_CHANGED = 0.8
# What a model says with less probability than this is a guess.
_GUESS = 0.1
# Characters of a target or unit in the sentence.
_LONGEST = 80

_NOUNS = {
    "word": "word",
    "token": "token",
    "field": "field",
    "sentence": "sentence",
    "line": "line",
    "paragraph": "paragraph",
    "turn": "message",
    "source": "source",
}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
_PUNCTUATION = " \t\n.,;:!?…()[]{}\"'“”‘’«»"


class Piece(NamedTuple):
    """A part of the sentence, safe to show.

    Attributes:
        text: the part's text.
        role: "said" for what the model says, "cause" for the units because of which, "instead" for
            what it would say otherwise; "" for the words between.
    """

    text: str
    role: Role = ""


def about(attributions: Sequence[AttributionRecord], row: int) -> list[Piece]:
    """The sentence about target `row` of one attribution, or of several of one prompt."""
    if len(attributions) == 1:
        return sentence(attributions[0], row)
    return sentence_of_methods(attributions, row)


def sentence(att: AttributionRecord, row: int) -> list[Piece]:
    """The sentence about target `row` of an attribution."""
    claim, because = _claim(att, row)
    return [*claim, *_reason(att, row, because), Piece(".")]


def sentence_of_methods(attributions: Sequence[AttributionRecord], row: int) -> list[Piece]:
    """The sentence about target `row` of several methods: the unit that each of them names."""
    claim, because = _claim(attributions[0], row)
    methods: dict[tuple[Piece, ...], list[str]] = {}  # those that name the same unit, together
    for att, heading in zip(attributions, headings(attributions), strict=True):
        strongest = _strongest(att, row)
        named = [Piece(f"no {_noun(att)}")]
        if strongest is not None:
            named = _named(att, strongest[0])
        methods.setdefault(tuple(named), []).append(heading)
    pieces = [*claim, Piece(because)]
    for index, (named, names) in enumerate(methods.items()):
        separator = ", " if index else ""
        pieces += [Piece(separator), *named, Piece(f" ({', '.join(names)})")]
    return [*pieces, Piece(".")]


def names_of(att: AttributionRecord, columns: Sequence[int], role: Role = "cause") -> list[Piece]:
    """Units by their texts, such as "**Lisbon** and the second **left**"."""
    pieces: list[Piece] = []
    for column in columns:
        pieces += [Piece(" and ")] if pieces else []
        pieces += _named(att, column, role)
    return pieces


def as_text(pieces: Sequence[Piece]) -> str:
    """The sentence as plain text, quotes instead of emphasis."""
    return "".join(f"“{piece.text}”" if piece.role else piece.text for piece in pieces)


def as_markdown(pieces: Sequence[Piece], escape: Callable[[str], str]) -> str:
    """The sentence as Markdown, in which no text is taken for mark-up."""
    marks = {"": "", "said": "**", "cause": "**", "instead": "*"}
    texts: list[str] = []
    for piece in pieces:
        mark = marks[piece.role]
        texts.append(f"{mark}{escape(piece.text)}{mark}")
    return "".join(texts)


# ---- what the model says ------------------------------------------------------------------------


_BECAUSE = ", most of all because of "


def _claim(att: AttributionRecord, row: int) -> tuple[list[Piece], str]:
    """The target and how sure the model is of it; then the words before the strongest unit."""
    target = att.targets[row]
    said = _said(target)
    if "of" in att.info:
        of = label(str(att.info["of"]))
        return [Piece(f"The value of {of} at "), said], " is due most of all to "
    if att.foil is not None:
        return _claim_of_two(target, att.foil)
    share = answers_text(target, att.info) or _share(target)
    if target.rank == 1:
        return [Piece("The model says "), said, Piece(f" ({share})" if share else "")], _BECAUSE
    if share:
        return [Piece("The model gives "), said, Piece(f" a chance of {share}")], _BECAUSE
    because = ". The strongest reason for it is "
    return [Piece("The model would not say "), said, Piece(" by itself")], because


def _claim_of_two(target: Target, foil: Target) -> tuple[list[Piece], str]:
    """The target and its foil, the more probable one first where both are single tokens."""
    said = _said(target)
    other = _said(foil)
    if target.rest or foil.rest:  # their probabilities are means over tokens
        pair = [Piece("The strongest reason for "), said, Piece(" rather than "), other]
        return pair, " is "
    of_target = Piece(f" ({_share(target)})")
    of_foil = Piece(f" ({_share(foil)})")
    if target.rank == 1:
        return [
            Piece("The model says "),
            said,
            of_target,
            Piece(" rather than "),
            other,
            of_foil,
        ], _BECAUSE
    if target.probability >= foil.probability:
        finds = [
            Piece("The model finds "),
            said,
            of_target,
            Piece(" likelier than "),
            other,
            of_foil,
        ]
        return finds, _BECAUSE
    finds = [Piece("The model finds "), other, of_foil, Piece(" likelier than "), said, of_target]
    return finds, f". The strongest reason for “{said.text}” is "


def _said(target: Target) -> Piece:
    text = label(target.text)
    if " " in text:
        text = text.rstrip(".")  # the sentence goes on
    return Piece(shorten(text, _LONGEST), "said")


def _share(target: Target, probability: float | None = None) -> str:
    """A target's probability in percent; "" for several words, of which it is no plain number."""
    text = probability_text(target, probability)
    return "" if text.endswith("per token") else text


# ---- because of what ----------------------------------------------------------------------------


def _reason(att: AttributionRecord, row: int, because: str) -> list[Piece]:
    """The strongest units, and what the model says without the first of them."""
    scores = att.scores[row]
    with_score = scores[~scores.isnan()]
    if not len(with_score):
        return []
    are_equal = bool((with_score == with_score[0]).all())
    if len(with_score) > 1 and are_equal and with_score[0] != 0:
        return [Piece(f"; all {_noun(att)}s have the same score")]
    unasked: Sequence[int] = att.info.get("unasked") or ()
    if unasked:
        messages = "messages" if len(unasked) > 1 else "message"
        results = " and ".join(str(message) for message in unasked)
        cause = Piece(f"{messages} {results}", "cause")
        begin = [Piece(". A tool's result speaks for it, "), cause]
        return [*begin, *_most_inside(att, row, unasked), Piece("; the user does not")]
    strongest = _strongest(att, row)
    if strongest is None:
        return _reason_against(att, row)
    column, is_largest = strongest
    entry = None if att.without is None else att.without[row][column]
    if entry is not None and _hardly_changes(att, row, entry):
        changed = _changed_share(att.targets[row], entry)
        begin = Piece(f"; no single {_noun(att)} matters much")
        either = [pair for pair in att.pairs if pair.target == row and pair.kind == "either"]
        if either:
            first, second = either[0].units
            one = [*_named(att, first), Piece(" or "), *_named(att, second)]
            return [begin, Piece(", since either "), *one, Piece(" would do")]
        if not changed:
            return [begin]
        return [begin, Piece(" (without "), *_named(att, column), Piece(f" {changed})")]
    without = [] if entry is None else _without(att, row, entry)
    words = _because(att, because)
    if not is_largest:
        words = words.replace("most of all", "not least")
    named = [Piece(words), *_named(att, column)]
    own_units = _own_units(att)
    if column not in own_units:
        return [*named, *without]
    own = Piece(", its own earlier message")
    return [*named, own, *without, *_strongest_of_others(att, row, own_units)]


def _most_inside(att: AttributionRecord, row: int, messages: Sequence[int]) -> list[Piece]:
    """The strongest part of some messages of a chat; nothing where these are units themselves."""
    message_of = message_of_units(att)
    columns = [column for column in with_signal(att, row) if message_of.get(column) in messages]
    if att.unit == "turn" or not columns:
        return []
    strongest = max(columns, key=lambda column: float(att.scores[row, column]))
    return [Piece(", most of all by "), *_named(att, strongest)]


def _own_units(att: AttributionRecord) -> set[int]:
    """The columns of the units in earlier messages of the model itself."""
    messages = chat_messages(att)
    own: set[int] = set()
    for column, message in message_of_units(att).items():
        if messages[message].get("role") == "assistant":
            own.add(column)
    return own


def _strongest_of_others(
    att: AttributionRecord, row: int, own_units: Collection[int]
) -> list[Piece]:
    """What speaks most for the target of all that the model has not said itself.

    A model that has made one call writes the next one alike, which says nothing of what it was
    asked or told.
    """
    scores = floats(att.scores[row])
    others: list[int] = []
    for column in with_signal(att, row):
        if scores[column] > 0 and column not in own_units:
            others.append(column)
    if not others:
        return []
    strongest = max(others, key=scores.__getitem__)
    return [Piece("; of what others said, most of all because of "), *_named(att, strongest)]


def _strongest(att: AttributionRecord, row: int) -> tuple[int, bool] | None:
    """The unit that speaks most for the target; of units that are level with it, the first.

    The second value says whether it has the largest score.

    Units are level if their scores differ by at most two standard errors of the difference. The
    last words before a target often only decide which kind of word follows, so that the first unit
    says more.
    """
    scores = floats(att.scores[row])
    errors = errors_of(att, row)
    columns = [column for column in with_signal(att, row) if scores[column] > 0]
    if not columns:
        return None
    best = columns[0]
    level: list[int] = []
    for column in columns:
        error = math.hypot(errors[best], errors[column])
        # Written so that a standard error of NaN, which is none, is not level.
        if column == best or scores[best] - scores[column] <= 2 * error:
            level.append(column)
    first = min(level, key=lambda column: att.units[column].start)
    return first, first == best


def _because(att: AttributionRecord, because: str) -> str:
    """The words before the strongest unit.

    Only methods that change the input and run the model say that something is because of a unit.
    """
    if "through" in att.info:
        return ", written most of all under the influence of "
    if _changes_the_input(att):
        return because
    by = f" by {label(method_text(att, version=False))}"
    if because == _BECAUSE:
        return f"; what counts most{by} is "
    return f"{because.removesuffix(' ')}{by}: "


def _changes_the_input(att: AttributionRecord) -> bool:
    is_noise = unversioned(att.method) in ("noiser", "noiser_relative")
    return is_noise or "removal" in att.parameters


def _reason_against(att: AttributionRecord, row: int) -> list[Piece]:
    """No unit speaks for the target."""
    noun = _noun(att)
    signals = with_signal(att, row)
    found = att.info.get("found")
    if found and found[row].get("memory"):  # of `search`, which then asks no further
        return [Piece(f"; without any {noun} it says so, too")]
    if not signals:
        # Only who has run the prompt without each unit can say that none matters.
        if att.without is None and "removal" not in att.parameters:
            by = label(method_text(att, version=False))
            return [Piece(f"; {by} finds no {noun} with a clear effect")]
        return [Piece(f"; no single {noun} matters much")]
    against = _named(att, signals[0])
    return [Piece(f"; no {noun} speaks for it, and "), *against, Piece(" speaks most against it")]


def _named(att: AttributionRecord, column: int, role: Role = "cause") -> list[Piece]:
    """A unit by its text; of several with the same text by its number among them."""
    texts = [plain_label(unit.text) for unit in att.units]
    same = [index for index, text in enumerate(texts) if text == texts[column]]
    words = ""
    if len(same) > 1:
        place = same.index(column)
        if place < len(_ORDINALS):
            words = f"the {_ORDINALS[place]} "
        else:
            words = f"number {place + 1} of "
    if att.units[column].start >= att.prompt_length:
        words = f"its own {words.removeprefix('the ')}"
    return [Piece(words), Piece(texts[column], role)]


def plain_label(text: str) -> str:
    """A unit's text in one line, a word without the punctuation that it touches."""
    shown = label(text)
    if len(shown.split()) == 1:
        shown = shown.strip(_PUNCTUATION) or shown
    return shorten(shown, _LONGEST)


def _noun(att: AttributionRecord) -> str:
    return "part" if pictures_of(att) else _NOUNS.get(att.unit, "part")


# ---- what it says without it --------------------------------------------------------------------


def _hardly_changes(att: AttributionRecord, row: int, entry: Without) -> bool:
    """Whether the model still says the target, hardly less surely."""
    target = att.targets[row]
    if att.foil is not None or "of" in att.info or not target.probability:
        return False
    left = (entry.probability / target.probability) ** len(target.token_ids)
    # A target that is not what the model says first has no lead to lose.
    still_leads = target.rank > 1 or entry.leader == target.text
    return left >= _HARDLY_CHANGED and still_leads


def _without(att: AttributionRecord, row: int, entry: Without) -> list[Piece]:
    """What the model says without the strongest unit; nothing where that says little."""
    target = att.targets[row]
    begin = "; without it, it would "
    changed = _changed_share(target, entry)
    if target.rank == 1 and entry.leader != target.text:
        leader = label(entry.leader)
        ends = leader.startswith("<") and leader.endswith(">")
        is_word = any(map(str.isalnum, leader)) and not ends
        if len(target.text.split()) > 1:
            says = [Piece(f"{begin}say something else")]
            if is_word and entry.leader != ANOTHER_ANSWER:
                says += [Piece(", from "), Piece(leader, "instead"), Piece(" on")]
            return says
        if ends:
            return [Piece(f"{begin}say nothing")]
        if is_word:
            chance = percentage(entry.leader_probability)
            if entry.leader_probability < _GUESS:
                begin = "; without it, its first guess would be "
                return [Piece(begin), Piece(leader, "instead"), Piece(f" (only {chance})")]
            return [Piece(f"{begin}say "), Piece(leader, "instead"), Piece(f" ({chance})")]
    if changed:
        return [Piece(f"; without it {changed}")]
    if entry.probability < target.probability:
        return [Piece("; without it, that would be less likely")]
    return []


def _changed_share(target: Target, entry: Without) -> str:
    """The two probabilities, such as "36 % becomes 4 %"; "" for several words, or where both look
    the same.
    """
    before = _share(target)
    after = _share(target, entry.probability)
    return f"{before} becomes {after}" if before and before != after else ""
