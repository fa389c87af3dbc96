"""Attribute and measure: the steps that `noiser.evaluate` and benchmarks share."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from noiser.attribution import Attribution
from noiser.engine import Engine, Query, Steps, prepare, restore, run_one
from noiser.errors import ParameterError
from noiser.evaluation.examples import Item
from noiser.explain.attribute import attribution_of
from noiser.methods import Method, check_answers
from noiser.metrics.judged import JudgeStoppedError
from noiser.metrics.metric import Case, Measured, Metric, measured
from noiser.model import LanguageModel
from noiser.question import Question
from noiser.types import AutoUnit, Profile, Prompt, SpanUnit, TargetUnit, Unit

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Attributor:
    """One way of attributing items.

    Attributes:
        lm: the model.
        method: the method, in the profile already; see `in_profile`.
        unit: the part of the prompt that gets a score; "spans": the spans that the item names.
        max_new_tokens: tokens of the continuation to explain where an item has no target.
        target_unit: the part of the continuation that each row explains; see `noiser.attribute`.
        profile: "authors": special tokens are scored, whatever the method.
    """

    lm: LanguageModel
    method: Method
    unit: Unit | AutoUnit | SpanUnit = "token"
    max_new_tokens: int = 1
    target_unit: TargetUnit = "token"
    profile: Profile = "paper"

    def question(self, item: Item) -> Question:
        """The question about an item."""
        special = "perturbed" if self.profile == "authors" else getattr(self.method, "special_tokens", None)
        return Question(
            prompt=item.prompt,
            target=item.target,
            max_new_tokens=self.max_new_tokens,
            target_unit=self.target_unit,
            unit=self._unit_of(item),
            sources=item.sources,
            special_tokens=special,
        )

    def _unit_of(self, item: Item) -> Unit | AutoUnit:
        if self.unit != "spans":
            return self.unit
        if not item.spans:
            raise ParameterError("unit is 'spans' and the example names none; expected `spans`, or another unit.")
        return sorted(span for spans in item.spans.values() for span in spans)

    def attribution(self, item: Item, seed: int) -> Steps[tuple[Query, Attribution]]:
        """The query of an item and its attribution."""
        check_answers(self.method, self.lm.identity.name, self.lm.looks_inside)
        query = yield from prepare(self.lm, self.question(item))
        attribution = yield from attribution_of(self.lm, query, self.method, seed)
        return query.with_units(attribution.units), attribution

    def case(self, item: Item, query: Query, att: Attribution, **settings: Any) -> Case:
        """An item's attribution, to be measured; settings are those of `Case`."""

        def reattribute(seed: int) -> Steps[Attribution]:
            return (yield from self.attribution(item, seed))[1]

        return Case(
            query=query,
            att=att,
            spans=item.spans,
            gold=item.gold,
            reattribute=None if item.attribution else reattribute,
            profile=self.profile,
            **settings,
        )


def in_profile(method: Method, profile: Profile) -> Method:
    """The method in the authors' profile, if it has one."""
    if profile != "authors" or not dataclasses.is_dataclass(method) or not hasattr(method, "profile"):
        return method
    return dataclasses.replace(method, profile=profile)


class MetricRun(NamedTuple):
    """A metric to measure.

    Attributes:
        metric: the metric.
        settings: fields of `Case`: masks, judge, seed and others.
        items: indices of the items to measure; None for all.
    """

    metric: Metric
    settings: Mapping[str, Any]
    items: Container[int] | None = None


class Measurement(NamedTuple):
    """An item's attribution and numbers.

    Attributes:
        attribution: the attribution, or its error.
        numbers: columns or the error, by metric; empty where there is no attribution.
        seconds: wall clock of each metric; items that ran side by side get equal shares.
        attribution_seconds: wall clock of the attribution; None where it was there before.
    """

    attribution: Attribution | Exception
    numbers: dict[str, Measured | Exception]
    seconds: dict[str, float]
    attribution_seconds: float | None


