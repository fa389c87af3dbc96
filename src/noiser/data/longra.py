"""LongRA: long-range agreement across a distractor (Vafa et al., 2021), from the file that Noiser's authors published.

Each record asks for one word of a pair. The other word, the antecedent, stands early in the prompt, before an unrelated
sentence in brackets. In six of the 14 categories the published file has the pair the wrong way round: 186 records have
lost the antecedent, end in the word that is asked for, and name the antecedent as the answer. They can be repaired.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from noiser.data.dataset import DATA_SETS, Example, Reading, Recipe, Source, Spans, UpstreamFile
from noiser.data.files import read_json
from noiser.errors import DataError

FILE = "LongRA.json"

LONGRA = Source(
    files=(
        UpstreamFile(
            name=FILE,
            url="https://raw.githubusercontent.com/qasemii/Noiser/edc80e6b6885bd4ad10321aa7916b3b0ca0b4edb/data/LongRA.json",
            size=160_429,
            sha256="81ef4fbf6d4d523eaad026eadf0ad9839caa22f18aee1127952f1e60de0fecb1",
        ),
    ),
    licence=(
        "none stated for the file; its word pairs are from tmikolov/word2vec (Apache-2.0), "
        "its templates from keyonvafa/sequential-rationales (MIT)"
    ),
    citation='Vafa, Deng, Blei and Rush (2021), "Rationales for Sequential Predictions"',
)

HOLES = {
    "currency": 6,
    "family": 4,
    "gram2-opposite": 4,
    "gram3-comparative": 4,
    "gram8-plural": 6,
    "gram9-plural-verbs": 3,
}
"""Categories with malformed records: how many words of the prompt come before the deleted antecedent."""

_DISTRACTOR = re.compile(r"\([^()]*\)\.?")
_LAST_NOUN = re.compile(r"(\w+),$")


class _Record(NamedTuple):
    """One record as published: `relative` is the word of the pair that is not the target."""

    id: int
    prompt: str
    target: str
    relative: str
    type: str


def read_longra(paths: Mapping[str, Path]) -> Reading:
    """LongRA's 573 records, the malformed ones repaired, so that each has its antecedent.

    The spans of an example are "antecedent", "distractor" and, in the categories whose prompts end in the noun that
    names the answer's kind ("capital" in capital-world), "last_content_word".
    """
    records = [_Record(**record) for record in read_json(paths[FILE])]
    examples = [_example(record) for record in records]
    repaired = sum(bool(example.meta["repaired"]) for example in examples)
    return Reading(examples, (f"Repaired {repaired} of {len(records)} records, malformed in {FILE}.",) * bool(repaired))


def _repair(record: _Record) -> _Record:
    """The record as it was meant: the answer taken off the end, the antecedent put back, the two exchanged."""
    if record.type not in HOLES:
        raise DataError(
            f"Record {record.id} of {FILE} is malformed and its category is {record.type!r}; expected one of "
            f"{', '.join(HOLES)}. Get the published file."
        )
    prompt = record.prompt.removesuffix(f" {record.relative}")
    words = list(re.finditer(r"\S+", prompt))
    before = words[HOLES[record.type] - 1]
    hole = before.start() + len(before[0].rstrip(",."))  # its punctuation was not deleted
    prompt = f"{prompt[:hole]} {record.target}{prompt[hole:]}"
    return record._replace(prompt=prompt, target=record.relative, relative=record.target)


def _example(record: _Record) -> Example:
    if repaired := record.prompt.endswith(f" {record.relative}"):
        record = _repair(record)
    return Example(
        id=f"longra-{record.id}",
        prompt=record.prompt,
        target=record.target,
        dataset="longra",
        category=record.type,
        spans=_spans(record),
        meta={"relative": record.relative, "repaired": repaired},
    )


def _spans(record: _Record) -> Spans:
    antecedent = re.search(rf"\b{re.escape(record.relative)}\b", record.prompt)
    last = _LAST_NOUN.search(record.prompt)
    distractor = _DISTRACTOR.search(record.prompt)
    parts = {
        "antecedent": antecedent and antecedent.span(),
        "distractor": distractor and distractor.span(),
        "last_content_word": last and last.span(1),
    }
    return {name: (span,) for name, span in parts.items() if span}


DATA_SETS.register(
    "longra",
    lambda: Recipe(source=LONGRA, read=read_longra),
    summary="573 word pairs, to be completed across a distracting sentence",
)
