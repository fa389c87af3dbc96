"""Which examples: drawn by the plan's seed, and where asked for, those that the model gets right."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import PathLike

from noiser.bench.plan import DataEntry
from noiser.bench.records import Selection
from noiser.bench.redaction import without_text
from noiser.bench.tasks import Sampled, Wanted
from noiser.data import Example, load
from noiser.data.dataset import in_draw_order
from noiser.errors import ParameterError, UnknownNameError
from noiser.evaluation.examples import Item
from noiser.model import LanguageModel

__all__ = ["answers_right", "block_of", "draw", "is_enough", "select", "select_all"]

EVERY_SECONDS = 2.0
"""How often what is known of a choice is told, to be stored."""


def draw(
    entry: DataEntry, seed: int, data_dir: str | PathLike[str] | None
) -> tuple[tuple[Sampled, ...], tuple[str, ...]]:
    """All examples of an entry in the order of the draw, and notes on them.

    Raises:
        DataError: the data set's files are not there. UnknownNameError: no such category. ParameterError: no example
            is left, or the entry needs answers that the data set does not have.
    """
    if entry.prompts is not None:
        own = (
            Sampled(f"{entry.label}-{number}", "", Item(index=number, prompt=prompt))
            for number, prompt in enumerate(entry.prompts)
        )
        return tuple(own), ()
    assert entry.name is not None
    found = load(entry.name, data_dir, as_published=entry.as_published)
    for category in (*entry.category, *entry.without_category):
        if category not in found.categories:
            raise UnknownNameError(f"category of {entry.name}", category, found.categories)
    examples = [example for example in found if _wanted(entry, example.category)]
    if not examples:
        raise ParameterError(f"data, {entry.label!r}: no example is left; expected categories that leave some.")
    asked = [name for name, on in (("only_correct", entry.only_correct), ("explain", entry.explain == "answer")) if on]
    if asked and not all(example.target for example in examples):
        raise ParameterError(
            f"data, {entry.label!r}: {' and '.join(asked)} need answers, and examples of {entry.name} have none; "
            'expected explain = "continuation" without only_correct, or a data set with answers.'
        )
    return tuple(_sampled(entry, example) for example in in_draw_order(examples, seed)), found.notes


def _wanted(entry: DataEntry, category: str) -> bool:
    return (not entry.category or category in entry.category) and category not in entry.without_category


def _sampled(entry: DataEntry, example: Example) -> Sampled:
    item = Item(
        index=0,  # its place is known when it is chosen
        prompt=example.prompt,
        target=example.target if entry.explain == "answer" else None,
        gold=example.target,
        spans=example.spans or None,
    )
    return Sampled(example.id, example.category, item)


def is_enough(known: Selection | None, limit: int | None) -> bool:
    """Whether a stored selection of right answers serves a limit."""
    if known is None or known.checked is None:
        return False
    return known.checked == known.total or (limit is not None and len(known.chosen) >= limit)


def select_all(model: str, wanted: Wanted) -> Selection:
    """The first examples of the draw, whatever the model says; no fewer than were chosen before."""
    before = len(wanted.known.chosen) if wanted.known else 0
    limit = len(wanted.examples) if wanted.entry.limit is None else max(wanted.entry.limit, before)
    return Selection(
        model=model,
        data=wanted.entry.label,
        total=len(wanted.examples),
        checked=None,
        right=None,
        chosen=tuple(sampled.id for sampled in wanted.examples[:limit]),
        failed={},
        notes=wanted.notes,
    )


def select(model: str, lm: LanguageModel, wanted: Wanted) -> Iterator[Selection]:
    """Asks the model in the order of the draw, until it got as many right as are wanted.

    Args:
        model: its label.
        lm: the model.
        wanted: what to choose from; goes on where an earlier selection stopped.

    Yields:
        What is known so far, from time to time, and at the end.
    """
    known, limit = wanted.known, wanted.entry.limit
    chosen, failed = list(known.chosen if known else ()), dict(known.failed if known else {})
    checked = (known.checked or 0) if known else 0
    told = time.monotonic()

    def so_far() -> Selection:
        return Selection(
            model=model,
            data=wanted.entry.label,
            total=len(wanted.examples),
            checked=checked,
            right=len(chosen),
            chosen=tuple(chosen),
            failed=failed,
            notes=wanted.notes,
        )

    for sampled in wanted.examples[checked:]:
        if limit is not None and len(chosen) >= limit:
            break
        try:
            chosen += [sampled.id] if answers_right(lm, sampled.item) else []
        except Exception as error:  # a prompt that cannot be asked is counted, and the others go on
            texts = [str(sampled.item.prompt), sampled.item.gold or ""]
            failed[sampled.id] = without_text(f"{type(error).__name__}: {error}", texts)
        checked += 1
        if time.monotonic() - told >= EVERY_SECONDS:
            yield so_far()
            told = time.monotonic()
    yield so_far()


def answers_right(lm: LanguageModel, item: Item) -> bool:
    """Whether every token of the answer is the one that the model says, given the prompt and the tokens before it."""
    from noiser.engine import Clean, CleanStats, LocalEngine
    from noiser.model.query import build_query

    if item.gold is None:
        raise ParameterError("The example has no answer; expected one, to be compared with what the model says.")
    stats: CleanStats = LocalEngine(lm).ask(build_query(lm, item.prompt, target=item.gold), Clean())
    return all(rank == 1 for rank in stats.ranks)


def block_of(examples: Sequence[Sampled], chosen: Sequence[str], block: int, size: int) -> tuple[Sampled, ...]:
    """The examples of a block of the sample, each with its place in it."""
    by_id = {sampled.id: sampled for sampled in examples}
    return tuple(
        by_id[identity]._replace(item=replace(by_id[identity].item, index=index))
        for index, identity in list(enumerate(chosen))[block * size : (block + 1) * size]
    )
