"""A benchmark from beginning to end: what is missing is found, told, done and stored."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from noiser.bench.executor import Executor, Inline, Lost
from noiser.bench.forecast import Forecast, Key, Load, attribution_tokens, metric_tokens
from noiser.bench.identity import check_identity
from noiser.bench.machine import core_count, machine, now, versions
from noiser.bench.plan import ATTRIBUTION, DataEntry, Plan, combined, read_plan
from noiser.bench.records import Selection
from noiser.bench.resolve import check_change, fingerprint, resolve
from noiser.bench.samples import block_of, draw, is_enough, select_all
from noiser.bench.store import ATTRIBUTIONS, FORMAT, REPLIES, ROWS, RUN, SCHEMA, File, Store, write_json
from noiser.bench.tasks import (
    Assignment,
    Finished,
    Job,
    JobAssignment,
    ModelReady,
    Preparation,
    PreparationAssignment,
    Sampled,
    Selected,
    Setup,
    Task,
    Wanted,
)
from noiser.durations import duration
from noiser.errors import PlanError, RunError
from noiser.registry import unversioned

__all__ = ["ExecutorName", "Listener", "Outcome", "run_bench"]

ExecutorName = Literal["local", "ray"]

_CHARACTERS = 4.3
"""Characters a token, for the forecast."""


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        rows: rows that it added.
        errors: how many of them are errors.
        lost: jobs that were given up, with the reason.
    """

    rows: int
    errors: int
    lost: tuple[str, ...]


@runtime_checkable
class Listener(Protocol):
    """Is told how it goes."""

    def say(self, text: str) -> None:
        """Something worth reading."""
        ...

    def selecting(self, selection: Selection) -> None:
        """How far the choice of examples is."""
        ...

    def progress(self, forecast: Forecast, last: Finished | None) -> None:
        """How far the rows are."""
        ...


def run_bench(
    plan: str | PathLike[str],
    folder: str | PathLike[str],
    listener: Listener,
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    data_dir: str | PathLike[str] | None = None,
    retry_errors: bool = False,
    dry_run: bool = False,
    command: str = "",
) -> Outcome:
    """Does what is missing of a plan, and stores every chunk as soon as it is finished.

    Args:
        plan: the TOML file.
        folder: where rows are stored; what is there already is not done again.
        listener: is told how it goes.
        executor: "local", processes of this machine; "ray", actors of a Ray cluster.
        workers: how many; None: one here, as many as there is room for on a cluster; 0: in this process.
        data_dir: as for `noiser.data.load`.
        retry_errors: rows that are errors count as missing.
        dry_run: says what it would take, and does nothing.
        command: what was typed, for the record.

    Raises:
        PlanError: the plan cannot be read, or changes the meaning of what is stored.
        RunError: the folder cannot be written, or is in use.
        NoiserError: a model, a judge or a data set is not there.
    """
    read, text = read_plan(Path(plan))
    bench = _Bench(read, text, Path(folder), data_dir, str(plan), retry_errors)
    if dry_run:
        listener.say(f"At most: {describe(bench.forecast(bench.upper_bounds(), {}))}.")
        return Outcome(0, 0, ())
    store = bench.open()
    with store.locked():
        store.sweep()
        bench.begin(command, executor, workers)
        listener.say(f"At most: {describe(bench.forecast(bench.upper_bounds(), {}))}.")
        setup = Setup(plan=read, identities=bench.identities, threads=_threads(executor, workers))
        chosen = _executor(executor, setup, workers)
        try:
            bench.prepare(chosen, listener)
            return bench.work(chosen, listener)
        finally:
            chosen.close()


def describe(forecast: Forecast) -> str:
    """A forecast in words."""
    done, total = forecast.rows
    assert not done, "a forecast is described before the work"
    seconds = forecast.seconds_left()
    if not total:
        return "nothing is missing"
    time = "time not known before the models have run" if seconds is None else f"about {duration(seconds)}"
    return (
        f"{forecast.attributions:,} attributions and {forecast.measurements:,} measurements, "
        f"about {forecast.token_forwards:.2g} token-forwards, {time} with {forecast.workers} "
        f"worker{'s' if forecast.workers > 1 else ''}"
    )


def _threads(executor: ExecutorName, workers: int | None) -> int | None:
    """Cores divided among the workers, unless the user has said how many threads there are to be."""
    if executor != "local" or workers == 0 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, core_count() // (workers or 1))


def _executor(name: ExecutorName, setup: Setup, workers: int | None) -> Executor:
    if name == "ray":
        from noiser.bench.cluster import Cluster

        return Cluster(setup, workers)
    if workers == 0:
        return Inline(setup)
    from noiser.bench.local import Local

    return Local(setup, workers or 1)


