"""Scores of a prediction: plain functions from logits under changes to one number per sample.

Every function takes `(logits, clean, ids)`: the logits at a target's tokens under changes, [..., samples, tokens,
vocab], the log-probabilities there without one [tokens, vocab], and the ids of the target's tokens [tokens]. It returns
[..., samples]. `SCORES` has them by name; `score_of` adds a foil or a caller's own number. All can be differentiated.

Of a target with a foil, logits, log-probabilities and ids have the target's tokens first and then the foil's, each as
it is predicted after the tokens of its own before it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.errors import ParameterError
from noiser.types import Objective

Logits = Float[Tensor, "*samples tokens vocab"]
LogProbabilities = Float[Tensor, "tokens vocab"]
Ids = Int[Tensor, " tokens"]

Read = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits under changes, clean log-probabilities and target ids to numbers: [..., samples], or [..., any]."""

ScoreName = Literal["prob", "logprob", "logit", "hellinger", "squared"]

TINY = torch.finfo(torch.float32).tiny


def logprob(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Sum of the log-probabilities of the target's tokens, in nats."""
    logits = logits.float()
    right = logits.gather(-1, ids.expand(logits.shape[:-1])[..., None])[..., 0]
    return (right - logits.logsumexp(-1)).sum(-1)


def prob(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Geometric mean of the probabilities of the target's tokens: of a single token its probability."""
    return (logprob(logits, clean, ids) / len(ids)).exp()


def logit(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Log odds of the target, log P / (1 - P), with P the product of its tokens' probabilities."""
    logits = logits.float()
    right = at(logits, ids)
    wrong = logits.scatter(-1, ids.expand(logits.shape[:-1])[..., None], -torch.inf).logsumexp(-1)
    if len(ids) == 1:
        return (right - wrong)[..., 0]
    total = torch.logaddexp(right, wrong)
    right, wrong = right - total, wrong - total
    before = right.cumsum(-1) - right  # 1 - P: right before some token, and wrong at it
    return right.sum(-1) - (before + wrong).logsumexp(-1)


def hellinger(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Minus the Hellinger distance sqrt(½ Σ (√p - √q)²) to the clean distribution; of a span the root mean square.

    It is negative so that, like the other scores, it falls where the prediction gets worse.
    """
    return -(_squared_roots(logits, clean) / 2).mean(-1).clamp_min(1e-24).sqrt()


def squared(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Minus Σ (√p - √q)² / √2, the distance in the script published with the Noiser paper; of a span the mean."""
    return -_squared_roots(logits, clean).mean(-1) / 2**0.5


SCORES: dict[str, Read] = {
    each.__name__: each for each in (prob, logprob, logit, hellinger, squared)
}


def score_of(name: ScoreName, foil_tokens: int = 0, of: Objective | None = None) -> Read:
    """The score by name; of a target against a foil, or the caller's own number in its place.

    Args:
        name: one of `SCORES`.
        foil_tokens: how many tokens the foil has; 0 without one. With a foil "prob" is p(target) - p(foil), each the
            geometric mean over its tokens, and "logprob" and "logit" are log p(target) / p(foil), sums over tokens.
        of: a function of log-probabilities, which takes the place of the score.

    Raises:
        ParameterError: a distance has no foil.
    """
    if of is not None:
        return partial(_own, of)
    if not foil_tokens:
        return SCORES[name]
    if name in ("hellinger", "squared"):
        raise ParameterError(
            f"score={name!r} compares whole distributions and has no foil. Use another score."
        )
    return contrast(prob if name == "prob" else logprob, foil_tokens)


def contrast(value: Read, foil_tokens: int) -> Read:
    """The value of the target minus that of its foil, whose tokens are the last ones."""

    def read(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        own = len(ids) - foil_tokens
        target = value(logits[..., :own, :], clean[:own], ids[:own])
        return target - value(logits[..., own:, :], clean[own:], ids[own:])

    return read


def _own(of: Objective, logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
    log_p = logits.float().log_softmax(-1).flatten(0, -3)
    values: object = of(log_p, clean)
    if not isinstance(values, Tensor) or values.shape != log_p.shape[:1]:
        got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ParameterError(
            f"The function given as of= returned {got}; expected a tensor of shape [{len(log_p)}], a number for "
            f"each sample, from log-probabilities {list(log_p.shape)}: samples, tokens, vocabulary."
        )
    if log_p.isfinite().any(-1).all() and not values.isfinite().all():
        raise ParameterError(
            "The function given as of= returned NaN or an infinite number; expected finite ones."
        )
    return values.unflatten(0, logits.shape[:-2])


class Effect(NamedTuple):
    """The effect of a change in several samples on a target, read from the mean distribution P̄ over the samples.

    Attributes:
        score: what the score loses: its clean value minus that of P̄.
        stderr: standard error of the score over the samples, by the delta method; NaN for a single sample.
        flips: 1 if P̄ has another most probable token at any of the target's tokens; with a foil, if the other of the
            two is the more probable one, by the sums of the log-probabilities of their tokens.
        lead: log odds of the model's own token against its strongest rival (of target against foil), divided by their
            clean value: 1 for no change, negative after a flip. Of a span the smallest.
        probability, probability_stderr: P̄ of the target, of a span the geometric mean, and its standard error.
        foil_probability: P̄ of the foil, the geometric mean over its tokens; 0 without one.
        leader, leader_probability: id and probability of the most probable token of P̄, where the lead is smallest.
    """

    score: float
    stderr: float
    flips: float
    lead: float
    probability: float
    probability_stderr: float
    foil_probability: float
    leader: float
    leader_probability: float


def effect_of(score: Read, foil_tokens: int = 0) -> Read:
    """The function that reads an `Effect` [..., 9] of a change's samples together."""

    def read(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        own = len(ids) - foil_tokens
        samples = logits.float().softmax(-1)
        mean = samples.mean(-3).clamp_min(TINY)
        value, moves = _influences(score, samples, mean, clean, ids)
        p = at(mean, ids)
        probability = p[..., :own].log().mean(-1).exp()
        shares = at(samples, ids)[..., :own] / p[..., None, :own]
        probability_moves = probability[..., None] * shares.mean(-1)
        margins = leads(mean.log(), clean, ids, foil_tokens)
        clean_margins = leads(clean, clean, ids, foil_tokens)
        lead, least = (margins / torch.where(clean_margins == 0, torch.inf, clean_margins)).min(-1)
        if foil_tokens:
            flips = (clean_margins[0] > 0) != (margins[..., 0] > 0)
            of_foil = p[..., own:].log().mean(-1).exp()
        else:
            flips = (mean.argmax(-1) != clean.argmax(-1)).any(-1)
            of_foil = torch.zeros_like(value)
        leader_p, leader = (part.gather(-1, least[..., None])[..., 0] for part in mean.max(-1))
        errors, count = torch.stack([moves, probability_moves]), moves.shape[-1]
        errors = (
            errors.std(-1) / count**0.5 if count > 1 else torch.full_like(errors[..., 0], torch.nan)
        )
        loss = score(clean[None], clean, ids)[0] - value
        numbers = [loss, errors[0], flips, lead, probability, errors[1], of_foil, leader, leader_p]
        return torch.stack([number.float() for number in numbers], -1)

    return read


def leads(
    log_p: Float[Tensor, "*changes tokens vocab"],
    clean: LogProbabilities,
    ids: Ids,
    foil_tokens: int = 0,
) -> Float[Tensor, "*changes margins"]:
    """Log odds of the model's own token, the best of `clean`, against its strongest rival, at each token.

    With a foil one number: log p(target) / p(foil), sums over the tokens of both.
    """
    if foil_tokens:
        sides = at(log_p, ids)
        own = len(ids) - foil_tokens
        return sides[..., :own].sum(-1, keepdim=True) - sides[..., own:].sum(-1, keepdim=True)
    own = clean.argmax(-1)
    return at(log_p, own) - log_p.scatter(
        -1, own.expand(log_p.shape[:-1])[..., None], -torch.inf
    ).amax(-1)


def _influences(
    score: Read, samples: Tensor, mean: Tensor, clean: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The score of the mean distribution [...], and each sample's influence on it [..., samples]: the delta method."""
    if samples.shape[-3] == 1:
        return score(mean.log().unsqueeze(-3), clean, ids)[..., 0], torch.zeros_like(
            samples[..., 0, 0]
        )
    with torch.enable_grad():
        p = mean.detach().requires_grad_()
        value = score(p.log().unsqueeze(-3), clean, ids)[..., 0]
        if not value.requires_grad:
            return value, torch.full_like(samples[..., 0, 0], torch.nan)
        (slope,) = torch.autograd.grad(value.sum(), p)
    return value.detach(), torch.einsum("...stv,...tv->...s", samples, slope)


def at(values: Tensor, ids: Tensor) -> Tensor:
    """The values of some ids, one at each token: [..., tokens] of [..., tokens, vocab]."""
    return values.gather(-1, ids.expand(values.shape[:-1])[..., None])[..., 0]


def _squared_roots(logits: Tensor, clean: Tensor) -> Tensor:
    roots = (logits.float().log_softmax(-1) / 2).exp()
    return (roots - (clean / 2).exp()).square().sum(-1)
