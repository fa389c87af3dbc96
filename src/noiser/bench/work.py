"""The work of a benchmark: jobs in, rows out.

A worker holds the models. It writes nothing and knows no folder.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from noiser.attribution import Attribution
from noiser.attribution.store import to_jsonable
from noiser.bench.plan import MetricEntry, Plan
from noiser.bench.rows import ATTRIBUTION, Row, RowKey, Text
from noiser.errors import NoiserError, RunError
from noiser.evaluation.measuring import Item, Measurement, asked_of, measure_block, says
from noiser.judges import Judge, kind_of, make_judge
from noiser.methods import make_method
from noiser.metrics import METRICS, Metric, Settings
from noiser.model import LanguageModel, load_model
from noiser.model.memory import free_memory
from noiser.types import Profile

_WORDS = ("correct", "wrong", "unscored", "Infinity", "-Infinity")
"""Texts that a row may hold; all others may quote a prompt or a judge.

Infinities are among them since JSON has no number for them.
"""


class CorrectnessJob(NamedTuple):
    """A job: which examples does the model answer right?"""

    model: str
    data: str
    examples: tuple[Item, ...]


class Job(NamedTuple):
    """A job: one method on a block of examples, and the metrics that lack rows."""

    model: str
    data: str
    method: str
    block: int  # its index; what methods on a block have in common is computed once per prompt
    examples: tuple[Item, ...]  # the examples of the block that lack a row
    missing: Mapping[str, frozenset[str]]
    """By metric, "attribution" among them, the ids of examples without a row."""
    attributions: Mapping[str, Mapping[str, Any]] = {}  # the stored ones, by example, as JSON


class Done(NamedTuple):
    """The result of a job: the model's identity, and rows with their texts, or answers."""

    identity: Mapping[str, Any]
    rows: Sequence[Row] = ()
    texts: Sequence[Text] = ()
    answers: Mapping[str, bool | str] = {}  # by example: right, wrong, or the error's type


class Worker:
    """Does one job after another, and keeps the models between them.

    It sets the number of CPU threads unless `threads` is None.
    """

    def __init__(self, plan: Plan, threads: int | None = None) -> None:
        self.plan = plan
        self._models: dict[str, LanguageModel] = {}
        self._judges: dict[str, Judge] = {}
        self._block: tuple[str, str, int] | None = None  # the block that the caches are about
        self._caches: dict[str, dict[Hashable, Any]] = {}
        if threads is not None:
            torch.set_num_threads(threads)

    def work(self, job: Job | CorrectnessJob) -> Done:
        """The rows that the job lacks, or the answers.

        Raises RunError where a model or a judge cannot work at all.
        """
        try:
            lm = self._model(job.model)
            identity = lm.identity._asdict()
            if isinstance(job, CorrectnessJob):
                answers = {item.id: _is_right(lm, item) for item in job.examples}
                return Done(identity, answers=answers)
            rows: list[Row] = []
            texts: list[Text] = []
            for item, measurement in zip(job.examples, self._measure(job, lm), strict=True):
                new_rows, new_texts = _record(self.plan, job, item, measurement)
                rows += new_rows
                texts += new_texts
            return Done(identity, rows, texts)
        except NoiserError as error:  # not every error of ours can be sent to another process
            raise RunError(str(error)) from error

    def _measure(self, job: Job, lm: LanguageModel) -> list[Measurement]:
        """The attributions of a job's examples and their numbers."""
        block = (job.model, job.data, job.block)
        if self._block != block:
            self._block = block
            self._caches = {}
        stored = {example: Attribution.from_dict(att) for example, att in job.attributions.items()}
        items: list[Item] = []
        for item in job.examples:
            cache = self._caches.setdefault(item.id, {})
            attribution = stored.get(item.id)
            items.append(replace(item, attribution=attribution, of_method=True, cache=cache))

        entry = self.plan.entry("methods", job.method)
        data = self.plan.entry("data", job.data)
        metrics = self._metrics(job, entry.profile, lm)
        method, question = asked_of(
            make_method(entry.name, **entry.args),
            entry.profile,
            entry.unit,
            data.max_new_tokens,
            data.target_unit,
        )
        return measure_block(lm, method, question, items, metrics, seed=self.plan.seed)

    def _metrics(
        self, job: Job, profile: Profile, lm: LanguageModel
    ) -> dict[str, tuple[Metric, Settings]]:
        """The metrics of a job with their settings, by label."""
        metrics: dict[str, tuple[Metric, Settings]] = {}
        for label in job.missing:
            if label == ATTRIBUTION:
                continue
            entry = self.plan.entry("metrics", label)
            judge = self._judge(entry, lm)
            settings = Settings(**entry.settings, seed=self.plan.seed, profile=profile, judge=judge)
            metrics[label] = (METRICS.get(entry.name).factory(), settings)
        return metrics

    def _model(self, label: str) -> LanguageModel:
        """The model of a label. The one before it is freed first."""
        if label not in self._models:
            self._models.clear()
            self._caches.clear()
            free_memory()
            self._models[label] = self._load(label)
        return self._models[label]

    def _load(self, name: str) -> LanguageModel:
        """A model of the plan by its label, or another one by its name."""
        if name not in self.plan.labels("models"):
            return load_model(name)
        entry = self.plan.entry("models", name)
        return load_model(entry.name, **entry.load_options)

    def _judge(self, entry: MetricEntry, lm: LanguageModel) -> Judge | None:
        """The judge of a metric; "local" without a name is the model that is explained."""
        if entry.judge is None:
            return None
        kind = kind_of(entry.judge)
        name = entry.judge.partition(":")[2]
        if kind == "local" and not name:
            return make_judge("local", lm=lm, **entry.judge_args)
        if entry.label not in self._judges:
            self._judges[entry.label] = self._make_judge(entry, entry.judge)
        return self._judges[entry.label]

    def _make_judge(self, entry: MetricEntry, judge: str) -> Judge:
        """A judge that is not the explained model, such as "local:NAME" or "openai:NAME"."""
        kind = kind_of(judge)
        if kind == "local":
            name = judge.partition(":")[2]
            return make_judge("local", lm=self._load(name), **entry.judge_args)
        args = dict(entry.judge_args)
        if kind == "openai":  # the metric has one budget in all processes
            args.setdefault("job", f"{self.plan.name}/{entry.label}")
        return make_judge(judge, lm=None, **args)


