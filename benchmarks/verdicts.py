"""Verdicts of citations: do sentences whose origin is known get the right one?

    NOISER_DATA=FOLDER python benchmarks/verdicts.py RESULTS.jsonl play --part development
    NOISER_DATA=FOLDER python benchmarks/verdicts.py RESULTS.jsonl play --part report
    python benchmarks/verdicts.py RESULTS.jsonl limits --part development
    python benchmarks/verdicts.py RESULTS.jsonl table --part report
    python benchmarks/verdicts.py RESULTS.jsonl pairs --part report

Each sentence is given as the answer to a question with six planted documents. Its origin is known:

- *used*: a planted fact, of which a document is the only source;
- *memory*: a fact of KNOWN whose value the model says by itself; no document is about it;
- *invented*: the planted fact where its document is missing;
- *false*: the sentence of KNOWN with another value of the same relation;
- *repeated*: a planted fact that two documents have;
- *told once*: the same without one of the two documents.

*Invented* and *false* should be "not supported". A document that says the same of another person
may make an invented sentence more probable: then "unclear" is right as well, as is influence
without truth. Of a *repeated* fact the two documents should be named as a pair, of which either
would do; of others none should.

A verdict follows from what the sentence loses without the documents, or without one of them, and
from two limits of its tokens' probability without them, in the geometric mean: "memory" from the
upper one on, "not supported" below the lower one. `limits` tries pairs of limits on wordings 0 to 4
and one half of KNOWN, where they were chosen; `table` has the verdicts by the library's limits.
Each line of the file is one sentence, and is not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import noiser
from measuring import share
from measuring import table as markdown
from noiser.data import Example, load
from noiser.data.planted import draw
from noiser.data.wordings import DEVELOPMENT, REPORTING
from noiser.explain.citations_record import IMPROBABLE, PROBABLE, VERDICTS
from noiser.model import LanguageModel
from planted_prompts import places_of, sources_of

MODELS = ("smollm2-135m-instruct", "gemma-3-270m")
LABELS = ("used", "memory", "invented", "false", "repeated", "told once")
PER_WORDING = 8
"""Questions of each wording, spread over the places of the document with the answer."""

LIMITS = ((0.2, 0.3), (0.25, 0.35), (0.3, 0.3), (0.3, 0.4), (0.35, 0.35), (0.35, 0.45), (0.4, 0.5))
"""Pairs of limits: improbable below the first, probable from the second on."""

Row = dict[str, Any]


class Case(NamedTuple):
    """A sentence whose origin is known, with its question and documents."""

    name: str
    label: str
    question: str
    documents: list[str]
    sentence: str
    copies: tuple[int, ...] = ()  # numbers of the documents that have a repeated fact


# ---- sentences -----------------------------------------------------------------------------------


def cases(lm: LanguageModel, part: str) -> Iterator[Case]:
    """The sentences of a part, all labels in turn."""
    chance = random.Random(f"verdicts/{part}")
    facts = known(part)
    for wording in DEVELOPMENT if part == "development" else REPORTING:
        planted = draw("once", 6, wording=wording)
        for example in chance.sample(planted, PER_WORDING):
            question, documents = question_and_documents(example)
            (fact,) = [example.prompt[a:b] for a, b in example.spans["gold"]]
            others = [document for document in documents if document != fact]
            yield Case(example.id, "used", question, documents, fact)
            yield Case(example.id, "invented", question, others, fact)
            item = next_known(lm, facts)
            wrong = [
                other.target
                for other in facts
                if other.category == item.category and other.target != item.target
            ]
            question = f"Complete the sentence: {item.prompt}"
            yield Case(item.id, "memory", question, documents, f"{item.prompt} {item.target}.")
            if wrong:
                value = chance.choice(wrong)
                yield Case(item.id, "false", question, documents, f"{item.prompt} {value}.")


def question_and_documents(example: Example) -> tuple[str, list[str]]:
    """The question of a planted prompt, and its documents in order."""
    question = example.prompt.partition("Question: ")[2].partition(" Answer:")[0]
    return question, sources_of(example)


def repeated(part: str) -> Iterator[Case]:
    """Sentences that two documents have, and with one of the two."""
    chance = random.Random(f"verdicts/repeated/{part}")
    for wording in DEVELOPMENT if part == "development" else REPORTING:
        for example in chance.sample(draw("twice", 6, wording=wording), PER_WORDING):
            question, documents = question_and_documents(example)
            spans = places_of(example)
            copies = tuple(spans.index(span) + 1 for span in example.spans["gold"])
            fact = documents[copies[0] - 1]
            yield Case(example.id, "repeated", question, documents, fact, copies)
            others = [text for number, text in enumerate(documents, 1) if number != copies[1]]
            yield Case(example.id, "told once", question, others, fact)


def known(part: str) -> list[Example]:
    """A half of KNOWN in an order of its own."""
    examples = [*load("known")]
    random.Random("verdicts").shuffle(examples)
    half = len(examples) // 2
    return examples[:half] if part == "development" else examples[half:]


def next_known(lm: LanguageModel, facts: list[Example]) -> Example:
    """The next fact whose value the model says by itself, taken from the list."""
    while True:
        fact = facts.pop()
        said = noiser.attribute(lm, fact.prompt, method="position", unit="token").targets[0].text
        if len(said.strip()) > 2 and (fact.target or "").startswith(said.strip()):
            return fact


def play(path: Path, part: str, models: Sequence[str]) -> None:
    """Cites the sentences that are not stored yet."""
    stored = {(row["model"], row["part"], row["label"], row["name"]) for row in rows_of(path)}
    for model in models:
        lm = noiser.load_model(model)
        for case in itertools.chain(cases(lm, part), repeated(part)):
            if (model, part, case.label, case.name) in stored:
                continue
            found = noiser.cite(
                lm, case.question, case.documents, answer=case.sentence, unit="source"
            )
            (sentence,) = found.sentences
            row = {
                "model": model,
                "part": part,
                "label": case.label,
                "name": case.name,
                "log_p": sentence.log_probability,
                "loss": sentence.loss,
                "needs_sources": found.needs_sources(0),
                "tokens": len(found.attribution.targets[0].token_ids),
                "cited": [citation.number for citation in sentence.citations],
                "copies": list(case.copies),
                "either": [list(pair.numbers) for pair in sentence.pairs],
            }
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def rows_of(path: Path) -> list[Row]:
    """The stored rows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- tables --------------------------------------------------------------------------------------


