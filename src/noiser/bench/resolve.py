"""What a plan means once every name and default is looked up, and whether a changed plan still means the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from noiser.attribution.store import to_jsonable
from noiser.bench.plan import ATTRIBUTION, DataEntry, Entry, MethodEntry, MetricEntry, Plan, combined, read_plan
from noiser.bench.progress import Forecast, Key, Load, attribution_tokens, metric_tokens
from noiser.bench.records import Cost
from noiser.bench.samples import draw
from noiser.bench.tasks import Sampled
from noiser.checks import check_choice, check_shares
from noiser.data import DATA_SETS
from noiser.errors import NoiserError, ParameterError, PlanError
from noiser.evaluation.measuring import in_profile
from noiser.judges import kind_of
from noiser.methods import METHODS, Method, describe, make_method
from noiser.metrics import METRICS
from noiser.metrics.metric import SETTINGS, check_read
from noiser.metrics.top_k import check_top
from noiser.registry import unversioned

T = TypeVar("T")

_CHARACTERS = 4.3
"""Characters per token, for the forecast."""


def make(entry: MethodEntry) -> Method:
    """The method that an entry stands for."""
    return in_profile(make_method(entry.name, **entry.args), entry.profile)


def resolve(plan: Plan, source: str) -> dict[str, Any]:
    """A plan with versioned names and every default, as JSON has it; `source` is what errors call it.

    Raises:
        PlanError: an unknown name, with the nearest one, or a parameter that is refused.
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
        assert isinstance(entry, Entry)
        raise PlanError(f"{source}: {kind}, {entry.label!r}: {error}") from error


def _data(entry: DataEntry) -> dict[str, Any]:
    if entry.name is None:
        return {**entry.meaning, "prompts": entry.prompts}
    return entry.meaning | {"name": DATA_SETS.get(entry.name).versioned_name}


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
        raise ParameterError("it asks a judge; expected judge = 'local', 'local:MODEL' or 'openai:MODEL'.")
    if entry.judge is not None:
        kind_of(entry.judge)
    return entry.meaning | {"name": registered.versioned_name} | _judge_address(entry)


def _judge_address(entry: MetricEntry) -> dict[str, str]:
    """Where a served judge is, if only the environment says it."""
    if entry.judge and kind_of(entry.judge) == "openai" and "base_url" not in entry.judge_args:
        address = urlsplit((os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1").rstrip("/"))
        return {"judge_address": f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"}
    return {}


def fingerprint(resolved: Mapping[str, Any]) -> str:
    """The sha256 of a resolved plan."""
    return hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()


def check_change(
    old: Mapping[str, Any], new: Mapping[str, Any], folder: str, used: Mapping[str, Container[str]]
) -> None:
    """Whether what is stored keeps its meaning under a new plan: it may add, and use entries more or less.

    Args:
        old: the resolved plan that is stored.
        new: the one that takes its place.
        folder: what errors call the place.
        used: labels of each kind that something is stored of; the others may change or go.

    Raises:
        PlanError: it does not; names what changed, from what, to what.
    """
    changes = [f"{key} was {old[key]!r} and is {new[key]!r}" for key in ("seed", "block") if old[key] != new[key]]
    for kind in ("models", "data", "methods", "metrics"):
        for label, meaning in old[kind].items():
            if label not in used[kind]:
                continue
            where = f"{kind}, {label!r}"
            if label not in new[kind]:
                changes.append(f"{where} is no longer there")
            else:
                changes += [f"{where}, {change}" for change in _differences(meaning, new[kind][label])]
    if changes:
        raise PlanError(
            f"The plan changes what is stored in {folder}: {'; '.join(changes)}. Expected a plan that only adds to the "
            "stored one, or uses its entries more or less. Put the old values back, give what is new a label of its "
            "own, or start another folder. Nothing stored was changed."
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if key == "prompts":
            after = (after or [])[: len(before or [])]  # more may follow
        if before == after or (key == "judge_address" and str(before or after).rstrip("/") == after):
            continue  # earlier editions did not store it, or with a slash at its end
        if isinstance(before, dict) and isinstance(after, dict):
            found += [f"{key}: {change}" for change in _differences(before, after)]
        else:
            found.append(f"{key} was {before!r} and is {after!r}")
    return found


class Definition:
    """A plan with all that it means: defaults looked up, examples drawn.

    Raises:
        PlanError: the plan cannot be read, or means nothing. NoiserError: a data set is not there.
    """

    def __init__(self, path: Path, data_dir: str | PathLike[str] | None) -> None:
        self.plan, self.text = read_plan(path)
        self.resolved = resolve(self.plan, str(path))
        self.drawn: dict[str, tuple[tuple[Sampled, ...], tuple[str, ...]]] = {}
        for entry in self.plan.data:
            try:
                self.drawn[entry.label] = draw(entry, self.plan.seed, data_dir)
            except LookupError as error:
                raise PlanError(f"{path}: data, {entry.label!r}: {error}") from error

    @cached_property
    def by_id(self) -> Mapping[str, Mapping[str, Sampled]]:
        """The examples of each data entry by their ids."""
        return {label: {sampled.id: sampled for sampled in examples} for label, (examples, _) in self.drawn.items()}

    def upper_bounds(self) -> Counter[Key]:
        """How many rows of each kind there can be at most."""
        counts = Counter[Key]()
        for model in self.plan.labels("models"):
            for entry in self.plan.data_for(model):
                most = combined((entry.limit, len(self.drawn[entry.label][0])))
                for method, metric, limit in self.plan.kinds(model, entry.label):
                    counts[Key(model, entry.label, method, metric)] = combined((most, limit)) or 0
        return counts

    def forecast(
        self,
        counts: Mapping[Key, int],
        speeds: Mapping[str, float] | None = None,
        costs: Iterable[Cost] = (),
        workers: int = 1,
    ) -> Forecast:
        """What so many rows of each kind take."""
        loads = {key: Load(count, self._tokens(key)) for key, count in counts.items()}
        return Forecast(loads, speeds or {}, costs, workers)

    def _tokens(self, key: Key) -> float:
        targets = self.plan.entry("data", key.data).max_new_tokens
        examples = self.drawn[key.data][0]
        characters = sum(len(str(sampled.item.prompt)) for sampled in examples) / len(examples)
        length = characters / _CHARACTERS + 1 + targets
        if key.metric == ATTRIBUTION:
            said, method = self.resolved["methods"][key.method], make(self.plan.entry("methods", key.method))
            return attribution_tokens(method, unversioned(said["name"]), said["parameters"], length, targets)
        metric = self.resolved["metrics"][key.metric]
        rates = len(metric["rates"] or range(5))
        return metric_tokens(unversioned(metric["name"]), metric["masks"], rates, length, targets)
