"""Noiser: bounded Gaussian noise on one unit's embeddings at a time.

See Ghasemi Madani et al. 2025.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from noiser.engine import (
    Effect,
    Perturbation,
    Predict,
    Query,
    effect_of,
    expected_norm,
    expected_norm_limit,
    log_odds_margins,
    noise,
)
from noiser.errors import OutOfTimeError, ParameterError
from noiser.methods.protocol import ObjectiveName, Parameters, Scores
from noiser.methods.thresholds import (
    FIRST,
    Mode,
    Probe,
    Thresholds,
    ThresholdSearch,
    bisection,
    certified,
)
from noiser.notices import warn
from noiser.tensors import booleans, float_rows, floats, true_indices
from noiser.types import Profile, SpecialTokens

Bounding = Literal[
    "k_min",
    "k_max",
    "k_max_per_unit",
    "norm_l1",
    "norm_l2",
    "norm_linf",
    "random",
    "none",
    "relative",
]
_SEARCHES: dict[str, Mode] = {"k_min": "min", "k_max": "max", "k_max_per_unit": "each"}

NormName = Literal["l1", "l2", "linf"]
NoiseNorm = Literal["none", "l1", "l2", "linf"]

_FIXED_SIZE = ("norm_l1", "norm_l2", "norm_linf", "relative")
"""Boundings that give the noise its size by a norm: it is not divided by another one before."""

FIRST_AT_MOST = 0.5
"""The largest k at which a search begins, in the middle of its interval."""

# Epsilons by which half precision may move log odds: their standard deviation is 7 for Gemma 3 270M
# on 100 prompts.
ROUNDING = 16


@dataclass(frozen=True, kw_only=True)
class Noiser(Parameters):
    """Scores each unit by the fall of the prediction under the noise that every unit tolerates.

    The noise is on the unit's embeddings. With P̄(u, k) the mean next-token distribution over
    `samples` inputs in which unit u has k times standard normal noise on its rows of the embedding
    table, unit u *flips* at k when the most probable token of P̄(u, k) is not the model's own; k_u
    is the largest k found by bisection of [0, 1] at which it does not (paper, section 3). The score
    is p(target | input) - P̄(u, k)[target], raw and signed. A target span flips when any of its
    tokens does.

    Args:
        samples: noise vectors M, shared by all units, all k and all targets.
        steps: halvings of the bisection, to a resolution of 2^-steps; more where a unit flips at
            every probe.
        bounding: the k of each unit: "k_min" or "k_max", the smallest or largest k_u of all units
            (per target); "k_max_per_unit", its own k_u; "norm_l1", "norm_l2", "norm_linf", 1 /
            E‖n‖; "random", one U(0, 1) number; "none", 1; a number, that k; "relative", r ‖e‖ /
            E‖n‖₂ for a token with embedding e, which needs no search.
        objective: "prob" (the paper) or another of `noiser.engine.OBJECTIVES`; "hellinger", the
            distance between the whole distributions, sees every token and is never negative.
        r: size of "relative" noise, in norms of the embedding.
        search: of "k_min". "certified" returns a k at which the scoring pass has shown that no unit
            flips, at half the cost of "bisection", the paper's algorithm. The two differ where a
            unit flips at some k but not at a larger one that bisection probes. None: "certified"
            where it can be; the other boundings need bisection.
        profile: "paper", or "authors" for the published script: special tokens are units too, the
            last probe of the bisection is returned rather than the last that did not flip, noise is
            divided by √d before the search, and norms are the paper's limits for large d, √(2 ln d)
            for "linf", in place of exact ones. docs/methods.md lists what else the script does.
        noise: the caller's own noise, [samples, dim], or [samples, positions, dim] for units of
            several tokens, with `samples` left out.
        noise_norm: the norm by whose expectation E‖n‖ the noise is divided before the search. The
            paper's equations scale such bounded noise, k n / E‖n‖; its prose scales n. In both, k
            is in [0, 1]. "none" is raw noise; None is the profile's own: raw for "paper", and "l2"
            for "authors" where k is searched.
    """

    samples: int = 10
    steps: int = 10
    bounding: Bounding | float = "k_min"
    objective: ObjectiveName = "prob"
    r: float = 2.0
    search: Literal["certified", "bisection"] | None = None
    profile: Profile = "paper"
    noise: Tensor | None = field(default=None, repr=False, compare=False)
    noise_norm: NoiseNorm | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise is not None:
            try:
                noise = torch.as_tensor(
                    self.noise, device="cpu"
                )  # a saved file, or a command line, has lists
            except (TypeError, ValueError, RuntimeError) as error:
                raise ParameterError(
                    f"noise is not an array of numbers: {error}. Pass [samples, dim]."
                ) from error
            if not noise.ndim:
                raise ParameterError(f"noise is {noise.item()}. Pass [samples, dim].")
            if self.samples not in (Noiser.samples, len(noise)):
                raise ParameterError(
                    f"samples is {self.samples} and noise has {len(noise)}; leave samples out."
                )
            self.__dict__.update(noise=noise, samples=len(noise))  # the dataclass is frozen
        if self.search == "bisection" and self.bounding not in _SEARCHES:  # nothing is searched
            self.__dict__.update(search=None)
        if self.noise_norm not in (None, "none") and self.bounding in _FIXED_SIZE:
            raise ParameterError(
                f"noise_norm is {self.noise_norm!r} and bounding={self.bounding!r} gives the noise "
                "its size already; expected one of them. Leave noise_norm out, or search for k, as "
                "bounding='k_min' does."
            )
        if self.search == "certified" and not self.certifies:
            raise ParameterError(
                "search='certified' finds the smallest threshold; expected bounding='k_min' and "
                f"profile='paper', got {(self.bounding, self.profile)}. Leave search "
                "out, or use search='bisection'."
            )

    @property
    def certifies(self) -> bool:
        return self.search != "bisection" and (self.bounding, self.profile) == ("k_min", "paper")

    @property
    def special_tokens(self) -> SpecialTokens:
        return "perturbed" if self.profile == "authors" else "frozen"

    def divisor(self, dim: int) -> float:
        """The number that the noise is divided by before any k scales it; 1 for raw noise."""
        norm = self.noise_norm
        if norm is None and self.profile == "authors" and self.bounding in _SEARCHES:
            norm = "l2"
        return 1.0 if norm in (None, "none") else self.norm(norm, dim)

    def norm(self, norm: NormName, dim: int) -> float:
        """E‖n‖ of the noise on one token: exact, or in the authors' profile the paper's limit."""
        limit = self.profile == "authors"
        return expected_norm_limit(norm, dim) if limit else expected_norm(norm, dim)

    def draw(
        self, longest: int, dim: int, rng: torch.Generator
    ) -> tuple[float, Float[Tensor, "samples longest dim"]]:
        """The k of bounding "random" (else NaN), and the noise, divided by `divisor`."""
        k = math.nan
        if self.bounding == "random":
            k = float(torch.rand((), generator=rng, dtype=torch.float64))
        return k, self._numbers(longest, dim, rng) / self.divisor(dim)

    def _numbers(
        self, longest: int, dim: int, rng: torch.Generator
    ) -> Float[Tensor, "samples longest dim"]:
        """Standard normal numbers: the caller's own, or drawn."""
        if self.noise is None:
            return draw_noise(self.samples, longest, dim, rng)
        noise = self.noise
        if noise.ndim == 2 and longest == 1:
            noise = noise[:, None]
        fits = False
        if noise.ndim == 3:
            samples, positions, dim_of_noise = noise.shape
            fits = samples > 0 and positions >= longest and dim_of_noise == dim
        if not fits or not torch.isfinite(noise).all():
            raise ParameterError(
                f"noise has shape {list(self.noise.shape)}; expected finite numbers, "
                f"[samples, {dim}] for units of one token, or [samples, positions, {dim}] with "
                f"{longest} or more positions, the longest unit's tokens."
            )
        return noise.float()

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        call = _Call(self, query, rng)
        return await call.score(await call.search())


