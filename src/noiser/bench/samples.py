"""Which examples: drawn by the plan's seed, and where wanted, those that the model gets right."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike

from noiser.bench.plan import DataEntry
from noiser.bench.records import Selection, without_text
from noiser.bench.tasks import Candidates, Sampled
from noiser.data import load
from noiser.data.dataset import in_draw_order
from noiser.errors import ParameterError, UnknownNameError
from noiser.evaluation.examples import Item
from noiser.model import LanguageModel
from noiser.types import Prompt

EVERY_SECONDS = 2.0
"""How often what is known of a choice is reported, to be stored."""


def draw(
    entry: DataEntry, seed: int, data_dir: str | PathLike[str] | None
) -> tuple[tuple[Sampled, ...], tuple[str, ...]]:
    """All examples of an entry in the order of the draw, and notes on them.

    Raises:
        DataError: the data set's files are not there. UnknownNameError: no such category. ParameterError: no example
            is left, or the entry needs answers that the data set does not have.
    """
    if entry.prompts is not None:
        prompts = enumerate(entry.prompts)
        return tuple(Sampled(f"{entry.label}-{i}", "", Item(index=i, prompt=prompt)) for i, prompt in prompts), ()
    assert entry.name is not None
    dataset = load(entry.name, data_dir)
    for category in (*entry.category, *entry.without_category):
        if category not in dataset.categories:
            raise UnknownNameError(f"category of {entry.name}", category, dataset.categories)
    ids = {example.id for example in dataset}
    for identity in entry.without_ids:
        if identity not in ids:
            raise ParameterError(
                f"data, {entry.label!r}: without_ids has {identity!r}, and {entry.name} has no such example; expected "
                f"ids such as {min(ids)!r}."
            )
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
            f"data, {entry.label!r}: no example is left; expected categories, ids and a max_characters that leave some."
        )
    need = [name for name, on in (("only_correct", entry.only_correct), ("explain", entry.explain == "answer")) if on]
    if need and not all(example.target for example in examples):
        raise ParameterError(
            f"data, {entry.label!r}: {' and '.join(need)} need answers, and examples of {entry.name} have none; "
            'expected explain = "continuation" without only_correct, or a data set with answers.'
        )
    ordered = in_draw_order(examples, seed)
    if entry.stratified:
        turns = defaultdict[str, Iterator[int]](itertools.count)
        turn = {example.id: next(turns[example.category]) for example in ordered}
        ordered.sort(key=lambda example: turn[example.id])
    sampled = (
        Sampled(
            example.id,
            example.category,
            Item(
                index=0,  # its position is known when it is chosen
                prompt=example.prompt,
                target=example.target if entry.explain == "answer" else None,
                gold=example.target,
                spans=example.spans or None,
                without=example.without,
            ),
        )
        for example in ordered
    )
    return tuple(sampled), dataset.notes


def select_all(model: str, candidates: Candidates) -> Selection:
    """The first examples of the draw, whatever the model says; no fewer than were chosen before."""
    entry, examples, notes, earlier = candidates
    limit = len(examples) if entry.limit is None else max(entry.limit, len(earlier.chosen) if earlier else 0)
    return Selection(
        model=model,
        data=entry.label,
        total=len(examples),
        checked=None,
        right=None,
        chosen=tuple(sampled.id for sampled in examples[:limit]),
        failed={},
        notes=notes,
    )


def select(model: str, lm: LanguageModel, candidates: Candidates) -> Iterator[Selection]:
    """Asks the model in the order of the draw, until as many of its answers are right as are wanted.

    Goes on where an earlier selection stopped; yields what is known so far from time to time, and at the end.
    """
    entry, examples = candidates.entry, candidates.examples
    begun = candidates.selection or replace(select_all(model, candidates), chosen=())
    chosen, failed, checked = [*begun.chosen], dict(begun.failed), begun.checked or 0
    reported = time.monotonic()

    def so_far() -> Selection:
        return replace(
            begun,
            total=len(examples),
            checked=checked,
            right=len(chosen),
            chosen=tuple(chosen),
            failed=failed,
            notes=candidates.notes,
        )

    for sampled in examples[checked:]:
        if entry.limit is not None and len(chosen) >= entry.limit:
            break
        try:
            chosen += [sampled.id] if answers_right(lm, sampled.item) else []
        except Exception as error:  # a prompt that cannot be asked is counted, and the others go on
            texts = [str(sampled.item.prompt), sampled.item.gold or ""]
            failed[sampled.id] = without_text(f"{type(error).__name__}: {error}", texts)
        checked += 1
        if time.monotonic() - reported >= EVERY_SECONDS:
            yield so_far()
            reported = time.monotonic()
    yield so_far()


def answers_right(lm: LanguageModel, item: Item) -> bool:
    """Whether every token of the answer is the one that the model says, given the prompt and the tokens before it.

    Where the example names the prompt without what decides the answer, the model must say something else to that one.
    """
    if item.gold is None:
        raise ParameterError("The example has no answer; expected one, to be compared with what the model says.")
    return _says(lm, item.prompt, item.gold) and (item.without is None or not _says(lm, item.without, item.gold))


def _says(lm: LanguageModel, prompt: Prompt, answer: str) -> bool:
    from noiser.engine import Clean, CleanStats, LocalEngine
    from noiser.model.query import build_query

    stats: CleanStats = LocalEngine(lm).ask(build_query(lm, prompt, target=answer), Clean())
    return all(rank == 1 for rank in stats.ranks)


def block_of(examples: Mapping[str, Sampled], chosen: Sequence[str], block: int, size: int) -> tuple[Sampled, ...]:
    """The examples, given by id, of a block of the sample, each with its place in it."""
    start = block * size
    return tuple(
        examples[identity]._replace(item=replace(examples[identity].item, index=index))
        for index, identity in enumerate(chosen[start : start + size], start)
    )
