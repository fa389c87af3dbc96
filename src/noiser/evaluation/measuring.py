"""Attribute and measure: the steps that `noiser.evaluate` and benchmarks share."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Container, Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from noiser.attribution import Attribution
from noiser.engine import Clean, CleanStats, LocalEngine, complete, run_interleaved
from noiser.errors import ParameterError
from noiser.evaluation.examples import Item
from noiser.explain import attribution_passes
from noiser.methods import Method
from noiser.metrics.judged import JudgeStoppedError
from noiser.metrics.metric import Case, Measured, Metric, measure_passes
from noiser.model import LanguageModel
from noiser.model.clean import Passes
from noiser.model.query import build_query
from noiser.types import AutoUnit, Profile, Progress, Prompt, SpanUnit, TargetUnit, Unit


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Attributor:
    """One way of attributing items.

    Attributes:
        lm: the model.
        method: the method, in the profile already; see `in_profile`.
        unit: what gets a score; "spans": the spans that the item names.
        max_new_tokens: tokens of the continuation to explain where an item has no target.
        target_unit: what each row explains; see `noiser.attribute`.
        profile: "authors": special tokens are scored, whatever the method.
    """

    lm: LanguageModel
    method: Method
    unit: Unit | AutoUnit | SpanUnit = "token"
    max_new_tokens: int = 1
    target_unit: TargetUnit = "token"
    profile: Profile = "paper"

    def passes(
        self, engine: LocalEngine, item: Item, seed: int, progress: Progress | None = None
    ) -> Passes[Attribution]:
        """The attribution of an item, as a coroutine; one that the item already has is not looked at."""
        return attribution_passes(
            engine,
            item.prompt,
            method=self.method,
            target=item.target,
            max_new_tokens=self.max_new_tokens,
            target_unit=self.target_unit,
            unit=self._unit_of(item),
            sources=item.sources,
            seed=seed,
            special_tokens="perturbed" if self.profile == "authors" else None,
            progress=progress,
        )

    def _unit_of(self, item: Item) -> Unit | AutoUnit:
        if self.unit != "spans":
            return self.unit
        if not item.spans:
            raise ParameterError("unit is 'spans' and the example names none; expected `spans`, or another unit.")
        return sorted(span for spans in item.spans.values() for span in spans)

    def case(self, item: Item, att: Attribution, **settings: Any) -> Case:
        """An item's attribution, to be measured; settings are those of `Case`."""

        def reattribute(seed: int) -> Attribution:
            engine = LocalEngine(self.lm)
            return complete(engine, self.passes(engine, item, seed))

        return Case(
            lm=self.lm,
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
        items: indices of the items to measure.
    """

    metric: Metric
    settings: Mapping[str, Any]
    items: Container[int]


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
) -> list[Measurement]:
    """The attributions and numbers of items; an item's error takes nothing from the others.

    Args:
        attributor: model and method.
        items: the items; item i is attributed with `seed` + its index.
        metrics: by any name.
        seed: of the first item of the sample.
        attributions: existing attributions of the same method, by index; the other items are attributed side by side.
        caches: by index, for numbers of a prompt that do not depend on the method; see `Case.cache`.

    Raises:
        JudgeStoppedError: a judge cannot work at all.
    """
    attributions, caches = attributions or {}, caches or {}
    lacking = [item for item in items if item.index not in attributions]
    started = time.perf_counter()
    found = dict(zip([item.index for item in lacking], _attribute(attributor, lacking, seed), strict=True))
    share = (time.perf_counter() - started) / max(1, len(lacking))
    measured = {
        item.index: Measurement(
            attributions.get(item.index) or found[item.index], {}, {}, share if item.index in found else None
        )
        for item in items
    }
    cases = {
        item.index: attributor.case(item, att, cache=caches.get(item.index, {}))
        for item in items
        if isinstance(att := measured[item.index].attribution, Attribution)
    }
    for name, (metric, settings, wanted) in metrics.items():
        usable = [index for index in cases if index in wanted]
        for group in [usable] if metric.measure is None else [[index] for index in usable]:
            started = time.perf_counter()
            with warnings.catch_warnings(action="ignore"):
                numbers = _measure(metric, [dataclasses.replace(cases[index], **settings) for index in group])
            share = (time.perf_counter() - started) / max(1, len(group))
            for index, columns in zip(group, numbers, strict=True):
                measured[index].numbers[name], measured[index].seconds[name] = columns, share
    return [measured[item.index] for item in items]


def _attribute(attributor: Attributor, items: Sequence[Item], seed: int) -> list[Attribution | Exception]:
    """The attributions of items, in their order, by shared passes."""
    engine = LocalEngine(attributor.lm, many=len(items) > 1)

    def one(item: Item) -> Passes[Attribution | Exception]:
        try:
            return (yield from attributor.passes(engine, item, seed + item.index))
        except Exception as error:  # of any kind: the item has no attribution, and the others go on
            return error

    with closing(run_interleaved(engine, [one(item) for item in items])) as outcomes:
        found = {number: result for number, result, _ in outcomes}
    return [found[number] for number in range(len(items))]


def _measure(metric: Metric, cases: Sequence[Case]) -> list[Measured | Exception]:
    numbers = measure_together(metric, cases) if metric.measure is None else [measure_one(metric, *cases)]
    if numbers and isinstance(numbers[0], JudgeStoppedError):
        raise numbers[0]
    return numbers


def says(lm: LanguageModel, prompt: Prompt, answer: str) -> bool:
    """Whether every token of the answer is the model's greedy choice."""
    stats: CleanStats = LocalEngine(lm).ask(build_query(lm, prompt, target=answer), Clean())
    return all(rank == 1 for rank in stats.ranks)


def measure_one(metric: Metric, case: Case) -> Measured | Exception:
    """What a metric that measures cases one by one finds; the error of a case that has no number."""
    engine = LocalEngine(case.lm)
    try:
        return complete(engine, measure_passes(engine, metric, case))
    except Exception as error:  # of any kind: it is reported with the case, and the others go on
        return error


def measure_together(metric: Metric, cases: Sequence[Case]) -> list[Measured | Exception]:
    """What a metric that measures all cases at once finds, in their order; the error of a case that has no number."""
    assert metric.measure_all is not None, "the metric measures cases one by one"
    if not cases:
        return []
    try:
        measured = list(metric.measure_all(cases))
        assert len(measured) == len(cases), "a metric measures every case"
    except Exception as error:  # it took them together, so they fail together
        return [error] * len(cases)
    return measured
