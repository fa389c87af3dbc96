"""Planted facts in fifteen wordings: ten to choose a method on, five to report it on.

A prompt has a few sentences, of which one or two decide the answer, and a question that ends in
front of the answer. Kinds of prompts: the fact stands there "once", "twice" in the same words, in
two wordings ("either" would do), or in two "parts" that are both needed. In "few-shot" prompts a
line shows an input and its label; those that share the label of the asked input decide. No prompt,
word list or sentence is that of `noiser.data`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

SENTENCES = (4, 5, 6)
"""Numbers of sentences, in turn."""

_NAMES = (
    "Amos Bella Carlos Dora Erik Flora Gustav Hilda Ivan Jonas Katja Leo Mona Nils Olga Pablo "
    "Rita Stefan Tilda Ugo Vanja Willem Yara Zoltan"
)
_NUMBERS = "2 3 4 5 6 7 8 9"
_NICKNAMES = "Falcon Maple River Granite Comet Harbor Lotus Summit"


class Planted(NamedTuple):
    """A prompt: sentences, the numbers of those that decide, the text between and after them."""

    id: str
    kind: str
    sentences: tuple[str, ...]
    gold: tuple[int, ...]
    between: str
    question: str
    answer: str

    def prompt(self, *, without: tuple[int, ...] = ()) -> str:
        """The text, built again without some sentences."""
        kept = [text for i, text in enumerate(self.sentences) if i not in without]
        return self.between.join(kept) + "\n" + self.question

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The characters of each sentence."""
        spans: list[tuple[int, int]] = []
        start = 0
        for text in self.sentences:
            spans.append((start, start + len(text)))
            start += len(text) + len(self.between)
        return spans

    def checks(self) -> list[tuple[tuple[int, ...], bool]]:
        """Sentences that are taken out, and whether a model must then still say the answer.

        A prompt whose answers are others is not what its kind says.
        """
        everything = [((), True), (self.gold, False)]
        if self.kind in ("twice", "either"):
            return everything + [((each,), True) for each in self.gold]
        if self.kind == "parts":
            return everything + [((each,), False) for each in self.gold]
        return everything


class Wording(NamedTuple):
    """Templates of a kind of fact: {who} it is about, the {answer}, a {link} between two parts.

    `answers` and `links` are words; without links, names of other people link the parts.
    """

    name: str
    facts: tuple[str, str]
    question: str
    parts: tuple[str, str]
    parts_question: str
    answers: str
    links: str
    between: str = " "

    def draw(self, kind: str, number: int) -> Planted:
        """The prompt with this number."""
        rng = random.Random(f"{self.name}/{kind}/{number}")
        count = SENTENCES[number % len(SENTENCES)]
        names = rng.sample(_NAMES.split(), 2 * count)
        answers = rng.sample(self.answers.split(), count)
        links = rng.sample(self.links.split(), count) if self.links else names[count:]
        who, answer = names[0], answers[0]
        if kind == "parts":
            told = [each.format(who=who, link=links[0], answer=answer) for each in self.parts]
            others: list[str] = []
            for i in range(1, count):  # facts about others, in two parts as well
                for each in self.parts:
                    others.append(each.format(who=names[i], link=links[i], answer=answers[i]))
        else:
            first, second = self.facts
            forms = {"once": [first], "twice": [first, first], "either": [first, second]}[kind]
            told = [form.format(who=who, answer=answer) for form in forms]
            others = []
            for i in range(1, count):
                form = rng.choice(self.facts) if kind == "either" else first
                others.append(form.format(who=names[i], answer=answers[i]))
        question = self.parts_question if kind == "parts" else self.question
        sentences, gold = _mixed(rng, told, others[: count - len(told)], count)
        return Planted(
            f"{self.name}-{kind}-{number}",
            kind,
            sentences,
            gold,
            self.between,
            question.format(who=who),
            answer,
        )


