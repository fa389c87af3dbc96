"""Numbers of your own to explain: functions from log-probabilities at a target's tokens to one number per sample.

    att = noiser.attribute(lm, prompt, of=noiser.objectives.entropy)

An objective is any function of two tensors: what the model says under a change, [samples, tokens, vocab], and what it
says without one, [tokens, vocab], both natural logarithms of probabilities in float32. It returns [samples]. Written
with torch's functions it serves gradient methods and standard errors too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from noiser.errors import ParameterError

__all__ = ["ChoiceLogOdds", "ClassLogProbability", "Objective", "divergence", "entropy", "name_of"]

Objective = Callable[[Float[Tensor, "samples tokens vocab"], Float[Tensor, "tokens vocab"]], Float[Tensor, " samples"]]
"""From log-probabilities under a change, and without one, to a number per sample."""


def entropy(
    log_p: Float[Tensor, "samples tokens vocab"],
    clean: Float[Tensor, "tokens vocab"],  # noqa: ARG001
) -> Float[Tensor, " samples"]:
    """How unsure the model is, in nats: -Σ p log p, mean over tokens. A negative score: the unit makes it surer.

    >>> import torch
    >>> round(entropy(torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[0.5, 0.5]]).log()).item(), 4)
    0.6931
    """
    return -(log_p.exp() * log_p).sum(-1).mean(-1)


def divergence(
    log_p: Float[Tensor, "samples tokens vocab"], clean: Float[Tensor, "tokens vocab"]
) -> Float[Tensor, " samples"]:
    """How far the answer is from the clean one, whatever that is, in nats: -KL(clean ‖ changed), sum over tokens.

    It is 0 without a change, and the score of a unit is the divergence itself: with the context as one unit, how much
    the answer depends on it.

    >>> import torch
    >>> changed, clean = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[0.8, 0.2]]).log()
    >>> round(divergence(changed, clean).item(), 4)
    -0.1927
    """
    return -(clean.exp() * (clean - log_p)).sum((-1, -2))


@dataclass(frozen=True)
class ClassLogProbability:
    """log Σ p(t) over some tokens t, at the target's first token: how probable is any of them?

    Args:
        tokens: their ids, such as those of "yes", "Yes" and " yes".
    """

    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", _checked("tokens", self.tokens))

    def __call__(
        self,
        log_p: Float[Tensor, "samples tokens vocab"],
        clean: Float[Tensor, "tokens vocab"],  # noqa: ARG002
    ) -> Float[Tensor, " samples"]:
        """See the class."""
        if (largest := max(self.tokens)) >= (size := log_p.shape[-1]):
            raise ParameterError(f"tokens has the id {largest}; expected ids below {size}, the model's vocabulary.")
        return log_p[:, 0, list(self.tokens)].logsumexp(-1)


@dataclass(frozen=True)
class ChoiceLogOdds:
    """log p(choice) - log Σ p(other), at the target's first token: one answer of a multiple choice against the others.

    Args:
        choice: ids of the tokens that stand for it, such as those of "A" and " A".
        others: ids of the tokens that stand for the other answers.
    """

    choice: tuple[int, ...]
    others: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("choice", "others"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))
        if shared := sorted({*self.choice} & {*self.others}):
            raise ParameterError(f"The tokens {shared} are in choice and in others; expected each in one of them.")

    def __call__(
        self, log_p: Float[Tensor, "samples tokens vocab"], clean: Float[Tensor, "tokens vocab"]
    ) -> Float[Tensor, " samples"]:
        """See the class."""
        choice, others = (ClassLogProbability(tokens)(log_p, clean) for tokens in (self.choice, self.others))
        return choice - others


def name_of(objective: Objective) -> str:
    """How a result names it: a function by its name, an object by its `repr`."""
    return getattr(objective, "__name__", None) or repr(objective)


def _checked(name: str, tokens: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(tokens))  # each counts once
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ParameterError(f"{name} is {tokens!r}; expected ids of tokens, at least one.")
    return ids
