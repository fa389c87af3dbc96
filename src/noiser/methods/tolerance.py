"""How much noise one unit tolerates: the prediction against k, which Noiser's bisection sees only in part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import Engine, Progress, add_noise
from noiser.errors import ParameterError
from noiser.methods.noise import as_noise, check_noise, count_samples, draw_k, draw_noise
from noiser.methods.readings import Question, fetch
from noiser.model import LanguageModel, rebuild_query
from noiser.model.text import token_texts
from noiser.registry import unversioned
from noiser.types import Span, Target

__all__ = ["GRID", "Tolerance", "tolerance"]

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
    """The targets' probabilities, and flips, with k times standard normal noise on one unit (design, section 3.4).

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
        NumericalError: the model returned NaN or infinite logits.
    """
    _check(att, unit_index, ks)
    query = rebuild_query(lm, att)
    engine = Engine(lm, query, progress=progress)
    positions = query.units[unit_index].token_indices
    chosen = _noise(engine, att, samples, noise)
    rows = query.seen_by[unit_index]
    work = len(ks) * len(chosen) * (max((query.rows[g] for g in rows), default=0) + 1 - positions[0])
    questions = {g: Question(engine=engine, index=g, score="prob") for g in rows}

    perturbations = [add_noise(positions, chosen, float(k), rows) for k in ks] if rows else []
    measured: dict[tuple[int, int], Tensor] = {}
    spread: list[Tensor] = []
    for index, distributions in engine.distributions(perturbations):
        for position, g in enumerate(rows):
            found = distributions[:, position]
            measured[g, index] = questions[g].measure(found)
            spread.append(found[:, query.target_ids[g]].std(correction=min(1, len(found) - 1)))
        engine.report(max(work, engine.token_forwards))

    shape = (len(query.target_ids), len(ks))
    probabilities, stderr = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    flips = torch.zeros(shape, dtype=torch.bool)
    foils = None if query.foil_id is None else torch.full(shape[1:], torch.nan)
    leading: dict[tuple[int, int], tuple[int, float]] = {}
    deviations = torch.stack(spread).tolist() if spread else []
    for (g, index), numbers, deviation in zip(measured, fetch(list(measured.values())), deviations, strict=True):
        probabilities[g, index] = numbers.target
        if len(chosen) > 1:
            stderr[g, index] = deviation / math.sqrt(len(chosen))
        flips[g, index] = questions[g].flips(numbers)
        leading[g, index] = int(numbers.leader), numbers.most
        if foils is not None:
            foils[index] = numbers.foil
    return Tolerance(
        unit=att.units[unit_index],
        unit_index=unit_index,
        targets=att.targets,
        ks=torch.tensor([float(k) for k in ks]),
        probabilities=probabilities,
        stderr=stderr,
        flips=flips,
        leaders=_leaders(lm, leading, shape),
        foil_probabilities=foils,
    )


def _check(att: Attribution, unit_index: int, ks: Sequence[float]) -> None:
    if not 0 <= unit_index < len(att.units):
        raise ParameterError(f"unit_index is {unit_index}; expected 0 to {len(att.units) - 1}, as in `units`.")
    wrong = [k for k in ks if not 0 <= float(k) < math.inf]
    if wrong or not len(ks):
        raise ParameterError(f"ks is {wrong[:1] or list(ks)}; expected one or more finite numbers of at least 0.")


def _noise(
    engine: Engine, att: Attribution, samples: int | None, noise: Tensor | None
) -> Float[Tensor, "samples positions dim"]:
    """The caller's noise, or what Noiser draws for this attribution."""
    longest, dim = max(len(unit.token_indices) for unit in att.units), engine.table_rows.shape[-1]
    own = att.parameters if unversioned(att.method) in ("noiser", "noiser_relative") else {}
    given = own.get("noise") if noise is None and samples is None else noise
    if given is not None:
        given = as_noise(given)  # in a saved attribution it is lists
        count_samples(given, samples)
        found = check_noise(given, longest, dim)
    else:
        count = samples if samples is not None else own.get("samples", 10)
        check_count("samples", count)
        generator = torch.Generator().manual_seed(att.seed)
        if own.get("bounding") == "random":
            draw_k(generator)
        found = draw_noise(count, longest, dim, generator)
    return found.to(engine.table_rows.device)  # once, not for every k


def _leaders(
    lm: LanguageModel, leading: dict[tuple[int, int], tuple[int, float]], shape: tuple[int, int]
) -> tuple[tuple[Target, ...], ...]:
    ids = sorted({token for token, _ in leading.values()})
    texts = {token: token_texts(lm.tokenizer, [token])[0] for token in ids}
    return tuple(
        tuple(
            Target(texts[token], token, probability, 1)
            for token, probability in (leading[g, index] for index in range(shape[1]) if (g, index) in leading)
        )
        for g in range(shape[0])
    )
