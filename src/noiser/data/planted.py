"""Planted facts: prompts made by a program, so that the part that decides the answer is known.

Every prompt has sentences and a question. The span "gold" are the sentences that decide the answer;
"other" are the rest, of the same form. `Example.without` are prompts that lack gold sentences and
so the answer: if a fact is in two parts, they lack both parts, the first, or the second.
`Example.enough` are prompts that lack sentences which are not needed, such as one of two copies.
Where a model gives the answer exactly where it should, the labels are true of it. The place of the
first gold sentence goes evenly through the prompt, so that scores that only know positions are at
chance.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from noiser.checks import check_choice, check_count
from noiser.data.dataset import DATA_SETS, Example, LoadedExamples, Provenance, Recipe
from noiser.data.wordings import (
    ASIDES,
    CHAINS,
    COLOURS,
    DEVELOPMENT,
    PEOPLE,
    REPORTING,
    STEMS,
    THINGS,
    WORDINGS,
)
from noiser.data.wordings import ROOMS as ROOMS
from noiser.errors import ParameterError

SOURCE = Provenance(
    files=(), licence="that of this package", citation="made by a program of this package"
)

SENTENCES = (3, 6, 12, 24, 48, 96, 192)
"""How many sentences stand before the question: about 40 to 2,000 tokens."""

MORE = {"twice": (20,), "combined": (20,)}
"""Further lengths of prompts with two gold sentences."""

REPEATS = 20
"""Prompts of each category and length; two for each, one per answer, where two passages are in
conflict.
"""


class _Planted(NamedTuple):
    """Sentences in order, which of them decide, and the question that ends in front of the answer.

    `missing` are sets of sentences without any of which no answer can be known; `spare`, sets that
    it does not need.
    """

    sentences: list[str]
    gold: tuple[int, ...]
    question: str
    answer: str | None
    missing: tuple[tuple[int, ...], ...] = ()
    spare: tuple[tuple[int, ...], ...] = ()
    other_side: tuple[int, ...] = ()

    def lacking(self, some: tuple[int, ...]) -> str:
        """The prompt without some of the sentences."""
        kept = [sentence for i, sentence in enumerate(self.sentences) if i not in some]
        return " ".join([*kept, self.question])


def read_planted(paths: Mapping[str, Path]) -> LoadedExamples:  # noqa: ARG001 - nothing is read
    """All prompts, the same in every run. Spans: "gold", the sentences that decide the answer;
    "other", all others.
    """
    kinds = [
        (category, count)
        for category in CATEGORIES
        for count in sorted((*SENTENCES, *MORE.get(category, ())))
    ]
    note = (
        "Made by a program. An answer counts as right only if it changes when the gold sentences "
        "are taken out (if the "
        "fact is in two parts, when either is), and not when a copy is or documents that do not "
        "matter are."
    )
    return LoadedExamples([example for kind in kinds for example in draw(*kind)], (note,))


def draw(category: str, sentences: int, seed: int = 0, wording: int = 0) -> list[Example]:
    """Prompts of a category and length: those of the data set, or with another seed or wording as
    many others.

    Args:
        category: a name of `CATEGORIES`.
        sentences: how many stand before the question.
        seed: of people, things and places.
        wording: how facts are told and asked, see `noiser.data.wordings`. Wordings of `DEVELOPMENT`
            (0 to 4) are for choosing limits; those of `REPORTING` (5 to 9) are for reporting.
            "combined" has wording 0 alone.

    Raises:
        UnknownNameError: no such category. ParameterError: fewer than two sentences, or no such
            wording.
    """
    check_choice("category", category, list(CATEGORIES))
    check_count("sentences", sentences, least=2)
    known = (0,) if category == "combined" else (*DEVELOPMENT, *REPORTING)
    if wording not in known:
        raise ParameterError(
            f"wording is {wording!r}; expected a number from 0 to {known[-1]} for {category!r}."
        )
    return [
        example
        for repeat in range(REPEATS)
        for example in _examples(category, sentences, repeat, seed, wording)
    ]


def _examples(category: str, count: int, repeat: int, seed: int, wording: int) -> Iterator[Example]:
    """The prompts of one draw: one, or both sides of a conflict."""
    suffix = (f"~{wording}" if wording else "") + (f"/{seed}" if seed else "")
    chance = random.Random(f"planted/{category}/{count}/{repeat}{suffix}")
    cases = list(CATEGORIES[category](_Facts(chance, count, repeat, wording)))
    for case, variant in zip(cases, "ab" if len(cases) > 1 else [""], strict=False):
        meta = {"sentences": count, "wording": wording}
        if case.gold:
            meta["depth"] = round(100 * case.gold[0] / (count - 1))
        yield Example(
            id=f"planted-{category}-{count}-{repeat}{variant}{suffix}",
            prompt=case.lacking(()),
            without=tuple(case.lacking(places) for places in case.missing),
            enough=tuple(case.lacking(places) for places in case.spare),
            target=case.answer,
            dataset="planted",
            category=category,
            spans=_named_spans(case),
            meta=meta,
        )


def _named_spans(case: _Planted) -> dict[str, tuple[tuple[int, int], ...]]:
    """The character spans of the gold sentences, of those of the other side, and of all others."""
    spans: list[tuple[int, int]] = []
    start = 0
    for sentence in case.sentences:
        spans.append((start, start + len(sentence)))
        start += len(sentence) + 1
    gold = sorted(case.gold)
    other_side = sorted(case.other_side)
    others = [place for place in range(len(spans)) if place not in (*gold, *other_side)]
    named = {"gold": gold, "other": others}
    if other_side:
        named = {"gold": gold, "other_side": other_side, "other": others}
    return {name: tuple(spans[place] for place in places) for name, places in named.items()}


class _Facts:
    """Draws people, things and values, no pair of person and thing twice."""

    def __init__(self, random: random.Random, count: int, repeat: int, wording: int) -> None:
        self.random = random
        self.count = count
        self.repeat = repeat
        self.wording = WORDINGS[wording]
        self.number = wording
        self.pairs = random.sample(
            [(person, thing) for person in PEOPLE for thing in THINGS], count + 2
        )
        self.values = random.sample(self.wording.values, len(self.wording.values))
        self.person, self.thing = self.pairs.pop()
        self.value, self.other_value = self.values[:2]
        self.question = self.wording.question.format(person=self.person, thing=self.thing)

    def fact(self, value: str) -> str:
        """A sentence that answers the question."""
        return self.tell(self.person, self.thing, value)

    def tell(self, person: str, thing: str, value: str) -> str:
        """A sentence about any person."""
        return self.wording.fact.format(person=person, thing=thing, value=value)

    def elsewhere(self) -> str:
        """A value that is neither the answer nor that of the other side."""
        return self.random.choice(self.values[2:])

    def places(self, planted: int) -> tuple[int, ...]:
        """Places of planted sentences: the first where the repeat says, the rest anywhere."""
        first = round(self.repeat / (REPEATS - 1) * (self.count - 1))
        left = [i for i in range(self.count) if i != first]
        return (first, *self.random.sample(left, planted - 1)) if planted else ()

    def others(self, count: int) -> list[str]:
        """Sentences about other people."""
        return [self.tell(person, thing, self.elsewhere()) for person, thing in self.pairs[:count]]

    def place(self, *planted: str) -> tuple[list[str], tuple[int, ...]]:
        """The planted sentences among others, and their places."""
        places = self.places(len(planted))
        return _merged(self.others(self.count - len(planted)), planted, places), places


def _merged(others: Sequence[str], planted: Sequence[str], places: Sequence[int]) -> list[str]:
    """Others in order, and each planted sentence at its place."""
    sentences = [*others]
    for index, sentence in sorted(zip(places, planted, strict=True)):
        sentences.insert(index, sentence)
    return sentences


def _told(times: int, facts: _Facts) -> Iterator[_Planted]:
    """The fact, or copies of it, each of which is enough."""
    sentences, gold = facts.place(*[facts.fact(facts.value)] * times)
    spare = tuple((place,) for place in gold) if times > 1 else ()
    yield _Planted(sentences, gold, facts.question, facts.value, (gold,), spare)


def _conflict(facts: _Facts, marked: bool) -> Iterator[_Planted]:
    """Two passages disagree: two examples of one prompt, of which at most one has the answer that a
    model gives.
    """
    values = (facts.value, facts.other_value)
    sentences, places = facts.place(*map(facts.fact, values))
    for place, other, value in zip(places, places[::-1], values, strict=True):
        other_side = (other,) if marked else ()
        yield _Planted(
            sentences, (place,), facts.question, value, ((place,),), other_side=other_side
        )


def _combined(facts: _Facts) -> Iterator[_Planted]:
    """Neither sentence says it alone."""
    colour = facts.random.choice(COLOURS)
    sentences, gold = facts.place(
        f"{facts.person} keeps the {facts.thing} in the {colour} box.",
        f"The {colour} box is in the {facts.value}.",
    )
    missing = (gold, *((part,) for part in gold))
    yield _Planted(sentences, gold, facts.question, facts.value, missing)


def _shared(facts: _Facts) -> Iterator[_Planted]:
    """Others have as many words of question and answer as the fact, which stands in a longer
    sentence.

    Of the others in turn, one has all of these words and does not say it; three have two of person,
    thing and value. One of these three is the longest sentence, so that length does not find the
    fact either.
    """
    (place,) = facts.places(1)
    asides = facts.random.sample(ASIDES, 3)
    pairs = [pair for pair in facts.pairs if facts.person != pair[0] and facts.thing != pair[1]]
    others: list[str] = []
    for index, (person, thing) in zip(range(facts.count - 1), itertools.cycle(pairs), strict=False):
        if index % 4 == 0:
            told = facts.tell(facts.person, thing, facts.elsewhere())
            others.append(_with_aside(_with_aside(told, asides[1]), asides[2]))
        elif index % 4 == 1:
            told = facts.tell(person, facts.thing, facts.elsewhere())
            others.append(_with_aside(told, f"{facts.person} says, not {facts.value}"))
        elif index % 4 == 2:
            others.append(facts.tell(person, facts.thing, facts.elsewhere()))
        else:
            others.append(facts.tell(person, thing, facts.value))
    facts.random.shuffle(others)
    fact = _with_aside(facts.fact(facts.value), asides[0])
    sentences = _merged(others, [fact], [place])
    yield _Planted(sentences, (place,), facts.question, facts.value, ((place,),))


def _with_aside(sentence: str, aside: str) -> str:
    return f"{sentence.removesuffix('.')}, {aside}."


def _none(facts: _Facts) -> Iterator[_Planted]:
    """The question of the next wording, about a person and a thing of which the sentences say
    something else.
    """
    sentences, _ = facts.place(facts.fact(facts.value))
    half = DEVELOPMENT if facts.number in DEVELOPMENT else REPORTING
    asked = half[(facts.number - half[0] + 1) % len(half)]
    question = WORDINGS[asked].question.format(person=facts.person, thing=facts.thing)
    yield _Planted(sentences, (), question, None)


def _two(facts: _Facts) -> Iterator[_Planted]:
    """A fact in two sentences of which neither says it alone, among those of other chains."""
    chain = CHAINS[facts.number]
    chance = facts.random
    places = facts.places(2)
    starts = chance.sample(chain.starts, len(chain.starts) // 2)
    middles = [
        middle
        for middle in chance.sample(chain.middles, len(chain.middles))
        if middle not in starts
    ]
    start = starts.pop()
    middle = middles.pop()
    values = chance.sample(chain.values, len(chain.values))
    value = values.pop()
    planted = chain.sentences(start, middle, value)

    # Other chains follow each other, both sentences of each. Long prompts repeat their words.
    others: list[str] = []
    words = zip(*map(itertools.cycle, (starts, middles, values)), strict=True)
    while len(others) < facts.count - 2:
        others += chain.sentences(*next(words))
    others = others[: facts.count - 2]
    chance.shuffle(others)
    sentences = _merged(others, planted, places)
    missing = (places, *((place,) for place in places))
    yield _Planted(sentences, places, chain.question.format(start=start), value, missing)


def _irrelevant(facts: _Facts) -> Iterator[_Planted]:
    """A beginning that a model goes on with by itself: no sentence is needed."""
    sentences, _ = facts.place()
    own = STEMS[facts.number :: len(WORDINGS)]
    stem, answer = own[facts.repeat % len(own)]
    yield _Planted(sentences, (), stem, answer, spare=(tuple(range(len(sentences))),))


CATEGORIES: Mapping[str, Callable[[_Facts], Iterator[_Planted]]] = {
    "once": partial(_told, 1),
    "twice": partial(_told, 2),
    "conflict": partial(_conflict, marked=False),
    "combined": _combined,
    "shared": _shared,
    "contradiction": partial(_conflict, marked=True),
    "none": _none,
    "two": _two,
    "irrelevant": _irrelevant,
}
"""Each category and what makes its prompts."""

DATA_SETS.register(
    "planted",
    lambda: Recipe(source=SOURCE, read=read_planted),
    summary="made-up facts among distractors: what decides the answer is known",
)
