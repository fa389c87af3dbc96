"""A benchmark from beginning to end: missing rows are listed, made and stored."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from noiser.bench.executors import Inline, Processes, RayActors
from noiser.bench.plan import DataEntry, Plan, read_plan
from noiser.bench.resolve import check_change, resolve
from noiser.bench.samples import Drawn, Sampled, Selection, draw_all, first_selection, sample
from noiser.bench.store import ATTRIBUTION, Key, Store, locked
from noiser.bench.work import Done, Job, Questions, Worker, check_identity
from noiser.errors import PlanError, RunError
from noiser.version import __version__, version_of

ExecutorName = Literal["local", "ray"]
Executor = Inline | Processes | RayActors

ASKED = 20
"""Examples of a job that asks which ones the model answers right."""

RunProgress = Callable[[int, int, str], None]
"""Called with rows done, rows to do, and the last job."""


class Outcome(NamedTuple):
    """The end of a run.

    Attributes:
        rows: how many rows it added.
        errors: how many of them are errors.
        lost: jobs that were given up, with the reason.
    """

    rows: int
    errors: int
    lost: tuple[str, ...] = ()


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
        folder: where rows are stored. Rows that are there are not made again; a pack goes on, too.
        executor: "local", processes of this machine; "ray", actors of a Ray cluster.
        workers: how many; None: one here, as many as there is room for on a cluster; 0: in this process.
        data_dir: as for `noiser.data.load`.
        retry_errors: rows that are errors count as missing.
        trust_remote_code: lets models of the plan that ask for it run the Python code that comes with them.
        progress: called with rows done, rows to do, and the last job.

    Raises:
        PlanError: the plan cannot be read, or changes the meaning of stored rows.
        RunError: the folder cannot be written or is in use; a model or a judge cannot work.
        StoredFileError: a model is not the one that rows are stored of.
        DataError: a data set is not there.
    """
    wanted, text = read_plan(Path(plan))
    check_trust(wanted, trust_remote_code=trust_remote_code)
    resolved, drawn = resolve(wanted, str(plan)), draw_all(wanted, data_dir)
    with locked(Path(folder)):
        store = Store(folder, create=True)
        _begin(store, text, resolved, {"executor": executor, "workers": workers})
        chosen = _executor(executor, wanted, workers)
        try:
            return _Run(wanted, drawn, store, chosen, progress).work(retry_errors=retry_errors)
        finally:
            chosen.close()


def most_rows(plan: str | PathLike[str], data_dir: str | PathLike[str] | None = None) -> int:
    """How many rows a plan has at most. Raises PlanError, DataError."""
    wanted, _ = read_plan(Path(plan))
    resolve(wanted, str(plan))
    sizes = {label: len(drawn.examples) for label, drawn in draw_all(wanted, data_dir).items()}
    return sum(wanted.row_count(*pair, min(sizes[pair[1]], limit or sizes[pair[1]])) for pair, limit in wanted.pairs())


def check_trust(plan: Plan, *, trust_remote_code: bool) -> None:
    """Raises PlanError where a model's code would run and only the plan says so."""
    for entry in plan.models:
        if entry.load_options.get("trust_remote_code") and not trust_remote_code:
            raise PlanError(
                f"The plan runs Python code that comes with the model {entry.label!r}. Add --trust-remote-code if you "
                "trust that code."
            )


def keys_sent(plan: str | PathLike[str]) -> Iterator[str]:
    """Which keys a plan sends where, as sentences. Raises PlanError."""
    wanted, _ = read_plan(Path(plan))
    for entry in wanted.models:
        if key := entry.engine_args.get("api_key_env"):
            yield f"The key in {key} goes to {entry.name}."
    for entry in wanted.metrics:
        if key := entry.judge_args.get("api_key_env"):
            yield f"The key in {key} goes to {entry.judge_args.get('base_url', 'OPENAI_BASE_URL or OpenAI')}."


def _begin(store: Store, text: str, resolved: Mapping[str, Any], session: Mapping[str, Any]) -> None:
    """Records the plan and this session, and forgets facts about entries that changed before they had rows."""
    before, used = store.meta, store.labels()
    if "resolved" in before:
        check_change(before["resolved"], resolved, str(store.path), used)
    data = before.get("resolved", {}).get("data", {})
    same = {label for label, meaning in resolved["data"].items() if data.get(label) == meaning}
    surroundings = {"versions": _versions(), "machine": _machine()}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    store.set_meta(
        plan=text,
        resolved=resolved,
        models={label: known for label, known in before.get("models", {}).items() if label in used["models"]},
        selections=[each for each in before.get("selections", ()) if each["data"] in same | used["data"]],
        sessions=[*before.get("sessions", ()), {"started": started, **session, **surroundings}],
        **surroundings,
    )