def verdict(row: Row, improbable: float, probable: float) -> str:
    """The verdict of a row with other limits than the library's."""
    if row["needs_sources"]:
        return "used" if row["cited"] else "unclear"
    without = math.exp(min(0.0, (row["log_p"] - row["loss"]) / row["tokens"]))
    if without >= probable:
        return "memory"
    return "unsupported" if without < improbable else "unclear"


def table(rows: Sequence[Row], limits: Sequence[tuple[float, float]]) -> str:
    """How many sentences of each origin get each verdict, for pairs of limits."""
    lines: list[dict[str, str]] = []
    models = dict.fromkeys(row["model"] for row in rows)
    for model, (improbable, probable), label in itertools.product(models, limits, LABELS):
        here = [row for row in rows if (row["model"], row["label"]) == (model, label)]
        counts = Counter(verdict(row, improbable, probable) for row in here)
        line = {"model": model, "limits": f"{improbable:g}, {probable:g}", "origin": label}
        line["n"] = str(len(here))
        lines.append(line | {name: str(counts[name]) for name in VERDICTS})
    return markdown(lines)


def pairs_table(rows: Sequence[Row]) -> str:
    """How often the two documents of a repeated fact are named, and any other two documents."""
    lines: list[dict[str, str]] = []
    rows = [row for row in rows if "either" in row]
    models = dict.fromkeys(row["model"] for row in rows)
    for model, label in itertools.product(models, LABELS):
        here = [row for row in rows if (row["model"], row["label"]) == (model, label)]
        if not here:
            continue
        right = [sorted(row["copies"]) in row["either"] for row in here]
        other = [any(pair != sorted(row["copies"]) for pair in row["either"]) for row in here]
        both = [{*row["copies"]} <= {*row["cited"]} for row in here]
        line = {"model": model, "origin": label, "n": str(len(here)), "another pair": share(other)}
        if label == "repeated":
            line |= {"the pair": share(right), "both cited": share(both)}
        lines.append(line)
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("what", choices=("play", "limits", "table", "pairs"))
    parser.add_argument("--part", choices=("development", "report"), default="development")
    parser.add_argument("--models", nargs="+", default=MODELS)
    options = parser.parse_args()
    if options.what == "play":
        play(options.path, options.part, options.models)
        return
    rows = [row for row in rows_of(options.path) if row["part"] == options.part]
    if options.what == "pairs":
        print(pairs_table(rows))
        return
    print(table(rows, LIMITS if options.what == "limits" else [(IMPROBABLE, PROBABLE)]))


if __name__ == "__main__":
    main()
