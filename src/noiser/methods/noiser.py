"""Noiser: bounded Gaussian noise on one unit's embeddings at a time (Ghasemi Madani et al. 2025)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from noiser.checks import check_choice, check_positive, set_count
from noiser.engine import SCORES, Ask, Effect, Query, ScoreName, Steps, effect_of, expected_norm, leads, noise
from noiser.errors import ParameterError
from noiser.methods.noise import as_noise, check_noise, draw_k, draw_noise
from noiser.methods.protocol import Scores
from noiser.methods.search import TIE, Answer, Bisection, Certified, Mode, Search
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
        score: "prob" (the paper) or another of `noiser.engine.SCORES`, such as "logprob"; "hellinger", the distance
            between the whole distributions, sees every token and is never negative.
        r: size of "relative" noise, in norms of the embedding.
        search: of "k_min". "certified" returns a k at which the scoring pass has shown that no unit flips; it follows
            the units that a few noise samples say tolerate least, at half the cost. "bisection" is the paper's
            algorithm, each unit by itself. The two differ where a unit flips at some k but not at a larger one that
            bisection probes. None: "certified" where it can be, else "bisection", as the other boundings need it.
        profile: "paper", or "authors" for the published script: special tokens are units too, and the last probe
            of the bisection is returned rather than the last that did not flip.
        noise: the caller's own noise, [samples, dim] or [samples, positions, dim] for units of several tokens, with
            `samples` left out.
    """

    samples: int = 10
    steps: int = 10
    bounding: Bounding | float = "k_min"
    score: ScoreName = "prob"
    r: float = 2.0
    search: Literal["certified", "bisection"] | None = None
    profile: Profile = "paper"
    noise: Tensor | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_count(self, "samples")
        set_count(self, "steps")
        if self.noise is not None:
            object.__setattr__(self, "noise", as_noise(self.noise))
            if self.samples not in (Noiser.samples, len(self.noise)):
                raise ParameterError(f"samples is {self.samples} and noise has {len(self.noise)}; leave samples out.")
            object.__setattr__(self, "samples", len(self.noise))
        if isinstance(self.bounding, str):
            check_choice("bounding", self.bounding, get_args(Bounding), "A number is also accepted, as k itself.")
        else:
            check_positive("bounding", self.bounding)
        check_choice("score", self.score, SCORES)
        check_choice("profile", self.profile, get_args(Profile))
        check_positive("r", self.r)
        if self.search is not None:
            check_choice("search", self.search, ("certified", "bisection"))
        if self.search == "bisection" and self.bounding not in _SEARCHES:  # nothing is searched
            object.__setattr__(self, "search", None)
        if self.search == "certified" and not self.certifies:
            raise ParameterError(
                "search='certified' finds the smallest threshold; expected bounding='k_min' and profile='paper', got "
                f"{(self.bounding, self.profile)}. Leave search out, or use search='bisection'."
            )

    @property
    def certifies(self) -> bool:
        """Whether the search is the certified one."""
        return self.search != "bisection" and (self.bounding, self.profile) == ("k_min", "paper")

    @property
    def special_tokens(self) -> SpecialTokens:
        """Whether special tokens are units: only in the published script."""
        return "perturbed" if self.profile == "authors" else "frozen"

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Searches, bounds and scores; see the class."""
        call = _Call(self, query, rng)
        searches = yield from call.search()
        k = call.bounds(searches)
        yield from call.evaluate(Probed(u, k[g, u], g) for g, u in call.pairs)
        return call.scores(searches, k)


class _Call:
    """One call of Noiser: the noise, the effects that are known so far, and the steps from there to scores."""

    def __init__(self, method: Noiser, query: Query, rng: torch.Generator) -> None:
        self.method, self.query = method, query
        self.units = [unit.token_indices for unit in query.units]
        self.pairs = [(g, u) for g, row in enumerate(query.causal_mask.tolist()) for u, seen in enumerate(row) if seen]
        self.targets = range(len(query.target_spans))
        k = draw_k(rng) if method.bounding == "random" else math.nan
        self.fixed = {"random": k, "none": 1.0, "relative": None}
        longest, dim = max(map(len, self.units)), query.embedding_dim
        own = method.noise
        drawn = draw_noise(method.samples, longest, dim, rng) if own is None else check_noise(own, longest, dim)
        self.noise = drawn.to(query.device)  # once, not for every change
        self.read = effect_of(query.score(method.score), query.foil_id)
        self.effects: dict[Probed, Effect] = {}

    def evaluate(self, probes: Iterable[Probed]) -> Steps[None]:
        """Asks for the effects that are not known yet; all targets of a (unit, k) pair come from the same passes."""
        groups: dict[tuple[int, float | None, int | None], list[int]] = {}
        for probe in sorted(set(probes) - self.effects.keys(), key=lambda probe: probe.target):
            groups.setdefault((probe.unit, probe.k, probe.samples), []).append(probe.target)
        changes = [
            noise(self.units[u], self.noise[:samples], self.method.r if k is None else k, targets, relative=k is None)
            for (u, k, samples), targets in groups.items()
        ]
        found: list[Tensor] = yield Ask(self.query, changes, self.read)
        for ((unit, k, samples), targets), rows in zip(groups.items(), found, strict=True):
            for g, numbers in zip(targets, rows.tolist(), strict=True):
                self.effects[Probed(unit, k, g, samples)] = Effect(*numbers)

    def search(self) -> Steps[list[Search]]:
        """Searches run to their end, one for each target; none without a search."""
        if self.method.bounding not in _SEARCHES:
            return []
        searches = [self._new_search([u for t, u in self.pairs if t == g]) for g in self.targets]
        while any(rounds := [search.probes() for search in searches]):
            wanted = [[Probed(p.unit, p.k, g, p.samples) for p in probes] for g, probes in enumerate(rounds)]
            yield from self.evaluate(probe for probes in wanted for probe in probes)
            for search, probes, keys in zip(searches, rounds, wanted, strict=True):
                if probes:
                    effects = [self.effects[key] for key in keys]
                    answers = [Answer(bool(effect.flips), effect.lead) for effect in effects]
                    search.update(dict(zip(probes, answers, strict=True)))
        self._warn_of_ties(searches)
        return searches

    def _new_search(self, units: list[int]) -> Search:
        if self.method.certifies:
            return Certified(units, steps=self.method.steps, samples=len(self.noise))
        mode = _SEARCHES[str(self.method.bounding)]
        return Bisection(units, mode=mode, steps=self.method.steps, last_probe=self.method.profile == "authors")

    def _warn_of_ties(self, searches: Sequence[Search]) -> None:
        query = self.query
        clean = [leads(c, c, ids, query.foil_id).abs().min() for c, ids in zip(query.clean_of, query.ids, strict=True)]
        dtype = query.context.inputs.dtype
        moved = ROUNDING * torch.finfo(dtype).eps
        if any(search.tied for search in searches):
            warnings.warn(f"{TIE} Load the model with dtype='float32'.", stacklevel=3)
        elif dtype.itemsize == 2 and min(clean) < moved:  # said once of many prompts: the text is the same
            name = str(dtype).removeprefix("torch.")
            warnings.warn(
                f"A target leads its strongest rival by less than {moved:.2g} in log odds, which {name} moves leads "
                "by: the scores' order may be rounding's. Load the model with dtype='float32'.",
                stacklevel=3,
            )

    def bounds(self, searches: Sequence[Search]) -> dict[tuple[int, int], float | None]:
        """The k of every (target, unit) pair; None for relative noise."""
        if not searches:
            return dict.fromkeys(self.pairs, self._fixed_k())
        bounds: dict[tuple[int, int], float | None] = {}
        for g, search in enumerate(searches):
            thresholds: list[float] = search.thresholds(len(self.units)).tolist()
            found = [k for k in thresholds if not math.isnan(k)]
            ends = {"k_min": min(found, default=math.nan), "k_max": max(found, default=math.nan)}
            shared = ends.get(str(self.method.bounding))
            bounds |= {(t, u): thresholds[u] if shared is None else shared for t, u in self.pairs if t == g}
        return bounds

    def _fixed_k(self) -> float | None:
        bounding = self.method.bounding
        if isinstance(bounding, str) and bounding.startswith("norm_"):
            return 1 / expected_norm(bounding.removeprefix("norm_"), self.query.embedding_dim)  # pyright: ignore
        return self.fixed[bounding] if isinstance(bounding, str) else float(bounding)

    def scores(self, searches: Sequence[Search], k: dict[tuple[int, int], float | None]) -> Scores:
        """The effects at every pair's k as tensors, with the thresholds that were searched to the end."""
        shape = (len(self.targets), len(self.units))
        scores, stderr, used, thresholds = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(4))
        for (g, u), bound in k.items():
            effect = self.effects[Probed(u, bound, g)]
            scores[g, u], stderr[g, u] = effect.score, effect.stderr
            used[g, u] = math.nan if bound is None else bound
        k_min = torch.full(shape[:1], torch.nan, dtype=torch.float64)
        for g, search in enumerate(searches):
            thresholds[g] = search.thresholds(len(self.units))
            if self.method.bounding in ("k_min", "k_max_per_unit"):
                k_min[g] = thresholds[g].nan_to_num(torch.inf).min()
        info = {"k": used.tolist()}
        return Scores(scores=scores, thresholds=thresholds, k_min=k_min, stderr=stderr, info=info)
