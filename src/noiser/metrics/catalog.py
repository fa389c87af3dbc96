"""The metrics that come with the package, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from noiser.errors import ParameterError
from noiser.metrics.bootstrap import log_mean_ratio, mean, mean_gap, summed_log_ratios
from noiser.metrics.erasure import measure_erasure_curves, measure_erasure_scores
from noiser.metrics.judged import ANSWERABILITY, ANSWERABILITY_TOP5, MINIMUM_TOP_K
from noiser.metrics.localisation import localisation
from noiser.metrics.mass_matched import By, Reference, measure_mass_matched, random_curve
from noiser.metrics.metric import Case, Metric, Scale, Summary
from noiser.metrics.references import random_scores
from noiser.metrics.soft import SoftScores, measure_soft_scores
from noiser.metrics.stability import stability
from noiser.registry import Registry

__all__ = ["METRICS"]

METRICS: Registry[Metric] = Registry("metric", "noiser.metrics")
"""Every metric by name; packages add theirs through the entry point `noiser.metrics`."""


def _joined(*metrics: Metric) -> Metric:
    """All that several metrics measure."""

    def measure(case: Case) -> dict[str, Any]:
        return {name: value for metric in metrics if metric.measure for name, value in metric.measure(case).items()}

    return Metric(
        measure=measure,
        summaries={n: s for metric in metrics for n, s in metric.summaries.items()},
        reads=frozenset[str]().union(*(metric.reads or () for metric in metrics)),
    )


def _the(metric: Metric) -> Metric:
    return metric


# ---- soft scores --------------------------------------------------------------------------------------------------


def _measure_soft(case: Case) -> dict[str, float]:
    subject = case.profiled

    def measure(scores: Float[Tensor, "targets units"] | None = None) -> SoftScores:
        return measure_soft_scores(subject, scores, normalization=case.normalization, masks=case.masks, seed=case.seed)

    settings = (case.normalization, case.masks, case.seed)
    own = measure()
    reference = case.once("soft scores", subject, settings, lambda: measure(random_scores(subject, case.seed)))
    return {
        "soft_ns": own.soft_ns,
        "soft_nc": own.soft_nc,
        "random_soft_ns": reference.soft_ns,
        "random_soft_nc": reference.soft_nc,
    }


def _log_scale(meaning: str) -> Scale:
    return Scale(-math.inf, math.inf, 0.0, True, meaning)


_NS = Scale(0, 1, None, True, "what the retained part gives back of the prediction")
_NC = Scale(0, math.inf, None, True, "how far the prediction goes without it, against the zero input")
SOFT = Metric(
    measure=_measure_soft,
    summaries={
        "soft_ns": Summary(mean, ("soft_ns",), _NS),
        "soft_nc": Summary(mean, ("soft_nc",), _NC),
        "log_ratio_ns": Summary(log_mean_ratio, ("soft_ns", "random_soft_ns"), _log_scale("Soft-NS against random's")),
        "log_ratio_nc": Summary(log_mean_ratio, ("soft_nc", "random_soft_nc"), _log_scale("Soft-NC against random's")),
        "faithfulness": Summary(
            summed_log_ratios,
            ("soft_ns", "soft_nc", "random_soft_ns", "random_soft_nc"),
            _log_scale("the paper's score: the sum of both log-ratios"),
        ),
    },
    reads=frozenset({"masks", "normalization"}),
)


# ---- mass-matched curves ------------------------------------------------------------------------------------------


def _mass_matched(by: By, prefix: str, *own: Reference) -> Metric:
    """Against random scores, and against the references that are made of the method's own scores."""
    references: tuple[Reference, ...] = ("random", *own)

    def measure(case: Case) -> dict[str, float]:
        subject, masks = case.subject, case.masks or 10
        common: dict[str, Any] = {"rates": case.rates, "masks": masks, "seed": case.seed, "by": by}
        found = measure_mass_matched(subject, references=own, **common)
        curves = dict(found.references)
        curves["random"] = case.once(
            "mass-matched", subject, tuple(common.values()), lambda: random_curve(subject, **common)
        )
        columns: dict[str, float] = {}
        for name, curve in (("", found.method), *((f"{name}_", curves[name]) for name in references)):
            columns |= {f"{prefix}{name}area_ns": curve.area_ns, f"{prefix}{name}area_nc": curve.area_nc}
            columns[f"{prefix}{name}area"] = curve.area
        for i, rate in enumerate(found.method.rates):
            columns[f"{prefix}ns@{rate:g}"] = float(found.method.soft_ns[i])
            columns[f"{prefix}nc@{rate:g}"] = float(found.method.soft_nc[i])
        return columns

    what = "with the same mass" if by == "score" else "by order alone"
    area = f"{prefix}area"
    summaries = {
        f"{area}_ns": Summary(mean, (f"{area}_ns",), Scale(0, 1, None, True, f"height of the Soft-NS curve, {what}")),
        f"{area}_nc": Summary(mean, (f"{area}_nc",), Scale(0, math.inf, None, True, f"that of Soft-NC, {what}")),
        area: Summary(mean, (area,), Scale(0, math.inf, 1.0, True, "both together")),
    }
    for name in references:
        scale = Scale(-math.inf, math.inf, 0.0, True, f"area minus that of {name} scores")
        summaries[f"{area}_minus_{name}"] = Summary(mean_gap, (area, f"{prefix}{name}_area"), scale)
    return Metric(measure=measure, summaries=summaries, reads=frozenset({"masks", "rates"}))


