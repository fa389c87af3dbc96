"""A benchmark from beginning to end: missing rows are listed, made and stored.

`status` says how much of it is done.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from noiser.bench.executors import Inline, Processes, RayActors
from noiser.bench.plan import Plan, lowest, read_plan
from noiser.bench.resolve import (
    Drawn,
    Selection,
    check_change,
    draw_all,
    first_selection,
    resolve,
    selections_of,
)
from noiser.bench.rows import ATTRIBUTION, RowKey
from noiser.bench.store import Store, locked
from noiser.bench.work import CorrectnessJob, Done, Job, Worker
from noiser.errors import PlanError, RunError, StoredFileError
from noiser.evaluation.measuring import Item
from noiser.registry import __version__, version_of

ExecutorName = Literal["local", "ray"]

RunProgress = Callable[[int, int, str], None]
"""Called with rows done, rows to do, and the last job."""

Executor = Inline | Processes | RayActors

MethodAndMetric = tuple[str, str]
"""The labels of a model and a data set."""

StoredIds = Mapping[tuple[str, str], set[str]]
"""The ids of the examples that have a row, by method and metric."""

ASKED = 20
"""The examples of one job that asks which ones the model answers right."""

_PACKAGES = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "ray")
"""Packages that numbers depend on."""


class Outcome(NamedTuple):
    """The outcome of a run."""

    rows: int  # how many it added
    errors: int  # how many of them are errors
    lost: tuple[str, ...] = ()  # the jobs that were given up, each with the reason


def run_bench(
    plan: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    executor: ExecutorName = "local",
    workers: int | None = None,
    data_dir: str | PathLike[str] | None = None,
    retry_errors: bool = False,
    trust_remote_code: bool = False,
    progress: RunProgress | None = None,
) -> Outcome:
    """Makes the missing rows of a plan; every job is stored as soon as it is finished.

    Args:
        plan: the TOML file.
        folder: where rows are stored. Rows that are there are not made again. A pack can be
            continued, too.
        executor: "local", processes of this machine; "ray", actors of a Ray cluster.
        workers: how many; None: one here, as many as there is room for on a cluster; 0: in this
            process.
        data_dir: as for `noiser.data.load`.
        retry_errors: rows that are errors count as missing.
        trust_remote_code: lets models of the plan that ask for it run the Python code that comes
            with them.
        progress: called with rows done, rows to do, and the last job.

    Raises:
        PlanError: the plan cannot be read, or changes the meaning of stored rows.
        RunError: the folder cannot be written or is in use; a model or a judge cannot work.
        StoredFileError: a model is not the one that made the stored rows.
        DataError: a data set is not there.
    """
    parsed, text = read_plan(Path(plan))
    _check_trust(parsed, trust_remote_code=trust_remote_code)
    resolved = resolve(parsed, str(plan))
    drawn = draw_all(parsed, data_dir)
    with locked(Path(folder)):
        store = Store(folder, create=True)
        _begin(store, text, resolved, {"executor": executor, "workers": workers})
        running = _executor(executor, parsed, workers)
        try:
            run = _Run(parsed, drawn, store, running, progress or _no_progress)
            return run.work(retry_errors=retry_errors)
        finally:
            running.close()


def _no_progress(_done: int, _total: int, _job: str) -> None:
    """Ignores the progress of a run."""


def _check_trust(plan: Plan, *, trust_remote_code: bool) -> None:
    """Raises PlanError where a model would run code of its own without the user's consent."""
    for entry in plan.models:
        if entry.load_options.get("trust_remote_code") and not trust_remote_code:
            raise PlanError(
                f"The plan runs Python code that comes with the model {entry.label!r}. "
                "Add --trust-remote-code if you trust that code."
            )


def _executor(name: ExecutorName, plan: Plan, workers: int | None) -> Executor:
    """The executor of a name, whose workers do the jobs of a plan."""
    make_worker = partial(Worker, plan)
    if name == "ray":
        return RayActors(make_worker, workers)
    if workers == 0:
        return Inline(make_worker)
    processes = workers or 1
    threads = None
    # Workers share the cores, unless the user has set the number of threads.
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, _cores() // processes)
    return Processes(partial(make_worker, threads), processes)


