"""The folder of a benchmark: what is in it, and how it is written so that nothing is ever half there."""

from __future__ import annotations

import contextlib
import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import BaseModel, Field, ValidationError, create_model

from noiser.bench.plan import Plan, parse_plan
from noiser.bench.records import Cost, Label, Row, Selection, line, parse
from noiser.errors import RunError, StoredFileError
from noiser.files import DRAFTS, parse_json, write_bytes

if TYPE_CHECKING:
    from noiser.attribution import Attribution


FORMAT = "noiser.bench"
SCHEMA = 1

ROWS, COSTS, REPLIES, ATTRIBUTIONS = "rows", "costs", "replies", "attributions"
PLAN, RUN, SELECTIONS = "plan.toml", "run.json", "selections"

Record = TypeVar("Record", Row, Cost)
T = TypeVar("T")


class File(NamedTuple):
    """A file of one block.

    Attributes:
        kind: "rows", "costs", "replies", or "attributions".
        labels: model, data, method and, of all but attributions, metric.
        block: its number.
    """

    kind: str
    labels: tuple[str, ...]
    block: int

    @property
    def path(self) -> str:
        """Where it is in the benchmark's folder."""
        return "/".join((self.kind, *self.labels, f"{self.block:05}.jsonl"))


_Line = create_model("_Line", example=(str, ...), index=(int, ...))
"""What every line of a block's file has."""

_Row = create_model("_Row", error=(str | None, ...), __base__=_Line)
_LINES = {
    ROWS: _Row,
    ATTRIBUTIONS: create_model("_Attribution", attribution=(dict[str, Any] | None, ...), __base__=_Row),
}


class _Named(BaseModel):
    name: str


class _Judged(_Named):
    judge: str | None
    judge_args: dict[str, Any]


class _Known(BaseModel):
    identity: dict[str, str | None]
    tokens_per_second: float = Field(gt=0, allow_inf_nan=False)


class _Resolved(BaseModel):
    models: dict[str, _Named] = {}
    data: dict[str, dict[str, Any]] = {}
    methods: dict[str, _Named] = {}
    metrics: dict[str, _Judged] = {}


class _Session(BaseModel):
    command: str


class _RunFile(BaseModel):
    """What of run.json is used; a plan of the same fingerprint has the same `resolved`."""

    resolved: _Resolved
    models: dict[Label, _Known]
    judges: dict[str, dict[str, str | None]] = {}
    sessions: list[_Session] = []


class StoredAttribution(NamedTuple):
    """An attribution, or why there is none.

    Attributes:
        example: the example's id.
        index: its position in the sample.
        attribution: what the method found; None where it failed.
        error: why; None where it did not.
    """

    example: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    attribution: Attribution | None
    error: str | None