class Shots(NamedTuple):
    """Lines that show an input and its label.

    `groups` has words that share a label. The prompt shows two lines of each group and asks for
    another word of one. With `lookup` it shows one line of each of several words, and asks for one
    that was shown.
    """

    name: str
    line: str
    groups: tuple[str, ...]
    labels: str
    lookup: bool
    between: str = "\n"

    def draw(self, kind: str, number: int) -> Planted:
        """The prompt with this number."""
        rng = random.Random(f"{self.name}/{kind}/{number}")
        count = SENTENCES[number % len(SENTENCES)]
        if self.lookup:
            inputs = rng.sample(" ".join(self.groups).split(), count)
            labels = rng.sample(self.labels.split(), count)
            lines = [
                self.line.format(input=a, label=b) for a, b in zip(inputs, labels, strict=True)
            ]
            asked, label = inputs[0], labels[0]
            told, others = lines[:1], lines[1:]
        else:
            label, *labels = rng.sample(self.labels.split(), len(self.groups))
            (own, *rest) = rng.sample(self.groups, len(self.groups))
            asked, *shown = rng.sample(own.split(), 3)
            told = [self.line.format(input=each, label=label) for each in shown]
            others = []
            for group, other in zip(rest, labels, strict=True):
                shown = rng.sample(group.split(), 2)
                others += [self.line.format(input=each, label=other) for each in shown]
            count = min(count, len(told) + len(others))
        sentences, gold = _mixed(rng, told, others[: count - len(told)], count)
        asked_line = self.line.format(input=asked, label="").rstrip()
        return Planted(
            f"{self.name}-{kind}-{number}", kind, sentences, gold, self.between, asked_line, label
        )


