"""Estimators of shapiq as methods of Noiser: `method="shapiq:KernelSHAP"`.

shapiq sees a game and nothing else: masks of players in, values out. The players are the units before a target; a mask
is answered as `noiser.KernelShap` answers it, by the engine, in batches and after the clean prefix.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.checks import check_choice, random_state_kept, set_count
from noiser.engine import ABSENCES, Absence, Call, Query, Session, Steps
from noiser.errors import DependencyError, UnknownNameError
from noiser.integrations.adapter import FlatFactory, RandomStates, check_keywords, explained, names_of
from noiser.methods.coalitions import Coalitions, ScaleName
from noiser.methods.protocol import Scores
from noiser.version import version_of

__all__ = ["ShapiqMethod", "factory", "shapiq_methods"]

OURS = ("n", "index", "random_state", "top_order", "budget", "game")
"""Arguments of shapiq's classes and of their `approximate` that are not the caller's to give."""


@dataclass(frozen=True)
class ShapiqMethod:
    """An approximator of Shapley values of `shapiq`, on the units before each target.

    Targets with the same units before them share their masks: each is run once. shapiq draws from a seed that follows
    the caller's; global random states are put back.

    Args:
        name: the class's name, such as "KernelSHAP"; `shapiq_methods()` lists them.
        budget: masks that it may ask about, those of no unit and of all units included; equal ones are run once. None
            for 16 n + 130, with n the units before the target, as many as `noiser.KernelShap` takes.
        baseline: what replaces a unit, as for `noiser.KernelShap`.
        score: the value of a mask, as for `noiser.KernelShap`: "prob", "logprob", "logit" or "hellinger".
        arguments: of shapiq's `approximate`, such as `{"batch_size": 10}`.
        constructor: of shapiq's class, such as `{"pairing_trick": True}`.

    Raises:
        DependencyError: shapiq is not installed. UnknownNameError: no such method, or an unknown value.
        ParameterError: it has no such argument, or (when called) shapiq refuses its arguments or the prompt.
        ModelError: shapiq failed (when called).
    """

    name: str
    budget: int | None = field(default=None, kw_only=True)
    baseline: Absence = field(default="zero", kw_only=True)
    score: ScaleName = field(default="prob", kw_only=True)
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    constructor: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def __post_init__(self) -> None:
        cls = _class_of(self.name)
        if self.budget is not None:
            set_count(self, "budget", least=2)
        check_choice("baseline", self.baseline, ABSENCES)
        check_choice("score", self.score, get_args(ScaleName))
        check_keywords(f"{self.name}.approximate", self.arguments, names_of(cls.approximate, *OURS))
        check_keywords(self.name, self.constructor, names_of(cls, *OURS))

    @property
    def registry_name(self) -> str:
        """What a result calls it."""
        return f"shapiq:{self.name}@1"

    def inputs_for(self, units: int) -> int:
        """The most inputs that are run for so many units."""
        return min(self._budget_for(units), 2**units - 1)

    def _budget_for(self, units: int) -> int:
        return self.budget or 16 * units + 130

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores of every unit for every target; see `Method`."""
        coalitions = Coalitions(query, self.baseline, self.score)
        rows = yield Call(partial(self._of_session, coalitions=coalitions, rng=rng))
        return Scores(scores=coalitions.table(rows), info={"shapiq": version_of("shapiq")})

    def _of_session(
        self, session: Session, coalitions: Coalitions, rng: torch.Generator
    ) -> list[Float64[Tensor, " seen"]]:
        """For each target the scores of the units before it."""
        seed = int(torch.randint(2**31, (), generator=rng))
        states, game = RandomStates(rng), Game(session, coalitions)
        rows = list[Float64[Tensor, " seen"]]()
        for g, seen in enumerate(coalitions.seen):
            with states.on(session.lm.device):
                rows.append(self._of_game(partial(game, g=g), len(seen), seed))
            session.report(session.counters.token_forwards * len(coalitions.seen) / (g + 1))
        return rows

    def _of_game(self, game: Callable[..., Any], players: int, seed: int) -> Float64[Tensor, " players"]:
        if not players:
            return torch.empty(0, dtype=torch.float64)
        cls, budget = _class_of(self.name), self._budget_for(players)
        of_any_index = {"index": "SV", "max_order": 1} if "index" in names_of(cls) else {}
        settings = {"budget": budget, "arguments": self.arguments, "constructor": self.constructor}
        with explained("shapiq", self.name, **settings), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Not all budget is required", UserWarning)  # all 2^n masks are fewer
            approximator = cls(n=players, random_state=seed, **(of_any_index | dict(self.constructor)))
            values = approximator.approximate(budget=budget, game=game, **self.arguments)
            return torch.as_tensor(values.get_n_order_values(1), dtype=torch.float64)


class Game:
    """The value of each mask for a target. A mask is run once, whichever targets ask about it."""

    def __init__(self, session: Session, coalitions: Coalitions) -> None:
        self._session, self._coalitions = session, coalitions
        self._known: dict[bytes, Float64[Tensor, " targets"]] = {}

    def __call__(self, players: Any, g: int) -> Any:
        """Values as an array, from masks [masks, players] or one mask [players], also of numbers 0 and 1."""
        masks = np.atleast_2d(players).astype(bool)
        kept: Bool[Tensor, "masks units"] = torch.ones(len(masks), len(self._session.query.units), dtype=torch.bool)
        kept[:, self._coalitions.seen[g]] = torch.as_tensor(masks)
        keys = [row.tobytes() for row in kept.numpy()]
        new = {key: i for i, key in enumerate(keys) if key not in self._known}
        if new:
            values = self._session.run(self._coalitions.values(kept[[*new.values()]]))
            self._known |= dict(zip(new, values.T, strict=True))
        return np.array([float(self._known[key][g]) for key in keys])


# ---- which classes of the installed shapiq there are -----------------------------------------------------------------


def shapiq_methods() -> list[str]:
    """Names of the installed shapiq's approximators of Shapley values. Raises DependencyError without shapiq."""
    return sorted(_classes())


def factory(name: str) -> FlatFactory[ShapiqMethod]:
    """What constructs the method "shapiq:NAME", with all hyper-parameters as flat keywords.

    Raises:
        DependencyError: shapiq is not installed. UnknownNameError: it has no such method.
    """
    return FlatFactory(make=ShapiqMethod, name=name, constructor=names_of(_class_of(name), *OURS))


def _classes() -> dict[str, Any]:
    try:
        with random_state_kept():
            from shapiq.approximator import SV_APPROXIMATORS  # pyright: ignore
    except ImportError as error:
        raise DependencyError(
            f"shapiq could not be imported ({error}); install it with: pip install 'noiser[shapiq]' (or "
            "pip install shapiq)."
        ) from error
    return {cls.__name__: cls for cls in SV_APPROXIMATORS}


def _class_of(name: str) -> Any:
    classes = _classes()
    if name not in classes:
        hint = "Approximators of interactions alone score sets of units, not units."
        raise UnknownNameError("method", f"shapiq:{name}", [f"shapiq:{other}" for other in classes], hint)
    return classes[name]
