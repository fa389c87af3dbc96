"""`noiser.slim`: the shortest prompt under which every case keeps its answer."""

from __future__ import annotations

import difflib
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from noiser.attribution.store import SavedNumber, restored, to_jsonable
from noiser.checks import (
    check_choice,
    check_count,
    check_not_negative,
    check_positive,
    check_seed,
)
from noiser.engine import Query, prepare
from noiser.errors import ParameterError, PromptError
from noiser.explain.clauses import ClausePlace, Clauses
from noiser.explain.many import encoded_together, run_many
from noiser.explain.sameness import SHORT
from noiser.explain.tabled import TabledResult
from noiser.model.language_model import LanguageModel, check_model, check_probabilities
from noiser.numbers import wilson
from noiser.progress import progress_of
from noiser.text import SEGMENTATIONS, Encoding, check_messages
from noiser.types import STAYS, Place, Progress, Prompt, Question

SlimUnit = Literal["sentence", "line", "paragraph"]

FEWEST_CASES = 4
"""Fewer cases say nothing about a prompt."""

_PLACEHOLDER = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{[A-Za-z_]\w*\}|\$\{.*?\}", re.DOTALL)

SlimCase = Mapping[str, Any]
"""{"user": text} or {"messages": [...]}: what follows the prompt."""


class Part(NamedTuple):
    """A sentence, line or paragraph of the prompt.

    Attributes:
        text: its characters.
        kept: whether it is in the shorter prompt.
        changed: how many of the cases that took part change their answer when the part is taken
            out: from the shorter prompt if it was kept, from the whole prompt if not.
        case: index of the case whose answer loses most; None if the part was never tried.
        nats: what that answer loses.
        reason: why it was kept or went, as a sentence.
    """

    text: str
    kept: bool
    changed: int
    case: int | None
    nats: SavedNumber
    reason: str


