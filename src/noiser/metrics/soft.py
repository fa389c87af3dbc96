"""Soft sufficiency and soft comprehensiveness (Zhao and Aletras 2023; for generation, Zhao and Shan 2024).

A unit's share s is its normalised score, clipped to [0, 1]. Every dimension of its embeddings is kept with probability
s (retain) or 1 - s (remove). With D the distance to the clean next-token distribution, Soft-NS = max(0, D(zero) -
D(retained)) / D(zero) and Soft-NC = D(removed) / D(zero) (paper, appendix "Soft-NC and Soft-NS Metrics"). Special
tokens and template text are never masked, not in the zero input either. Masks depend on text and seed alone.

The authors' profile is that of the published script: special tokens that the attribution scores are masked, too, there
is one mask, and the distance is squared.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.attribution.normalize import normalize
from noiser.checks import check_count
from noiser.engine import Change, Steps
from noiser.metrics.bootstrap import Statistic, log_mean_ratio, summed_log_ratios
from noiser.metrics.metric import Case, Measured, Metric, Scale, Summary, mean_of_columns
from noiser.metrics.probe import Probe, random_scores


def soft_scores(
    case: Case, probe: Probe, scores: Float[Tensor, "draws targets units"]
) -> Steps[Float64[Tensor, "2 targets samples"]]:
    """Soft-NS and Soft-NC of several scores, one per mask sample.

    With more draws than masks there are as many samples as draws, and the masks come again from the start.
    """
    authors, seed = case.profile == "authors", case.seed
    masks = check_count("masks", (1 if authors else 10) if case.masks is None else case.masks)
    shares = normalize(scores, case.normalization or "sum").clamp(0, 1)
    samples = torch.arange(max(masks, len(shares)))

    def masked(target: int) -> Change:
        """All masks of a target: those that retain, then those that remove."""
        q = probe.units_to_tokens(shares[:, target], target)[samples % len(shares), :, None]
        shape = (masks, q.shape[1], case.query.embedding_dim)

        def both() -> Tensor:
            retained = probe.uniforms(seed, "retain", target, *shape)[samples % masks] < q
            return torch.cat([retained, probe.uniforms(seed, "remove", target, *shape)[samples % masks] < 1 - q])

        return probe.mask(target, 2 * len(samples), both)

    requested = [masked(target) for target in probe.targets]
    zero, distances = yield from probe.distances(requested, "squared" if authors else "hellinger")
    retained, removed = (torch.stack(distances) / zero[:, None]).chunk(2, -1)
    return torch.stack([(1 - retained).clamp(min=0), removed])


def _measure(case: Case) -> Steps[Measured]:
    """Soft-NS and Soft-NC of the attribution and of random scores; what makes them hard to compare."""
    probe, draws = Probe(case.query, case.att, case.profile), check_count("draws", case.draws)
    settings = (case.normalization, case.masks, case.seed, draws, case.profile)
    own = yield from soft_scores(case, probe, probe.scores[None])
    random: Tensor = yield from case.cached(
        "soft scores", probe, settings, lambda: soft_scores(case, probe, random_scores(probe, case.seed, draws))
    )
    shares = normalize(probe.scores, case.normalization or "sum")
    (ns, nc), (random_ns, random_nc) = own.mean((1, 2)).tolist(), random.mean((1, 2)).tolist()
    return {
        "soft_ns": ns,
        "soft_nc": nc,
        "random_soft_ns": random_ns,
        "random_soft_nc": random_nc,
        "draws": draws,
        "sum_not_positive": float((probe.scores.nansum(-1) <= 0).any()),
        "clipped": float(((shares < 0) | (shares > 1)).any()),
    }


def _log_ratio(statistic: Statistic, columns: tuple[str, ...], meaning: str) -> Summary:
    return Summary(statistic, columns, Scale(-math.inf, math.inf, 0.0, True, meaning), contrast=True)


_NUMBERS = ("soft_ns", "soft_nc", "random_soft_ns", "random_soft_nc")

SOFT = Metric(
    measure=_measure,
    summaries={
        **mean_of_columns(
            soft_ns=Scale(0, 1, None, True, "what the retained part gives back of the prediction"),
            soft_nc=Scale(0, math.inf, None, True, "how far the prediction goes without it, against the zero input"),
            sum_not_positive=Scale(0, 1, None, None, "share of prompts on which the scores' sum is not positive"),
            clipped=Scale(0, 1, None, None, "share of prompts on which a retaining probability was cut to 0 or 1"),
        ),
        "log_ratio_ns": _log_ratio(log_mean_ratio, _NUMBERS[::2], "Soft-NS against random's"),
        "log_ratio_nc": _log_ratio(log_mean_ratio, _NUMBERS[1::2], "Soft-NC against random's"),
        "faithfulness": _log_ratio(summed_log_ratios, _NUMBERS, "the paper's score: the sum of both log-ratios"),
    },
    reads=frozenset({"masks", "normalization", "draws"}),
)
