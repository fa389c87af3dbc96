"""Sequences of different lengths, and of different prompts, in one forward pass, without padding.

Perturbed sequences differ in where they branch off the clean one. Laid end to end they are one long sequence
for everything in a transformer but attention, so matrix products are as large as they can be and no token is computed
twice. Attention is computed tile by tile, a stretch of a sequence's tokens and what they may see of the clean beginning
and of the sequence itself; tiles of similar sizes are one block, which attends in one call.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from noiser.model.prefix import CausalModel, Prefix, join_prefixes
from noiser.model.runtime import attention_implementation

NAME = "noiser_packed"

BLOCK_COST = {"cpu": 4e3}
"""What the calls for one more block cost, in products of a query and a key, measured on a CPU; elsewhere OTHER_COST."""

OTHER_COST = 4e6

BLOCK_KEYS = 2**15
"""The most keys of a block's tiles together: they are copied side by side."""

TILE = 256
"""The most tokens of a tile: none is compared with what is after its tile, or before its tile's window."""

MASKS = 2**24
"""The most numbers in the masks that are kept from layer to layer; larger ones are built again for each."""


class Group(NamedTuple):
    """Sequences that continue the clean sequence from the same position, all equally long.

    Attributes:
        start: the position of their first token; what comes before it is the clean sequence.
        embeddings: [sequences, length, dim].
        rows: positions, counted from the beginning of the clean sequence, whose logits are wanted; the same for each.
        tokens: for each row the tokens whose probabilities must be exact, where a server does not send all.
        hidden: positions to which no later token of the sequences attends, ascending.
    """

    start: int
    embeddings: Float[Tensor, "sequences length dim"]
    rows: Sequence[int]
    tokens: Sequence[tuple[int, ...]] = ()
    hidden: tuple[int, ...] = ()


class Branches(NamedTuple):
    """Sequences that branch off one clean sequence.

    Attributes:
        prefix: what is cached of the clean sequence; empty where nothing of it has run.
        groups: the sequences.
        clean: whether the first group is the clean sequence itself, from where the cache ends: the others may branch
            off within it, and it joins the cache.
    """

    prefix: Prefix
    groups: Sequence[Group]
    clean: bool = False

    @property
    def tokens(self) -> int:
        """How many tokens run."""
        return sum(group.embeddings.shape[0] * group.embeddings.shape[1] for group in self.groups)

    @property
    def rows(self) -> int:
        """How many rows of logits are wanted."""
        return sum(len(group.embeddings) * len(group.rows) for group in self.groups)


class Packed(NamedTuple):
    """What comes of branches.

    Attributes:
        logits: for each group those of its rows, in the precision that the model has them in.
        prefix: the cached clean sequence, with what has run of it.
        left_out: the most probability that any of the distributions has on tokens that a server did not send.
    """

    logits: list[Float[Tensor, "sequences rows vocab"]]
    prefix: Prefix
    left_out: float = 0.0


class _Segment(NamedTuple):
    """Where a group lies: `copies` sequences of `length` tokens from `offset` in the packed sequence.

    The clean sequence's first `cached` positions are the keys from `base` on, those after them from `clean` on.
    """

    start: int
    copies: int
    length: int
    offset: int
    base: int
    cached: int
    clean: int
    hidden: tuple[int, ...] = ()


class _Tile(NamedTuple):
    """Neighbouring tokens of a segment's sequences: positions `first` to `stop`, which see keys from `oldest` on."""

    segment: _Segment
    first: int
    stop: int
    oldest: int

    @property
    def queries(self) -> int:
        return self.stop - self.first

    @property
    def keys(self) -> int:
        return self.stop - self.oldest


class _Block(NamedTuple):
    """Tiles that attend in one call.

    Attributes:
        queries: [sequences, longest], indices into the packed sequence; short ones repeat their last.
        distinct: which of them are not repetitions, as indices into the flattened queries; None for all.
        keys: [sequences, most], indices into the keys; after those of a short tile they point anywhere.
        positions: [sequences, longest] or [1, longest], of the queries.
        key_positions: [sequences, most] or [1, most], positions of the keys.
        hidden: whether later queries do not attend to a key; None where none is hidden.
    """

    queries: Int[Tensor, "sequences longest"]
    distinct: Int[Tensor, " distinct"] | None
    keys: Int[Tensor, "sequences most"]
    positions: Int[Tensor, "sequences_or_one longest"]
    key_positions: Int[Tensor, "sequences_or_one most"]
    hidden: Bool[Tensor, "sequences most"] | None

    def to(self, device: torch.device) -> _Block:
        """The same on a device."""
        return _Block(*(None if x is None else x.to(device) for x in self))  # pyright: ignore

    def seen(self, window: int | None) -> Bool[Tensor, "sequences_or_one longest most"]:
        """Whether a query sees a key."""
        distance = self.positions[:, :, None] - self.key_positions[:, None]
        seen = (distance >= 0) & (distance < window) if window else distance >= 0
        return seen if self.hidden is None else seen & ~(self.hidden[:, None] & (distance > 0))