@dataclass(frozen=True, kw_only=True)
class Slim(TabledResult):
    """A shorter prompt under which the answers stay, and why each part was kept.

    Attributes:
        before: the prompt.
        after: the shorter prompt.
        tokens_before: its tokens, as the model's tokenizer cuts the text alone.
        tokens_after: those of the shorter prompt.
        fitted: how many cases took part.
        fitted_same: on how many of these the answer stays.
        held_out: how many cases were only tried at the end.
        held_out_same: on how many of these the answer stays.
        parts: every part of the prompt, in its order.
    """

    title: ClassVar[str] = "A shorter prompt"

    before: str
    after: str
    tokens_before: Place
    tokens_after: Place
    fitted: Place
    fitted_same: Place
    held_out: Place
    held_out_same: Place
    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        if self.tokens_before < 1:
            raise ParameterError("tokens_before is 0; expected those of a prompt.")
        if self.fitted_same > self.fitted or self.held_out_same > self.held_out:
            raise ParameterError(
                f"the answer stays on {self.fitted_same} of {self.fitted} and {self.held_out_same} "
                f"of {self.held_out} cases; expected at most all."
            )

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the share of other cases whose answer stays."""
        return wilson(self.held_out_same, self.held_out)

    def facts(self) -> list[str]:
        """The lengths, and on how many cases the answer stays."""
        share = self.tokens_after / self.tokens_before - 1
        low, high = self.interval
        return [
            f"{self.tokens_before:,} -> {self.tokens_after:,} tokens ({share:+.0%}). The answer "
            f"stays on {self.fitted_same} of {self.fitted} cases, on {self.held_out_same} of "
            f"{self.held_out} held out ({low:.2f} to {high:.2f})."
        ]

    def table(self) -> list[list[str]]:
        """One row per part."""
        rows = [["", "part", "reason"]]
        for part in self.parts:
            rows.append(["kept" if part.kept else "gone", repr(part.text.strip()), part.reason])
        return rows

    def diff(self) -> str:
        """Both texts as a unified diff."""
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), "before", "after", lineterm=""
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file as plain dicts, lists, texts and numbers."""
        return {"format": "noiser.slim", "schema": 1, **to_jsonable(vars(self))}

    @classmethod
    def from_dict(cls, data: Any) -> Slim:
        """The result whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.slim"], data)


def slim(
    lm: LanguageModel,
    prompt: str,
    cases: Sequence[SlimCase],
    *,
    unit: SlimUnit = "sentence",
    keep: Sequence[str] = (),
    hold_out: float = 0.3,
    limit: float = STAYS,
    max_new_tokens: int = 16,
    seed: int = 0,
    progress: Progress | bool | None = None,
) -> Slim:
    """A shorter prompt under which every case keeps its answer, tried on cases held out.

    Parts are taken out as text, first those without which the answers lose least: halves, then
    single parts, until none can go. An answer of up to 5 tokens stays if each of its tokens stays
    the most probable one and it loses less than `limit` nats; a longer answer stays if it loses
    less than `limit`.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: the text that stands before every case: the system's message of a chat.
        cases: at least 4. {"user": text}, or {"messages": [...]} without the system's message.
        unit: "sentence", "line" or "paragraph": the parts that can go.
        keep: texts whose parts always stay. So do placeholders, such as {{name}}.
        hold_out: the share of cases that take no part and are tried at the end.
        limit: see above.
        max_new_tokens: the most tokens of an answer.
        seed: of the choice of cases to hold out.
        progress: called with (done, expected) parts; None: a bar; False: none.

    Raises:
        ParameterError: fewer than 4 cases, none held out, or none left.
        PromptError: a text of `keep` does not stand in the prompt, or it has a single part.

    Example:
        >>> print(noiser.slim(lm, system, [{"user": text} for text in texts]))  # doctest: +SKIP
    """
    check_model(lm)
    check_probabilities(lm, "a shorter prompt")
    check_choice("unit", unit, ("sentence", "line", "paragraph"))
    check_positive("limit", limit)
    check_count("max_new_tokens", max_new_tokens)
    fitted, held_out = _split(cases, hold_out, check_seed(seed))
    text = Clauses(prompt)
    places = _parts(text, unit)
    if len(places) < 2:
        plural = "s" if not places else ""
        raise PromptError(
            f"The prompt has {len(places)} {unit}{plural}; expected at least two, to leave one out."
        )
    fixed = _fixed(text, places, keep)
    for number, case in enumerate(cases, 1):
        try:
            _prompt_of(lm, prompt, case)
        except (ParameterError, PromptError) as error:
            raise type(error)(f"Case {number}: {error}") from None

    trial = _SlimTrial(lm, text, places, limit, max_new_tokens)
    whole = frozenset(range(len(places)))
    fitted_answers = trial.answers([cases[index] for index in fitted])
    held_out_answers = trial.answers([cases[index] for index in held_out])
    free = [part for part in range(len(places)) if part not in fixed]
    with progress_of(progress, "Slimming") as report:
        alone: dict[int, list[_SlimEffect]] = {}
        for done, part in enumerate(free):
            alone[part] = trial.effects(whole - {part}, fitted_answers)
            if report:
                report(done + 1, 2 * len(free))
        losses = {part: sum(effect.loss for effect in alone[part]) for part in free}
        order = sorted(free, key=lambda part: losses[part])

        def all_stay(kept: frozenset[int]) -> bool:
            return all(effect.stays for effect in trial.effects(kept, fitted_answers))

        kept = _shrink(whole, order, all_stay)
        needed: dict[int, list[_SlimEffect]] = {}
        for part in sorted(kept - fixed):
            needed[part] = trial.effects(kept - {part}, fitted_answers)
        if report:
            report(2 * len(free), 2 * len(free))

    parts: list[Part] = []
    for index, place in enumerate(places):
        effects = needed.get(index) if index in kept else alone.get(index)
        parts.append(_part(text.text(place), index in kept, effects, fitted))
    after = trial.text(kept)
    return Slim(
        before=prompt,
        after=after,
        tokens_before=len(lm.tokenizer(prompt)["input_ids"]),
        tokens_after=len(lm.tokenizer(after)["input_ids"]),
        fitted=len(fitted),
        fitted_same=sum(effect.stays for effect in trial.effects(kept, fitted_answers)),
        held_out=len(held_out),
        held_out_same=sum(effect.stays for effect in trial.effects(kept, held_out_answers)),
        parts=tuple(parts),
    )


def _split(cases: Sequence[SlimCase], hold_out: float, seed: int) -> tuple[list[int], list[int]]:
    """The indices of the cases that take part, and of those that are held out."""
    count = len(cases)
    if count < FEWEST_CASES:
        raise ParameterError(f"Got {count} cases; expected at least {FEWEST_CASES}.")
    check_not_negative("hold_out", hold_out)
    held = round(count * hold_out)
    if not 0 < held < count:
        raise ParameterError(
            f"hold_out is {hold_out!r}, {held} of {count} cases; expected a share that holds out "
            "at least one case and leaves at least one."
        )
    order = random.Random(seed).sample(range(count), count)
    return sorted(order[held:]), sorted(order[:held])


def _parts(text: Clauses, unit: SlimUnit) -> list[ClausePlace]:
    prompt = text.texts[0]
    places: list[ClausePlace] = []
    for start, end in SEGMENTATIONS[unit](prompt):
        if prompt[start:end].strip():
            places.append(ClausePlace(0, start, end))
    return places


def _fixed(text: Clauses, places: Sequence[ClausePlace], keep: Sequence[str]) -> frozenset[int]:
    """The parts that always stay: those with a placeholder or a text of `keep`."""
    staying: list[ClausePlace] = []
    for index, clause in enumerate(keep):
        staying += text.found(clause, f"keep[{index}]")
    for match in _PLACEHOLDER.finditer(text.texts[0]):
        staying.append(ClausePlace(0, match.start(), match.end()))
    fixed: list[int] = []
    for index, place in enumerate(places):
        if any(place.overlaps(other) for other in staying):
            fixed.append(index)
    return frozenset(fixed)


def _shrink(
    whole: frozenset[int], order: Sequence[int], all_stay: Callable[[frozenset[int]], bool]
) -> frozenset[int]:
    """Delta debugging: the parts that are left when no block of `order`, at last no part, can
    go.
    """
    kept = whole
    size = max(1, len(order) // 2)
    while True:
        removed_any = False
        remaining = [part for part in order if part in kept]
        for start in range(0, len(remaining), size):
            block = frozenset(remaining[start : start + size])
            if all_stay(kept - block):
                kept -= block
                removed_any = True
        if size > 1:
            size = max(1, size // 2)
        elif not removed_any:
            return kept


class _SlimEffect(NamedTuple):
    """What a shortened prompt does to the answer of a case."""

    loss: float
    stays: bool


class _Answer(NamedTuple):
    """A case, and the model's answer to it after the whole prompt."""

    case: SlimCase
    ids: tuple[int, ...]
    log_p: float


