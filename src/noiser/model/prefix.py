"""Keys and values of a clean prefix, to be continued by many perturbed suffixes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class CausalModel(Protocol):
    """What a pass takes, as `LanguageModel` has it."""

    model: Any

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The type of inputs."""
        ...

    def output(
        self,
        embeddings: Float[Tensor, "batch length dim"],
        *,
        positions: Sequence[int],
        prefix: Prefix | None = None,
        **options: Any,
    ) -> Any:
        """The model's full output, with logits at some positions; `prefix` grows by the embeddings."""
        ...


class Prefix:
    """The cache of one clean sequence."""

    def __init__(self, cache: Any, length: int) -> None:
        self.cache, self.length = cache, length

    def branch(self, length: int, batch: int) -> Prefix:
        """A cache of the first `length` tokens, for `batch` sequences.

        It shares the memory of the original (views, no copies). A forward pass on it leaves the original as it was:
        what the pass appends lasts for one layer at a time, since each sequence has its own view of the prefix.
        """
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        if length < self.length:
            cache.crop(length - self.length)
        for layer in cache.layers:
            if layer.is_initialized:
                layer.keys = layer.keys.expand(batch, -1, -1, -1)
                layer.values = layer.values.expand(batch, -1, -1, -1)
                layer.__class__ = _forgetful(type(layer))
        return Prefix(cache, length)

    def grown(self, cache: Any, first: int, last: int) -> Prefix:
        """This prefix followed by the tokens `first` to `last` of a pass's cache, copied."""
        grown = copy.copy(self.cache)
        grown.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer, run in zip(grown.layers, cache.layers, strict=True):
            keys, values = run.keys[..., first:last, :], run.values[..., first:last, :]
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            layer.keys, layer.values = torch.cat([layer.keys, keys], -2), torch.cat([layer.values, values], -2)
            if hasattr(layer, "cumulative_length"):  # of a sliding window, which still has all that was recorded
                layer.cumulative_length = layer.keys.shape[-2]
        return Prefix(grown, self.length + last - first)


@cache
def _forgetful(layer_type: type) -> type:
    """A type of cache layers that return what a pass appends, and do not keep it."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = self.keys, self.values
        updated = layer_type.update(self, *args, **kwargs)  # pyright: ignore
        self.keys, self.values = keys, values
        return updated

    # With a `_layer_type` it would replace its base in transformers' table of layer types.
    return type(f"Forgetful{layer_type.__name__}", (layer_type,), {"update": update, "_layer_type": None})


def join_prefixes(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> Any:
    """One cache that holds the first tokens of several clean sequences end to end.

    Tokens outside a sliding window stay in it. What a pass appends to it leaves the prefixes as they are.
    """
    from transformers.cache_utils import Cache, DynamicLayer

    layers: list[Any] = []
    for recorded in zip(*(prefix.cache.layers for prefix in prefixes), strict=True):
        layer = DynamicLayer()
        parts = [(one.keys[..., :n, :], one.values[..., :n, :]) for one, n in zip(recorded, lengths, strict=True) if n]
        if parts:
            layer.lazy_initialization(*parts[0])
            keys, values = zip(*parts, strict=True)
            layer.keys, layer.values = (x[0] if len(x) == 1 else torch.cat(x, -2) for x in (keys, values))
        layers.append(layer)
    return Cache(layers=layers)


def empty_prefix(lm: CausalModel) -> Prefix:
    """A cache for a clean sequence that has yet to run."""
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.model.config)
    cache.activate_past_recording()  # sliding windows keep what a later crop needs
    return Prefix(cache, 0)
