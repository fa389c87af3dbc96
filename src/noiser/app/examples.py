"""Questions to click, and the answer that the page opens with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import as_file, files

from noiser.app.handlers import Answer
from noiser.app.question import Question
from noiser.attribution import Attribution

FACT = "LeBron James professionally plays the sport of"

_NOTICE = """The museum opens at nine and closes at six. Tickets cost eight euros. On Mondays the museum is closed. \
Dogs have to wait outside. The café on the first floor sells soup and cake.
Question: On which day is the museum closed?
Answer: The museum is closed on"""

_SOURCES = """The museum opens at nine and closes at six. Tickets cost eight euros.
---
On Mondays the museum is closed. Dogs have to wait outside.
---
The café on the first floor sells soup and cake. It closes at five."""

_REPORT = """The weather station stands on a hill above the village of Larkfield. It was built by the students of the \
local school. Every morning two of them climb the hill and read the instruments. They write down the temperature, \
the wind and the rain of the last day. In spring the path is muddy, so they wear boots. In summer they go before \
breakfast, because the hill has no shade. Last year a storm broke the mast, and the wind was not measured for three \
weeks. The carpenter of the village made a new mast from oak. The school paid for it with a concert. Since then the \
station has worked without a break. The records show that the wettest month was November. The driest month was April. \
A newspaper printed the numbers, and a university asked for a copy. Next year the students want to measure the \
pressure of the air as well. They have already bought a barometer. It lies in a box in the classroom, next to the \
globe and the aquarium. The teacher says that patience is the most important instrument of all. \
The records show that the month with the most rain was"""

EXAMPLES = {
    "A fact": Question(prompt=FACT),
    "Why not a foil?": Question(prompt="The keys to the old cabinet", target=" are", foil=" is"),
    "A chat": Question(
        prompt="system: Answer in one word.\nuser: What is the capital of France?",
        target="Paris",
        chat=True,
        model="smollm2-135m-instruct",
        unit="word",
    ),
    "A document": Question(prompt=_NOTICE, methods=("noiser_joint",), unit="sentence"),
    "Citations": Question(prompt="How much does a ticket cost?", sources=_SOURCES, model="smollm2-135m-instruct"),
    "A long prompt": Question(prompt=_REPORT, target=" November", methods=("occlusion",), unit="sentence"),
}
"""Questions for the built-in models, by the words on their buttons."""


def offered_examples(models: Sequence[str]) -> dict[str, Question]:
    """The examples; one whose model is not offered asks the first model instead."""
    return {
        name: question if question.model in models else replace(question, model="")
        for name, question in EXAMPLES.items()
    }


def example_answer() -> Answer:
    """A stored answer to the first example, so that the page can show one before any model is loaded.

    The built-in model gave it:

        noiser attribute "LeBron James professionally plays the sport of" --set all_thresholds=true \
            --format json -o src/noiser/app/example.json
    """
    with as_file(files("noiser.app").joinpath("example.json")) as path:
        att = Attribution.load(path)
    return Answer(EXAMPLES["A fact"], att.model.name, (att,), (), 0.0)