def most_rows(plan: str | PathLike[str], data_dir: str | PathLike[str] | None = None) -> int:
    """The largest number of rows that a plan can have. Raises PlanError, DataError."""
    parsed, _ = read_plan(Path(plan))
    resolve(parsed, str(plan))
    drawn = draw_all(parsed, data_dir)
    total = 0
    for (model, data), limit in parsed.pairs().items():
        examples = lowest(len(drawn[data].examples), limit) or 0
        total += parsed.row_count(model, data, examples)
    return total


def keys_sent(plan: str | PathLike[str]) -> Iterator[str]:
    """Sentences that say which API keys a plan sends where. Raises PlanError."""
    parsed, _ = read_plan(Path(plan))
    places: list[tuple[Mapping[str, Any], Any]] = []
    for model in parsed.models:
        places.append((model.engine_args, model.name))
    for metric in parsed.metrics:
        address = metric.judge_args.get("base_url", "OPENAI_BASE_URL or OpenAI")
        places.append((metric.judge_args, address))
    return _sentences_about_keys(places)


def _sentences_about_keys(places: Iterable[tuple[Mapping[str, Any], Any]]) -> Iterator[str]:
    for settings, place in places:
        key = settings.get("api_key_env")
        if key:
            yield f"The key in {key} goes to {place}."


def _begin(
    store: Store, text: str, resolved: Mapping[str, Any], session: Mapping[str, Any]
) -> None:
    """Records the plan and this session.

    Facts about entries that changed before they had rows are dropped.
    """
    before = store.meta
    used = store.labels()
    if "resolved" in before:
        check_change(before["resolved"], resolved, str(store.path), used)

    data_before = before.get("resolved", {}).get("data", {})
    unchanged_data = {
        label for label, meaning in resolved["data"].items() if data_before.get(label) == meaning
    }
    kept_selections = [
        selection
        for selection in before.get("selections", ())
        if selection["data"] in unchanged_data | used["data"]
    ]
    kept_models = {
        label: facts for label, facts in before.get("models", {}).items() if label in used["models"]
    }

    surroundings = {"versions": versions_of(_PACKAGES), "machine": machine()}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    this_session = {"started": started, **session, **surroundings}
    store.set_meta(
        plan=text,
        resolved=resolved,
        models=kept_models,
        selections=kept_selections,
        sessions=[*before.get("sessions", ()), this_session],
        **surroundings,
    )


