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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from noiser.model.attention import attention_implementation
from noiser.model.compiled import opaque
from noiser.model.memory import is_out_of_memory
from noiser.model.prefix import Prefix, agree, empty_prefix, joined

if TYPE_CHECKING:
    from noiser.model.language_model import LanguageModel

__all__ = ["Branches", "Group", "Packed", "can_pack", "packed_logits"]

NAME = "noiser_packed"

BLOCK_COST = {"cpu": 4e3}
"""What the calls for one more block cost, in products of a query and a key, measured on a CPU; elsewhere OTHER_COST."""

OTHER_COST = 4e6

BLOCK_KEYS = 2**15
"""The most keys of a block's tiles together: they are copied side by side."""

TILE = 256
"""The most tokens of a tile: none is compared with what is behind its tile, or before its tile's window."""

MASKS = 2**24
"""The most numbers in the masks that are kept from layer to layer; others are made anew."""


class Group(NamedTuple):
    """Sequences that continue the clean sequence from the same position, all equally long.

    Attributes:
        start: the position of their first token; what stands before it is the clean sequence.
        embeddings: [sequences, length, dim].
        rows: positions, counted from the beginning of the clean sequence, whose logits are wanted; the same for each.
    """

    start: int
    embeddings: Float[Tensor, "sequences length dim"]
    rows: Sequence[int]


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
        logits: float32, for each group the logits of its rows.
        prefix: the cached clean sequence, with what has run of it.
    """

    logits: list[Float[Tensor, "sequences rows vocab"]]
    prefix: Prefix


class _Place(NamedTuple):
    """Where a group lies: `copies` sequences of `length` tokens from `offset` in the packed sequence.

    The clean sequence's first `cached` positions are the keys from `base` on, those behind them from `clean` on.
    """

    start: int
    copies: int
    length: int
    offset: int
    base: int
    cached: int
    clean: int


class _Tile(NamedTuple):
    """Neighbouring tokens of the sequences of a place: positions `first` to `stop`, which see keys from `oldest` on."""

    place: _Place
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
        own: which of them are no repetitions, as indices into the flattened queries; None for all.
        keys: [sequences, most], indices into the keys; behind a tile's own they point anywhere.
        positions: [sequences, longest] or [1, longest], of the queries.
        key_positions: [sequences, most] or [1, most], positions of the keys.
    """

    queries: Int[Tensor, "sequences longest"]
    own: Int[Tensor, " own"] | None
    keys: Int[Tensor, "sequences most"]
    positions: Int[Tensor, "sequences_or_one longest"]
    key_positions: Int[Tensor, "sequences_or_one most"]

    def to(self, device: torch.device) -> _Block:
        """The same on a device."""
        return _Block(*(None if each is None else each.to(device) for each in self))  # pyright: ignore

    def seen(self, window: int | None) -> Bool[Tensor, "sequences_or_one longest most"]:
        """Whether a query sees a key."""
        distance = self.positions[:, :, None] - self.key_positions[:, None]
        return (distance >= 0) & (distance < window) if window else distance >= 0


class _Layout:
    """Where everything lies in the packed sequence and among the keys, and the windows that the layers asked for."""

    def __init__(self, packs: Sequence[Branches], device: torch.device) -> None:
        self.cached = [
            pack.prefix.length if pack.clean else max(group.start for group in pack.groups) for pack in packs
        ]
        self.windows: dict[int, int | None] = {}
        self.places: list[_Place] = []
        offset, base, self._new = 0, 0, sum(self.cached)
        for pack, cached in zip(packs, self.cached, strict=True):
            clean = self._new + offset
            for start, embeddings, _ in pack.groups:
                count, length = embeddings.shape[:2]
                self.places.append(_Place(start, count, length, offset, base, cached, clean))
                offset += count * length
            base += cached
        self._device = device
        self._longest = max(place.start + place.length for place in self.places)
        self._blocks: dict[int | None, list[_Block]] = {}
        self._masks: dict[tuple[int, int | None, int, str], Tensor] = {}

    def bounding(self, window: int | None) -> int | None:
        """A layer's window; None where it bounds nothing."""
        return None if window is None or window >= self._longest else window

    def blocks(self, window: int | None) -> list[_Block]:
        """What attends in one call each in layers with this window."""
        if window not in self._blocks:
            cost = BLOCK_COST.get(self._device.type, OTHER_COST)
            alike = _alike([tile for place in self.places for tile in _tiles(place, window)], cost)
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


