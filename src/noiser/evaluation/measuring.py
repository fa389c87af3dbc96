"""Attribute and measure: the steps that `noiser.evaluate` and benchmarks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any, Literal

from noiser.attribution import Attribution
from noiser.engine import Progress, Shares, Task, together
from noiser.evaluation.examples import Item
from noiser.methods import Method, attribute
from noiser.metrics.metric import Case, Measured, Metric
from noiser.model import LanguageModel
from noiser.types import Unit

__all__ = ["Attributor", "in_profile", "measure"]

Profile = Literal["paper", "authors"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Attributor:
    """One way of attributing items.

    Attributes:
        lm: the model.
        method: the method, in the profile already; see `in_profile`.
        unit: what gets a score.
        max_new_tokens: tokens of the continuation to explain where an item has no target.
        profile: "authors": special tokens are scored, whatever the method.
    """

    lm: LanguageModel
    method: Method
    unit: Unit = "token"
    max_new_tokens: int = 1
    profile: Profile = "paper"

    def attribute(self, item: Item, seed: int, progress: Progress | None = None) -> Attribution:
        """Attributes an item; what it already has is not looked at."""
        return attribute(
            self.lm,
            item.prompt,
            method=self.method,
            target=item.target,
            max_new_tokens=self.max_new_tokens,
            unit=self.unit,
            seed=seed,
            special_tokens="perturbed" if self.profile == "authors" else None,
            progress=progress,
        )

    def attribute_each(
        self, items: Sequence[Item], seed: int, progress: Progress | None
    ) -> Generator[tuple[Item, Attribution | Exception]]:
        """Items with their attributions or errors, done side by side, in the order in which they are done.

        Args:
            items: those that have an attribution are left as they are.
            seed: of the first item; each has its own, or random scores would favour the same positions in all of them.
            progress: called with (done, expected) items, the parts of those at work counted.
        """
        shares = Shares(len(items), progress, at_once=not self.lm.packs)

        def task(index: int, item: Item) -> Task[Attribution]:
            def attributed(lm: LanguageModel) -> Attribution:
                here = dataclasses.replace(self, lm=lm)
                return item.attribution or here.attribute(item, seed + item.index, shares.of(index))

            return attributed

        tasks = [task(index, item) for index, item in enumerate(items)]
        with closing(together(self.lm, tasks, moved=shares.tell)) as outcomes:
            for index, found, error in outcomes:
                shares.finish(index)
                yield items[index], error or found

    def case(self, item: Item, att: Attribution, **settings: Any) -> Case:
        """An item's attribution, to be measured; settings are those of `Case`."""

        def again(seed: int) -> Attribution:
            return self.attribute(item, seed)

        return Case(
            lm=self.lm,
            att=att,
            spans=item.spans,
            gold=item.gold,
            again=None if item.attribution else again,
            profile=self.profile,
            **settings,
        )


def in_profile(method: Method, profile: Profile) -> Method:
    """The method in the authors' profile, if it has one."""
    if profile != "authors" or not dataclasses.is_dataclass(method) or not hasattr(method, "profile"):
        return method
    return dataclasses.replace(method, profile=profile)


def measure(metric: Metric, cases: Sequence[Case]) -> list[Measured | Exception]:
    """What a metric finds for each case, in their order; the error of a case that has no number."""
    if metric.measure is not None:
        return [_measured(metric, case) for case in cases]
    assert metric.measure_all is not None, "a metric measures cases one by one or together"
    if not cases:
        return []
    try:
        found = list(metric.measure_all(cases))
        assert len(found) == len(cases), "a metric measures every case"
    except Exception as error:  # it took them together, so they fail together
        return [error] * len(cases)
    return found


def _measured(metric: Metric, case: Case) -> Measured | Exception:
    assert metric.measure is not None
    try:
        return metric.measure(case)
    except Exception as error:  # of any kind: it is reported with the case, and the others go on
        return error