class Layout:
    """Positions in the packed sequence and among the keys, and the windows that the layers named."""

    def __init__(self, packs: Sequence[Branches], device: torch.device) -> None:
        self.cached = [
            pack.prefix.length if pack.clean else max(group.start for group in pack.groups) for pack in packs
        ]
        self.windows: dict[int, int | None] = {}
        self.segments: list[_Segment] = []
        offset, base, self._new = 0, 0, sum(self.cached)
        for pack, cached in zip(packs, self.cached, strict=True):
            clean = self._new + offset
            for start, embeddings, _, _, hidden in pack.groups:
                count, length = embeddings.shape[:2]
                self.segments.append(_Segment(start, count, length, offset, base, cached, clean, hidden))
                offset += count * length
            base += cached
        self._device = device
        self._longest = max(segment.start + segment.length for segment in self.segments)
        self._blocks: dict[int | None, list[_Block]] = {}
        self._masks: dict[tuple[int, int | None, int, str], Tensor] = {}

    def bounding(self, window: int | None) -> int | None:
        """A layer's window; None where it bounds nothing."""
        return None if window is None or window >= self._longest else window

    def blocks(self, window: int | None) -> list[_Block]:
        """What attends in one call each in layers with this window."""
        if window not in self._blocks:
            cost = BLOCK_COST.get(self._device.type, OTHER_COST)
            alike = _alike([tile for segment in self.segments for tile in _tiles(segment, window)], cost)
            self._blocks[window] = [_block(tiles, self._new).to(self._device) for tiles in alike]
        return self._blocks[window]

    def mask(
        self, number: int, window: int | None, repeats: int, like: Tensor
    ) -> Float[Tensor, "some one queries keys"]:
        """0 where a query of a block sees a key, -inf elsewhere; the queries `repeats` times."""
        key = (number, window, repeats, str(like.device))
        if key in self._masks:
            return self._masks[key]
        seen = self.blocks(window)[number].seen(window).repeat(1, repeats, 1)[:, None]
        mask = torch.where(seen, 0.0, -torch.inf).to(like)
        if mask.numel() + sum(kept.numel() for kept in self._masks.values()) <= MASKS:
            self._masks[key] = mask
        return mask


