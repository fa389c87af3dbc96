"""AttnLRP: layer-wise relevance propagation with rules for attention (Achtibat et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from noiser.checks import check_choice
from noiser.engine import Query, Relevance, RelevanceTable, Steps
from noiser.engine.interception import Interception
from noiser.errors import UnsupportedModelError
from noiser.methods.protocol import Scores
from noiser.methods.relevance import Softmax, identity, relevance_rules
from noiser.methods.tokens import sum_over_units

__all__ = ["AttnLrp"]


@dataclass(frozen=True, kw_only=True)
class AttnLrp:
    """Relevance of each token for the target's logit, handed back layer by layer.

    In the form input × gradient, the gradient being that of a network with other derivatives (Achtibat et al. 2024,
    section 3): an elementwise nonlinearity passes relevance as it is, f(x)/x (more exactly (f(x) - f(0))/x: what f
    gives without input is no input's relevance); a product of two activations (gates, queries with keys, attention
    with values) halves it between them; the factor of a normalisation is a constant; the softmax of attention is
    linearised where it stands. A token's relevance is Σ_d x_d g_d, a unit's the sum over its tokens.

    Linear layers, gates, activations and normalisations conserve relevance. Biases, position embeddings and the softmax
    take some or add some: `info` holds, one number per target, the logit ("explained"), the sum over all tokens
    ("relevance"; also that of frozen tokens, which have no score: "frozen") and their ratio ("conservation").

    Args:
        softmax: "taylor", the paper's rule; "constant", attention weights are constants, as in CP-LRP (Ali et al.
            2022): the values then get all the relevance, and without biases the sum is exactly the logit.

    Raises:
        UnknownNameError: an unknown name, with the nearest one.
        UnsupportedModelError: the model has no attention (when called); state-space models have no rules.
    """

    softmax: Softmax = "taylor"

    def __post_init__(self) -> None:
        check_choice("softmax", self.softmax, get_args(Softmax))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        seen: list[str] = []
        rules = Interception(identity, relevance_rules(self.softmax, seen))
        table: RelevanceTable = yield Relevance(rules, "logit", in_python=True)
        if not seen:
            raise UnsupportedModelError(
                "The model has no attention; expected a model with attention layers. AttnLRP has "
                "rules for attention, not for state-space or other recurrent layers. Choose another method, such as "
                "'integrated_gradients', 'occlusion' or 'noiser'."
            )
        relevance = table.contributions
        explained, total = table.values[:, 0].tolist(), relevance.sum(-1).tolist()
        return Scores(
            scores=sum_over_units(query, relevance),
            info={
                "explained": explained,
                "relevance": total,
                "frozen": relevance[:, list(query.encoding.frozen)].sum(-1).tolist(),
                "conservation": [r / e if e else float("nan") for r, e in zip(total, explained, strict=True)],
            },
        )
