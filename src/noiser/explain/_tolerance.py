"""How much noise one unit tolerates: the prediction against k, which Noiser's bisection sees only in part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.display import label
from noiser.engine import Ask, Effect, Query, effect_of, run_one
from noiser.engine import noise as add_noise
from noiser.errors import ParameterError
from noiser.explain import restore
from noiser.methods import Noiser
from noiser.model import LanguageModel
from noiser.numbers import number_format
from noiser.registry import unversioned
from noiser.text import token_texts
from noiser.types import Progress, Span, Target

if TYPE_CHECKING:
    from pandas import DataFrame

GRID = (0.0, *(2.0 ** (-step / 2) for step in range(20, -1, -1)))
"""No noise, then 2^-10 to 1 in half octaves: from the resolution of Noiser's thresholds to where its search begins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tolerance:
    """The probability of each target as one unit gets more noise.

    Attributes:
        unit: the unit that gets the noise.
        unit_index: its place among the attribution's units.
        targets: the attribution's targets.
        ks: the sizes of the noise, as they were asked for.
        probabilities: P̄(u, k)[target], the mean over the noise samples; NaN for targets that the unit does not stand
            before.
        stderr: standard error of the probabilities over the samples; NaN with a single sample.
        flips: whether the most probable token of P̄ is another one than without noise; with a foil, whether the other
            one of the pair leads.
        leaders: for each target, the most probable token of P̄ at each k; empty where probabilities are NaN.
        foil_probabilities: P̄(u, k)[foil], of several tokens the geometric mean; None without a foil.
    """

    unit: Span
    unit_index: int
    targets: tuple[Target, ...]
    ks: Float[Tensor, " ks"]
    probabilities: Float[Tensor, "targets ks"]
    stderr: Float[Tensor, "targets ks"]
    flips: Bool[Tensor, "targets ks"]
    leaders: tuple[tuple[Target, ...], ...]
    foil_probabilities: Float[Tensor, " ks"] | None = None

    def __str__(self) -> str:
        """A table for each target that the unit stands before, with a line for each k; safe for a terminal."""
        lines: list[str] = []
        for row, (target, leaders) in enumerate(zip(self.targets, self.leaders, strict=True)):
            if not leaders:
                continue
            show = number_format([target.probability])
            lines += [
                "",
                f"{label(target.text)}, with k times standard normal noise on {label(self.unit.text)}",
            ]
            lines.append(f"{'k':>8}  {'P(target)':<17}  most probable")
            for column, leader in enumerate(leaders):
                p, error = self.probabilities[row, column].item(), self.stderr[row, column].item()
                flips = "  (flips)" if self.flips[row, column] else ""
                lines.append(
                    f"{self.ks[column]:>8.4g}  {show.with_error(p, error):<17}  {label(leader.text)}{flips}"
                )
        return "\n".join(lines).strip("\n")

    def to_dataframe(self) -> DataFrame:
        """One row per target that the unit stands before and k, in that order.

        Columns: target_index, target, k, probability, stderr, flips, leader, leader_probability, foil_probability (NaN
        without a foil).
        """
        import pandas as pd

        names = "target_index target k probability stderr flips leader leader_probability foil_probability"
        foil = (
            torch.full_like(self.ks, torch.nan)
            if self.foil_probabilities is None
            else self.foil_probabilities
        )
        rows: list[tuple[Any, ...]] = []
        for row, leaders in enumerate(self.leaders):
            columns = self.ks, self.probabilities[row], self.stderr[row], self.flips[row], foil
            numbers = zip(leaders, *(column.tolist() for column in columns), strict=bool(leaders))
            rows += [
                (row, self.targets[row].text, *n, one.text, one.probability, p)
                for one, *n, p in numbers
            ]
        return pd.DataFrame(rows, columns=names.split())


def tolerance(
    lm: LanguageModel,
    att: Attribution,
    unit_index: int,
    ks: Sequence[float] = GRID,
    *,
    progress: Progress | None = None,
) -> Tolerance:
    """The targets' probabilities, and flips, with k times standard normal noise on one unit.

    The noise is that of the attribution's own seed, so with an attribution by Noiser the flips are those that its
    search met: none at the unit's threshold, one at the next k above it that the search has tried.

    Args:
        lm: the model that made the attribution, or one that cuts its text into the same tokens.
        att: an attribution by any method; without noise of its own, ten samples are drawn.
        unit_index: which of its units gets the noise.
        ks: sizes of the noise, at least 0.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: no such unit or k, or the model does not fit the attribution.

    Example:
        >>> print(noiser.tolerance(lm, att, 2))  # doctest: +SKIP
    """
    if not isinstance(att, Attribution):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ParameterError(f"att is {att!r:.200}; expected what noiser.attribute returns.")
    if not isinstance(unit_index, SupportsIndex) or not 0 <= unit_index < len(att.units):  # pyright: ignore
        raise ParameterError(
            f"unit_index is {unit_index}; expected 0 to {len(att.units) - 1}, as in `units`."
        )
    sizes = [float(k) for k in ks] if isinstance(ks, Iterable) else []  # pyright: ignore[reportUnnecessaryIsInstance]
    if not sizes or not all(0 <= k < math.inf for k in sizes):
        raise ParameterError(
            f"ks is {ks!r:.200}; expected one or more finite numbers of at least 0."
        )
    return run_one(lm, _tolerance(lm, att, int(unit_index), sizes), progress)


async def _tolerance(
    lm: LanguageModel, att: Attribution, unit_index: int, ks: list[float]
) -> Tolerance:
    query = await restore(lm, att)
    positions, targets = query.positions[unit_index], query.targets_per_unit[unit_index]
    vectors = _noise(query, att).to(query.device)  # once, not for every k
    changes = [add_noise(positions, vectors, k, targets) for k in ks]
    found = await Ask(query, changes, effect_of(query.score("prob"), len(query.foil_ids)))
    table = torch.full(
        (len(att.targets), len(ks), len(Effect._fields)), torch.nan, dtype=torch.float64
    )
    table[list(targets)] = torch.stack(found, 1)
    columns: dict[str, Tensor] = Effect(*table.unbind(-1))._asdict()  # pyright: ignore[reportArgumentType]
    leaders = [tuple[Target, ...]()] * len(att.targets)
    for row in targets:
        pairs = zip(
            columns["leader"][row].int().tolist(),
            columns["leader_probability"][row].tolist(),
            strict=True,
        )
        # each token alone: bytes would join
        leaders[row] = tuple(
            Target(token_texts(lm.tokenizer, [token])[0], token, p, 1) for token, p in pairs
        )
    return Tolerance(
        unit=att.units[unit_index],
        unit_index=unit_index,
        targets=att.targets,
        ks=torch.tensor(ks, device="cpu"),
        probabilities=columns["probability"].float(),
        stderr=columns["probability_stderr"].float(),
        flips=columns["flips"] == 1,
        leaders=tuple(leaders),
        foil_probabilities=None if query.foil is None else columns["foil_probability"][0].float(),
    )


def _noise(query: Query, att: Attribution) -> Tensor:
    """The noise that Noiser draws for this attribution, [samples, positions, dim]."""
    by_noiser = unversioned(att.method) in ("noiser", "noiser_relative")
    method = Noiser(
        **{
            k: v
            for k, v in att.parameters.items()
            if by_noiser and k in ("samples", "bounding", "noise", "noise_norm", "profile")
        }
    )
    longest, rng = (
        max(len(unit.token_indices) for unit in att.units),
        torch.Generator().manual_seed(att.seed),
    )
    return method.draw(longest, query.embedding_dim, rng)[1]
