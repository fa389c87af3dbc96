"""A benchmark's rows and texts in one SQLite file, and packs of its rows without the texts."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import math
import reprlib
import sqlite3
import time
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pydantic import ValidationError

from noiser.bench.rows import ATTRIBUTION, Kind, Row, RowKey, Text, packed_row, stored_rows
from noiser.errors import NoiserError, RunError, StoredFileError
from noiser.files import parse_json, write_bytes
from noiser.registry import renamed

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.bench.plan import Plan

FORMAT = "noiser.bench"
SCHEMA = 2
FILE = "bench.sqlite"
ROWS = "rows.jsonl.gz"
RUN = "run.json"
PLAN = "plan.toml"

# Bounds of a pack, which others may have made: bytes of a row, of all rows for each packed byte,
# and of the other files.
MOST_BYTES = 1_000_000
INFLATION = 100
MOST_BYTES_OF_FACTS = 100_000_000

QUERY_SECONDS = 60
"""The time limit of a query."""

_KIND = ", ".join(Kind._fields)
_KEY = ", ".join(RowKey._fields)
_IS_KIND = " AND ".join(f"{name} = ?" for name in Kind._fields)
_IS_KEY = " AND ".join(f"{name} = ?" for name in RowKey._fields)
_COLUMNS = ", ".join(f'"{name}"' for name in Row._fields)
_TABLES = f"""
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rows ({_COLUMNS}, PRIMARY KEY ({_KEY})) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS texts ({_KEY}, value TEXT NOT NULL, PRIMARY KEY ({_KEY}));
"""
_COLUMNS_OF = {
    "meta": {"name", "value"},
    "rows": {*Row._fields},
    "texts": {*RowKey._fields, "value"},
}


class Counts(NamedTuple):
    """How many rows of a kind there are."""

    rows: int
    errors: int
    seconds: float  # of all rows together


class Store:
    """A benchmark's folder: `bench.sqlite` as `noiser bench run` fills it, or a pack.

    A pack is read into memory. `create` makes a new benchmark where there is none, and one to go on
    with out of a pack. Whatever is read is checked: the file may come from somebody else. Every
    method raises RunError where the file system refuses, and StoredFileError where the file is
    damaged.
    """

    def __init__(self, path: str | PathLike[str], *, create: bool = False) -> None:
        self.path = Path(path)
        self._ends = math.inf
        file = self.path / FILE
        exists = file.is_file()
        packed = (self.path / ROWS).is_file()
        if file.exists() and not exists:
            raise StoredFileError(f"{file} is not a file. Remove it, or use another folder.")
        if not (exists or packed or create):
            raise StoredFileError(
                f"There is no benchmark in {self.path}; expected {FILE} or {ROWS}."
            )
        with self._explained():
            if create:
                self.path.mkdir(parents=True, exist_ok=True)
            place = inside(self.path, FILE) if exists or create else ":memory:"
            self._db = sqlite3.connect(place, timeout=60)
            self._db.execute("PRAGMA trusted_schema = OFF")
            self._db.set_progress_handler(lambda: time.monotonic() > self._ends, 100_000)
        ((schema,),) = self._select("PRAGMA user_version")
        if schema not in (0, SCHEMA):
            raise StoredFileError(
                f"{self.path} has schema {schema}; this version of noiser reads {SCHEMA}."
            )
        if schema:
            self._check_tables()
            return
        with self._explained():
            self._db.executescript(_TABLES)
        self._check_tables()
        if packed:
            self._read_pack()
        with self._explained():
            # The version comes last: a kill before it changes nothing.
            self._db.execute(f"PRAGMA user_version = {SCHEMA}")

    def _check_tables(self) -> None:
        """Raises StoredFileError for views, triggers and tables that no run makes."""
        place = self.path / FILE
        missing = {*_COLUMNS_OF}
        query = "SELECT type, name, rootpage FROM sqlite_master"
        for kind, name, root in self._select(query):
            if name.startswith("sqlite_"):  # SQLite's own, whose names nobody else can take
                continue
            if (
                kind != "table" or name not in _COLUMNS_OF or not root
            ):  # virtual tables have no root
                raise StoredFileError(
                    f"{place} has a {kind} {name!r:.80} that no run makes. Use another copy."
                )
            columns = self._select("SELECT name, hidden FROM pragma_table_xinfo(?)", (name,))
            if {*columns} != {(column, 0) for column in _COLUMNS_OF[name]}:
                raise StoredFileError(
                    f"{place} has other columns in {name!r} than a run makes. Use another copy."
                )
            missing.discard(name)
        if missing:
            raise StoredFileError(f"{place} lacks the table {min(missing)!r}. Use another copy.")

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        from noiser.bench.plan import parse_plan

        if "plan" not in self.meta:
            raise StoredFileError(f"No run has begun in {self.path}. Use noiser bench run.")
        return parse_plan(self.meta["plan"], str(self.path))

    @cached_property
    def meta(self) -> Mapping[str, Any]:
        """Facts about the run, as JSON.

        They are the plan, the resolved plan, models, selections, sessions, versions and machine.
        """
        from noiser.bench.facts import checked_facts

        with self._explained():
            facts = self._select("SELECT name, value FROM meta ORDER BY name")
            return checked_facts({name: parse_json(value) for name, value in facts})

    def set_meta(self, **values: Any) -> None:
        """Replaces facts about the run."""
        with self._explained(), self._db:
            facts = [(name, json.dumps(value)) for name, value in values.items()]
            self._db.executemany("REPLACE INTO meta VALUES (?, ?)", facts)
        for name in ("meta", "plan"):
            self.__dict__.pop(name, None)

    def kinds(self) -> list[Kind]:
        """The kinds of rows that are stored, in the order of their labels."""
        query = f"SELECT DISTINCT {_KIND} FROM rows ORDER BY {_KIND}"
        return [Kind._make(labels) for labels in self._select(query)]

    def rows(self, kind: Kind | None = None, *, failed: bool = False) -> Iterator[Row]:
        """The rows of a kind by their positions, or all, kind by kind; `failed` leaves only
        errors.
        """
        if kind is None:
            for each in self.kinds():
                yield from self.rows(each, failed=failed)
            return
        where = _IS_KIND + (" AND error IS NOT NULL" if failed else "")
        query = f'SELECT {_COLUMNS} FROM rows WHERE {where} ORDER BY "index"'
        with self._explained():
            yield from stored_rows(self._select(query, kind))

    def counts(self, kind: Kind, limit: int | None) -> Counts:
        """The number of rows of a kind whose position is below the limit, if there is one."""
        query = f"SELECT count(*), count(error), total(seconds) FROM rows WHERE {_IS_KIND}"
        ((rows, errors, seconds),) = self._select(*_below(limit, query, kind))
        return Counts(rows, errors, seconds)

    def errors(self, kind: Kind, limit: int | None) -> list[tuple[str, int, str]]:
        """Each type of error of a kind, with the number of its rows and its first example."""
        # SQLite takes `example` from the row that has the least position.
        select = 'SELECT error, count(*), example, min("index") FROM rows'
        query, values = _below(limit, f"{select} WHERE {_IS_KIND} AND error IS NOT NULL", kind)
        found = self._select(f"{query} GROUP BY error ORDER BY 4", values)
        return [(str(error), count, str(example)) for error, count, example, _ in found]

    def add(self, rows: Iterable[Row], texts: Iterable[Text] = ()) -> None:
        """Stores rows with their texts, all or none; they replace those of the same keys."""
        rows = list(rows)
        marks = ", ".join("?" * len(Row._fields))
        with self._explained(), self._db:
            self._db.executemany(f"DELETE FROM texts WHERE {_IS_KEY}", [row.key for row in rows])
            records = [row._replace(values=json.dumps(row.values, allow_nan=False)) for row in rows]  # pyright: ignore
            self._db.executemany(f"REPLACE INTO rows VALUES ({marks})", records)
            lines = [(*key, json.dumps(value)) for key, value in texts]
            self._db.executemany("REPLACE INTO texts VALUES (?, ?, ?, ?, ?, ?)", lines)

    def examples(
        self, model: str, data: str, *, errors: bool = True
    ) -> dict[tuple[str, str], set[str]]:
        """The ids of examples that have a row, by method and metric; optionally without errors."""
        found: dict[tuple[str, str], set[str]] = {}
        where = "model = ? AND data = ?" + ("" if errors else " AND error IS NULL")
        query = f"SELECT method, metric, example FROM rows WHERE {where}"
        for method, metric, example in self._select(query, (model, data)):
            found.setdefault((method, metric), set()).add(example)
        return found

    def labels(self) -> dict[str, set[str]]:
        """The labels of "models", "data", "methods" and "metrics" that have rows."""
        kinds = self.kinds()
        return {
            "models": {kind.model for kind in kinds},
            "data": {kind.data for kind in kinds},
            "methods": {kind.method for kind in kinds},
            "metrics": {kind.metric for kind in kinds},
        }

    def text(self, key: RowKey) -> Mapping[str, Any]:
        """The text of a row; empty where there is none."""
        found = self._select(f"SELECT value FROM texts WHERE {_IS_KEY}", key)
        return self._text(found[0][0]) if found else {}

    def attributions(self, model: str, data: str, method: str) -> dict[str, Attribution]:
        """A method's attributions by example; none in a pack."""
        from noiser.attribution import Attribution

        query = f"SELECT example, value FROM texts WHERE {_IS_KIND} ORDER BY rowid"
        found: dict[str, Attribution] = {}
        for example, value in self._select(query, (model, data, method, ATTRIBUTION)):
            text = self._text(value)
            if ATTRIBUTION in text:
                found[example] = Attribution.from_dict(text[ATTRIBUTION])
        return found

    def _text(self, value: object) -> dict[str, Any]:
        """The texts of a row, from the JSON that is stored."""
        with self._explained():
            text = parse_json(value) if isinstance(value, str) else None
            if not isinstance(text, dict):
                raise ValueError("a text is not a JSON object")
            return cast("dict[str, Any]", text)

    def pack(self, folder: Path) -> list[Path]:
        """The files of a pack, now in a folder: all but the texts.

        Paths of models are written by their last part only.
        """
        facts = {name: value for name, value in self.meta.items() if name != "plan"}
        head = {"format": FORMAT, "schema": SCHEMA, **facts}
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as file:
            for row in self.rows():
                line = json.dumps(row._asdict(), separators=(",", ":")) + "\n"
                file.write(line.encode())
        run = json.dumps(head, indent=1, ensure_ascii=False) + "\n"
        files = {
            PLAN: self._without_paths(self.meta["plan"]).encode(),
            ROWS: packed.getvalue(),
            RUN: self._without_paths(run).encode(),
        }
        with self._explained(folder):
            return write_files(folder, files)

    def _without_paths(self, text: str) -> str:
        """A text with the last part of each path that the plan names."""
        names = [entry.name for entry in self.plan.models]
        names += [(entry.judge or "").partition(":")[2] for entry in self.plan.metrics]
        settings = [entry.engine_args for entry in self.plan.models]
        settings += [entry.judge_args for entry in self.plan.metrics]
        names += [str(value) for values in settings for value in values.values()]
        absolute = {name for name in names if Path(name).is_absolute()}
        for name in sorted(absolute, key=len, reverse=True):
            text = text.replace(name, Path(name).name)
        return text

    def _read_pack(self) -> None:
        """Puts a pack's rows and facts into the tables."""
        with self._explained(self.path):
            facts = parse_json(renamed(_read_text(self.path / RUN)))
            if not isinstance(facts, dict):
                raise ValueError(f"{RUN} is not a JSON object")
            head = cast("dict[str, Any]", facts)
            form = head.pop("format", None)
            schema = head.pop("schema", None)
            if (form, schema) != (FORMAT, SCHEMA):
                raise StoredFileError(
                    f"{self.path / RUN} has schema {schema!r:.80}; this version of noiser reads "
                    f"{SCHEMA}."
                )
            self.set_meta(**head | {"plan": renamed(_read_text(self.path / PLAN))})
            left = INFLATION * (self.path / ROWS).stat().st_size
            with gzip.open(self.path / ROWS) as file:
                while batch := list(islice(iter(partial(file.readline, MOST_BYTES), b""), 1000)):
                    left -= sum(map(len, batch))
                    if left < 0 or max(map(len, batch)) == MOST_BYTES:
                        raise ValueError("its rows are larger than any that are made here")
                    self.add(packed_row(renamed(line.decode())) for line in batch)

    def _select(self, query: str, values: Iterable[str | int] = ()) -> list[tuple[Any, ...]]:
        """All lines at once: an open query would keep the file locked."""
        with self._explained():
            self._ends = time.monotonic() + QUERY_SECONDS
            try:
                return self._db.execute(query, tuple(values)).fetchall()
            finally:
                self._ends = math.inf

    @contextlib.contextmanager
    def _explained(self, path: Path | None = None) -> Generator[None]:
        place = path or self.path / FILE
        try:
            yield
        except NoiserError:
            raise
        except (sqlite3.OperationalError, gzip.BadGzipFile, OSError) as error:
            if isinstance(error, gzip.BadGzipFile):
                raise _damaged(place, error) from error
            if str(error) == "interrupted":
                raise _damaged(place, f"a query took longer than {QUERY_SECONDS} s") from error
            text = (
                "What is stored is whole; when the reason is gone, the same command goes on "
                "where this one stopped."
            )
            raise RunError(f"Cannot use {place}: {error}. {text}") from error
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            key = ".".join(map(str, fault["loc"]))
            got = reprlib.repr(fault["input"])
            raise _damaged(place, f"{key}: {fault['msg']}, got {got}") from error
        except (sqlite3.DatabaseError, ValueError, EOFError, OverflowError, zlib.error) as error:
            raise _damaged(place, error) from error


