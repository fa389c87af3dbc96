"""AttnLRP: layer-wise relevance propagation with rules for attention (Achtibat et al. 2024)."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Engine
from noiser.engine.interception import Interception
from noiser.engine.multipliers import multipliers
from noiser.errors import UnsupportedModelError
from noiser.methods.protocol import Scores
from noiser.methods.relevance import Softmax, identity, relevance_rules
from noiser.methods.tokens import sum_over_units
from noiser.model.attention import eager_attention
from noiser.model.language_model import LanguageModel

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
    take some or add some: `info` holds, one number a target, the logit ("explained"), the sum over all tokens
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

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:  # noqa: ARG002 - nothing is random
        """Scores of every unit for every target; see `Method`."""
        query, lm = engine.query, engine.lm
        seen: list[str] = []
        interception = Interception(identity, relevance_rules(self.softmax, seen))
        logits = [partial(_logit, target=token, foil=query.foil_id) for token in query.target_ids]
        found = multipliers(engine, engine.table_rows[None], interception, logits, within=partial(_readable, lm))
        if not seen:
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} has no attention; expected a model with attention layers. AttnLRP has "
                "rules for attention, not for state-space or other recurrent layers. Choose another method, such as "
                "'integrated_gradients', 'occlusion' or 'noiser'."
            )
        relevance = torch.stack([(engine.table_rows * each.gradient).sum(-1) for each in found]).cpu()
        explained, total = [float(each.values[0]) for each in found], relevance.sum(-1).tolist()
        return Scores(
            scores=sum_over_units(query, relevance),
            info={
                "explained": explained,
                "relevance": total,
                "frozen": relevance[:, list(query.encoding.frozen)].sum(-1).tolist(),
                "conservation": [r / e if e else float("nan") for r, e in zip(total, explained, strict=True)],
                "token_forwards": engine.token_forwards,
                "passes": engine.passes,
            },
        )


def _readable(lm: LanguageModel) -> contextlib.AbstractContextManager[None]:
    """Attention by functions that can be intercepted: eager, where the model has kernels from elsewhere."""
    kind = getattr(lm.model.config, "_attn_implementation", "eager")
    return contextlib.nullcontext() if kind in ("eager", "sdpa") else eager_attention(lm.model)


def _logit(logits: Float[Tensor, "batch vocab"], target: int, foil: int | None) -> Float[Tensor, " batch"]:
    return logits[:, target] - (0 if foil is None else logits[:, foil])