class _SlimTrial:
    """Cases after prompts that have some of the parts."""

    def __init__(
        self,
        lm: LanguageModel,
        text: Clauses,
        places: Sequence[ClausePlace],
        limit: float,
        max_new_tokens: int,
    ) -> None:
        self._lm = lm
        self._text = text
        self._places = places
        self._limit = limit
        self._max_new_tokens = max_new_tokens
        # By the parts that are kept and the identity of an answer: two cases may be equal, and a
        # case cannot be hashed. The caller holds its answers as long as the trial.
        self._known: dict[tuple[frozenset[int], int], _SlimEffect] = {}

    def text(self, kept: frozenset[int]) -> str:
        """The prompt with some of its parts."""
        gone = [place for index, place in enumerate(self._places) if index not in kept]
        shortened = self._text.without(gone)
        assert isinstance(shortened, str)
        return shortened

    def answers(self, cases: Sequence[SlimCase]) -> list[_Answer]:
        """The greedy answers after the whole prompt."""
        prompts = [_prompt_of(self._lm, self._text.texts[0], case) for case in cases]

        async def answer(case: SlimCase, prompt: Prompt, encoding: Encoding) -> _Answer:
            stop = "\n" if isinstance(prompt, str) else None
            question = Question(
                prompt=prompt,
                target_unit="all",
                max_new_tokens=self._max_new_tokens,
                stop=stop,
            )
            query = await prepare(self._lm, question, encoding)
            return _Answer(case, query.target_ids, _log_p(query))

        with encoded_together(self._lm, prompts) as encodings:
            works = [answer(*each) for each in zip(cases, prompts, encodings, strict=True)]
            return run_many(self._lm, works)

    def effects(self, kept: frozenset[int], answers: Sequence[_Answer]) -> list[_SlimEffect]:
        """What the prompt with some parts does to each answer, all in one batch."""
        text = self.text(kept)

        async def effect(answer: _Answer, prompt: Prompt, encoding: Encoding) -> _SlimEffect:
            question = Question(prompt=prompt, target=answer.ids, target_unit="all")
            query = await prepare(self._lm, question, encoding)
            loss = answer.log_p - _log_p(query)
            tokens_stay = query.targets[0].rank == 1 or len(answer.ids) > SHORT
            return _SlimEffect(loss, tokens_stay and loss < self._limit)

        unknown = [answer for answer in answers if (kept, id(answer)) not in self._known]
        if unknown:
            prompts = [_prompt_of(self._lm, text, answer.case) for answer in unknown]
            with encoded_together(self._lm, prompts) as encodings:
                works = [effect(*each) for each in zip(unknown, prompts, encodings, strict=True)]
                found = run_many(self._lm, works)
            for answer, value in zip(unknown, found, strict=True):
                self._known[kept, id(answer)] = value
        return [self._known[kept, id(answer)] for answer in answers]