MASS_MATCHED = _mass_matched("score", "", "permuted")
MASS_MATCHED_RANK = _mass_matched("rank", "rank_")  # shuffled ranks are random ranks


# ---- hard erasure, localisation, stability ------------------------------------------------------------------------


def _measure_erasure(case: Case) -> dict[str, float]:
    found = measure_erasure_scores(case.subject)
    return {"sufficiency": found.sufficiency, "comprehensiveness": found.comprehensiveness}


def _measure_curves(case: Case) -> dict[str, float]:
    found = measure_erasure_curves(case.subject)
    return {"deletion_area": found.deletion_area, "insertion_area": found.insertion_area, "aopc": found.aopc}


def _measure_localisation(case: Case) -> dict[str, float]:
    if not case.spans:
        raise ParameterError(
            "The example names no spans; expected `spans`, a mapping from names to lists of (start, end), for "
            "localisation. Give examples that have them, or leave the metric out."
        )
    found = localisation(case.att, case.spans, case.normalization or "positive")
    return {f"share_{name}": found.share(name) for name in found.shares} | {
        f"uniform_{name}": float(share.mean()) for name, share in found.uniform.items()
    }


def _measure_stability(case: Case) -> dict[str, float]:
    if case.again is None:
        raise ParameterError("This attribution cannot be made again; expected a prompt, to be attributed twice.")
    found = stability(case.att, case.again(case.att.seed + 1))
    return {"spearman": found.spearman, "kendall": found.kendall}


def _means(measure: Callable[[Case], Mapping[str, float]], **scales: Scale) -> Metric:
    summaries = {name: Summary(mean, (name,), scale) for name, scale in scales.items()}
    return Metric(measure=measure, summaries=summaries, reads=frozenset())


ERASURE = _means(
    _measure_erasure,
    sufficiency=Scale(-1, 1, None, False, "drop of p(target) with only the top units, mean over shares"),
    comprehensiveness=Scale(-1, 1, None, True, "drop of p(target) without the top units, mean over shares"),
)
CURVES = _means(
    _measure_curves,
    deletion_area=Scale(0, 1, None, False, "p(target) while units are zeroed, highest first"),
    insertion_area=Scale(0, 1, None, True, "p(target) while units are put back, highest first"),
    aopc=Scale(-1, 1, None, True, "drop of p(target) while units are zeroed, highest first"),
)
LOCALISATION = Metric(
    measure=_measure_localisation,
    others=Scale(0, 1, None, None, "share of the score, or of the units"),
    reads=frozenset({"normalization"}),
)
STABILITY = _means(
    _measure_stability,
    spearman=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Spearman's ρ"),
    kendall=Scale(-1, 1, 0.0, True, "rank correlation of two seeds, Kendall's τ-b"),
)
FAITHFULNESS = _joined(SOFT, MASS_MATCHED, MASS_MATCHED_RANK)

for _name, _metric, _summary in (
    ("faithfulness", FAITHFULNESS, "soft scores, and mass-matched curves by score and by rank"),
    ("soft_scores", SOFT, "Soft-NS, Soft-NC and the log-ratios to random scores (the paper's faithfulness)"),
    ("mass_matched", MASS_MATCHED, "Soft-NS and Soft-NC when every method keeps the same amount"),
    ("mass_matched_rank", MASS_MATCHED_RANK, "the same by the order of the scores alone"),
    ("erasure", ERASURE, "sufficiency and comprehensiveness by hard erasure"),
    ("erasure_curves", CURVES, "deletion and insertion curves"),
    ("localisation", LOCALISATION, "share of the score on the spans that an example names"),
    ("stability", STABILITY, "rank correlation of two runs with different seeds"),
    ("answerability", ANSWERABILITY, "whether a judge says the same from the top half of the words"),
    ("answerability_top5", ANSWERABILITY_TOP5, "the same among five answers"),
    ("minimum_top_k", MINIMUM_TOP_K, "the smallest share of words from which a judge says the same"),
):
    METRICS.register(_name, partial(_the, _metric), summary=_summary)
