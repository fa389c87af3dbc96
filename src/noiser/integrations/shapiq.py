"""Estimators of shapiq as methods of Noiser: `method="shapiq:KernelSHAP"`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.engine import Call, LiveGame, Query, run_one
from noiser.integrations.common import LibraryMethod, check_keywords, imported, names_of, seeded
from noiser.methods.protocol import ObjectiveName, RemovalName, Scores, TwoOrMore
from noiser.methods.removal import removal_of, scatter_to_units, to_all_units
from noiser.model.language_model import LanguageModel
from noiser.registry import version_of

_OURS = ("n", "index", "random_state", "top_order", "budget", "game")
"""Arguments of shapiq's classes and of their `approximate` that the adapter gives."""


@dataclass(frozen=True)
class ShapiqMethod(LibraryMethod):
    """An approximator of Shapley values of `shapiq`, on the units before each target.

    A mask is answered as `noiser.KernelShap` answers it; equal ones of several targets are run
    once. shapiq draws from a seed that follows the caller's; global random states are put back.

    Args:
        name: the class's name, such as "KernelSHAP"; `ShapiqMethod.names()` lists them.
        budget: masks that it may ask about. None for 16 n + 130, with n the units before the
            target.
        removal, objective: how a unit is removed, and the value of a mask; as for
            `noiser.Occlusion`.
        settings: of shapiq's class and its `approximate`, such as `{"pairing_trick": True}`.
    """

    library = "shapiq"
    hint = "Approximators of interactions alone score sets of units, not units."

    budget: TwoOrMore | None = field(default=None, kw_only=True)
    removal: RemovalName = field(default="zero", kw_only=True)
    objective: ObjectiveName = field(default="prob", kw_only=True)

    @classmethod
    def _classes(cls) -> dict[str, Any]:
        return {
            each.__name__: each
            for each in imported("shapiq.approximator", "shapiq").SV_APPROXIMATORS
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        cls = self.class_of(self.name)
        check_keywords(
            self.name, self.settings, names_of(cls, *_OURS) + names_of(cls.approximate, *_OURS)
        )

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        game = LiveGame(query, self.objective, removal_of(query, self.removal, rng))
        rows = await Call(query, partial(self._play, game=game, rng=rng))
        return Scores(scores=scatter_to_units(game, rows), info={"shapiq": version_of("shapiq")})

    def _play(
        self, lm: LanguageModel, _: Query, game: LiveGame, rng: torch.Generator
    ) -> list[Float64[Tensor, " seen"]]:
        seed = int(torch.randint(2**31, (), generator=rng))
        rows = list[Float64[Tensor, " seen"]]()
        for target, seen in enumerate(game.units):

            def play(players: Any, target: int = target, seen: Tensor = seen) -> Any:
                kept = to_all_units(
                    torch.as_tensor(np.atleast_2d(players).astype(bool)), seen, game.mask.shape[1]
                )
                return run_one(lm, game(kept))[
                    target
                ].numpy()  # for all targets: another one may ask for the same input

            with seeded(rng, lm.device):
                rows.append(self._approximate(play, len(seen), seed))
        return rows

    def _approximate(
        self, game: Callable[..., Any], players: int, seed: int
    ) -> Float64[Tensor, " players"]:
        if not players:
            return torch.empty(0, dtype=torch.float64)
        cls = self.class_of(self.name)
        budget = self.budget or 16 * players + 130
        of_class, of_call = self.split()
        of_class = ({"index": "SV", "max_order": 1} if "index" in names_of(cls) else {}) | of_class
        with self.explained(budget=budget), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Not all budget is required", UserWarning
            )  # all 2^n masks are fewer
            values = cls(n=players, random_state=seed, **of_class).approximate(
                budget=budget, game=game, **of_call
            )
            return torch.as_tensor(values.get_n_order_values(1), dtype=torch.float64)
