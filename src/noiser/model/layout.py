"""How the tokens of a sequence with pictures stand: their positions, and which see later ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """How the tokens of a sequence with pictures stand beside their embeddings.

    Attributes:
        is_picture: whether a token holds a feature of a picture.
        positions: of one or several axes; None: 0, 1, 2, ...
        blocks: tokens of one number see each other, those of -1 what stands before them; None: all
            are -1.
        deep: what each early layer adds to the features of pictures; 0 at text.
    """

    is_picture: Bool[Tensor, " length"]
    positions: Int[Tensor, "axes length"] | None = None
    blocks: Int[Tensor, " length"] | None = None
    deep: tuple[Float[Tensor, "length dim"], ...] = ()

    def grown(self, length: int) -> Layout:
        """The layout with tokens of text after it, up to a length."""
        more = length - len(self.is_picture)
        if more <= 0:
            return self
        positions = self.positions
        if positions is not None:
            following = positions.max() + 1 + torch.arange(more)
            positions = torch.cat([positions, following.expand(len(positions), -1)], 1)
        blocks = self.blocks
        if blocks is not None:
            blocks = torch.cat([blocks, blocks.new_full((more,), -1)])
        deep = [torch.cat([each, each.new_zeros(more, each.shape[1])]) for each in self.deep]
        is_picture = torch.cat([self.is_picture, self.is_picture.new_zeros(more)])
        return Layout(is_picture, positions, blocks, tuple(deep))

    def without(self, gone: Sequence[int]) -> Layout:
        """The layout without some tokens of text, where later ones move up."""
        if not gone:
            return self
        kept = torch.ones(len(self.is_picture), dtype=torch.bool)
        kept[list(gone)] = False
        positions = self.positions
        if positions is not None:
            positions = (positions - (~kept).cumsum(0))[:, kept]
        blocks = None if self.blocks is None else self.blocks[kept]
        deep = tuple(each[kept.to(each.device)] for each in self.deep)
        return Layout(self.is_picture[kept], positions, blocks, deep)

    def in_block(self, position: int) -> bool:
        """Whether tokens before the one at a position may see it."""
        blocks = self.blocks
        return blocks is not None and position < len(blocks) and int(blocks[position]) >= 0

    def begin(self, position: int) -> int:
        """The first token that sees the token at a position: itself, or the first of its block."""
        if self.blocks is None or not self.in_block(position):
            return position
        return int((self.blocks == self.blocks[position]).nonzero()[0])

    def end(self, position: int) -> int:
        """The position after the block of a token, or after the token."""
        if self.blocks is None or not self.in_block(position):
            return position + 1
        return int((self.blocks == self.blocks[position]).nonzero()[-1]) + 1

    def with_deep(self, positions: Sequence[int], deep: Sequence[Tensor]) -> Layout:
        """The layout in which some tokens' features of early layers are other ones.

        `deep` has [positions, dim] for each of these layers.
        """
        changed: list[Tensor] = []
        for each, values in zip(self.deep, deep, strict=True):
            copied = each.clone()
            copied[list(positions)] = values.to(copied)
            changed.append(copied)
        return replace(self, deep=tuple(changed))
