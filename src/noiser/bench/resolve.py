"""The meaning of a plan: versioned names, defaults, and the examples that it draws.

It also says which changes a plan may not make once there are rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

from noiser.attribution.store import to_jsonable
from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, Plan
from noiser.data import DATA_SETS, DataSet, Example, load
from noiser.data.dataset import in_draw_order
from noiser.errors import NoiserError, ParameterError, PlanError, StoredFileError, UnknownNameError
from noiser.evaluation.measuring import Item, asked_of, item_of
from noiser.judges import kind_of
from noiser.judges.prompts import prompt_of
from noiser.methods import METHODS, describe, make_method
from noiser.metrics import Settings, metrics_of
from noiser.registry import renamed


def resolve(plan: Plan, source: str) -> dict[str, Any]:
    """A plan with versioned names and every default, as JSON.

    Raises PlanError, whose message names `source`.
    """
    models = {entry.label: entry.meaning for entry in plan.models}
    resolved: dict[str, Any] = {
        "seed": plan.seed,
        "block": plan.block,
        "models": to_jsonable(models),
    }
    meaning_of: dict[str, Any] = {"data": _data, "methods": _method, "metrics": _metric}
    for kind, meaning in meaning_of.items():
        resolved[kind] = {}
        for entry in getattr(plan, kind):
            try:
                resolved[kind][entry.label] = to_jsonable(meaning(entry))
            except NoiserError as error:
                raise PlanError(f"{source}: {kind}, {entry.label!r}: {error}") from error
    return resolved


def _data(entry: DataEntry) -> dict[str, Any]:
    meaning = entry.meaning
    if entry.name:
        meaning["name"] = DATA_SETS.get(entry.name).versioned_name
    return meaning


def _method(entry: MethodEntry) -> dict[str, Any]:
    method, _ = asked_of(make_method(entry.name, **entry.args), entry.profile)
    _, parameters = describe(method)
    return {
        "name": METHODS.get(entry.name).versioned_name,
        "parameters": dict(parameters),
        "profile": entry.profile,
        "unit": entry.unit,
    }


def _metric(entry: MetricEntry) -> dict[str, Any]:
    (name,) = metrics_of(entry.name, entry.settings | {"judge": entry.judge})
    Settings(**entry.settings)  # raises where a setting is not valid
    if entry.judge is not None:
        kind_of(entry.judge)  # raises where there is no such judge
        prompt = entry.judge_args.get("prompt")
        if prompt:
            prompt_of(prompt)  # raises where it is not a template
    return entry.meaning | {"name": name}


def check_change(
    old: Mapping[str, Any], new: Mapping[str, Any], folder: str, used: Mapping[str, Container[str]]
) -> None:
    """Raises PlanError where a new resolved plan changes what the stored rows of the old one mean.

    The new plan may have more entries, or restrict more. Entries without rows, which `used` does
    not name, may change or go.
    """
    changes: list[str] = []
    for key in ("seed", "block"):
        if old[key] != new[key]:
            changes.append(f"{key} was {old[key]!r} and is {new[key]!r}")
    for kind in ("models", "data", "methods", "metrics"):
        for label, meaning in old[kind].items():
            if label not in used[kind]:
                continue
            where = f"{kind}, {label!r}"
            if label not in new[kind]:
                changes.append(f"{where} is no longer there")
                continue
            for difference in _differences(meaning, new[kind][label]):
                changes.append(f"{where}, {difference}")
    if changes:
        raise PlanError(
            f"The plan changes what is stored in {folder}: {'; '.join(changes)}. Put the old "
            "values back, give new entries labels of their own, or start another folder."
        )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences in words, among the settings that both versions of noiser have."""
    differences: list[str] = []
    for key, before in old.items():
        if key not in new:
            continue
        after = new[key]
        if key == "prompts" and before:
            after = after and after[: len(before)]  # more may follow
        if key == "parameters":
            for difference in _differences(before, after):
                differences.append(f"{key}: {difference}")
            continue
        was_renamed = key == "name" and renamed(str(before)) == after
        if before != after and not was_renamed:
            differences.append(f"{key} was {before!r} and is {after!r}")
    return differences


class Drawn(NamedTuple):
    """All examples of an entry by id, in the order of the draw, and the data set's notes."""

    examples: Mapping[str, Item]
    notes: tuple[str, ...]


