"""Sequences of different lengths in one forward pass, without padding, behind one clean prefix.

Perturbed sequences branch off the clean prefix at different positions. Laid end to end they are one long sequence
for everything in a transformer but attention, so matrix products are as large as they can be and no token is computed
twice. Attention is computed group by group: sequences that branch off at the same position attend to the prefix up
to there, and each to itself. Where the groups are many and small, one product with a mask that says so is quicker.
"""

from __future__ import annotations

import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from noiser.model.attention import attention_implementation
from noiser.model.prefix import Prefix, agree, empty_prefix

if TYPE_CHECKING:
    from noiser.model.language_model import LanguageModel

__all__ = ["Group", "can_pack", "packed_logits", "packed_with_prefix"]

NAME = "noiser_packed"

GROUP_COST = 4e6
"""What the calls for one group cost, measured on a CPU, in numbers multiplied in a masked product."""


class Group(NamedTuple):
    """Sequences that continue the clean prefix from the same position, all equally long.

    Attributes:
        start: the position of their first token; what stands before it is the clean prefix.
        embeddings: [sequences, length, dim].
        rows: positions, counted from the beginning of the prefix, whose logits are wanted; the same for each sequence.
    """

    start: int
    embeddings: Float[Tensor, "sequences length dim"]
    rows: Sequence[int]


class _Layout:
    """Where the groups lie in the packed sequence, and the windows that the layers asked for."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.shapes: list[tuple[int, int, int]] = []
        for group in groups:  # neighbours that start and stop together are one group for attention
            count, length = group.embeddings.shape[:2]
            if self.shapes and self.shapes[-1][::2] == (group.start, length):
                count += self.shapes.pop()[1]
            self.shapes.append((group.start, count, length))
        self.windows: dict[int, int | None] = {}
        self.tokens = sum(count * length for _, count, length in self.shapes)
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._whole: dict[int | None, Tensor] = {}

    def mask(self, start: int, length: int, window: int | None, like: Tensor) -> Tensor:
        """[length, start + length]: 0 where a token of a sequence sees a key, -inf elsewhere."""
        key = (start, length, window)
        if key not in self._masks:
            distance = torch.arange(start, start + length)[:, None] - torch.arange(start + length)
            seen = (distance >= 0) & (distance < (window or start + length + 1))
            self._masks[key] = torch.where(seen, 0.0, -torch.inf).to(like)
        return self._masks[key]

    def at_once(self, width: int, keys: int) -> bool:
        """Whether one masked product, `width` numbers for each query and key, costs less than a call for each group."""
        return self.tokens * keys * width < GROUP_COST * len(self.shapes)

    def whole_mask(self, prefix: int, window: int | None, like: Tensor) -> Tensor:
        """[tokens, prefix + tokens]: 0 where a token sees a key, -inf elsewhere."""
        if window not in self._whole:
            each = [
                (start, start + i, sequence)
                for start, count, length in self.shapes
                for sequence in [object() for _ in range(count)]
                for i in range(length)
            ]
            names = {sequence: number for number, sequence in enumerate(dict.fromkeys(s for *_, s in each))}
            starts = torch.tensor([start for start, *_ in each])[:, None]
            positions = torch.tensor([*range(prefix), *(position for _, position, _ in each)])
            sequences = torch.tensor([-1] * prefix + [names[s] for *_, s in each])
            own = sequences[prefix:, None] == sequences
            distance = positions[prefix:, None] - positions
            # The first keys are the clean sequence's, whether they are cached or run in this very pass.
            seen = (torch.arange(len(positions)) < starts) | (own & (distance >= 0))
            seen &= distance < (window or len(positions) + int(positions.max()))
            self._whole[window] = torch.where(seen, 0.0, -torch.inf).to(like)
        return self._whole[window]


_layout: contextvars.ContextVar[_Layout] = contextvars.ContextVar("layout")


def packed_logits(
    lm: LanguageModel, groups: Sequence[Group], prefix: Prefix
) -> list[Float[Tensor, "sequences rows vocab"]]:
    """Float32 logits of every group's rows, from one forward pass."""
    return _run(lm, groups, prefix.shared(max(group.start for group in groups)), _Layout(groups))