def _mixed(
    rng: random.Random, told: list[str], others: list[str], count: int
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The sentences in a random order, and the places of those that decide."""
    gold = sorted(rng.sample(range(count), len(told)))
    rest = rng.sample(others, len(others))
    order = rng.sample(told, len(told))
    sentences = [(order if i in gold else rest).pop() for i in range(count)]
    return tuple(sentences), tuple(gold)


DEVELOPMENT: tuple[Wording | Shots, ...] = (
    Wording(
        "lodgers",
        ("{who} sleeps in the {answer}.", "The {answer} is used by {who} as a bedroom."),
        "Question: Where does {who} sleep? Answer: {who} sleeps in the",
        ("{who} was given the {link} key.", "The {link} key opens the {answer}."),
        "Question: Which room can {who} open? Answer: {who} can open the",
        "lounge pantry conservatory loft nursery basement parlour studio",
        "copper silver wooden brass iron golden plastic glass",
    ),
    Wording(
        "pets",
        ("{who} has a {answer}.", "The {answer} over there belongs to {who}."),
        "Question: Which animal does {who} have? Answer: {who} has a",
        ("{who} bought the animal in cage {link}.", "In cage {link} there was a {answer}."),
        "Question: Which animal did {who} buy? Answer: {who} bought a",
        "rabbit parrot hamster turtle lizard goat pony ferret",
        _NUMBERS,
        "\n",
    ),
    Wording(
        "cities",
        ("{who} moved to {answer} last year.", "Since last year {answer} has been home to {who}."),
        "Question: In which city does {who} live? Answer: {who} lives in",
        ("{who} works for {link} Limited.", "The office of {link} Limited is in {answer}."),
        "Question: In which city does {who} work? Answer: {who} works in",
        "Lisbon Prague Dublin Oslo Vienna Madrid Athens Warsaw",
        _NICKNAMES,
    ),
    Wording(
        "jobs",
        ("{who} earns money as a {answer}.", "The {answer} of the town is called {who}."),
        "Question: What is the job of {who}? Answer: {who} is a",
        ("{who} is married to {link}.", "{link} earns money as a {answer}."),
        "Question: What is the job of the person whom {who} married? Answer: That person is a",
        "baker tailor plumber dentist farmer nurse painter butcher",
        "",
        "\n",
    ),
    Wording(
        "lunch",
        ("{who} ordered the {answer}.", "The waiter brought the {answer} to {who}."),
        "Question: What did {who} eat? Answer: {who} ate the",
        ("{who} sits at table {link}.", "Table {link} was served the {answer}."),
        "Question: What was {who} served? Answer: {who} was served the",
        "soup salad pizza pancakes steak omelette noodles curry",
        _NUMBERS,
    ),
    Wording(
        "doors",
        ("The front door of {who} is {answer}.", "{who} painted the front door {answer}."),
        "Question: Which colour has the front door of {who}? Answer: The door is",
        ("{who} lives in house number {link}.", "House number {link} has a {answer} door."),
        "Question: Which colour has the door of the house of {who}? Answer: The door is",
        "red blue green yellow purple orange white black",
        _NUMBERS,
    ),
    Wording(
        "band",
        ("{who} plays the {answer}.", "In the band the {answer} is played by {who}."),
        "Question: Which instrument does {who} play? Answer: {who} plays the",
        ("{who} goes to the {link} school.", "At the {link} school everyone learns the {answer}."),
        "Question: Which instrument does {who} learn? Answer: {who} learns the",
        "piano flute cello harp banjo trombone clarinet drums",
        _NICKNAMES,
        "\n",
    ),
    Wording(
        "days",
        ("{who} sees the doctor on {answer}.", "On {answer} the doctor expects {who}."),
        "Question: On which day does {who} see the doctor? Answer: On",
        ("{who} belongs to the {link} group.", "The {link} group meets on {answer}."),
        "Question: On which day does the group of {who} meet? Answer: On",
        "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
        _NICKNAMES,
    ),
    Shots(
        "arrows",
        "{input} => {label}",
        (
            "apple tiger hammer cloud river chair shirt candle",
            "tree door spoon fish stone lamp coat bridge",
        ),
        "seven north amber Tuesday violin cotton marble winter",
        lookup=True,
    ),
    Shots(
        "labels",
        "{input}: {label}",
        (
            "apple pear cherry plum grape peach",
            "tiger horse sheep wolf camel donkey",
            "shirt coat trousers scarf glove sock",
        ),
        "red blue green yellow purple orange",
        lookup=False,
    ),
)

REPORT: tuple[Wording | Shots, ...] = (
    Wording(
        "parcels",
        ("The parcel for {who} came from {answer}.", "From {answer} somebody sent {who} a parcel."),
        "Question: Where did the parcel for {who} come from? Answer: It came from",
        ("{who} signed for box number {link}.", "Box number {link} came from {answer}."),
        "Question: Where did the box for {who} come from? Answer: It came from",
        "Brazil Canada Egypt Japan Kenya Peru Turkey Norway",
        _NUMBERS,
        "\n",
    ),
    Wording(
        "sports",
        ("Every evening {who} goes to {answer} practice.", "The {answer} coach is proud of {who}."),
        "Question: Which sport does {who} practise? Answer: {who} practises",
        ("{who} joined the {link} club.", "Members of the {link} club play {answer}."),
        "Question: Which sport does {who} play at the club? Answer: {who} plays",
        "tennis hockey football basketball golf rugby volleyball cricket",
        _NICKNAMES,
    ),
    Wording(
        "garden",
        ("{who} planted the {answer}.", "Thanks to {who} the {answer} grows by the gate."),
        "Question: What did {who} plant? Answer: {who} planted the",
        ("The neighbour of {who} is {link}.", "In the garden of {link} grows the {answer}."),
        "Question: What grows in the garden next to that of {who}? Answer: There grows the",
        "rose tulip lily oak willow cactus fern birch",
        "",
    ),
    Wording(
        "meetings",
        ("{who} will be back in {answer}.", "In {answer} we expect {who} to return."),
        "Question: When will {who} be back? Answer: In",
        ("{who} booked the {link} tour.", "The {link} tour starts in {answer}."),
        "Question: When does the tour of {who} start? Answer: In",
        "January February March April June August October November",
        _NICKNAMES,
        "\n",
    ),
    Shots(
        "pointers",
        "{input} -> {label}",
        (
            "piano violin trumpet flute drum guitar",
            "potato carrot onion cabbage pepper bean",
            "car train ship truck bicycle plane",
        ),
        "north south east west up down",
        lookup=False,
    ),
)


def kinds_of(wording: Wording | Shots) -> tuple[str, ...]:
    """The kinds of prompts that a wording has."""
    return ("few-shot",) if isinstance(wording, Shots) else ("once", "twice", "either", "parts")


def draw(wording: Wording | Shots, kind: str, count: int) -> Iterator[Planted]:
    """So many prompts."""
    for number in range(count):
        yield wording.draw(kind, number)