def _log_p(query: Query) -> float:
    return float(query.read_clean(query.objective("logprob")))


def _prompt_of(lm: LanguageModel, text: str, case: SlimCase) -> Prompt:
    """The prompt and a case after it: a chat, or for a model without a template a text."""
    if not isinstance(case, Mapping) or ("user" in case) == ("messages" in case):
        raise ParameterError(
            f'It is {json.dumps(case, default=str)[:80]}; expected {{"user": text}} or '
            '{"messages": [...]}.'
        )
    user = case.get("user")
    if "user" in case and not isinstance(user, str):
        raise ParameterError(f"The user is {user!r:.60}; expected a text.")
    messages = [{"role": "user", "content": user}] if "user" in case else case["messages"]
    if not lm.chats and "user" in case:
        return f"{text}\n\n{user}"
    before = [{"role": "system", "content": text}] if text.strip() else []
    return [*before, *check_messages(messages)]


def _part(
    text: str, kept: bool, effects: Sequence[_SlimEffect] | None, fitted: Sequence[int]
) -> Part:
    """A part and why it was kept or went."""
    if effects is None:
        return Part(text, kept, 0, None, math.nan, "always kept")
    changed = sum(not effect.stays for effect in effects)
    strongest = max(range(len(effects)), key=lambda index: effects[index].loss)
    nats = effects[strongest].loss
    case = fitted[strongest]
    if kept:
        reason = f"needed by {changed} case{'s' if changed != 1 else ''}"
    elif changed:
        reason = "other parts that were kept are enough"
    elif nats < 0.05:
        reason = "no case needs it"
    else:
        reason = f"changes case {case + 1} by {nats:.1f} nats, not its answer"
    return Part(text, kept, changed, case, nats, reason)
