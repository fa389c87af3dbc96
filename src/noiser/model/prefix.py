"""Keys and values of a clean prefix, to be continued by many perturbed suffixes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.model.memory import is_out_of_memory

if TYPE_CHECKING:
    from noiser.model.language_model import LanguageModel

__all__ = ["Prefix", "agree", "can_reuse_prefix", "empty_prefix", "joined", "record_prefix"]


class Prefix:
    """The cache of one clean sequence.

    `branch(length, batch)` gives a cache that holds only the first `length` tokens, for `batch` sequences. It shares
    the memory of the original (views, no copies), which a forward pass on the branch leaves as it was: what the pass
    puts behind it lasts for one layer at a time, since each sequence's copy of the prefix stands in front of it.
    """

    def __init__(self, cache: Any, length: int) -> None:
        self.cache, self.length = cache, length

    def branch(self, length: int, batch: int) -> Prefix:
        """The first `length` tokens, for `batch` sequences."""
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
        """This prefix and behind it the tokens `first` to `last` of a pass's cache, in memory of their own."""
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
def _forgetful(kind: type) -> type:
    """A kind of cache layers that return what a pass adds to them, and do not keep it."""

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = self.keys, self.values
        found = kind.update(self, *args, **kwargs)  # pyright: ignore
        self.keys, self.values = keys, values
        return found

    # A kind with a layer type would take its place in transformers' table of kinds.
    return type(f"Forgetful{kind.__name__}", (kind,), {"update": update, "_layer_type": None})


def joined(prefixes: Sequence[Prefix], lengths: Sequence[int]) -> Any:
    """One cache that holds the first tokens of several clean sequences end to end.

    Nothing is left out that a sliding window would have let go. What a pass adds to it leaves the prefixes as they are.
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


def record_prefix(
    lm: LanguageModel, embeddings: Float[Tensor, "length dim"], positions: list[int]
) -> tuple[Prefix, Float[Tensor, "positions vocab"]]:
    """Runs a clean sequence once; returns its cache, and the logits at `positions`."""
    prefix = empty_prefix(lm)
    logits = lm.logits(embeddings[None], positions=positions, prefix=prefix)
    prefix.length = embeddings.shape[0]
    return prefix, logits[0]


def empty_prefix(lm: LanguageModel) -> Prefix:
    """A cache for a clean sequence that is still to run."""
    from transformers import DynamicCache

    cache = DynamicCache(config=lm.model.config)
    cache.activate_past_recording()  # sliding windows keep what a later crop needs
    return Prefix(cache, 0)


def can_reuse_prefix(lm: LanguageModel, embeddings: Float[Tensor, "length dim"]) -> bool:
    """Whether running the second half on a cropped and repeated cache gives what the whole sequence gives.

    Architectures differ in ways that no attribute tells (recurrent states, caches under other names, positions
    counted from a mask), so this tries it: any failure means no.
    """
    length = embeddings.shape[0]
    half = length // 2
    whole = lm.logits(embeddings[None], positions=[length - 1])[0, 0]
    try:
        prefix, _ = record_prefix(lm, embeddings, [length - 1])
        if not all(hasattr(layer, "keys") and layer.is_croppable for layer in prefix.cache.layers):
            return False
        suffix = embeddings[half:].expand(2, -1, -1)
        branched = lm.logits(suffix, positions=[length - half - 1], prefix=prefix.branch(half, 2))[:, 0]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return agree(branched, whole.expand_as(branched), lm.dtype)


def agree(found: Float[Tensor, "*rows vocab"], expected: Float[Tensor, "*rows vocab"], dtype: torch.dtype) -> bool:
    """Whether two ways of running a model give the same logits, but for rounding.

    In float32 none may differ by more than a thousandth of their standard deviation. In half precision, or where
    float32 products may be less precise, single ones differ by more than a tenth, and all of them by 0.03 in the mean;
    a token one place off gives 0.3.
    """
    difference, spread = found - expected, float(expected.std())
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return float(difference.abs().max()) <= 1e-3 * spread
    return float(difference.square().mean().sqrt()) <= 0.1 * spread
