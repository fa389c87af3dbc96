"""One block of examples: every method, and every metric on what it found, chunk by chunk."""

from __future__ import annotations

import dataclasses
import re
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import torch

from noiser.attribution import Attribution
from noiser.attribution.store import to_jsonable
from noiser.bench.plan import ATTRIBUTION, DataEntry, MethodEntry, MetricEntry, Plan, limit_for
from noiser.bench.records import Cost, Row, without_text
from noiser.bench.resolve import make
from noiser.bench.store import ATTRIBUTIONS, COSTS, REPLIES, ROWS, File
from noiser.bench.tasks import Finished, JobAssignment, Sampled
from noiser.engine import LocalEngine, run_interleaved
from noiser.evaluation.measuring import Attributor, measure_one, measure_together
from noiser.judges import Judge
from noiser.metrics import METRICS
from noiser.metrics.judged import JudgeStoppedError
from noiser.metrics.metric import SETTINGS, Case, Measured
from noiser.model import LanguageModel
from noiser.model.clean import Passes

_WORDS = frozenset(("correct", "wrong", "unscored", "Infinity", "-Infinity"))
"""Texts that a row may hold; all others may quote a prompt or a judge. JSON has no form of its own for infinities."""

_FACTS = ("token_forwards", "passes")

T = TypeVar("T")

JudgeOf = Callable[[MetricEntry], Judge | None]
Lines = Sequence[Mapping[str, Any]]


def work_on(
    assignment: JobAssignment, *, lm: LanguageModel, plan: Plan, data: DataEntry, judge_of: JudgeOf
) -> Iterator[Finished]:
    """Does what is missing of a job, whose model and data set these are; yields every chunk when it is finished.

    Metrics measure attributions as they are stored, so that a row is the same whenever it is made.
    """
    memos: dict[str, dict[Hashable, Any]] = {sampled.id: {} for sampled in assignment.examples}
    for entry in plan.methods_for(assignment.task.model, assignment.task.data):
        block = _Block(assignment, entry, lm=lm, plan=plan, data=data, memos=memos)
        yield from block.attribute()
        for metric in plan.metrics_for(entry, assignment.task.model, assignment.task.data):
            yield from block.measure(metric, judge_of)


