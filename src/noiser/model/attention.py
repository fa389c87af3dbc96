"""Attention weights, whatever implementation of attention the model was loaded with."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from noiser.errors import UnsupportedModelError
from noiser.model.language_model import LanguageModel
from noiser.model.runtime import attention_implementation


def attention_maps(lm: LanguageModel, token_ids: Int[Tensor, " length"]) -> list[Float[Tensor, "length length"]]:
    """Attention weights of each layer that has attention, first to last, mean over heads, float32.

    Row i holds what position i attends to: zero after i, and outside the window of a layer that slides. The model is
    switched to eager attention for this one pass.

    Raises:
        UnsupportedModelError: no layer has attention, or the model does not return its weights.
    """
    length = len(token_ids)
    with lm.running(), attention_implementation(lm.model, "eager"), _heads_averaged(lm.model, length):
        out = lm.output(lm.embed(token_ids)[None], positions=[length - 1], output_attentions=True, return_dict=True)
    layers = [weights for weights in getattr(out, "attentions", None) or () if weights is not None]
    if not layers or any(weights.ndim != 4 or weights.shape[-2:] != (length, length) for weights in layers):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} gives no attention weights of shape [1, heads, length, length]. Choose a "
            "method that does not read attention, such as 'noiser' or 'occlusion', or load a model with code of its "
            "own with attn_implementation='eager'."
        )
    return [weights[0].float().mean(0) for weights in layers]


@contextlib.contextmanager
def _heads_averaged(model: Any, length: int) -> Generator[None]:
    """Attention weights leave their layer averaged over heads, so that memory holds one map per layer, not per head."""

    def average(_module: Any, _inputs: Any, output: Any) -> Any:
        if not isinstance(output, tuple):
            return None
        first, *rest = output
        if not rest or not isinstance(rest[0], Tensor) or rest[0].ndim != 4 or rest[0].shape[-2:] != (length, length):
            return None
        return (first, rest[0].float().mean(1, keepdim=True), *rest[1:])

    # Prepended: before the hooks that collect the weights.
    handles = [module.register_forward_hook(average, prepend=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
