"""A benchmark from beginning to end: what is missing is listed, forecast, done and stored."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from noiser.bench.executors import Executor, Inline, LocalWorker, Pool, ray_pool
from noiser.bench.plan import ATTRIBUTION, DataEntry, Plan
from noiser.bench.progress import Forecast, Key
from noiser.bench.records import Selection
from noiser.bench.resolve import Definition, check_change, fingerprint
from noiser.bench.samples import block_of, select_all
from noiser.bench.store import ATTRIBUTIONS, REPLIES, ROWS, RUN, File, Store, locked
from noiser.bench.tasks import (
    Assignment,
    Candidates,
    Finished,
    Job,
    JobAssignment,
    JudgeReady,
    Lost,
    ModelReady,
    Preparation,
    PreparationAssignment,
    Sampled,
    Setup,
    Task,
)
from noiser.bench.worker import check_identity
from noiser.errors import PlanError, RunError, StoredFileError
from noiser.version import __version__, version_of

ExecutorName = Literal["local", "ray"]

Measured = dict[tuple[str, str], frozenset[str]]
"""The examples that have a row, by method and metric."""


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
    """Hears how it goes."""

    def say(self, text: str) -> None:
        """Something worth reading."""

    def selecting(self, selection: Selection) -> None:
        """How far the choice of examples is."""

    def progress(self, forecast: Forecast, last: Finished | None) -> None:
        """How far the rows are."""


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
    trust_remote_code: bool = False,
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
        trust_remote_code: lets models of the plan that ask for it run the Python code that comes with them.
        command: what was typed, for the record.

    Raises:
        PlanError: the plan cannot be read, or changes the meaning of what is stored.
        RunError: the folder cannot be written, or is in use.
        NoiserError: a model, a judge or a data set is not there.
    """
    definition = Definition(Path(plan), data_dir)
    for warning in _check_trust(definition.plan, str(plan), trust_remote_code):
        listener.say(warning)
    if dry_run:
        listener.say(f"At most: {definition.forecast(definition.upper_bounds())}.")
        return Outcome(0, 0, ())
    folder = Path(folder)
    if Store.is_packed(folder):
        raise RunError(f"{folder} is packed. Unpack it into a folder of its own: noiser bench unpack {folder} -o NEW")
    with locked(folder):
        run = _Run(definition, _open_store(folder, definition), retry_errors)
        run.begin({"command": command, "executor": executor, "workers": workers})
        listener.say(f"At most: {definition.forecast(definition.upper_bounds(), costs=run.store.costs())}.")
        chosen = _executor(executor, run.setup, workers)
        try:
            run.prepare(chosen, listener)
            return run.work(chosen, listener)
        finally:
            chosen.close()


def _check_trust(plan: Plan, source: str, trust_remote_code: bool) -> Iterator[str]:
    """Which keys the plan sends where. Raises PlanError where it would run a model's code and only the plan says so."""
    for entry in plan.models:
        if entry.trust_remote_code and not trust_remote_code:
            raise PlanError(
                f"{source}: models, {entry.label!r}: trust_remote_code = true runs Python code that comes with the "
                "model; expected it of the command line too. Add --trust-remote-code if you trust that code."
            )
        if "api_key_env" in entry.engine_args:
            yield f"The key in {entry.engine_args['api_key_env']} goes to {entry.name}."
    for entry in plan.metrics:
        if "api_key_env" in entry.judge_args:
            address = entry.judge_args.get("base_url", "the address in OPENAI_BASE_URL, or OpenAI")
            yield f"The key in {entry.judge_args['api_key_env']} goes to {address}."


def _open_store(folder: Path, definition: Definition) -> Store:
    """The folder's store; a new one where there is none, or one that no plan has been recorded in.

    Raises:
        PlanError: the plan changes what is stored. StoredFileError: nothing says what is stored.
    """
    if (folder / RUN).is_file():
        store = Store(folder)
        used, run = store.used(), store.run
        intact = run.get("fingerprint") == fingerprint(run["resolved"]) and used["models"] <= run["models"].keys()
        if intact:
            check_change(run["resolved"], definition.resolved, str(folder), used)
            return store
    plan = definition.plan
    return Store.create(folder, {"plan": plan.name, "resolved": definition.resolved, "seed": plan.seed})


def _executor(name: ExecutorName, setup: Setup, workers: int | None) -> Executor:
    """Of local workers, each has its share of the cores, unless the user has said how many threads there are to be."""
    if name == "ray":
        return ray_pool(setup, workers)
    if workers == 0:
        return Inline(setup)
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, _core_count() // (workers or 1))
    return Pool(dataclasses.replace(setup, threads=threads), workers or 1, LocalWorker)