class _Block:
    """One method on a block of examples."""

    def __init__(
        self,
        assignment: JobAssignment,
        entry: MethodEntry,
        *,
        lm: LanguageModel,
        plan: Plan,
        data: DataEntry,
        memos: Mapping[str, dict[Hashable, Any]],
    ) -> None:
        self.assignment, self.task, self.entry, self.plan, self.memos = (
            assignment, assignment.task, entry, plan, memos,
        )  # fmt: skip
        self.attributor = Attributor(
            lm=lm,
            method=make(entry),
            unit=entry.unit,
            max_new_tokens=data.max_new_tokens,
            target_unit=data.target_unit,
            profile=entry.profile,
        )
        self.examples = _first(assignment.examples, limit_for(entry, assignment.task.data))
        self.stored = dict(assignment.attributions.get(entry.label, {}))
        self._cases: dict[str, Case] = {}

    # ---- attributions -----------------------------------------------------------------------------------------------

    def attribute(self) -> Iterator[Finished]:
        """Attributes the examples that have no attribution, side by side, and says what it took and found."""
        known = self._measured(ATTRIBUTION)  # which says that nothing is missing that an attribution is needed for
        wanted = [sampled for sampled in self.examples if sampled.id not in self.stored and sampled.id not in known]
        started = _now()
        engine = LocalEngine(self.attributor.lm, many=len(wanted) > 1)
        with closing(run_interleaved(engine, [self._passes(engine, sampled) for sampled in wanted])) as outcomes:
            found = {wanted[number].id: result for number, result, _ in outcomes}
        new = [found[sampled.id] for sampled in wanted]
        spent = dict.fromkeys(found, _since(started, len(found)))
        self.stored |= found
        told = known - {values["example"] for values in new}
        lacking = [sampled for sampled in self.examples if sampled.id not in told]
        rows = [self._row(sampled, ATTRIBUTION, self._facts(sampled)) for sampled in lacking]
        if rows:
            place = (self.task.model, self.task.data, self.entry.label)
            attributions = File(ATTRIBUTIONS, place, self.task.block)
            yield self._finished(ATTRIBUTION, rows, spent, [(attributions, new)] if new else [])

    def _passes(self, engine: LocalEngine, sampled: Sampled) -> Passes[dict[str, Any]]:
        """What is stored of an example's attribution, as a coroutine."""
        heard: list[str] = []
        facts = {"example": sampled.id, "index": sampled.item.index, "attribution": None, "error": None}
        try:
            passes = self.attributor.passes(engine, sampled.item, self._seed(sampled))
            attribution = yield from _recording_warnings(passes, heard)
            return facts | {"attribution": attribution.to_dict(), "warnings": heard}
        except Exception as error:  # of any kind: it becomes a row, and the other examples go on
            return facts | {"error": f"{type(error).__name__}: {error}", "warnings": heard}

    def _seed(self, sampled: Sampled) -> int:
        return self.plan.seed + sampled.item.index

    def _facts(self, sampled: Sampled) -> Measured | str:
        """What a stored attribution says about itself in numbers, or its error."""
        stored = self.stored[sampled.id]
        if stored["error"] is not None:
            return stored["error"]
        found = stored["attribution"]
        k_min = [k for k in found["k_min"] or () if isinstance(k, float)]
        facts = {name: found["info"].get(name) for name in _FACTS}
        facts |= {"k_min": sum(k_min) / len(k_min) if k_min else None, "rank": found["targets"][0]["rank"]}
        return {name: value for name, value in facts.items() if value is not None}

    # ---- metrics ----------------------------------------------------------------------------------------------------

    def measure(self, metric: MetricEntry, judge_of: JudgeOf) -> Iterator[Finished]:
        """Measures the examples that have no row."""
        lacking = [
            sampled
            for sampled in _first(self.examples, limit_for(metric, self.task.data))
            if sampled.id not in self._measured(metric.label)
        ]
        if not lacking:
            return
        judge = judge_of(metric)
        registered = METRICS.get(metric.name).factory()
        found: dict[str, Measured | str] = {}
        spent: dict[str, _Spent] = {}
        given = {name: value for name in SETTINGS if (value := getattr(metric, name)) is not None}
        settings = {"seed": self.plan.seed, "judge": judge, **SETTINGS, **given}
        usable = [sampled for sampled in lacking if self.stored[sampled.id]["error"] is None]
        together = registered.measure is None
        groups = [usable] if together else [[sampled] for sampled in usable]
        for group in groups:
            started = _now()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cases = [self._case(sampled, settings) for sampled in group]
                measured = measure_together(registered, cases) if together else [measure_one(registered, *cases)]
            if measured and isinstance(measured[0], JudgeStoppedError):
                raise measured[0]
            each = _since(started, len(group))
            for sampled, columns in zip(group, measured, strict=True):
                failed = isinstance(columns, Exception)
                found[sampled.id] = f"{type(columns).__name__}: {columns}" if failed else columns
                spent[sampled.id] = each
        for sampled in lacking:
            found.setdefault(sampled.id, str(self.stored[sampled.id]["error"]))
        rows = [self._row(sampled, metric.label, found[sampled.id]) for sampled in lacking]
        replies = [reply for sampled in lacking if (reply := _replies(sampled, found[sampled.id]))]
        others: list[tuple[File, Lines]] = [(self._file(REPLIES, metric.label), replies)] if replies else []
        yield self._finished(metric.label, rows, spent, others)

    def _case(self, sampled: Sampled, settings: Mapping[str, Any]) -> Case:
        """The stored attribution of an example, on the model that all metrics share."""
        if sampled.id not in self._cases:
            attribution = Attribution.from_dict(self.stored[sampled.id]["attribution"])
            self._cases[sampled.id] = self.attributor.case(sampled.item, attribution)
        return dataclasses.replace(self._cases[sampled.id], cache=self.memos[sampled.id], **settings)

    # ---- what is handed over ------------------------------------------------------------------------------------

    def _measured(self, metric: str) -> frozenset[str]:
        return self.assignment.measured.get((self.entry.label, metric), frozenset())

    def _file(self, kind: str, metric: str) -> File:
        return File(kind, (self.task.model, self.task.data, self.entry.label, metric), self.task.block)

    def _row(self, sampled: Sampled, metric: str, found: Measured | str) -> Row:
        att = self.stored[sampled.id]["attribution"]
        failed = isinstance(found, str)
        return Row(
            model=self.task.model,
            data=self.task.data,
            example=sampled.id,
            category=sampled.category,
            index=sampled.item.index,
            method=self.entry.label,
            metric=metric,
            seed=self._seed(sampled),
            units=len(att["units"]) if att else 0,
            targets=len(att["targets"]) if att else 0,
            probability=att["targets"][0]["probability"] if att else None,
            values={} if failed else {name: v for name, v in to_jsonable(found).items() if _is_free_of_text(v)},
            error=without_text(_UNANSWERED.sub(r"\1…", found), _texts(sampled, att)) if failed else None,
        )

    def _finished(
        self, metric: str, rows: Sequence[Row], spent: Mapping[str, _Spent], others: list[tuple[File, Lines]]
    ) -> Finished:
        costs = [self._cost(row, spent[row.example]) for row in rows if row.example in spent]
        files = [(self._file(COSTS, metric), costs)] if costs else []
        return Finished(
            files=(*files, *others, (self._file(ROWS, metric), [row._asdict() for row in rows])),
            task=self.task,
            method=self.entry.label,
            metric=metric,
            examples=len(rows),
            errors=sum(row.error is not None for row in rows),
            seconds=sum(each.seconds for each in spent.values()),
        )

    def _cost(self, row: Row, spent: _Spent) -> dict[str, Any]:
        return Cost(
            *(getattr(row, name) for name in Cost._fields[:6]),
            seconds=round(spent.seconds, 6),
            threads=torch.get_num_threads(),
            cpu=round(spent.cpu, 6),
        )._asdict()


