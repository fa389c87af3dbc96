"""WikiText: beginnings of Wikipedia sentences."""

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
)


def read_wikitext(paths: Mapping[str, Path]) -> LoadedExamples:
    """Every line without the whitespace around it, as the paper's authors use them; no target."""
    (path,) = paths.values()
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    changed = sum(line != line.strip() for line in lines)
    examples = [
        Example(id=f"wikitext-{number}", prompt=line.strip(), target=None, dataset="wikitext")
        for number, line in enumerate(lines)
    ]
    return LoadedExamples(
        examples, (f"Removed the whitespace at the ends of {changed} of {len(lines)} lines.",)
    )


SOURCE = Provenance(
    files=(
        UpstreamFile(
            "wikitext.txt",
            "https://raw.githubusercontent.com/casszhao/ReAGent/780977384e4cd9eb53c1093e04643aa0f89d7f81/data/benchmark/wikitext.txt",
            1_895,
            "b2034a1c76ad2c445d95287d551d8045100f1a56b655fbaf31b9f1d494980939",
        ),
    ),
    licence="text from Wikipedia, CC BY-SA; repository MIT",
    citation=(
        'Zhao and Shan (2024), "ReAGent: A Model-agnostic Feature Attribution Method for '
        'Generative Language Models"'
    ),
)

DATA_SETS.register(
    "wikitext",
    partial(Recipe, source=SOURCE, read=read_wikitext),
    summary='22 beginnings of Wikipedia sentences: "WikiBio" in the paper\'s runs',
)
