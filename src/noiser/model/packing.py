"""Sequences of different lengths, and of different prompts, end to end in one forward pass.

They are one long sequence for everything but attention, so no token is computed twice. A few
sequences of one prompt attend, by the model's own attention function and with one mask, to their
clean beginning and to themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.model.attention import eager
from noiser.model.layout import Layout
from noiser.model.runtime import running

# Tokens that attend together; a longer sequence is cut into such blocks.
BLOCK = 1024
BLOCK_ON_CPU = 128

# Masks of a pass are kept for its next layers up to so many numbers, and made again beyond: those
# of a sequence of T tokens are T²/2 numbers.
KEPT_NUMBERS = 2**26

KeysValues = dict[int, tuple[Tensor, Tensor]]
"""The keys and values of each layer, [1, heads, tokens, dim]."""


@dataclass(eq=False)
class Context:
    """A clean sequence, with the keys and values of its tokens that have run.

    Attributes:
        inputs: rows of the embedding table times `scale`.
        scale: the factor that the model's embedding module puts on rows.
        cache: keys and values of the first `done` tokens, also outside of windows; of more tokens
            where a later pass failed.
        done: how many tokens have run.
        windows: the sliding window of each layer, or None.
        supports_packing: whether sequences that leave it run end to end with others, and not each
            from its beginning.
        supports_cached_prefix: whether the model itself goes on after these keys and values.
        layout: of the tokens of a prompt with pictures, which are followed by text; or None.
    """

    inputs: Float[Tensor, "length dim"]
    scale: float
    cache: KeysValues = field(default_factory=dict[int, tuple[Tensor, Tensor]], repr=False)
    done: int = 0
    windows: dict[int, int | None] = field(default_factory=dict[int, int | None], repr=False)
    supports_packing: bool = False
    supports_cached_prefix: bool = False
    layout: Layout | None = None

    @property
    def samples(self) -> int:
        """How many answers each value is the mean of: 1 where probabilities are known."""
        return 1

    @property
    def left(self) -> int | None:
        """The requests that are left of a chat model's `max_calls`; None of other models."""
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """What else is worth keeping with a result."""
        return {}

    @property
    def rows(self) -> Float[Tensor, "length dim"]:
        """Rows of the embedding table, float32."""
        return self.inputs.float() / self.scale

    def extend(self, inputs: Float[Tensor, "more dim"]) -> None:
        """Appends tokens, which have yet to run."""
        self.inputs = torch.cat([self.inputs, inputs])

    def shorten(self, length: int) -> None:
        """Takes out the tokens after the first `length`."""
        self.inputs = self.inputs[:length]
        self.done = min(self.done, length)

    def after(
        self, start: int, stop: int, layer: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, after the cached ones of positions `start` to `stop`.

        All of them are [batch, heads, tokens, dim].
        """
        if start >= stop:
            return key, value
        clean_key, clean_value = self.cache[layer]
        all_keys = _after(clean_key[..., start:stop, :], key)
        all_values = _after(clean_value[..., start:stop, :], value)
        return all_keys, all_values


def _after(clean: Tensor, own: Tensor) -> Tensor:
    """Clean keys or values, the same for all sequences, before the sequences' own ones."""
    copies = clean.expand(len(own), -1, -1, -1)
    return torch.cat([copies.to(own.device), own], -2)


def continued(cache: KeysValues, length: int = 0, copies: int = 1) -> dict[str, Any]:
    """The arguments with which a pass of sequences goes on after `length` cached tokens.

    The first argument is the cache.
    """
    from transformers import DynamicCache
    from transformers.masking_utils import create_causal_mask

    growing = DynamicCache()  # without a configuration, so that it keeps all
    for layer, (key, value) in sorted(cache.items()):
        key_copies = key[..., :length, :].expand(copies, -1, -1, -1)
        value_copies = value[..., :length, :].expand(copies, -1, -1, -1)
        growing.update(key_copies, value_copies, layer)
    is_new = "cache" in signature(create_causal_mask).parameters  # since transformers 5.24
    name = "cache" if is_new else "past_key_values"
    return {name: growing, "use_cache": True}


@dataclass(eq=False)
class Branch:
    """Equally long sequences that leave a clean one at `start`, up to where it is cached.

    Attributes:
        context: the clean sequence.
        start: the position of their first token.
        inputs: the rows that the model reads.
        wanted: positions whose logits are wanted, counted from the beginning of the clean sequence.
        hidden: positions to which no later token of the sequences attends.
        record: whether this is the clean sequence going on: its keys and values join the cache.
        tokens: at each wanted position, the ids whose probabilities must be exact.
        layout: how the tokens of a sequence with pictures stand, from its beginning; or None.
    """

    context: Context
    start: int
    inputs: Float[Tensor, "copies length dim"]
    wanted: Sequence[int]
    hidden: tuple[int, ...] = ()
    record: bool = False
    tokens: Sequence[tuple[int, ...]] = ()
    layout: Layout | None = None

    def pieces(self, size: int) -> list[Branch]:
        """The sequences cut into parts of at most so many tokens, which run one after the other.

        A block of tokens that see each other stays whole, however long it is.
        """
        length = self.inputs.shape[1]
        if length <= size:
            return [self]
        pieces: list[Branch] = []
        for start, stop in _cuts(self.layout, self.start, self.start + length, size):
            inputs = self.inputs[:, start - self.start : stop - self.start]
            wanted: list[int] = []
            tokens: list[tuple[int, ...]] = []
            for index, position in enumerate(self.wanted):
                if start <= position < stop:
                    wanted.append(position)
                    tokens += self.tokens[index : index + 1]
            pieces.append(replace(self, start=start, inputs=inputs, wanted=wanted, tokens=tokens))
        return pieces


def _cuts(layout: Layout | None, start: int, stop: int, size: int) -> Iterable[tuple[int, int]]:
    """Positions `start` to `stop` in parts of at most `size`, without a cut through a block."""
    while start < stop:
        end = min(start + size, stop)
        if layout is not None and end < stop:
            begin = layout.begin(end)
            end = begin if begin > start else min(layout.end(end), stop)
        yield start, end
        start = end


# Two sequences of one prompt, whose clean tokens 0 to 3 are cached: a leaves it at 2, b at 3.
#
#     row of the pass    0  1  2  3  4       sees cached 0 1 2 | row 0 1 2 3 4
#     number             a  a  a  b  b       row 0, a 2:   x x .      x . . . .
#     position           2  3  4  3  4       row 2, a 4:   x x .      x x x . .
#     start              2  2  2  3  3       row 4, b 4:   x x x      . . . x x
#
# Both are short, so they are one block: _Block(cached=3, begin=0, first=0, last=5).
# If a block held two tokens, a alone would be _Block(2, 0, 0, 2) and _Block(2, 0, 2, 3).


class _Block(NamedTuple):
    """Rows `first` to `last` of a pass: tokens that attend together.

    They attend to the first `cached` clean tokens, and to rows of the pass from `begin` on.
    """

    context: Context
    cached: int
    begin: int
    first: int
    last: int


class Pass:
    """Sequences end to end in one pass.

    Attributes:
        sequences: the branch of each sequence.
        spans: the rows of each sequence, from the first up to the end.
        number: for each row the number of its sequence.
        start: for each row the position at which its sequence leaves the clean one.
        position: for each row its position in the sequence.
        rows: the rows whose logits are wanted.
        blocks: rows that attend together.
        picture: for each row the number of a block of tokens that see each other, or -1; None
            where all are -1.
        masks: for each window, the first cached token and the mask of each block, where there is
            room for them.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.masks: dict[int | None, list[tuple[int, Tensor]]] = {}
        self.sequences = [branch for branch in branches for _ in branch.inputs]
        lengths = torch.tensor([branch.inputs.shape[1] for branch in self.sequences])
        ends = lengths.cumsum(0)
        starts = ends - lengths
        self.spans = list(zip(starts.tolist(), ends.tolist(), strict=True))
        self.number = torch.arange(len(lengths)).repeat_interleave(lengths)
        self.start = torch.tensor([branch.start for branch in self.sequences])[self.number]
        place = torch.arange(len(self.number)) - starts[self.number]  # in the sequence as it runs
        self.position = place + self.start
        self.rows: list[int] = []
        for branch, (first, _) in zip(self.sequences, self.spans, strict=True):
            self.rows += [first + position - branch.start for position in branch.wanted]
        self.picture = self._picture_blocks()
        on_cpu = branches[0].inputs.device.type == "cpu"
        self.blocks = _blocks(self.sequences, self.spans, BLOCK_ON_CPU if on_cpu else BLOCK)

    def mask(self, block: _Block, window: int | None, like: Tensor) -> tuple[int, Tensor]:
        """The first cached token that a query sees, and the mask [1, 1, queries, keys].

        The mask is 0 where a query sees a key, and the least number elsewhere.
        """
        queries = slice(block.first, block.last)
        own_keys = slice(block.begin, block.last)
        start = self.start[queries, None]
        number = self.number[queries, None]
        position = self.position[queries, None]
        oldest = 0
        if window:
            oldest = min(block.cached, max(0, int(start.min()) + 1 - window))
        cached = torch.arange(oldest, block.cached)
        key_position = torch.cat([cached, self.position[own_keys]])
        distance = position - key_position
        sees = distance >= 0
        if self.picture is not None:
            own = self.picture[queries, None]
            # Cached tokens of another sequence's block stand before all of its tokens anyway.
            not_cached = torch.cat([torch.full((len(cached),), -1), self.picture[own_keys]])
            sees |= (own >= 0) & (own == not_cached)
        near = sees & (distance < (window or torch.inf))
        same_sequence = self.number[own_keys] == number
        visible = torch.cat([cached < start, same_sequence], 1) & near
        for sequence in number.unique().tolist():
            hidden = self.sequences[sequence].hidden
            if hidden:
                is_hidden = torch.isin(key_position, torch.tensor(hidden))
                # A token always attends to itself.
                visible &= ~((number == sequence) & is_hidden & (distance != 0))
        # In its own type from the beginning: float32 does not hold the least float64.
        mask = torch.zeros(visible.shape, dtype=like.dtype)
        mask = mask.masked_fill(~visible, torch.finfo(like.dtype).min)
        return oldest, mask.to(like.device)[None, None]

    def _picture_blocks(self) -> Tensor | None:
        """The numbers of blocks of tokens that see each other, for each row."""
        if all(each.layout is None or each.layout.blocks is None for each in self.sequences):
            return None
        rows: list[Tensor] = []
        for branch, (first, end) in zip(self.sequences, self.spans, strict=True):
            blocks = None if branch.layout is None else branch.layout.blocks
            if blocks is None:
                rows.append(torch.full((end - first,), -1))
            else:
                rows.append(blocks[branch.start : branch.start + end - first])
        return torch.cat(rows)

    def handed(self, device: torch.device) -> dict[str, Any]:
        """Further arguments of the text model: positions of several axes, and deep features.

        Nothing where no sequence has pictures.
        """
        layouts = [branch.layout for branch in self.sequences]
        given: dict[str, Any] = {}
        known = [layout for layout in layouts if layout is not None]
        axes = max(
            (0 if each.positions is None else len(each.positions) for each in known), default=0
        )
        if axes:
            places: list[Tensor] = []
            for branch, (first, end) in zip(self.sequences, self.spans, strict=True):
                stop = branch.start + end - first
                positions = None if branch.layout is None else branch.layout.positions
                if positions is None:
                    positions = torch.arange(stop).expand(axes, -1)
                places.append(positions[:, branch.start : stop])
            position_ids = torch.cat(places, 1).to(device)
            given["position_ids"] = position_ids[:, None] if axes > 1 else position_ids
        layers = max((len(each.deep) for each in known), default=0)
        if layers:
            is_picture = torch.zeros(len(self.number), dtype=torch.bool)
            features: list[list[Tensor]] = [[] for _ in range(layers)]
            for branch, (first, end) in zip(self.sequences, self.spans, strict=True):
                layout = branch.layout
                if layout is None:
                    continue
                own = slice(branch.start, branch.start + end - first)
                is_picture[first:end] = layout.is_picture[own]
                for values, of_layer in zip(layout.deep, features, strict=True):
                    of_layer.append(values[own][layout.is_picture[own].to(values.device)])
            given["visual_pos_masks"] = is_picture[None].to(device)
            given["deepstack_visual_embeds"] = [torch.cat(each) for each in features]
        return given

    def attend(
        self, own: Any, module: Any, *states: Any, sliding_window: int | None = None, **options: Any
    ) -> Any:
        """Causal attention of packed sequences, as a function of transformers' registry.

        `states` begin with queries, keys and values [1, heads, tokens, dim]; `own` is the model's
        attention function.
        """
        query, key, value, *_ = states
        if options.get("softcap"):
            own = eager
        layer = int(module.layer_idx)
        self._record(layer, key, value, sliding_window)
        outputs: list[Tensor] = []
        for block, (oldest, mask) in zip(
            self.blocks, self._masks(sliding_window, query), strict=True
        ):
            block_query = query[..., block.first : block.last, :]
            block_key, block_value = block.context.after(
                oldest,
                block.cached,
                layer,
                key[..., block.begin : block.last, :],
                value[..., block.begin : block.last, :],
            )
            result = own(module, block_query, block_key, block_value, mask.to(query), **options)
            outputs.append(result[0])
        return torch.cat(outputs, 1), None

    def _masks(self, window: int | None, like: Tensor) -> Iterable[tuple[int, Tensor]]:
        """The first cached token and the mask of each block, kept or made as they are taken."""
        if window in self.masks:
            return self.masks[window]
        masks = (self.mask(block, window, like) for block in self.blocks)
        numbers = sum(
            (block.last - block.first) * (block.cached + block.last - block.begin)
            for block in self.blocks
        )
        if numbers > KEPT_NUMBERS:
            return masks
        self.masks[window] = list(masks)
        return self.masks[window]

    def _record(self, layer: int, key: Tensor, value: Tensor, window: int | None) -> None:
        """Adds the keys and values of clean sequences to their caches."""
        for branch, (first, end) in zip(self.sequences, self.spans, strict=True):
            if branch.record:
                context = branch.context
                new_key = key[..., first:end, :].clone()
                new_value = value[..., first:end, :].clone()
                context.cache[layer] = context.after(0, branch.start, layer, new_key, new_value)
                context.windows[layer] = window


def _blocks(
    sequences: Sequence[Branch], spans: Sequence[tuple[int, int]], size: int
) -> list[_Block]:
    """Blocks that attend together: short sequences of a context share one, long ones are cut."""
    blocks: list[_Block] = []
    for branch, (first, end) in zip(sequences, spans, strict=True):
        previous = blocks[-1] if blocks else None
        if previous is not None and _fits(previous, branch, end, size):
            cached = max(previous.cached, branch.start)
            blocks[-1] = previous._replace(cached=cached, last=end)
            continue
        moved = first - branch.start  # from a position to its row
        for start, stop in _cuts(branch.layout, branch.start, end - moved, size):
            block = _Block(branch.context, branch.start, first, start + moved, stop + moved)
            blocks.append(block)
    return blocks


def _fits(block: _Block, branch: Branch, end: int, size: int) -> bool:
    """Whether a sequence that ends at row `end` can join a block."""
    holds_whole_sequences = block.begin == block.first  # not so for later parts of a cut sequence
    if block.context is not branch.context or not holds_whole_sequences:
        return False
    return end - block.first <= size


def whole_logits(lm: Any, branches: Sequence[Branch]) -> list[Tensor]:
    """The logits of branches that all begin at 0, from batches of equally long sequences."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, branch in enumerate(branches):
        length = branch.inputs.shape[1]
        groups.setdefault((length, *branch.wanted), []).append(number)
    logits_of: dict[int, Tensor] = {}
    with running(lm.model):
        for (length, *rows), numbers in groups.items():
            inputs = torch.cat([branches[number].inputs for number in numbers])
            batches = inputs.split(max(1, lm.batch_tokens // length))
            logits = torch.cat([lm.output(batch, positions=rows).logits for batch in batches])
            copies = [len(branches[number].inputs) for number in numbers]
            for number, part in zip(numbers, logits.split(copies), strict=True):
                logits_of[number] = part
    return [logits_of[number] for number in range(len(branches))]
