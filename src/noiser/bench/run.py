"""A benchmark from beginning to end: missing rows are listed, made and stored; and how far it is."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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
from noiser.bench.rows import ATTRIBUTION, Key
from noiser.bench.store import Store, locked
from noiser.bench.work import Done, Job, Questions, Worker
from noiser.errors import PlanError, RunError, StoredFileError
from noiser.evaluation.measuring import Item
from noiser.registry import __version__, version_of

ExecutorName = Literal["local", "ray"]

RunProgress = Callable[[int, int, str], None]
"""Called with rows done, rows to do, and the last job."""

ASKED = 20
"""Examples of a job that asks which ones the model answers right."""

_PACKAGES = ("torch", "transformers", "numpy", "scipy", "scikit-learn", "ray")
"""Packages that numbers depend on."""


class Outcome(NamedTuple):
    """The end of a run: how many rows it added, how many of them are errors, and jobs given up, with the reason."""

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
        StoredFileError: a model is not the one that rows are stored of. DataError: a data set is not there.
    """
    wanted, text = read_plan(Path(plan))
    for entry in wanted.models:
        if entry.load_options.get("trust_remote_code") and not trust_remote_code:
            runs = f"The plan runs Python code that comes with the model {entry.label!r}"
            raise PlanError(f"{runs}. Add --trust-remote-code if you trust that code.")
    resolved, drawn = resolve(wanted, str(plan)), draw_all(wanted, data_dir)
    with locked(Path(folder)):
        store = Store(folder, create=True)
        _begin(store, text, resolved, {"executor": executor, "workers": workers})
        make = partial(Worker, wanted)
        if executor == "ray":
            chosen = RayActors(make, workers)
        elif workers == 0:
            chosen = Inline(make)
        else:  # workers share the cores, unless the user has said how many threads there are to be
            threads = (
                None if "OMP_NUM_THREADS" in os.environ else max(1, _cores() // (workers or 1))
            )
            chosen = Processes(partial(make, threads), workers or 1)
        try:
            run = _Run(wanted, drawn, store, chosen, progress or (lambda _done, _total, _job: None))
            return run.work(retry_errors=retry_errors)
        finally:
            chosen.close()


def most_rows(plan: str | PathLike[str], data_dir: str | PathLike[str] | None = None) -> int:
    """How many rows a plan has at most. Raises PlanError, DataError."""
    wanted, _ = read_plan(Path(plan))
    resolve(wanted, str(plan))
    sizes = {label: len(drawn.examples) for label, drawn in draw_all(wanted, data_dir).items()}
    return sum(
        wanted.row_count(*pair, lowest(sizes[pair[1]], limit) or 0)
        for pair, limit in wanted.pairs().items()
    )


def keys_sent(plan: str | PathLike[str]) -> Iterator[str]:
    """Which keys a plan sends where, as sentences. Raises PlanError."""
    wanted, _ = read_plan(Path(plan))
    places = [(entry.engine_args, entry.name) for entry in wanted.models]
    places += [
        (m.judge_args, m.judge_args.get("base_url", "OPENAI_BASE_URL or OpenAI"))
        for m in wanted.metrics
    ]
    return (
        f"The key in {key} goes to {place}."
        for settings, place in places
        if (key := settings.get("api_key_env"))
    )


def _begin(
    store: Store, text: str, resolved: Mapping[str, Any], session: Mapping[str, Any]
) -> None:
    """Records the plan and this session, and forgets facts about entries that changed before they had rows."""
    before, used = store.meta, store.labels()
    if "resolved" in before:
        check_change(before["resolved"], resolved, str(store.path), used)
    data = before.get("resolved", {}).get("data", {})
    same = {label for label, meaning in resolved["data"].items() if data.get(label) == meaning}
    surroundings = {"versions": versions_of(_PACKAGES), "machine": machine()}
    started = datetime.now(UTC).isoformat(timespec="seconds")
    store.set_meta(
        plan=text,
        resolved=resolved,
        models={
            label: known
            for label, known in before.get("models", {}).items()
            if label in used["models"]
        },
        selections=[
            each for each in before.get("selections", ()) if each["data"] in same | used["data"]
        ],
        sessions=[*before.get("sessions", ()), {"started": started, **session, **surroundings}],
        **surroundings,
    )


@dataclass(frozen=True)
class _Run:
    """A plan at work in its folder."""

    plan: Plan
    drawn: Mapping[str, Drawn]
    store: Store
    executor: Inline | Processes | RayActors
    tell: RunProgress

    def _sample(self, model: str, data: str, limit: int | None) -> tuple[Item, ...]:
        """The examples of a model on a data set; where only right answers count, the model is asked."""
        entry, drawn = self.plan.entry("data", data), self.drawn[data]
        stored = (
            selections_of(self.store.meta, self.store.path).get((model, data))
            if entry.only_correct
            else None
        )
        found = stored or first_selection(model, entry, drawn, limit)
        while found.lacks(limit):
            start = found.checked or 0
            following = [*drawn.examples.values()][start : start + ASKED * self.executor.workers]
            parts = [tuple(following[i : i + ASKED]) for i in range(0, len(following), ASKED)]
            answers: dict[str, bool | str] = {}
            for _, done in self.executor.run(Questions(model, data, part) for part in parts):
                if isinstance(done, RunError):
                    raise RunError(f"{model}, {data}, right answers: {done}.")
                self._check_model(model, done)
                answers |= done.answers
            found = found.extended({each.id: answers[each.id] for each in following}, limit)
            self._keep(found)
            self.tell(0, 0, f"{model}, {data}: {found.right} right of {found.checked}")
        self._keep(found)
        return found.sample(drawn, limit)

    def _keep(self, selection: Selection) -> None:
        kept = selections_of(self.store.meta, self.store.path) | {
            (selection.model, selection.data): selection
        }
        self.store.set_meta(selections=[each._asdict() for each in kept.values()])

    def jobs(self, *, retry_errors: bool) -> Iterator[Job]:
        """The jobs with missing rows: model by model, so that each is loaded once, then block by block."""
        for model in self.plan.labels("models"):
            limits = {
                data: limit for (owner, data), limit in self.plan.pairs().items() if owner == model
            }
            samples = {data: self._sample(model, data, limit) for data, limit in limits.items()}
            stored = {
                data: self.store.examples(model, data, errors=not retry_errors) for data in samples
            }
            for block in range(
                math.ceil(max(map(len, samples.values()), default=0) / self.plan.block)
            ):
                for data, examples in samples.items():
                    here = examples[block * self.plan.block : (block + 1) * self.plan.block]
                    missing: dict[str, dict[str, frozenset[str]]] = {}
                    for (method, metric), limit in self.plan.kinds(model, data).items():
                        wanted = {each.id for each in here if limit is None or each.index < limit}
                        lacking = frozenset(wanted - stored[data].get((method, metric), set()))
                        missing.setdefault(method, {})[metric] = lacking
                    for method, by_metric in missing.items():
                        if lacking := frozenset[str]().union(*by_metric.values()):
                            those = tuple(each for each in here if each.id in lacking)
                            yield Job(model, data, method, block, those, by_metric)

    def work(self, *, retry_errors: bool) -> Outcome:
        """Makes all missing rows."""
        jobs = [*self.jobs(retry_errors=retry_errors)]
        total = sum(len(examples) for job in jobs for examples in job.missing.values())
        rows, errors, lost = 0, 0, list[str]()
        self.tell(0, total, "")
        for job, done in self.executor.run(map(self._with_attributions, jobs)):
            name = ", ".join(job[:3])
            if isinstance(done, RunError):
                lost.append(f"{name}: {done}")
                continue
            self._check_model(job.model, done)
            self.store.add(done.rows, done.texts)
            rows, errors = (
                rows + len(done.rows),
                errors + sum(row.error is not None for row in done.rows),
            )
            self.tell(rows, total, name)
        return Outcome(rows, errors, tuple(lost))

    def _with_attributions(self, job: Job) -> Job:
        """The job with its stored attributions."""
        keys = [Key(job.model, job.data, job.method, ATTRIBUTION, each.id) for each in job.examples]
        stored = {key.example: self.store.text(key).get(ATTRIBUTION) for key in keys}
        return job._replace(attributions={example: att for example, att in stored.items() if att})

    def _check_model(self, label: str, done: Done) -> None:
        """Records the model. Raises StoredFileError where stored rows are about another one."""
        models, identity = self.store.meta["models"], done.identity
        if label not in models:
            self.store.set_meta(models={**models, label: {"identity": identity}})
            return
        stored = models[label]["identity"]
        if changed := [
            key for key in identity if key != "name" and identity[key] != stored.get(key)
        ]:
            changes = "; ".join(
                f"{key} was {stored.get(key)!r} and is {identity[key]!r}" for key in changed
            )
            text = f"The model {label!r} is not the one that the stored rows are about: {changes}"
            raise StoredFileError(f"{text}. Load the same weights, or start another folder.")


def status(folder: Path) -> str:
    """A table of rows stored and wanted per model and data set, and the errors by type, each with a message."""
    store, first = Store(folder), dict[str, Key]()
    rows, errors, types, seconds = (
        Counter[Any](),
        Counter[Any](),
        Counter[str](),
        defaultdict[Any, float](float),
    )
    for row in filter(store.plan.wanted(), store.rows()):
        pair = (row.model, row.data)
        rows[pair] += 1
        seconds[pair] += row.seconds or 0
        if row.error:
            errors[pair] += 1
            types[row.error] += 1
            first.setdefault(row.error, row.key)
    selections = selections_of(store.meta, store.path)
    lines, complete = (
        [("model", "data", "right of checked", "chosen of", "rows of", "errors", "seconds")],
        True,
    )
    for pair, limit in store.plan.pairs().items():
        selection = selections.get(pair)
        chosen = len(selection.chosen[:limit]) if selection else 0
        wanted = store.plan.row_count(*pair, chosen)
        complete &= selection is not None and not selection.lacks(limit) and rows[pair] >= wanted
        asked = (
            f"{selection.right} of {selection.checked}"
            if selection and selection.checked is not None
            else ""
        )
        total = f"{chosen} of {selection.total}" if selection else "not yet"
        lines.append(
            (
                *pair,
                asked,
                total,
                f"{rows[pair]} of {wanted}",
                str(errors[pair]),
                f"{seconds[pair]:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    state = "complete" if complete else "not complete"
    head = f"{store.plan.name}: {state}, {rows.total():,} rows, {sum(seconds.values()):,.0f} seconds of work"
    kinds = [
        (name, count, store.text(first[name]).get("error", ""))
        for name, count in types.most_common()
    ]
    said = [f"  {count} × {name}: {text}".removesuffix(": ") for name, count, text in kinds]
    return "\n".join([head, "", *table, *(["", "Errors:", *said] if said else [])])


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
    with contextlib.suppress(OSError, TypeError):
        info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        name = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)[1]  # pyright: ignore[reportOptionalSubscript]
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"system": sys.platform, "cpu": name, "cores": _cores(), "gpus": gpus}


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
