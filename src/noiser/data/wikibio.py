"""WikiBio as the paper's text describes it: the first two sentences of a Wikipedia biography."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from noiser.data.dataset import DATA_SETS, Example, Reading, Recipe, Source, UpstreamFile
from noiser.data.files import read_json
from noiser.text import sentence_spans

FILE = "dataset-generated.json"

WIKIBIO = Source(
    files=(
        UpstreamFile(
            name=FILE,
            url="https://raw.githubusercontent.com/KAIST-CS584-HCI/selfcheckgpt-replication/f9e1f073c6c891fef4ed8b13f31d25e7b21c4f9b/data/dataset-generated.json",
            size=1_609_743,
            sha256="0fdda426bf1d4bd273f14cdca24aef8d853820a79ada6c4ec42a7638e23f6367",
        ),
    ),
    licence="text from Wikipedia, CC BY-SA 3.0; repository MIT",
    citation=(
        'Lebret, Grangier and Auli (2016), "Neural Text Generation from Structured Data"; selection: '
        'Manakul, Liusie and Gales (2023), "SelfCheckGPT"'
    ),
)

SENTENCES = 2
"""How many sentences of a biography make the prompt."""


def read_biographies(paths: Mapping[str, Path]) -> Reading:
    """The first two sentences of the first 119 biographies of SelfCheckGPT's selection; no target.

    Biographies with fewer sentences are left out, and counted.
    """
    biographies = {
        str(record.get("wiki_bio_test_idx", number)): first_sentences(record["wiki_bio_text"])
        for number, record in enumerate(read_json(paths[FILE]))
    }
    examples = [
        Example(id=f"wikibio-{identity}", prompt=" ".join(sentences[:SENTENCES]), target=None, dataset="wikibio")
        for identity, sentences in biographies.items()
        if len(sentences) >= SENTENCES
    ]
    left_out = len(biographies) - len(examples)
    note = f"Left out {left_out} of {len(biographies)} biographies, which have fewer than {SENTENCES} sentences."
    return Reading(examples, (note,) * bool(left_out))


def first_sentences(text: str) -> list[str]:
    """The sentences of a text as `sentence_spans` has them, except that none ends in brackets ("(c. 1771 - 1848)")."""
    pieces = [text[start:end] for start, end in sentence_spans(text)]
    joined, depth = list[str](), 0
    for piece in pieces:
        joined.append(joined.pop() + piece if depth > 0 else piece)
        depth += piece.count("(") - piece.count(")")
    whole = pieces if depth > 0 else joined  # a bracket that never closes says nothing about sentences
    return [sentence.strip() for sentence in whole if sentence.strip()]


DATA_SETS.register(
    "wikibio",
    lambda: Recipe(source=WIKIBIO, read=read_biographies),
    summary="119 biographies, the first two sentences of each",
)
