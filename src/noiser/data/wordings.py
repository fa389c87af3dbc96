"""How planted facts are told and asked: ten wordings, ten chains of two facts, and questions that
need no document.

Wordings 0 to 4 are for development: look at them, choose limits on them. Wordings 5 to 9 are for
reporting: run them once, when nothing is chosen any more.
"""

from __future__ import annotations

from typing import NamedTuple

DEVELOPMENT, REPORTING = range(5), range(5, 10)
"""The numbers of wordings to choose limits on, and of those to report on."""

_WORDS = {
    "people": (
        "Anna Boris Clara David Elena Frank Grace Henry Irene Jacob Karen Louis Maria Nadia "
        "Oscar Paula Quinn Robert "
        "Sarah Thomas Ursula Victor Wendy Xavier Yvonne Zachary Alice Bruno Cecil Diana Edgar "
        "Fiona George Hannah "
        "Isaac Julia Kevin Laura Martin Nora Oliver Peter Rachel Simon Teresa Ulrich Vera Walter "
        "Emma Philip"
    ),
    "things": (
        "guitar hammer lantern blanket bicycle mirror camera basket ladder kettle violin helmet "
        "compass umbrella "
        "suitcase telescope trumpet carpet bottle candle drum saddle clock puzzle"
    ),
    "rooms": "attic garage kitchen cellar garden office library bedroom hallway barn",
    "colours": "red blue green yellow purple orange pink brown",
    "cities": "Paris London Rome Madrid Berlin Vienna Oslo Dublin Athens Moscow",
    "days": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "jobs": "baker doctor farmer teacher lawyer sailor painter butcher gardener carpenter",
    "countries": "France Spain Italy Germany Poland Greece Norway Sweden Portugal Ireland",
    "places": "station airport hotel school museum bakery church market beach theatre",
    "materials": "wood steel glass paper leather copper silver plastic stone wool",
    "months": "January February March April June July August September October November",
    "foods": "apples onions potatoes carrots cherries nuts beans lemons rice sugar",
    "languages": "French Spanish Italian German Polish Greek Russian Swedish Chinese Arabic",
}
(
    PEOPLE,
    THINGS,
    ROOMS,
    COLOURS,
    CITIES,
    DAYS,
    JOBS,
    COUNTRIES,
    PLACES,
    MATERIALS,
    MONTHS,
    FOODS,
    LANGUAGES,
) = (tuple(words.split()) for words in _WORDS.values())


class Wording(NamedTuple):
    """A fact and its question, with {person}, {thing} and {value}; the question ends in front of
    the value.
    """

    fact: str
    question: str
    values: tuple[str, ...]


class Chain(NamedTuple):
    """A fact in two parts, neither of which answers the question: {start} to {middle}, {middle} to
    {value}.
    """

    first: str
    second: str
    question: str
    starts: tuple[str, ...]
    middles: tuple[str, ...]
    values: tuple[str, ...]

    def sentences(self, start: str, middle: str, value: str) -> list[str]:
        """Both parts of a fact."""
        return [
            self.first.format(start=start, middle=middle, value=value),
            self.second.format(start=start, middle=middle, value=value),
        ]


WORDINGS = (
    Wording(
        "{person} keeps the {thing} in the {value}.",
        "Question: Where does {person} keep the {thing}? Answer: in the",
        ROOMS,
    ),
    Wording(
        "{person} bought the {thing} in {value}.",
        "Question: In which city did {person} buy the {thing}? Answer: in",
        CITIES,
    ),
    Wording(
        "{person} painted the {thing} {value}.",
        "Question: Which colour did {person} paint the {thing}? Answer:",
        COLOURS,
    ),
    Wording(
        "The {thing} of {person} was repaired on {value}.",
        "Question: On which day was the {thing} of {person} repaired? Answer: on",
        DAYS,
    ),
    Wording(
        "{person} lent the {thing} to the {value}.",
        "Question: To whom did {person} lend the {thing}? Answer: to the",
        JOBS,
    ),
    Wording(
        "{person} sold the {thing} to a man from {value}.",
        "Question: {person} sold the {thing} to a man. From which country was he? Answer: from",
        COUNTRIES,
    ),
    Wording(
        "{person} left the {thing} at the {value}.",
        "Question: Where did {person} leave the {thing}? Answer: at the",
        PLACES,
    ),
    Wording(
        "The {thing} that {person} owns is made of {value}.",
        "Question: What is the {thing} that {person} owns made of? Answer: It is made of",
        MATERIALS,
    ),
    Wording(
        "{person} got the {thing} in {value}.",
        "Question: In which month did {person} get the {thing}? Answer: in",
        MONTHS,
    ),
    Wording(
        "{person} swapped the {thing} for a bag of {value}.",
        "Question: What did {person} get for the {thing}? Answer: a bag of",
        FOODS,
    ),
)

