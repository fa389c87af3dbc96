"""Sequences of different lengths, and of different prompts, end to end in one forward pass.

They are one long sequence for everything but attention, so no token is computed twice. Sequences
attend together, by the model's own attention function and with one mask, to their clean beginnings
and to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from noiser.model.attention import eager
from noiser.model.layout import Layout
from noiser.model.memory import send
from noiser.model.runtime import running

# Tokens that attend together; a longer sequence is cut into such blocks.
BLOCK = 1024
BLOCK_ON_CPU = 128

# Tokens of several prompts that attend together on a CPU. What they do not see of each other is
# computed all the same, which costs a CPU more than another call.
MIXED_ON_CPU = 32

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

    def copy_cache(self) -> None:
        """Copies the keys and values, so that those of other prompts' passes can be freed."""
        for layer, (key, value) in self.cache.items():
            self.cache[layer] = (key.clone(), value.clone())


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


# Two sequences of prompt A, whose clean tokens 0 to 3 are cached: one leaves it at 2, one at 3; and
# one of prompt B, of which token 0 is cached.
#
#     row of the pass    0  1  2  3  4  5       sees cached A0 A1 A2 B0 | row 0 1 2 3 4 5
#     context            A  A  A  A  A  B       row 0, A2 :  x  x  .  . |     x . . . . .
#     number             0  0  0  1  1  2       row 2, A4 :  x  x  .  . |     x x x . . .
#     position           2  3  4  3  4  1       row 4, A4 :  x  x  x  . |     . . . x x .
#     start              2  2  2  3  3  1       row 5, B1 :  .  .  .  x |     . . . . . x
#
# All are short, so they are one block, whose keys are A0 A1 A2 B0 and the rows 0 to 5. A sequence
# that is longer than a block is cut into several, which share their keys.


@dataclass(eq=False)
class _Keys:
    """Keys that some sequences share: first tokens of contexts, and then the sequences' own rows.

    Attributes:
        cached: how many first tokens of each context.
        numbers: of the sequences, whose rows are `begin` to `end`.
        place: of the first key among all keys of the pass.
    """

    cached: dict[Context, int]
    numbers: list[int]
    begin: int
    end: int
    place: int = 0

    @property
    def of_contexts(self) -> int:
        """How many keys are cached."""
        return sum(self.cached.values())

    @property
    def count(self) -> int:
        """How many keys there are."""
        return self.of_contexts + self.end - self.begin

    def cached_key(self, context: Context) -> int:
        """Where the first cached key of a context stands among all keys of the pass."""
        place = self.place
        for other, count in self.cached.items():
            if other is context:
                break
            place += count
        return place

    def key_of(self, row: int) -> int:
        """Where the key of a row of the pass stands among all keys of the pass."""
        return self.place + self.of_contexts + row - self.begin


@dataclass(eq=False)
class _Block:
    """Rows `first` to `last` of a pass, which attend together; `lowest` is their lowest position.

    Of their keys they see none that stands after row `last`.
    """

    keys: _Keys
    first: int
    last: int
    lowest: int

    def seen(self, window: int | None) -> slice:
        """The keys of the pass that one of the rows may see."""
        keys = self.keys
        too_old = 0
        if window and len(keys.cached) == 1:  # the first keys stand at positions 0, 1, 2, ...
            too_old = max(0, self.lowest + 1 - window)
        return slice(keys.place + too_old, keys.key_of(self.last))

    def seen_of_contexts(self, window: int | None) -> int:
        """How many of the `seen` keys are cached; they are the first ones."""
        first_own = self.keys.key_of(self.keys.begin)
        return max(0, first_own - self.seen(window).start)


