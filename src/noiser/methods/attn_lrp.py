"""AttnLRP: layer-wise relevance propagation with rules for attention (Achtibat et al. 2024).

Relevance is input × gradient throughout: x g of an input x, y g of the output y. A rule is a choice of derivatives
∂y/∂x_i, and conserves relevance when Σ_i x_i ∂y/∂x_i = y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Query, Relevance, Steps
from noiser.engine.gradients import Activation, derivative, widened
from noiser.engine.scores import Read, score_of
from noiser.methods.protocol import Scores, sum_over_units

Softmax = Literal["taylor", "constant"]

ATTENTION: dict[Softmax, tuple[float, float]] = {"taylor": (4, 2), "constant": (math.inf, 1)}
"""What the gradients of queries and keys, and of values, are divided by. Taylor: half to the values; the other half to
the weights, and of that half each to queries and keys."""


@dataclass(frozen=True, kw_only=True)
class AttnLrp:
    """Relevance of each token for the target's logit, passed back layer by layer.

    In the form input × gradient, the gradient being that of a network with other derivatives (Achtibat et al. 2024,
    section 3): an elementwise nonlinearity passes relevance unchanged, f(x)/x (more exactly (f(x) - f(0))/x: what f
    gives without input is no input's relevance); a product of two activations (gates, queries with keys, attention
    with values) halves it between them; the factor of a normalisation is a constant; the softmax of attention is
    linearised where it stands. A token's relevance is Σ_d x_d g_d, a unit's the sum over its tokens.

    Linear layers, gates, activations and normalisations conserve relevance. Biases, position embeddings and the softmax
    take some or add some: `info` holds, one number per target, the logit ("explained"), the sum over all tokens
    ("relevance"; also of frozen tokens, which have no score: "frozen") and their ratio ("conservation"). State-space
    models have no rules. Its inventors describe the method as patented, and free for personal and scientific use.

    Args:
        softmax: "taylor", the paper's rule; "constant", attention weights are constants, as in CP-LRP (Ali et al.
            2022): the values then get all the relevance, and without biases the sum is exactly the logit.
    """

    looks_inside: ClassVar[bool] = True

    softmax: Softmax = "taylor"

    def __post_init__(self) -> None:
        check_choice("softmax", self.softmax, get_args(Softmax))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        values, relevance = yield Relevance(query, _score(query), identity, attention=ATTENTION[self.softmax])
        explained, total = values[:, 0].tolist(), relevance.sum(-1).tolist()
        return Scores(
            scores=sum_over_units(query, relevance),
            info={
                "explained": explained,
                "relevance": total,
                "frozen": relevance[:, list(query.encoding.frozen)].sum(-1).tolist(),
                "conservation": [r / e if e else float("nan") for r, e in zip(total, explained, strict=True)],
            },
        )


def identity(f: Activation, x: Float[Tensor, "*shape"], _: Tensor | None) -> Float[Tensor, "*shape"]:
    """(f(x) - f(0)) / x; f'(x) where x is too near to 0 to divide by."""
    x = widened(x)
    near = x.abs() <= torch.finfo(x.dtype).eps ** 0.5
    slope = (f(x) - f(x.new_zeros(1))) / torch.where(near, 1, x)
    return torch.where(near, derivative(f, x), slope) if near.any() else slope


def raw_logit(logits: Float[Tensor, "samples tokens vocab"], clean: Tensor, ids: Tensor) -> Float[Tensor, " samples"]:  # noqa: ARG001
    """Sum of the logits of the target's tokens, which no softmax normalises."""
    return logits.gather(-1, ids.expand(len(logits), -1)[..., None])[..., 0].sum(-1)


def _score(query: Query) -> Read:
    if query.of is not None:
        return score_of("logit", of=query.of)
    if (foil := query.foil_id) is None:
        return raw_logit
    return lambda logits, clean, ids: raw_logit(logits, clean, ids) - logits[:, 0, foil]
