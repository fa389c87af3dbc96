"""Several benchmarks of the same prompts as one, so that their methods are compared in one
table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from noiser.bench import Row, Store
from noiser.bench.plan import MethodEntry, Plan, PlanEntry
from noiser.bench.rows import Kind
from noiser.errors import PlanError, UnknownNameError

_RESTRICTIONS = ("models", "data", "methods", "metrics")


@dataclass(frozen=True)
class Joined:
    """Stores that a report reads as one: their plans are one plan, and their rows follow each
    other.

    Entries of the same label must mean the same in all plans, and the seeds must be equal: masks
    and references are then the same, and differences between methods are paired. A method belongs
    to one store, since two sets of rows of one method would be averaged.
    """

    stores: Sequence[Store]
    plan: Plan

    @property
    def path(self) -> str:
        """The folders, for messages."""
        return ", ".join(str(store.path) for store in self.stores)

    @property
    def meta(self) -> Mapping[str, Any]:
        """Facts about the runs: of the first store, with the selections of all."""
        found: dict[tuple[str, str], Any] = {}
        for store in self.stores:
            for each in store.meta.get("selections", ()):
                key = (each["model"], each["data"])
                if key not in found or len(each["chosen"]) > len(found[key]["chosen"]):
                    found[key] = each
        return {**self.stores[0].meta, "selections": [*found.values()]}

    def rows(self, kind: Kind | None = None, *, failed: bool = False) -> Iterator[Row]:
        """The rows of every store in turn, as of `Store.rows`."""
        for store in self.stores:
            yield from store.rows(kind, failed=failed)


Stored = Store | Joined
"""What a report reads: one benchmark, or several as one."""


def join(stores: Sequence[Store]) -> Stored:
    """One store out of several; a single one is returned as it is.

    Raises:
        PlanError: the plans differ in seed, or in what a label means; or two have the same method.
    """
    if len(stores) == 1:
        return stores[0]
    plans = [_restricted(store.plan) for store in stores]
    first = plans[0]
    for store, plan in zip(stores[1:], plans[1:], strict=True):
        if plan.seed != first.seed:
            raise PlanError(
                f"{store.path} has seed {plan.seed} and {stores[0].path} has {first.seed}: their "
                "random masks differ. Report them one by one."
            )
    entries = {kind: _united(kind, plans, stores) for kind in _RESTRICTIONS}
    name = " and ".join(dict.fromkeys(plan.name for plan in plans))
    return Joined(stores, first.model_copy(update={"name": name, **entries}))


def select(store: Stored, methods: Sequence[str] = (), metrics: Sequence[str] = ()) -> Stored:
    """The store with some methods and metrics alone, by label; all of them where none is named.

    Raises UnknownNameError for a label that the plan does not have.
    """
    changes: dict[str, Any] = {}
    for kind, labels in (("methods", methods), ("metrics", metrics)):
        if not labels:
            continue
        known = store.plan.labels(kind)
        for label in labels:
            if label not in known:
                raise UnknownNameError(f"label in {kind}", label, known)
        entries = [entry for entry in getattr(store.plan, kind) if entry.label in labels]
        changes[kind] = tuple(entries)
    if not changes:
        return store
    stores = store.stores if isinstance(store, Joined) else [store]
    return Joined(stores, store.plan.model_copy(update=changes))


def _restricted(plan: Plan) -> Plan:
    """The plan with every method restricted to what its plan runs it on, now that others join."""
    methods: list[MethodEntry] = []
    for method in plan.methods:
        metrics = [
            metric.label
            for metric in plan.metrics
            if (not metric.methods or method.label in metric.methods)
            and (not method.metrics or metric.label in method.metrics)
        ]
        allowed = {
            "models": method.models or tuple(plan.labels("models")),
            "data": method.data or tuple(plan.labels("data")),
            "metrics": tuple(metrics),
        }
        methods.append(method.model_copy(update=allowed))
    metrics = tuple(metric.model_copy(update={"methods": ()}) for metric in plan.metrics)
    return plan.model_copy(update={"methods": tuple(methods), "metrics": metrics})


def _united(kind: str, plans: Sequence[Plan], stores: Sequence[Store]) -> tuple[PlanEntry, ...]:
    """The entries of one kind of all plans, by their labels."""
    found: dict[str, PlanEntry] = {}
    for plan, store in zip(plans, stores, strict=True):
        for entry in getattr(plan, kind):
            other = found.setdefault(entry.label, entry)
            if other is entry:
                continue
            if isinstance(entry, MethodEntry):
                raise PlanError(
                    f"{store.path} has the method {entry.label!r}, and so has another folder. "
                    "Expected labels that differ; change one in its plan.toml."
                )
            if other.meaning != entry.meaning:
                raise PlanError(
                    f"{kind}, {entry.label!r}, means {entry.meaning} in {store.path} and "
                    f"{other.meaning} in another folder. Expected the same."
                )
            found[entry.label] = _wider(other, entry)
    return tuple(found.values())


def _wider(one: Any, other: Any) -> Any:
    """An entry that allows what either of two allows: methods say for themselves what they run
    on.
    """
    changes: dict[str, Any] = {"limit": _higher(one.limit, other.limit)}
    for kind in _RESTRICTIONS:
        if hasattr(one, kind):
            mine = getattr(one, kind)
            theirs = getattr(other, kind)
            changes[kind] = (*dict.fromkeys((*mine, *theirs)),) if mine and theirs else ()
    return one.model_copy(update=changes)


def _higher(one: Any, other: Any) -> Any:
    """The higher of two limits, where None is none; limits by data set become none where they
    differ.
    """
    if isinstance(one, int) and isinstance(other, int):
        return max(one, other)
    return one if one == other else None
