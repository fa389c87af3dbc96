"""The examples of a benchmark: drawn by the plan's seed and, if the plan says so, answered right by the model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import NamedTuple

from noiser.bench.plan import DataEntry, Plan
from noiser.bench.store import Store
from noiser.data import DataSet, load
from noiser.data.dataset import in_draw_order
from noiser.errors import ParameterError, PlanError, StoredFileError, UnknownNameError
from noiser.evaluation.examples import Item, item_of


class Drawn(NamedTuple):
    """All examples of an entry by id, in the order of the draw, and the data set's notes."""

    examples: Mapping[str, Item]
    notes: tuple[str, ...]


class Selection(NamedTuple):
    """The sample of a model on a data set.

    Attributes:
        model, data: labels of the plan.
        total: how many examples there are.
        checked: how many of them the model was asked, in the order of the draw; None where all are taken.
        right: how many answers were right.
        chosen: ids, in the order of the draw.
        failed: the error's type of examples that could not be asked, by id.
        notes: what the data set says was removed or repaired.
    """

    model: str
    data: str
    total: int
    checked: int | None
    right: int | None
    chosen: Sequence[str]
    failed: Mapping[str, str]
    notes: Sequence[str]

    def lacks(self, limit: int | None) -> bool:
        """Whether a model has to be asked further."""
        return self.checked is not None and self.checked < self.total and (limit is None or len(self.chosen) < limit)

    def extended(self, answers: Mapping[str, bool | str], limit: int | None) -> Selection:
        """The selection after further answers, in the order of the draw: right, wrong, or an error's type."""
        chosen, failed, checked = [*self.chosen], {**self.failed}, self.checked or 0
        for example, answer in answers.items():
            if limit is None or len(chosen) < limit:
                chosen += [example] if answer is True else []
                failed |= {example: answer} if isinstance(answer, str) else {}
                checked += 1
        return self._replace(checked=checked, right=len(chosen), chosen=chosen, failed=failed)


def selections_of(store: Store) -> dict[tuple[str, str], Selection]:
    """The stored selections by model and data set."""
    return {(each["model"], each["data"]): Selection(**each) for each in store.meta.get("selections", ())}


def first_selection(model: str, entry: DataEntry, drawn: Drawn, limit: int | None) -> Selection:
    """The first examples of the draw; none yet where only right answers count."""
    asked = 0 if entry.only_correct else None
    chosen = [] if entry.only_correct else [*drawn.examples][:limit]
    return Selection(model, entry.label, len(drawn.examples), asked, asked, chosen, {}, drawn.notes)


def draw_all(plan: Plan, data_dir: str | PathLike[str] | None) -> dict[str, Drawn]:
    """The examples of every data entry.

    Raises:
        PlanError: no such category or example, none is left, or the data set has no answers and the entry needs them.
    """
    try:
        return {entry.label: draw(entry, plan.seed, data_dir) for entry in plan.data}
    except (ParameterError, UnknownNameError) as error:
        raise PlanError(f"data: {error}") from error


def draw(entry: DataEntry, seed: int, data_dir: str | PathLike[str] | None) -> Drawn:
    """All examples of an entry, in the order of the draw."""
    if entry.prompts is not None:
        items = [Item(index=0, id=f"{entry.label}-{i}", prompt=prompt) for i, prompt in enumerate(entry.prompts)]
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
        raise ParameterError(f"{entry.label!r} has no example left; expected wider categories or max_characters.")
    if (entry.only_correct or entry.explain == "answer") and not all(example.target for example in examples):
        raise ParameterError(f"{entry.label!r} needs answers, and examples of {entry.name} have none.")
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
    categories, ids = set(dataset.categories), {example.id for example in dataset}
    named = [("category", name, categories) for name in (*entry.category, *entry.without_category)]
    for kind, name, there in (*named, *(("example", name, ids) for name in entry.without_ids)):
        if name not in there:
            raise UnknownNameError(f"{kind} of {entry.name}", name, sorted(there)[:20])


def sample(drawn: Drawn, selection: Selection, limit: int | None) -> tuple[Item, ...]:
    """The chosen examples, each with its position. Raises StoredFileError where the data set lacks one."""
    chosen = selection.chosen[:limit]
    if gone := [example for example in chosen if example not in drawn.examples]:
        text = f"{selection.data!r} lacks {gone[0]!r}, which was chosen before. Use the data of that run."
        raise StoredFileError(text)
    return tuple(replace(drawn.examples[name], index=index) for index, name in enumerate(chosen))
