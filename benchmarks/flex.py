"""One attention call a layer for a whole pass, by PyTorch's FlexAttention, in place of the loop.

Keys are [the cached beginnings of all prompts, the pass's own rows], once in each layer. Blocks of
keys that no row sees are skipped, blocks that are seen whole need no mask. On a card the kernel is
compiled at its first call, which takes many seconds; on a CPU it is the obvious computation, for
tests. `devices.py --attention flex` measures it beside the loop.

It has not run on a card, so the library goes on with the loop. Compiled for a CPU (torch 2.13) it
returned NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad

from noiser.model import LanguageModel
from noiser.model.language_model import AttentionOf, attention_of_pass
from noiser.model.packing import Branch, Context, Pass

BLOCK = 128
EVERY_POSITION = 2**30

# What a model may hand to its attention that changes nothing here.
UNUSED = {"dropout", "is_causal", "position_ids", "cache_position", "use_cache"}
UNUSED |= {"position_embeddings", "output_attentions"}


@contextmanager
def one_call(lm: LanguageModel) -> Generator[None]:
    """Within it the passes of a model attend by one call a layer, but those with gradients, which
    FlexAttention does not have on a CPU, and with an attention of their own, such as gates.
    """
    run = lm.run_packed

    def run_packed(
        branches: Sequence[Branch], chosen: AttentionOf = attention_of_pass, *, gradients: bool
    ) -> list[Tensor]:
        if chosen is attention_of_pass and not gradients:
            chosen = attention
        return run(branches, chosen, gradients=gradients)

    with patch.object(lm, "run_packed", run_packed):
        yield


def attention(packed: Pass) -> Callable[..., Any]:
    """The attention of a pass."""
    return _OneCall(packed).attend


class _OneCall:
    """The keys of a pass, each once, and its masks for each window."""

    def __init__(self, packed: Pass) -> None:
        self.packed = packed
        self.cached: dict[Context, int] = {}
        for group in packed.key_groups:
            for context, count in group.cached.items():
                self.cached[context] = max(count, self.cached.get(context, 0))
        self.masks: dict[int | None, BlockMask] = {}
        rows = packed.tokens
        self.queries = {
            "context": _padded(rows.context, -5),
            "number": _padded(rows.number, -5),
            "start": _padded(rows.start, 0),
            "position": _padded(rows.position, -1),
        }
        positions = [torch.arange(count, device=packed.device) for count in self.cached.values()]
        cached_position = torch.cat(positions)
        contexts = [
            torch.full_like(each, packed.numbers[context])
            for context, each in zip(self.cached, positions, strict=True)
        ]
        no_sequence = torch.full_like(cached_position, -1)
        self.count = len(cached_position) + len(rows.number)
        self.keys = {
            "context": _padded(torch.cat([*contexts, rows.context]), -7),
            "number": _padded(torch.cat([no_sequence, rows.number]), -7),
            "position": _padded(torch.cat([cached_position, rows.position]), EVERY_POSITION),
        }

    def attend(
        self,
        own: Any,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        sliding_window: int | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        **options: Any,
    ) -> Any:
        """As `Pass.attend`, which goes on where the call does not cover what is asked."""
        others = {name for name, given in options.items() if given is not None} - UNUSED
        if others or self.packed.picture is not None or self.packed.around is not None:
            options |= {"sliding_window": sliding_window, "scaling": scaling, "softcap": softcap}
            given = {name: value for name, value in options.items() if value is not None}
            return self.packed.attend(own, module, query, key, value, mask, **given)
        layer = int(module.layer_idx)
        if self.packed.recorded:
            self.packed.keys_and_values(layer, key, value, sliding_window)

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            assert softcap is not None
            return softcap * torch.tanh(score / softcap)

        found = _kernel(query.device.type)(
            query,
            self._stacked(layer, 0, key),
            self._stacked(layer, 1, value),
            score_mod=capped if softcap else None,
            block_mask=self._mask(sliding_window),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return found.transpose(1, 2).contiguous(), None

    def _stacked(self, layer: int, which: int, own: Tensor) -> Tensor:
        """Cached keys (0) or values (1) of all prompts, and those of the rows."""
        parts = [
            context.cache[layer][which][..., :count, :]
            for context, count in self.cached.items()
            if count
        ]
        return torch.cat([*parts, own], -2)

    def _mask(self, window: int | None) -> BlockMask:
        """Which blocks of keys are seen by which blocks of rows; made once for all layers."""
        if window not in self.masks:
            self.masks[window] = create_block_mask(
                self._visible(window),
                None,
                None,
                len(self.packed.tokens.number),
                self.count,
                device=str(self.packed.device),
                BLOCK_SIZE=BLOCK,
            )
        return self.masks[window]

    def _visible(self, window: int | None) -> Callable[..., Tensor]:
        """Whether a row sees a key, as `Pass` has it."""
        queries, keys = self.queries, self.keys
        farthest = window or EVERY_POSITION
        hidden = self.packed.hidden

        def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            distance = queries["position"][q] - keys["position"][k]
            own = keys["number"][k] == queries["number"][q]
            same_context = keys["context"][k] == queries["context"][q]
            before_start = keys["position"][k] < queries["start"][q]
            clean = (keys["number"][k] == -1) & same_context & before_start
            seen = (own | clean) & (distance >= 0) & (distance < farthest)
            if hidden is not None:
                number = queries["number"][q].clamp(min=0)
                position = keys["position"][k].clamp(max=hidden.shape[1] - 1)
                seen &= ~(hidden[number, position] & (distance > 0))
            return seen

        return visible


def _padded(column: Tensor, fill: int) -> Tensor:
    """A column up to a whole number of blocks, so that no index is outside."""
    return pad(column, (0, -len(column) % BLOCK), value=fill).to(torch.int32)


@cache
def _kernel(device: str) -> Callable[..., Any]:
    """The call, compiled but on a CPU."""
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)
