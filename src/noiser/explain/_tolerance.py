"""How much noise one unit tolerates: the prediction against k, which Noiser's bisection sees only
in part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsIndex

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.display import label
from noiser.attribution.markdown import escaped_line, markdown_table
from noiser.attribution.markup import css
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import FLAGS, ROW, ROWS, restored, to_jsonable
from noiser.engine import Effect, Predict, Query, effect_of, run_one
from noiser.engine import noise as add_noise
from noiser.errors import ParameterError
from noiser.explain._restore import restore
from noiser.explain.tolerance_html import tolerance_html
from noiser.files import write_if
from noiser.html import html_page
from noiser.methods import Noiser
from noiser.model import LanguageModel
from noiser.numbers import number_format
from noiser.registry import unversioned
from noiser.tensors import booleans, floats, integers
from noiser.text import token_texts
from noiser.types import Progress, Span, Target

if TYPE_CHECKING:
    from pandas import DataFrame

_HEAD = ("k", "P(target)", "most probable")

_HALF_OCTAVES = tuple(2.0 ** (-step / 2) for step in range(20, -1, -1))

GRID = (0.0, *_HALF_OCTAVES)
"""No noise, then 2^-10 to 1 in half octaves: from the resolution of Noiser's thresholds to where
its search begins.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tolerance(SavedResult):
    """The probability of each target as one unit gets more noise.

    Attributes:
        unit: the unit that gets the noise.
        unit_index: its place among the attribution's units.
        targets: the attribution's targets.
        ks: the sizes of the noise, as they were asked for.
        probabilities: P̄(u, k)[target], the mean over the noise samples; NaN for targets that the
            unit does not stand before.
        stderr: standard error of the probabilities over the samples; NaN with a single sample.
        flips: whether the most probable token of P̄ is another one than without noise; with a foil,
            whether the other one of the pair leads.
        leaders: for each target, the most probable token of P̄ at each k; empty where probabilities
            are NaN.
        foil_probabilities: P̄(u, k)[foil], for several tokens the geometric mean; None without a
            foil.
        thresholds: [targets], the unit's thresholds in an attribution by Noiser; None for other
            methods.
        k_min: [targets], the noise that every unit tolerates there; likewise.
    """

    unit: Span
    unit_index: int
    targets: tuple[Target, ...]
    ks: Annotated[Float[Tensor, " ks"], ROW]
    probabilities: Annotated[Float[Tensor, "targets ks"], ROWS]
    stderr: Annotated[Float[Tensor, "targets ks"], ROWS]
    flips: Annotated[Bool[Tensor, "targets ks"], FLAGS]
    leaders: tuple[tuple[Target, ...], ...]
    foil_probabilities: Annotated[Float[Tensor, " ks"], ROW] | None = None
    thresholds: Annotated[Float[Tensor, " targets"], ROW] | None = None
    k_min: Annotated[Float[Tensor, " targets"], ROW] | None = None

    def __post_init__(self) -> None:
        targets = len(self.targets)
        ks = len(self.ks)
        for name, expected in (
            ("probabilities", (targets, ks)),
            ("stderr", (targets, ks)),
            ("flips", (targets, ks)),
            ("foil_probabilities", (ks,)),
            ("thresholds", (targets,)),
            ("k_min", (targets,)),
        ):
            values: Tensor | None = getattr(self, name)
            if values is not None and values.shape != expected:
                raise ParameterError(
                    f"{name} has shape {[*values.shape]}; expected {[*expected]} for {targets} "
                    f"targets and {ks} ks."
                )
            if values is not None and values.isinf().any():
                raise ParameterError(f"{name} has infinite numbers; expected finite ones or NaN.")
        tokens = [len(leaders) for leaders in self.leaders]
        if len(tokens) != targets or any(count not in (0, ks) for count in tokens):
            raise ParameterError(
                f"leaders has {tokens} tokens; expected none or {ks} for each of {targets} targets."
            )

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """A table for each target that the unit stands before, with a line for each k; safe for a
        terminal.
        """
        lines: list[str] = []
        for row, target in enumerate(self.targets):
            if not self.leaders[row]:
                continue
            noise = f"k times standard normal noise on {label(self.unit.text)}"
            lines += ["", f"{label(target.text)}, with {noise}"]
            for k, probability, leader in [_HEAD, *self._lines(row)]:
                lines.append(f"{k:>8}  {probability:<17}  {leader}")
        return "\n".join(lines).strip("\n")

    def _lines(self, row: int) -> list[tuple[str, str, str]]:
        """For each k: k, the probability with its error, and the most probable token."""
        show = number_format([self.targets[row].probability])
        lines: list[tuple[str, str, str]] = []
        for column, leader in enumerate(self.leaders[row]):
            probability = float(self.probabilities[row, column])
            error = float(self.stderr[row, column])
            flips = "  (flips)" if self.flips[row, column] else ""
            lines.append(
                (
                    f"{self.ks[column]:.4g}",
                    show.with_error(probability, error),
                    f"{label(leader.text)}{flips}",
                )
            )
        return lines

    def to_dataframe(self) -> DataFrame:
        """One row per target that the unit stands before and k, in that order.

        Columns: target_index, target, k, probability, stderr, flips, leader, leader_probability,
            foil_probability (NaN
        without a foil).
        """
        import pandas as pd

        names = (
            "target_index target k probability stderr flips leader leader_probability "
            "foil_probability"
        )
        foil = (
            torch.full_like(self.ks, torch.nan)
            if self.foil_probabilities is None
            else self.foil_probabilities
        )
        rows: list[tuple[Any, ...]] = []
        for row, leaders in enumerate(self.leaders):
            if not leaders:  # the unit is not before this target
                continue
            columns = zip(
                floats(self.ks),
                floats(self.probabilities[row]),
                floats(self.stderr[row]),
                booleans(self.flips[row]),
                leaders,
                floats(foil),
                strict=True,
            )
            for k, probability, error, flips, leader, foil_probability in columns:
                rows.append(
                    (
                        row,
                        self.targets[row].text,
                        k,
                        probability,
                        error,
                        flips,
                        leader.text,
                        leader.probability,
                        foil_probability,
                    )
                )
        return pd.DataFrame(rows, columns=names.split())

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file."""
        return {"format": "noiser.tolerance", "schema": 1, **to_jsonable(vars(self))}

    @classmethod
    def from_dict(cls, data: Any) -> Tolerance:
        """The tolerance whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.tolerance"], data)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        style = f"{css()}body{{margin:1.5rem auto;max-width:48rem;padding:0 1rem}}"
        page = html_page("Noise and the prediction", style, f"<main>{self._charts()}</main>")
        return write_if(page, path)

    def to_markdown(self) -> str:
        """A Markdown table for each target that the unit stands before."""
        parts: list[str] = []
        for row, target in enumerate(self.targets):
            lines = self._lines(row)
            if lines:
                heading = f"{label(target.text)}, with noise on {label(self.unit.text)}"
                parts += [escaped_line(heading), markdown_table([_HEAD, *lines], (0, 1))]
        return "\n\n".join(parts) + "\n"

    def _charts(self) -> str:
        charts = [tolerance_html(self, row) for row, leaders in enumerate(self.leaders) if leaders]
        return "".join(charts)

    def _repr_html_(self) -> str:
        return f"<style>{css()}</style>{self._charts()}"


