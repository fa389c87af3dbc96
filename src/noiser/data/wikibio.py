"""WikiBio: the first sentences of biographies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from noiser.data.dataset import (
    DATA_SETS,
    Example,
    LoadedExamples,
    Provenance,
    Recipe,
    UpstreamFile,
    records_of,
)
from noiser.text import sentence_spans

SENTENCES = 2
"""How many sentences of a biography make a prompt of WikiBio."""


def read_biographies(paths: Mapping[str, Path]) -> LoadedExamples:
    """The first two sentences of the first 119 biographies of SelfCheckGPT's selection; no
    target.
    """
    biographies = {
        record["wiki_bio_test_idx"]: record["wiki_bio_text"] for record in records_of(paths)
    }
    prompts = {
        f"wikibio-{i}": " ".join(first_sentences(text)[:SENTENCES])
        for i, text in biographies.items()
    }
    return LoadedExamples(
        [
            Example(id=i, prompt=prompt, target=None, dataset="wikibio")
            for i, prompt in prompts.items()
        ]
    )


def first_sentences(text: str) -> list[str]:
    """The sentences of a text as `sentence_spans` has them, except that none ends in brackets ("(c.
    1771 - 1848)").
    """
    joined = list[str]()
    depth = 0
    for start, end in sentence_spans(text):
        piece = text[start:end]
        joined.append(joined.pop() + piece if depth > 0 else piece)
        depth += piece.count("(") - piece.count(")")
    return [sentence.strip() for sentence in joined if sentence.strip()]


SOURCE = Provenance(
    files=(
        UpstreamFile(
            "dataset-generated.json",
            "https://raw.githubusercontent.com/KAIST-CS584-HCI/selfcheckgpt-replication/f9e1f073c6c891fef4ed8b13f31d25e7b21c4f9b/data/dataset-generated.json",
            1_609_743,
            "0fdda426bf1d4bd273f14cdca24aef8d853820a79ada6c4ec42a7638e23f6367",
        ),
    ),
    licence="text from Wikipedia, CC BY-SA 3.0; repository MIT",
    citation=(
        'Lebret, Grangier and Auli (2016), "Neural Text Generation from Structured Data"; '
        "selection: "
        'Manakul, Liusie and Gales (2023), "SelfCheckGPT"'
    ),
)

DATA_SETS.register(
    "wikibio",
    partial(Recipe, source=SOURCE, read=read_biographies),
    summary="119 biographies, the first two sentences of each",
)
