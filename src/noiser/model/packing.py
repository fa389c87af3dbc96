"""Sequences of different lengths, and of different prompts, end to end in one forward pass.

Perturbed sequences differ in where they leave the clean one. Laid end to end they are one long sequence for everything
in a transformer but attention, so no token is computed twice. Attention goes block by block: a few sequences of one
prompt attend, by the model's own attention function and with one mask, to their clean beginning and to themselves.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.model.runtime import attention_implementation

NAME = "noiser_packed"

BLOCK = {"cpu": 128}
"""Tokens that attend together, on a CPU; elsewhere `BLOCK_ELSEWHERE`. A longer sequence is cut into such blocks."""
BLOCK_ELSEWHERE = 1024


@dataclass(eq=False)
class Context:
    """A clean sequence, and the keys and values of its tokens that have run.

    Attributes:
        inputs: [length, dim], what the model reads: rows of its embedding table, times `scale`.
        scale: the factor that the embedding module puts on the rows.
        cache: for each layer keys and values, [1, heads, done, dim]; layers with a window keep all of them too.
        done: how many tokens are cached.
    """

    inputs: Float[Tensor, "length dim"]
    scale: float
    cache: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]], repr=False)
    done: int = 0

    @property
    def rows(self) -> Float[Tensor, "length dim"]:
        """Rows of the embedding table, float32."""
        return self.inputs.float() / self.scale

    def extend(self, inputs: Float[Tensor, "more dim"]) -> None:
        """Appends tokens, which have yet to run."""
        self.inputs = torch.cat([self.inputs, inputs])

    def continued(self, length: int, copies: int) -> dict[str, Any]:
        """Arguments with which a pass with gradients of `copies` sequences goes on after the first `length` tokens."""
        from transformers import DynamicCache

        grown = DynamicCache()  # without a configuration, so that it keeps all
        for layer, pair in sorted(self.cache.items()):
            keys, values = (part[..., :length, :].expand(copies, -1, -1, -1) for part in pair)
            grown.update(keys, values, layer)
        return {"past_key_values": grown, "use_cache": True}


@dataclass(eq=False)
class Branch:
    """Sequences that leave a clean one at `start`, all equally long.

    Attributes:
        context: the clean sequence; its first `start` tokens are cached.
        start: the position of their first token.
        inputs: [copies, length, dim], what the model reads.
        wanted: positions, counted from the beginning of the clean sequence, whose logits are wanted.
        hidden: positions to which no later token of the sequences attends.
        record: whether this is the clean sequence going on: its keys and values join the cache.
        tokens: for each wanted position the ids whose probabilities must be exact, where a server does not send all.
    """

    context: Context
    start: int
    inputs: Float[Tensor, "copies length dim"]
    wanted: Sequence[int]
    hidden: tuple[int, ...] = ()
    record: bool = False
    tokens: Sequence[tuple[int, ...]] = ()

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + self.inputs.shape[1]


_Sequence = tuple[Branch, int]
"""One sequence of a pass: its branch, and where its tokens begin in the pass."""


class _Block:
    """Tokens `first` to `last` of a pass, which attend to `cached` clean tokens and to the pass from `begin` on."""

    def __init__(self, sequences: Sequence[_Sequence], first: int, last: int) -> None:
        self.sequences, self.first, self.last = sequences, first, last
        branch, self.begin = sequences[0]
        self.context = branch.context
        self.cached = max(branch.start for branch, _ in sequences)
        self._masks: dict[tuple[int | None, torch.dtype], tuple[int, Tensor]] = {}
        lengths = torch.tensor([branch.inputs.shape[1] for branch, _ in sequences])
        self._position = torch.cat([torch.arange(branch.start, branch.stop) for branch, _ in sequences])
        self._sequence = torch.arange(len(sequences)).repeat_interleave(lengths)
        self._start = torch.tensor([branch.start for branch, _ in sequences]).repeat_interleave(lengths)

    def mask(self, window: int | None, like: Tensor) -> tuple[int, Tensor]:
        """The first cached token that a query sees, and the mask [1, 1, queries, keys]: 0 where one sees a key."""
        if (window, like.dtype) not in self._masks:
            oldest, seen = self._seen(window)
            mask = torch.where(seen, 0.0, torch.finfo(like.dtype).min).to(like)[None, None]
            self._masks[window, like.dtype] = oldest, mask
        return self._masks[window, like.dtype]

    def _seen(self, window: int | None) -> tuple[int, Tensor]:
        position, sequence, start = self._position, self._sequence, self._start
        queries, keys = slice(self.first - self.begin, self.last - self.begin), slice(self.last - self.begin)
        q, own = position[queries, None], position[keys]
        oldest = max(0, int(start[queries].min()) + 1 - window) if window else 0
        oldest = min(oldest, self.cached)
        before = torch.arange(oldest, self.cached)
        distance = torch.cat([q - before, q - own], 1)
        seen = torch.cat([before < start[queries, None], sequence[keys] == sequence[queries, None]], 1) & (
            distance >= 0
        )
        if window:
            seen &= distance < window
        at = torch.cat([before, own])
        for number, (branch, _) in enumerate(self.sequences):
            if branch.hidden:
                unseen = torch.isin(at, torch.tensor(branch.hidden)) & (distance > 0)
                seen &= ~(unseen & (sequence[queries, None] == number))
        return oldest, seen


class Layout:
    """Where the sequences of a pass lie, how they attend, and the windows that the layers name."""

    def __init__(self, branches: Sequence[Branch], device: torch.device) -> None:
        self.sequences: list[_Sequence] = []
        offset = 0
        for branch in branches:
            for _ in range(len(branch.inputs)):
                self.sequences.append((branch, offset))
                offset += branch.inputs.shape[1]
        self._clean = [(branch, offset) for branch, offset in self.sequences if branch.record]
        self.blocks = list(_blocks(self.sequences, BLOCK.get(device.type, BLOCK_ELSEWHERE)))
        self.windows: dict[int, int | None] = {}
        self.recorded: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.implementation = "sdpa"

    def record(self) -> None:
        """Appends the keys and values of clean sequences to their caches."""
        for layer, parts in self.recorded.items():
            for (branch, _), new in zip(self._clean, parts, strict=True):
                cache = branch.context.cache
                if layer in cache:
                    (old_key, old_value), (key, value) = cache[layer], new
                    new = torch.cat([old_key, key], -2), torch.cat([old_value, value], -2)
                cache[layer] = new
        for branch, _ in self._clean:
            branch.context.done = branch.stop

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Copies the keys and values of clean sequences, of one layer of the pass."""
        spans = [slice(offset, offset + branch.inputs.shape[1]) for branch, offset in self._clean]
        self.recorded[layer] = [(key[..., span, :].clone(), value[..., span, :].clone()) for span in spans]