class _Tokens(NamedTuple):
    """Rows or keys of a pass: for each the context, the sequence, where it starts, the position.

    A cached token is of no sequence: its number is -1.
    """

    context: Int[Tensor, " tokens"]
    number: Int[Tensor, " tokens"]
    start: Int[Tensor, " tokens"]
    position: Int[Tensor, " tokens"]

    @classmethod
    def of(cls, stretches: Sequence[_Stretch], device: torch.device) -> _Tokens:
        """Those of stretches, end to end."""
        ends = [*accumulate(each.length for each in stretches)]
        columns: list[tuple[int, int, int, int]] = []
        for each, end in zip(stretches, ends, strict=True):
            # All tokens of a stretch stand as far from their position as its first one does.
            moved = each.position - (end - each.length)
            columns.append((each.context, each.number, each.start, moved))
        lengths = send(torch.tensor([each.length for each in stretches]), device)
        of_stretches = send(torch.tensor(columns), device)
        of_tokens = of_stretches.repeat_interleave(lengths, 0, output_size=ends[-1])
        context, number, start, moved = of_tokens.unbind(1)
        return cls(context, number, start, moved + torch.arange(ends[-1], device=device))

    def part(self, part: slice) -> _Tokens:
        """Some of them."""
        return _Tokens(*(each[part] for each in self))


class _Stretch(NamedTuple):
    """Consecutive tokens of one sequence, as of `_Tokens`; the first stands at `position`."""

    context: int
    number: int
    start: int
    position: int
    length: int


