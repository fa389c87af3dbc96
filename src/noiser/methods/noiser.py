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

from noiser.checks import check_choice, check_positive, set_count
from noiser.engine import AddNoise, Effect, Effects, EffectTable, NormName, Query, ScoreName, Steps, expected_norm
from noiser.errors import ParameterError
from noiser.methods.noise import as_noise, check_noise, count_samples, draw_k, draw_noise
from noiser.methods.protocol import Scores
from noiser.methods.search import TIE, Answer, Bisection, Certified, Mode, Probe, Search
from noiser.types import Profile, SpecialTokens

Bounding = Literal["k_min", "k_max", "k_max_per_unit", "norm_l1", "norm_l2", "norm_linf", "random", "none", "relative"]
_SEARCHES: dict[str, Mode] = {"k_min": "min", "k_max": "max", "k_max_per_unit": "each"}

ROUNDING = 16
"""Epsilons by which half precision may move log odds: the standard deviation is 7, of Gemma 3 270M on 100 prompts."""


class Probed(NamedTuple):
    """Noise `k` (None: "relative") on `unit`, read at `target`, with the first `samples` noise vectors or with all."""

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
    The score is p(target | input) - P̄(u, k)[target], raw and signed. A target span flips when any of its tokens does.

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
        all_thresholds: also search every unit's k_u to the end, by bisection, where only the smallest or largest is
            needed; for the three boundings that search.
        search: of "k_min". "certified" returns a k at which the scoring pass has shown that no unit flips; it follows
            the units that a few noise samples say tolerate least, at half the cost. "bisection" is the paper's
            algorithm, each unit by itself. The two differ where a unit flips at some k but not at a larger one that
            bisection probes. None: "certified" where it can be, else "bisection", as the other boundings need it.
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
    search: Literal["certified", "bisection"] | None = None
    profile: Profile = "paper"
    noise: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_count(self, "samples")
        if self.noise is not None:
            samples = None if self.samples == Noiser.samples else self.samples
            object.__setattr__(self, "noise", as_noise(self.noise))
            object.__setattr__(self, "samples", count_samples(self.noise, samples))
        set_count(self, "steps")
        if isinstance(self.bounding, str):
            check_choice("bounding", self.bounding, get_args(Bounding), "A number is also accepted, as k itself.")
        else:
            check_positive("bounding", self.bounding)
        check_choice("score", self.score, get_args(ScoreName))
        check_choice("scope", self.scope, ("target", "continuation"))
        check_choice("profile", self.profile, get_args(Profile))
        check_positive("r", self.r)
        if self.search is not None:
            check_choice("search", self.search, ("certified", "bisection"))
        if self.search == "bisection" and self.bounding not in _SEARCHES:  # nothing is searched
            object.__setattr__(self, "search", None)
        if self.all_thresholds and self.bounding not in _SEARCHES:
            raise ParameterError(
                f"all_thresholds is True and bounding {self.bounding!r}, which searches no threshold; expected "
                f"{', '.join(map(repr, _SEARCHES))}. Leave all_thresholds out, or choose one of them."
            )
        if self.search == "certified" and not self._can_certify:
            raise ParameterError(
                "search='certified' finds the smallest threshold; expected bounding='k_min' and profile='paper', got "
                f"{(self.bounding, self.profile)}. Leave search out, or use search='bisection'."
            )

    @property
    def _can_certify(self) -> bool:
        return (self.bounding, self.profile) == ("k_min", "paper")

    @property
    def certifies(self) -> bool:
        """Whether the search is the certified one."""
        return self._can_certify if self.search is None else self.search == "certified"

    @property
    def special_tokens(self) -> SpecialTokens:
        """Whether special tokens are units: only in the published script."""
        return "perturbed" if self.profile == "authors" else "frozen"

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Searches, bounds and scores; see the class."""
        run = _Run(self, query, rng)
        searches = yield from run.search()
        k = run.bounds(searches)
        effects = yield from run.score(k)
        return run.scores(searches, k, effects)


class _Run:
    """One call of Noiser: the noise, the effects that are known so far, and the steps from there to scores."""

    def __init__(self, method: Noiser, query: Query, rng: torch.Generator) -> None:
        self.method, self.query = method, query
        self.units = [unit.token_indices for unit in query.units]
        self.pairs = [(g, u) for g, row in enumerate(query.causal_mask.tolist()) for u, seen in enumerate(row) if seen]
        self.targets = range(len(query.target_spans))
        self.random_k = draw_k(rng) if method.bounding == "random" else math.nan
        longest, dim = max(map(len, self.units)), query.embedding_dim
        if method.noise is not None:
            noise = check_noise(method.noise, longest, dim)
        else:
            noise = draw_noise(method.samples, longest, dim, rng)
        self.noise = noise.to(query.device)  # once, not for every perturbation
        self.effects: dict[Probed, Effect] = {}
        self.clean_leads: list[float] = []
        self.complete: list[Search] = []
        self.expected = self._expected_work()

    # ---- what the model says -----------------------------------------------------------------------------------

    def evaluate(self, probes: Iterable[Probed]) -> Steps[None]:
        """Asks for what is not known yet; all targets of a (unit, k) pair come from the same passes."""
        targets: dict[tuple[int, float | None, int | None], set[int]] = {}
        for probe in probes:
            if probe not in self.effects:
                targets.setdefault((probe.unit, probe.k, probe.samples), set()).add(probe.target)
        noisy = [
            AddNoise(
                self.units[unit],
                tuple(sorted(group)),
                noise=self.noise[:samples],
                scale=self.method.r if k is None else k,
                relative=k is None,
            )
            for (unit, k, samples), group in targets.items()
        ]
        table: EffectTable = yield Effects(noisy, self.method.score, expected=self.expected)
        self.clean_leads = table.clean_lead.tolist()
        for ((unit, k, samples), group), row in zip(targets.items(), table.rows(), strict=True):
            self.effects |= {Probed(unit, k, g, samples): row[g] for g in group}

    # ---- how much noise -----------------------------------------------------------------------------------------

    def search(self) -> Steps[list[Search]]:
        """Searches run to their end, one per target, or one for the whole continuation; none without a search."""
        if self.method.bounding not in _SEARCHES:
            return []
        searches = yield from self._run_searches([self._new_search(group) for group in self._groups()])
        self._warn_of_ties(searches)
        self.complete = searches
        if self.method.certifies and self.method.all_thresholds:
            self.complete = yield from self._run_searches([self._bisection(group, "each") for group in self._groups()])
        return searches

    def _run_searches(self, searches: list[Search]) -> Steps[list[Search]]:
        groups = self._groups()
        pairs = set(self.pairs)
        while True:
            rounds = [
                {probe: [g for g in group if (g, probe.unit) in pairs] for probe in search.probes()}
                for search, group in zip(searches, groups, strict=True)
            ]
            if not any(rounds):
                break
            yield from self.evaluate(
                Probed(u, k, g, few) for probes in rounds for (u, k, few), group in probes.items() for g in group
            )
            for search, probes in zip(searches, rounds, strict=True):
                if probes:
                    search.update({probe: self._answer(probe, group) for probe, group in probes.items()})
        return searches

    def _warn_of_ties(self, searches: Sequence[Search]) -> None:
        lead, dtype = min(map(abs, self.clean_leads), default=math.inf), self.query.dtype
        if any(search.tied for search in searches):
            warnings.warn(f"{TIE} Load the model with dtype='float32'.", stacklevel=3)
        elif dtype.itemsize == 2 and lead < ROUNDING * torch.finfo(dtype).eps:
            name = str(dtype).removeprefix("torch.")
            warnings.warn(
                f"A target leads its strongest rival by {lead:.2g} in log odds, and {name} moves such leads by about "
                "as much: which noise changes the prediction, and so the scores' order, may be rounding's. Load the "
                "model with dtype='float32' to be sure.",
                stacklevel=3,
            )

    def _new_search(self, group: Sequence[int]) -> Search:
        if self.method.certifies:
            return Certified(self._units_of(group), steps=self.method.steps, samples=len(self.noise))
        return self._bisection(group, "each" if self.method.all_thresholds else _SEARCHES[str(self.method.bounding)])

    def _bisection(self, group: Sequence[int], mode: Mode) -> Bisection:
        authors = self.method.profile == "authors"
        return Bisection(self._units_of(group), mode=mode, steps=self.method.steps, last_probe=authors)

    def _units_of(self, group: Sequence[int]) -> list[int]:
        return sorted({u for g, u in self.pairs if g in group})

    def _answer(self, probe: Probe, targets: Iterable[int]) -> Answer:
        """What the model says at the targets that share a search: the worst of it counts."""
        effects = [self.effects[Probed(probe.unit, probe.k, g, probe.samples)] for g in targets]
        return Answer(any(effect.flips for effect in effects), min(effect.lead for effect in effects))

    def _groups(self) -> list[list[int]]:
        """The targets that share a search."""
        targets = list(self.targets)
        return [targets] if self.method.scope == "continuation" else [[g] for g in targets]

    def bounds(self, searches: Sequence[Search]) -> dict[tuple[int, int], float | None]:
        """The k of every (target, unit) pair; None for relative noise."""
        if not searches:
            return dict.fromkeys(self.pairs, self._fixed_k())
        bounds: dict[tuple[int, int], float | None] = {}
        for group, search in zip(self._groups(), searches, strict=True):
            thresholds: list[float] = search.thresholds(len(self.units)).tolist()
            known = [k for k in thresholds if not math.isnan(k)]
            ends = {"k_min": min(known, default=math.nan), "k_max": max(known, default=math.nan)}
            shared = ends.get(str(self.method.bounding))
            bounds |= {(g, u): thresholds[u] if shared is None else shared for g, u in self.pairs if g in group}
        return bounds

    def _fixed_k(self) -> float | None:
        bounding = self.method.bounding
        if isinstance(bounding, str) and bounding.startswith("norm_"):
            norm: NormName = bounding.removeprefix("norm_")  # pyright: ignore
            return 1 / expected_norm(norm, self.query.embedding_dim, exact=self.method.exact_norms)
        named = {"random": self.random_k, "none": 1.0, "relative": None}
        return named[bounding] if isinstance(bounding, str) else float(bounding)

    # ---- scores -------------------------------------------------------------------------------------------------

    def score(self, k: dict[tuple[int, int], float | None]) -> Steps[dict[tuple[int, int], Effect]]:
        """The effect on every pair at its k."""
        self.expected = 0.0
        yield from self.evaluate(Probed(u, k[g, u], g) for g, u in self.pairs)
        return {(g, u): self.effects[Probed(u, k[g, u], g)] for g, u in self.pairs}

    def scores(
        self,
        searches: Sequence[Search],
        k: dict[tuple[int, int], float | None],
        effects: dict[tuple[int, int], Effect],
    ) -> Scores:
        """Everything as tensors."""
        shape = (len(self.targets), len(self.units))
        scores, stderr, used, thresholds = (torch.full(shape, torch.nan, dtype=torch.float32) for _ in range(4))
        for (g, u), effect in effects.items():
            scores[g, u], stderr[g, u] = effect.score, effect.stderr
            used[g, u] = math.nan if (bound := k[g, u]) is None else bound
        k_min = torch.full(shape[:1], torch.nan, dtype=torch.float32)
        complete = self.method.bounding in ("k_min", "k_max_per_unit") or self.method.all_thresholds
        for group, search, full in zip(self._groups(), searches, self.complete, strict=False):
            smallest: Float[Tensor, " units"] = search.thresholds(len(self.units))
            for g in group:
                thresholds[g] = torch.where(self.query.causal_mask[g], full.thresholds(len(self.units)), torch.nan)
                k_min[g] = smallest.nan_to_num(torch.inf).min() if complete else torch.nan
        return Scores(scores=scores, thresholds=thresholds, k_min=k_min, stderr=stderr, info={"k": used.tolist()})

    def _expected_work(self) -> float:
        """Token-forwards of a scoring pass for each target, and of a search that leaves one unit in most rounds."""
        rows = [rows[-1] for rows in self.query.target_rows]
        each = [len(self.noise) * (rows[g] + 1 - self.units[u][0]) for g, u in self.pairs]
        if self.method.bounding not in _SEARCHES:
            return sum(each)
        return 2 * sum(each) + sum(each) / len(each) * self.method.steps * len(rows)