CHAINS = (
    Chain(
        "The {start} belongs to {middle}.",
        "{middle} lives in {value}.",
        "Question: In which city does the owner of the {start} live? Answer: in",
        THINGS,
        PEOPLE,
        CITIES,
    ),
    Chain(
        "{start} works for {middle}.",
        "{middle} drives a {value} car.",
        "Question: Which colour is the car of the person that {start} works for? Answer:",
        PEOPLE,
        PEOPLE,
        COLOURS,
    ),
    Chain(
        "The {start} is in the {middle} box.",
        "The {middle} box is in the {value}.",
        "Question: In which room is the {start}? Answer: in the",
        THINGS,
        COLOURS,
        ROOMS,
    ),
    Chain(
        "{start} is married to {middle}.",
        "{middle} works as a {value}.",
        "Question: {start} is married to somebody who works as what? Answer: as a",
        PEOPLE,
        PEOPLE,
        JOBS,
    ),
    Chain(
        "{start} lives next to {middle}.",
        "{middle} grows {value}.",
        "Question: What does the neighbour of {start} grow? Answer:",
        PEOPLE,
        PEOPLE,
        FOODS,
    ),
    Chain(
        "{middle} is the teacher of {start}.",
        "{middle} was born in {value}.",
        "Question: In which city was the teacher of {start} born? Answer: in",
        PEOPLE,
        PEOPLE,
        CITIES,
    ),
    Chain(
        "The {start} was made by {middle}.",
        "{middle} comes from {value}.",
        "Question: From which country is the maker of the {start}? Answer: from",
        THINGS,
        PEOPLE,
        COUNTRIES,
    ),
    Chain(
        "The {start} lies on the {middle} table.",
        "The {middle} table stands in the {value}.",
        "Question: In which room is the {start}? Answer: in the",
        THINGS,
        COLOURS,
        ROOMS,
    ),
    Chain(
        "The boss of {start} is {middle}.",
        "{middle} speaks {value}.",
        "Question: Which language does the boss of {start} speak? Answer:",
        PEOPLE,
        PEOPLE,
        LANGUAGES,
    ),
    Chain(
        "{start} travels with {middle}.",
        "{middle} will arrive on {value}.",
        "Question: On which day will the person that travels with {start} arrive? Answer: on",
        PEOPLE,
        PEOPLE,
        DAYS,
    ),
)

ASIDES = (
    "as a neighbour told us over dinner last spring",
    "which surprised nobody who knew that odd family",
    "so an old diary claims on its very first page",
    "although it rained almost every hour of that week",
    "while two grey cats looked on without much interest",
    "as several long letters from distant cousins confirm",
)
"""Ends of a sentence that share no word with any question, so that its words are a small part of
it.
"""

_STEMS = """
Romeo and Juliet was written by William > Shakespeare
The largest ocean on Earth is the > Pacific
The first month of the year is > January
The capital of France is > Paris
The capital of Italy is > Rome
The capital of Germany is > Berlin
The capital of Spain is > Madrid
The capital of Japan is > Tokyo
The opposite of hot is > cold
The opposite of up is > down
The opposite of black is > white
The day after Monday is > Tuesday
The day after Friday is > Saturday
The month after March is > April
One, two, three, four, > five
A, B, C, D, > E
The planet that we live on is called > Earth
The Earth revolves around the > Sun
The president who is called George > Washington
The United States of > America
Twinkle, twinkle, little > star
Once upon a > time
To be or not to > be
Ladies and > gentlemen
Happy birthday to > you
The theory of relativity was developed by Albert > Einstein
The theory of evolution was developed by Charles > Darwin
The telephone was invented by Alexander Graham > Bell
The first man on the Moon was Neil > Armstrong
The Mona Lisa was painted by Leonardo da > Vinci
The founder of Microsoft is Bill > Gates
The chemical formula of water is > H
Water freezes at zero degrees > Celsius
Plants make sugar from sunlight by > photosynthesis
The colour of fresh snow is > white
The organ that pumps blood through the body is the > heart
The Great Wall of > China
The Statue of > Liberty
The Eiffel Tower is in the city of > Paris
The Leaning Tower of > Pisa
The largest planet in the solar system is > Jupiter
The language that people speak in Brazil is > Portuguese
The language that people speak in Germany is > German
The currency of Japan is the > yen
A baby dog is called a > puppy
A baby cat is called a > kitten
A triangle has three > sides
A minute has sixty > seconds
There are seven days in a > week
There are twelve months in a > year
In the northern hemisphere, winter is followed by > spring
The Second World War ended in the year > 1945
The River Thames flows through > London
The Beatles were a band from > Liverpool
World Wide > Web
Merry Christmas and a Happy New > Year
Thank you very > much
The sun rises in the > east
The author of Harry Potter is J. K. > Rowling
Mickey Mouse was created by Walt > Disney
"""
STEMS = tuple(
    (stem, answer) for stem, answer in (line.split(" > ") for line in _STEMS.strip().splitlines())
)
"""Beginnings of sentences, and the word with which a small model goes on, whatever documents stand
before them.
"""
