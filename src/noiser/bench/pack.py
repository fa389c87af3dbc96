"""A benchmark without its texts: what can be given away and kept under version control."""

from __future__ import annotations

import copy
import gzip
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from noiser.bench.plan import Plan
from noiser.bench.records import line
from noiser.bench.resolve import fingerprint
from noiser.bench.store import COSTS, PLAN, ROWS, RUN, SELECTIONS, File, Store, run_bytes, write_file
from noiser.errors import RunError, StoredFileError


def pack(folder: Path, output: Path) -> list[Path]:
    """Writes plan, run, selections, rows and costs of a benchmark to another folder; no attribution, no reply.

    Nothing in it quotes a data set or says where on a machine something was: of absolute paths of models, of
    judges and their settings, and in the commands, only the last part is kept. Packed twice, it is the same byte for
    byte.

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
    plan = (folder / PLAN).read_bytes().decode()
    files = {RUN: run_bytes(_placeless(store.run)), PLAN: _renamed(plan, _names(store.plan)).encode()}
    for selection in store.selections():  # labels, checked: no path leads out of the folder
        files[f"{SELECTIONS}/{selection.model}/{selection.data}.json"] = selection.dumps().encode()
    rows = (row._replace(error=row.error and _PATH.sub(r"…\1", row.error)) for row in store.rows())
    for kind, records in ((ROWS, rows), (COSTS, store.costs())):
        text = "".join(line(record._asdict()) for record in records)
        files[f"{kind}.jsonl.gz"] = gzip.compress(text.encode(), mtime=0)
    for name, content in reversed(files.items()):  # the run last: with it, the folder is a benchmark
        write_file(output / name, content)
    return [output / name for name in reversed(files)]


def unpack(folder: Path, output: Path) -> None:
    """Writes a packed benchmark as a folder that `noiser bench run` goes on with.

    Attributions are not in a pack; those that a new metric needs are made again.

    Args:
        folder: the pack.
        output: a folder that is new or empty.

    Raises:
        StoredFileError: there is no pack in the folder.
        RunError: the output cannot be written, or is not empty.
    """
    store = Store(folder)
    if not store.packed:
        raise StoredFileError(f"{folder} holds a benchmark that is not packed; expected what noiser bench pack wrote.")
    if output.exists() and any(output.iterdir()):
        raise RunError(f"{output} is not empty; expected a new folder for the benchmark.")
    size = store.plan.block
    for kind, records in ((ROWS, store.rows()), (COSTS, store.costs())):
        files: dict[File, list[str]] = {}
        for record in records:
            labels = (record.model, record.data, record.method, record.metric)
            files.setdefault(File(kind, labels, record.index // size), []).append(line(record._asdict()))
        for file, lines in files.items():
            write_file(output / file.path, "".join(lines).encode())
    for selection in store.selections():
        write_file(output / SELECTIONS / selection.model / f"{selection.data}.json", selection.dumps().encode())
    write_file(output / PLAN, (folder / PLAN).read_bytes())
    resolved = store.run["resolved"]
    write_file(output / RUN, run_bytes({**store.run, "fingerprint": fingerprint(resolved), "unpacked": True}))


_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*', re.DOTALL)
"""A string of TOML, with its quotation marks; or a comment, in which there are none."""

_PATH = re.compile(r"(?<![\w.:/\\])(?:[A-Za-z]:)?(?:[/\\][^/\\'\":;,()<>]+)+([/\\][^/\\\s'\":;,()<>]+)")
"""An absolute path in an error, and its last part."""


def _placeless(run: Mapping[str, Any]) -> dict[str, Any]:
    """What is known about a run, with names in place of absolute paths."""
    run = copy.deepcopy({key: value for key, value in run.items() if key != "unpacked"})
    for entry in run["resolved"].get("models", {}).values():
        entry["name"] = _last(entry["name"])
        if "engine_args" in entry:
            entry["engine_args"] = _each_text(entry["engine_args"], _last)
    for entry in run["resolved"].get("metrics", {}).values():
        entry["judge"] = entry["judge"] and _judge(entry["judge"])
        entry["judge_args"] = _each_text(entry["judge_args"], _last)
    for identity in (*(known["identity"] for known in run["models"].values()), *run.get("judges", {}).values()):
        identity["name"] = _last(identity.get("name") or "")
    for session in run.get("sessions", ()):
        session["command"] = shlex.join(map(_word, shlex.split(session["command"])))
    return run


def _names(plan: Plan) -> dict[str, str]:
    """Texts of a plan that may hold absolute paths, with their replacements."""
    names = {entry.name: _last(entry.name) for entry in plan.models}
    names |= {entry.judge: _judge(entry.judge) for entry in plan.metrics if entry.judge is not None}
    for settings in (*(entry.engine_args for entry in plan.models), *(entry.judge_args for entry in plan.metrics)):
        _each_text(settings, lambda text: names.setdefault(text, _last(text)))
    return names


def _renamed(toml: str, names: Mapping[str, str]) -> str:
    """TOML with the named strings replaced, where they are a whole string."""

    def rename(match: re.Match[str]) -> str:
        value = "" if match[0].startswith("#") else tomllib.loads(f"text = {match[0]}")["text"]
        return json.dumps(names[value], ensure_ascii=False) if names.get(value, value) != value else match[0]

    return _STRING.sub(rename, toml)


def _last(text: str) -> str:
    """The last part of an absolute path; anything else unchanged."""
    return (Path(text).name or text) if Path(text).is_absolute() else text


def _judge(judge: str) -> str:
    """A judge's name, which may have a path after its colon."""
    kind, colon, model = judge.partition(":")
    return kind + colon + _last(model)


def _word(word: str) -> str:
    """A word of a command: a path, or an option with one."""
    name = re.match(r"[^=/]*=|-\w(?=/)", word)
    start = name.end() if name else 0
    return word[:start] + _last(word[start:])


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Settings with all texts among them changed."""
    if isinstance(value, dict):
        return {key: _each_text(part, change) for key, part in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_each_text(part, change) for part in cast("list[Any]", value)]
    return change(value) if isinstance(value, str) else value
