"""The meaning of a plan: names and defaults looked up, the changes that it may not make, and the examples it draws."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

from noiser.attribution.store import to_jsonable
from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, Plan
from noiser.data import DATA_SETS, DataSet, load
from noiser.data.dataset import in_draw_order
from noiser.errors import NoiserError, ParameterError, PlanError, StoredFileError, UnknownNameError
from noiser.evaluation.measuring import Item, asked_of, item_of
from noiser.judges import kind_of
from noiser.judges.prompts import prompt_of
from noiser.methods import METHODS, describe, make_method
from noiser.metrics import Settings, metrics_of
from noiser.registry import renamed


def resolve(plan: Plan, source: str) -> dict[str, Any]:
    """A plan with versioned names and every default, as JSON. Raises PlanError, which names `source`."""
    models = {entry.label: entry.meaning for entry in plan.models}
    resolved: dict[str, Any] = {
        "seed": plan.seed,
        "block": plan.block,
        "models": to_jsonable(models),
    }
    look_up: dict[str, Any] = {"data": _data, "methods": _method, "metrics": _metric}
    for kind in look_up:
        resolved[kind] = {}
        for entry in getattr(plan, kind):
            try:
                resolved[kind][entry.label] = to_jsonable(look_up[kind](entry))
            except NoiserError as error:
                raise PlanError(f"{source}: {kind}, {entry.label!r}: {error}") from error
    return resolved


def _data(entry: DataEntry) -> dict[str, Any]:
    return entry.meaning | (
        {"name": DATA_SETS.get(entry.name).versioned_name} if entry.name else {}
    )


def _method(entry: MethodEntry) -> dict[str, Any]:
    method, _ = asked_of(make_method(entry.name, **entry.args), entry.profile)
    name, parameters = METHODS.get(entry.name).versioned_name, dict(describe(method)[1])
    return {"name": name, "parameters": parameters, "profile": entry.profile, "unit": entry.unit}


def _metric(entry: MetricEntry) -> dict[str, Any]:
    (name,) = metrics_of(entry.name, entry.settings | {"judge": entry.judge})
    Settings(**entry.settings)
    if entry.judge is not None:
        kind_of(entry.judge)
        if prompt := entry.judge_args.get("prompt"):
            prompt_of(prompt)
    return entry.meaning | {"name": name}


def check_change(
    old: Mapping[str, Any], new: Mapping[str, Any], folder: str, used: Mapping[str, Container[str]]
) -> None:
    """Raises PlanError where a new resolved plan changes what the stored rows of the old one mean.

    It may have more entries, or restrict more; entries without rows, those that `used` does not name, may change or go.
    """
    changes = [
        f"{key} was {old[key]!r} and is {new[key]!r}"
        for key in ("seed", "block")
        if old[key] != new[key]
    ]
    for kind in ("models", "data", "methods", "metrics"):
        for label, meaning in old[kind].items():
            where = f"{kind}, {label!r}"
            if label in used[kind] and label not in new[kind]:
                changes.append(f"{where} is no longer there")
            elif label in used[kind]:
                changes += [
                    f"{where}, {change}" for change in _differences(meaning, new[kind][label])
                ]
    if changes:
        remedy = "Put the old values back, give new entries labels of their own, or start another folder."
        raise PlanError(
            f"The plan changes what is stored in {folder}: {'; '.join(changes)}. {remedy}"
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


class Drawn(NamedTuple):
    """All examples of an entry by id, in the order of the draw, and the data set's notes."""

    examples: Mapping[str, Item]
    notes: tuple[str, ...]