def draw_noise(
    samples: int, longest: int, dim: int, rng: torch.Generator
) -> Float[Tensor, "samples longest dim"]:
    """Independent N(0, 1) numbers, position by position.

    The first ones do not depend on the longest unit.
    """
    blocks = [
        torch.randn(samples, dim, generator=rng, device="cpu", dtype=torch.float32)
        for _ in range(longest)
    ]
    return torch.stack(blocks, dim=1)


def _fixed_k(method: Noiser, random_k: float, dim: int) -> float:
    """The k of a bounding without a search; NaN for the others."""
    bounding = method.bounding
    if not isinstance(bounding, str):
        return float(bounding)
    if bounding.startswith("norm_"):
        return 1 / method.norm(bounding.removeprefix("norm_"), dim)  # pyright: ignore
    fixed_k = {"random": random_k, "none": 1.0, "relative": method.r}
    return fixed_k.get(bounding, math.nan)


class _Call:
    """One call of Noiser: the noise, and the effects that are known so far."""

    def __init__(self, method: Noiser, query: Query, rng: torch.Generator) -> None:
        self.method = method
        self.query = query
        self.units = query.positions
        dim = query.embedding_dim
        self.relative = method.bounding == "relative"
        longest = max(map(len, self.units))
        random_k, noise = method.draw(longest, dim, rng)
        self.noise = noise.to(query.device)  # once, not for every change
        self.fixed_k = _fixed_k(method, random_k, dim)
        self.read = effect_of(query.objective(method.objective), len(query.foil_ids))
        self.effects: dict[tuple[int, Probe], Effect] = {}

    async def evaluate(self, asked: Iterable[tuple[int, Probe]], *, partial: bool = False) -> None:
        """Asks for the effects on targets that are not known yet.

        All targets of a probe come from the same passes. With `partial` some are missing where the
        call's time goes by; else that is an error.
        """
        groups: dict[Probe, list[int]] = {}
        for target, probe in dict.fromkeys(asked):
            if (target, probe) not in self.effects:
                groups.setdefault(probe, []).append(target)
        perturbations: list[Perturbation] = []
        for (unit, k, samples), targets in groups.items():
            vectors = self.noise[:samples]
            perturbations.append(
                noise(self.units[unit], vectors, k, targets, relative=self.relative)
            )
        try:
            effects: Sequence[Tensor | None] = await Predict(self.query, perturbations, self.read)
        except OutOfTimeError as stopped:
            effects = stopped.found
            if not partial or all(rows is None for rows in effects):
                raise
        for (probe, targets), rows in zip(groups.items(), effects, strict=True):
            if rows is None:
                continue
            for target, numbers in zip(targets, float_rows(rows), strict=True):
                self.effects[target, probe] = Effect(*numbers)

    async def search(self) -> Float64[Tensor, "targets units"]:
        """The thresholds that were searched to the end; NaN for others."""
        mask = self.query.causal_mask
        thresholds = torch.full(mask.shape, torch.nan, dtype=torch.float64)
        if self.method.bounding not in _SEARCHES:
            return thresholds
        tied = False
        searches = [self._start_search(true_indices(row)) for row in mask]
        # All targets search in step, so that they share the passes of a round.
        answers: dict[int, Any] = dict.fromkeys(range(len(searches)))
        while answers:
            probes_of: dict[int, list[Probe]] = {}
            for target, answer in answers.items():
                try:
                    probes_of[target] = searches[target].send(answer)
                except StopIteration as stop:
                    found: Thresholds = stop.value
                    k = torch.tensor([*found.k.values()], dtype=torch.float64)
                    thresholds[target, list(found.k)] = k
                    tied |= found.tied
            await self.evaluate(
                (target, probe) for target, probes in probes_of.items() for probe in probes
            )
            answers = {}
            for target, probes in probes_of.items():
                answers[target] = {probe: self.effects[target, probe] for probe in probes}
        self._warn_of_ties(tied)
        return thresholds

    def _start_search(self, units: list[int]) -> ThresholdSearch:
        """The search for one target, over the units before it."""
        method = self.method
        if method.certifies:
            # A unit tolerates a k that is larger by as much as the noise was divided by.
            first = min(FIRST * method.divisor(self.query.embedding_dim), FIRST_AT_MOST)
            return certified(units, steps=method.steps, samples=len(self.noise), first=first)
        mode = _SEARCHES[str(method.bounding)]
        last_probe = method.profile == "authors"
        return bisection(units, mode=mode, steps=method.steps, last_probe=last_probe)

    def _warn_of_ties(self, tied: bool) -> None:
        query = self.query
        dtype = query.context.inputs.dtype
        smallest_margins: list[Tensor] = []
        for clean, ids in zip(query.clean_of, query.ids, strict=True):
            margins = log_odds_margins(clean, clean.argmax(-1), ids, len(query.foil_ids))
            smallest_margins.append(margins.abs().min())
        moved = ROUNDING * torch.finfo(dtype).eps
        if tied:
            warn(
                "The prediction changes under noise as small as 1e-12: two tokens tie, or the "
                "precision is too low to tell them apart. The scores of this target mean little. "
                "Load the model with dtype='float32'.",
            )
        elif dtype.itemsize == 2 and min(smallest_margins) < moved:
            # The text is the same for many prompts, so that it is shown once.
            warn(
                f"A target leads its strongest rival by less than {moved:.2g} in log odds, and "
                f"{str(dtype).removeprefix('torch.')} can move margins by that much: the order of "
                "the scores may come from rounding. Load the model with dtype='float32'.",
            )

    async def score(self, thresholds: Float64[Tensor, "targets units"]) -> Scores:
        """The effects at every unit's k, with the thresholds."""
        bounding = self.method.bounding
        mask = self.query.causal_mask
        k_min = thresholds.nan_to_num(torch.inf).amin(1)
        k_max = thresholds.nan_to_num(-torch.inf).amax(1)
        k_of_search = {
            "k_min": k_min[:, None],
            "k_max": k_max[:, None],
            "k_max_per_unit": thresholds,
        }
        fixed = torch.tensor(self.fixed_k, dtype=torch.float64)
        k = k_of_search.get(str(bounding), fixed).expand_as(mask)
        probes: dict[tuple[int, int], Probe] = {}
        for target, is_before in enumerate(mask):
            for unit in true_indices(is_before):
                probes[target, unit] = Probe(unit, float(k[target, unit]))
        await self.evaluate(
            ((target, probe) for (target, _), probe in probes.items()), partial=True
        )

        scores = torch.full_like(thresholds, torch.nan)
        stderr = torch.full_like(thresholds, torch.nan)
        for (target, unit), probe in probes.items():
            effect = self.effects.get((target, probe))
            if effect is not None:
                scores[target, unit] = effect.score
                stderr[target, unit] = effect.stderr
        has_k_min = bounding in ("k_min", "k_max_per_unit")
        info: dict[str, Any] = {
            "k": float_rows(k.masked_fill(~mask | self.relative, torch.nan)),
            **self._saturation(k_min),
        }
        return Scores(
            scores=scores,
            thresholds=thresholds,
            k_min=k_min if has_k_min else torch.full_like(k_min, torch.nan),
            stderr=stderr,
            info=info,
        )

    def _saturation(self, least: Float64[Tensor, " targets"]) -> dict[str, list[bool]]:
        """Whether no unit flips at the largest k of the search, for each target, and whether one
        does at the smallest.

        k_min is in the first case the end of the interval, 1 - 2^-steps, and not a noise that a
        unit fails to tolerate: the noise then has a fixed size, as with bounding "norm_l2" if the
        noise was divided by its l2 norm. In the second case it is at most 2^-steps: the target
        and its rival are nearly tied, and the scores are of next to no noise.
        """
        if self.method.bounding not in ("k_min", "k_max_per_unit"):
            return {}
        largest = 1 - 2.0**-self.method.steps
        flipping = {
            target
            for (target, probe), effect in self.effects.items()
            if probe.k == largest and probe.samples is None and effect.flips
        }
        return {
            "saturated": [
                k == largest and target not in flipping for target, k in enumerate(floats(least))
            ],
            "near_tie": booleans(least <= 2.0**-self.method.steps),
        }