@dataclass(frozen=True)
class _Run:
    """One run of a plan in its folder."""

    plan: Plan
    drawn: Mapping[str, Drawn]
    store: Store
    executor: Executor
    tell: RunProgress

    def _sample(self, model: str, data: str, limit: int | None) -> tuple[Item, ...]:
        """The examples of a model on a data set.

        If the entry keeps only examples that the model answers right, the model is asked until
        there are enough of them.
        """
        entry = self.plan.entry("data", data)
        drawn = self.drawn[data]
        selection = None
        if entry.only_correct:
            selection = selections_of(self.store.meta, self.store.path).get((model, data))
        if selection is None:
            selection = first_selection(model, entry, drawn, limit)
        while selection.lacks(limit):
            start = selection.checked or 0
            stop = start + ASKED * self.executor.workers
            candidates = [*drawn.examples.values()][start:stop]
            answers = self._ask(model, data, candidates)
            # The workers finish in any order; a selection is extended in the order of the draw.
            in_draw_order = {item.id: answers[item.id] for item in candidates}
            selection = selection.extended(in_draw_order, limit)
            self._keep(selection)
            self.tell(0, 0, f"{model}, {data}: {selection.right} right of {selection.checked}")
        self._keep(selection)
        return selection.sample(drawn, limit)

    def _ask(self, model: str, data: str, items: Sequence[Item]) -> dict[str, bool | str]:
        """Whether the model answers each example right, by id, or the error's type."""
        jobs: list[CorrectnessJob] = []
        for start in range(0, len(items), ASKED):
            jobs.append(CorrectnessJob(model, data, tuple(items[start : start + ASKED])))
        answers: dict[str, bool | str] = {}
        for _, done in self.executor.run(jobs):
            if isinstance(done, RunError):
                raise RunError(f"{model}, {data}, right answers: {done}.")
            self._check_model(model, done)
            answers |= done.answers
        return answers

    def _keep(self, selection: Selection) -> None:
        """Stores a selection, which replaces an earlier one of the same model and data set."""
        selections = selections_of(self.store.meta, self.store.path)
        selections[selection.model, selection.data] = selection
        self.store.set_meta(selections=[kept._asdict() for kept in selections.values()])

    def jobs(self, *, retry_errors: bool) -> Iterator[Job]:
        """The jobs with missing rows: by model, so that each is loaded once, then by block."""
        size = self.plan.block
        for model in self.plan.labels("models"):
            samples: dict[str, tuple[Item, ...]] = {}
            stored: dict[str, StoredIds] = {}
            for (owner, data), limit in self.plan.pairs().items():
                if owner == model:
                    samples[data] = self._sample(model, data, limit)
                    stored[data] = self.store.examples(model, data, errors=not retry_errors)
            longest = max(map(len, samples.values()), default=0)
            for block in range(math.ceil(longest / size)):
                for data, sample in samples.items():
                    items = sample[block * size : (block + 1) * size]
                    yield from self._jobs_of_block(model, data, block, items, stored[data])

    def _jobs_of_block(
        self, model: str, data: str, block: int, items: Sequence[Item], stored: StoredIds
    ) -> Iterator[Job]:
        """A job for each method that lacks rows of a block."""
        missing: dict[str, dict[str, frozenset[str]]] = {}  # ids by method and metric
        for (method, metric), limit in self.plan.kinds(model, data).items():
            ids = {item.id for item in items if limit is None or item.index < limit}
            lacking = frozenset(ids - stored.get((method, metric), set()))
            missing.setdefault(method, {})[metric] = lacking
        for method, by_metric in missing.items():
            lacking = frozenset[str]().union(*by_metric.values())
            if lacking:
                lacking_items = tuple(item for item in items if item.id in lacking)
                yield Job(model, data, method, block, lacking_items, by_metric)

    def work(self, *, retry_errors: bool) -> Outcome:
        """Makes all missing rows."""
        jobs = [*self.jobs(retry_errors=retry_errors)]
        total = 0
        for job in jobs:
            total += sum(map(len, job.missing.values()))
        rows = 0
        errors = 0
        lost: list[str] = []
        self.tell(0, total, "")
        for job, done in self.executor.run(map(self._with_attributions, jobs)):
            name = ", ".join((job.model, job.data, job.method))
            if isinstance(done, RunError):
                lost.append(f"{name}: {done}")
                if not rows:  # most likely no job can be done
                    raise RunError(f"{lost[0]}.") from done
                continue
            self._check_model(job.model, done)
            self.store.add(done.rows, done.texts)
            rows += len(done.rows)
            errors += sum(row.error is not None for row in done.rows)
            self.tell(rows, total, name)
        return Outcome(rows, errors, tuple(lost))

    def _with_attributions(self, job: Job) -> Job:
        """The job with its stored attributions."""
        attributions: dict[str, Any] = {}
        for item in job.examples:
            key = RowKey(job.model, job.data, job.method, ATTRIBUTION, item.id)
            attribution = self.store.text(key).get(ATTRIBUTION)
            if attribution:
                attributions[item.id] = attribution
        return job._replace(attributions=attributions)

    def _check_model(self, label: str, done: Done) -> None:
        """Records the model. Raises StoredFileError where another one made the stored rows."""
        models = self.store.meta["models"]
        identity = done.identity
        if label not in models:
            self.store.set_meta(models={**models, label: {"identity": identity}})
            return
        stored = models[label]["identity"]
        changes: list[str] = []
        for key, value in identity.items():
            if key != "name" and value != stored.get(key):
                changes.append(f"{key} was {stored.get(key)!r} and is {value!r}")
        if changes:
            raise StoredFileError(
                f"The model {label!r} is not the one that the stored rows are about: "
                f"{'; '.join(changes)}. Load the same weights, or start another folder."
            )


