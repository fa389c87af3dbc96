"""Sequences of different lengths in one forward pass, without padding, behind one clean prefix.

Perturbed sequences branch off the clean prefix at different positions. Laid end to end they are one long sequence
for everything in a transformer but attention, so matrix products are as large as they can be and no token is computed
twice. Attention is computed group by group: sequences that branch off at the same position attend to the prefix up
to there, and each to itself.
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
from noiser.model.prefix import Prefix, record_prefix

if TYPE_CHECKING:
    from noiser.model.language_model import LanguageModel

__all__ = ["Group", "can_pack", "packed_logits"]

NAME = "noiser_packed"


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
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def mask(self, start: int, length: int, window: int | None, device: torch.device) -> Tensor:
        """[length, start + length]: which keys each token of a sequence sees."""
        key = (start, length, window)
        if key not in self._masks:
            distance = torch.arange(start, start + length)[:, None] - torch.arange(start + length)
            seen = (distance >= 0) & (distance < (window or start + length + 1))
            self._masks[key] = seen.to(device)
        return self._masks[key]


_layout: contextvars.ContextVar[_Layout] = contextvars.ContextVar("layout")


def packed_logits(
    lm: LanguageModel, groups: Sequence[Group], prefix: Prefix
) -> list[Float[Tensor, "sequences rows vocab"]]:
    """Float32 logits of every group's rows, from one forward pass."""
    return _run(lm, groups, prefix, _Layout(groups))


def can_pack(lm: LanguageModel, embeddings: Float[Tensor, "length dim"]) -> bool:
    """Whether packed sequences give what whole sequences give, measured; and whether windows are as the cache has them.

    Layers must take their attention from transformers' registry, and tell it their sliding window.
    """
    length = embeddings.shape[0]
    whole = lm.logits(embeddings[None], positions=[length - 2, length - 1])[0]
    try:
        prefix, _ = record_prefix(lm, embeddings, [length - 1])
        groups = [Group(i, embeddings[i:].expand(n, -1, -1), [length - 2, length - 1]) for i, n in ((5, 2), (2, 3))]
        layout = _Layout(groups)
        found = torch.cat(_run(lm, groups, prefix, layout))
    except Exception:  # any failure means that this architecture does not work so
        return False
    declared = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(prefix.cache.layers)}
    tolerance = (1e-3 if lm.dtype == torch.float32 else 0.05) * float(whole.std())
    return layout.windows == declared and bool((found - whole).abs().max() <= tolerance)


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
                prefix=prefix.shared(max(group.start for group in groups)),
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
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    offset = 0
    for start, count, length in layout.shapes:
        own = slice(offset, offset := offset + count * length)

        def sequences(x: Tensor, shift: int, own: slice = own, count: int = count) -> Tensor:
            return x[0, :, shift + own.start : shift + own.stop].unflatten(1, (count, -1)).transpose(0, 1)

        def behind_prefix(x: Tensor, start: int = start, count: int = count) -> Tensor:
            return torch.cat([x[:, :, :start].expand(count, -1, -1, -1), sequences(x, prefix)], 2)

        k, v = (behind_prefix(x).repeat_interleave(repeats, 1) for x in (key, value))
        mask = layout.mask(start, length, sliding_window, query.device)
        found = _attention(sequences(query, 0), k, v, mask, scaling, softcap)
        out[own] = found.transpose(1, 2).flatten(0, 1)
    return out[None], None


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scaling: float | None, softcap: float | None) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (scores / softcap).tanh() * softcap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32)
    return weights.to(q.dtype) @ v
