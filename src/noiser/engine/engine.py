"""The queue: sequences of all coroutines wait in it, and a pass takes as many as fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from time import monotonic
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from noiser.engine.changes import Ask, Change
from noiser.engine.inside import Inside
from noiser.engine.query import Answer, Prefill, Query, Request, Spent, Steps
from noiser.errors import ModelError, OutOfTimeError, ParameterError, UnsupportedModelError
from noiser.model.language_model import LanguageModel, check_finite, check_model
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branch, Context
from noiser.model.runtime import own_defaults
from noiser.types import Progress

T = TypeVar("T")

AT_ONCE = 64
"""Coroutines that are open at the same time: each holds the keys and values of its prompt."""


@dataclass(eq=False)
class _Work(Generic[T]):
    """A coroutine; what it is sent next, or the error raised in it."""

    number: int
    steps: Steps[Any]
    request: Any = None
    answer: Any = None
    error: Exception | None = None
    left: int = 0


@dataclass(eq=False)
class _Item:
    """Samples `first` to `last` of one change, or a clean sequence, as sequences to be run from `start` to `stop`.

    A change of a question with a foil of several tokens is two items, of the target and of the foil, with one reading.
    """

    work: _Work[Any]
    context: Context
    start: int
    stop: int
    wanted: Sequence[int]
    tokens: Sequence[tuple[int, ...]]
    reading: _Reading | None = None
    run: int = 0
    first: int = 0
    last: int = 1


@dataclass(eq=False)
class _Reading:
    """A change, the targets that are read under it, its place in the answer, and the logits of each run so far."""

    change: Change
    targets: Sequence[int]
    index: int
    runs: list[list[Tensor]]

    @property
    def is_whole(self) -> bool:
        """Whether all samples of all runs are there."""
        return all(sum(map(len, parts)) == self.change.samples for parts in self.runs)

    def logits(self) -> Tensor:
        """[samples, tokens, vocab], the target's tokens before the foil's."""
        runs = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)


@dataclass(eq=False)
class Engine:
    """A model at work on many coroutines; `progress` hears of done and expected token-forwards before each pass.

    When `max_seconds` have gone by, an OutOfTimeError is raised wherever a coroutine awaits an answer. It can return
    what it has by then: sequences are then run in the order in which they were asked for.
    """

    lm: LanguageModel
    progress: Progress | None = None
    max_seconds: float | None = None
    _queue: deque[_Item] = field(default_factory=deque[_Item], init=False)
    _most_tokens: int | None = field(
        default=None, init=False
    )  # of a pass, after memory has run out
    _done: int = field(default=0, init=False)
    _deadline: float = field(default=math.inf, init=False)

    def run(self, works: Iterable[Steps[T]]) -> Generator[tuple[int, T | Exception]]:
        """The number and the result, or the error, of every coroutine, in the order in which they end.

        Coroutines are taken from `works` as others end, `AT_ONCE` are open at a time.
        """
        if self.max_seconds is not None:
            self._deadline = monotonic() + self.max_seconds
        coming, working, ready = enumerate(works), dict[int, _Work[T]](), list[_Work[Any]]()
        try:
            while True:
                new = [
                    _Work[T](number, steps)
                    for number, steps in islice(coming, AT_ONCE - len(working))
                ]
                working |= {work.number: work for work in new}
                if self.progress and not new:  # what is expected is known before it runs
                    waiting = sum(
                        (item.last - item.first) * (item.stop - item.start) for item in self._queue
                    )
                    self.progress(self._done, self._done + waiting)
                if not working:
                    return
                outcomes: list[tuple[int, T | Exception]] = []
                with own_defaults():
                    turn, ready = [*ready, *new] or self._pass(), []
                    for work in turn:
                        if outcome := self._advance(work):
                            outcomes.append((work.number, *outcome))
                        elif not work.left:  # it was answered at once
                            ready.append(work)
                for number, result in outcomes:
                    del working[number]
                    yield number, result
        finally:
            for work in working.values():
                work.steps.close()
            if not isinstance(works, Iterator):  # of a list also those that did not begin
                for _, steps in coming:
                    steps.close()

    def _advance(self, work: _Work[T]) -> tuple[T | Exception] | None:
        """Sends a coroutine its answer; its result or error if it ends, else its next sequences are in the queue."""
        try:
            request: Any = _next_request(work)
        except StopIteration as stop:
            return (stop.value,)
        except Exception as error:  # of one coroutine: the others go on
            return (error,)
        work.request = request
        items: list[_Item] = []
        try:
            if not isinstance(request, Request):
                raise ParameterError(
                    f"A method or metric awaited {request!r}; expected a request, such as noiser.engine.Ask."
                )
            if isinstance(request, Inside):  # the model answers at once
                before = request.query.spent.token_forwards
                with self._stopped_in_time():
                    work.answer = request.answer(self.lm)
                self._done += request.query.spent.token_forwards - before
            else:
                items = _items(self.lm, work)
        except Exception as error:
            work.error = error
            if is_out_of_memory(error):
                work.error = _too_large(self.lm, len(work.request.query.token_ids))
        work.left = len(items)
        if self.max_seconds is None:  # short sequences first, which fill passes better
            items.sort(key=lambda item: -item.start)
        self._queue.extend(items)
        return None

    def _out_of_time(self, found: Any = None) -> OutOfTimeError:
        return OutOfTimeError(
            f"max_seconds={self.max_seconds:g} went by before there was a result. Allow more time; or take larger "
            "units, such as unit='sentence', or the method 'occlusion', which returns the units that it reached.",
            found,
        )

    @contextmanager
    def _stopped_in_time(self) -> Generator[None]:
        """Within it every forward pass of the model checks the time: a request that looks inside makes many."""
        if self.max_seconds is None:
            yield
            return

        def check(*_: Any) -> None:
            if monotonic() >= self._deadline:
                raise self._out_of_time()

        handle = self.lm.model.register_forward_pre_hook(check)
        try:
            yield
        finally:
            handle.remove()

    def _give_up(self) -> list[_Work[Any]]:
        """All coroutines that wait, each with the part of its answer that is there; nothing of the queue is run."""
        works = list(dict.fromkeys(item.work for item in self._queue))
        self._queue.clear()
        for work in works:
            found = None
            if isinstance(work.request, Ask):
                found, spent = work.answer, work.request.query.spent
                spent.unfinished += sum(value is None for value in found)
                spent.max_seconds = self.max_seconds
            work.error = self._out_of_time(found)
            work.left = 0
        return works

    def _pass(self) -> list[_Work[Any]]:
        """Runs as many of the waiting sequences as fit; the coroutines whose answers are complete now."""
        if monotonic() >= self._deadline:
            return self._give_up()
        items, branches = self._fill(), list[Branch]()
        contexts = {
            context: i for i, context in enumerate(dict.fromkeys(item.context for item in items))
        }
        items.sort(key=lambda item: (contexts[item.context], -item.start))
        sizes = [(item.last - item.first) * (item.stop - item.start) for item in items]
        try:
            for item in items:
                context, start, stop = item.context, item.start, item.stop
                if item.reading:
                    change = item.reading.change
                    inputs = change.inputs(context, start, stop, slice(item.first, item.last))
                    hidden, record = change.positions if change.hidden else (), False
                else:
                    inputs, hidden, record = (
                        context.inputs[start:stop][None],
                        (),
                        context.packs,
                    )
                branches.append(
                    Branch(context, start, inputs, item.wanted, hidden, record, item.tokens)
                )
            logits = self.lm.run(branches)
        except Exception as error:  # of any kind: it ends the coroutines whose sequences these were
            if is_out_of_memory(error):
                free_memory()
                if sum(item.last - item.first for item in items) > 1:
                    self._most_tokens = max(1, sum(sizes) // 2)
                    self._queue.extendleft(reversed(items))
                    return []
                error = _too_large(self.lm, items[0].stop)
            works = [*dict.fromkeys(item.work for item in items)]
            self._queue = deque(item for item in self._queue if item.work not in works)
            for work in works:
                work.error = error
            return works
        self._done += sum(sizes)
        spent = Counter[Spent]()
        for item, size in zip(items, sizes, strict=True):
            if item.reading:
                spent[item.work.request.query.spent] += size
        for query, tokens in spent.items():
            query.add(tokens)
        return self._take(items, logits)

    def _fill(self) -> list[_Item]:
        """Takes sequences from the queue, in their order, up to the limits of a pass; at least one."""
        items: list[_Item] = []
        tokens, rows = self._most_tokens or self.lm.batch_tokens, self.lm.logit_rows
        while self._queue:
            item = self._queue[0]
            room = min(tokens // (item.stop - item.start), rows // max(1, len(item.wanted)))
            if room < 1 and items:
                break
            middle = min(item.last, item.first + max(1, room))
            items.append(replace(item, last=middle))
            tokens -= (middle - item.first) * (item.stop - item.start)
            rows -= (middle - item.first) * len(item.wanted)
            if middle == item.last:
                self._queue.popleft()
            else:
                item.first = middle
        return items

    def _take(self, items: Sequence[_Item], logits: Sequence[Tensor]) -> list[_Work[Any]]:
        """Stores what was run; the coroutines that have all of their answers now."""
        whole: dict[tuple[Any, ...], list[_Reading]] = {}
        for item, part in zip(items, logits, strict=True):
            if reading := item.reading:
                reading.runs[item.run].append(part)
                if reading.is_whole:
                    key = (item.work, reading.change.samples, *reading.targets)
                    whole.setdefault(key, []).append(reading)
            else:
                item.work.answer = part[0].to(
                    torch.float32, copy=True
                )  # a copy: other prompts' logits are let go
                item.work.left = 0
        for (work, *_), group in whole.items():
            rows = sum(part.shape[:2].numel() for parts in group[0].runs for part in parts)
            size = max(1, self.lm.logit_rows // 4 // rows)
            for first in range(0, len(group), size):
                self._read(work, group[first : first + size])
            work.left -= sum(len(reading.runs) for reading in group)
        return [work for work in dict.fromkeys(item.work for item in items) if not work.left]

    def _read(self, work: _Work[Any], readings: Sequence[_Reading]) -> None:
        """Reads changes of one request with the same targets and number of samples together."""
        targets, request = readings[0].targets, work.request
        try:
            logits = torch.stack([reading.logits() for reading in readings])
            check_finite(self.lm, logits.amax(-1, keepdim=True))
            ids, clean = request.query.ids, request.query.clean_of
            of_targets = zip(logits.split([len(ids[g]) for g in targets], 2), targets, strict=True)
            values = torch.stack(
                [request.read(part, clean[g], ids[g]) for part, g in of_targets], 1
            )
            for reading, value in zip(readings, values.cpu().double(), strict=True):
                work.answer[reading.index] = value
                for parts in reading.runs:
                    parts.clear()
        except Exception as error:  # of the reading: it ends this coroutine
            length = len(request.query.token_ids)
            work.error = _too_large(self.lm, length) if is_out_of_memory(error) else error


def _next_request(work: _Work[Any]) -> Request[Any]:
    """The next request, once the coroutine got its answer or error. StopIteration has the result."""
    answer, error = work.answer, work.error
    work.answer = work.error = None
    return work.steps.throw(error) if error else work.steps.send(answer)


def _items(lm: LanguageModel, work: _Work[Any]) -> list[_Item]:
    """The sequences that answer a coroutine's request; without any the answer is there."""
    if isinstance(work.request, Prefill):
        context, wanted, tokens = work.request.context, work.request.positions, work.request.tokens
        start = context.done if context.packs else 0
        return [_Item(work, context, start, len(context.inputs), wanted, tokens)]
    query, items = work.request.query, list[_Item]()
    nothing = torch.zeros(0, 1, dtype=torch.float64)  # the answer to a change without targets
    work.answer = [nothing] * len(work.request.changes)
    every = range(len(query.targets))
    for index, change in enumerate(work.request.changes):
        targets = every if change.targets is None else change.targets
        if not targets:
            continue
        packs = query.context.packs
        if (change.rows and not lm.takes_embeddings) or (change.hidden and not packs):
            raise UnsupportedModelError(
                f"Tokens can be taken out of {lm.identity.name} ({type(lm.model).__name__}), but not "
                f"{'changed' if change.rows else 'hidden'}. Take a method with baseline='delete', such as "
                "noiser.Occlusion(baseline='delete')."
            )
        runs = _runs(query, targets)
        reading = _Reading(change, targets, index, [[] for _ in runs])
        work.answer[index] = None
        for run, (context, rows, tokens) in enumerate(runs):
            first = change.positions[0]
            wanted = rows
            if change.hidden:
                first = max(first + 1, query.sources_stop)
            elif (
                not change.rows
            ):  # a token that is taken out is read where the last before it stands
                wanted = [row - bisect_right(change.positions, row) for row in rows]
            if -1 in wanted:
                raise ParameterError(
                    f"Deleting {len(change.positions)} tokens leaves none before a target to predict it from. Remove "
                    "units in another way, such as 'zero', or give the prompt as chat messages, whose template stays."
                )
            start = min(first, *wanted) if context.packs else 0
            place = context, start, max(wanted) + 1
            items.append(_Item(work, *place, wanted, tokens, reading, run, last=change.samples))
    return items


