"""Several prompts at once: their packed passes are merged, so that the processor is busy where each has little to do.

A search spends most of its passes on one unit's noise samples, some fifty tokens, where reading the model's
weights costs more than computing with them. Each prompt's work is a strand of its own that stops where it needs a
packed pass. When all wait, the passes of as many as fit are run as one. The model runs in the caller's thread alone:
an interrupt ends the pass, and the strands, as it would end a loop over the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from noiser.engine.engine import LOGIT_BYTES, Progress
from noiser.engine.strand import Ask, Strand
from noiser.model.language_model import LanguageModel
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branches, Packed, packed_logits

__all__ = ["Outcome", "Shares", "Task", "together"]

Found = TypeVar("Found")
Task = Callable[[LanguageModel], Found]
"""Work on one prompt, with the model that it is to use."""

MOST_PROMPTS = 64
"""The most prompts that are at work at a time: each has a thread, a cache and its clean distributions."""

CACHED = 4
"""The cached tokens of all prompts at work, in the tokens of a pass."""


class Outcome(NamedTuple):
    """What came of a task: its number, and what it returned or raised."""

    number: int
    found: Any
    error: Exception | None


class _Shared(LanguageModel):
    """The model as one strand sees it: what it runs is asked for."""

    shares_passes = True

    def __init__(self, lm: LanguageModel, ask: Ask) -> None:
        self.__dict__ |= lm.__dict__
        self._ask = ask

    def packed(self, branches: Branches) -> Packed:
        """Asks for the logits; they come from a pass that others share."""
        return self._ask(branches)

    def in_turn(self, call: Callable[[], Found]) -> Found:
        """Asks for the call to be made in the thread that runs the model."""
        return self._ask(call)


def together(
    lm: LanguageModel,
    tasks: Sequence[Task[Found]],
    *,
    moved: Callable[[], None] = lambda: None,
    side_by_side: bool = True,
) -> Generator[Outcome]:
    """Does tasks side by side, their packed passes merged; one after the other if the model cannot pack.

    What a task finds does not depend on the others: only its passes are shared, and those compute each sequence by
    itself.

    Args:
        lm: the model.
        tasks: each is given the model to use.
        moved: called, by the caller's thread, whenever one of those side by side has got further; what it raises ends
            everything.
        side_by_side: False: one after the other in any case.

    Yields:
        What came of each task once it is done; not in their order. Close the generator to end what is at work.
    """
    if not (side_by_side and lm.packs):
        yield from (_outcome(index, partial(task, lm)) for index, task in enumerate(tasks))
        return
    assert lm.embedding_scale, "measured once for all"
    lm.check_embeddings()
    crowd = _Crowd(lm, moved)
    coming = enumerate(tasks)
    try:
        while True:
            while crowd.has_room() and (new := next(coming, None)):
                prompt = _Prompt(*new, lm, moved)
                crowd.prompts.append(prompt)
                yield from crowd.move(prompt)
            if not crowd.prompts:
                return
            for prompt, answer in crowd.run():
                yield from crowd.move(prompt, answer)
    finally:
        for prompt in crowd.prompts:
            prompt.strand.stop()


class Shares:
    """How far several tasks are, as one: done and expected tasks, the parts of those at work counted.

    Args:
        count: of the tasks.
        progress: told so.
        at_once: tell whenever a task has got further; False where tasks move in threads of their own, and whoever runs
            them tells.
    """

    def __init__(self, count: int, progress: Progress | None, *, at_once: bool) -> None:
        self._shares = [0.0] * count
        self._progress, self._at_once = progress, at_once

    def of(self, index: int) -> Progress | None:
        """What a task tells its own progress to."""

        def told(done: float, expected: float) -> None:
            self._shares[index] = max(self._shares[index], min(1.0, done / expected if expected else 0.0))
            if self._at_once:
                self.tell()

        return told if self._progress else None

    def finish(self, index: int) -> None:
        """A task is done."""
        self._shares[index] = 1.0
        self.tell()

    def tell(self) -> None:
        """Tells how far all are."""
        if self._progress is not None:
            self._progress(sum(self._shares), len(self._shares))


class _Crowd:
    """The prompts at work."""

    def __init__(self, lm: LanguageModel, moved: Callable[[], None]) -> None:
        self.lm, self.moved = lm, moved
        self.prompts: list[_Prompt] = []

    def has_room(self) -> bool:
        """Whether one more prompt may be at work."""
        cached = sum(prompt.cached for prompt in self.prompts)
        return len(self.prompts) < MOST_PROMPTS and cached < CACHED * self.lm.batch_tokens

    def move(self, prompt: _Prompt, answer: Packed | Exception | None = None) -> Iterator[Outcome]:
        """Lets a prompt move on; what came of it, if it is done."""
        strand = prompt.strand
        prompt.advance(answer)
        self.moved()
        if strand.done:
            self.prompts.remove(prompt)
            if strand.error is not None and not isinstance(strand.error, Exception):
                raise strand.error
            yield Outcome(prompt.index, None if strand.error else strand.found, strand.error)

    def run(self) -> list[tuple[_Prompt, Packed | Exception]]:
        """One pass for as many prompts as fit into it: large ones first, so that small ones wait until many do."""
        most_rows = LOGIT_BYTES // (4 * self.lm.vocabulary_size)
        chosen: list[_Prompt] = []
        tokens = rows = 0
        for prompt in sorted(self.prompts, key=lambda prompt: (-prompt.branches.tokens, prompt.index)):
            more = (tokens + prompt.branches.tokens, rows + prompt.branches.rows)
            if not chosen or (more[0] <= self.lm.batch_tokens and more[1] <= most_rows):
                chosen.append(prompt)
                tokens, rows = more
        return list(zip(chosen, _run(self.lm, [prompt.branches for prompt in chosen]), strict=True))


class _Prompt:
    """A task at work."""

    def __init__(self, index: int, task: Task[Any], lm: LanguageModel, moved: Callable[[], None]) -> None:
        self.index, self.moved = index, moved
        self.strand: Strand[Any] = Strand(lambda ask: task(_Shared(lm, ask)))

    @property
    def branches(self) -> Branches:
        """What it waits for."""
        return self.strand.request

    @property
    def cached(self) -> int:
        """Tokens of its clean sequence that are cached, or about to be."""
        first = self.branches.groups[0].embeddings.shape[1] if self.branches.clean else 0
        return self.branches.prefix.length + first

    def advance(self, answer: Packed | Exception | None) -> None:
        """Moves on to its next packed pass, or its end; what it runs by itself on the way is run here."""
        found: Any = answer
        while True:
            failed = isinstance(found, Exception)
            self.strand.advance(None if failed else found, found if failed else None)
            call = self.strand.request
            if not callable(call):
                return
            self.moved()
            try:
                found = call()
            except Exception as error:  # the strand's to handle
                found = _light(error)


def _outcome(index: int, call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(index, call(), None)
    except Exception as error:
        return Outcome(index, None, error)


def _light(error: Exception) -> Exception:
    """An error; where memory ran out, without its traceback, which would hold what the pass had made until then."""
    return torch.OutOfMemoryError(str(error)) if is_out_of_memory(error) else error


def _run(lm: LanguageModel, packs: Sequence[Branches]) -> list[Packed | Exception]:
    """One pass for all, in halves when memory runs out; an error is for all that were in the pass."""
    try:
        with lm.running():
            return list(packed_logits(lm, packs))
    except Exception as error:
        if len(packs) == 1 or not is_out_of_memory(error):
            return [_light(error) for _ in packs]
    free_memory(lm.device)
    middle = len(packs) // 2
    return [*_run(lm, packs[:middle]), *_run(lm, packs[middle:])]