def _executor(name: ExecutorName, plan: Plan, workers: int | None) -> Executor:
    """Local workers share the cores, unless the user has said how many threads there are to be."""
    make = partial(Worker, plan)
    if name == "ray":
        return RayActors(make, workers)
    if workers == 0:
        return Inline(make)
    threads = None if "OMP_NUM_THREADS" in os.environ else max(1, _core_count() // (workers or 1))
    return Processes(partial(make, threads), workers or 1)


class _Run:
    """A plan at work in its folder."""

    def __init__(
        self, plan: Plan, drawn: Mapping[str, Drawn], store: Store, executor: Executor, progress: RunProgress | None
    ) -> None:
        self.plan, self.drawn, self.store, self.executor, self.progress = plan, drawn, store, executor, progress

    def sample(self, model: str, entry: DataEntry) -> tuple[Sampled, ...]:
        """The examples of a model on a data set; where only right answers count, the model is asked."""
        found = first_selection(model, entry, self.drawn[entry.label])
        for stored in self.store.meta["selections"] if entry.only_correct else ():
            found = Selection(**stored) if (stored["model"], stored["data"]) == (model, entry.label) else found
        while questions := [*self._questions(entry, found)]:
            answers: dict[str, bool | str] = {}
            for job, done in self.executor.run(questions):
                if isinstance(done, RunError):
                    raise RunError(f"{job}: {done}.")
                self._check_model(model, done)
                answers |= done.answers
            asked = {sampled.id: answers[sampled.id] for job in questions for sampled in job.examples}
            found = found.extended(asked, entry.limit)
            self._keep(found)
            self._report(0, 0, f"{model}, {entry.label}: {found.right} right of {found.checked}")
        self._keep(found)
        return sample(self.drawn[entry.label], found, entry.limit)

    def _questions(self, entry: DataEntry, selection: Selection) -> Iterator[Questions]:
        """Jobs for all workers about the next examples of the draw, if there are not enough right ones yet."""
        if selection.lacks(entry.limit):
            start = selection.checked or 0
            following = [*self.drawn[entry.label].examples.values()][start : start + ASKED * self.executor.workers]
            for part in range(0, len(following), ASKED):
                yield Questions(selection.model, entry.label, tuple(following[part : part + ASKED]))

    def _keep(self, selection: Selection) -> None:
        kept = {(each["model"], each["data"]): each for each in self.store.meta["selections"]}
        kept[selection.model, selection.data] = selection._asdict()
        self.store.set_meta(selections=[*kept.values()])

    def jobs(self, *, retry_errors: bool) -> Iterator[Job]:
        """The jobs with missing rows: model by model, so that each is loaded once, then block by block."""
        for model in self.plan.labels("models"):
            samples = {entry.label: self.sample(model, entry) for entry in self.plan.data_for(model)}
            stored = {data: self.store.examples(model, data, errors=not retry_errors) for data in samples}
            for start in range(0, max(map(len, samples.values()), default=0), self.plan.block):
                for data, examples in samples.items():
                    block = examples[start : start + self.plan.block]
                    for method in self.plan.methods_for(model, data):
                        missing = self._missing(model, data, method.label, block, stored[data])
                        if any(missing.values()):
                            yield Job(model, data, method.label, block, missing, {})

    def _missing(
        self, model: str, data: str, method: str, block: Sequence[Sampled], stored: Mapping[tuple[str, str], set[str]]
    ) -> dict[str, frozenset[str]]:
        """The examples without a row, by metric."""
        return {
            metric: frozenset(each.id for each in block if limit is None or each.item.index < limit)
            - stored.get((label, metric), set())
            for label, metric, limit in self.plan.kinds(model, data)
            if label == method
        }

    def work(self, *, retry_errors: bool) -> Outcome:
        """Makes all missing rows."""
        jobs = [*self.jobs(retry_errors=retry_errors)]
        total = sum(job.size for job in jobs)
        rows, errors, lost = 0, 0, list[str]()
        self._report(0, total, "")
        for job, done in self.executor.run(map(self._with_attributions, jobs)):
            if isinstance(done, RunError):
                lost.append(f"{job}: {done}")
                continue
            self._check_model(job.model, done)
            self.store.add(done.rows, done.texts)
            rows, errors = rows + len(done.rows), errors + sum(row.error is not None for row in done.rows)
            self._report(rows, total, str(job))
        return Outcome(rows, errors, tuple(lost))

    def _with_attributions(self, job: Job) -> Job:
        """The job with its stored attributions."""
        key = Key(job.model, job.data, job.method, ATTRIBUTION, "")
        texts = {each.id: self.store.text(key._replace(example=each.id)) for each in job.wanted}
        return job._replace(
            attributions={name: text[ATTRIBUTION] for name, text in texts.items() if text and ATTRIBUTION in text}
        )

    def _report(self, done: int, total: int, job: str) -> None:
        if self.progress is not None:
            self.progress(done, total, job)

    def _check_model(self, label: str, done: Done) -> None:
        """Records the model, or refuses another one than before."""
        models = self.store.meta["models"]
        if label in models:
            check_identity(label, done.identity, models[label]["identity"])
        else:
            self.store.set_meta(models={**models, label: {"identity": done.identity}})


def _versions() -> dict[str, str]:
    """The versions of noiser, Python, and packages that numbers depend on."""
    versions = {"noiser": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "scipy", "scikit-learn", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version_of(package)
    return versions


def _machine() -> dict[str, Any]:
    """System, processor, cores and graphics cards of this machine."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"system": sys.platform, "cpu": _processor(), "cores": _core_count(), "gpus": gpus}


def _core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
