"""The meaning of a plan, with every name and default looked up, and the changes that a plan may not make."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from noiser.attribution.store import to_jsonable
from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, Plan
from noiser.data import DATA_SETS
from noiser.errors import NoiserError, ParameterError, PlanError
from noiser.evaluation.measuring import in_profile
from noiser.judges import kind_of
from noiser.methods import METHODS, Method, describe, make_method
from noiser.metrics import METRICS, SETTINGS, Settings, check_read
from noiser.registry import renamed


def make(entry: MethodEntry) -> Method:
    """The method of an entry, with its hyper-parameters."""
    return in_profile(make_method(entry.name, **entry.args), entry.profile)


def resolve(plan: Plan, source: str) -> dict[str, Any]:
    """A plan with versioned names and every default, as JSON; errors name `source`.

    Raises:
        PlanError: an unknown name, or a parameter that is refused.
    """
    models = {entry.label: entry.meaning for entry in plan.models}
    resolved: dict[str, Any] = {"seed": plan.seed, "block": plan.block, "models": to_jsonable(models)}
    kinds: tuple[tuple[str, Callable[[Any], dict[str, Any]]], ...]
    kinds = (("data", _data), ("methods", _method), ("metrics", _metric))
    for kind, look_up in kinds:
        resolved[kind] = {}
        for entry in getattr(plan, kind):
            try:
                resolved[kind][entry.label] = to_jsonable(look_up(entry))
            except NoiserError as error:
                raise PlanError(f"{source}: {kind}, {entry.label!r}: {error}") from error
    return resolved


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
    registered = METRICS.get(entry.name)
    metric = registered.factory()
    settings = {name: getattr(entry, name) for name in (*SETTINGS, "judge")}
    check_read([metric], settings | {"judge": entry.judge or entry.judge_args or None})
    Settings(**{name: value for name in SETTINGS if (value := getattr(entry, name)) is not None})
    if metric.needs_judge and entry.judge is None:
        raise ParameterError("The metric needs a judge; expected judge = 'local', 'local:MODEL' or 'openai:MODEL'.")
    if entry.judge is not None:
        kind_of(entry.judge)
    return entry.meaning | {"name": registered.versioned_name}


def check_change(
    old: Mapping[str, Any], new: Mapping[str, Any], folder: str, used: Mapping[str, Container[str]]
) -> None:
    """Raises PlanError where a resolved plan changes what rows of the old one mean; it may add to it, and restrict it.

    Args:
        old: the resolved plan that is stored.
        new: the resolved plan that takes its place.
        folder: the benchmark's folder, for errors.
        used: labels of each kind that have rows; other entries may change or go.
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
        text = f"The plan changes what is stored in {folder}: {'; '.join(changes)}"
        raise PlanError(
            f"{text}. Put the old values back, give new entries labels of their own, or start another folder."
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
