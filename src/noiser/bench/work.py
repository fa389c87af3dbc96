"""The work of a benchmark: jobs in, rows out. A worker holds the models; it writes nothing and knows no folder."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from noiser.attribution import Attribution
from noiser.attribution.store import to_jsonable
from noiser.bench.plan import MetricEntry, Plan
from noiser.bench.rows import ATTRIBUTION, Key, Row, Text
from noiser.errors import NoiserError, RunError
from noiser.evaluation.measuring import Item, Measurement, asked_of, measure_block, says
from noiser.judges import Judge, kind_of, make_judge
from noiser.methods import make_method
from noiser.metrics import METRICS, Metric, Settings
from noiser.model import LanguageModel, load_model
from noiser.model.memory import free_memory

_WORDS = ("correct", "wrong", "unscored", "Infinity", "-Infinity")
"""Texts that a row may hold; all others may quote a prompt or a judge. JSON has no form of its own for infinities."""


class Questions(NamedTuple):
    """A job: which examples does the model answer right?"""

    model: str
    data: str
    examples: tuple[Item, ...]


class Job(NamedTuple):
    """A job: one method on a block of examples, and the metrics that lack rows."""

    model: str
    data: str
    method: str
    block: int  # its index; methods on a block share what a prompt has once
    examples: tuple[Item, ...]  # those of the block that lack a row
    missing: Mapping[
        str, frozenset[str]
    ]  # ids of examples without a row, by metric, "attribution" among them
    attributions: Mapping[str, Mapping[str, Any]] = {}  # those stored, by example, as JSON


class Done(NamedTuple):
    """The result of a job: the model's identity, and rows with texts to be stored together, or answers."""

    identity: Mapping[str, Any]
    rows: Sequence[Row] = ()
    texts: Sequence[Text] = ()
    answers: Mapping[str, bool | str] = {}  # by example: right, wrong, or the error's type


class Worker:
    """Does one job after another, and keeps the models between them; sets CPU threads unless they are None."""

    def __init__(self, plan: Plan, threads: int | None = None) -> None:
        self.plan = plan
        self._models: dict[str, LanguageModel] = {}
        self._judges: dict[str, Judge] = {}
        self._block: tuple[Any, ...] = ()
        self._caches: dict[str, dict[Hashable, Any]] = {}
        if threads is not None:
            torch.set_num_threads(threads)

    def work(self, job: Job | Questions) -> Done:
        """The rows that the job lacks, or the answers. Raises RunError where a model or a judge cannot work at all."""
        try:
            lm = self._model(job.model)
            identity = lm.identity._asdict()
            if isinstance(job, Questions):
                return Done(
                    identity, answers={each.id: _is_right(lm, each) for each in job.examples}
                )
            rows, texts = list[Row](), list[Text]()
            for item, found in zip(job.examples, self._measured(job, lm), strict=True):
                _note(self.plan, job, item, found, rows, texts)
            return Done(identity, rows, texts)
        except NoiserError as error:  # not every error of ours can be sent to another process
            raise RunError(str(error)) from error

    def _measured(self, job: Job, lm: LanguageModel) -> list[Measurement]:
        if self._block != (block := (job.model, job.data, job.block)):
            self._block, self._caches = block, {}
        stored = {example: Attribution.from_dict(att) for example, att in job.attributions.items()}
        items = [
            replace(
                item,
                attribution=stored.get(item.id),
                of_method=True,
                cache=self._caches.setdefault(item.id, {}),
            )
            for item in job.examples
        ]
        method, data = self.plan.entry("methods", job.method), self.plan.entry("data", job.data)
        seed, profile, metrics = (
            self.plan.seed,
            method.profile,
            dict[str, tuple[Metric, Settings]](),
        )
        for label in (label for label in job.missing if label != ATTRIBUTION):
            entry = self.plan.entry("metrics", label)
            settings = Settings(
                **entry.settings, seed=seed, profile=profile, judge=self._judge(entry, lm)
            )
            metrics[label] = METRICS.get(entry.name).factory(), settings
        asked = profile, method.unit, data.max_new_tokens, data.target_unit
        made, question = asked_of(make_method(method.name, **method.args), *asked)
        return measure_block(lm, made, question, items, metrics, seed=seed)

    def _model(self, label: str) -> LanguageModel:
        """The model of a label; the last one makes room for it."""
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
        if entry.judge is None:
            return None
        kind, name = kind_of(entry.judge), entry.judge.partition(":")[2]
        if kind == "local" and not name:
            return make_judge("local", lm=lm, **entry.judge_args)
        if entry.label not in self._judges:
            job = (
                {"job": f"{self.plan.name}/{entry.label}"} if kind == "openai" else {}
            )  # whose budget is one
            judge, model = ("local", self._load(name)) if kind == "local" else (entry.judge, None)
            self._judges[entry.label] = make_judge(judge, lm=model, **job | entry.judge_args)
        return self._judges[entry.label]


def _is_right(lm: LanguageModel, item: Item) -> bool | str:
    """Whether the model gives the answer where it should and nowhere else, see `Example`; or the error's type."""
    try:
        assert item.gold is not None, "`draw` has checked it"
        return all(says(lm, other, item.gold) for other in (item.prompt, *item.enough)) and not any(
            says(lm, other, item.gold) for other in item.without
        )
    except Exception as error:  # a prompt that cannot be asked is counted, and the others go on
        return type(error).__name__


def _note(
    plan: Plan, job: Job, item: Item, found: Measurement, rows: list[Row], texts: list[Text]
) -> None:
    """Adds the rows that an example lacks, and the texts that belong to them."""
    att = found.attribution if isinstance(found.attribution, Attribution) else None
    place = Key(job.model, job.data, job.method, ATTRIBUTION, item.id)
    if att and found.attribution_seconds is not None:
        texts.append((place, {ATTRIBUTION: att.to_dict()}))
    for metric in [metric for metric, examples in job.missing.items() if item.id in examples]:
        if metric == ATTRIBUTION:
            numbers, seconds = _facts(att) if att else found.attribution, found.attribution_seconds
        else:
            numbers, seconds = (
                found.numbers.get(metric, found.attribution),
                found.seconds.get(metric),
            )
        columns = numbers if isinstance(numbers, Mapping) else {}
        error, plain = numbers if isinstance(numbers, Exception) else None, to_jsonable(columns)
        row = Row(
            **place._replace(metric=metric)._asdict(),
            category=item.category,
            index=item.index,
            seed=plan.seed + item.index,
            units=len(att.units) if att else 0,
            targets=len(att.targets) if att else 0,
            probability=att.targets[0].probability if att else None,
            values={
                k: v
                for k, v in plain.items()
                if v is None or v in _WORDS or isinstance(v, int | float)
            },
            error=type(error).__name__ if error else None,
            seconds=None if seconds is None else round(seconds, 6),
            threads=torch.get_num_threads(),
        )
        rows.append(row)
        words = {
            name: value
            for name, value in columns.items()
            if isinstance(value, str) and value not in _WORDS
        }
        if error or words:
            texts.append((row.key, words or {"error": str(error)}))


def _facts(att: Attribution) -> dict[str, Any]:
    """An attribution's own numbers."""
    k_min = [] if att.k_min is None else [k for k in att.k_min.tolist() if math.isfinite(k)]
    facts = {name: att.info.get(name) for name in ("token_forwards", "passes")}
    facts |= {"k_min": sum(k_min) / len(k_min) if k_min else None, "rank": att.targets[0].rank}
    return {name: value for name, value in facts.items() if value is not None}