class Store:
    """A benchmark's folder, as `noiser bench run` fills it or as `noiser bench pack` wrote it.

    Args:
        path: the folder.

    Raises:
        StoredFileError: there is no benchmark in it, it is of another schema, or it is damaged.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        if not (self.path / RUN).is_file():
            raise StoredFileError(
                f"There is no benchmark in {self.path}: it has no {RUN}. Expected a folder that noiser bench run or "
                "noiser bench pack wrote."
            )
        schema = self.run.get("schema") if self.run.get("format") == FORMAT else None
        if schema != SCHEMA:
            raise StoredFileError(
                f"{self.path / RUN} has format {self.run.get('format')!r}, schema {schema!r}; this version of noiser "
                f"reads {FORMAT!r}, schema {SCHEMA}."
            )
        try:
            _RunFile.model_validate(self.run)
        except ValidationError as error:
            raise _damaged(self.path / RUN, error) from error

    @classmethod
    def create(cls, path: Path, run: Mapping[str, Any]) -> Store:
        """The store of a new benchmark.

        Raises:
            RunError: it cannot be written.
            StoredFileError: the folder holds results already.
        """
        if any(True for kind in (ROWS, ATTRIBUTIONS, SELECTIONS) for _ in (path / kind).rglob("*.json*")):
            raise StoredFileError(
                f"{path} holds results, but the {RUN} that says what they mean is missing or damaged. Put back a copy "
                "of that file, or give another folder. Nothing was changed."
            )
        head = {"format": FORMAT, "schema": SCHEMA, "fingerprint": "", "models": {}, "sessions": []}
        write_json(path, {**head, **run})
        return cls(path)

    @staticmethod
    def is_packed(path: Path) -> bool:
        """Whether rows are in one file, without attributions and replies."""
        return (path / f"{ROWS}.jsonl.gz").is_file()

    @property
    def packed(self) -> bool:
        """Whether rows are in one file, without attributions and replies."""
        return self.is_packed(self.path)

    @cached_property
    def run(self) -> Mapping[str, Any]:
        """The resolved plan and its fingerprint, models, machine, versions and sessions."""
        path = self.path / RUN
        try:
            values = parse_json(self._text(path))
        except ValueError as error:
            raise _damaged(path, error) from error
        return values if isinstance(values, dict) else {}

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        path = self.path / PLAN
        return parse_plan(self._text(path), str(path))

    def selections(self) -> list[Selection]:
        """Which examples were chosen for each model and data set, in the order of the plan."""
        models, data = self.plan.labels("models"), self.plan.labels("data")
        selections = (self.selection(model, label) for model in models for label in data)
        return [selection for selection in selections if selection]

    def selection(self, model: str, data: str) -> Selection | None:
        """Which examples were chosen; None where none are chosen yet."""
        path = self._selection_path(model, data)
        if not path.is_file():
            return None
        try:
            selection = parse(Selection, self._text(path))
            if (selection.model, selection.data) != (model, data):
                raise ValueError(f"it is about {selection.model!r} and {selection.data!r}")
        except ValueError as error:
            raise _damaged(path, error) from error
        return selection

    def _selection_path(self, model: str, data: str) -> Path:
        return self.path / SELECTIONS / model / f"{data}.json"

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of model, data, method, metric and block."""
        return self._records(Row, ROWS)

    def costs(self) -> Iterator[Cost]:
        """What every row took, in the same order; damaged files are left out, with a warning."""
        return self._records(Cost, COSTS)

    def attributions(self, model: str, data: str, method: str) -> Iterator[StoredAttribution]:
        """The attributions of a method, by index; none where the benchmark is packed."""
        for path in sorted((self.path / ATTRIBUTIONS / model / data / method).glob("*.jsonl")):
            for values in self._lines(path):
                yield _stored_attribution(path, values)

    def used(self) -> dict[str, set[str]]:
        """The labels of each kind that rows or attributions are stored of, and of models that were met."""
        used = {"models": set(self.run["models"]), "data": set[str](), "methods": set[str](), "metrics": set[str]()}
        for kind in (ATTRIBUTIONS, ROWS):
            for path in (self.path / kind).rglob("*.jsonl"):
                for labels, label in zip(used.values(), path.relative_to(self.path / kind).parts[:-1], strict=False):
                    labels.add(label)
        return used

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def read(self, file: File) -> dict[str, dict[str, Any]]:
        """The lines of a file by the id of their example; none if it is not there, or holds costs and is damaged."""
        path = self.path / file.path
        return {values["example"]: values for values in self._lines(path)} if path.is_file() else {}

    def check_attributions(self, file: File, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises StoredFileError where a line of a file of attributions holds neither an attribution nor an error."""
        for values in lines.values():
            _stored_attribution(self.path / file.path, values)

    def add(self, file: File, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds lines to a file, by index; one of an example that it has replaces the old one. Raises RunError."""
        merged = {**self.read(file), **{values["example"]: values for values in lines}}
        ordered = sorted(merged.values(), key=lambda values: values["index"])
        self._write(self.path / file.path, "".join(map(line, ordered)))

    def write_selection(self, selection: Selection) -> None:
        """Writes what was chosen. Raises RunError."""
        self._write(self._selection_path(selection.model, selection.data), selection.dumps())

    def drop_selections(self, data: str) -> None:
        """Removes what was chosen of a data set, for all models. Raises RunError."""
        for path in (self.path / SELECTIONS).glob(f"*/{data}.json"):
            with explained(path, "remove"):
                path.unlink()

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replaces what is known about the run. Raises RunError."""
        write_json(self.path, run)
        self.__dict__["run"] = run

    def write_plan(self, text: str) -> None:
        """Replaces the plan. Raises RunError."""
        self._write(self.path / PLAN, text)
        self.__dict__.pop("plan", None)

    def _write(self, path: Path, text: str) -> None:
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise StoredFileError(f"{path} is a link that leads out of the folder; expected a file. Remove the link.")
        write_file(path, text.encode())

    def sweep(self) -> None:
        """Removes drafts that another run left; only for who holds the lock."""
        with explained(self.path, "tidy up"):
            for draft in self.path.rglob(DRAFTS):
                draft.unlink()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _records(self, kind: type[Record], folder: str) -> Iterator[Record]:
        whole = self.path / f"{folder}.jsonl.gz"
        for path in [whole] if whole.is_file() else self.files(folder):
            yield from self._parsed(path, lambda text: parse(kind, text))

    def _lines(self, path: Path) -> Iterator[dict[str, Any]]:
        shape = _LINES.get(path.relative_to(self.path).parts[0], _Line)

        def read(text: str) -> dict[str, Any]:
            values = parse_json(text)
            shape.model_validate(values)
            return values

        return self._parsed(path, read)

    def _parsed(self, path: Path, read: Callable[[str], T]) -> Iterator[T]:
        """What a file has on its lines. Damaged costs, which no row depends on, are left out, with a warning."""
        with explained(path, "read"):
            content = path.read_bytes()
        try:
            text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
            yield from map(read, text.splitlines())
        except (ValueError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            if path.relative_to(self.path).parts[0] not in (COSTS, f"{COSTS}.jsonl.gz"):
                raise _damaged(path, error) from error
            warnings.warn(
                f"{path} is damaged: {_reason(error)}. What cannot be read of it is left out; only forecasts and "
                "tables of seconds are made of costs.",
                stacklevel=2,
            )

    def files(self, kind: str) -> list[Path]:
        """The files of a kind, in the order of the plan's labels, then of blocks."""
        order = [self.plan.labels(name) for name in ("models", "data", "methods", "metrics")]
        paths = list((self.path / kind).rglob("*.jsonl"))
        return sorted(paths, key=lambda path: _rank(path.relative_to(self.path / kind).parts, order))

    def _text(self, path: Path) -> str:
        with explained(path, "read"):
            return path.read_text(encoding="utf-8")


def _stored_attribution(path: Path, values: Mapping[str, Any]) -> StoredAttribution:
    from noiser.attribution import Attribution

    example, attribution, error = values["example"], values["attribution"], values["error"]
    try:
        if (attribution is None) == (error is None):
            raise ValueError(f"example {example!r} has neither or both of an attribution and an error")
        found = None if attribution is None else Attribution.from_dict(attribution)
        if found is not None and not found.targets:
            raise ValueError(f"the attribution of {example!r} has no target")
    except (StoredFileError, ValueError) as damage:
        raise _damaged(path, damage) from damage
    return StoredAttribution(example, values["index"], found, error)


def _rank(parts: Sequence[str], order: Sequence[Sequence[str]]) -> tuple[Any, ...]:
    """The position of each label in the plan; after those the ones that it does not have, by name."""
    ranks = (
        (labels.index(part), "") if part in labels else (len(labels), part)
        for part, labels in zip(parts[:-1], order, strict=False)
    )
    return (*ranks, parts[-1])


def write_json(folder: Path, run: Mapping[str, Any]) -> None:
    """Writes what is known about a run, which makes a folder a benchmark's. Raises RunError."""
    write_file(folder / RUN, run_bytes(run))


def write_file(path: Path, content: bytes) -> None:
    """Writes a whole file or nothing, in a new folder if need be. Raises RunError."""
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)