def _blocks(sequences: Sequence[_Sequence], most: int) -> Iterator[_Block]:
    """Neighbouring sequences of one prompt in blocks of up to `most` tokens; a longer sequence in several."""
    group: list[_Sequence] = []
    size = 0
    for branch, offset in sequences:
        length = branch.inputs.shape[1]
        if group and (branch.context is not group[0][0].context or size + length > most):
            yield _Block(group, group[0][1], group[0][1] + size)
            group, size = [], 0
        if length > most:
            for first in range(0, length, most):
                yield _Block([(branch, offset)], offset + first, offset + min(first + most, length))
            continue
        group.append((branch, offset))
        size += length
    if group:
        yield _Block(group, group[0][1], group[0][1] + size)


_layout: contextvars.ContextVar[Layout] = contextvars.ContextVar("layout")


def packed_logits(lm: Any, branches: Sequence[Branch], layout: Layout | None = None) -> list[Tensor]:
    """Logits [copies, wanted, vocab] of every branch, from one forward pass.

    Args:
        lm: a `LanguageModel`, running.
        branches: those of one prompt should be neighbours, those with a near start as well.
        layout: the caller's, to learn which windows the layers named.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    layout = layout or Layout(branches, lm.device)
    own = lm.model.config._attn_implementation
    layout.implementation = own if own in ("sdpa", "eager") else "sdpa"
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    rows, positions = [], []
    for branch, offset in layout.sequences:
        rows += [offset + row - branch.start for row in branch.wanted]
        positions.append(torch.arange(branch.start, branch.stop))
    token = _layout.set(layout)
    try:
        with attention_implementation(lm.model, NAME):
            logits = lm.output(
                torch.cat([branch.inputs.flatten(0, 1) for branch in branches])[None],
                positions=rows,
                position_ids=torch.cat(positions)[None].to(lm.device),
            ).logits[0]
    finally:
        _layout.reset(token)
    layout.record()
    parts = logits.split([len(branch.inputs) * len(branch.wanted) for branch in branches])
    return [part.unflatten(0, (len(branch.inputs), -1)) for part, branch in zip(parts, branches, strict=True)]


def _no_mask(*_: Any, **__: Any) -> None:
    """Blocks have masks of their own."""


def _attend(
    module: torch.nn.Module,
    query: Float[Tensor, "one heads tokens dim"],
    key: Float[Tensor, "one kv_heads tokens dim"],
    value: Float[Tensor, "one kv_heads tokens dim_v"],
    attention_mask: Tensor | None,  # noqa: ARG001 - the registry's signature
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "one tokens heads dim_v"], None]:
    """An attention function of transformers' registry: causal attention of packed sequences."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layout = _layout.get()
    own = None if options.get("softcap") else ALL_ATTENTION_FUNCTIONS.get(layout.implementation)
    own = own or sys.modules[type(module).__module__].eager_attention_forward
    layer = int(module.layer_idx)  # pyright: ignore
    layout.windows[layer] = sliding_window
    layout.keep(layer, key, value)
    out: list[Tensor] = []
    for block in layout.blocks:
        oldest, mask = block.mask(sliding_window, query)
        k, v = (x[..., block.begin : block.last, :] for x in (key, value))
        if oldest < block.cached:
            clean = (x[..., oldest : block.cached, :] for x in block.context.cache[layer])
            k, v = (torch.cat([c.to(x.device), x], -2) for c, x in zip(clean, (k, v), strict=True))
        out.append(own(module, query[..., block.first : block.last, :], k, v, mask, **options)[0])
    return torch.cat(out, 1), None