class Pass:
    """Sequences end to end in one pass.

    Attributes:
        sequences: the branch of each sequence.
        spans: the rows of each sequence, from the first up to the end.
        rows: the rows whose logits are wanted.
        numbers: of the contexts, in the order in which they come.
        tokens: of each row its context, its sequence and where that starts, and its position.
        keys: the same of the keys, which stand side by side as `key_groups` says.
        blocks: rows that attend together.
        hidden: which positions are hidden in each sequence; None where none is.
        log_gates: what is added to the attention that each sequence pays to a position, the
            logarithm of its gate; None where there are no gates. A token always sees itself.
        picture: for each row the number of a block of tokens that see each other, or -1; None
            where all are -1.
        masks: for each window the mask of each block, where there is room for them.
        around: a function that stands around the model's own attention, (own, module, queries,
            keys, values, mask, **options); or None.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.masks: dict[int | None, list[Tensor]] = {}
        self.around: Callable[..., Any] | None = None
        self.log_gates: Float[Tensor, "sequences positions"] | None = None
        self.numbers: dict[Context, int] = {}
        self.device = branches[0].inputs.device
        self.sequences: list[Branch] = []
        for branch in branches:
            self.sequences += [branch] * len(branch.inputs)
        lengths = [branch.inputs.shape[1] for branch in self.sequences]
        ends = [*accumulate(lengths)]
        self.spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        self.rows: list[int] = []
        for branch, (first, _) in zip(self.sequences, self.spans, strict=True):
            self.rows += [first + position - branch.start for position in branch.wanted]
        on_cpu = self.device.type == "cpu"
        size = BLOCK_ON_CPU if on_cpu else BLOCK
        mixed = min(size, MIXED_ON_CPU) if on_cpu else size
        self.blocks = _blocks(self.sequences, self.spans, size, mixed)
        self.key_groups = [*dict.fromkeys(block.keys for block in self.blocks)]
        self.tokens, self.keys = self._tokens_and_keys()
        self.picture = self._picture_blocks()
        self.hidden = self._hidden_positions()
        self.recorded = [branch for branch in self.sequences if branch.record]

    def _tokens_and_keys(self) -> tuple[_Tokens, _Tokens]:
        """What each row is, and each key; places the keys."""
        rows: list[_Stretch] = []
        for number, (branch, (first, end)) in enumerate(
            zip(self.sequences, self.spans, strict=True)
        ):
            context = self.numbers.setdefault(branch.context, len(self.numbers))
            rows.append(_Stretch(context, number, branch.start, branch.start, end - first))
        keys: list[_Stretch] = []
        place = 0
        for group in self.key_groups:
            group.place = place
            place += group.count
            for context, count in group.cached.items():
                keys.append(_Stretch(self.numbers[context], -1, -1, 0, count))
            keys += [rows[number] for number in group.numbers]
        return _Tokens.of(rows, self.device), _Tokens.of(keys, self.device)

    def _hidden_positions(self) -> Bool[Tensor, "sequences positions"] | None:
        """Which positions are hidden in each sequence; None where none is."""
        if not any(branch.hidden for branch in self.sequences):
            return None
        longest = max(len(branch.context.inputs) for branch in self.sequences)
        hidden = torch.zeros(len(self.sequences), longest, dtype=torch.bool)
        for number, branch in enumerate(self.sequences):
            hidden[number, list(branch.hidden)] = True
        return send(hidden, self.device)

    @cached_property
    def _recorded_keys(self) -> Int[Tensor, " keys"]:
        """The keys of clean sequences that go on: the cached ones, and those of their rows.

        Made where the first layer asks: most passes record nothing.
        """
        places: list[int] = []
        for group in self.key_groups:
            for number in group.numbers:
                branch = self.sequences[number]
                if branch.record:
                    cached = group.cached_key(branch.context)
                    first, end = self.spans[number]
                    places += range(cached, cached + branch.start)
                    places += range(group.key_of(first), group.key_of(end))
        return send(torch.tensor(places, dtype=torch.long), self.device)

    def mask(self, block: _Block, window: int | None, dtype: torch.dtype) -> Tensor:
        """A block's mask, [1, 1, queries, keys that are `seen`].

        It is 0 or the logarithm of a gate where a query sees a key, and the least number elsewhere.
        """
        seen = block.seen(window)
        queries = self.tokens.part(slice(block.first, block.last))
        keys = self.keys.part(seen)
        visible = self._visible(block, window, queries, keys)
        added = torch.zeros((), device=self.device)
        if self.log_gates is not None:
            gates = self.log_gates[queries.number[:, None], keys.position]
            added = torch.where(keys.position < queries.position[:, None], gates, added)
        # In its own type before it is filled: float32 does not hold the least float64.
        return torch.where(visible, added.to(dtype), torch.finfo(dtype).min)[None, None]

    def _visible(
        self, block: _Block, window: int | None, queries: _Tokens, keys: _Tokens
    ) -> Bool[Tensor, "queries keys"]:
        """Which keys each query of a block sees."""
        of_query = _Tokens(*(each[:, None] for each in queries))
        count = block.seen_of_contexts(window)
        cached = keys.part(slice(0, count))
        own = keys.part(slice(count, None))
        clean = (cached.context == of_query.context) & (cached.position < of_query.start)
        allowed = own.position <= of_query.position
        if self.picture is not None:
            allowed |= self._same_picture(block, len(own.position))
        visible = torch.cat([clean, (own.number == of_query.number) & allowed], 1)
        if window:
            visible &= keys.position > of_query.position - window
        if self.hidden is not None:
            is_hidden = self.hidden[of_query.number, keys.position]
            is_itself = keys.position == of_query.position  # a token always attends to itself
            visible &= ~is_hidden | is_itself
        return visible

    def _same_picture(self, block: _Block, count: int) -> Bool[Tensor, "queries rows"]:
        """Whether each of a block's last `count` rows stands in the query's block of a picture.

        Cached tokens of another sequence's block stand before all of its tokens anyway.
        """
        assert self.picture is not None
        of_rows = self.picture[block.last - count : block.last]
        of_queries = self.picture[block.first : block.last, None]
        return (of_queries >= 0) & (of_queries == of_rows)

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
        return torch.cat(rows).to(self.device)

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
            is_picture = torch.zeros(self.spans[-1][1], dtype=torch.bool)
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
        if options.get("softcap") or self.log_gates is not None:
            own = eager  # others have no gradients of what is added
        if self.around is not None:
            own = partial(self.around, own)
        layer = int(module.layer_idx)
        keys, values = self.keys_and_values(layer, key, value, sliding_window)
        outputs: list[Tensor] = []
        masks = self._masks(sliding_window, query.dtype)
        for block, mask in zip(self.blocks, masks, strict=True):
            seen = block.seen(sliding_window)
            result = own(
                module,
                query[..., block.first : block.last, :],
                keys[..., seen, :],
                values[..., seen, :],
                mask.to(query),
                **options,
            )
            outputs.append(result[0])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1), None

    def keys_and_values(
        self, layer: int, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, [1, heads, keys, dim], from those of the rows.

        Those of clean sequences join their caches.
        """
        keys = self._stacked(layer, 0, key)
        values = self._stacked(layer, 1, value)
        if self.recorded:
            self._record(layer, keys, values, window)
        return keys, values

    def _stacked(self, layer: int, which: int, own: Tensor) -> Float[Tensor, "1 heads keys dim"]:
        """All keys (0) or values (1) of a layer, as `key_groups` has them."""
        parts: list[Tensor] = []
        for group in self.key_groups:
            for context, count in group.cached.items():
                if count:
                    parts.append(context.cache[layer][which][..., :count, :].to(own.device))
            parts.append(own[..., group.begin : group.end, :])
        return own if len(parts) == len(self.key_groups) else torch.cat(parts, -2)

    def _masks(self, window: int | None, dtype: torch.dtype) -> Iterable[Tensor]:
        """The mask of each block, kept or made as they are taken."""
        if window in self.masks:
            return self.masks[window]
        masks = (self.mask(block, window, dtype) for block in self.blocks)
        numbers = 0
        for block in self.blocks:
            seen = block.seen(window)
            numbers += (block.last - block.first) * (seen.stop - seen.start)
        if numbers > KEPT_NUMBERS:
            return masks
        self.masks[window] = list(masks)
        return self.masks[window]

    def _record(self, layer: int, keys: Tensor, values: Tensor, window: int | None) -> None:
        """Sets the caches of clean sequences: one copy of them all."""
        lengths = [branch.start + branch.inputs.shape[1] for branch in self.recorded]
        places = self._recorded_keys.to(keys.device)
        keys_of = keys.index_select(-2, places).split(lengths, -2)
        values_of = values.index_select(-2, places).split(lengths, -2)
        for branch, key, value in zip(self.recorded, keys_of, values_of, strict=True):
            branch.context.cache[layer] = (key, value)
            branch.context.windows[layer] = window


