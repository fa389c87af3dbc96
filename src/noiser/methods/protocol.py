"""The form of a method, and methods by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, wraps
from inspect import signature
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice, check_count, check_positive, check_probability, plain
from noiser.engine import OBJECTIVES, REMOVALS, Query, refuse_other_methods, result_of
from noiser.errors import (
    NumericalError,
    ParameterError,
    UnknownNameError,
    UnsupportedModelError,
)
from noiser.files import json_or_text
from noiser.registry import Registry, present_names
from noiser.types import Pair


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """The result of a method, float32 on the CPU; `attribute` makes an `Attribution` of it.

    Attributes:
        scores: [targets, units]; NaN where the unit is not before the target.
        thresholds: [targets, units]; Noiser only.
        k_min: [targets]; Noiser only.
        stderr: [targets, units].
        pairs: units that decide together, or of which either would do.
        without: [targets, units, 3], for each target and unit the `noiser.engine.Prediction`
            without the unit; NaN where that was not run, None if it never was.
        info: plain values worth keeping with the result.
    """

    scores: Float[Tensor, "targets units"]
    thresholds: Float[Tensor, "targets units"] | None = None
    k_min: Float[Tensor, " targets"] | None = None
    stderr: Float[Tensor, "targets units"] | None = None
    pairs: tuple[Pair, ...] = ()
    without: Float[Tensor, "targets units 3"] | None = None
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("scores", "thresholds", "k_min", "stderr", "without"):
            values = getattr(self, name)
            object.__setattr__(
                self, name, None if values is None else values.detach().cpu().float()
            )


@runtime_checkable
class Method(Protocol):
    """An attribution method: its call awaits requests and returns scores.

    It is a frozen dataclass of hyper-parameters.

    A class that asks for gradients, attention, relevance or the model itself has `needs_internals =
    True`: what is not a model in this process is then refused before anything runs.
    """

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        """Scores every unit of the query for every target, with random numbers from `rng` alone."""
        ...


Probability = Annotated[float, check_probability]


def _check_objective(name: str, got: object) -> None:
    check_choice(name, got, OBJECTIVES.names())


def _check_differentiable(name: str, got: object) -> None:
    entries = {each: OBJECTIVES.get(each).factory() for each in OBJECTIVES.names()}
    known = [each for each, entry in entries.items() if entry.differentiable]
    check_choice(name, got, known, "Gradients need an objective that can be differentiated.")


def _check_removal(name: str, got: object) -> None:
    check_choice(name, got, REMOVALS.names())


ObjectiveName = Annotated[str, _check_objective]
"""One of `noiser.engine.OBJECTIVES`."""

DifferentiableObjective = Annotated[str, _check_differentiable]
"""One of those that gradients can be taken of."""

RemovalName = Annotated[str, _check_removal]
"""One of `noiser.engine.REMOVALS`."""

TwoOrMore = Annotated[int, lambda name, got: check_count(name, got, least=2)]  # pyright: ignore


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Hyper-parameters, whose types are checked.

    They are names of a `Literal`, integers from 1 on, numbers above 0, or None. The metadata of an
    `Annotated` type is another check, a function of the field's name and value.
    """

    def __post_init__(self) -> None:
        for name, (names, optional, check) in _domains(type(self)).items():
            got = getattr(self, name)
            if (got is None and optional) or (names and got in names):
                continue
            if names and (check is None or isinstance(got, str)):
                check_choice(name, got, names, "A number is also accepted." if check else "")
            elif check:
                number = check(name, got)
                object.__setattr__(self, name, plain(got) if number is None else number)


@dataclass(frozen=True, kw_only=True)
class InnerMethod(Parameters):
    """A method that asks for gradients, attention or relevance.

    Only a model in this process answers these.
    """

    needs_internals = True


ValueCheck = Callable[[str, object], Any]
"""From a hyper-parameter's name and value to the value that is kept, or None for this value.

Raises ParameterError for a value that is not allowed.
"""


class _Domain(NamedTuple):
    """The values that a hyper-parameter may have: known names, None, and what a check allows."""

    names: tuple[str, ...]
    optional: bool
    check: ValueCheck | None


@cache
def _domains(parameters: type) -> dict[str, _Domain]:
    """The domain of each field, as its type says."""
    hints = get_type_hints(parameters, include_extras=True)
    domains: dict[str, _Domain] = {}
    for parameter in fields(parameters):
        hint = hints[parameter.name]
        is_union = get_origin(hint) in (Union, UnionType)
        types: tuple[Any, ...] = get_args(hint) if is_union else (hint,)
        names: list[str] = []
        for each in types:
            if get_origin(each) is Literal:
                names += get_args(each)
        domains[parameter.name] = _Domain(tuple(names), type(None) in types, _check_of(types))
    return domains


def _check_of(types: Sequence[Any]) -> ValueCheck | None:
    """The check that an `Annotated` type names, or that of a number."""
    for each in types:
        if get_origin(each) is Annotated:
            return each.__metadata__[0]
    if int in types:
        return check_count
    if float in types:
        return check_positive
    return None


def reads_old_names(method: type) -> None:
    """Lets the constructor of a class read the names that its hyper-parameters had before."""
    constructor = method.__init__

    @wraps(constructor)
    def read(self: Any, *args: Any, **parameters: Any) -> None:
        constructor(self, *args, **present_names(constructor, parameters))

    method.__init__ = read


METHODS: Registry[Method] = Registry("method", "noiser.methods")
"""Every method by name; packages add theirs through the entry point `noiser.methods`."""


