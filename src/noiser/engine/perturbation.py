"""Perturbations, as plain data: what replaces the clean embeddings at some positions, or takes their tokens out.

All of them act on unscaled rows of the embedding table, before any factor that the embedding module puts on them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.model.query import Query
from noiser.types import RemovalName

Baseline = Literal["zero", "pad", "unk", "mean"]
"""What stands for nothing: zeros, the row of the padding or unknown token, or the mean row of the table."""

BASELINES: tuple[str, ...] = get_args(Baseline)

Absence = Literal["zero", "pad", "unk", "mean", "delete", "hidden"]
"""How a unit is absent: its rows are a baseline's; "delete": its tokens are not there, and later ones move up; or
"hidden": what comes after the sources does not attend to them, see `Hide`."""

ABSENCES: tuple[str, ...] = get_args(Absence)

BaselineRow = Callable[[Baseline], Float[Tensor, " dim"]]
"""From a baseline's name to its row; the engine knows the table."""

REMOVALS: tuple[str, ...] = get_args(RemovalName)

NormName = Literal["l1", "l2", "linf"]

NOISE_SIZE = 2.0
"""Relative noise of this size: r of `AddNoise`, as `noiser_relative` has it."""


@dataclass(frozen=True, eq=False)
class Perturbation(ABC):
    """One change of the input, in one or several samples.

    Attributes:
        positions: the token positions that it changes, ascending.
        targets: indices of the targets that are read under it; None for all. Without any, it is not run.
    """

    positions: tuple[int, ...]
    targets: tuple[int, ...] | None = None

    @property
    def samples(self) -> int:
        """How many versions of the changed rows there are."""
        return 1

    @property
    def deleted(self) -> tuple[int, ...]:
        """Those of the positions whose tokens are taken out, ascending: every later token moves up."""
        return ()

    @property
    def hidden(self) -> tuple[int, ...]:
        """Those of the positions to which tokens after the sources do not attend, ascending; see `Hide`."""
        return ()

    @abstractmethod
    def rows(
        self, clean: Float[Tensor, "positions dim"], baseline: BaselineRow, /
    ) -> Float[Tensor, "samples positions dim"]:
        """The changed rows of the positions that are neither deleted nor hidden.

        Called when a batch runs, so that a long list of perturbations takes no memory.
        """

    @property
    def replaced(self) -> tuple[int, ...]:
        """Those of the positions that are neither deleted nor hidden, for which there are `rows`; ascending."""
        without = {*self.deleted, *self.hidden}
        return tuple(position for position in self.positions if position not in without) if without else self.positions

    def first(self, sources_stop: int) -> int:  # noqa: ARG002 - of `Hide`
        """The first position that differs from the clean sequence; `sources_stop` is that after the last source."""
        return self.positions[0]

    def index(self, position: int) -> int:
        """Where the token of a clean position stands in the changed sequence.

        For a deleted token that is where the last one before it stands, which predicts what it predicted; -1 for none.
        """
        return position - bisect_right(self.deleted, position)

    def tokens(self, start: int, stop: int, length: int) -> Sequence[int]:
        """The clean positions of the changed sequence's tokens `start` to `stop`; fewer where it ends before `stop`.

        Args:
            start: at most the first deleted position.
            stop: after the last token.
            length: of the clean sequence.
        """
        if not self.deleted:
            return range(start, stop)
        deleted = set(self.deleted)
        return tuple(islice((i for i in range(start, length) if i not in deleted), stop - start))


@dataclass(frozen=True, eq=False)
class AddNoise(Perturbation):
    """`x + scale * noise`: the first of the noise's positions goes to the first position, and so on.

    Attributes:
        noise: [samples, longest unit, dim], standard normal numbers.
        scale: k; or with `relative`, r.
        relative: k is r ‖x‖ / E‖n‖₂ at each position: noise of r times the size of the embedding that it disturbs.
        by_position: the noise is [samples, length, dim], and a position gets its own, whichever others are disturbed.
    """

    _: KW_ONLY
    noise: Float[Tensor, "samples longest dim"]
    scale: float = 1.0
    relative: bool = False
    by_position: bool = False

    @property
    def samples(self) -> int:
        """One for each noise vector."""
        return len(self.noise)

    def rows(self, clean: Float[Tensor, "positions dim"], _: BaselineRow, /) -> Float[Tensor, "samples positions dim"]:
        """See the class."""
        k: float | Tensor = self.scale
        if self.relative:
            k = (k * clean.norm(dim=-1) / expected_norm("l2", clean.shape[-1]))[:, None]
        noise = self.noise[:, list(self.positions)] if self.by_position else self.noise[:, : len(clean)]
        return clean + k * noise.to(clean)


@dataclass(frozen=True, eq=False)
class Replace(Perturbation):
    """Every position holds the baseline row."""

    _: KW_ONLY
    baseline: Baseline = "zero"

    def rows(
        self, clean: Float[Tensor, "positions dim"], baseline: BaselineRow, /
    ) -> Float[Tensor, "samples positions dim"]:
        """See the class."""
        return baseline(self.baseline).to(clean).expand(1, *clean.shape)


