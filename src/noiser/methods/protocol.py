"""The form of a method: a frozen dataclass of hyper-parameters, whose call asks an engine and returns scores."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import ABSENCES, SCORES, Absence, Game, Query, ScoreName, Steps, StoredGame, remover
from noiser.errors import ParameterError, UnknownNameError, UnsupportedModelError
from noiser.files import json_or_text
from noiser.registry import Entry, Registry
from noiser.types import Pair


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The result of a method, float32 on the CPU; `attribute` makes an `Attribution` of it.

    Attributes:
        scores: [targets, units]; NaN where the unit is not before the target.
        thresholds: [targets, units]; Noiser only.
        k_min: [targets]; Noiser only.
        stderr: [targets, units]; of methods that average over samples.
        pairs: units that decide together, or of which either would do.
        info: plain values worth keeping with the result; what was run is added to them.
    """

    scores: Float[Tensor, "targets units"]
    thresholds: Float[Tensor, "targets units"] | None = None
    k_min: Float[Tensor, " targets"] | None = None
    stderr: Float[Tensor, "targets units"] | None = None
    pairs: tuple[Pair, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("scores", "thresholds", "k_min", "stderr"):
            values = getattr(self, name)
            object.__setattr__(self, name, None if values is None else values.detach().cpu().float())


@runtime_checkable
class Method(Protocol):
    """An attribution method. Fields are hyper-parameters; the call yields requests and returns scores.

    Ours check their fields when they are made: UnknownNameError for a name, ParameterError for another value. What the
    model or its tokenizer lacks is an error of the call.

    A class may have `looks_inside = True`: it asks for gradients, attention, relevance or the model itself, which only
    a model in this process answers. `check_answers` then refuses others before anything runs.
    """

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores every unit of the query for every target, with random numbers from `rng` alone."""
        ...


@dataclass(frozen=True, kw_only=True)
class GameMethod:
    """A method that scores the game in which units are removed; `play` says how. Fields are as for `Occlusion`."""

    baseline: Absence = "zero"
    score: ScoreName = "prob"

    def __post_init__(self) -> None:
        check_choice("baseline", self.baseline, ABSENCES)
        check_choice("score", self.score, SCORES)

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores of every unit for every target; see `Method`."""
        return (yield from self.play(Game(query, query.score(self.score), remover(query, self.baseline)), rng))

    def play(self, game: StoredGame, rng: torch.Generator) -> Steps[Scores]:
        """Scores of the units of a game, also of one that is stored."""
        raise NotImplementedError


def check_answers(method: Method, model: str, looks_inside: bool) -> None:
    """Raises UnsupportedModelError for a method that looks inside a model whose layers are not in this process."""
    if getattr(method, "looks_inside", False) and not looks_inside:
        names = [name for name in METHODS.names() if not getattr(METHODS.get(name).factory, "looks_inside", False)]
        raise UnsupportedModelError(
            f"{describe(method)[0]} needs gradients, attention or the layers of the model, and {model} runs outside of "
            f"this process, where it only predicts; expected a method that asks for predictions: {', '.join(names)}. "
            "Take one of these, or load the model into this process."
        )


METHODS: Registry[Method] = Registry("method", "noiser.methods")
"""Every method by name; packages add theirs through the entry point `noiser.methods`."""


# ---- what methods share --------------------------------------------------------------------------------------------


def movable_positions(query: Query) -> tuple[int, ...]:
    """The positions that go to a baseline: every token that is not frozen, and every token of a unit."""
    units = {position for unit in query.units for position in unit.token_indices}
    return tuple(i for i, frozen in enumerate(query.encoding.frozen) if not frozen or i in units)


def movable_groups(query: Query) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Positions that go to a baseline together, and the targets that are explained by that.

    A target span's own tokens, as what the model has said, stay as they are. Targets of single tokens, which never are
    among their own inputs, share all movable positions.
    """
    movable = movable_positions(query)
    groups: dict[tuple[int, ...], list[int]] = {}
    for target, rows in enumerate(query.target_rows):
        groups.setdefault(tuple(p for p in movable if p not in rows[1:]), []).append(target)
    return [(positions, tuple(targets)) for positions, targets in groups.items()]


def sum_over_units(
    query: Query, scores: Float[Tensor, "*samples targets length"]
) -> Float[Tensor, "*samples targets units"]:
    """Each unit's sum of its tokens' scores, on the CPU; NaN where the unit is not before the target."""
    scores = scores.cpu()
    sums = torch.stack([scores[..., list(unit.token_indices)].sum(-1) for unit in query.units], -1)
    return sums.masked_fill(~query.causal_mask, torch.nan)


# ---- methods by name, and the name of a method ---------------------------------------------------------------------


def make_method(method: str | Method, /, **parameters: Any) -> Method:
    """A method by registry name with hyper-parameters, as in "occlusion:score=logprob"; a method object as it is.

    Raises:
        UnknownNameError: no such method or hyper-parameter. ParameterError: a value is refused.
    """
    if isinstance(method, str):
        name, *settings = re.split(r":(?=\w+=)", method)
        entry = METHODS.get(name)
        typed = (each.partition("=") for each in settings)
        parameters = {key: json_or_text(value) for key, _, value in typed} | parameters
        accepted = signature(entry.factory).parameters.values()
        known = [each.name for each in accepted if each.kind is not each.VAR_KEYWORD]
        for unknown in parameters if len(known) == len(accepted) else ():
            if unknown not in known:
                raise UnknownNameError(f"hyper-parameter of {entry.name}", unknown, known)
        try:
            return entry.factory(**parameters)
        except TypeError as error:
            raise ParameterError(f"Method {entry.name!r} does not accept {parameters}: {error}.") from error
    if not isinstance(method, Method) or isinstance(method, type):
        raise ParameterError(
            f"method is {method!r}; expected a registry name such as 'noiser', or a method such as noiser.Noiser()."
        )
    return method


def scored(method: Method, query: Query, seed: int = 0) -> Steps[Scores]:
    """The scores of a method, with random numbers of a seed. Raises ParameterError for a function of another form."""
    steps: Any = method(query, torch.Generator().manual_seed(seed))
    scores = (yield steps) if isinstance(steps, Generator) else steps
    if not isinstance(scores, Scores):
        raise ParameterError(
            f"The method {getattr(method, '__name__', type(method).__name__)} returned a {type(scores).__name__}; a "
            "method is a generator: `yield` a request, `return Scores(...)`."
        )
    return scores


def describe(method: Method) -> tuple[str, Mapping[str, Any]]:
    """A method's versioned name, such as "noiser@2", and its hyper-parameters.

    The name is that of the method's class; but that of a function, such as "noiser_relative", which makes an equal one.
    """

    def makes(entry: Entry[Method]) -> bool:
        with suppress(Exception):  # a plugin's method may need an argument
            return entry.factory() == method
        return False

    entry = METHODS.entry_of(type(method))
    if entry and not makes(entry):
        others = [entry for entry in map(METHODS.get, METHODS.names()) if not isinstance(entry.factory, type)]
        entry = next(filter(makes, others), entry)
    qualified = f"{type(method).__module__}.{type(method).__qualname__}"
    name = entry.versioned_name if entry else getattr(method, "registry_name", qualified)
    return name, {f.name: getattr(method, f.name) for f in (fields(method) if is_dataclass(method) else ())}
