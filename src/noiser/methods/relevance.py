"""Relevance passed back layer by layer with other derivatives: DeepLIFT and AttnLRP."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query, Relevance, remover
from noiser.engine.backward_rules import Activation, derivative, to_float64
from noiser.engine.objectives import ObjectiveFn, at, contrast, objective_of
from noiser.methods.gradients import movable_groups
from noiser.methods.protocol import DifferentiableObjective, InnerMethod, Scores, sum_over_units
from noiser.tensors import floats
from noiser.types import Baseline

Softmax = Literal["taylor", "constant"]

ATTENTION: dict[Softmax, tuple[float, float]] = {"taylor": (4, 2), "constant": (math.inf, 1)}
"""What the gradients of queries and keys, and of values, are divided by.

Taylor: half goes to the values, and the other half to the weights, shared by queries and keys."""


@dataclass(frozen=True, kw_only=True)
class DeepLift(InnerMethod):
    """Contribution of each token to the difference between two predictions.

    They are the predictions of the input and of a baseline input.

    The baseline input b runs first, then x. At every activation function f (a module of torch or
    transformers: SiLU, GELU, tanh, ReLU, ...) the way back multiplies by Δf/Δx instead of f'(x),
    the rescale rule (Shrikumar et al. 2017, section 3.5.1); products, attention, normalisation and
    the final softmax pass their gradients at x. A token's contribution is Σ_d (x_d - b_d) m_d, with
    m the multipliers that arrive at its row of the embedding table; a unit's is the sum over its
    tokens. What the contributions leave of F(x) - F(b), nothing in a network of affine layers and
    elementwise nonlinearities, is in `info["delta"]`, one number per target.

    Args:
        baseline, objective: as for `IntegratedGradients`.
    """

    baseline: Baseline = "zero"
    objective: DifferentiableObjective = "prob"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        read = query.objective(self.objective)
        difference = torch.zeros(len(query.targets))
        contributions = torch.zeros(
            len(difference), len(query.encoding.token_ids), dtype=torch.float64
        )
        remove = remover(query, self.baseline).perturbation
        for positions, targets in movable_groups(query):
            perturbation = remove(positions, targets)
            values, of_targets = await Relevance(query, read, rescale, perturbation)
            difference[list(targets)] = values[:, 0] - values[:, 1]
            contributions[list(targets)] = of_targets
        delta = difference - contributions.sum(-1)
        return Scores(
            scores=sum_over_units(query, contributions),
            info={"delta": floats(delta), "difference": floats(difference)},
        )


@dataclass(frozen=True, kw_only=True)
class AttnLrp(InnerMethod):
    """Relevance of each token for the target's logit, by rules for attention too.

    See Achtibat et al. 2024, section 3.

    In the form input × gradient, the gradient being that of a network with other derivatives: an
    elementwise nonlinearity passes relevance unchanged, (f(x) - f(0))/x; a product of two
    activations (gates, queries with keys, attention with values) halves it between them; the factor
    of a normalisation is a constant; the softmax of attention is linearised where it stands. A
    token's relevance is Σ_d x_d g_d, a unit's the sum over its tokens.

    Biases, position embeddings and the softmax take or add some relevance, other layers conserve
    it: `info` holds, one number per target, the logit ("explained"), the sum over all tokens
    ("relevance"; of frozen ones: "frozen") and their ratio ("conservation"). State-space models
    have no rules. Its inventors describe the method as patented, and free for personal and
    scientific use.

    Args:
        softmax: "taylor", the paper's rule; "constant", attention weights are constants, as in
            CP-LRP (Ali et al. 2022): the values then get all the relevance, and without biases the
            sum is exactly the logit.
    """

    softmax: Softmax = "taylor"

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        values, relevance = await Relevance(
            query, _logit(query), identity, attention=ATTENTION[self.softmax]
        )
        logits = floats(values[:, 0])
        totals = floats(relevance.sum(-1))
        of_frozen = relevance[:, list(query.encoding.frozen)]
        conservation: list[float] = []
        for total, logit in zip(totals, logits, strict=True):
            conservation.append(total / logit if logit else math.nan)
        return Scores(
            scores=sum_over_units(query, relevance),
            info={
                "explained": logits,
                "relevance": totals,
                "frozen": floats(of_frozen.sum(-1)),
                "conservation": conservation,
            },
        )


def rescale(
    f: Activation, x: Float[Tensor, "*shape"], reference: Tensor | None
) -> Float[Tensor, "*shape"]:
    """(f(x) - f(b)) / (x - b) for an input x and the reference b; f'(x) where they are too near."""
    x = to_float64(x)
    # A mixture of experts may send other tokens to an expert, so that shapes differ.
    if reference is None or reference.shape != x.shape:
        return derivative(f, x)
    b = to_float64(reference)
    size = x.abs().clamp_min(1)
    near = (x - b).abs() <= _smallest_step(x) * size
    return _slope(f, x, b, near)


def identity(
    f: Activation, x: Float[Tensor, "*shape"], _: Tensor | None
) -> Float[Tensor, "*shape"]:
    """(f(x) - f(0)) / x; f'(x) where x is too near to 0 to divide by."""
    x = to_float64(x)
    near = x.abs() <= _smallest_step(x)
    return _slope(f, x, x.new_zeros(1), near)


def _smallest_step(x: Tensor) -> float:
    """The least difference, for numbers of size 1, that a difference quotient is taken over."""
    return torch.finfo(x.dtype).eps ** 0.5


def _slope(f: Activation, x: Tensor, b: Tensor, near: Tensor) -> Tensor:
    """The slope of the line from b to x; the derivative at x where they are near."""
    step = torch.where(near, 1, x - b)
    secant = (f(x) - f(b)) / step
    return torch.where(near, derivative(f, x), secant) if near.any() else secant


def _logit(query: Query) -> ObjectiveFn:
    """The sum of the logits of the target's tokens, no softmax; or the caller's own number."""
    if query.of is not None:
        return objective_of("logit", of=query.of)
    return contrast(_raw, len(query.foil_ids)) if query.foil_ids else _raw


def _raw(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG001
    return at(logits, ids).sum(-1)
