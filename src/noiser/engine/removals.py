"""Removals: ways to take tokens out of the input, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from noiser.engine.perturbations import (
    Perturbation,
    PictureChange,
    delete,
    hide,
    noise,
    set_rows,
)
from noiser.engine.query import Query
from noiser.errors import ParameterError
from noiser.model.scene import Scene
from noiser.registry import Registry
from noiser.types import Baseline

NOISE_SIZE = 2.0
"""r of the noise that removes: twice the size of the embedding that it disturbs."""


@dataclass(frozen=True, eq=False)
class Removal:
    """A way to remove tokens of a query.

    Attributes:
        perturbation: from token positions, and the targets to be read, to the change without these
            tokens.
        deletes: whether the text is taken out. The sink may then go, too: the next token stands
            first.
    """

    perturbation: Callable[[Iterable[int], Sequence[int] | None], Perturbation]
    deletes: bool = False

    def positions(self, query: Query) -> Sequence[tuple[int, ...]]:
        """For each unit the positions that are removed with it."""
        if self.deletes:
            return [unit.token_indices for unit in query.units]
        return query.positions

    def players(self, query: Query) -> Bool[Tensor, "targets units"]:
        """The units of each target that can be removed."""
        return query.before if self.deletes else query.causal_mask


REMOVALS: Registry[Removal] = Registry("removal", "noiser.removals")
"""Every removal by name; packages add theirs through the entry point `noiser.removals`.

A factory is called with the query, a generator of random numbers, and how many samples of them are
wanted, and returns a `Removal`.
"""


def remover(
    query: Query, removal: str, rng: torch.Generator | None = None, samples: int = 1
) -> Removal:
    """The way to remove tokens of a query.

    Args:
        query: the query.
        removal: one of `REMOVALS`. "zero", "pad", "unk" or "mean": the row of each token becomes
            zeros, that of the padding or unknown token, or the mean row of the table; "noise": it
            gets noise of twice its size, the same at a position whatever else is removed; "delete":
            the token is taken out, and later ones move up; "hidden": see `hide`.
        rng: for removals that draw random numbers, which happens when tokens are first removed.
        samples: of what is drawn.

    Raises:
        UnknownNameError: no such removal. ParameterError: it does not remove regions of pictures.
    """
    way = REMOVALS.get(removal).factory(query, rng, samples)
    if query.scene is None:
        return way
    if query.image_removal == "rows" and way.deletes and query.regions:
        raise ParameterError(
            f"removal={removal!r} takes out words, and a region of a picture is not one. Take "
            "image_removal='grey' or 'blur', or another removal of words, such as 'zero'."
        )
    change = partial(_with_pictures, query, query.scene, way)
    return replace(way, perturbation=change)


def _with_pictures(
    query: Query,
    scene: Scene,
    way: Removal,
    positions: Iterable[int],
    targets: Sequence[int] | None,
) -> Perturbation:
    """The change without some positions: words are removed in the given way, regions of pictures
    with their pixels, or as tokens.
    """
    gone = frozenset(positions)
    units = [unit for unit in query.regions if gone.issuperset(unit.token_indices)]
    tokens = {token for unit in units for token in unit.token_indices}
    if not units:
        return way.perturbation(gone, targets)
    regions = frozenset(query.regions[unit] for unit in units)
    if query.image_removal == "rows":
        change = way.perturbation(gone, targets)
        changed = () if change.hidden else tuple(sorted(tokens))
    else:
        change = way.perturbation(gone - tokens, targets)
        touched = {region.picture for region in regions}
        # The vision tower mixes the regions of a picture.
        changed = tuple(sorted(token for picture in touched for token in scene.tokens[picture]))
    if not changed:
        return change
    pictures = PictureChange(scene, regions, query.image_removal, changed)
    return replace(change, pictures=pictures)


def _by_row(
    baseline: Baseline, query: Query, rng: torch.Generator | None = None, samples: int = 1
) -> Removal:
    """Every token holds the baseline's row."""
    row = query.baseline(baseline)
    return Removal(lambda positions, targets: set_rows(positions, row, targets))


def _by_noise(query: Query, rng: torch.Generator | None = None, samples: int = 1) -> Removal:
    """Every token gets noise of twice the size of its embedding; without `rng` always the same."""
    generator = torch.Generator().manual_seed(0) if rng is None else rng
    drawn: list[Tensor] = []

    def disturb(positions: Iterable[int], targets: Sequence[int] | None) -> Perturbation:
        if not drawn:
            shape = samples, len(query.token_ids), query.embedding_dim
            numbers = torch.randn(shape, generator=generator, dtype=torch.float32)
            drawn.append(numbers.to(query.device))
        return noise(positions, drawn[0], NOISE_SIZE, targets, relative=True, by_position=True)

    return Removal(disturb)


def _by_deletion(query: Query, rng: torch.Generator | None = None, samples: int = 1) -> Removal:
    return Removal(delete, deletes=True)


def _by_hiding(query: Query, rng: torch.Generator | None = None, samples: int = 1) -> Removal:
    return Removal(hide)


REMOVALS.register("zero", partial(_by_row, "zero"), summary="rows become zeros")
REMOVALS.register("pad", partial(_by_row, "pad"), summary="rows become that of the padding token")
REMOVALS.register("unk", partial(_by_row, "unk"), summary="rows become that of the unknown token")
REMOVALS.register("mean", partial(_by_row, "mean"), summary="rows become the table's mean row")
REMOVALS.register("noise", _by_noise, summary="rows get noise of twice their size")
REMOVALS.register("delete", _by_deletion, summary="tokens are taken out; later ones move up")
REMOVALS.register("hidden", _by_hiding, summary="later tokens do not attend to the tokens")
