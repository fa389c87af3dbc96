"""Metrics: whether an attribution can be believed. A case in, numbers out."""

from noiser.metrics.answerability import ANSWERABILITY, ANSWERABILITY_TOP5, MINIMUM_TOP_K
from noiser.metrics.bootstrap import Estimate as Estimate
from noiser.metrics.bootstrap import estimate as estimate
from noiser.metrics.case import SETTINGS as SETTINGS
from noiser.metrics.case import Case as Case
from noiser.metrics.case import Settings as Settings
from noiser.metrics.erasure import ERASURE, ERASURE_CURVES, TOP_K
from noiser.metrics.gold_pairs import GOLD_PAIRS
from noiser.metrics.lds import LDS, LDS_WITH_PAIRS
from noiser.metrics.mass_matched import MASS_MATCHED, MASS_MATCHED_RANK
from noiser.metrics.mass_matched import keep_rates as keep_rates
from noiser.metrics.metric import Metric as Metric
from noiser.metrics.metric import Scale as Scale
from noiser.metrics.metric import Summary as Summary
from noiser.metrics.metric import check_read as check_read
from noiser.metrics.metric import measured as measured
from noiser.metrics.named_spans import GOLD_SPANS, LOCALISATION
from noiser.metrics.normalised_aopc import NORMALISED_AOPC
from noiser.metrics.run import METRICS as METRICS
from noiser.metrics.run import joined
from noiser.metrics.run import measure as measure
from noiser.metrics.soft import SOFT
from noiser.metrics.stability import STABILITY


def _register(name: str, metric: Metric, summary: str) -> None:
    METRICS.register(name, lambda: metric, summary=summary)


_register(
    "faithfulness",
    joined(SOFT, MASS_MATCHED, MASS_MATCHED_RANK),
    "soft scores, and mass-matched curves by score and by rank",
)
_register("soft_scores", SOFT, "Soft-NS, Soft-NC and the log-ratios to random scores (the paper's faithfulness)")
_register("mass_matched", MASS_MATCHED, "Soft-NS and Soft-NC when every method keeps the same amount")
_register("mass_matched_rank", MASS_MATCHED_RANK, "the same by the order of the scores alone")
_register("erasure", ERASURE, "sufficiency and comprehensiveness by hard erasure")
_register("erasure_curves", ERASURE_CURVES, "deletion and insertion curves")
_register("lds", LDS, "whether scores add up to the log-odds of random parts of the input")
_register("lds_with_pairs", LDS_WITH_PAIRS, "the same of the scores and the interactions of the named pairs")
_register("top_k", TOP_K, "fall of log p(target) without the k highest units, and with only them")
_register("normalised_aopc", NORMALISED_AOPC, "deletion area between the best and the worst order of the prompt")
_register("gold_spans", GOLD_SPANS, "recall@k, AUPRC and MRR of the spans that decide the answer")
_register("gold_pairs", GOLD_PAIRS, "whether the two spans that decide the answer are named as a pair, and rightly")
_register("localisation", LOCALISATION, "share of the score on the spans that an example names")
_register("stability", STABILITY, "rank correlation of two runs with different seeds")
_register("answerability", ANSWERABILITY, "whether a judge says the same from the top half of the words")
_register("answerability_top5", ANSWERABILITY_TOP5, "the same among five answers")
_register("minimum_top_k", MINIMUM_TOP_K, "the smallest share of words from which a judge says the same")
