"""Soft sufficiency and soft comprehensiveness (Zhao and Aletras 2023; for generation, Zhao and Shan 2024).

A unit's share s is its normalised score, clipped to [0, 1]. Every dimension of its embeddings is kept with probability
s (retain) or 1 - s (remove). With D the distance to the clean next-token distribution, Soft-NS = max(0, D(zero) -
D(retained)) / D(zero) and Soft-NC = D(removed) / D(zero) (paper, appendix "Soft-NC and Soft-NS Metrics"). Special
tokens and template text are never masked, not in the zero input either. Masks depend on text and seed alone.

With a foil the question is about the contrast: D is the distance between distributions over two outcomes, target and
foil, with p(target) / (p(target) + p(foil)) for the first. What both gain or lose together does not count.

The authors' profile is that of the published script: special tokens that the attribution scores are masked, too, there
is one mask, and the distance is squared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.attribution.scores import normalize
from noiser.engine import Ask, Change, Steps, keep, score_of
from noiser.errors import NumericalError
from noiser.metrics.bootstrap import Statistic, log_mean_ratio, summed_log_ratios
from noiser.metrics.case import Case
from noiser.metrics.metric import Measured, Metric, Scale, Summary, mean_of_columns

NO_DISTANCE = 1e-11
"""Distances below are 0: the Hellinger distance of equal distributions is 1e-12, see `noiser.engine.scores`."""


def soft_masks(
    case: Case, target: int, q: Float[Tensor, "draws units"], masks: int, kept: str, removed: str | None = None
) -> Change:
    """The change that keeps dimensions of a target's units with probability q, and after it the one that removes them.

    Sample i has draw i of q and mask i, each from the start again after its last. `kept` and `removed` name the random
    numbers of both; without numbers of its own, what removes is the complement of what keeps.
    """
    positions, units = _tokens(case, target)
    samples = torch.arange(max(masks, len(q)))
    q = q[samples % len(q)][:, units, None]
    shape = (masks, len(positions), case.query.embedding_dim)

    def both() -> Tensor:
        retained = case.uniforms(kept, target, *shape)[samples % masks] < q
        left = case.uniforms(removed, target, *shape)[samples % masks] < 1 - q if removed else ~retained
        return torch.cat([retained, left])

    return keep(positions, both, 2 * len(samples), [target])


def _tokens(case: Case, target: int) -> tuple[list[int], list[int]]:
    """The token positions that a target's masks act on, ascending, and the unit of each."""
    pairs = sorted((place, unit) for unit in case.units[target] for place in case.att.units[unit].token_indices)
    return [place for place, _ in pairs], [unit for _, unit in pairs]


def soft_ns_nc(
    case: Case, changes: Sequence[Change], squared: bool = False
) -> Steps[list[Float64[Tensor, "2 samples"]]]:
    """Soft-NS and Soft-NC of each change that `soft_masks` makes, by the Hellinger distance or the squared one.

    With a foil, distances are between distributions over two outcomes, target and foil.

    Raises:
        NumericalError: the zero input changes nothing, so that nothing can be divided by its distance.
    """
    zeros = [keep(_tokens(case, g)[0], lambda: torch.zeros(1, 1, 1), 1, [g]) for g in range(len(case.units))]
    distance, foil = score_of("squared" if squared else "hellinger"), case.query.foil_id

    def contrast(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        assert foil is not None
        outcomes = [int(ids[0]), foil]
        return distance(logits[..., outcomes], clean[..., outcomes].log_softmax(-1), ids)

    scores: list[Tensor] = yield Ask(case.query, [*zeros, *changes], distance if foil is None else contrast)
    zero = [-float(values[0, 0]) for values in scores[: len(zeros)]]
    for target in (g for g, distance in enumerate(zero) if distance < NO_DISTANCE):
        raise NumericalError(
            f"Without any unit the model predicts exactly what it predicts with them (target {target}, "
            f"{case.att.targets[target].text!r}); expected a difference, which faithfulness is measured against. "
            "Leave this prompt out."
        )
    found: list[Tensor] = []
    for change, values in zip(changes, scores[len(zeros) :], strict=True):
        assert change.targets is not None
        retained, removed = (-values[0] / zero[change.targets[0]]).chunk(2)
        found.append(torch.stack([(1 - retained).clamp(min=0), removed]))
    return found


def soft_scores(
    case: Case, scores: Float[Tensor, "draws targets units"]
) -> Steps[Float64[Tensor, "2 targets samples"]]:
    """Soft-NS and Soft-NC of several scores, one per mask sample."""
    authors = case.profile == "authors"
    masks, shares = case.masks or (1 if authors else 10), normalize(scores, case.normalization or "sum").clamp(0, 1)
    changes = [soft_masks(case, g, shares[:, g], masks, "retain", "remove") for g in range(len(case.units))]
    return torch.stack((yield from soft_ns_nc(case, changes, authors)), 1)


def _measure(case: Case) -> Steps[Measured]:
    """Soft-NS and Soft-NC of the attribution and of random scores; what makes them hard to compare."""
    case = replace(case, special=True) if case.profile == "authors" else case

    def means(scores: Float[Tensor, "draws targets units"]) -> Steps[dict[str, float]]:
        return dict(zip(_NUMBERS, (yield from soft_scores(case, scores)).mean((1, 2)).tolist(), strict=False))

    numbers = yield from case.compared("soft scores", (case.normalization, case.masks, case.profile), means)
    shares = normalize(case.scores, case.normalization or "sum")
    return {
        **numbers,
        "sum_not_positive": float((case.scores.nansum(-1) <= 0).any()),
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
    primary="faithfulness",
    reads=frozenset({"masks", "normalization", "draws"}),
)