def check_answers(method: Method, model: str, needs_internals: bool) -> None:
    """Raises UnsupportedModelError for a method that looks inside a model that runs elsewhere."""
    if getattr(method, "needs_internals", False) and not needs_internals:
        names = [
            name
            for name in METHODS.names()
            if not getattr(METHODS.get(name).factory, "needs_internals", False)
        ]
        raise UnsupportedModelError(
            f"{describe(method)[0]} needs gradients, attention or the layers of the model, and "
            f"{model} runs outside of this process, where it only predicts; expected a method that "
            f"asks for predictions: {', '.join(names)}. "
            "Take one of these, or load the model into this process."
        )


def check_removes(method: Method) -> None:
    """Raises UnsupportedModelError for a method that does not play the game of removed units."""
    if not hasattr(method, "score_game"):
        raise refuse_other_methods(f"{describe(method)[0]} does not remove units alone")


def for_text(method: Method) -> Method:
    """A method that removes units, for a model of which the text alone is known.

    Units are taken out of the text in place of the default removal.

    Raises:
        UnsupportedModelError: the method asks for more than the values of inputs without units.
    """
    removals = [name for name in ("baseline", "removal") if hasattr(method, name)]
    needs_model = any(hasattr(method, name) for name in ("needs_internals", "bounding"))
    if not removals:
        if needs_model:
            raise _gives_text_only(describe(method)[0])
        return method  # a reference, which asks nothing
    given = getattr(method, removals[0])
    is_default = given == type(method).__dataclass_fields__[removals[0]].default  # pyright: ignore
    if not hasattr(method, "score_game") or not (is_default or given == "delete"):
        raise _gives_text_only(describe(method)[0])
    return replace(method, **{removals[0]: "delete"})  # pyright: ignore


def _gives_text_only(name: str) -> UnsupportedModelError:
    """The error for a method that needs more than text."""
    with_play = [
        each for each in METHODS.names() if hasattr(METHODS.get(each).factory, "score_game")
    ]
    return UnsupportedModelError(
        f"A chat endpoint gives text only, and {name} needs more: take one of "
        f"{', '.join(with_play)}, which take units out of the text."
    )


def sum_over_units(
    query: Query, scores: Float[Tensor, "*samples targets length"]
) -> Float[Tensor, "*samples targets units"]:
    """Each unit's sum of its tokens' scores, without that of the sink, on the CPU.

    NaN where the unit is not before the target, or has no other token.
    """
    scores = scores.cpu()
    sums: list[Tensor] = []
    for positions in query.positions:
        of_unit = scores[..., list(positions)]
        sums.append(of_unit.sum(-1))
    return torch.stack(sums, -1).masked_fill(~query.causal_mask, torch.nan)


def make_method(method: str | Method, /, **parameters: Any) -> Method:
    """A method by registry name and hyper-parameters, as in "occlusion:objective=logprob".

    A method object is returned as it is.

    Raises:
        UnknownNameError: no such method or hyper-parameter. ParameterError: a value is refused.
    """
    if isinstance(method, str):
        name, *settings = re.split(r":(?=\w+=)", method)
        entry = METHODS.get(name)
        typed = (each.partition("=") for each in settings)
        parameters = {key: json_or_text(value) for key, _, value in typed} | parameters
        parameters = present_names(entry.factory, parameters)
        accepted = signature(entry.factory).parameters.values()
        known = [each.name for each in accepted if each.kind is not each.VAR_KEYWORD]
        for unknown in parameters if len(known) == len(accepted) else ():
            if unknown not in known:
                raise UnknownNameError(f"hyper-parameter of {entry.name}", unknown, known)
        try:
            return entry.factory(**parameters)
        except TypeError as error:
            raise ParameterError(
                f"Method {entry.name!r} does not accept {parameters}: {error}."
            ) from error
    if not isinstance(method, Method) or isinstance(method, type):
        raise ParameterError(
            f"method is {method!r}; expected a registry name such as 'noiser', or a method such as "
            "noiser.Noiser()."
        )
    return method


async def run_method(method: Method, query: Query, seed: int = 0) -> Scores:
    """The scores of a method, with random numbers of a seed.

    Raises ParameterError for a function of another form.
    """
    scores = await result_of(method, query, torch.Generator().manual_seed(seed))
    if not isinstance(scores, Scores):
        raise ParameterError(
            f"The method {getattr(method, '__name__', type(method).__name__)} returned a "
            f"{type(scores).__name__}; a method is a coroutine: `await` a request, "
            "`return Scores(...)`."
        )
    _check_finite(method, query, scores)
    return scores


def _check_finite(method: Method, query: Query, scores: Scores) -> None:
    """Raises NumericalError where a method has no score for any unit before a target."""
    if query.spent.unfinished or scores.scores.shape != query.causal_mask.shape:
        return
    has_units = query.causal_mask.cpu().any(-1)
    has_none = scores.scores.isnan().all(-1) & has_units
    if has_none.any():
        target = query.target_texts[int(has_none.nonzero()[0])]
        raise NumericalError(
            f"{describe(method)[0]} has no score for any unit before {target!r}; expected finite "
            "scores of the units before a target, and NaN elsewhere."
        )


def describe(method: Method) -> tuple[str, Mapping[str, Any]]:
    """A method's versioned name, such as "noiser@2", and its hyper-parameters."""
    entry = METHODS.entry_of(method)
    qualified = f"{type(method).__module__}.{type(method).__qualname__}"
    name = entry.versioned_name if entry else getattr(method, "registry_name", qualified)
    return name, {
        f.name: getattr(method, f.name) for f in (fields(method) if is_dataclass(method) else ())
    }
