"""Metrics: whether an attribution can be believed. An Attribution and a model in, numbers out."""

from __future__ import annotations

from functools import partial

from noiser.metrics.answerability import ANSWERABILITY, ANSWERABILITY_TOP5, Answerability, answerability
from noiser.metrics.bootstrap import Estimate, estimate, faithfulness_score, log_ratio
from noiser.metrics.erasure import ERASURE, ERASURE_CURVES, ErasureCurves, ErasureScores, erasure_curves, erasure_scores
from noiser.metrics.gold_spans import GOLD_SPANS, GoldSpans, gold_spans
from noiser.metrics.lds import LDS, lds
from noiser.metrics.localisation import LOCALISATION, Localisation, localisation
from noiser.metrics.mass_matched import MASS_MATCHED, MASS_MATCHED_RANK, Curve, MassMatched, keep_rates, mass_matched
from noiser.metrics.metric import METRICS, Case, Metric, Scale, Summary, joined, measure_passes
from noiser.metrics.minimum import MINIMUM_TOP_K, MinimumTopK, minimum_top_k
from noiser.metrics.normalised_aopc import NORMALISED_AOPC, NormalisedAopc, normalised_aopc
from noiser.metrics.soft import SOFT, SoftScores, soft_scores
from noiser.metrics.stability import STABILITY, Stability, stability
from noiser.metrics.top_k import TOP_K, TopK, top_k

__all__ = [
    "METRICS",
    "Answerability",
    "Case",
    "Curve",
    "ErasureCurves",
    "ErasureScores",
    "Estimate",
    "GoldSpans",
    "Localisation",
    "MassMatched",
    "Metric",
    "MinimumTopK",
    "NormalisedAopc",
    "Scale",
    "SoftScores",
    "Stability",
    "Summary",
    "TopK",
    "answerability",
    "erasure_curves",
    "erasure_scores",
    "estimate",
    "faithfulness_score",
    "gold_spans",
    "keep_rates",
    "lds",
    "localisation",
    "log_ratio",
    "mass_matched",
    "measure_passes",
    "minimum_top_k",
    "normalised_aopc",
    "soft_scores",
    "stability",
    "top_k",
]


def _the(metric: Metric) -> Metric:
    return metric


for _name, _metric, _summary in (
    (
        "faithfulness",
        joined(SOFT, MASS_MATCHED, MASS_MATCHED_RANK),
        "soft scores, and mass-matched curves by score and by rank",
    ),
    ("soft_scores", SOFT, "Soft-NS, Soft-NC and the log-ratios to random scores (the paper's faithfulness)"),
    ("mass_matched", MASS_MATCHED, "Soft-NS and Soft-NC when every method keeps the same amount"),
    ("mass_matched_rank", MASS_MATCHED_RANK, "the same by the order of the scores alone"),
    ("erasure", ERASURE, "sufficiency and comprehensiveness by hard erasure"),
    ("erasure_curves", ERASURE_CURVES, "deletion and insertion curves"),
    ("lds", LDS, "whether scores add up to the log-odds of random parts of the input"),
    ("top_k", TOP_K, "fall of log p(target) without the k highest units, and with only them"),
    ("normalised_aopc", NORMALISED_AOPC, "deletion area between the best and the worst order of the prompt"),
    ("gold_spans", GOLD_SPANS, "recall@k, AUPRC and MRR of the spans that decide the answer"),
    ("localisation", LOCALISATION, "share of the score on the spans that an example names"),
    ("stability", STABILITY, "rank correlation of two runs with different seeds"),
    ("answerability", ANSWERABILITY, "whether a judge says the same from the top half of the words"),
    ("answerability_top5", ANSWERABILITY_TOP5, "the same among five answers"),
    ("minimum_top_k", MINIMUM_TOP_K, "the smallest share of words from which a judge says the same"),
):
    METRICS.register(_name, partial(_the, _metric), summary=_summary)
