"""LongRA: word pairs, to be completed across a distracting sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from noiser.data.dataset import (
    DATA_SETS,
    Example,
    LoadedExamples,
    NamedSpans,
    Provenance,
    Recipe,
    UpstreamFile,
    records_of,
)

HOLES = {
    "currency": 6,
    "family": 4,
    "gram2-opposite": 4,
    "gram3-comparative": 4,
    "gram8-plural": 6,
    "gram9-plural-verbs": 3,
}
"""LongRA's categories with malformed records: how many words of the prompt precede the deleted
antecedent.
"""


def read_longra(paths: Mapping[str, Path]) -> LoadedExamples:
    """LongRA's 573 records, each with its antecedent.

    A record asks for one word of a pair; the other word, the antecedent, stands early in the
    prompt, before a sentence in brackets. In six of the 14 categories the published file has the
    pair the wrong way round: 186 records have lost the antecedent, end in the word that is asked
    for, and name the antecedent as the answer. They are repaired.

    The spans of an example are "antecedent", "distractor" and, in the categories whose prompts end
    in the noun that names the answer's kind ("capital" in capital-world), "last_content_word".
    """
    examples = [_example(record) for record in records_of(paths)]
    repaired = sum(bool(example.meta["repaired"]) for example in examples)
    return LoadedExamples(
        examples,
        (f"Repaired {repaired} of {len(examples)} records, malformed in {', '.join(paths)}.",),
    )


def _example(record: Mapping[str, Any]) -> Example:
    prompt = record["prompt"]
    target = record["target"]
    relative = record["relative"]
    if repaired := prompt.endswith(f" {relative}"):
        prompt, target, relative = (
            _repaired(prompt, target, HOLES[record["type"]]),
            relative,
            target,
        )
    return Example(
        id=f"longra-{record['id']}",
        prompt=prompt,
        target=target,
        dataset="longra",
        category=record["type"],
        spans=_spans(prompt, relative),
        meta={"relative": relative, "repaired": repaired},
    )


def _repaired(prompt: str, antecedent: str, hole: int) -> str:
    """The prompt without its last word, which is the answer, and with the antecedent after so many
    words.
    """
    prompt = prompt.rpartition(" ")[0]
    before = [*re.finditer(r"\S+", prompt)][hole - 1]
    end = before.start() + len(before[0].rstrip(",."))  # its punctuation was not deleted
    return f"{prompt[:end]} {antecedent}{prompt[end:]}"


def _spans(prompt: str, antecedent: str) -> NamedSpans:
    parts = {
        "antecedent": re.search(rf"\b({re.escape(antecedent)})\b", prompt),
        "distractor": re.search(r"(\([^()]*\)\.?)", prompt),
        "last_content_word": re.search(r"(\w+),$", prompt),
    }
    return {name: (found.span(1),) for name, found in parts.items() if found}


SOURCE = Provenance(
    files=(
        UpstreamFile(
            "LongRA.json",
            "https://raw.githubusercontent.com/qasemii/Noiser/edc80e6b6885bd4ad10321aa7916b3b0ca0b4edb/data/LongRA.json",
            160_429,
            "81ef4fbf6d4d523eaad026eadf0ad9839caa22f18aee1127952f1e60de0fecb1",
        ),
    ),
    licence=(
        "none stated for the file; its word pairs are from tmikolov/word2vec (Apache-2.0), its "
        "templates from "
        "keyonvafa/sequential-rationales (MIT)"
    ),
    citation='Vafa, Deng, Blei and Rush (2021), "Rationales for Sequential Predictions"',
)

DATA_SETS.register(
    "longra",
    partial(Recipe, source=SOURCE, read=read_longra),
    summary="573 word pairs, to be completed across a distracting sentence",
)
