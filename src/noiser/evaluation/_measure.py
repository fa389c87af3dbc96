"""`noiser.measure`: one metric of one attribution."""

from __future__ import annotations

from typing import Any

from noiser.attribution import Attribution
from noiser.engine import run_one
from noiser.errors import ParameterError
from noiser.explain import restore
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, metrics_of, run_metric
from noiser.model import LanguageModel
from noiser.types import Progress


def measure(
    lm: LanguageModel,
    att: Attribution,
    name: str,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The numbers that a metric measures of an attribution, by name.

    Args:
        lm: the model to ask, usually the one that made the attribution.
        att: the attribution; with a foil the contrast is measured, wherever a metric reads a score
            of the target.
        name: of the metric; `noiser.metrics.METRICS.names()` lists them.
        seed: of masks and references.
        progress: called with (done, expected) token-forwards.
        settings: what the metric reads of `masks`, `normalization`, `rates`, `draws`, `removal` and
            `k`; also `profile`, `spans`, `judge`, `gold`, and for stability `reattribute`, a
            function from a seed to the same prompt's attribution.

    Raises:
        ParameterError: the model's tokens are not the attribution's, or a setting is not one of the
            metric.
        UnknownNameError: no such metric, removal or normalization.

    `noiser.measure(lm, att, "lds", masks=32)` is `{"lds": 0.83, "permuted_lds": 0.41, "draws":
    10}`.
    """
    if not isinstance(att, Attribution):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = "expected an attribution. Pass noiser.attribute(lm, ...), or use noiser.evaluate"
        raise ParameterError(f"att is a {type(att).__name__}; {expected}.")
    ((full_name, metric),) = metrics_of(name, settings, "spans", "gold", "reattribute").items()

    async def steps() -> Measured:
        query = await restore(lm, att)
        return await run_metric(
            Case(query=query, att=att, seed=seed, **settings), metric, full_name
        )

    return dict(run_one(lm, steps(), progress))