def packed_with_prefix(
    lm: LanguageModel, groups: Sequence[Group]
) -> tuple[list[Float[Tensor, "sequences rows vocab"]], Prefix]:
    """The same where there is no prefix yet: the first group is the clean sequence, and the prefix of the others.

    In every layer the clean sequence's keys and values are the first of the pass, just where those of a cached prefix
    would be.

    Returns:
        Logits of every group's rows, the clean sequence's first; and its keys and values.
    """
    assert (groups[0].start, len(groups[0].embeddings)) == (0, 1), "the clean sequence comes first"
    length = groups[0].embeddings.shape[1]
    prefix = empty_prefix(lm)
    found = _run(lm, groups, prefix, _Layout(groups))
    prefix.length = sum(group.embeddings[..., 0].numel() for group in groups)
    return found, prefix.detached(length)


def can_pack(lm: LanguageModel, embeddings: Float[Tensor, "length dim"]) -> bool:
    """Whether packed sequences give what whole sequences give, measured; and whether windows are as the cache has them.

    Layers must take their attention from transformers' registry, and tell it their sliding window.
    """
    length = embeddings.shape[0]
    whole = lm.logits(embeddings[None], positions=[length - 2, length - 1])[0]
    try:
        groups = [
            Group(i, embeddings[i:].expand(n, -1, -1), [length - 2, length - 1]) for i, n in ((0, 1), (5, 2), (2, 3))
        ]
        first, prefix = packed_with_prefix(lm, groups)
        layout = _Layout(groups)
        found = torch.cat([*first, *_run(lm, groups, prefix.shared(5), layout)])
    except Exception:  # any failure means that this architecture does not work so
        return False
    declared = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(prefix.cache.layers)}
    return layout.windows == declared and agree(found, whole.expand_as(found), lm.dtype)


def _run(lm: LanguageModel, groups: Sequence[Group], prefix: Prefix, layout: _Layout) -> list[Tensor]:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    rows, positions, offset = [], [], 0
    for group in groups:
        count, length = group.embeddings.shape[:2]
        rows += [offset + s * length + row - group.start for s in range(count) for row in group.rows]
        positions.append(torch.arange(group.start, group.start + length).repeat(count))
        offset += count * length
    token = _layout.set(layout)
    try:
        with attention_implementation(lm.model, NAME):
            logits = lm.logits(
                torch.cat([group.embeddings.flatten(0, 1) for group in groups])[None],
                positions=rows,
                prefix=prefix,
                position_ids=torch.cat(positions)[None].to(lm.device),
            )[0]
    finally:
        _layout.reset(token)
    sizes = [len(group.embeddings) * len(group.rows) for group in groups]
    parts = logits.split(sizes)
    return [part.unflatten(0, (-1, len(group.rows))) for part, group in zip(parts, groups, strict=True)]


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
    """An attention function of transformers' registry: causal attention of packed groups."""
    unknown = [name for name, given in options.items() if isinstance(given, Tensor) and name != "position_ids"]
    if unknown or attention_mask is not None or dropout:
        raise NotImplementedError(f"Packed attention does not know {unknown or 'masks and dropout'}.")
    layout = _layout.get()
    layout.windows[int(module.layer_idx)] = sliding_window  # pyright: ignore
    repeats, prefix = query.shape[1] // key.shape[1], key.shape[2] - query.shape[2]
    if layout.at_once(query.shape[1] * query.shape[3], key.shape[2]):
        k, v = (x.repeat_interleave(repeats, 1) for x in (key, value))
        mask = layout.whole_mask(prefix, sliding_window, query)
        return _attention(query, k, v, mask, scaling, softcap).transpose(1, 2), None
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    offset = 0
    for start, count, length in layout.shapes:
        own = slice(offset, offset := offset + count * length)

        def sequences(x: Tensor, shift: int, own: slice = own, count: int = count) -> Tensor:
            return x[0, :, shift + own.start : shift + own.stop].unflatten(1, (count, -1)).transpose(0, 1)

        def behind_prefix(x: Tensor, start: int = start, count: int = count) -> Tensor:
            return torch.cat([x[:, :, :start].expand(count, -1, -1, -1), sequences(x, prefix)], 2)

        k, v = (behind_prefix(x).repeat_interleave(repeats, 1) for x in (key, value))
        mask = layout.mask(start, length, sliding_window, query)
        found = _attention(sequences(query, 0), k, v, mask, scaling, softcap)
        out[own] = found.transpose(1, 2).flatten(0, 1)
    return out[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / softcap).tanh() * softcap
    weights = (scores + mask).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
