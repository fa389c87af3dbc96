"""Keys and values of a clean sequence, which passes with gradients go on from."""

from __future__ import annotations

from typing import Any

from noiser.model.packing import Context


def continued(context: Context, length: int, copies: int) -> dict[str, Any]:
    """Arguments with which a pass of `copies` sequences goes on after the first `length` tokens."""
    from transformers import DynamicCache

    grown = DynamicCache()  # without a configuration, so that it keeps all
    for layer, pair in sorted(context.cache.items()):
        keys, values = (part[..., :length, :].expand(copies, -1, -1, -1) for part in pair)
        grown.update(keys, values, layer)
    return {"past_key_values": grown, "use_cache": True}