def _below(limit: int | None, query: str, kind: Kind) -> tuple[str, tuple[str | int, ...]]:
    """A query of a kind and its values, restricted to positions below a limit."""
    if limit is None:
        return query, kind
    return f'{query} AND "index" < ?', (*kind, limit)


def _damaged(place: Path, fault: object) -> StoredFileError:
    return StoredFileError(f"{place} is damaged: {fault}. Use another copy, or another folder.")


def _read_text(path: Path) -> str:
    """The text of an ordinary file of bounded size: reading a pipe would never end."""
    if path.exists() and not path.is_file():
        raise StoredFileError(f"{path} is not a file. Use another copy.")
    if path.stat().st_size > MOST_BYTES_OF_FACTS:
        raise StoredFileError(f"{path} is larger than {MOST_BYTES_OF_FACTS:,} bytes.")
    return path.read_text(encoding="utf-8")


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps other runs out of a folder by a lock of the operating system, which ends with the
    process.
    """
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
    """The path of a file in a folder. Raises RunError where a link in the folder leads out of
    it.
    """
    root = folder.resolve()
    if not (path := (root / name).resolve()).is_relative_to(root):
        raise RunError(
            f"{folder / name} is a link to {path}, which is outside of {folder}. Remove the link."
        )
    return path


def write_files(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """The paths of the files, written into a folder by their names in it; each is whole or not
    there.
    """
    for name, content in contents.items():
        path = inside(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return [folder / name for name in contents]
