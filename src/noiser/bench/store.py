"""The folder of a benchmark: what is in it, and how it is written so that nothing is ever half there."""

from __future__ import annotations

import contextlib
import gzip
import json
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from noiser.bench.plan import Plan, parse_plan
from noiser.bench.records import Cost, Row, Selection, line
from noiser.errors import RunError, StoredFileError
from noiser.files import DRAFTS, write_bytes

if TYPE_CHECKING:
    from noiser.attribution import Attribution

__all__ = ["ATTRIBUTIONS", "COSTS", "FORMAT", "REPLIES", "ROWS", "SCHEMA", "File", "Store", "StoredAttribution"]

T = TypeVar("T")

FORMAT = "noiser.bench"
SCHEMA = 1

ROWS, COSTS, REPLIES, ATTRIBUTIONS = "rows", "costs", "replies", "attributions"
PLAN, RUN, SELECTIONS = "plan.toml", "run.json", "selections"


class File(NamedTuple):
    """A file of one block: its folder below the kind, and the block.

    Attributes:
        kind: "rows", "costs", "replies" or "attributions".
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


class StoredAttribution(NamedTuple):
    """An attribution, or why there is none.

    Attributes:
        example: the example's id.
        index: its place in the sample.
        attribution: what the method found; None where it failed.
        error: why; None where it did not.
    """

    example: str
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    attribution: Attribution | None
    error: str | None


@dataclass
class _AttributionLine:
    """What a file has of a `StoredAttribution`; there is more in it."""

    example: str
    index: int
    attribution: dict[str, Any] | None
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

    @property
    def packed(self) -> bool:
        """Whether rows are in one file, without attributions and replies."""
        return (self.path / f"{ROWS}.jsonl.gz").is_file()

    @cached_property
    def run(self) -> Mapping[str, Any]:
        """The resolved plan and its fingerprint, models, machine, versions and sessions."""
        return self._json(self.path / RUN)

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        place = self.path / PLAN
        return parse_plan(self._text(place), str(place))

    def selections(self) -> list[Selection]:
        """Which examples were chosen for each model and data set, in the order of the plan."""
        found: list[Selection] = []
        for model in self.plan.labels("models"):
            for data in self.plan.labels("data"):
                selection = self.selection(model, data)
                found += [selection] if selection else []
        return found

    def selection(self, model: str, data: str) -> Selection | None:
        """Which examples were chosen; None where nobody has chosen yet."""
        place = self.path / SELECTIONS / model / f"{data}.json"
        if not place.is_file():
            return None
        try:
            return Selection.loads(self._text(place))
        except (ValueError, TypeError, KeyError) as error:
            raise _damaged(place, error) from error

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of model, data, method, metric and block."""
        return self._records(ROWS, Row)

    def costs(self) -> Iterator[Cost]:
        """What every row took, in the same order; damaged files are left out, with a warning."""
        return self._records(COSTS, Cost)

    def attributions(self, model: str, data: str, method: str) -> Iterator[StoredAttribution]:
        """The attributions of a method, by index; none where the benchmark is packed."""
        from noiser.attribution.restore import from_dict

        for place in sorted((self.path / ATTRIBUTIONS / model / data / method).glob("*.jsonl")):
            for one in self._lines(place, record=_AttributionLine):
                att = from_dict(one.attribution) if one.attribution else None
                yield StoredAttribution(one.example, one.index, att, one.error)

    def used(self) -> dict[str, set[str]]:
        """The labels of each kind that rows or attributions are stored of, and of models that were met."""
        found = {"models": set(self.run["models"]), "data": set[str](), "methods": set[str](), "metrics": set[str]()}
        for kind in (ATTRIBUTIONS, ROWS):
            for place in (self.path / kind).rglob("*.jsonl"):
                for each, label in zip(found, place.relative_to(self.path / kind).parts[:-1], strict=False):
                    found[each].add(label)
        return found

    # ---- blocks -----------------------------------------------------------------------------------------------------

    def read(self, file: File) -> dict[str, dict[str, Any]]:
        """The lines of a file by the id of their example; none if it is not there, or holds costs and is damaged."""
        place = self.path / file.path
        if not place.is_file():
            return {}
        return {values["example"]: values for values in self._lines(place)}

    def add(self, file: File, lines: Iterable[Mapping[str, Any]]) -> None:
        """Adds lines to a file, by index; one of an example that it has takes the old one's place. Raises RunError."""
        merged = {**self.read(file), **{values["example"]: values for values in lines}}
        ordered = sorted(merged.values(), key=lambda values: values["index"])
        self._write(self.path / file.path, "".join(map(line, ordered)))

    def write_selection(self, selection: Selection) -> None:
        """Writes what was chosen. Raises RunError."""
        self._write(self.path / SELECTIONS / selection.model / f"{selection.data}.json", selection.dumps())

    def drop_selections(self, data: str) -> None:
        """Removes what was chosen of a data set, for all models. Raises RunError."""
        for place in (self.path / SELECTIONS).glob(f"*/{data}.json"):
            with explained(place, "remove"):
                place.unlink()

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Replaces what is known about the run. Raises RunError."""
        write_json(self.path, run)
        self.__dict__["run"] = run

    def write_plan(self, text: str) -> None:
        """Replaces the plan. Raises RunError."""
        self._write(self.path / PLAN, text)
        self.__dict__.pop("plan", None)

    def _write(self, place: Path, text: str) -> None:
        with explained(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(place, text.encode())

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Keeps other runs out of the folder. The lock is the operating system's: it ends with the process."""
        from filelock import FileLock, Timeout

        with explained(self.path):
            lock = FileLock(self.path / ".lock")
            try:
                lock.acquire(timeout=0)
            except Timeout as error:
                raise RunError(
                    f"Another run is at work in {self.path}; expected one at a time. Wait for it, or stop it first."
                ) from error
        try:
            yield
        finally:
            lock.release()

    def sweep(self) -> None:
        """Removes drafts of files that a killed run left behind; only for who holds the lock."""
        with explained(self.path, "tidy up"):
            for draft in self.path.rglob(DRAFTS):
                draft.unlink()

    # ---- reading ----------------------------------------------------------------------------------------------------

    def _records(self, kind: str, record: type[T]) -> Iterator[T]:
        whole = self.path / f"{kind}.jsonl.gz"
        if whole.is_file():
            try:
                text = gzip.decompress(whole.read_bytes()).decode()
            except (OSError, EOFError, ValueError) as error:
                self._skip(whole, error)
                return
            yield from self._lines(whole, text, record)
            return
        for place in self.files(kind):
            yield from self._lines(place, record=record)

    def files(self, kind: str) -> list[Path]:
        """The files of a kind, in the order of the plan's labels, then of blocks."""
        order = [self.plan.labels(name) for name in ("models", "data", "methods", "metrics")]
        places = list((self.path / kind).rglob("*.jsonl"))
        return sorted(places, key=lambda place: _rank(place.relative_to(self.path / kind).parts, order))

    def _lines(self, place: Path, text: str | None = None, record: type[T] = dict[str, Any]) -> Iterator[T]:
        """The lines of a file, checked to be such records."""
        adapter = TypeAdapter(record)
        try:
            for each in (self._text(place) if text is None else text).splitlines():
                yield adapter.validate_python(json.loads(each))
        except ValidationError as error:
            problem = error.errors()[0]
            self._skip(place, ValueError(": ".join([*map(str, problem["loc"][:1]), problem["msg"]])))
        except (ValueError, RecursionError) as error:
            self._skip(place, error)

    def _skip(self, place: Path, error: Exception) -> None:
        """Goes on without a damaged file of costs, which no row depends on. Raises StoredFileError for all others."""
        if place.relative_to(self.path).parts[0] not in (COSTS, f"{COSTS}.jsonl.gz"):
            raise _damaged(place, error) from error
        warnings.warn(
            f"{place} is damaged: {error}. What cannot be read of it is left out; only forecasts and tables of seconds "
            "are made of costs.",
            stacklevel=2,
        )

    def _json(self, place: Path) -> dict[str, Any]:
        try:
            values = json.loads(self._text(place))
        except ValueError as error:
            raise _damaged(place, error) from error
        return values if isinstance(values, dict) else {}

    def _text(self, place: Path) -> str:
        with explained(place, "read"):
            return place.read_text(encoding="utf-8")