class Selection(NamedTuple):
    """The sample of a model on a data set."""

    model: str
    data: str
    total: int  # how many examples there are
    checked: int | None
    """How many of them the model was asked, in the order of the draw; None where all are taken."""
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
        """The selection after further answers: right, wrong, or an error's type.

        The answers are in the order of the draw. Those after the limit is reached do not count.
        """
        chosen = [*self.chosen]
        failed = {**self.failed}
        checked = self.checked or 0
        for example, answer in answers.items():
            if limit is not None and len(chosen) >= limit:
                break
            checked += 1
            if answer is True:
                chosen.append(example)
            elif isinstance(answer, str):
                failed[example] = answer
        return self._replace(checked=checked, right=len(chosen), chosen=chosen, failed=failed)

    def sample(self, drawn: Drawn, limit: int | None) -> tuple[Item, ...]:
        """The chosen examples, each with its position.

        Raises StoredFileError where the data set lacks one.
        """
        items: list[Item] = []
        for index, example in enumerate(self.chosen[:limit]):
            if example not in drawn.examples:
                raise StoredFileError(
                    f"{self.data!r} lacks {example!r}, chosen before. Use the data of that run."
                )
            items.append(replace(drawn.examples[example], index=index))
        return tuple(items)


def selections_of(meta: Mapping[str, Any], path: object) -> dict[tuple[str, str], Selection]:
    """The selections among a store's facts, by model and data set; errors name its path."""
    selections: dict[tuple[str, str], Selection] = {}
    try:
        for fields in meta.get("selections", ()):
            selection = Selection(**fields)
            selections[selection.model, selection.data] = selection
    except TypeError as error:
        raise StoredFileError(
            f"The selections in {path} are damaged: {error}. Use another copy."
        ) from error
    return selections


def first_selection(model: str, entry: DataEntry, drawn: Drawn, limit: int | None) -> Selection:
    """The first examples of the draw; none yet where only right answers count."""
    checked = None
    chosen = [*drawn.examples][:limit]
    if entry.only_correct:
        checked = 0
        chosen = []
    return Selection(
        model=model,
        data=entry.label,
        total=len(drawn.examples),
        checked=checked,
        right=checked,
        chosen=chosen,
        failed={},
        notes=drawn.notes,
    )


def draw_all(plan: Plan, data_dir: str | PathLike[str] | None) -> dict[str, Drawn]:
    """The examples of every data entry.

    Raises PlanError for a wrong category or example, or where none is left.
    """
    try:
        return {entry.label: draw(entry, plan.seed, data_dir) for entry in plan.data}
    except (ParameterError, UnknownNameError) as error:
        raise PlanError(f"data: {error}") from error


def draw(entry: DataEntry, seed: int, data_dir: str | PathLike[str] | None) -> Drawn:
    """All examples of an entry, in the order of the draw."""
    if entry.prompts is not None:
        items: dict[str, Item] = {}
        for number, prompt in enumerate(entry.prompts):
            name = f"{entry.label}-{number}"
            items[name] = Item(index=0, id=name, prompt=prompt)
        return Drawn(items, ())
    assert entry.name is not None
    dataset = load(entry.name, data_dir)
    _check_names(entry, dataset)
    examples = [example for example in dataset if _allows(entry, example)]
    _check_examples(entry, examples)
    ordered = in_draw_order(examples, seed)
    if entry.stratified:
        ordered = _stratified(ordered)
    items = {}
    for example in ordered:
        item = item_of(0, example)  # `Selection.sample` sets the index
        if entry.explain == "continuation":
            item = replace(item, target=None)
        items[example.id] = item
    return Drawn(items, tuple(dataset.notes))


def _check_names(entry: DataEntry, dataset: DataSet) -> None:
    """Raises UnknownNameError for a category or an example that the data set does not have."""
    categories = {example.category for example in dataset}
    ids = {example.id for example in dataset}
    for name in (*entry.category, *entry.without_category):
        if name not in categories:
            raise UnknownNameError(f"category of {entry.name}", name, sorted(categories)[:20])
    for name in entry.without_ids:
        if name not in ids:
            raise UnknownNameError(f"example of {entry.name}", name, sorted(ids)[:20])


def _allows(entry: DataEntry, example: Example) -> bool:
    """Whether an entry takes an example."""
    if entry.category and example.category not in entry.category:
        return False
    if example.category in entry.without_category or example.id in entry.without_ids:
        return False
    return entry.max_characters is None or len(example.prompt) <= entry.max_characters


def _check_examples(entry: DataEntry, examples: Sequence[Example]) -> None:
    """Raises ParameterError where no example is left, or one lacks the answer that is needed."""
    if not examples:
        raise ParameterError(
            f"{entry.label!r} has no example left; expected wider categories or max_characters."
        )
    needs_answers = entry.only_correct or entry.explain == "answer"
    if needs_answers and not all(example.target for example in examples):
        raise ParameterError(
            f"{entry.label!r} needs answers, and examples of {entry.name} have none."
        )


def _stratified(examples: Sequence[Example]) -> list[Example]:
    """The examples with the categories in turn: the first of each, then the second of each."""
    counts = Counter[str]()
    turn: dict[str, int] = {}
    for example in examples:
        turn[example.id] = counts[example.category]
        counts[example.category] += 1
    return sorted(examples, key=lambda example: turn[example.id])
