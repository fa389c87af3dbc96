"""Planted facts: prompts made by a program, so that the part that decides the answer is known.

Every prompt has a question, sentences that answer it (the span "gold"), and sentences of the same form about other
people. `Example.without` has prompts that lack gold sentences: where a model says the answer with all of them and
something else without, they decided. If a fact is in two parts, these prompts lack both parts, the first, or the
second: among the other sentences neither part alone gives the answer. The place of the first gold sentence goes evenly
through the prompt, so that scores that only know positions are at chance.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from noiser.checks import check_choice, check_count
from noiser.data.dataset import DATA_SETS, Example, Reading, Recipe, Source

SOURCE = Source(
    files=(), licence="that of this package", citation="made by a program of this package"
)

SENTENCES = (3, 6, 12, 24, 48, 96, 192)
"""How many sentences stand before the question: about 40 to 2,000 tokens."""

MORE = {"twice": (20,), "combined": (20,)}
"""Further lengths of prompts with two gold sentences."""

REPEATS = 20
"""Prompts of each category and length; two for each, one per answer, where two passages are in conflict."""

_WORDS = {
    "people": (
        "Anna Boris Clara David Elena Frank Grace Henry Irene Jacob Karen Louis Maria Nadia Oscar Paula Quinn Robert "
        "Sarah Thomas Ursula Victor Wendy Xavier Yvonne Zachary Alice Bruno Cecil Diana Edgar Fiona George Hannah "
        "Isaac Julia Kevin Laura Martin Nora Oliver Peter Rachel Simon Teresa Ulrich Vera Walter Emma Philip"
    ),
    "things": (
        "guitar hammer lantern blanket bicycle mirror camera basket ladder kettle violin helmet compass umbrella "
        "suitcase telescope trumpet carpet bottle candle drum saddle clock puzzle"
    ),
    "rooms": "attic garage kitchen cellar garden office library bedroom hallway barn",
    "colours": "red blue green yellow purple orange pink brown",
}
PEOPLE, THINGS, ROOMS, _COLOURS = (words.split() for words in _WORDS.values())


class _Planted(NamedTuple):
    """Sentences in order, which of them decide, and the question that ends in front of the answer."""

    sentences: list[str]
    gold: tuple[int, ...]
    question: str
    answer: str


def read_planted(paths: Mapping[str, Path]) -> Reading:  # noqa: ARG001 - nothing is read
    """All prompts, the same in every run. Spans: "gold", the sentences that decide the answer; "other", all others."""
    kinds = [
        (category, count)
        for category in CATEGORIES
        for count in sorted((*SENTENCES, *MORE.get(category, ())))
    ]
    note = (
        "Made by a program. An answer counts as right only if it changes when the gold sentences are taken out; if the "
        "fact is in two parts, when either is."
    )
    return Reading([example for kind in kinds for example in draw(*kind)], (note,))


def draw(category: str, sentences: int, seed: int = 0) -> list[Example]:
    """Prompts of a category and length: those of the data set, or with another seed as many others.

    Raises:
        UnknownNameError: no such category. ParameterError: fewer than two sentences.
    """
    check_choice("category", category, list(CATEGORIES))
    check_count("sentences", sentences, least=2)
    return [
        example
        for repeat in range(REPEATS)
        for example in _examples(category, sentences, repeat, seed)
    ]


def _examples(category: str, count: int, repeat: int, seed: int) -> Iterator[Example]:
    other = f"/{seed}" if seed else ""
    facts = _Facts(random.Random(f"planted/{category}/{count}/{repeat}{other}"), count, repeat)
    for variant, case in enumerate(CATEGORIES[category](facts)):
        starts = itertools.accumulate((len(sentence) + 1 for sentence in case.sentences), initial=0)
        spans = [
            (start, start + len(sentence))
            for start, sentence in zip(starts, case.sentences, strict=False)
        ]
        gold = tuple(spans[i] for i in sorted(case.gold))
        gone = (
            case.gold,
            *((part,) for part in case.gold if category == "combined"),
        )  # both are needed
        left = [
            [sentence for i, sentence in enumerate(case.sentences) if i not in some]
            for some in gone
        ]
        yield Example(
            id=f"planted-{category}-{count}-{repeat}{'ab'[variant] if category == 'conflict' else ''}{other}",
            prompt=" ".join([*case.sentences, case.question]),
            without=tuple(" ".join([*sentences, case.question]) for sentences in left),
            target=case.answer,
            dataset="planted",
            category=category,
            spans={"gold": gold, "other": tuple(span for span in spans if span not in gold)},
            meta={
                "sentences": len(case.sentences),
                "depth": round(100 * case.gold[0] / (len(case.sentences) - 1)),
            },
        )


class _Facts:
    """Draws people, things and rooms, no pair of person and thing twice."""

    def __init__(self, random: random.Random, count: int, repeat: int) -> None:
        self.random, self.count, self.repeat = random, count, repeat
        self.pairs = random.sample(
            [(person, thing) for person in PEOPLE for thing in THINGS], count + 2
        )
        self.rooms = random.sample(ROOMS, len(ROOMS))
        self.person, self.thing = self.pairs.pop()
        self.room, self.other_room = self.rooms[:2]
        self.question = f"Question: Where does {self.person} keep the {self.thing}? Answer: in the"

    def fact(self, room: str) -> str:
        """A sentence that answers the question."""
        return f"{self.person} keeps the {self.thing} in the {room}."

    def place(self, *planted: str) -> tuple[list[str], tuple[int, ...]]:
        """The planted sentences among others, and their places: the first where the repeat says, the rest anywhere."""
        first = round(self.repeat / (REPEATS - 1) * (self.count - 1))
        places = [
            first,
            *self.random.sample([i for i in range(self.count) if i != first], len(planted) - 1),
        ]
        sentences = [
            f"{person} keeps the {thing} in the {self.random.choice(self.rooms[2:])}."
            for person, thing in self.pairs[: self.count - len(planted)]
        ]
        for index, sentence in sorted(zip(places, planted, strict=True)):
            sentences.insert(index, sentence)
        return sentences, tuple(places)


def _told(times: int, facts: _Facts) -> Iterator[_Planted]:
    sentences, gold = facts.place(*[facts.fact(facts.room)] * times)
    yield _Planted(sentences, gold, facts.question, facts.room)


def _conflict(facts: _Facts) -> Iterator[_Planted]:
    """Two passages disagree: two examples of one prompt, of which at most one has the answer that a model gives."""
    rooms = (facts.room, facts.other_room)
    sentences, places = facts.place(*map(facts.fact, rooms))
    for place, room in zip(places, rooms, strict=True):
        yield _Planted(sentences, (place,), facts.question, room)


def _combined(facts: _Facts) -> Iterator[_Planted]:
    """Neither sentence says it alone."""
    colour = facts.random.choice(_COLOURS)
    sentences, gold = facts.place(
        f"{facts.person} keeps the {facts.thing} in the {colour} box.",
        f"The {colour} box is in the {facts.room}.",
    )
    yield _Planted(sentences, gold, facts.question, facts.room)


CATEGORIES: Mapping[str, Callable[[_Facts], Iterator[_Planted]]] = {
    "once": partial(_told, 1),
    "twice": partial(_told, 2),
    "conflict": _conflict,
    "combined": _combined,
}
"""Each category and what makes its prompts."""

DATA_SETS.register(
    "planted",
    lambda: Recipe(source=SOURCE, read=read_planted),
    summary="made-up facts among distractors: what decides the answer is known",
)
