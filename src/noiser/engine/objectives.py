"""Objectives: numbers of a prediction that methods explain, by name.

Every objective is a plain function of `(logits, clean, ids)`: the logits at a target's tokens under
changes [..., samples, tokens, vocab], the log-probabilities there without one [tokens, vocab], and
the ids of the target's tokens [tokens]. It returns [..., samples]. `OBJECTIVES` has them by name,
and says what each can do; `objective_of` adds a foil or a caller's own number. A
`ReadTogether` is one that a pass reads once for all of its prompts.

For a target with a foil, logits, log-probabilities and ids have the target's tokens first and then
the foil's, each as it is predicted after the tokens of its own before it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.errors import ParameterError
from noiser.registry import Registry
from noiser.types import Objective

Logits = Float[Tensor, "*samples tokens vocab"]
LogProbabilities = Float[Tensor, "tokens vocab"]
Ids = Int[Tensor, " tokens"]
IdsOfRows = Int[Tensor, "*samples tokens"]

ObjectiveFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits under changes, clean log-probabilities and target ids to numbers: [..., samples], or
[..., any].
"""


@dataclass(frozen=True)
class ReadTogether:
    """An objective that a pass reads once for all of its prompts.

    Attributes:
        function: from logits [..., samples, tokens, vocab] and the id of each of their rows [...,
            samples, tokens] to numbers [..., samples], or [..., any].
        options: further arguments of the function.
        known: for a function that looks at predictions without a change: what it has to know of
            them [prompts, numbers], from the log-probabilities [prompts, tokens, vocab], the ids
            [prompts, tokens] and the options. The function gets it after the ids, [..., numbers].

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])  # one token in two prompts
        >>> logprob.of(logits, torch.tensor([[0], [1]])).tolist()  # its id is 0, then 1
        [-0.126928..., -0.126928...]
    """

    function: Callable[..., Tensor]
    options: tuple[Any, ...] = ()
    known: Callable[..., Tensor] | None = None

    def of(self, logits: Logits, ids: IdsOfRows, known: Tensor | None = None) -> Tensor:
        """The numbers of targets of any prompts."""
        if known is None:
            return self.function(logits, ids, *self.options)
        return self.function(logits, ids, known, *self.options)

    def __call__(self, logits: Logits, clean: LogProbabilities, ids: Ids) -> Tensor:
        """The numbers of one prompt's target."""
        known = None
        if self.known is not None:
            known = self.known(clean[None], ids[None], *self.options)[0]
        return self.of(logits, ids.expand(logits.shape[:-1]), known)


@dataclass(frozen=True, kw_only=True)
class ObjectiveEntry:
    """An objective, and what it can do.

    Attributes:
        value: the number itself. It falls where the prediction gets worse.
        contrast: the number whose difference, target minus foil, is explained where there is a
            foil; None where there is no such number, and a foil is refused.
        differentiable: whether gradient methods take it.
        unit: what displays say of a difference: "nats", "probability" or "distance", or a word of
            your own.

    Example:
        >>> OBJECTIVES.get("logit").factory().unit
        'nats'
    """

    value: ObjectiveFn
    contrast: ObjectiveFn | None = None
    differentiable: bool = False
    unit: Literal["nats", "probability", "distance"] | str = ""


OBJECTIVES: Registry[ObjectiveEntry] = Registry("objective", "noiser.objectives")
"""Every objective by name; packages add theirs through the entry point `noiser.objectives`."""


def _log_probability(logits: Logits, ids: IdsOfRows) -> Float[Tensor, "*samples"]:
    """Sum of the log-probabilities of the target's tokens, in nats."""
    logits = logits.float()
    return (at(logits, ids) - logits.logsumexp(-1)).sum(-1)


def _probability(logits: Logits, ids: IdsOfRows) -> Float[Tensor, "*samples"]:
    """Geometric mean of the probabilities of the target's tokens; for a single token its
    probability.
    """
    return (_log_probability(logits, ids) / ids.shape[-1]).exp()


def _log_odds(logits: Logits, ids: IdsOfRows) -> Float[Tensor, "*samples"]:
    """Log odds of the target, log P / (1 - P), with P the product of its tokens' probabilities."""
    logits = logits.float()
    right = at(logits, ids)
    wrong = logits.scatter(-1, ids[..., None], -torch.inf).logsumexp(-1)
    if ids.shape[-1] == 1:
        return (right - wrong)[..., 0]
    total = torch.logaddexp(right, wrong)
    log_right = right - total
    log_wrong = wrong - total
    # 1 - P = Σ_t P(tokens before t are right) P(token t is wrong), all in logarithms.
    log_right_before = log_right.cumsum(-1) - log_right
    return log_right.sum(-1) - (log_right_before + log_wrong).logsumexp(-1)


def _least_lead(logits: Logits, ids: IdsOfRows) -> Float[Tensor, "*samples"]:
    """The least log odds of the target's tokens against their strongest rivals, in nats.

    As long as it is above 0, the target is what the model says, token by token.
    """
    logits = logits.float()
    rivals = logits.scatter(-1, ids[..., None], -torch.inf).amax(-1)
    return (at(logits, ids) - rivals).amin(-1)


