"""KNOWN: facts to complete with one word."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from noiser.data.dataset import (
    DATA_SETS,
    Example,
    LoadedExamples,
    Provenance,
    Recipe,
    UpstreamFile,
    records_of,
)


def read_known(paths: Mapping[str, Path]) -> LoadedExamples:
    """KNOWN with every prompt once, as the paper counts it (1208).

    An example's category is its relation; its span "subject" is what the fact is about.
    """
    examples = [_example(record) for record in records_of(paths)]
    first: dict[str, Example] = {}
    repeats = {e.id: first[e.prompt].id for e in examples if first.setdefault(e.prompt, e) is not e}
    removed = "; ".join(
        f"{again} repeats the prompt of {before}" for again, before in repeats.items()
    )
    return LoadedExamples(
        list(first.values()), (f"Removed {len(repeats)} of {len(examples)} records: {removed}.",)
    )


def _example(record: Mapping[str, Any]) -> Example:
    start = record["prompt"].index(record["subject"])
    return Example(
        id=f"known-{record['known_id']}",
        prompt=record["prompt"],
        target=record["attribute"],
        dataset="known",
        category=record["relation_id"],
        spans={"subject": ((start, start + len(record["subject"])),)},
        meta={name: record[name] for name in ("subject", "template", "prediction")},
    )


SOURCE = Provenance(
    files=(
        UpstreamFile(
            "known_1000.json",
            "https://rome.baulab.info/data/dsets/known_1000.json",
            343_229,
            "61daca55318bb5260c1e62e133debef9102c7b278bbc7b19dd2ac655543f333a",
        ),
    ),
    licence="none stated for the file; its authors' repository kmeng01/rome is MIT",
    citation='Meng, Bau, Andonian and Belinkov (2022), "Locating and Editing Factual '
    'Associations in GPT"',
)

DATA_SETS.register(
    "known",
    partial(Recipe, source=SOURCE, read=read_known),
    summary="1208 facts to complete with one word, by relation",
)
