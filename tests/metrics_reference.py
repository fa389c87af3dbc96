"""The metrics, slow and obvious: whole sequences one by one, loops over dimensions, straight from the definitions."""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def distribution(lm, ids, row, keep=None):
    """Next-token distribution at `row`; `keep` maps positions to a factor for each dimension of the embedding."""
    embeddings = lm.model.get_input_embeddings()(ids)[None].clone()
    for position, factors in (keep or {}).items():
        embeddings[0, position] *= factors
    training = lm.model.training
    lm.model.eval()
    logits = lm.model(inputs_embeds=embeddings, use_cache=False).logits[0, row]
    lm.model.train(training)
    return logits.float().softmax(-1)


def hellinger(p, q):
    return math.sqrt(0.5 * sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p.tolist(), q.tolist(), strict=True)))


def squared(p, q):
    """As the published script: no root, and divided by the root of two."""
    return sum((math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p.tolist(), q.tolist(), strict=True)) / math.sqrt(2)


def soft(lm, ids, row, positions, kept, removed, distance=hellinger):
    """Soft-NS and Soft-NC for one target.

    Args:
        positions: all token positions that masks act on.
        kept, removed: for each mask sample, position -> 0/1 factors of the retaining and the removing mask.
    """
    clean = distribution(lm, ids, row)
    zero = distance(clean, distribution(lm, ids, row, dict.fromkeys(positions, 0.0)))
    ns = [max(0.0, zero - distance(clean, distribution(lm, ids, row, keep))) / zero for keep in kept]
    nc = [distance(clean, distribution(lm, ids, row, keep)) / zero for keep in removed]
    return ns, nc


def keep_rates(scores, rate):
    """c by bisection: the mean of min(1, c max(s, 0)) grows with c."""
    s = [max(x, 0.0) for x in scores]
    n, positive = len(s), sum(x > 0 for x in s)
    if positive <= rate * n:
        return [1.0 if x > 0 else (rate * n - positive) / (n - positive) for x in s]
    low, high = 0.0, 1.0 / min(x for x in s if x > 0)
    for _ in range(200):
        c = (low + high) / 2
        low, high = (c, high) if sum(min(1.0, c * x) for x in s) / n < rate else (low, c)
    return [min(1.0, high * x) for x in s]