def _rank(parts: Sequence[str], order: Sequence[Sequence[str]]) -> tuple[Any, ...]:
    """A place for each label: that of the plan, and behind those the ones that it does not have, by name."""
    ranks = (
        (labels.index(part), "") if part in labels else (len(labels), part)
        for part, labels in zip(parts[:-1], order, strict=False)
    )
    return (*ranks, parts[-1])


def write_json(folder: Path, run: Mapping[str, Any]) -> None:
    """Writes what is known about a run, which makes a folder a benchmark's. Raises RunError."""
    place = folder / RUN
    with explained(place):
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(place, run_bytes(run))


def run_bytes(run: Mapping[str, Any]) -> bytes:
    """What is known about a run, as its file holds it."""
    return (json.dumps(run, indent=1, ensure_ascii=False) + "\n").encode()


def _damaged(place: Path, error: Exception) -> StoredFileError:
    return StoredFileError(
        f"{place} is damaged: {error}. Delete that file and run the plan again: it makes what is missing."
    )


@contextlib.contextmanager
def explained(place: Path, doing: str = "write") -> Generator[None]:
    """Says of an error of the file system what it means for a benchmark."""
    try:
        yield
    except RunError:
        raise
    except OSError as error:
        raise RunError(
            f"Cannot {doing} {place}: {error.strerror or error}. What is stored is whole; when the reason is gone, the "
            "same command goes on where this one stopped."
        ) from error
