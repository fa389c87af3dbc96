"""Metrics: whether an attribution can be believed. An Attribution and a model in, numbers out."""

from noiser.metrics.answerability import Answerability, answerability
from noiser.metrics.bootstrap import Estimate, estimate, faithfulness_score, log_ratio
from noiser.metrics.catalog import METRICS
from noiser.metrics.erasure import ErasureCurves, ErasureScores, erasure_curves, erasure_scores
from noiser.metrics.gold_spans import GoldSpans, gold_spans
from noiser.metrics.lds import lds
from noiser.metrics.localisation import Localisation, localisation
from noiser.metrics.mass_matched import Curve, MassMatched, keep_rates, mass_matched
from noiser.metrics.metric import Case, Metric, Scale, Summary, measure_passes
from noiser.metrics.minimum import MinimumTopK, minimum_top_k
from noiser.metrics.normalised_aopc import NormalisedAopc, normalised_aopc
from noiser.metrics.soft import SoftScores, soft_scores
from noiser.metrics.stability import Stability, stability
from noiser.metrics.top_k import TopK, top_k

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
