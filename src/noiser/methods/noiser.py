"""Noiser: bounded Gaussian noise on one unit's embeddings at a time (Ghasemi Madani et al. 2025)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice, check_count, check_positive
from noiser.engine import Engine, Perturbation, add_noise
from noiser.errors import ParameterError
from noiser.methods.certified import Certified
from noiser.methods.checks import refuse_foil
from noiser.methods.noise import NormName, as_noise, check_noise, count_samples, draw_k, draw_noise, expected_norm
from noiser.methods.protocol import Scores
from noiser.methods.readings import Question, Reading, ScoreName, read_all
from noiser.methods.search import Answer, Bisection, Mode, Probe, Search

__all__ = ["Bounding", "Noiser"]

Bounding = Literal["k_min", "k_max", "k_max_per_unit", "norm_l1", "norm_l2", "norm_linf", "random", "none", "relative"]
_SEARCHES: dict[str, Mode] = {"k_min": "min", "k_max": "max", "k_max_per_unit": "each"}

ROUNDING = 16
"""Epsilons by which half precision may move log odds: the standard deviation is 7, of Gemma 3 270M on 100 prompts."""


class Probed(NamedTuple):
    """A question to the model: noise `k` on `unit`, read at `target`. k is None for `relative` noise."""

    unit: int
    k: float | None
    target: int
    samples: int | None = None


@dataclass(frozen=True, kw_only=True)
class Noiser:
    """Scores each unit by how far the prediction falls when its embeddings get the noise that every unit tolerates.

    With P̄(u, k) the mean next-token distribution over `samples` inputs in which unit u has k times standard normal
    noise on its rows of the embedding table, unit u *flips* at k when the most probable token of P̄(u, k) is not
    the model's own; k_u is the largest k found by bisection of [0, 1] at which it does not (paper, section 3).
    The score is p(target | input) - P̄(u, k)[target], raw and signed.

    Args:
        samples: noise vectors M, shared by all units, all k and all targets.
        steps: halvings of the bisection; thresholds have a resolution of 2^-steps. When a unit flips at every probe,
            halving goes on until it does not, so k is never 0.
        bounding: the k of each unit: "k_min" or "k_max", the smallest or largest k_u of all units (per target);
            "k_max_per_unit", its own k_u; "norm_l1", "norm_l2", "norm_linf", 1 / E‖n‖; "random", one U(0, 1) number;
            "none", 1; a number, that k; "relative", r ‖e‖ / E‖n‖₂ for a token with embedding e, which needs no search.
        score: "prob" (the paper), "logprob", the drop of log p; or "hellinger", the distance between the whole
            distributions, which sees every token and is never negative.
        scope: "target", a search for each target; "continuation", one k for all, which changes none of them.
        r: size of "relative" noise, in norms of the embedding.
        exact_norms: exact E‖n‖ for the norm boundings; False for the paper's approximation for large dimensions.
        all_thresholds: search every unit's k_u to the end, also where only the smallest or largest is needed; for the
            three boundings that search.
        search: "exact" returns what bisecting every unit returns. "certified", for "k_min" alone, follows the units
            that a few noise samples say tolerate least, and lets the pass that scores certify that no other unit flips:
            less work, and the same result unless a unit flips at some k but not at a larger one.
        profile: "paper", or "authors" for the published script: special tokens are units too, and the last probe
            of the bisection is returned rather than the last that did not flip.
        noise: the caller's own noise, [samples, dim] or [samples, positions, dim] for units of several tokens, with
            `samples` left out.

    Raises:
        ParameterError: a value is outside its domain. UnknownNameError: an unknown name, with the nearest one.
    """

    samples: int = 10
    steps: int = 10
    bounding: Bounding | float = "k_min"
    score: ScoreName = "prob"
    scope: Literal["target", "continuation"] = "target"
    r: float = 2.0
    exact_norms: bool = True
    all_thresholds: bool = False
    search: Literal["exact", "certified"] = "exact"
    profile: Literal["paper", "authors"] = "paper"
    noise: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_count("samples", self.samples)
        if self.noise is not None:
            samples = None if self.samples == Noiser.samples else self.samples
            object.__setattr__(self, "noise", as_noise(self.noise))
            object.__setattr__(self, "samples", count_samples(self.noise, samples))
        check_count("steps", self.steps)
        if isinstance(self.bounding, str):
            check_choice("bounding", self.bounding, get_args(Bounding), "A number is also accepted, as k itself.")
        else:
            check_positive("bounding", self.bounding)
        check_choice("score", self.score, get_args(ScoreName))
        check_choice("scope", self.scope, ("target", "continuation"))
        check_choice("profile", self.profile, ("paper", "authors"))
        check_positive("r", self.r)
        check_choice("search", self.search, ("exact", "certified"))
        if self.all_thresholds and self.bounding not in _SEARCHES:
            raise ParameterError(
                f"all_thresholds is True and bounding {self.bounding!r}, which searches no threshold; expected "
                f"{', '.join(map(repr, _SEARCHES))}. Leave all_thresholds out, or choose one of them."
            )
        rest = (self.bounding, self.all_thresholds, self.profile)
        if self.search == "certified" and rest != ("k_min", False, "paper"):
            raise ParameterError(
                "search='certified' finds the smallest threshold alone; expected bounding='k_min', "
                f"all_thresholds=False and profile='paper', got {rest}. Use search='exact'."
            )

    @property
    def special_tokens(self) -> Literal["frozen", "perturbed"]:
        """Whether special tokens are units: only in the published script."""
        return "perturbed" if self.profile == "authors" else "frozen"

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:
        """Searches, bounds and scores; see the class."""
        refuse_foil(engine.query, self.score)
        run = _Run(self, engine, generator)
        searches = run.search()
        k = run.bounds(searches)
        readings = run.score(k)
        return run.scores(searches, k, readings)


class _Run:
    """One call of Noiser: the noise, what has been read so far, and the steps from there to scores."""

    def __init__(self, method: Noiser, engine: Engine, generator: torch.Generator) -> None:
        query = engine.query
        self.method, self.engine = method, engine
        self.units = [unit.token_indices for unit in query.units]
        self.pairs = [(g, u) for g, row in enumerate(query.visible.tolist()) for u, seen in enumerate(row) if seen]
        self.random_k = draw_k(generator) if method.bounding == "random" else math.nan
        self.noise = self._noise(generator)
        self.read: dict[Probed, Reading] = {}
        self.questions = [Question(engine=engine, index=g, score=method.score) for g in range(len(query.rows))]
        self._expected = self._expected_work()

    def _noise(self, generator: torch.Generator) -> Float[Tensor, "samples positions dim"]:
        longest, dim = max(map(len, self.units)), self.engine.table_rows.shape[-1]
        if self.method.noise is not None:
            noise = check_noise(self.method.noise, longest, dim)
        else:
            noise = draw_noise(self.method.samples, longest, dim, generator)
        return noise.to(self.engine.table_rows.device)

    # ---- what the model says -----------------------------------------------------------------------------------

    def evaluate(self, wanted: Iterable[Probed]) -> None:
        """Reads what has not been read yet; all targets of a (unit, k) pair come from the same passes."""
        targets: dict[tuple[int, float | None, int | None], set[int]] = {}
        for probe in wanted:
            if probe not in self.read:
                targets.setdefault((probe.unit, probe.k, probe.samples), set()).add(probe.target)
        asked = [(unit, k, samples, tuple(sorted(found))) for (unit, k, samples), found in targets.items()]
        perturbations = [self._perturbation(*each) for each in asked]
        measured: dict[Probed, tuple[Question, Tensor]] = {}
        for index, distributions in self.engine.distributions(perturbations):
            unit, k, samples, rows = asked[index]
            for position, g in enumerate(rows):
                question = self.questions[g]
                measured[Probed(unit, k, g, samples)] = question, question.measure(distributions[:, position])
            self.engine.report(max(self._expected, self.engine.token_forwards))
        self.read |= read_all(measured)

    def _perturbation(self, unit: int, k: float | None, samples: int | None, targets: tuple[int, ...]) -> Perturbation:
        positions = self.units[unit]
        scale = self._relative_scale(positions) if k is None else k
        return add_noise(positions, self.noise[:samples], scale, targets)

    def _relative_scale(self, positions: tuple[int, ...]) -> Float[Tensor, " positions"]:
        rows = self.engine.table_rows[list(positions)]
        return self.method.r * rows.norm(dim=-1) / expected_norm("l2", rows.shape[-1])

    # ---- how much noise -----------------------------------------------------------------------------------------

    def search(self) -> list[Search]:
        """Bisections run to their end, one a target, or one for the whole continuation; none without a search."""
        if self.method.bounding not in _SEARCHES:
            return []
        groups = self._groups()
        searches = [self._new_search(group) for group in groups]
        visible = set(self.pairs)
        while True:
            seen_by = [
                {probe: [g for g in group if (g, probe.unit) in visible] for probe in search.probes()}
                for search, group in zip(searches, groups, strict=True)
            ]
            if not any(seen_by):
                break
            self.evaluate(Probed(u, k, g, few) for asked in seen_by for (u, k, few), at in asked.items() for g in at)
            for search, asked in zip(searches, seen_by, strict=True):
                if asked:
                    search.update({probe: self._answer(probe, at) for probe, at in asked.items()})
        self._warn_of_ties(searches)
        return searches

    def _warn_of_ties(self, searches: Sequence[Search]) -> None:
        odds = min(abs(question.clean_odds) for question in self.questions)
        dtype = self.engine.lm.dtype
        name = str(dtype).removeprefix("torch.")
        if any(search.tied for search in searches):
            warnings.warn(
                "The prediction changes under noise as small as 1e-12: two tokens tie, or the precision is too low to "
                "tell them apart. The scores of this target mean little; load the model in float32.",
                stacklevel=3,
            )
        elif dtype.itemsize == 2 and odds < ROUNDING * torch.finfo(dtype).eps:
            warnings.warn(
                f"A target leads its strongest rival by {odds:.2g} in log odds, and {name} moves such leads by about "
                "as much: which noise changes the prediction, and so the scores' order, may be rounding's. Load the "
                "model with dtype='float32' to be sure.",
                stacklevel=3,
            )

    def _new_search(self, group: Sequence[int]) -> Search:
        units = sorted({u for g, u in self.pairs if g in group})
        if self.method.search == "certified":
            return Certified(units, steps=self.method.steps, samples=len(self.noise))
        mode = "each" if self.method.all_thresholds else _SEARCHES[str(self.method.bounding)]
        authors = self.method.profile == "authors"
        return Bisection(units, mode=mode, steps=self.method.steps, last_probe=authors)

    def _answer(self, probe: Probe, targets: Iterable[int]) -> Answer:
        """What the model says at the targets that share a search: the worst of it counts."""
        readings = [self.read[Probed(probe.unit, probe.k, g, probe.samples)] for g in targets]
        return Answer(any(reading.flips for reading in readings), min(reading.lead for reading in readings))

    def _groups(self) -> list[list[int]]:
        """The targets that share a search."""
        targets = list(range(len(self.questions)))
        return [targets] if self.method.scope == "continuation" else [[g] for g in targets]

    def bounds(self, searches: Sequence[Search]) -> dict[tuple[int, int], float | None]:
        """The k of every (target, unit) pair; None for relative noise."""
        if not searches:
            k = self._fixed_k()
            return dict.fromkeys(self.pairs, k)
        found: dict[tuple[int, int], float | None] = {}
        for group, search in zip(self._groups(), searches, strict=True):
            thresholds: list[float] = search.thresholds(len(self.units)).tolist()
            known = [k for k in thresholds if not math.isnan(k)]
            ends = {"k_min": min(known, default=math.nan), "k_max": max(known, default=math.nan)}
            shared = ends.get(str(self.method.bounding))
            found |= {(g, u): thresholds[u] if shared is None else shared for g, u in self.pairs if g in group}
        return found

    def _fixed_k(self) -> float | None:
        bounding = self.method.bounding
        if isinstance(bounding, str) and bounding.startswith("norm_"):
            norm: NormName = bounding.removeprefix("norm_")  # pyright: ignore
            return 1 / expected_norm(norm, self.noise.shape[-1], exact=self.method.exact_norms)
        named = {"random": self.random_k, "none": 1.0, "relative": None}
        return named[bounding] if isinstance(bounding, str) else float(bounding)

    # ---- scores -------------------------------------------------------------------------------------------------

    def score(self, k: dict[tuple[int, int], float | None]) -> dict[tuple[int, int], Reading]:
        """The reading of every pair at its k."""
        self.evaluate(Probed(u, k[g, u], g) for g, u in self.pairs)
        self.engine.report(self.engine.token_forwards)
        return {(g, u): self.read[Probed(u, k[g, u], g)] for g, u in self.pairs}

    def scores(
        self,
        searches: Sequence[Search],
        k: dict[tuple[int, int], float | None],
        readings: dict[tuple[int, int], Reading],
    ) -> Scores:
        """Everything as tensors."""
        shape = (len(self.questions), len(self.units))
        scores, stderr, used, thresholds = (torch.full(shape, torch.nan) for _ in range(4))
        for (g, u), reading in readings.items():
            scores[g, u], stderr[g, u] = reading.score, reading.stderr
            used[g, u] = float("nan") if (bound := k[g, u]) is None else bound
        k_min = torch.full(shape[:1], torch.nan)
        complete = self.method.bounding in ("k_min", "k_max_per_unit") or self.method.all_thresholds
        for group, search in zip(self._groups(), searches, strict=False):
            found = search.thresholds(len(self.units))
            for g in group:
                thresholds[g] = torch.where(self.engine.query.visible[g], found, torch.nan)
                k_min[g] = found.nan_to_num(torch.inf).min() if complete else torch.nan
        return Scores(
            scores=scores,
            thresholds=thresholds,
            k_min=k_min,
            stderr=stderr,
            info={"k": used.tolist(), "token_forwards": self.engine.token_forwards, "passes": self.engine.passes},
        )

    def _expected_work(self) -> float:
        """Token-forwards of a scoring pass for each target, and of a search that leaves one unit in most rounds."""
        rows = self.engine.query.rows
        each = [len(self.noise) * (rows[g] + 1 - self.units[u][0]) for g, u in self.pairs]
        if self.method.bounding not in _SEARCHES:
            return sum(each)
        typical = sum(each) / len(each) * self.method.steps * len(rows)
        return 2 * sum(each) + typical
