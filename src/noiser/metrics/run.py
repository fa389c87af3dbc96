"""The metrics by name, and `noiser.measure`."""

from __future__ import annotations

from typing import Any

from noiser.attribution import Attribution
from noiser.engine import Steps, restore, run_one
from noiser.errors import ParameterError
from noiser.metrics.case import SETTINGS, Case
from noiser.metrics.metric import Measured, Metric, check_read, measured
from noiser.model import LanguageModel
from noiser.registry import Registry
from noiser.types import Progress


def joined(*metrics: Metric) -> Metric:
    """All that several metrics measure, one after another; the last one's primary number is the primary one."""

    def measure(case: Case) -> Steps[Measured]:
        columns: dict[str, Any] = {}
        for metric in metrics:
            columns |= yield from measured(case, metric)
        return columns

    return Metric(
        measure=measure,
        summaries={name: summary for metric in metrics for name, summary in metric.summaries.items()},
        primary=metrics[-1].primary,
        reads=frozenset[str]().union(*(metric.reads or () for metric in metrics)),
    )


METRICS: Registry[Metric] = Registry("metric", "noiser.metrics")
"""Every metric by name; packages add theirs through the entry point `noiser.metrics`."""


def measure(
    lm: LanguageModel, att: Attribution, name: str, *, seed: int = 0, progress: Progress | None = None, **settings: Any
) -> dict[str, Any]:
    """The numbers that a metric measures of an attribution, by name.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution; with a foil the contrast is measured, wherever a metric reads a score of the target.
        name: of the metric; `noiser.metrics.METRICS.names()` lists them.
        seed: of masks and references.
        progress: called with (done, expected) token-forwards.
        settings: what the metric reads of `masks`, `normalization`, `rates`, `draws`, `removal` and `k`; also
            `profile`, `spans`, `judge`, `gold`, and for stability `reattribute`, a function from a seed to the same
            prompt's attribution.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or a setting is not one of the metric.
        UnknownNameError: no such metric, removal or normalization.

    `noiser.measure(lm, att, "lds", masks=32)` is `{"lds": 0.83, "permuted_lds": 0.41, "draws": 10}`.
    """
    metric = METRICS.get(name).factory()
    check_read([metric], {setting: settings.get(setting) for setting in SETTINGS})
    if metric.needs_judge and settings.get("judge") is None:
        raise ParameterError(f"The metric {name!r} needs a judge. Pass judge=noiser.judges.make_judge(...).")

    def steps() -> Steps[Measured]:
        query = yield from restore(lm, att)
        return (yield from measured(Case(query=query, att=att, seed=seed, **settings), metric))

    return dict(run_one(lm, steps(), progress))
