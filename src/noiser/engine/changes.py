"""Changes of an input: rows that are replaced, taken out, or hidden at some positions.

All act on unscaled rows of the embedding table, before any factor that the embedding module puts on them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine.query import Query
from noiser.types import RemovalName

REMOVALS: tuple[str, ...] = get_args(RemovalName)

Absence = Literal["zero", "pad", "unk", "mean", "delete", "hidden"]
"""A removal without noise."""

ABSENCES: tuple[str, ...] = get_args(Absence)

NormName = Literal["l1", "l2", "linf"]

NOISE_SIZE = 2.0
"""Relative noise of this size: r of `noise`, as `noiser_relative` has it."""

Rows = Callable[[Tensor], Tensor]
"""From the clean rows of some positions [positions, dim] to changed ones [samples, positions, dim]."""


@dataclass(frozen=True, eq=False)
class Change:
    """One change of the input, in one or several samples.

    Attributes:
        positions: the token positions that it changes, ascending.
        rows: makes the changed rows when a pass is filled, so that a long list of changes takes no memory; None: the
            tokens are taken out, and later ones move up.
        samples: how many versions of the changed rows there are.
        hidden: no later token after the sources attends to the positions, and no row changes; see `hide`.
        targets: indices of the targets that are read under it; None for all.
    """

    positions: tuple[int, ...]
    rows: Rows | None = None
    samples: int = 1
    hidden: bool = False
    targets: tuple[int, ...] | None = None

    @property
    def deletes(self) -> bool:
        """Whether the tokens are taken out."""
        return self.rows is None and not self.hidden

    def index(self, position: int) -> int:
        """Where the token of a clean position stands in the changed sequence; a deleted one where the last before it
        stands, -1 for none.
        """
        return position - bisect_right(self.positions, position) if self.deletes else position


def replace(positions: Iterable[int], row: Float[Tensor, " dim"], targets: Sequence[int] | None = None) -> Change:
    """The change in which every position holds one row, such as a baseline's."""
    return Change(_ascending(positions), lambda clean: row.to(clean).expand(1, *clean.shape), targets=_tuple(targets))


def delete(positions: Iterable[int], targets: Sequence[int] | None = None) -> Change:
    """The change without the tokens, as if the text had never had them.

    A target whose predicting token is deleted is read at the last token before it.
    """
    return Change(_ascending(positions), targets=_tuple(targets))


def hide(positions: Iterable[int], targets: Sequence[int] | None = None) -> Change:
    """The change in which no later token after the sources attends to the tokens, in any layer.

    The sources read each other as they always do, so only the tokens after the last of them run again: the question and
    the answer (attention knockout, Geva et al. 2023, arXiv 2304.14767). In a prompt without sources no later token at
    all attends to the hidden ones. A token always attends to itself.
    """
    return Change(_ascending(positions), hidden=True, targets=_tuple(targets))


def noise(
    positions: Iterable[int],
    vectors: Float[Tensor, "samples longest dim"],
    scale: float = 1.0,
    targets: Sequence[int] | None = None,
    *,
    relative: bool = False,
    by_position: bool = False,
) -> Change:
    """The change `x + scale * n`: the first of the noise's positions goes to the first position, and so on.

    Args:
        positions: that get noise.
        vectors: standard normal numbers.
        scale: k; or with `relative`, r.
        targets: as in `Change`.
        relative: k is r ‖x‖ / E‖n‖₂ at each position: noise of r times the size of the embedding that it disturbs.
        by_position: the vectors are [samples, length, dim], and a position gets its own whichever others change.
    """
    positions = _ascending(positions)

    def rows(clean: Tensor) -> Tensor:
        k = scale * clean.norm(dim=-1)[:, None] / expected_norm("l2", clean.shape[-1]) if relative else scale
        chosen = vectors[:, list(positions)] if by_position else vectors[:, : len(clean)]
        return clean + k * chosen.to(clean)

    return Change(positions, rows, len(vectors), targets=_tuple(targets))


def keep(
    positions: Iterable[int],
    masks: Callable[[], Tensor],
    samples: int,
    targets: Sequence[int] | None = None,
) -> Change:
    """The change `x * mask`: soft masks of Zhao and Aletras (2023), [samples, positions, dim or 1].

    They are made when a pass is filled.
    """
    return Change(_ascending(positions), lambda clean: clean * masks().to(clean), samples, targets=_tuple(targets))


def set_rows(
    positions: Iterable[int], rows: Float[Tensor, "samples positions dim"], targets: Sequence[int] | None = None
) -> Change:
    """The change to rows that the caller has made."""
    return Change(_ascending(positions), lambda clean: rows.to(clean), len(rows), targets=_tuple(targets))


Remove = Callable[[Iterable[int], Sequence[int] | None], Change]
"""From token positions, and the targets to be read, to the change that removes these tokens."""


def remover(query: Query, removal: RemovalName, rng: torch.Generator | None = None, samples: int = 1) -> Remove:
    """The function that removes tokens of a query.

    Args:
        query: whose tokens.
        removal: "zero", "pad", "unk" or "mean": the row of each token becomes zeros, that of the padding or unknown
            token, or the mean row of the table; "noise": it gets noise of twice its size, the same at a position
            whatever else is removed; "delete": the token is taken out, and later ones move up; "hidden": see `hide`.
        rng: of the noise, which is drawn when tokens are first removed.
        samples: of the noise; with another removal there is one sample.

    Raises:
        UnknownNameError: no such removal.
        ParameterError: the tokenizer has no such token.
    """
    check_choice("removal", removal, REMOVALS)
    if removal == "delete":
        return delete
    if removal == "hidden":
        return hide
    if removal != "noise":
        row = query.baseline(removal)
        return lambda positions, targets: replace(positions, row, targets)
    drawn: list[Tensor] = []

    def disturb(positions: Iterable[int], targets: Sequence[int] | None) -> Change:
        if not drawn:
            shape = samples, len(query.token_ids), query.embedding_dim
            drawn.append(torch.randn(shape, generator=rng, dtype=torch.float32).to(query.device))
        return noise(positions, drawn[0], NOISE_SIZE, targets, relative=True, by_position=True)

    return disturb


def _ascending(positions: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(positions))


def _tuple(targets: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if targets is None else tuple(targets)


def expected_norm(norm: NormName, dim: int, *, exact: bool = True) -> float:
    """E‖n‖ of a vector of `dim` independent N(0, 1) numbers.

    Args:
        norm: "l1", "l2" or "linf".
        dim: number of components.
        exact: the exact expectation; otherwise the paper's approximation for large `dim` (appendix "Bounding
            Computations"): sqrt(d) for "l2", sqrt(2 ln d) for "linf". For "l1", d sqrt(2/π) is exact.

    >>> round(expected_norm("l2", 640), 4), round(expected_norm("l2", 640, exact=False), 4)
    (25.2883, 25.2982)
    """
    if norm == "l1":
        return dim * math.sqrt(2 / math.pi)
    if norm == "l2":
        return math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2)) if exact else math.sqrt(dim)
    return _expected_maximum(dim) if exact else math.sqrt(2 * math.log(dim))


def _expected_maximum(dim: int) -> float:
    """∫ 1 - P(max |n_i| <= x) dx, with P = erf(x / √2)^d."""
    from scipy.integrate import quad

    def above(x: float) -> float:
        return 1 - math.erf(x / math.sqrt(2)) ** dim

    return float(quad(above, 0, 40, points=[math.sqrt(2 * math.log(dim + 1))])[0])