def tolerance(
    lm: LanguageModel,
    att: Attribution,
    unit_index: int,
    ks: Sequence[float] = GRID,
    *,
    progress: Progress | None = None,
) -> Tolerance:
    """The targets' probabilities, and flips, with k times standard normal noise on one unit.

    The noise is that of the attribution's own seed, so with an attribution by Noiser the flips are
    those that its search met: none at the unit's threshold, one at the next k above it that the
    search has tried.

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
    positions = query.positions[unit_index]
    targets = query.targets_per_unit[unit_index]
    vectors = _noise(query, att).to(query.device)  # once, not for every k
    perturbations = [add_noise(positions, vectors, k, targets) for k in ks]
    found = await Predict(
        query, perturbations, effect_of(query.objective("prob"), len(query.foil_ids))
    )
    table = torch.full(
        (len(att.targets), len(ks), len(Effect._fields)), torch.nan, dtype=torch.float64
    )
    table[list(targets)] = torch.stack(found, 1)
    columns = dict(zip(Effect._fields, table.unbind(-1), strict=True))
    leaders = [tuple[Target, ...]()] * len(att.targets)
    for row in targets:
        leader_ids = integers(columns["top_token"][row].int())
        leader_probabilities = floats(columns["top_probability"][row])
        leaders_of_target: list[Target] = []
        for token, probability in zip(leader_ids, leader_probabilities, strict=True):
            (text,) = token_texts(lm.tokenizer, [token])  # each token alone: bytes would join
            leaders_of_target.append(Target(text, token, probability, 1))
        leaders[row] = tuple(leaders_of_target)
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
        thresholds=None if att.thresholds is None else att.thresholds[:, unit_index],
        k_min=att.k_min,
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
    longest = max(len(unit.token_indices) for unit in att.units)
    rng = torch.Generator().manual_seed(att.seed)
    return method.draw(longest, query.embedding_dim, rng)[1]