def _is_right(lm: LanguageModel, item: Item) -> bool | str:
    """Whether the model gives the answer where it should and nowhere else, see `Example`.

    The error's type where a prompt cannot be asked: it is counted, and the others go on.
    """
    try:
        assert item.gold is not None, "`draw` has checked it"
        for prompt in (item.prompt, *item.enough):
            if not says(lm, prompt, item.gold):
                return False
        for prompt in item.without:
            if says(lm, prompt, item.gold):
                return False
    except Exception as error:
        return type(error).__name__
    return True


def _record(
    plan: Plan, job: Job, item: Item, measurement: Measurement
) -> tuple[list[Row], list[Text]]:
    """The rows that an example lacks, and the texts that belong to them."""
    rows: list[Row] = []
    texts: list[Text] = []
    key = RowKey(job.model, job.data, job.method, ATTRIBUTION, item.id)
    attribution = measurement.attribution
    is_new = measurement.attribution_seconds is not None
    if isinstance(attribution, Attribution) and is_new:
        texts.append((key, {ATTRIBUTION: attribution.to_dict()}))
    for metric, examples in job.missing.items():
        if item.id not in examples:
            continue
        numbers, seconds = _result(measurement, metric)
        row = _row(plan, item, key._replace(metric=metric), attribution, numbers, seconds)
        rows.append(row)
        text = _text(numbers)
        if text:
            texts.append((row.key, text))
    return rows, texts


def _result(measurement: Measurement, metric: str) -> tuple[Any, float | None]:
    """A metric's numbers by column, or the error in their place, and the seconds that it took."""
    attribution = measurement.attribution
    if metric != ATTRIBUTION:
        numbers = measurement.numbers.get(metric, attribution)
        return numbers, measurement.seconds.get(metric)
    if isinstance(attribution, Attribution):
        return _facts(attribution), measurement.attribution_seconds
    return attribution, measurement.attribution_seconds


def _row(
    plan: Plan,
    item: Item,
    key: RowKey,
    attribution: Attribution | Exception,
    numbers: Any,
    seconds: float | None,
) -> Row:
    """The row of one metric on one example."""
    units = 0
    targets = 0
    probability = None
    if isinstance(attribution, Attribution):
        units = len(attribution.units)
        targets = len(attribution.targets)
        probability = attribution.targets[0].probability
    values: dict[str, float | str | None] = {}
    if isinstance(numbers, Mapping):
        for name, value in to_jsonable(numbers).items():
            if value is None or value in _WORDS or isinstance(value, int | float):
                values[name] = value
    return Row(
        **key._asdict(),
        category=item.category,
        index=item.index,
        seed=plan.seed + item.index,
        units=units,
        targets=targets,
        probability=probability,
        values=values,
        error=type(numbers).__name__ if isinstance(numbers, Exception) else None,
        seconds=None if seconds is None else round(seconds, 6),
        threads=torch.get_num_threads(),
    )


def _text(numbers: Any) -> dict[str, str]:
    """The texts of a metric that no row may hold: a judge's words, or an error's message."""
    if isinstance(numbers, Exception):
        return {"error": str(numbers)}
    texts: dict[str, str] = {}
    if isinstance(numbers, Mapping):
        for name, value in cast("Mapping[str, Any]", numbers).items():
            if isinstance(value, str) and value not in _WORDS:
                texts[name] = value
    return texts


def _facts(att: Attribution) -> dict[str, Any]:
    """An attribution's own numbers; k_min is the mean over the targets that have one."""
    k_min = None
    if att.k_min is not None:
        finite = [k for k in att.k_min.tolist() if math.isfinite(k)]
        if finite:
            k_min = sum(finite) / len(finite)
    facts = {
        "token_forwards": att.info.get("token_forwards"),
        "passes": att.info.get("passes"),
        "k_min": k_min,
        "rank": att.targets[0].rank,
    }
    return {name: value for name, value in facts.items() if value is not None}