def _tiles(segment: _Segment, window: int | None) -> list[_Tile]:
    """A segment, cut along its tokens where it is long, and across its sequences where their keys are too many."""
    stop = segment.start + segment.length
    whole = segment.length <= TILE
    cuts = [] if whole else range((segment.start // TILE + 1) * TILE, stop, TILE)  # the same cuts for all: alike tiles
    tiles: list[_Tile] = []
    for first, last in pairwise([segment.start, *cuts, stop]):
        oldest = max(0, first + 1 - window) if window else 0
        size = max(1, BLOCK_KEYS // (last - oldest))
        for copy in range(0, segment.copies, size):
            part = segment._replace(
                copies=min(size, segment.copies - copy), offset=segment.offset + copy * segment.length
            )
            tiles.append(_Tile(part, first, last, oldest))
    return tiles


def _alike(tiles: Sequence[_Tile], cost: float) -> list[list[_Tile]]:
    """Tiles in blocks of similar sizes, so that what is computed for nothing costs less than one more block."""
    blocks: list[list[_Tile]] = []
    useful = sequences = longest = most = 0
    for tile in sorted(tiles, key=lambda tile: (tile.queries, tile.keys, tile.segment.offset)):
        alone = (tile.segment.copies, tile.queries, tile.keys)
        together = (sequences + alone[0], max(longest, tile.queries), max(most, tile.keys))
        wasted = prod(together) - useful - prod(alone)
        if not blocks or wasted > cost or together[0] * together[2] > BLOCK_KEYS:
            blocks.append([])
            useful, together = 0, alone
        useful += prod(alone)
        sequences, longest, most = together
        blocks[-1].append(tile)
    return blocks


def _block(tiles: Sequence[_Tile], new: int) -> _Block:
    """Tiles that attend in one call; `new` is the index of the first key that is not cached."""
    counts = torch.tensor([tile.segment.copies for tile in tiles])
    columns = zip(*((*tile.segment[:-1], tile.first, tile.stop, tile.oldest) for tile in tiles), strict=True)
    start, _, length, offset, base, cached, clean, first, stop, oldest = (
        torch.tensor(values).repeat_interleave(counts)[:, None] for values in columns
    )
    before = torch.cumsum(counts, 0) - counts
    offset = offset + (torch.arange(len(offset)) - before.repeat_interleave(counts))[:, None] * length
    counted = stop - first
    steps = torch.arange(int(counted.max()))
    positions = first + torch.minimum(steps, counted - 1)
    at = oldest + torch.arange(int((stop - oldest).max()))
    keys = torch.where(at < cached, base + at, clean + at - cached)
    keys = torch.where(at < start, keys, new + offset + torch.minimum(at, stop - 1) - start)
    return _Block(
        queries=offset + positions - start,
        distinct=None if _same(counted) else (steps < counted).flatten().nonzero()[:, 0],
        keys=keys,
        positions=positions[:1] if _same(positions) else positions,
        key_positions=at[:1] if _same(at) else at,
        hidden=_hidden(tiles, keys.shape),
    )


def _hidden(tiles: Sequence[_Tile], shape: Sequence[int]) -> Bool[Tensor, "sequences most"] | None:
    """Which keys of each of the tiles' sequences are hidden; None where none is."""
    if not any(tile.segment.hidden for tile in tiles):
        return None
    hidden = torch.zeros(*shape, dtype=torch.bool)
    row = 0
    for tile in tiles:
        columns = [place - tile.oldest for place in tile.segment.hidden if tile.oldest <= place < tile.stop]
        hidden[row : row + tile.segment.copies, columns] = True
        row += tile.segment.copies
    return hidden


def _same(rows: Int[Tensor, "rows some"]) -> bool:
    return bool((rows == rows[:1]).all())


_layout: contextvars.ContextVar[Layout] = contextvars.ContextVar("layout")


def packed_logits(lm: CausalModel, packs: Sequence[Branches], layout: Layout | None = None) -> list[Packed]:
    """Logits of every group's rows of every pack, from one forward pass.

    In every layer the keys and values of all caches come before those of the pass, so that each token's clean
    beginning is there wherever it was run. A layout of the caller's keeps the windows that the layers named.
    """
    from transformers import AttentionInterface

    layout = layout or Layout(packs, lm.device)
    AttentionInterface.register(NAME, _attend)
    groups = [group for pack in packs for group in pack.groups]
    rows, positions = [], []
    for group, segment in zip(groups, layout.segments, strict=True):
        first = segment.offset - segment.start
        rows += [first + s * segment.length + row for s in range(segment.copies) for row in group.rows]
        positions.append(torch.arange(segment.start, segment.start + segment.length).repeat(segment.copies))
    cache = join_prefixes([pack.prefix for pack in packs], layout.cached)
    token = _layout.set(layout)
    try:
        with attention_implementation(lm.model, NAME):
            logits = lm.output(
                torch.cat([group.embeddings.flatten(0, 1) for group in groups])[None],
                positions=rows,
                prefix=Prefix(cache, sum(layout.cached)),
                position_ids=torch.cat(positions)[None].to(lm.device),
            ).logits[0]
    finally:
        _layout.reset(token)
    parts = iter(logits.split([len(group.embeddings) * len(group.rows) for group in groups]))
    segments = iter(layout.segments)
    results: list[Packed] = []
    for pack in packs:
        first, *_ = [next(segments) for _ in pack.groups]
        prefix = pack.prefix.grown(cache, first.clean, first.clean + first.length) if pack.clean else pack.prefix
        results.append(Packed([next(parts).unflatten(0, (-1, len(group.rows))) for group in pack.groups], prefix))
    return results


def _attend(
    module: torch.nn.Module,
    query: Float[Tensor, "one heads tokens dim"],
    key: Float[Tensor, "one kv_heads keys dim"],
    value: Float[Tensor, "one kv_heads keys dim_v"],
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "one tokens heads dim_v"], None]:
    """An attention function of transformers' registry: causal attention of packed sequences."""
    unknown = [name for name, given in options.items() if isinstance(given, Tensor) and name != "position_ids"]
    if unknown or attention_mask is not None or dropout:
        raise NotImplementedError(f"Packed attention does not know {unknown or 'masks and dropout'}.")
    layout = _layout.get()
    layout.windows[int(module.layer_idx)] = sliding_window  # pyright: ignore
    kv_heads = key.shape[1]
    repeats = query.shape[1] // kv_heads
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    window = layout.bounding(sliding_window)
    for number, block in enumerate(layout.blocks(window)):
        queries, distinct, keys, *_ = block.to(query.device)
        mask = layout.mask(number, window, repeats, query)
        # Heads that share keys are more queries of one head: no key is copied for them.
        q = query[0].index_select(1, queries.flatten()).view(kv_heads, repeats, *queries.shape, -1)
        q = q.permute(2, 0, 1, 3, 4).flatten(2, 3)
        k, v = (x[0].index_select(1, keys.flatten()).unflatten(1, keys.shape).transpose(0, 1) for x in (key, value))
        heads = _attention(q, k, v, mask, scaling, softcap).unflatten(2, (repeats, -1))
        heads = heads.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        if distinct is not None:
            queries, heads = queries.flatten()[distinct], heads[distinct]
        out.index_copy_(0, queries.flatten(), heads)
    return out[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / softcap).tanh() * softcap
    weights = (scores + mask).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