def hellinger(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Minus the Hellinger distance sqrt(½ Σ (√p - √q)²) to the clean distribution.

    For several tokens: minus the root mean square. It is negative so that, like the other
    objectives, it falls where the prediction gets worse.
    """
    return -(_squared_roots(logits, clean) / 2).mean(-1).clamp_min(1e-24).sqrt()


def squared(logits: Logits, clean: LogProbabilities, ids: Ids) -> Float[Tensor, "*samples"]:
    """Minus Σ (√p - √q)² / √2, the distance in the script published with the Noiser paper.

    For several tokens: minus the mean.
    """
    return -_squared_roots(logits, clean).mean(-1) / 2**0.5


def _squared_roots(logits: Tensor, clean: Tensor) -> Tensor:
    """Σ (√p - √q)² at each token."""
    # Both are normalised in the same way, so that equal distributions have exactly 0.
    roots = (logits.float().log_softmax(-1) / 2).exp()
    clean_roots = (clean.log_softmax(-1) / 2).exp()
    return (roots - clean_roots).square().sum(-1)


def at(values: Tensor, ids: Tensor) -> Tensor:
    """The values of some ids, one at each token: [..., tokens] of [..., tokens, vocab]."""
    return values.gather(-1, ids.expand(values.shape[:-1])[..., None])[..., 0]


logprob = ReadTogether(_log_probability)
prob = ReadTogether(_probability)
logit = ReadTogether(_log_odds)
lead = ReadTogether(_least_lead)


OBJECTIVES.register(
    "prob",
    partial(ObjectiveEntry, value=prob, contrast=prob, differentiable=True, unit="probability"),
    summary="p(target); over several tokens the geometric mean",
)
OBJECTIVES.register(
    "logprob",
    partial(ObjectiveEntry, value=logprob, contrast=logprob, differentiable=True, unit="nats"),
    summary="log p(target), in nats",
)
# Log odds of a target against its foil are log p(target) / p(foil).
OBJECTIVES.register(
    "logit",
    partial(ObjectiveEntry, value=logit, contrast=logprob, unit="nats"),
    summary="log odds of the target, in nats",
)
# The lead over a foil is log p(target) / p(foil).
OBJECTIVES.register(
    "lead",
    partial(ObjectiveEntry, value=lead, contrast=logprob, unit="nats"),
    summary="how far the target leads, in nats: above 0, the model says it",
)
OBJECTIVES.register(
    "hellinger",
    partial(ObjectiveEntry, value=hellinger, unit="distance"),
    summary="minus the Hellinger distance to the distribution without a change",
)
OBJECTIVES.register(
    "squared",
    partial(ObjectiveEntry, value=squared, unit="distance"),
    summary="minus the distance in the script of the paper's authors",
)


def objective_of(name: str, foil_tokens: int = 0, of: Objective | None = None) -> ObjectiveFn:
    """The objective by name; for a target against a foil, or the caller's own number in its place.

    Args:
        name: one of `OBJECTIVES`.
        foil_tokens: how many tokens the foil has; 0 without one. With a foil "prob" is p(target) -
            p(foil), each the geometric mean over its tokens, and "logprob" and "logit" are log
            p(target) / p(foil), sums over tokens.
        of: a function of log-probabilities, which takes the place of the objective.

    Raises:
        UnknownNameError: no such objective. ParameterError: the objective has no contrast, and
            there is a foil.
    """
    if of is not None:
        return partial(_own_number, of)
    entry = OBJECTIVES.get(name).factory()
    if not foil_tokens:
        return entry.value
    if entry.contrast is None:
        with_contrast = [
            each for each in OBJECTIVES.names() if OBJECTIVES.get(each).factory().contrast
        ]
        raise ParameterError(
            f"The objective {name!r} has no foil: it is no difference between a target and "
            f"another token. Use "
            f"one of {', '.join(with_contrast)}."
        )
    return contrast(entry.contrast, foil_tokens)


def contrast(value: ObjectiveFn, foil_tokens: int) -> ObjectiveFn:
    """The value of the target minus that of its foil, whose tokens are the last ones."""
    if isinstance(value, ReadTogether):
        return ReadTogether(_difference, (value, foil_tokens))

    def read(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        own = len(ids) - foil_tokens
        of_target = value(logits[..., :own, :], clean[:own], ids[:own])
        of_foil = value(logits[..., own:, :], clean[own:], ids[own:])
        return of_target - of_foil

    return read


def _difference(logits: Logits, ids: IdsOfRows, value: ReadTogether, foil_tokens: int) -> Tensor:
    """The value of the target minus that of its foil, from the logits alone."""
    own = ids.shape[-1] - foil_tokens
    of_target = value.of(logits[..., :own, :], ids[..., :own])
    return of_target - value.of(logits[..., own:, :], ids[..., own:])


def _own_number(of: Objective, logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
    """The caller's number, checked."""
    log_p = logits.float().log_softmax(-1).flatten(0, -3)
    values: object = of(log_p, clean)
    if not isinstance(values, Tensor) or values.shape != log_p.shape[:1]:
        got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ParameterError(
            f"The function given as of= returned {got}; expected a tensor of shape "
            f"[{len(log_p)}], a number for "
            f"each sample, from log-probabilities {list(log_p.shape)}: samples, tokens, vocabulary."
        )
    if log_p.isfinite().any(-1).all() and not values.isfinite().all():
        raise ParameterError(
            "The function given as of= returned NaN or an infinite number; expected finite ones."
        )
    return torch.unflatten(values, 0, logits.shape[:-2])
