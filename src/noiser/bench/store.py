"""A benchmark's rows and texts in one SQLite file, and packs of its rows without the texts."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from noiser.bench.rows import ATTRIBUTION, Row, RowKey, Text
from noiser.errors import RunError, StoredFileError
from noiser.files import write_bytes
from noiser.registry import renamed

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.bench.plan import Plan

FORMAT, SCHEMA = "noiser.bench", 2
FILE, ROWS, RUN, PLAN = "bench.sqlite", "rows.jsonl.gz", "run.json", "plan.toml"

MOST_BYTES, INFLATION = 1_000_000, 100
"""Bounds of a pack, which others may have made: bytes of a row, and of all rows for each packed byte."""


_COLUMNS = ", ".join(f'"{name}"' for name in Row._fields)
_KINDS, _KEY = (", ".join(names) for names in (RowKey._fields[:4], RowKey._fields))
_IS_KEY = " AND ".join(f"{name} = ?" for name in RowKey._fields)
_TABLES = f"""
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows ({_COLUMNS}, PRIMARY KEY ({_KEY})) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts ({_KEY}, value TEXT NOT NULL, PRIMARY KEY ({_KEY}));
"""


class Store:
    """A benchmark's folder: `bench.sqlite` as `noiser bench run` fills it, or a pack, read into memory.

    Every method raises RunError where the file system refuses, and StoredFileError where the file is damaged. `create`
    makes a new benchmark where there is none, and one to go on with out of a pack.
    """

    def __init__(self, path: str | PathLike[str], *, create: bool = False) -> None:
        self.path = Path(path)
        exists, packed = (self.path / FILE).is_file(), (self.path / ROWS).is_file()
        if not (exists or packed or create):
            raise StoredFileError(
                f"There is no benchmark in {self.path}; expected {FILE} or {ROWS}."
            )
        with self._explained():
            if create:
                self.path.mkdir(parents=True, exist_ok=True)
            place = inside(self.path, FILE) if exists or create else ":memory:"
            self._db = sqlite3.connect(place, timeout=60)
            if not (schema := self._select("PRAGMA user_version")[0][0]):
                self._db.executescript(_TABLES)
                if packed:
                    self._read_pack()
                self._db.execute(
                    f"PRAGMA user_version = {SCHEMA}"
                )  # last: a kill before it changes nothing
            elif schema != SCHEMA:
                raise StoredFileError(
                    f"{self.path} has schema {schema}; this version of noiser reads {SCHEMA}."
                )

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        from noiser.bench.plan import parse_plan

        if "plan" not in self.meta:
            raise StoredFileError(f"No run has begun in {self.path}. Use noiser bench run.")
        return parse_plan(self.meta["plan"], str(self.path))

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """Facts about the run: plan, resolved plan, models, selections, sessions, versions and machine."""
        facts = self._select("SELECT name, value FROM meta ORDER BY name")
        with self._explained():
            return {name: json.loads(value) for name, value in facts}

    def set_meta(self, **values: Any) -> None:
        """Replaces facts about the run."""
        with self._explained(), self._db:
            self._db.executemany(
                "REPLACE INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in values.items()]
            )
        for name in ("meta", "plan"):
            self.__dict__.pop(name, None)

    def rows(self) -> Iterator[Row]:
        """All rows, ordered by their labels and positions."""
        with self._explained():
            found = map(
                Row._make, self._select(f'SELECT {_COLUMNS} FROM rows ORDER BY {_KINDS}, "index"')
            )
            found = [row._replace(values=json.loads(cast("str", row.values))) for row in found]
        yield from found

    def add(self, rows: Iterable[Row], texts: Iterable[Text] = ()) -> None:
        """Stores rows with their texts, all or none; they replace those of the same keys."""
        rows, marks = list(rows), ", ".join("?" * len(Row._fields))
        with self._explained(), self._db:
            self._db.executemany(f"DELETE FROM texts WHERE {_IS_KEY}", [row.key for row in rows])
            records = [row._replace(values=json.dumps(row.values, allow_nan=False)) for row in rows]  # pyright: ignore
            self._db.executemany(f"REPLACE INTO rows VALUES ({marks})", records)
            lines = [(*key, json.dumps(value)) for key, value in texts]
            self._db.executemany("REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", lines)

    def examples(
        self, model: str, data: str, *, errors: bool = True
    ) -> dict[tuple[str, str], set[str]]:
        """The ids of examples that have a row, by method and metric; optionally without rows that are errors."""
        found: dict[tuple[str, str], set[str]] = {}
        where = "model = ? AND data = ?" + ("" if errors else " AND error IS NULL")
        for *kind, example in self._select(
            f"SELECT method, metric, example FROM rows WHERE {where}", (model, data)
        ):
            found.setdefault((kind[0], kind[1]), set()).add(example)
        return found

    def labels(self) -> dict[str, set[str]]:
        """The labels of "models", "data", "methods" and "metrics" that have rows."""
        columns = zip(*self._select(f"SELECT DISTINCT {_KINDS} FROM rows"), strict=True)
        kinds = ("models", "data", "methods", "metrics")
        return {kind: set[str]() for kind in kinds} | dict(
            zip(kinds, map(set, columns), strict=False)
        )

    def text(self, key: RowKey) -> Mapping[str, Any]:
        """The text of a row; empty where there is none."""
        found = self._select(f"SELECT value FROM texts WHERE {_IS_KEY}", key)
        return json.loads(found[0][0]) if found else {}

    def attributions(self, model: str, data: str, method: str) -> dict[str, Attribution]:
        """A method's attributions by example; none in a pack."""
        from noiser.attribution import Attribution

        where = "model = ? AND data = ? AND method = ? AND metric = ?"
        query = f"SELECT example, value FROM texts WHERE {where} ORDER BY rowid"
        texts = {
            name: json.loads(text)
            for name, text in self._select(query, (model, data, method, ATTRIBUTION))
        }
        return {
            name: Attribution.from_dict(text[ATTRIBUTION])
            for name, text in texts.items()
            if ATTRIBUTION in text
        }

    def pack(self, folder: Path) -> list[Path]:
        """The files of a pack, now in a folder: all but the texts, and paths of models only by their last part."""
        facts = {name: value for name, value in self.meta.items() if name != "plan"}
        head = {"format": FORMAT, "schema": SCHEMA, **facts}
        rows = "".join(
            json.dumps(row._asdict(), separators=(",", ":")) + "\n" for row in self.rows()
        )
        files = {
            PLAN: self._without_paths(self.meta["plan"]).encode(),
            ROWS: gzip.compress(rows.encode(), mtime=0),
            RUN: self._without_paths(
                json.dumps(head, indent=1, ensure_ascii=False) + "\n"
            ).encode(),
        }
        with self._explained(folder):
            return write_files(folder, files)

    def _without_paths(self, text: str) -> str:
        names = [entry.name for entry in self.plan.models]
        names += [(entry.judge or "").partition(":")[2] for entry in self.plan.metrics]
        settings = [entry.engine_args for entry in self.plan.models] + [
            entry.judge_args for entry in self.plan.metrics
        ]
        names += [str(value) for values in settings for value in values.values()]
        for name in sorted(
            {name for name in names if Path(name).is_absolute()}, key=len, reverse=True
        ):
            text = text.replace(name, Path(name).name)
        return text

    def _read_pack(self) -> None:
        try:
            facts = json.loads(renamed((self.path / RUN).read_text(encoding="utf-8")))
            if (facts.pop("format", None), schema := facts.pop("schema", None)) != (FORMAT, SCHEMA):
                raise StoredFileError(
                    f"{self.path / RUN} has schema {schema}; this version of noiser reads {SCHEMA}."
                )
            self.set_meta(plan=renamed((self.path / PLAN).read_text(encoding="utf-8")), **facts)
            left = INFLATION * (self.path / ROWS).stat().st_size
            with gzip.open(self.path / ROWS) as file:
                while batch := list(islice(iter(partial(file.readline, MOST_BYTES), b""), 1000)):
                    left -= sum(map(len, batch))
                    if left < 0 or max(map(len, batch)) == MOST_BYTES:
                        raise ValueError("its rows are larger than any that are made here")
                    self.add(Row(**json.loads(renamed(line.decode()))) for line in batch)
        except (
            AttributeError,
            ValueError,
            TypeError,
            EOFError,
            RecursionError,
            gzip.BadGzipFile,
            zlib.error,
        ) as error:
            if isinstance(error, StoredFileError):
                raise
            raise StoredFileError(
                f"The pack in {self.path} is damaged: {error}. Use another copy."
            ) from error

    def _select(self, query: str, values: Iterable[str] = ()) -> list[tuple[Any, ...]]:
        """All lines at once: an open query would keep the file locked."""
        with self._explained():
            return self._db.execute(query, tuple(values)).fetchall()

    @contextlib.contextmanager
    def _explained(self, path: Path | None = None) -> Generator[None]:
        place = path or self.path / FILE
        try:
            yield
        except RunError:
            raise
        except (sqlite3.OperationalError, OSError) as error:
            text = "What is stored is whole; when the reason is gone, the same command goes on where this one stopped."
            raise RunError(f"Cannot use {place}: {error}. {text}") from error
        except (sqlite3.DatabaseError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise StoredFileError(
                f"{place} is damaged: {error}. Use another copy, or another folder."
            ) from error


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps other runs out of a folder by a lock of the operating system, which ends with the process."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(inside(folder, ".lock")).acquire(timeout=0)
    except Timeout as error:
        raise RunError(
            f"Another run is at work in {folder}. Wait for it, or stop it first."
        ) from error
    except OSError as error:
        raise RunError(
            f"Cannot write {folder}: {error}. Expected a folder that is writable."
        ) from error
    with lock:
        yield


def inside(folder: Path, name: str) -> Path:
    """The path of a file in a folder. Raises RunError where a link in the folder leads out of it."""
    root = folder.resolve()
    if not (path := (root / name).resolve()).is_relative_to(root):
        raise RunError(
            f"{folder / name} is a link to {path}, which is outside of {folder}. Remove the link."
        )
    return path


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """The paths of the files, written into a folder by their names in it; each is whole or not there."""
    for name, content in contents.items():
        path = inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return [folder / name for name in contents]
