"""Metrics: whether an attribution can be believed. A case in, numbers out."""

from dataclasses import replace
from functools import partial

from noiser.metrics.answerability import ANSWERABILITY, ANSWERABILITY_TOP5, MINIMUM_TOP_K
from noiser.metrics.bootstrap import Estimate, Sample, estimate, estimates
from noiser.metrics.case import SETTINGS, Case, Settings
from noiser.metrics.correlation import LDS, LDS_BERNOULLI, LDS_WITH_PAIRS, STABILITY
from noiser.metrics.erasure import ERASURE, ERASURE_CURVES, NORMALISED_AOPC, TOP_K
from noiser.metrics.metric import (
    METRICS,
    Aggregate,
    Metric,
    NumberInfo,
    mean_of_columns,
    metrics_of,
    run_metric,
)
from noiser.metrics.named_spans import GOLD_PAIRS, GOLD_SPANS, LOCALISATION
from noiser.metrics.soft import FAITHFULNESS, MASS_MATCHED, MASS_MATCHED_RANK, SOFT, keep_rates

__all__ = [
    "METRICS",
    "SETTINGS",
    "Aggregate",
    "Case",
    "Estimate",
    "Metric",
    "NumberInfo",
    "Sample",
    "Settings",
    "estimate",
    "estimates",
    "keep_rates",
    "mean_of_columns",
    "metrics_of",
    "run_metric",
]

for _name, _metric, _summary in (
    ("faithfulness", FAITHFULNESS, "soft scores, and mass-matched curves by score and by rank"),
    (
        "soft_scores",
        SOFT,
        "Soft-NS, Soft-NC and the log-ratios to random scores (the paper's faithfulness)",
    ),
    ("mass_matched", MASS_MATCHED, "Soft-NS and Soft-NC when every method keeps the same amount"),
    ("mass_matched_rank", MASS_MATCHED_RANK, "the same by the order of the scores alone"),
    ("erasure", ERASURE, "sufficiency and comprehensiveness by hard erasure"),
    ("erasure_curves", ERASURE_CURVES, "deletion and insertion curves"),
    (
        "lds_bernoulli",
        LDS_BERNOULLI,
        "LDS as published, over inputs of any size, beside that of a constant",
    ),
    ("top_k", TOP_K, "fall of log p(target) without the k highest units, and with only them"),
    (
        "normalised_aopc",
        NORMALISED_AOPC,
        "deletion area between the best and the worst order of the prompt",
    ),
    ("gold_spans", GOLD_SPANS, "recall@k, AUPRC and MRR of the spans that decide the answer"),
    (
        "gold_pairs",
        GOLD_PAIRS,
        "whether the two spans that decide the answer are named as a pair, and rightly",
    ),
    ("localisation", LOCALISATION, "share of the score on the spans that an example names"),
    ("stability", STABILITY, "rank correlation of two runs with different seeds"),
    (
        "answerability",
        ANSWERABILITY,
        "whether a judge says the same from the top half of the words",
    ),
    ("answerability_top5", ANSWERABILITY_TOP5, "the same among five answers"),
    (
        "minimum_top_k",
        MINIMUM_TOP_K,
        "the smallest share of words from which a judge says the same",
    ),
):
    METRICS.register(_name, partial(replace, _metric), summary=_summary)

# Version 1 ran over inputs of any size, and is now `lds_bernoulli`.
METRICS.register(
    "lds",
    partial(replace, LDS),
    summary="whether scores add up to the log-odds of random halves of the input",
    version=2,
)
METRICS.register(
    "lds_with_pairs",
    partial(replace, LDS_WITH_PAIRS),
    summary="the same of the scores and the interactions of the named pairs",
    version=2,
)
