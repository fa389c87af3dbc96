"""Sequences of different lengths, and of different prompts, end to end in one forward pass.

They are one long sequence for everything but attention, so no token is computed twice. A few sequences of one prompt
attend, by the model's own attention function and with one mask, to their clean beginning and to themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.model.attention import eager
from noiser.model.runtime import running

BLOCK, BLOCK_ON_CPU = (
    1024,
    128,
)  # tokens that attend together; a longer sequence is cut into such blocks
KeysValues = dict[int, tuple[Tensor, Tensor]]  # of each layer, [1, heads, tokens, dim]


@dataclass(eq=False)
class Context:
    """A clean sequence, and the keys and values of the `done` tokens that have run; more where a later pass failed."""

    inputs: Float[Tensor, "length dim"]  # rows of the embedding table times `scale`
    scale: float
    cache: KeysValues = field(
        default_factory=dict[int, tuple[Tensor, Tensor]], repr=False
    )  # also outside of windows
    done: int = 0
    windows: dict[int, int | None] = field(
        default_factory=dict[int, int | None], repr=False
    )  # of layers
    packs: bool = False  # whether sequences that leave it run end to end, and not whole
    continues: bool = False  # whether the model itself goes on after its keys and values

    @property
    def rows(self) -> Float[Tensor, "length dim"]:
        """Rows of the embedding table, float32."""
        return self.inputs.float() / self.scale

    def extend(self, inputs: Float[Tensor, "more dim"]) -> None:
        """Appends tokens, which have yet to run."""
        self.inputs = torch.cat([self.inputs, inputs])

    def after(
        self, start: int, stop: int, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [batch, heads, tokens, dim], after cached keys of positions `start` to `stop`."""
        if start >= stop:
            return key, value
        clean = (old[..., start:stop, :].expand(len(key), -1, -1, -1) for old in self.cache[layer])
        first, second = (
            torch.cat([old.to(x.device), x], -2) for old, x in zip(clean, (key, value), strict=True)
        )
        return first, second


def continued(cache: KeysValues, length: int = 0, copies: int = 1) -> dict[str, Any]:
    """The arguments, a cache being the first, with which a pass of sequences goes on after `length` tokens."""
    from transformers import DynamicCache
    from transformers.masking_utils import create_causal_mask

    grown = DynamicCache()  # without a configuration, so that it keeps all
    for layer, pair in sorted(cache.items()):
        keys, values = (part[..., :length, :].expand(copies, -1, -1, -1) for part in pair)
        grown.update(keys, values, layer)
    named = (
        "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
    )  # as before 5.24
    return {named: grown, "use_cache": True}


@dataclass(eq=False)
class Branch:
    """Sequences, all equally long, that leave a clean one at `start`, up to where it is cached."""

    context: Context
    start: int
    inputs: Float[Tensor, "copies length dim"]  # as the model reads them
    wanted: Sequence[
        int
    ]  # positions, counted from the beginning of the clean sequence, whose logits are wanted
    hidden: tuple[int, ...] = ()  # positions to which no later token of the sequences attends
    record: bool = (
        False  # whether this is the clean sequence going on: its keys and values join the cache
    )
    tokens: Sequence[
        tuple[int, ...]
    ] = ()  # at each wanted position: their probabilities must be exact


class _Block(NamedTuple):
    """Tokens `first` to `last` of a pass, which attend to `cached` clean tokens and to the pass from `begin` on."""

    context: Context
    cached: int
    begin: int
    first: int
    last: int