class _Bench:
    """A plan and its folder."""

    def __init__(self, plan: Plan, text: str, folder: Path, data_dir: Any, source: str, retry_errors: bool) -> None:
        self.plan, self.text, self.folder, self.source, self.retry_errors = plan, text, folder, source, retry_errors
        self.resolved = resolve(plan, source)
        self.drawn: dict[str, tuple[tuple[Sampled, ...], tuple[str, ...]]] = {}
        for entry in plan.data:
            try:
                self.drawn[entry.label] = draw(entry, plan.seed, data_dir)
            except LookupError as error:
                raise PlanError(f"{source}: data, {entry.label!r}: {error}") from error
        self.store: Store | None = None

    # ---- the folder -------------------------------------------------------------------------------------------------

    def open(self) -> Store:
        """The folder's store; a new one where there is none. Raises PlanError where the plan does not fit it."""
        if (self.folder / RUN).is_file():
            self.store = Store(self.folder)
            if self.store.packed:
                raise RunError(f"{self.folder} is packed: it has rows without attributions. Give another folder.")
            check_change(self.store.run["resolved"], self.resolved, str(self.folder), self.store.used())
        else:
            run = {
                "format": FORMAT,
                "schema": SCHEMA,
                "plan": self.plan.name,
                "fingerprint": "",
                "resolved": self.resolved,
            }
            write_json(self.folder, run | {"seed": self.plan.seed, "models": {}, "sessions": []})
            self.store = Store(self.folder)
        return self.store

    def begin(self, command: str, executor: str, workers: int | None) -> None:
        """Takes note of the plan and of this session; drops what was chosen of data that now mean something else."""
        assert self.store is not None
        before, used = self.store.run["resolved"]["data"], self.store.used()["data"]
        for label, meaning in self.resolved["data"].items():
            if label not in used and before.get(label) != meaning:
                self.store.drop_selections(label)
        session = {
            "started": now(),
            "command": command,
            "executor": executor,
            "workers": workers,
            "versions": versions(),
            "machine": machine(),
        }
        run = dict(self.store.run)
        run |= {"plan": self.plan.name, "fingerprint": fingerprint(self.resolved), "resolved": self.resolved}
        run["sessions"] = [*run["sessions"], session]
        run |= {"versions": session["versions"], "machine": session["machine"]}
        self.store.write_run(run)
        self.store.write_plan(self.text)

    @property
    def identities(self) -> dict[str, Mapping[str, Any]]:
        """What is known of models, by label."""
        assert self.store is not None
        return {label: known["identity"] for label, known in self.store.run["models"].items()}

    # ---- examples ---------------------------------------------------------------------------------------------------

    def prepare(self, executor: Executor, listener: Listener) -> None:
        """Chooses the examples of every model and data set."""
        assert self.store is not None
        for model in self.plan.labels("models"):
            for entry in self.plan.data:
                if not entry.only_correct:
                    self.store.write_selection(select_all(model, self._wanted(model, entry)))
        tasks = [Preparation(model) for model in self.plan.labels("models")]
        for event in executor.run(tasks, self._preparation):
            if isinstance(event, Lost):
                raise RunError(f"The model {event.task.model!r} could not be prepared: {event.reason}.")
            if isinstance(event, ModelReady):
                self._meet(event)
            if isinstance(event, Selected):
                self.store.write_selection(event.selection)
                listener.selecting(event.selection)
        executor.setup = dataclasses.replace(executor.setup, identities=self.identities)

    def _wanted(self, model: str, entry: DataEntry) -> Wanted:
        assert self.store is not None
        examples, notes = self.drawn[entry.label]
        return Wanted(entry, examples, notes, self.store.selection(model, entry.label))

    def _preparation(self, task: Task) -> Assignment | None:
        assert isinstance(task, Preparation)
        wanted = [self._wanted(task.model, entry) for entry in self.plan.data if entry.only_correct]
        lacking = tuple(each for each in wanted if not is_enough(each.known, each.entry.limit))
        return PreparationAssignment(task, lacking) if lacking or task.model not in self.identities else None

    def _meet(self, ready: ModelReady) -> None:
        assert self.store is not None
        check_identity(ready.model, ready.identity, self.identities.get(ready.model))
        known = {"identity": dict(ready.identity), "tokens_per_second": round(ready.tokens_per_second, 1)}
        self.store.write_run({**self.store.run, "models": {**self.store.run["models"], ready.model: known}})

    # ---- rows -------------------------------------------------------------------------------------------------------

    def work(self, executor: Executor, listener: Listener) -> Outcome:
        """Does every job of which something is missing."""
        assert self.store is not None
        jobs = list(self.jobs())
        loads: dict[Key, int] = {}
        for job in jobs:
            for key, count in self._missing(job, self._stored(job)[1]).items():
                loads[key] = loads.get(key, 0) + count
        forecast = self.forecast(
            loads,
            {label: known["tokens_per_second"] for label, known in self.store.run["models"].items()},
            executor.workers,
        )
        listener.say(f"To do: {describe(forecast)}.")
        rows = errors = 0
        lost: list[str] = []
        listener.progress(forecast, None)
        for event in executor.run(jobs, self._job):
            if isinstance(event, Lost):
                lost.append(f"{event.task}: {event.reason}")
            if isinstance(event, Finished):
                for file, lines in event.files:
                    if file.kind == ROWS:
                        self._forget_errors(file, lines)
                    self.store.add(file, lines)
                rows, errors = rows + event.examples, errors + event.errors
                forecast.done(
                    Key(event.task.model, event.task.data, event.method, event.metric), event.seconds, event.examples
                )
                listener.progress(forecast, event)
        return Outcome(rows, errors, tuple(lost))

    def _forget_errors(self, file: File, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes errors out of the replies where another try has found numbers without words, which left them there."""
        assert self.store is not None
        replies = file._replace(kind=REPLIES)
        stored = self.store.read(replies)
        gone = [row for row in rows if row["error"] is None and "error" in stored.get(row["example"], ())]
        if gone:
            self.store.add(replies, [{"example": row["example"], "index": row["index"]} for row in gone])

    def jobs(self) -> Iterator[Job]:
        """All jobs, round by round; every second round goes through the models backwards, so that fewer are loaded."""
        pairs = [(model, data) for model in self.plan.labels("models") for data in self.plan.labels("data")]
        blocks = {pair: -(-len(self._chosen(*pair)) // self.plan.block) for pair in pairs}
        for block in range(max(blocks.values(), default=0)):
            for model, data in reversed(pairs) if block % 2 else pairs:
                if block < blocks[model, data]:
                    yield Job(model, data, block)

    def _chosen(self, model: str, data: str) -> tuple[str, ...]:
        assert self.store is not None
        selection = self.store.selection(model, data)
        entry = next(entry for entry in self.plan.data if entry.label == data)
        return selection.chosen[: entry.limit] if selection else ()

    def _examples(self, job: Job) -> tuple[Sampled, ...]:
        return block_of(self.drawn[job.data][0], self._chosen(job.model, job.data), job.block, self.plan.block)

    def _job(self, task: Task) -> Assignment | None:
        assert isinstance(task, Job)
        assert self.store is not None
        attributions, measured = self._stored(task)
        if not self._missing(task, measured):
            return None
        return JobAssignment(task, self._examples(task), attributions, measured)

    def _stored(self, job: Job) -> tuple[dict[str, dict[str, dict[str, Any]]], dict[tuple[str, str], frozenset[str]]]:
        """What is stored of a job: attributions by method, and by method and metric the examples that have a row.

        A row about an attribution counts only where that attribution is there too.
        """
        place = (job.model, job.data)
        attributions = {
            entry.label: self._valid(File(ATTRIBUTIONS, (*place, entry.label), job.block))
            for entry in self.plan.methods_for(*place)
        }
        measured = {
            (method, metric): frozenset(self._valid(File(ROWS, (*place, method, metric), job.block)))
            for method, metric, _ in self.plan.kinds(*place)
        }
        return attributions, {
            (method, metric): found.intersection(attributions[method]) if metric == ATTRIBUTION else found
            for (method, metric), found in measured.items()
        }

    def _valid(self, file: File) -> dict[str, dict[str, Any]]:
        """Stored lines; those with an error count as missing where they are to be tried again."""
        assert self.store is not None
        lines = self.store.read(file)
        return {key: values for key, values in lines.items() if not (self.retry_errors and values["error"])}

    def _missing(self, job: Job, measured: Mapping[tuple[str, str], frozenset[str]]) -> dict[Key, int]:
        """Rows that a job lacks, by kind, where `measured` are the examples that have one."""
        found: dict[Key, int] = {}
        examples = self._examples(job)
        for method, metric, limit in self.plan.kinds(job.model, job.data):
            wanted = {sampled.id for sampled in examples if limit is None or sampled.item.index < limit}
            if count := len(wanted - measured[method, metric]):
                found[Key(job.model, job.data, method, metric)] = count
        return found

    # ---- what it takes ----------------------------------------------------------------------------------------------

    def upper_bounds(self) -> dict[Key, int]:
        """How many rows of each kind there can be at most; exact where examples are chosen already."""
        counts: dict[Key, int] = {}
        for entry in self.plan.data:
            most = combined((entry.limit, len(self.drawn[entry.label][0])))
            for model in self.plan.labels("models"):
                for method, metric, limit in self.plan.kinds(model, entry.label):
                    counts[Key(model, entry.label, method, metric)] = combined((most, limit)) or 0
        return counts

    def forecast(self, counts: Mapping[Key, int], speeds: Mapping[str, float], workers: int = 1) -> Forecast:
        """What these rows take."""
        costs = self.store.costs() if self.store else ()
        loads = {key: Load(count, self._tokens(key)) for key, count in counts.items()}
        return Forecast(loads, speeds, costs, workers)

    def _tokens(self, key: Key) -> float:
        entry = next(entry for entry in self.plan.data if entry.label == key.data)
        examples = self.drawn[key.data][0]
        characters = sum(len(str(sampled.item.prompt)) for sampled in examples) / len(examples)
        length, targets = characters / _CHARACTERS + 1 + entry.max_new_tokens, entry.max_new_tokens
        if key.metric == ATTRIBUTION:
            method = self.resolved["methods"][key.method]
            return attribution_tokens(unversioned(method["name"]), method["parameters"], length, targets)
        metric = self.resolved["metrics"][key.metric]
        rates = len(metric["rates"] or range(5))
        return metric_tokens(unversioned(metric["name"]), metric["masks"], rates, length, targets)
