"""Metrics: whether an attribution can be believed. An Attribution and a model in, numbers out."""

from noiser.metrics.answerability import Answerability, answerability
from noiser.metrics.bootstrap import Estimate, estimate, faithfulness_score, log_ratio
from noiser.metrics.catalog import METRICS
from noiser.metrics.erasure import ErasureCurves, ErasureScores, erasure_curves, erasure_scores
from noiser.metrics.localisation import Localisation, localisation
from noiser.metrics.mass_matched import Curve, MassMatched, keep_rates, mass_matched
from noiser.metrics.metric import Case, Metric, Scale, Summary, measure_passes
from noiser.metrics.minimum import MinimumTopK, minimum_top_k
from noiser.metrics.soft import SoftScores, soft_scores
from noiser.metrics.stability import Stability, stability

__all__ = [
    "METRICS",
    "Answerability",
    "Case",
    "Curve",
    "ErasureCurves",
    "ErasureScores",
    "Estimate",
    "Localisation",
    "MassMatched",
    "Metric",
    "MinimumTopK",
    "Scale",
    "SoftScores",
    "Stability",
    "Summary",
    "answerability",
    "erasure_curves",
    "erasure_scores",
    "estimate",
    "faithfulness_score",
    "keep_rates",
    "localisation",
    "log_ratio",
    "mass_matched",
    "measure_passes",
    "minimum_top_k",
    "soft_scores",
    "stability",
]
