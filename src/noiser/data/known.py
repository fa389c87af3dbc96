"""KNOWN: facts that GPT-2 XL completes, by relation (Meng et al., 2022)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from noiser.data.example import Example
from noiser.data.reading import read_json
from noiser.data.source import DATA_SETS, Reading, Recipe, Source, UpstreamFile

__all__ = ["KNOWN", "known", "read_known"]

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


def known() -> Recipe:
    """The recipe of KNOWN. The category of an example is its relation, its span "subject" what it is about."""
    return Recipe(source=KNOWN, read=read_known, read_as_published=_read_all)


def read_known(paths: Mapping[str, Path]) -> Reading:
    """KNOWN with every prompt once, as the paper counts it (1208)."""
    examples = _examples(paths)
    first, repeats = _split_repeats(examples)
    if not repeats:
        return Reading(first)
    removed = "; ".join(f"{again} repeats the prompt of {before}" for again, before in repeats.items())
    return Reading(first, (f"Removed {len(repeats)} of {len(examples)} records: {removed}.",))


def _read_all(paths: Mapping[str, Path]) -> Reading:
    examples = _examples(paths)
    repeats = ", ".join(_split_repeats(examples)[1]) or "none"
    return Reading(examples, (f"As published: {len(examples)} records; prompts that occur before: {repeats}.",))


def _examples(paths: Mapping[str, Path]) -> list[Example]:
    return [_example(record) for record in read_json(paths[FILE])]


def _split_repeats(examples: Iterable[Example]) -> tuple[list[Example], dict[str, str]]:
    """The first example of every prompt, and for each other id the id it repeats."""
    first: dict[str, Example] = {}
    repeats: dict[str, str] = {}
    for example in examples:
        before = first.setdefault(example.prompt, example)
        if before is not example:
            repeats[example.id] = before.id
    return list(first.values()), repeats


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


DATA_SETS.register("known", known, summary="1208 facts to complete with one word, by relation")