def _tiles(place: _Place, window: int | None) -> list[_Tile]:
    """A place cut along its tokens where it is long, and across its sequences where their keys are too many."""
    stop = place.start + place.length
    whole = place.length <= TILE
    cuts = [] if whole else range((place.start // TILE + 1) * TILE, stop, TILE)  # the same places for all: alike tiles
    tiles: list[_Tile] = []
    for first, last in pairwise([place.start, *cuts, stop]):
        oldest = max(0, first + 1 - window) if window else 0
        size = max(1, BLOCK_KEYS // (last - oldest))
        for copy in range(0, place.copies, size):
            part = place._replace(copies=min(size, place.copies - copy), offset=place.offset + copy * place.length)
            tiles.append(_Tile(part, first, last, oldest))
    return tiles


def _alike(tiles: Sequence[_Tile], cost: float) -> list[list[_Tile]]:
    """Tiles in blocks of similar sizes, so that what is computed for nothing costs less than one more block."""
    blocks: list[list[_Tile]] = []
    own = sequences = longest = most = 0
    for tile in sorted(tiles, key=lambda tile: (tile.queries, tile.keys, tile.place.offset)):
        alone = (tile.place.copies, tile.queries, tile.keys)
        together = (sequences + alone[0], max(longest, tile.queries), max(most, tile.keys))
        wasted = prod(together) - own - prod(alone)
        if not blocks or wasted > cost or together[0] * together[2] > BLOCK_KEYS:
            blocks.append([])
            own, together = 0, alone
        own += prod(alone)
        sequences, longest, most = together
        blocks[-1].append(tile)
    return blocks


def _block(tiles: Sequence[_Tile], new: int) -> _Block:
    """Tiles that attend in one call; `new` is the index of the first key that is not cached."""
    counts = torch.tensor([tile.place.copies for tile in tiles])
    columns = zip(*((*tile.place, tile.first, tile.stop, tile.oldest) for tile in tiles), strict=True)
    start, _, length, offset, base, cached, clean, first, stop, oldest = (
        torch.tensor(values).repeat_interleave(counts)[:, None] for values in columns
    )
    before = torch.cumsum(counts, 0) - counts
    offset = offset + (torch.arange(len(offset)) - before.repeat_interleave(counts))[:, None] * length
    own = stop - first
    steps = torch.arange(int(own.max()))
    positions = first + torch.minimum(steps, own - 1)
    at = oldest + torch.arange(int((stop - oldest).max()))
    keys = torch.where(at < cached, base + at, clean + at - cached)
    keys = torch.where(at < start, keys, new + offset + torch.minimum(at, stop - 1) - start)
    return _Block(
        queries=offset + positions - start,
        own=None if _same(own) else (steps < own).flatten().nonzero()[:, 0],
        keys=keys,
        positions=positions[:1] if _same(positions) else positions,
        key_positions=at[:1] if _same(at) else at,
    )


def _same(rows: Int[Tensor, "rows some"]) -> bool:
    return bool((rows == rows[:1]).all())


_layout: contextvars.ContextVar[_Layout] = contextvars.ContextVar("layout")


def packed_logits(lm: LanguageModel, packs: Sequence[Branches]) -> list[Packed]:
    """Logits of every group's rows of every pack, from one forward pass.

    In every layer the keys and values of all caches stand in front of those of the pass, so that each token's own
    clean beginning is found wherever it was run.
    """
    return _run(lm, packs, _Layout(packs, lm.device))


def can_pack(lm: LanguageModel, embeddings: Float[Tensor, "length dim"]) -> bool:
    """Whether packed sequences give what whole sequences give, measured; and whether windows are as the cache has them.

    Layers must take their attention from transformers' registry, and tell it their sliding window.
    """
    one, other = embeddings, embeddings[2:].flip(0)
    whole = [lm.logits(x[None], positions=[len(x) - 2, len(x) - 1])[0] for x in (one, other)]
    try:
        first = packed_logits(lm, [_trial(one, empty_prefix(lm)), _trial(other, empty_prefix(lm))])
        packs = [_trial(other, empty_prefix(lm)), _trial(one, first[0].prefix)]
        layout = _Layout(packs, lm.device)
        second = _run(lm, packs, layout)
    except Exception as error:  # any failure means that this architecture does not work so
        if is_out_of_memory(error):
            raise
        return False
    declared = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(first[0].prefix.cache.layers)}
    pairs = [
        (logits, expected.expand_as(logits))
        for found, expected in zip([*first, *reversed(second)], [*whole, *whole], strict=True)
        for logits in found.logits
    ]
    return layout.windows == declared and all(agree(*pair, lm.dtype) for pair in pairs)


def _trial(embeddings: Float[Tensor, "length dim"], prefix: Prefix) -> Branches:
    """Unperturbed branches of a sequence, and in front of them the sequence where it is not cached."""
    length = len(embeddings)
    shapes = [*([] if prefix.length else [(0, 1)]), (length - 3, 2), (2, 3)]
    groups = [Group(start, embeddings[start:].expand(n, -1, -1), [length - 2, length - 1]) for start, n in shapes]
    return Branches(prefix, groups, clean=not prefix.length)


def _run(lm: LanguageModel, packs: Sequence[Branches], layout: _Layout) -> list[Packed]:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, opaque(_attend, lm.model))
    groups = [group for pack in packs for group in pack.groups]
    rows, positions = [], []
    for group, place in zip(groups, layout.places, strict=True):
        first = place.offset - place.start
        rows += [first + s * place.length + row for s in range(place.copies) for row in group.rows]
        positions.append(torch.arange(place.start, place.start + place.length).repeat(place.copies))
    cache = joined([pack.prefix for pack in packs], layout.cached)
    token = _layout.set(layout)
    try:
        with attention_implementation(lm.model, NAME):
            logits = lm.logits(
                torch.cat([group.embeddings.flatten(0, 1) for group in groups])[None],
                positions=rows,
                prefix=Prefix(cache, sum(layout.cached)),
                position_ids=torch.cat(positions)[None].to(lm.device),
            )[0]
    finally:
        _layout.reset(token)
    parts = iter(logits.split([len(group.embeddings) * len(group.rows) for group in groups]))
    places = iter(layout.places)
    found: list[Packed] = []
    for pack in packs:
        first, *_ = [next(places) for _ in pack.groups]
        prefix = pack.prefix.grown(cache, first.clean, first.clean + first.length) if pack.clean else pack.prefix
        found.append(Packed([next(parts).unflatten(0, (-1, len(group.rows))) for group in pack.groups], prefix))
    return found


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
        queries, own, keys, *_ = block.to(query.device)
        mask = layout.mask(number, window, repeats, query)
        # Heads that share keys are more queries of one head: no key is copied for them.
        q = query[0].index_select(1, queries.flatten()).view(kv_heads, repeats, *queries.shape, -1)
        q = q.permute(2, 0, 1, 3, 4).flatten(2, 3)
        k, v = (x[0].index_select(1, keys.flatten()).unflatten(1, keys.shape).transpose(0, 1) for x in (key, value))
        found = _attention(q, k, v, mask, scaling, softcap).unflatten(2, (repeats, -1))
        found = found.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        if own is not None:
            queries, found = queries.flatten()[own], found[own]
        out.index_copy_(0, queries.flatten(), found)
    return out[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / softcap).tanh() * softcap
    weights = (scores + mask).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