def _runs(
    query: Query, targets: Sequence[int]
) -> list[tuple[Context, list[int], list[tuple[int, ...]]]]:
    """The clean sequences that some targets, and the foil, are read in: rows and the ids that must be exact there."""
    rows = [row for target in targets for row in query.rows_of(target)]
    explained = [query.targets[target] for target in targets]
    tokens = [(token,) for target in explained for token in target.token_ids]
    if query.foil_runs and query.foil_context is not None:
        foils = [(token,) for token in query.foil_ids]
        return [(query.context, rows, tokens), (query.foil_context, list(query.foil_rows), foils)]
    if query.foil_ids:  # one token each, read at the same place
        tokens = [(tokens[0][0], query.foil_ids[0])] * 2
    return [(query.context, rows, tokens)]


def _too_large(lm: LanguageModel, tokens: int) -> ModelError:
    return ModelError(
        f"Not enough memory on {lm.device} to run one sequence of {tokens} tokens. Shorten the prompt, attribute fewer "
        "targets at once, or load the model in a smaller dtype."
    )


def run_one(
    lm: LanguageModel,
    steps: Steps[T],
    progress: Progress | None = None,
    max_seconds: float | None = None,
) -> T:
    """The result of one coroutine. Raises the error that it ends with."""
    with closing(steps):
        check_model(lm)
        with closing(Engine(lm, progress, max_seconds).run([steps])) as outcomes:
            ((_, outcome),) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def ask(lm: LanguageModel, request: Request[Answer]) -> Answer:
    """The answer to one request."""

    async def steps() -> Answer:
        return await request

    return run_one(lm, steps())
