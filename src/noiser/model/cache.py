"""Keys and values of a clean sequence, which passes with gradients go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

Cache = Sequence[tuple[Tensor, Tensor]]
"""For each layer keys and values, [1, heads, length, dim]; layers with a window keep all of them too."""


def continued(cache: Cache, length: int, copies: int) -> dict[str, Any]:
    """Arguments with which a pass of `copies` sequences goes on after the first `length` tokens."""
    from transformers import DynamicCache

    grown = DynamicCache()  # without a configuration, so that it keeps all
    for layer, pair in enumerate(cache):
        keys, values = (part[..., :length, :].expand(copies, -1, -1, -1) for part in pair)
        grown.update(keys, values, layer)
    return {"past_key_values": grown, "use_cache": True}