class Selection(NamedTuple):
    """The sample of a model on a data set."""

    model: str
    data: str
    total: int  # how many examples there are
    checked: (
        int | None
    )  # how many of them the model was asked, in the order of the draw; None where all are taken
    right: int | None  # how many answers were right
    chosen: Sequence[str]  # ids, in the order of the draw
    failed: Mapping[str, str]  # by id, the error's type of examples that could not be asked
    notes: Sequence[str]  # what the data set says was removed or repaired

    def lacks(self, limit: int | None) -> bool:
        """Whether a model has to be asked further."""
        return (
            self.checked is not None
            and self.checked < self.total
            and (limit is None or len(self.chosen) < limit)
        )

    def extended(self, answers: Mapping[str, bool | str], limit: int | None) -> Selection:
        """The selection after further answers, in the order of the draw: right, wrong, or an error's type."""
        chosen, failed, checked = [*self.chosen], {**self.failed}, self.checked or 0
        for example, answer in answers.items():
            if limit is None or len(chosen) < limit:
                chosen += [example] if answer is True else []
                failed |= {example: answer} if isinstance(answer, str) else {}
                checked += 1
        return self._replace(checked=checked, right=len(chosen), chosen=chosen, failed=failed)

    def sample(self, drawn: Drawn, limit: int | None) -> tuple[Item, ...]:
        """The chosen examples, each with its position. Raises StoredFileError where the data set lacks one."""
        chosen = self.chosen[:limit]
        if gone := [example for example in chosen if example not in drawn.examples]:
            raise StoredFileError(
                f"{self.data!r} lacks {gone[0]!r}, chosen before. Use the data of that run."
            )
        return tuple(
            replace(drawn.examples[name], index=index) for index, name in enumerate(chosen)
        )


def selections_of(meta: Mapping[str, Any], path: object) -> dict[tuple[str, str], Selection]:
    """The selections that a store's facts have, by model and data set; errors name its path."""
    try:
        stored = [Selection(**each) for each in meta.get("selections", ())]
        return {(each.model, each.data): each for each in stored}
    except TypeError as error:
        raise StoredFileError(
            f"The selections in {path} are damaged: {error}. Use another copy."
        ) from error


def first_selection(model: str, entry: DataEntry, drawn: Drawn, limit: int | None) -> Selection:
    """The first examples of the draw; none yet where only right answers count."""
    asked = 0 if entry.only_correct else None
    chosen = [] if entry.only_correct else [*drawn.examples][:limit]
    return Selection(model, entry.label, len(drawn.examples), asked, asked, chosen, {}, drawn.notes)


def draw_all(plan: Plan, data_dir: str | PathLike[str] | None) -> dict[str, Drawn]:
    """The examples of every data entry. Raises PlanError for a wrong category or example, or where none is left."""
    try:
        return {entry.label: draw(entry, plan.seed, data_dir) for entry in plan.data}
    except (ParameterError, UnknownNameError) as error:
        raise PlanError(f"data: {error}") from error


def draw(entry: DataEntry, seed: int, data_dir: str | PathLike[str] | None) -> Drawn:
    """All examples of an entry, in the order of the draw."""
    if entry.prompts is not None:
        items = [
            Item(index=0, id=f"{entry.label}-{i}", prompt=prompt)
            for i, prompt in enumerate(entry.prompts)
        ]
        return Drawn({item.id: item for item in items}, ())
    assert entry.name is not None
    dataset = load(entry.name, data_dir)
    _check_names(entry, dataset)
    examples = [
        example
        for example in dataset
        if (not entry.category or example.category in entry.category)
        and example.category not in entry.without_category
        and example.id not in entry.without_ids
        and (entry.max_characters is None or len(example.prompt) <= entry.max_characters)
    ]
    if not examples:
        raise ParameterError(
            f"{entry.label!r} has no example left; expected wider categories or max_characters."
        )
    if (entry.only_correct or entry.explain == "answer") and not all(
        example.target for example in examples
    ):
        raise ParameterError(
            f"{entry.label!r} needs answers, and examples of {entry.name} have none."
        )
    ordered = in_draw_order(examples, seed)
    if entry.stratified:
        turns = defaultdict[str, Iterator[int]](itertools.count)
        turn = {example.id: next(turns[example.category]) for example in ordered}
        ordered.sort(key=lambda example: turn[example.id])
    items = {example.id: item_of(0, example) for example in ordered}  # `sample` counts
    if entry.explain == "continuation":
        items = {name: replace(item, target=None) for name, item in items.items()}
    return Drawn(items, tuple(dataset.notes))


def _check_names(entry: DataEntry, dataset: DataSet) -> None:
    categories, ids = {example.category for example in dataset}, {example.id for example in dataset}
    named = [("category", name, categories) for name in (*entry.category, *entry.without_category)]
    for kind, name, there in (*named, *(("example", name, ids) for name in entry.without_ids)):
        if name not in there:
            raise UnknownNameError(f"{kind} of {entry.name}", name, sorted(there)[:20])