class Pass:
    """Sequences end to end: of every token the number of its sequence, its position there, and where that starts."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.masks: dict[int | None, list[tuple[int, Tensor]]] = {}  # by window, of each block
        self.blocks, self.rows = list[_Block](), list[int]()
        most = BLOCK_ON_CPU if branches[0].inputs.device.type == "cpu" else BLOCK
        self.sequences = [branch for branch in branches for _ in branch.inputs]
        lengths = torch.tensor([branch.inputs.shape[1] for branch in self.sequences])
        ends = lengths.cumsum(0)
        self.spans = [*zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
        self.number = torch.arange(len(lengths)).repeat_interleave(lengths)
        self.start = torch.tensor([branch.start for branch in self.sequences])[self.number]
        self.position = torch.arange(len(self.number)) - (ends - lengths)[self.number] + self.start
        for branch, (first, end) in zip(self.sequences, self.spans, strict=True):
            self.rows += [first + row - branch.start for row in branch.wanted]
            last = self.blocks[-1] if self.blocks else None
            if (
                last
                and last.context is branch.context
                and last.begin == last.first
                and end - last.first <= most
            ):
                self.blocks[-1] = last._replace(cached=max(last.cached, branch.start), last=end)
            else:  # a longer sequence in several blocks
                cuts = range(first, end, most)
                self.blocks += [
                    _Block(branch.context, branch.start, first, at, min(at + most, end))
                    for at in cuts
                ]

    def mask(self, block: _Block, window: int | None, like: Tensor) -> tuple[int, Tensor]:
        """The first cached token that a query sees, and the mask [1, 1, queries, keys]: 0 where one sees a key."""
        queries, own = slice(block.first, block.last), slice(block.begin, block.last)
        start, number = self.start[queries, None], self.number[queries, None]
        oldest = min(block.cached, max(0, int(start.min()) + 1 - window)) if window else 0
        before = torch.arange(oldest, block.cached)
        at = torch.cat([before, self.position[own]])
        distance = self.position[queries, None] - at
        near = (distance >= 0) & (distance < (window or torch.inf))
        seen = torch.cat([before < start, self.number[own] == number], 1) & near
        for each in number.unique().tolist():
            if hidden := self.sequences[each].hidden:
                seen &= ~((number == each) & torch.isin(at, torch.tensor(hidden)) & (distance > 0))
        mask = torch.zeros(seen.shape, dtype=like.dtype)  # at once: float32 has no float64's least
        mask = mask.masked_fill(~seen, torch.finfo(like.dtype).min)
        return oldest, mask.to(like.device)[None, None]

    def attend(
        self, own: Any, module: Any, *states: Any, sliding_window: int | None = None, **options: Any
    ) -> Any:
        """Causal attention of packed sequences [1, heads, tokens, dim], as a function of transformers' registry."""
        query, key, value, *_ = states
        own = eager if options.get("softcap") else own
        layer, out = int(module.layer_idx), list[Tensor]()
        for branch, (first, end) in zip(self.sequences, self.spans, strict=True):
            if branch.record:
                new = (x[..., first:end, :].clone() for x in (key, value))
                branch.context.cache[layer] = branch.context.after(0, branch.start, layer, *new)
                branch.context.windows[layer] = sliding_window
        if sliding_window not in self.masks:
            self.masks[sliding_window] = [
                self.mask(block, sliding_window, query) for block in self.blocks
            ]
        for block, (oldest, mask) in zip(self.blocks, self.masks[sliding_window], strict=True):
            k, v = (x[..., block.begin : block.last, :] for x in (key, value))
            k, v = block.context.after(oldest, block.cached, layer, k, v)
            out.append(
                own(
                    module, query[..., block.first : block.last, :], k, v, mask.to(query), **options
                )[0]
            )
        return torch.cat(out, 1), None


def whole_logits(lm: Any, branches: Sequence[Branch]) -> list[Tensor]:
    """Logits of every branch, all of which begin at 0, from batches of equally long sequences."""
    groups, found = dict[tuple[int, ...], list[int]](), dict[int, Tensor]()
    for number, branch in enumerate(branches):
        groups.setdefault((branch.inputs.shape[1], *branch.wanted), []).append(number)
    with running(lm.model):
        for (length, *rows), numbers in groups.items():
            inputs = torch.cat([branches[number].inputs for number in numbers])
            parts = inputs.split(max(1, lm.batch_tokens // length))
            logits = torch.cat([lm.output(part, positions=rows).logits for part in parts])
            found |= zip(
                numbers,
                logits.split([len(branches[number].inputs) for number in numbers]),
                strict=True,
            )
    return [found[number] for number in range(len(branches))]