@dataclass(frozen=True, eq=False)
class Delete(Perturbation):
    """The tokens are taken out, as if the text had never had them; for `Effects` and `Values`.

    A target whose predicting token is deleted is read at the last token before it.
    """

    @property
    def deleted(self) -> tuple[int, ...]:
        """All of the positions."""
        return self.positions

    def rows(self, clean: Float[Tensor, "positions dim"], _: BaselineRow, /) -> Float[Tensor, "samples positions dim"]:
        """No position remains."""
        return clean[None]


@dataclass(frozen=True, eq=False)
class Hide(Perturbation):
    """No later token after the sources attends to the tokens, in any layer; for `Effects` and `Values`.

    The sources read each other as they always do, so only what comes after the last of them is run again: the question
    and the answer. (Geva et al. 2023, arXiv 2304.14767, knock attention out in this way.) In a prompt without sources
    no later token at all attends to the hidden ones. A token always attends to itself.
    """

    @property
    def hidden(self) -> tuple[int, ...]:
        """All of the positions."""
        return self.positions

    def first(self, sources_stop: int) -> int:
        """The first token that no longer attends to one of them."""
        return max(self.positions[0] + 1, sources_stop)

    def rows(self, clean: Float[Tensor, "positions dim"], _: BaselineRow, /) -> Float[Tensor, "samples positions dim"]:
        """No row changes."""
        return clean[None]


def without(positions: tuple[int, ...], targets: tuple[int, ...] | None, baseline: Absence) -> Perturbation:
    """The input without some tokens, as `baseline` says."""
    if baseline == "delete":
        return Delete(positions, targets)
    if baseline == "hidden":
        return Hide(positions, targets)
    return Replace(positions, targets, baseline=baseline)


@dataclass(frozen=True, eq=False)
class KeepDimensions(Perturbation):
    """`x * keep`: the soft masks of Zhao and Aletras (2023), one binary mask per dimension.

    Attributes:
        keep: makes the masks, [samples, positions, dim or 1]; perhaps called more than once.
        count: how many masks it makes.
    """

    _: KW_ONLY
    keep: Callable[[], Bool[Tensor, "samples positions dim"]]
    count: int

    @property
    def samples(self) -> int:
        """One for each mask."""
        return self.count

    def rows(self, clean: Float[Tensor, "positions dim"], _: BaselineRow, /) -> Float[Tensor, "samples positions dim"]:
        """See the class."""
        return clean * self.keep().to(clean)


@dataclass(frozen=True, eq=False)
class SetRows(Perturbation):
    """Rows that the caller has made.

    Attributes:
        given: [samples, positions, dim].
    """

    _: KW_ONLY
    given: Float[Tensor, "samples positions dim"]

    @property
    def samples(self) -> int:
        """One for each version of the rows."""
        return len(self.given)

    def rows(self, clean: Float[Tensor, "positions dim"], _: BaselineRow, /) -> Float[Tensor, "samples positions dim"]:
        """See the class."""
        return self.given.to(clean)


@dataclass(frozen=True, eq=False)
class Interpolate(Perturbation):
    """`base + α (x - base)` at all positions together, one sample for each α.

    Attributes:
        baseline: where the path begins.
        alphas: places on it, 0 for the baseline and 1 for the input.
    """

    _: KW_ONLY
    baseline: Baseline = "zero"
    alphas: Sequence[float] = (1.0,)

    @property
    def samples(self) -> int:
        """One for each α."""
        return len(self.alphas)

    def rows(
        self, clean: Float[Tensor, "positions dim"], baseline: BaselineRow, /
    ) -> Float[Tensor, "samples positions dim"]:
        """See the class."""
        base = baseline(self.baseline).to(clean).expand_as(clean)
        return torch.stack([torch.lerp(base, clean, alpha) for alpha in self.alphas])


class Remover:
    """Makes the perturbations that remove tokens of one query.

    Args:
        query: whose tokens.
        removal: "zero" or "mean": the row of each token becomes zeros, or the mean row of the embedding table; "noise":
            it gets noise of twice its size, the same at a position whatever else is removed; "delete": the token is
            taken out, and later ones move up.
        generator: of the noise, which is drawn when the first tokens are removed.
        samples: of the noise; with another removal there is one sample.

    Raises:
        UnknownNameError: no such removal.
    """

    def __init__(self, query: Query, removal: RemovalName, generator: torch.Generator, samples: int = 5) -> None:
        check_choice("removal", removal, REMOVALS)
        self._query, self._generator, self._samples = query, generator, samples
        self.removal: RemovalName = removal

    def __call__(self, positions: Iterable[int], targets: tuple[int, ...] | None = None) -> Perturbation:
        """The perturbation without the tokens at these positions; `targets` are those that are read under it."""
        positions = tuple(sorted(positions))
        if self.removal != "noise":
            return without(positions, targets, self.removal)
        return AddNoise(positions, targets, noise=self._noise, scale=NOISE_SIZE, relative=True, by_position=True)

    @cached_property
    def _noise(self) -> Float[Tensor, "samples length dim"]:
        shape = self._samples, len(self._query.token_ids), self._query.embedding_dim
        return torch.randn(shape, generator=self._generator, dtype=torch.float32).to(self._query.device)


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
