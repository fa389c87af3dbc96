"""A benchmark without its texts: what can be given away and kept under version control."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from noiser.bench.records import line
from noiser.bench.store import COSTS, PLAN, ROWS, RUN, SELECTIONS, Store, explained, run_bytes
from noiser.errors import RunError
from noiser.files import write_bytes

__all__ = ["pack"]


def pack(folder: Path, output: Path) -> list[Path]:
    """Writes plan, run, selections, rows and costs of a benchmark to another folder; no attribution, no reply.

    Nothing in it quotes a data set or says where on a machine something was: of absolute paths of models and in the
    commands only the last part is kept. Packed twice, it is the same byte for byte.

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
    absolute = _absolute(store.run)
    files = {
        RUN: _by_name(run_bytes(store.run), absolute),
        PLAN: _by_name((folder / PLAN).read_bytes(), absolute),
    }
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


def _absolute(run: Mapping[str, Any]) -> list[str]:
    """The absolute paths that a run speaks of, long ones first: of models, and in commands."""
    names = [entry["name"] for entry in run["resolved"].get("models", {}).values()]
    names += [known["identity"]["name"] for known in run["models"].values()]
    for session in run.get("sessions", ()):
        names += [piece for part in session["command"].split(" ") for piece in (part, part.partition("=")[2])]
    return sorted({name for name in names if Path(name).is_absolute() and Path(name).name}, key=len, reverse=True)


def _by_name(content: bytes, places: Sequence[str]) -> bytes:
    """A file with the last part of each path in its place."""
    text = content.decode()
    for place in places:
        text = text.replace(place, Path(place).name)
    return text.encode()