def _blocks(
    sequences: Sequence[Branch], spans: Sequence[tuple[int, int]], size: int, mixed: int
) -> list[_Block]:
    """Blocks that attend together: short sequences share one, long ones are cut.

    A block has up to `size` rows, those of several prompts up to `mixed`.
    """
    blocks: list[_Block] = []
    for number, (branch, (first, end)) in enumerate(zip(sequences, spans, strict=True)):
        context = branch.context
        previous = blocks[-1] if blocks else None
        if previous is not None and _fits(previous, branch, end, size, mixed):
            keys = previous.keys
            keys.cached[context] = max(keys.cached.get(context, 0), branch.start)
            keys.numbers.append(number)
            keys.end = end
            previous.last = end
            previous.lowest = min(previous.lowest, branch.start)
            continue
        keys = _Keys({context: branch.start}, [number], first, end)
        moved = first - branch.start  # from a position to its row
        for start, stop in _cuts(branch.layout, branch.start, end - moved, size):
            blocks.append(_Block(keys, start + moved, stop + moved, start))
    return blocks


def _fits(block: _Block, branch: Branch, end: int, size: int, mixed: int) -> bool:
    """Whether a sequence that ends at row `end` can join a block."""
    keys = block.keys
    holds_whole_sequences = (block.first, block.last) == (keys.begin, keys.end)
    if not holds_whole_sequences:
        return False
    is_known = branch.context in keys.cached
    if is_known and len(keys.cached) == 1:
        return end - block.first <= size
    # Rows see no cached token of another prompt, so there should be few of them.
    cached = keys.of_contexts if is_known else keys.of_contexts + branch.start
    return max(end - block.first, cached) <= mixed


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
