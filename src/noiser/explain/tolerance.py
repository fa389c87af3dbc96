"""How much noise one unit tolerates: the prediction against k, which Noiser's bisection sees only in part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.display import label, number_format
from noiser.checks import check_count
from noiser.engine import AddNoise, Effects, EffectTable, LocalEngine, Query
from noiser.errors import ParameterError
from noiser.methods.noise import as_noise, check_noise, count_samples, draw_k, draw_noise
from noiser.model import LanguageModel, rebuild_query
from noiser.registry import unversioned
from noiser.text import token_texts
from noiser.types import Progress, Span, Target

if TYPE_CHECKING:
    from pandas import DataFrame

GRID = (0.0, *(2.0 ** (-step / 2) for step in range(20, -1, -1)))
"""No noise, then 2^-10 to 1 in half octaves: from the resolution of Noiser's thresholds to where its search begins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tolerance:
    """What becomes of each target as one unit gets more noise.

    Attributes:
        unit: the unit that gets the noise.
        unit_index: its place among the attribution's units.
        targets: the attribution's targets.
        ks: [ks], the sizes of the noise, as they were asked for.
        probabilities: [targets, ks], P̄(u, k)[target], the mean over the noise samples; NaN for targets that the unit
            does not stand before.
        stderr: [targets, ks], standard error of the probabilities over the samples; NaN with a single sample.
        flips: [targets, ks], whether the model changes its mind, as Noiser's search sees it: the most probable token of
            P̄ is another one than without noise; with a foil, the other one of the pair leads.
        leaders: for each target, the most probable token of P̄ at each k; empty where probabilities are NaN.
        foil_probabilities: [ks], P̄(u, k)[foil]; None without a foil.
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
            lines += ["", f"{label(target.text)}, with k times standard normal noise on {label(self.unit.text)}"]
            lines.append(f"{'k':>8}  {'P(target)':<17}  most probable")
            for column, leader in enumerate(leaders):
                p, error = self.probabilities[row, column].item(), self.stderr[row, column].item()
                flips = "  (flips)" if self.flips[row, column] else ""
                lines.append(f"{self.ks[column]:>8.4g}  {show.with_error(p, error):<17}  {label(leader.text)}{flips}")
        return "\n".join(lines).strip("\n")

    def to_dataframe(self) -> DataFrame:
        """One row per target that the unit stands before and k, in that order.

        Columns: target_index, target, k, probability, stderr, flips, leader, leader_probability, foil_probability (NaN
        without a foil).
        """
        import pandas as pd

        none = self.ks.new_full(self.ks.shape, torch.nan)
        foil = none if self.foil_probabilities is None else self.foil_probabilities
        frames = [
            pd.DataFrame(
                {
                    "target_index": row,
                    "target": target.text,
                    "k": self.ks.tolist(),
                    "probability": self.probabilities[row].tolist(),
                    "stderr": self.stderr[row].tolist(),
                    "flips": self.flips[row].tolist(),
                    "leader": [leader.text for leader in leaders],
                    "leader_probability": [leader.probability for leader in leaders],
                    "foil_probability": foil.tolist(),
                }
            )
            for row, (target, leaders) in enumerate(zip(self.targets, self.leaders, strict=True))
            if leaders
        ]
        return pd.concat(frames, ignore_index=True)


def tolerance(
    lm: LanguageModel,
    att: Attribution,
    unit_index: int,
    ks: Sequence[float] = GRID,
    *,
    samples: int | None = None,
    noise: Tensor | None = None,
    progress: Progress | None = None,
) -> Tolerance:
    """The targets' probabilities, and flips, with k times standard normal noise on one unit.

    The noise is that of the attribution's own seed, so with an attribution by Noiser the flips are those that its
    search met: none at the unit's threshold, one at the next k above it that the search has tried.

    Args:
        lm: the model that made the attribution, or one that cuts its text into the same tokens.
        att: an attribution by any method.
        unit_index: which of its units gets the noise.
        ks: sizes of the noise, at least 0.
        samples: noise vectors; None for as many as Noiser made the attribution with, or 10.
        noise: the caller's own, as for `Noiser`, with `samples` left out; None for that of the attribution.
        progress: called with (done, expected) token-forwards.

    Raises:
        ParameterError: there is no such unit, a k is negative or not finite, `samples` is not the number in the noise,
            or the model does not fit the attribution.
        PromptError: the text exceeds the model's context.
        ModelError: memory does not suffice.
        NumericalError: the model returned NaN or infinite logits.
    """
    _check(att, unit_index, ks)
    query = rebuild_query(lm, att)
    positions, targets = query.units[unit_index].token_indices, query.targets_per_unit[unit_index]
    vectors = _noise(query, att, samples, noise).to(query.device)  # once, not for every k
    noisy = [AddNoise(positions, targets, noise=vectors, scale=float(k)) for k in ks]
    table: EffectTable = LocalEngine(lm).ask(query, Effects(noisy), progress)
    ids = sorted({token for token in table.leader.flatten().tolist() if token >= 0})
    texts = {token: token_texts(lm.tokenizer, [token])[0] for token in ids}  # each alone: bytes would join
    return Tolerance(
        unit=att.units[unit_index],
        unit_index=int(unit_index),
        targets=att.targets,
        ks=torch.tensor([float(k) for k in ks], device="cpu"),
        probabilities=table.probability.T.float(),
        stderr=table.probability_stderr.T.float(),
        flips=table.flips.T,
        leaders=tuple(
            tuple(Target(texts[token], token, p, 1) for token, p in zip(leaders, most, strict=True) if token >= 0)
            for leaders, most in zip(table.leader.T.tolist(), table.leader_probability.T.tolist(), strict=True)
        ),
        foil_probabilities=None if not query.foil_ids else table.foil_probability[:, 0].float(),
    )


def _check(att: Attribution, unit_index: int, ks: Sequence[float]) -> None:
    if not isinstance(att, Attribution):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ParameterError(f"att is {att!r:.200}; expected what noiser.attribute returns.")
    if not isinstance(unit_index, SupportsIndex) or not 0 <= unit_index < len(att.units):  # pyright: ignore
        raise ParameterError(f"unit_index is {unit_index}; expected 0 to {len(att.units) - 1}, as in `units`.")
    if not isinstance(ks, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ParameterError(f"ks is {ks!r}; expected one or more finite numbers of at least 0.")
    wrong = [k for k in ks if isinstance(k, str) or not 0 <= float(k) < math.inf]
    if wrong or not len(ks):
        raise ParameterError(f"ks is {wrong[:1] or list(ks)}; expected one or more finite numbers of at least 0.")


def _noise(
    query: Query, att: Attribution, samples: int | None, noise: Tensor | None
) -> Float[Tensor, "samples positions dim"]:
    """The caller's noise, or what Noiser draws for this attribution."""
    longest, dim = max(len(unit.token_indices) for unit in att.units), query.embedding_dim
    own = att.parameters if unversioned(att.method) in ("noiser", "noiser_relative") else {}
    given = own.get("noise") if noise is None and samples is None else noise
    if given is not None:
        given = as_noise(given)  # in a saved attribution it is lists
        count_samples(given, samples)
        return check_noise(given, longest, dim)
    count = samples if samples is not None else own.get("samples", 10)
    check_count("samples", count)
    generator = torch.Generator().manual_seed(att.seed)
    if own.get("bounding") == "random":
        draw_k(generator)
    return draw_noise(count, longest, dim, generator)
