"""Attribute and measure: the steps that `noiser.evaluate` and benchmarks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from noiser.attribution import Attribution
from noiser.engine import LocalEngine, complete
from noiser.errors import ParameterError
from noiser.evaluation.examples import Item
from noiser.explain import attribution_passes
from noiser.methods import Method
from noiser.metrics.metric import Case, Measured, Metric, measure_passes
from noiser.model import LanguageModel
from noiser.model.clean import Passes
from noiser.types import AutoUnit, Profile, Progress, SpanUnit, TargetUnit, Unit


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
