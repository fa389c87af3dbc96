"""Scores without information, which a method's numbers are compared with."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.metrics.subject import Subject, uniforms

__all__ = ["permuted_scores", "random_scores", "ranks"]


def random_scores(subject: Subject, seed: int = 0) -> Float[Tensor, "targets units"]:
    """The softmax of U(0, 1) numbers over the units of each target: the paper's random reference, from the text."""
    scores = subject.scores.clone()
    for target, row in enumerate(scores):
        valid = ~row.isnan()
        row[valid] = uniforms(subject.key(seed, "random scores", target), int(valid.sum())).softmax(0)
    return scores


def permuted_scores(subject: Subject, seed: int = 0) -> Float[Tensor, "targets units"]:
    """The attribution's own scores, shuffled among the units of each target: same sizes, no meaning."""
    scores = subject.scores.clone()
    for target, row in enumerate(scores):
        valid = ~row.isnan()
        order = uniforms(subject.key(seed, "permutation", target), int(valid.sum())).argsort()
        row[valid] = row[valid][order]
    return scores


def ranks(scores: Float[Tensor, "targets units"]) -> Float[Tensor, "targets units"]:
    """Ranks 1 to n in place of scores, 1 for the lowest; equal scores share the mean of their ranks.

    >>> import torch
    >>> ranks(torch.tensor([[0.3, -2.0, 0.3, float("nan"), 9.0]]))
    tensor([[2.5000, 1.0000, 2.5000,    nan, 4.0000]])
    """
    below = (scores[:, None, :] < scores[:, :, None]).sum(-1)
    equal = (scores[:, None, :] == scores[:, :, None]).sum(-1)
    return (below + (equal + 1) / 2).masked_fill(scores.isnan(), torch.nan)
