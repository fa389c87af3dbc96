"""The queue: sequences of all generators wait in it, and a pass takes as many as fit."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from noiser.engine.changes import Change
from noiser.engine.inside import Inside
from noiser.engine.query import Prefill, Request, Spent, Steps
from noiser.errors import ModelError, ParameterError, UnsupportedModelError
from noiser.model.language_model import LanguageModel, check_finite, check_model
from noiser.model.packing import Branch, Context
from noiser.model.runtime import free_memory, is_out_of_memory, own_defaults
from noiser.types import Progress

T = TypeVar("T")

AT_ONCE = 64
"""Generators that are open at the same time: each holds the keys and values of its prompt."""


@dataclass(eq=False)
class _Work(Generic[T]):
    """A generator with those it waits for, the innermost last; what it is sent next, or the error raised in it."""

    number: int
    steps: list[Steps[Any]]
    request: Any = None
    answer: Any = None
    error: Exception | None = None
    left: int = 0


@dataclass(eq=False)
class _Item:
    """Samples `first` to `last` of one change, or a clean sequence, as sequences to be run from `start` to `stop`."""

    work: _Work[Any]
    context: Context
    start: int
    stop: int
    wanted: Sequence[int]
    tokens: Sequence[tuple[int, ...]]
    change: Change | None = None
    targets: Sequence[int] = ()
    index: int = 0
    first: int = 0
    last: int = 1
    parts: list[Tensor] = field(default_factory=list[Tensor])


@dataclass(eq=False)
class Engine:
    """A model at work on many generators; `progress` hears of done and expected token-forwards before each pass."""

    lm: LanguageModel
    progress: Progress | None = None
    _queue: deque[_Item] = field(default_factory=deque[_Item], init=False)
    _most_tokens: int | None = field(
        default=None, init=False
    )  # of a pass, after memory has run out
    _done: int = field(default=0, init=False)

    def run(self, works: Iterable[Steps[T]]) -> Iterator[tuple[int, T | Exception]]:
        """The number and the result, or the error, of every generator, in the order in which they end.

        Generators are taken from `works` as others end, `AT_ONCE` are open at a time.
        """
        coming, working, ready = enumerate(works), dict[int, _Work[T]](), list[_Work[Any]]()
        try:
            while True:
                new = [
                    _Work[T](number, [steps])
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
            for steps in (steps for work in working.values() for steps in reversed(work.steps)):
                steps.close()

    def _advance(self, work: _Work[T]) -> tuple[T | Exception] | None:
        """Sends a generator its answer; its result or error if it ends, else its next sequences are in the queue."""
        try:
            work.request = request = _next_request(work)
        except StopIteration as stop:
            return (stop.value,)
        except Exception as error:  # of one generator: the others go on
            return (error,)
        items: list[_Item] = []
        try:
            if isinstance(request, Inside):  # the model answers at once
                before = request.query.spent.token_forwards
                work.answer = work.request.answer(self.lm)
                self._done += request.query.spent.token_forwards - before
            else:
                items = _items(self.lm, work)
        except Exception as error:
            work.error = (
                _too_large(self.lm, len(request.query.token_ids))
                if is_out_of_memory(error)
                else error
            )
        work.left = len(items)
        self._queue.extend(sorted(items, key=lambda item: -item.start))
        return None

    def _pass(self) -> list[_Work[Any]]:
        """Runs as many of the waiting sequences as fit; the generators whose answers are complete now."""
        items, branches = self._fill(), list[Branch]()
        contexts = {
            context: i for i, context in enumerate(dict.fromkeys(item.context for item in items))
        }
        items.sort(key=lambda item: (contexts[item.context], -item.start))
        sizes = [(item.last - item.first) * (item.stop - item.start) for item in items]
        try:
            for item in items:
                context, change, start, stop = item.context, item.change, item.start, item.stop
                if change:
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
        except Exception as error:  # of any kind: it ends the generators whose sequences these were
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
            if item.change:
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
        """Stores what was run; the generators that have all of their answers now."""
        whole: dict[tuple[Any, ...], list[_Item]] = {}
        for item, part in zip(items, logits, strict=True):
            if item.change:
                item.parts.append(part)
                if sum(map(len, item.parts)) == item.change.samples:
                    whole.setdefault((item.work, item.change.samples, *item.targets), []).append(
                        item
                    )
            else:
                item.work.answer = part[0].to(
                    torch.float32, copy=True
                )  # a copy: other prompts' logits are let go
                item.work.left = 0
        for group in whole.values():
            size = max(
                1, self.lm.logit_rows // 4 // sum(part.shape[:2].numel() for part in group[0].parts)
            )
            for first in range(0, len(group), size):
                self._read(group[first : first + size])
            group[0].work.left -= len(group)
        return [work for work in dict.fromkeys(item.work for item in items) if not work.left]

    def _read(self, items: Sequence[_Item]) -> None:
        """Reads changes of one request with the same targets and number of samples together."""
        work, targets, request = items[0].work, items[0].targets, items[0].work.request
        try:
            wholes = (
                item.parts[0] if len(item.parts) == 1 else torch.cat(item.parts) for item in items
            )
            logits = torch.stack([*wholes])
            check_finite(self.lm, logits.amax(-1, keepdim=True))
            ids, clean = request.query.ids, request.query.clean_of
            of_targets = zip(logits.split([len(ids[g]) for g in targets], 2), targets, strict=True)
            values = torch.stack(
                [request.read(part, clean[g], ids[g]) for part, g in of_targets], 1
            )
            for item, value in zip(items, values.cpu().double(), strict=True):
                work.answer[item.index] = value
                item.parts.clear()
        except Exception as error:  # of the reading: it ends this generator
            work.error = _too_large(self.lm, items[0].stop) if is_out_of_memory(error) else error


def _next_request(work: _Work[Any]) -> Any:
    """The next request, once the innermost generator got its answer or error. StopIteration has the last result."""
    answer, error = work.answer, work.error
    work.answer = work.error = None
    while True:
        try:
            request = work.steps[-1].throw(error) if error else work.steps[-1].send(answer)
        except Exception as raised:
            work.steps.pop()
            if not work.steps:
                raise
            answer, error = (
                (raised.value, None) if isinstance(raised, StopIteration) else (None, raised)
            )
        else:
            if not isinstance(request, Generator):
                return request
            work.steps.append(request)
            answer = error = None


def _items(lm: LanguageModel, work: _Work[Any]) -> list[_Item]:
    """The sequences that answer a generator's request; without any the answer is there."""
    if isinstance(work.request, Prefill):
        context, wanted, tokens = work.request.context, work.request.positions, work.request.tokens
        start = context.done if context.packs else 0
        return [_Item(work, context, start, len(context.inputs), wanted, tokens)]
    query, items = work.request.query, list[_Item]()
    work.answer = [torch.zeros(0, 1, dtype=torch.float64)] * len(work.request.changes)
    every, foil = range(len(query.targets)), () if query.foil_id is None else (query.foil_id,)
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
        positions, wanted = (
            change.positions,
            [row for target in targets for row in query.target_rows[target]],
        )
        first = positions[0]
        if change.hidden:
            first = max(first + 1, query.sources_stop)
        elif not change.rows:  # a token that is taken out is read where the last before it stands
            wanted = [row - bisect_right(positions, row) for row in wanted]
        if -1 in wanted:
            raise ParameterError(
                f"Deleting {len(positions)} tokens leaves none before a target to predict it from. Remove units in "
                "another way, such as 'zero', or give the prompt as chat messages, whose template stays."
            )
        place = (
            query.context,
            min(first, *wanted) if packs else 0,
            max(wanted) + 1,
            wanted,
        )
        explained = (query.targets[target] for target in targets)
        tokens = [
            (token, *foil) for target in explained for token in (target.token_id, *target.rest)
        ]
        items.append(_Item(work, *place, tokens, change, targets, index, last=change.samples))
    return items


def _too_large(lm: LanguageModel, tokens: int) -> ModelError:
    return ModelError(
        f"Not enough memory on {lm.device} to run one sequence of {tokens} tokens. Shorten the prompt, attribute fewer "
        "targets at once, or load the model in a smaller dtype."
    )


def run_one(lm: LanguageModel, steps: Steps[T], progress: Progress | None = None) -> T:
    """The result of one generator. Raises the error that it ends with."""
    check_model(lm)
    with closing(Engine(lm, progress).run([steps])) as outcomes:  # pyright: ignore[reportArgumentType]
        ((_, outcome),) = outcomes
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def ask(lm: LanguageModel, request: Request) -> Any:
    """The answer to one request."""

    def steps() -> Steps[Any]:
        return (yield request)

    return run_one(lm, steps())
