"""Numbers of your own to explain: functions from log-probabilities at a target's tokens to one
number per sample.

    att = noiser.attribute(lm, prompt, of=noiser.objectives.entropy)

An objective is any function of two tensors: log-probabilities under a change, [samples, tokens,
vocab], and without one, [tokens, vocab], both natural logarithms in float32. It returns [samples].
Written with torch's functions it serves gradient methods and standard errors too.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from noiser.types import Objective as Objective

__all__ = ["Objective", "divergence", "entropy", "name_of"]


def entropy(
    log_p: Float[Tensor, "samples tokens vocab"],
    clean: Float[Tensor, "tokens vocab"],  # noqa: ARG001
) -> Float[Tensor, " samples"]:
    """Entropy of the prediction in nats, -Σ p log p, mean over tokens. A negative score: the unit
    makes it surer.

    >>> import torch
    >>> fair = torch.tensor([[0.5, 0.5]]).log()
    >>> round(entropy(fair[None], fair).item(), 4)
    0.6931
    """
    return -(log_p.exp() * log_p).sum(-1).mean(-1)


def divergence(
    log_p: Float[Tensor, "samples tokens vocab"], clean: Float[Tensor, "tokens vocab"]
) -> Float[Tensor, " samples"]:
    """Minus the divergence from the clean prediction in nats, -KL(clean ‖ changed), sum over
    tokens.

    It is 0 without a change, and the score of a unit is the divergence itself: with the context as
    one unit, how much the answer depends on it.

    >>> import torch
    >>> changed, clean = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[0.8, 0.2]]).log()
    >>> round(divergence(changed, clean).item(), 4)
    -0.1927
    """
    return -(clean.exp() * (clean - log_p)).sum((-1, -2))


def name_of(objective: Objective) -> str:
    """The name of a function in a result, or the `repr` of an object."""
    return getattr(objective, "__name__", None) or repr(objective)