def measure_block(
    attributor: Attributor,
    items: Sequence[Item],
    metrics: Mapping[str, MetricRun],
    *,
    seed: int,
    attributions: Mapping[int, Attribution] | None = None,
    caches: Mapping[int, dict[Hashable, Any]] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """The attributions and numbers of items; an item's error takes nothing from the others.

    Args:
        attributor: model and method.
        items: the items; item i is attributed with `seed` + its index.
        metrics: by any name.
        seed: of the first item of the sample.
        attributions: existing attributions of the same method, by index; the other items are attributed side by side.
        caches: by index, for numbers of a prompt that do not depend on the method; see `Case.cache`.
        tick: called when an item is attributed, and when a metric of it is measured.

    Raises:
        JudgeStoppedError: a judge cannot work at all.
    """
    lm, existing, caches = attributor.lm, attributions or {}, caches or {}
    lacking = [item for item in items if item.index not in existing]
    started = time.perf_counter()
    fresh = _each(lm, (attributor.attribution(item, seed + item.index) for item in lacking), tick)
    share = (time.perf_counter() - started) / max(1, len(lacking))
    found = dict(zip([item.index for item in lacking], fresh, strict=True))
    stored = [item for item in items if item.index in existing]
    restored = _each(lm, (_restored(lm, existing[item.index]) for item in stored), tick)
    found |= dict(zip([item.index for item in stored], restored, strict=True))
    measurements: dict[int, Measurement] = {}
    cases: dict[int, Case] = {}
    for item in items:
        pair, seconds = found[item.index], None if item.index in existing else share
        attribution = existing.get(item.index) or (pair if isinstance(pair, Exception) else pair[1])
        measurements[item.index] = Measurement(attribution, {}, {}, seconds)
        if isinstance(pair, Exception):
            measurements[item.index].numbers.update(dict.fromkeys(metrics, pair) if item.index in existing else {})
        else:
            cases[item.index] = attributor.case(item, *pair, cache=caches.get(item.index, {}))
    for name, (metric, settings, wanted) in metrics.items():
        usable = [index for index in cases if wanted is None or index in wanted]
        started = time.perf_counter()
        numbers = _measure(lm, metric, [dataclasses.replace(cases[index], **settings) for index in usable], tick)
        share = (time.perf_counter() - started) / max(1, len(usable))
        for index, columns in zip(usable, numbers, strict=True):
            measurements[index].numbers[name], measurements[index].seconds[name] = columns, share
    return [measurements[item.index] for item in items]


def _restored(lm: LanguageModel, att: Attribution) -> Steps[tuple[Query, Attribution]]:
    return (yield from restore(lm, att)), att


def _each(lm: LanguageModel, works: Iterable[Steps[T]], tick: Callable[[], None]) -> list[T | Exception]:
    """The result or the error of every generator, in their order, by shared passes."""
    outcomes: dict[int, T | Exception] = {}
    for number, outcome in Engine(lm).run(works):
        outcomes[number] = outcome
        tick()
    return [outcomes[number] for number in range(len(outcomes))]


def _measure(
    lm: LanguageModel, metric: Metric, cases: Sequence[Case], tick: Callable[[], None]
) -> list[Measured | Exception]:
    """The columns of every case, or its error."""
    with warnings.catch_warnings(action="ignore"):
        if metric.measure_all is None:
            return _each(lm, (measured(case, metric) for case in cases), tick)
        try:
            return list(metric.measure_all(cases)) if cases else []
        except JudgeStoppedError:
            raise
        except Exception as error:  # it took them together, so they fail together
            return [error] * len(cases)


def says(lm: LanguageModel, prompt: Prompt, answer: str) -> bool:
    """Whether every token of the answer is the model's greedy choice."""
    query = run_one(lm, prepare(lm, Question(prompt=prompt, target=answer)))
    return all(rank == 1 for rank in query.stats().ranks)
