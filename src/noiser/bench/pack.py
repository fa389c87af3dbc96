"""A benchmark without its texts: what can be given away and kept under version control."""

from __future__ import annotations

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noiser.bench.records import line
from noiser.bench.store import COSTS, PLAN, ROWS, RUN, SELECTIONS, Store, explained, run_bytes
from noiser.errors import RunError
from noiser.files import write_bytes

__all__ = ["pack"]


def pack(folder: Path, output: Path) -> list[Path]:
    """Writes plan, run, selections, rows and costs of a benchmark to another folder; no attribution, no reply.

    Nothing in it quotes a data set or says where on a machine something was: of absolute paths in the commands only the
    last part is kept. Packed twice, it is the same byte for byte.

    Args:
        folder: the benchmark.
        output: a folder that is new, empty, or holds an older pack.

    Returns:
        The files.

    Raises:
        StoredFileError: there is no benchmark in the folder.
        RunError: the output cannot be written, or is a benchmark's own folder.
    """
    store = Store(folder)
    if (output / RUN).is_file() and not Store(output).packed:
        raise RunError(f"{output} holds a benchmark that is not packed; expected another folder for the pack.")
    files = {RUN: run_bytes(_without_places(store.run)), PLAN: (folder / PLAN).read_bytes()}
    for selection in store.selections():
        files[f"{SELECTIONS}/{selection.model}/{selection.data}.json"] = selection.dumps().encode()
    for kind, records in ((ROWS, store.rows()), (COSTS, store.costs())):
        text = "".join(line(record._asdict()) for record in records)
        files[f"{kind}.jsonl.gz"] = gzip.compress(text.encode(), mtime=0)
    places: list[Path] = []
    for name, content in reversed(files.items()):  # the run last: with it, the folder is a benchmark
        place = output / name
        with explained(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, content)
        places.append(place)
    return places


def _without_places(run: Mapping[str, Any]) -> dict[str, Any]:
    return {key: [_by_name(session) for session in value] if key == "sessions" else value for key, value in run.items()}


def _by_name(session: Mapping[str, Any]) -> dict[str, Any]:
    parts = session["command"].split(" ")
    return {**session, "command": " ".join(Path(part).name if Path(part).is_absolute() else part for part in parts)}
