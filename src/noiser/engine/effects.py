"""What a noisy input does to a prediction, read from the mean distribution over its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.engine.objectives import IdsOfRows, Logits, ObjectiveFn, ReadTogether, at

TINY = torch.finfo(torch.float32).tiny


class Effect(NamedTuple):
    """The effect of a change in several samples on a target, read from the mean distribution P̄
    over the samples.

    Attributes:
        score: what the objective loses: its clean value minus that of P̄.
        stderr: standard error of the score over the samples, by the delta method; NaN for a single
            sample.
        flips: 1 if P̄ has another most probable token at any of the target's tokens; with a foil,
            if the other of the two is the more probable one, by the sums of the log-probabilities
            of their tokens.
        margin: log odds of the model's own token against its strongest rival (of target against
            foil), divided by their clean value: 1 for no change, negative after a flip. For several
            tokens the smallest.
        probability, probability_stderr: P̄ of the target, for several tokens the geometric mean,
            and its standard error.
        foil_probability: P̄ of the foil, the geometric mean over its tokens; 0 without one.
        top_token, top_probability: id and probability of the most probable token of P̄, where the
            margin is smallest.
    """

    score: float
    stderr: float
    flips: float
    margin: float
    probability: float
    probability_stderr: float
    foil_probability: float
    top_token: float
    top_probability: float


def effect_of(objective: ObjectiveFn, foil_tokens: int = 0) -> ObjectiveFn:
    """The function that reads an `Effect` [..., 9] of a change's samples together."""
    if isinstance(objective, ReadTogether):
        return ReadTogether(_effect_together, (objective, foil_tokens), _before_a_change)

    def read(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        def value_of(log_p: Tensor) -> Tensor:
            return objective(log_p.unsqueeze(-3), clean, ids)[..., 0]

        before = _Before.of(value_of(clean), clean, ids, foil_tokens)
        ids_of_rows = ids.expand(logits.shape[:-1])
        return _effect(logits, ids_of_rows, before, value_of, foil_tokens)

    return read


def _effect_together(
    logits: Logits, ids: IdsOfRows, known: Tensor, objective: ReadTogether, foil_tokens: int
) -> Float[Tensor, "*changes 9"]:
    """The effects of changes of any prompts."""

    def value_of(log_p: Tensor) -> Tensor:
        return objective.of(log_p, ids[..., 0, :])

    before = _Before.unpacked(known, tokens=ids.shape[-1])
    return _effect(logits, ids, before, value_of, foil_tokens)


def _before_a_change(
    clean: Tensor, ids: Tensor, objective: ReadTogether, foil_tokens: int
) -> Float[Tensor, "prompts numbers"]:
    """What an effect has to know of each prompt."""
    return _Before.of(objective.of(clean, ids), clean, ids, foil_tokens).packed()


class _Before(NamedTuple):
    """What is predicted without a change: the objective's value, the best tokens, and how far they
    lead, see `log_odds_margins`.
    """

    value: Float[Tensor, "*prompts"]
    best: Int[Tensor, "*prompts tokens"]
    margins: Float[Tensor, "*prompts margins"]

    @classmethod
    def of(cls, value: Tensor, clean: Tensor, ids: Tensor, foil_tokens: int) -> _Before:
        """Of log-probabilities [..., tokens, vocab], and the objective's value of them."""
        best = clean.argmax(-1)
        return cls(value, best, log_odds_margins(clean, best, ids, foil_tokens))

    def packed(self) -> Float[Tensor, "*prompts numbers"]:
        """All of it in one tensor; ids are whole numbers far below what float32 holds."""
        return torch.cat([self.value[..., None], self.best.float(), self.margins], -1)

    @classmethod
    def unpacked(cls, numbers: Float[Tensor, "*prompts numbers"], tokens: int) -> _Before:
        """What `packed` made, of targets with so many tokens."""
        best = numbers[..., 1 : tokens + 1].long()
        return cls(numbers[..., 0], best, numbers[..., tokens + 1 :])


def _effect(
    logits: Float[Tensor, "*changes samples tokens vocab"],
    ids: Int[Tensor, "*changes samples tokens"],
    before: _Before,
    value_of: Callable[[Tensor], Tensor],
    foil_tokens: int,
) -> Float[Tensor, "*changes 9"]:
    """The numbers of an `Effect`; `value_of` has the objective of log-probabilities [..., tokens,
    vocab].
    """
    ids = ids[..., 0, :]
    target_tokens = ids.shape[-1] - foil_tokens
    samples = logits.float().softmax(-1)
    mean = samples.mean(-3).clamp_min(TINY)
    value, value_influences = _influences(value_of, samples, mean)

    # The geometric mean over tokens moves by its own value times the mean of p / p̄ over tokens.
    p = at(mean, ids)
    probability = p[..., :target_tokens].log().mean(-1).exp()
    of_samples = at(samples, ids[..., None, :].expand(samples.shape[:-1]))
    ratios = of_samples[..., :target_tokens] / p[..., None, :target_tokens]
    probability_influences = probability[..., None] * ratios.mean(-1)
    errors = _standard_errors(torch.stack([value_influences, probability_influences]))

    margins = log_odds_margins(mean.log(), before.best, ids, foil_tokens)
    # Where two tokens tie without a change, no change can be compared with their margin.
    comparable = torch.where(before.margins == 0, torch.inf, before.margins)
    margin, narrowest = (margins / comparable).min(-1)
    if foil_tokens:
        flips = (before.margins[..., 0] > 0) != (margins[..., 0] > 0)
        foil_probability = p[..., target_tokens:].log().mean(-1).exp()
    else:
        flips = (mean.argmax(-1) != before.best).any(-1)
        foil_probability = torch.zeros_like(value)

    best_p, best_token = mean.max(-1)
    top_token = best_token.gather(-1, narrowest[..., None])[..., 0]
    top_probability = best_p.gather(-1, narrowest[..., None])[..., 0]
    numbers = {
        "score": before.value - value,
        "stderr": errors[0],
        "flips": flips,
        "margin": margin,
        "probability": probability,
        "probability_stderr": errors[1],
        "foil_probability": foil_probability,
        "top_token": top_token,
        "top_probability": top_probability,
    }
    return torch.stack([numbers[name].float() for name in Effect._fields], -1)


def _standard_errors(influences: Float[Tensor, "*rows samples"]) -> Float[Tensor, "*rows"]:
    """Standard errors of means over samples; NaN for a single sample."""
    samples = influences.shape[-1]
    if samples == 1:
        return torch.full_like(influences[..., 0], torch.nan)
    return influences.std(-1) / samples**0.5


class Prediction(NamedTuple):
    """What a model predicts for a target under a change, read from the mean distribution.

    Attributes:
        probability: the target's; of several tokens the geometric mean.
        top_token: id of the most probable token at the first of the target's tokens that is not the
            most probable one itself; -1 where all of them are.
        top_probability: its probability; the target's where that is -1.
    """

    probability: float
    top_token: float
    top_probability: float


def beside_prediction(read: ObjectiveFn, foil_tokens: int = 0) -> ObjectiveFn:
    """The function that reads numbers [..., numbers], then a `Prediction` [..., numbers + 3]."""
    if isinstance(read, ReadTogether):
        return ReadTogether(_beside_prediction, (read, foil_tokens))

    def read_both(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        numbers = read(logits, clean, ids)
        return _with_prediction(numbers, logits, ids.expand(logits.shape[:-1]), foil_tokens)

    return read_both


def _beside_prediction(
    logits: Logits, ids: IdsOfRows, read: ReadTogether, foil_tokens: int
) -> Float[Tensor, "*changes numbers"]:
    """The numbers of changes of any prompts, then a `Prediction`."""
    return _with_prediction(read.of(logits, ids), logits, ids, foil_tokens)


def _with_prediction(
    numbers: Float[Tensor, "*changes _"],
    logits: Float[Tensor, "*changes samples tokens vocab"],
    ids: Int[Tensor, "*changes samples tokens"],
    foil_tokens: int,
) -> Float[Tensor, "*changes _"]:
    """Numbers, and after them a `Prediction` of the target's tokens without its foil's."""
    target_tokens = ids.shape[-1] - foil_tokens
    logits = logits[..., :target_tokens, :].float()
    ids = ids[..., 0, :target_tokens]
    if logits.shape[-3] > 1:  # the mean distribution, up to a factor
        logits = logits.log_softmax(-1).logsumexp(-3, keepdim=True)
    logits = logits[..., 0, :, :]
    total = logits.logsumexp(-1)
    best, best_tokens = logits.max(-1)
    probability = (at(logits, ids) - total).mean(-1).exp()
    differs = best_tokens != ids
    first = differs.int().argmax(-1, keepdim=True)
    top_probability = (best - total).exp().gather(-1, first)[..., 0]
    top_token = best_tokens.gather(-1, first)[..., 0]
    is_led = differs.any(-1)
    prediction = torch.stack(
        [
            probability,
            torch.where(is_led, top_token, -1).to(probability),
            torch.where(is_led, top_probability, probability),
        ],
        -1,
    )
    return torch.cat([numbers, prediction.to(numbers)], -1)


def log_odds_margins(
    log_p: Float[Tensor, "*changes tokens vocab"],
    best: Int[Tensor, "*#changes tokens"],
    ids: Int[Tensor, "*#changes tokens"],
    foil_tokens: int = 0,
) -> Float[Tensor, "*changes margins"]:
    """Log odds of the model's own token, `best` without a change, against its strongest rival, at
    each token.

    With a foil one number: log p(target) / p(foil), sums over the tokens of both.
    """
    if foil_tokens:
        both = at(log_p, ids)
        target_tokens = ids.shape[-1] - foil_tokens
        of_target = both[..., :target_tokens].sum(-1, keepdim=True)
        of_foil = both[..., target_tokens:].sum(-1, keepdim=True)
        return of_target - of_foil
    without_best = log_p.scatter(-1, best.expand(log_p.shape[:-1])[..., None], -torch.inf)
    return at(log_p, best) - without_best.amax(-1)


def _influences(
    value_of: Callable[[Tensor], Tensor],
    samples: Float[Tensor, "*changes samples tokens vocab"],
    mean: Float[Tensor, "*changes tokens vocab"],
) -> tuple[Float[Tensor, "*changes"], Float[Tensor, "*changes samples"]]:
    """The objective of the mean distribution, and each sample's influence on it.

    The delta method: an influence is the slope of the objective at the mean, times the sample.
    """
    no_influence = samples.new_zeros(samples.shape[:-2])
    if samples.shape[-3] == 1:
        return value_of(mean.log()), no_influence
    with torch.enable_grad():
        p = mean.detach().requires_grad_()
        value = value_of(p.log())
        if not value.requires_grad:
            return value, torch.full_like(no_influence, torch.nan)
        (slope,) = torch.autograd.grad(value.sum(), p)
    return value.detach(), torch.einsum("...stv,...tv->...s", samples, slope)
