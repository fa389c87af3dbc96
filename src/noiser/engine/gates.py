"""Gates on attention: how a prediction changes as attention to a token opens, from one pass of question and answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine.backward import differentiable
from noiser.engine.gradients import score_at, target_logits
from noiser.engine.query import Query, Request
from noiser.engine.scores import Read
from noiser.errors import UnsupportedModelError
from noiser.model.language_model import LanguageModel
from noiser.model.runtime import Attention, eager_of


@dataclass(frozen=True, eq=False)
class Gates(Request):
    """The request for slopes of a score by gates: what rows from `first` on see of an earlier token, times its gate.

    A gate multiplies a token's weight in attention, in all layers and heads, before weights are scaled to add up to 1:
    0 hides the token as `hide` does, 1 changes nothing. All positions have the same `gate`. The answer is [targets,
    length], float64; an UnsupportedModelError says why there is none.
    """

    query: Query
    positions: tuple[int, ...]
    first: int
    gate: float
    read: Read


def gate_slopes(lm: LanguageModel, request: Gates) -> Float[Tensor, "targets length"]:
    """The answer to `Gates`; other errors as for `differentiate`."""
    query, context, begin = request.query, request.query.context, request.first
    if not lm.abilities.packs:
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} cannot run an answer alone after a cached prompt, so its attention has no "
            "gates. Take another method, such as 'occlusion' or 'attn_lrp'."
        )
    at = torch.tensor(request.positions)
    opened = torch.full((len(at),), request.gate).log().requires_grad_()
    masks: dict[int | None, Tensor] = {}

    def mask(keys: int, window: int | None) -> Tensor:
        """The mask of every layer with this window, float32 [rows, keys]: gates, and what is not seen."""
        if window not in masks:
            distance = torch.arange(begin, keys)[:, None] - torch.arange(keys)
            seen = (distance >= 0) & (distance < (window or keys))
            bias = torch.zeros(keys).index_put((at,), opened).expand(distance.shape)
            masks[window] = torch.where(seen, torch.where(distance > 0, bias, 0), -torch.inf)
        return masks[window]

    def attend(
        _: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, __: Any, sliding_window: Any = None, **options: Any
    ) -> Any:
        k, v = context.after(0, begin, int(module.layer_idx), k, v)
        seen = mask(k.shape[-2], sliding_window).to(q).clamp_min(torch.finfo(q.dtype).min)[None, None]
        return eager_of(module)(module, q, k, v, seen, **options)[0], None

    found = torch.zeros(len(query.target_spans), len(query.token_ids), dtype=torch.float64)
    targets, inputs = range(len(found)), context.inputs[None, begin:]
    place = {"position_ids": torch.arange(begin, len(context.inputs), device=inputs.device)[None]}
    with differentiable(lm), lm.running(gradients=True, attention=Attention(attend, masked=False)):
        for target, logits in zip(targets, target_logits(lm, query, inputs, targets, begin, **place), strict=True):
            value = score_at(query, request.read, target, logits).sum()
            (slope,) = torch.autograd.grad(value, opened, retain_graph=target != targets[-1])
            found[target, at] = slope.double() / request.gate
    query.spent.add(inputs.shape[1], 1 + len(found))
    return found