def run_bytes(run: Mapping[str, Any]) -> bytes:
    """What is known about a run, as its file holds it."""
    return (json.dumps(run, indent=1, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Keeps other runs out of a folder. The lock is the operating system's: it ends with the process."""
    from filelock import FileLock, Timeout

    with explained(folder / RUN):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunError(
                f"Another run is at work in {folder}; expected one at a time. Wait for it, or stop it first."
            ) from error
    try:
        yield
    finally:
        lock.release()


def _damaged(path: Path, error: Exception) -> StoredFileError:
    """The error for a file that cannot be what was written."""
    advice = "Delete that file and run the plan again: it makes missing rows and attributions"
    if path.name == RUN:
        advice = "Put back a copy of that file, or give another folder: nothing else says what the rows mean"
    return StoredFileError(f"{path} is damaged: {_reason(error)}. {advice}.")


def _reason(error: Exception) -> str:
    """An error on one line; of pydantic's, the first."""
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors()[0]
    return ": ".join([*map(str, detail["loc"]), detail["msg"]])


@contextlib.contextmanager
def explained(path: Path, doing: str = "write") -> Generator[None]:
    """Says of an error of the file system what it means for a benchmark."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        raise RunError(
            f"Cannot {doing} {path}: {error.strerror or error}. What is stored is whole; when the reason is gone, the "
            "same command goes on where this one stopped."
        ) from error