def _recording_warnings(passes: Passes[T], heard: list[str]) -> Passes[T]:
    """The same coroutine; its warnings go to a list of its own, while others have their turn between its steps."""
    result: Any = None
    try:
        while True:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    wanted = passes.throw(result) if isinstance(result, Exception) else passes.send(result)
                except StopIteration as stop:
                    return stop.value
                finally:
                    heard += [str(warning.message) for warning in caught or ()]
            try:
                result = yield wanted
            except Exception as error:
                result = error
    finally:
        passes.close()


class _Spent(NamedTuple):
    """Seconds of wall clock and of processor time."""

    seconds: float
    cpu: float


def _now() -> _Spent:
    return _Spent(time.perf_counter(), time.process_time())


def _since(started: _Spent, shares: int = 1) -> _Spent:
    """What was spent since then, for each of several that were done together."""
    now = _now()
    return _Spent(*((end - start) / max(1, shares) for start, end in zip(started, now, strict=True)))


_UNANSWERED = re.compile(r"((?:gave no reply|cannot work): (?!budget\.$)(?:Error code: \d{3})?).*", re.DOTALL)
"""What an endpoint says may quote what it was asked; it is kept with the replies."""


def _first(examples: Sequence[Sampled], limit: int | None) -> list[Sampled]:
    return [sampled for sampled in examples if limit is None or sampled.item.index < limit]


def _is_free_of_text(value: object) -> bool:
    return value in _WORDS if isinstance(value, str) else value is None or isinstance(value, int | float)


def _replies(sampled: Sampled, found: Measured | str) -> dict[str, Any] | None:
    """What a metric says in words: kept apart from the rows."""
    if isinstance(found, str):
        return {"example": sampled.id, "index": sampled.item.index, "error": found}
    words = {name: value for name, value in found.items() if isinstance(value, str) and value not in _WORDS}
    return {"example": sampled.id, "index": sampled.item.index, **words} if words else None


def _texts(sampled: Sampled, att: Mapping[str, Any] | None) -> list[str]:
    texts = [str(sampled.item.prompt), sampled.item.gold or ""]
    return [*texts, att["text"], *(target["text"] for target in att["targets"])] if att else texts
