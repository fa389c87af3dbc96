"""The meaning of a plan, with every name and default looked up, and the changes that a plan may not make."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar

from noiser.attribution.store import to_jsonable
from noiser.bench.plan import DataEntry, Entry, MethodEntry, MetricEntry, Plan
from noiser.checks import check_choice, check_shares
from noiser.data import DATA_SETS
from noiser.errors import NoiserError, ParameterError, PlanError
from noiser.evaluation.measuring import in_profile
from noiser.judges import kind_of
from noiser.methods import METHODS, Method, describe, make_method
from noiser.metrics import METRICS
from noiser.metrics.metric import SETTINGS, check_read
from noiser.metrics.top_k import check_top
from noiser.registry import renamed

T = TypeVar("T", bound=Entry)


def make(entry: MethodEntry) -> Method:
    """The method of an entry, with its hyper-parameters."""
    return in_profile(make_method(entry.name, **entry.args), entry.profile)


def resolve(plan: Plan, source: str) -> dict[str, Any]:
    """A plan with versioned names and every default, as JSON; errors name `source`.

    Raises:
        PlanError: an unknown name, or a parameter that is refused.
    """
    return {
        "seed": plan.seed,
        "block": plan.block,
        "models": {entry.label: entry.meaning for entry in plan.models},
        "data": {entry.label: _checked(source, "data", entry, _data) for entry in plan.data},
        "methods": {entry.label: _checked(source, "methods", entry, _method) for entry in plan.methods},
        "metrics": {entry.label: _checked(source, "metrics", entry, _metric) for entry in plan.metrics},
    }


def _checked(source: str, kind: str, entry: T, look_up: Callable[[T], dict[str, Any]]) -> dict[str, Any]:
    try:
        return to_jsonable(look_up(entry))
    except NoiserError as error:
        raise PlanError(f"{source}: {kind}, {entry.label!r}: {error}") from error


def _data(entry: DataEntry) -> dict[str, Any]:
    return entry.meaning | ({"name": DATA_SETS.get(entry.name).versioned_name} if entry.name else {})


def _method(entry: MethodEntry) -> dict[str, Any]:
    return {
        "name": METHODS.get(entry.name).versioned_name,
        "parameters": dict(describe(make(entry))[1]),
        "profile": entry.profile,
        "unit": entry.unit,
    }


def _metric(entry: MetricEntry) -> dict[str, Any]:
    from noiser.attribution.normalize import NORMALIZATIONS

    registered = METRICS.get(entry.name)
    metric = registered.factory()
    settings = {name: getattr(entry, name) for name in (*SETTINGS, "judge")}
    check_read([metric], settings | {"judge": entry.judge or entry.judge_args or None})
    if entry.rates is not None:
        check_shares("rates", entry.rates, at_least=2)
    if entry.k is not None:
        check_top(entry.k)
    if entry.normalization is not None:
        check_choice("normalization", entry.normalization, NORMALIZATIONS)
    if metric.needs_judge and entry.judge is None:
        raise ParameterError("The metric needs a judge; expected judge = 'local', 'local:MODEL' or 'openai:MODEL'.")
    if entry.judge is not None:
        kind_of(entry.judge)
    return entry.meaning | {"name": registered.versioned_name}


def check_change(
    old: Mapping[str, Any], new: Mapping[str, Any], folder: str, used: Mapping[str, Container[str]]
) -> None:
    """Refuses a plan that changes the meaning of stored rows; it may add to the stored plan, and restrict it.

    Args:
        old: the resolved plan that is stored.
        new: the resolved plan that takes its place.
        folder: the benchmark's folder, for errors.
        used: labels of each kind that have rows; other entries may change or go.

    Raises:
        PlanError: it changes a meaning; names what changed, from what, to what.
    """
    changes = [f"{key} was {old[key]!r} and is {new[key]!r}" for key in ("seed", "block") if old[key] != new[key]]
    for kind in ("models", "data", "methods", "metrics"):
        for label, meaning in old[kind].items():
            where = f"{kind}, {label!r}"
            if label in used[kind] and label not in new[kind]:
                changes.append(f"{where} is no longer there")
            elif label in used[kind]:
                changes += [f"{where}, {change}" for change in _differences(meaning, new[kind][label])]
    if changes:
        raise PlanError(
            f"The plan changes what is stored in {folder}: {'; '.join(changes)}. Put the old values back, give new "
            "entries labels of their own, or start another folder. Nothing stored was changed."
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Changes of the settings that both editions of noiser have."""
    found: list[str] = []
    for key in [key for key in old if key in new]:
        before, after = old[key], new[key]
        if key == "prompts" and before:
            after = after and after[: len(before)]  # more may follow
        if key == "parameters":
            found += [f"{key}: {change}" for change in _differences(before, after)]
        elif before != after and not (key == "name" and renamed(str(before)) == after):
            found.append(f"{key} was {before!r} and is {after!r}")
    return found
