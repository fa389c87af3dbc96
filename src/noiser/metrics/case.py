"""One attribution to be measured, the settings, and scores without information."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import NORMALIZATIONS
from noiser.checks import check_choice, check_count, check_seed
from noiser.engine import REMOVALS, LiveGame, Query, Steps, remover
from noiser.errors import NumericalError, ParameterError
from noiser.types import Profile

T = TypeVar("T")

Numbers = dict[str, float]

NOISE_SAMPLES = 5  # of the noise where units are removed by noise; values are means over them


@dataclass(frozen=True, kw_only=True, eq=False)
class Settings:
    """The settings of metrics, each of which reads some.

    Attributes:
        seed: of masks and references.
        masks: mask samples; None for the metric's own number.
        normalization: for metrics of shares of the score; None for each metric's own.
        profile: "paper" or "authors".
        rates: shares of the input that the mass-matched curves keep, ascending.
        draws: random scores, and permutations of the attribution's, that each reference is the mean
            of.
        removal: how metrics that remove units do it; see `noiser.engine.remover`.
        k: number or numbers of the highest units, for metrics of the top k.
        judge: for answerability.

    Raises:
        ParameterError: a number is outside its domain. UnknownNameError: no such profile, removal
            or normalization.
    """

    seed: int = 0
    masks: int | None = None
    normalization: str | None = None
    profile: Profile = "paper"
    rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    draws: int = 10
    removal: str = "zero"
    k: tuple[int, ...] = (1, 3, 5)
    judge: Any = None

    def __post_init__(self) -> None:
        check_choice("profile", self.profile, get_args(Profile))
        check_choice("removal", self.removal, REMOVALS.names())
        if self.normalization is not None:
            check_choice("normalization", self.normalization, tuple(NORMALIZATIONS))
        k = tuple(
            check_count("k", number)
            for number in (self.k if isinstance(self.k, Iterable) else [self.k])
        )
        if not k or len(set(k)) < len(k):
            raise ParameterError(
                f"k is {self.k!r}; expected at least one number of units, and none of them twice."
            )
        try:
            rates = tuple(float(rate) for rate in self.rates)
        except (TypeError, ValueError):
            rates = ()
        if (
            len(rates) < 2
            or not all(a < b for a, b in itertools.pairwise((0.0, *rates)))
            or rates[-1] > 1
        ):
            expected = "2 or more numbers above 0 and at most 1, in ascending order"
            raise ParameterError(f"rates is {self.rates!r}; expected {expected}.")
        masks = None if self.masks is None else check_count("masks", self.masks)
        counts = {
            "seed": check_seed(self.seed),
            "masks": masks,
            "draws": check_count("draws", self.draws),
        }
        vars(self).update(counts, rates=rates, k=k)  # the dataclass is frozen


SETTINGS: Mapping[str, Any] = {
    each.name: each.default
    for each in fields(Settings)
    if each.name not in ("seed", "profile", "judge")
}
"""What only some metrics read, and what holds where it is not set."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case(Settings):
    """One attribution to be measured, and the settings.

    Attributes:
        query: the question that the attribution answers.
        att: the attribution.
        spans: named character spans, for localisation and gold spans.
        reattribute: attributes the same prompt with another seed, for stability: a coroutine, or a
            function.
        gold: the answer that a data set gives, for answerability; None for the model's own.
        cache: numbers of scores without information, which all cases of one prompt and model may
            share.
        special: whether special tokens that the attribution scores are removed and masked like any
            unit.
    """

    query: Query
    att: Attribution
    spans: Mapping[str, Sequence[tuple[int, int]]] | None = None
    reattribute: Callable[[int], Attribution | Steps[Attribution]] | None = None
    gold: str | None = None
    cache: MutableMapping[Hashable, Any] = field(default_factory=dict[Hashable, Any], repr=False)
    special: bool = False

    @cached_property
    def scores(self) -> Float[Tensor, "targets units"]:
        """Raw scores, float32 on the CPU.

        NaN where a unit has no score, is not before the target, or is frozen.
        """
        hidden = ~self.query.causal_mask
        frozen = self.query.encoding.frozen
        if not self.special:
            hidden |= torch.tensor(
                [all(frozen[index] for index in unit.token_indices) for unit in self.query.units]
            )
        scores = self.att.scores.detach().float().cpu().masked_fill(hidden, torch.nan)
        if scores.isinf().any():
            count = int(scores.isinf().sum())
            raise NumericalError(
                f"{count} scores are infinite; expected numbers or NaN. Attribute again in float32."
            )
        for target in scores.isnan().all(-1).nonzero().flatten().tolist():
            named = f"Target {target}, {self.att.targets[target].text!r},"
            raise ParameterError(
                f"{named} has no unit with a score before it. Attribute other units or targets."
            )
        return scores

    @cached_property
    def units(self) -> list[list[int]]:
        """For each target the indices of the units that have a score."""
        return [(~row.isnan()).nonzero().flatten().tolist() for row in self.scores]

    def generator(self, purpose: str) -> torch.Generator:
        """A generator of random numbers, the same for all attributions of the same text."""
        return torch.Generator().manual_seed(
            random.Random(f"{self.seed}/{purpose}/{self.att.text}").getrandbits(63)
        )

    def uniforms(self, purpose: str, target: int, *shape: int) -> Float[Tensor, "*shape"]:
        """U(0, 1) numbers."""
        return torch.rand(
            shape, generator=self.generator(f"{purpose}/{target}"), dtype=torch.float32
        )

    def game(self, score: str) -> LiveGame:
        """The game of the units that have a score, with this case's removal.

        With a foil its values are contrasts.
        """
        removal = remover(self.query, self.removal, self.generator("removal"), NOISE_SAMPLES)
        return LiveGame(self.query, score, removal, ~self.scores.isnan())

    async def cached(self, what: Hashable, steps: Callable[[], Steps[T]]) -> T:
        """The result of `steps`, named `what`.

        It is made once for all cases of a cache with the same units and settings.
        """
        settings = tuple(map(vars(self).get, ("seed", "profile", *SETTINGS)))
        units = tuple(unit.token_indices for unit in self.att.units)
        targets = tuple(
            (target.before, target.token_id, target.rest) for target in self.att.targets
        )
        key = (
            what,
            settings,
            self.att.text,
            targets,
            self.query.foil_ids,
            units,
            self.scores.isnan().numpy().tobytes(),
        )
        if key not in self.cache:
            self.cache[key] = await steps()
        return self.cache[key]

    async def compared(
        self, what: str, measure: Callable[[Float[Tensor, "draws targets units"]], Steps[Numbers]]
    ) -> Numbers:
        """The numbers of the attribution's scores, and as "random_..." of random scores.

        Numbers with an "@" in their name are left out of the latter.
        """
        numbers = dict(await measure(self.scores[None]))
        random = await self.cached(what, lambda: measure(reference_scores(self, "random")))
        for name, number in random.items():
            if "@" not in name:
                numbers[f"random_{name}"] = number
        numbers["draws"] = self.draws
        return numbers


Reference = Literal["random", "permuted", "position"]

REFERENCES: Mapping[Reference, str] = {
    "random": "random scores",
    "permuted": "its own scores, shuffled",
    "position": "1 to n along the text",
}
"""Scores without information, and what they are."""


def reference_scores(case: Case, kind: Reference) -> Float[Tensor, "draws targets units"]:
    """Scores without information, for comparison; NaN where a unit has no score.

    "position" has one draw. "random" is the softmax of U(0, 1) numbers over the units of each
    target, the paper's reference.
    """
    scores = case.scores.repeat(1 if kind == "position" else case.draws, 1, 1)
    for target, units in enumerate(case.units):
        if kind == "position":
            scores[:, target, units] = torch.arange(1.0, len(units) + 1, dtype=torch.float32)
        elif kind == "random":
            numbers = case.uniforms("random scores", target, case.draws, len(units))
            scores[:, target, units] = numbers.softmax(-1)
        else:
            order = case.uniforms("permutation", target, case.draws, len(units)).argsort(-1)
            scores[:, target, units] = case.scores[target, units][order]
    return scores