@dataclass
class _Tally:
    """Counts of the stored rows that a plan asks for."""

    rows: Counter[MethodAndMetric] = field(default_factory=Counter[MethodAndMetric])
    errors: Counter[MethodAndMetric] = field(default_factory=Counter[MethodAndMetric])
    seconds: defaultdict[MethodAndMetric, float] = field(default_factory=lambda: defaultdict(float))
    error_types: Counter[str] = field(default_factory=Counter[str])
    first_keys: dict[str, RowKey] = field(default_factory=dict[str, RowKey])
    """The first row with an error of each type."""

    @classmethod
    def of(cls, store: Store) -> _Tally:
        """Counts by the database: no row is read."""
        tally = cls()
        for kind, limit in sorted(store.plan.limits().items()):
            pair = (kind.model, kind.data)
            counts = store.counts(kind, limit)
            tally.rows[pair] += counts.rows
            tally.errors[pair] += counts.errors
            tally.seconds[pair] += counts.seconds
            if not counts.errors:
                continue
            for error, count, example in store.errors(kind, limit):
                tally.error_types[error] += count
                tally.first_keys.setdefault(error, RowKey(*kind, example))
        return tally


_STATUS_HEAD = ("model", "data", "right of checked", "chosen of", "rows of", "errors", "seconds")


def status(folder: Path) -> str:
    """A table of rows stored and wanted per model and data set, and the errors by type.

    Each type of error has the message of its first row.
    """
    store = Store(folder)
    tally = _Tally.of(store)
    selections = selections_of(store.meta, store.path)
    lines: list[tuple[str, ...]] = [_STATUS_HEAD]
    complete = True
    for pair, limit in store.plan.pairs().items():
        line, is_complete = _status_line(store.plan, pair, limit, selections.get(pair), tally)
        lines.append(line)
        complete = complete and is_complete

    state = "complete" if complete else "not complete"
    seconds = sum(tally.seconds.values())
    head = (
        f"{store.plan.name}: {state}, {tally.rows.total():,} rows, {seconds:,.0f} seconds of work"
    )
    parts = [head, "", *_aligned(lines)]
    if tally.error_types:
        parts += ["", "Errors:"]
    for name, count in tally.error_types.most_common():
        message = store.text(tally.first_keys[name]).get("error", "")
        parts.append(f"  {count} × {name}: {message}".removesuffix(": "))
    return "\n".join(parts)


def _status_line(
    plan: Plan, pair: MethodAndMetric, limit: int | None, selection: Selection | None, tally: _Tally
) -> tuple[tuple[str, ...], bool]:
    """The line of a model and a data set in the table, and whether nothing is missing."""
    chosen = 0
    right = ""
    chosen_of = "not yet"
    if selection is not None:
        chosen = len(selection.chosen[:limit])
        chosen_of = f"{chosen} of {selection.total}"
        if selection.checked is not None:
            right = f"{selection.right} of {selection.checked}"
    expected = plan.row_count(*pair, chosen)
    stored = tally.rows[pair]
    counts = (f"{stored} of {expected}", str(tally.errors[pair]), f"{tally.seconds[pair]:.0f}")
    is_complete = selection is not None and not selection.lacks(limit) and stored >= expected
    return (*pair, right, chosen_of, *counts), is_complete


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, whose columns are filled up to equal widths."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """The versions of noiser, Python, and the packages that are installed."""
    versions = {"noiser": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version_of(package)
    return versions


def machine() -> dict[str, Any]:
    """System, processor, cores and graphics cards of this machine."""
    import torch

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has the file
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        match = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
        if match is not None:
            name = match[1]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"system": sys.platform, "cpu": name, "cores": _cores(), "gpus": gpus}


def _cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