class _Run:
    """A plan at work in its folder."""

    def __init__(self, definition: Definition, store: Store, retry_errors: bool) -> None:
        self.definition, self.plan, self.store, self.retry_errors = definition, definition.plan, store, retry_errors

    def begin(self, session: Mapping[str, Any]) -> None:
        """Records the plan and this session; drops what was chosen of data that now mean something else."""
        self.store.sweep()
        run, resolved = self.store.run, self.definition.resolved
        before, used = run["resolved"]["data"], self.store.used()["data"]
        for label, meaning in resolved["data"].items():
            if label not in used and before.get(label) != meaning:
                self.store.drop_selections(label)
        surroundings = {"versions": _versions(), "machine": _machine()}
        started = datetime.now(UTC).isoformat(timespec="seconds")
        sessions = [*run.get("sessions", ()), {"started": started, **session, **surroundings}]
        plan = {"plan": self.plan.name, "fingerprint": fingerprint(resolved), "resolved": resolved}
        self.store.write_run({**run, **plan, "sessions": sessions, **surroundings})
        self.store.write_plan(self.definition.text)

    @property
    def setup(self) -> Setup:
        """What workers need to know of the plan and of what is stored."""
        judges = {label: self._judges[label] for label in self._judges.keys() & self.store.used()["metrics"]}
        return Setup(plan=self.plan, judges=judges)

    @property
    def _identities(self) -> dict[str, Mapping[str, Any]]:
        return {label: known["identity"] for label, known in self.store.run["models"].items()}

    @property
    def _judges(self) -> dict[str, Mapping[str, Any]]:
        return self.store.run.get("judges", {})

    # ---- examples ---------------------------------------------------------------------------------------------------

    def prepare(self, executor: Executor, listener: Listener) -> None:
        """Chooses the examples of every model and data set."""
        for model in self.plan.labels("models"):
            for entry in self.plan.data_for(model):
                if not entry.only_correct:
                    self.store.write_selection(select_all(model, self._candidates(model, entry)))
        tasks = [Preparation(model) for model in self.plan.labels("models")]
        for event in executor.run([task for task in tasks if self._preparation(task)], self._preparation):
            if isinstance(event, Lost):
                raise RunError(f"The model {event.task.model!r} could not be prepared: {event.reason}.")
            if isinstance(event, ModelReady):
                self._on_model_ready(event)
            if isinstance(event, Selection):
                self.store.write_selection(event)
                listener.selecting(event)

    def _candidates(self, model: str, entry: DataEntry) -> Candidates:
        return Candidates(entry, *self.definition.drawn[entry.label], self.store.selection(model, entry.label))

    def _preparation(self, task: Task) -> Assignment | None:
        assert isinstance(task, Preparation)
        all_candidates = [
            self._candidates(task.model, entry) for entry in self.plan.data_for(task.model) if entry.only_correct
        ]
        lacking = tuple(
            each for each in all_candidates if each.selection is None or not each.selection.serves(each.entry.limit)
        )
        known = self._identities.get(task.model)
        return PreparationAssignment(task, lacking, known) if lacking or known is None else None

    def _on_model_ready(self, ready: ModelReady) -> None:
        models = self.store.run["models"]
        if ready.model in models:
            check_identity(f"The model {ready.model!r}", ready.identity, models[ready.model]["identity"])
        known = {"identity": dict(ready.identity), "tokens_per_second": round(ready.tokens_per_second, 1)}
        self.store.write_run({**self.store.run, "models": {**models, ready.model: known}})

    def _on_judge_ready(self, ready: JudgeReady) -> None:
        if ready.metric in self._judges and ready.metric in self.store.used()["metrics"]:
            check_identity(f"The judge of {ready.metric!r}", ready.identity, self._judges[ready.metric])
        else:
            self.store.write_run({**self.store.run, "judges": {**self._judges, ready.metric: dict(ready.identity)}})

    # ---- rows -------------------------------------------------------------------------------------------------------

    def work(self, executor: Executor, listener: Listener) -> Outcome:
        """Does every job of which something is missing."""
        missing = {job: counts for job in self.jobs() if (counts := self._missing(job, self._stored(job)[1]))}
        speeds = {label: known["tokens_per_second"] for label, known in self.store.run["models"].items()}
        loads = Counter[Key]()
        for counts in missing.values():
            loads.update(counts)
        forecast = self.definition.forecast(loads, speeds, self.store.costs(), executor.workers)
        listener.say(f"To do: {forecast}.")
        rows = errors = 0
        lost: list[str] = []
        listener.progress(forecast, None)
        for event in executor.run([*missing], self._job):
            if isinstance(event, Lost):
                lost.append(f"{event.task}: {event.reason}")
            if isinstance(event, JudgeReady):
                self._on_judge_ready(event)
            if isinstance(event, Finished):
                for file, lines in event.files:
                    if file.kind == ROWS:
                        self._forget_errors(file, lines)
                    self.store.add(file, lines)
                rows, errors = rows + event.examples, errors + event.errors
                key = Key(event.task.model, event.task.data, event.method, event.metric)
                forecast.done(key, event.seconds, event.examples)
                listener.progress(forecast, event)
        return Outcome(rows, errors, tuple(lost))

    def _forget_errors(self, file: File, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes errors out of the replies where another try gave numbers without words, which left them there."""
        replies = file._replace(kind=REPLIES)
        stored = self.store.read(replies)
        gone = [row for row in rows if row["error"] is None and "error" in stored.get(row["example"], ())]
        if gone:
            self.store.add(replies, [{"example": row["example"], "index": row["index"]} for row in gone])

    def jobs(self) -> Iterator[Job]:
        """All jobs, round by round; every second round goes through the models backwards, so that fewer are loaded."""
        blocks = {pair: -(-len(chosen) // self.plan.block) for pair, chosen in self._chosen.items()}
        for block in range(max(blocks.values(), default=0)):
            for pair in reversed(blocks) if block % 2 else blocks:
                if block < blocks[pair]:
                    yield Job(*pair, block)

    @cached_property
    def _chosen(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The ids of the examples of each model and data set; known after `prepare`."""
        chosen: dict[tuple[str, str], tuple[str, ...]] = {}
        for model in self.plan.labels("models"):
            for entry in self.plan.data_for(model):
                candidates = self._candidates(model, entry)
                ids = candidates.selection.chosen[: entry.limit] if candidates.selection else ()
                gone = set(ids) - self.definition.by_id[entry.label].keys()
                if gone:
                    raise StoredFileError(
                        f"The examples chosen of {entry.label!r} for {model!r} in {self.store.path} are not all in the "
                        f"data set, such as {min(gone)!r}. Use the data that they were chosen from, or another folder."
                    )
                chosen[model, entry.label] = ids
        return chosen

    def _examples(self, job: Job) -> tuple[Sampled, ...]:
        chosen = self._chosen[job.model, job.data]
        return block_of(self.definition.by_id[job.data], chosen, job.block, self.plan.block)

    def _job(self, task: Task) -> Assignment | None:
        assert isinstance(task, Job)
        attributions, measured = self._stored(task)
        if not self._missing(task, measured):
            return None
        for method, lines in attributions.items():
            self.store.check_attributions(File(ATTRIBUTIONS, (task.model, task.data, method), task.block), lines)
        return JobAssignment(task, self._examples(task), attributions, measured, self._identities.get(task.model))

    def _stored(self, job: Job) -> tuple[dict[str, dict[str, dict[str, Any]]], Measured]:
        """What is stored of a job: attributions by method, and by method and metric the examples that have a row.

        A row about an attribution counts only where that attribution is there too; in a folder made of a pack, also
        where no metric needs it.
        """
        pair = (job.model, job.data)
        attributions = {
            entry.label: self._valid(File(ATTRIBUTIONS, (*pair, entry.label), job.block))
            for entry in self.plan.methods_for(*pair)
        }
        measured = {
            (method, metric): frozenset(self._valid(File(ROWS, (*pair, method, metric), job.block)))
            for method, metric, _ in self.plan.kinds(*pair)
        }
        lacking = self._lacking(job, measured) if self.store.run.get("unpacked") else None
        for method, lines in attributions.items():
            known = measured[method, ATTRIBUTION]
            needed = known if lacking is None else set().union(*(ids for at, ids in lacking.items() if at[0] == method))
            measured[method, ATTRIBUTION] = known - (needed - lines.keys())
        return attributions, measured

    def _valid(self, file: File) -> dict[str, dict[str, Any]]:
        """Stored lines; those with an error count as missing where they are to be tried again."""
        lines = self.store.read(file)
        return {key: values for key, values in lines.items() if not (self.retry_errors and values["error"])}

    def _missing(self, job: Job, measured: Measured) -> Counter[Key]:
        """Rows that a job lacks, by kind, where `measured` are the examples that have one."""
        return Counter(
            {Key(job.model, job.data, *kind): len(ids) for kind, ids in self._lacking(job, measured).items() if ids}
        )

    def _lacking(self, job: Job, measured: Measured) -> dict[tuple[str, str], set[str]]:
        """The examples of a job that have no row, by method and metric."""
        examples = self._examples(job)
        return {
            (method, metric): {sampled.id for sampled in examples if limit is None or sampled.item.index < limit}
            - measured[method, metric]
            for method, metric, limit in self.plan.kinds(job.model, job.data)
        }


# ---- what a run is recorded with -------------------------------------------------------------------------------------


def _versions() -> dict[str, str]:
    """Of noiser, Python, and the packages that numbers depend on."""
    versions = {"noiser": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "scipy", "scikit-learn", "ray"):
        try:
            versions[package] = version_of(package)
        except PackageNotFoundError:
            continue
    return versions


def _machine() -> dict[str, Any]:
    """Processor, cores and graphics cards of this machine; of a cluster, of the one that stores the rows."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"system": sys.platform, "cpu": _processor(), "cores": _core_count(), "gpus": gpus}


def _core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
