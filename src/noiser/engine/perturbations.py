"""Changes of an input, and the request for a prediction under them.

Rows are those of the embedding table, before any factor that the embedding module puts on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from noiser.engine.objectives import ObjectiveFn
from noiser.engine.query import Query, Request
from noiser.model.layout import Layout
from noiser.model.packing import Context
from noiser.model.scene import Handed, Scene
from noiser.text.pictures import Region

Rows = Callable[[Tensor], Tensor]
"""From the clean rows of some positions [positions, dim] to changed ones [samples, positions,
dim].

`OneRow` and `AddedNoise` are such functions, and data: those of a whole pass are computed together.
"""


@dataclass(frozen=True, eq=False)
class OneRow:
    """Every position holds the same row."""

    row: Float[Tensor, " dim"]

    def __call__(self, clean: Float[Tensor, "positions dim"]) -> Float[Tensor, "1 positions dim"]:
        """The row at each position."""
        return self.row.to(clean).expand(1, *clean.shape)


@dataclass(frozen=True, eq=False)
class AddedNoise:
    """Every position x becomes `x + k * n`.

    Attributes:
        vectors: standard normal numbers n. A position gets the vector of its place among the
            positions that change, or with `by_position` that of the position itself.
        positions: the positions that change, ascending.
        scale: k; or with `relative` r, which makes k = r ‖x‖ / E‖n‖₂ at each position.
    """

    vectors: Float[Tensor, "samples longest dim"]
    positions: tuple[int, ...]
    scale: float
    relative: bool = False
    by_position: bool = False

    @property
    def columns(self) -> Sequence[int]:
        """Which of the vectors each position gets."""
        return self.positions if self.by_position else range(len(self.positions))

    def __call__(
        self, clean: Float[Tensor, "positions dim"]
    ) -> Float[Tensor, "samples positions dim"]:
        """The rows with noise."""
        chosen = self.vectors[:, list(self.columns)]
        return add_noise(clean, chosen, self.scale, self.relative)


def add_noise(
    clean: Float[Tensor, "positions dim"],
    vectors: Float[Tensor, "*samples positions dim"],
    scale: float | Float[Tensor, "positions 1"],
    relative: bool,
) -> Float[Tensor, "*samples positions dim"]:
    """`x + k * n`; see `AddedNoise`."""
    k = scale
    if relative:
        k = scale * clean.norm(dim=-1)[:, None] / expected_norm("l2", clean.shape[-1])
    return clean + k * vectors.to(clean)


@dataclass(frozen=True, eq=False)
class PictureChange:
    """Regions of a prompt's pictures that are removed.

    Attributes:
        scene: the pictures.
        regions: what is removed of them.
        removal: "grey" and "blur" change pixels, which the vision tower reads; "rows" changes the
            tokens of the regions, as a removal changes words.
        positions: the tokens that it changes, ascending.
    """

    scene: Scene
    regions: frozenset[Region]
    removal: str
    positions: tuple[int, ...]

    @property
    def changes_pixels(self) -> bool:
        """Whether the vision tower reads other pixels."""
        return self.removal != "rows"

    def applied(self, context: Context, handed: Handed | None) -> Context:
        """A view of a clean sequence in which the pictures are changed.

        `handed` is what the text model gets for changed pixels.
        """
        layout = context.layout
        if layout is None:
            return context
        places = list(self.positions)
        if handed is None:
            gone = [each.new_zeros(len(places), each.shape[1]) for each in layout.deep]
            return replace(context, layout=layout.with_deep(places, gone))
        inputs = context.inputs.clone()
        inputs[places] = handed.inputs[places].to(inputs)
        deep = [each[places] for each in handed.layout.deep]
        return replace(context, inputs=inputs, layout=layout.with_deep(places, deep))


@dataclass(frozen=True, eq=False)
class Perturbation:
    """One change of the input, in one or several samples.

    Attributes:
        positions: the token positions that it changes, ascending.
        rows: what the changed rows are, computed when a pass is filled, so that a long list of
            changes takes no memory; None: the tokens are taken out, and later ones move up.
        samples: how many versions of the changed rows there are.
        hidden: no later token after the sources attends to the positions, and no row changes; see
            `hide`.
        targets: indices of the targets that are read under it; None for all.
        read: what is read under it in place of the request's own numbers; None for these.
        pictures: regions of pictures that are removed with the positions; or None.
    """

    positions: tuple[int, ...]
    rows: Rows | None = None
    samples: int = 1
    hidden: bool = False
    targets: Sequence[int] | None = None
    read: ObjectiveFn | None = None
    pictures: PictureChange | None = None

    @property
    def deletes(self) -> bool:
        """Whether its positions are taken out."""
        return self.rows is None and not self.hidden

    def layout(self, context: Context, stop: int) -> Layout | None:
        """How the tokens stand up to `stop`, which counts those that are left."""
        if context.layout is None:
            return None
        if not self.deletes:
            return context.layout.grown(stop)
        return context.layout.grown(stop + len(self.positions)).without(self.positions)


def set_rows(
    positions: Iterable[int],
    rows: Float[Tensor, " dim"] | Float[Tensor, "samples positions dim"],
    targets: Sequence[int] | None = None,
) -> Perturbation:
    """The change in which every position holds one row, such as a baseline's, or rows of its own in
    each sample.
    """
    places = tuple(sorted(positions))
    if rows.ndim == 1:
        return Perturbation(places, OneRow(rows), targets=targets)
    count = len(rows)
    return Perturbation(
        places, lambda clean: rows.to(clean).expand(count, *clean.shape), count, targets=targets
    )


def delete(positions: Iterable[int], targets: Sequence[int] | None = None) -> Perturbation:
    """The change without the tokens, as if the text had never had them.

    A target whose predicting token is deleted is read at the last token before it.
    """
    return Perturbation(tuple(sorted(positions)), targets=targets)


def hide(positions: Iterable[int], targets: Sequence[int] | None = None) -> Perturbation:
    """The change in which no later token after the sources attends to the tokens, in any layer.

    The sources read each other as always, so only the tokens after the last of them run again: the
    question and the answer (attention knockout, Geva et al. 2023, arXiv 2304.14767). Without
    sources no later token attends to the hidden ones. A token always attends to itself.
    """
    return Perturbation(tuple(sorted(positions)), hidden=True, targets=targets)


def noise(
    positions: Iterable[int],
    vectors: Float[Tensor, "samples longest dim"],
    scale: float = 1.0,
    targets: Sequence[int] | None = None,
    *,
    relative: bool = False,
    by_position: bool = False,
) -> Perturbation:
    """The change `x + scale * n`: the first of the noise's positions goes to the first position,
    and so on.

    Args:
        positions: the positions that get noise.
        vectors: standard normal numbers n.
        scale: k; or with `relative` r, which makes k = r ‖x‖ / E‖n‖₂ at each position.
        targets: as in `Perturbation`.
        relative: noise of r times the size of the embedding that it disturbs.
        by_position: the vectors are [samples, length, dim], and a position gets its own whichever
            others change.
    """
    places = tuple(sorted(positions))
    rows = AddedNoise(vectors, places, scale, relative, by_position)
    return Perturbation(places, rows, len(vectors), targets=targets)


def scale_rows(
    positions: Iterable[int],
    masks: Callable[[], Tensor],
    samples: int,
    targets: Sequence[int] | None = None,
) -> Perturbation:
    """The change `x * mask`: soft masks [samples, positions, dim or 1] that are made when a pass is
    filled.
    """
    return Perturbation(
        tuple(sorted(positions)), lambda clean: clean * masks().to(clean), samples, targets=targets
    )


def expected_norm(norm: Literal["l1", "l2", "linf"], dim: int) -> float:
    """E‖n‖ of a vector of `dim` independent N(0, 1) numbers; the paper gives the limits for large
    `dim` in an appendix.

    >>> round(expected_norm("l2", 640), 4), round(expected_norm("linf", 640), 4)
    (25.2883, 3.3118)
    """
    if norm == "l1":
        return dim * math.sqrt(2 / math.pi)
    if norm == "l2":
        return math.sqrt(2) * math.exp(math.lgamma((dim + 1) / 2) - math.lgamma(dim / 2))
    from scipy.integrate import quad

    def above(x: float) -> float:
        return 1 - math.erf(x / math.sqrt(2)) ** dim  # P(max |n_i| > x)

    return float(quad(above, 0, 40, points=[math.sqrt(2 * math.log(dim + 1))])[0])


def expected_norm_limit(norm: Literal["l1", "l2", "linf"], dim: int) -> float:
    """The paper's E‖n‖ for large `dim` (appendix "Bounding Computations").

    The authors' script divides by it. It is more than the exact expectation: by 0.04 % for "l2" and
    8.5 % for "linf" at `dim` 640.

    >>> round(expected_norm_limit("l2", 640), 4), round(expected_norm_limit("linf", 640), 4)
    (25.2982, 3.5948)
    """
    limits = {
        "l1": dim * math.sqrt(2 / math.pi),
        "l2": math.sqrt(dim),
        "linf": math.sqrt(2 * math.log(dim)),
    }
    return limits[norm]


@dataclass(frozen=True, eq=False)
class Predict(Request[list[Tensor]]):
    """The request to read numbers of a prediction under changes of the query's input.

    The answer is a list with one tensor for each change, [targets, ...], float64 on the CPU: the
    numbers that `read` (see `noiser.engine.objectives`), or the change's own `read`, makes of the
    logits at each target that the change names, from all of its samples. `read` gets the logits of
    several changes at a time, [changes, samples, tokens, vocab].
    """

    query: Query
    perturbations: Sequence[Perturbation]
    read: ObjectiveFn
