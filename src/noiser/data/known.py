"""KNOWN: facts that GPT-2 XL completes, by relation (Meng et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noiser.data.dataset import DATA_SETS, Example, Reading, Recipe, Source, UpstreamFile
from noiser.data.files import read_json

FILE = "known_1000.json"

KNOWN = Source(
    files=(
        UpstreamFile(
            name=FILE,
            url="https://rome.baulab.info/data/dsets/known_1000.json",
            size=343_229,
            sha256="61daca55318bb5260c1e62e133debef9102c7b278bbc7b19dd2ac655543f333a",
        ),
    ),
    licence="none stated for the file; its authors' repository kmeng01/rome is MIT",
    citation='Meng, Bau, Andonian and Belinkov (2022), "Locating and Editing Factual Associations in GPT"',
)


def read_known(paths: Mapping[str, Path]) -> Reading:
    """KNOWN with every prompt once, as the paper counts it (1208).

    An example's category is its relation; its span "subject" is what the fact is about.
    """
    examples = [_example(record) for record in read_json(paths[FILE])]
    first: dict[str, Example] = {}
    repeats = {e.id: first[e.prompt].id for e in examples if first.setdefault(e.prompt, e) is not e}
    removed = "; ".join(f"{again} repeats the prompt of {before}" for again, before in repeats.items())
    note = f"Removed {len(repeats)} of {len(examples)} records: {removed}."
    return Reading(list(first.values()), (note,) * bool(repeats))


def _example(record: Mapping[str, Any]) -> Example:
    prompt, subject = record["prompt"], record["subject"]
    start = prompt.find(subject)
    return Example(
        id=f"known-{record['known_id']}",
        prompt=prompt,
        target=record["attribute"],
        dataset="known",
        category=record["relation_id"],
        spans={"subject": ((start, start + len(subject)),)} if start >= 0 else {},
        meta={"subject": subject, "template": record["template"], "prediction": record["prediction"]},
    )


DATA_SETS.register(
    "known", lambda: Recipe(source=KNOWN, read=read_known), summary="1208 facts to complete with one word, by relation"
)
