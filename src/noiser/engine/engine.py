"""The queue: sequences of all generators wait in it, and a pass takes as many as fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from noiser.engine.changes import Change
from noiser.engine.inside import answer_inside
from noiser.engine.query import Prefill, Query, Request, Spent, Steps
from noiser.engine.scores import Read
from noiser.errors import ModelError, ParameterError, UnsupportedModelError
from noiser.model.language_model import LanguageModel, check_finite, check_model
from noiser.model.memory import LOGIT_BYTES, free_memory, is_out_of_memory
from noiser.model.packing import Branch
from noiser.types import Progress

T = TypeVar("T")

AT_ONCE = 64
"""Generators that are open at the same time: each holds the keys and values of its prompt."""


@dataclass(frozen=True, eq=False)
class Ask(Request):
    """The request to read numbers of a prediction under changes of the input.

    The answer is a list with one tensor for each change, [targets, ...], float64 on the CPU: the numbers that `read`
    makes of the logits at each target that the change names, from all samples of the change together.

    Attributes:
        query: the question that is asked.
        changes: of its input.
        read: from logits [samples, tokens, vocab] at a target's tokens, clean log-probabilities and token ids to
            numbers; see `noiser.engine.scores`.
    """

    query: Query
    changes: Sequence[Change]
    read: Read


@dataclass(eq=False)
class _Work(Generic[T]):
    """A generator, and the answer to its request as far as it has come."""

    number: int
    steps: Steps[T]
    request: Request | None = None
    found: list[Tensor] = field(default_factory=list[Tensor])
    parts: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    left: int = 0
    error: Exception | None = None


@dataclass(eq=False)
class _Item:
    """Samples `first` to `last` of one change, or a clean sequence (`change` None), as sequences to be run."""

    work: _Work[Any]
    index: int
    change: Change | None
    start: int
    stop: int
    wanted: list[int]
    first: int
    last: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def tokens(self) -> int:
        return (self.last - self.first) * self.length


class Engine:
    """One model at work on many generators.

    Args:
        lm: the model.
        progress: called with (done, expected) token-forwards after every pass; expected are those that wait.

    Raises:
        ParameterError: lm is no `LanguageModel`.
    """

    def __init__(self, lm: LanguageModel, progress: Progress | None = None) -> None:
        check_model(lm)
        self.lm, self.progress = lm, progress
        self._queue: deque[_Item] = deque()
        self._most_tokens, self._done = lm.batch_tokens, 0

    def run(self, works: Iterable[Steps[T]]) -> Iterator[tuple[int, T | Exception]]:
        """The number and the result, or the error, of every generator, in the order in which they end.

        Generators are taken from `works` as others end, `AT_ONCE` are open at a time.
        """
        coming, working = enumerate(works), dict[int, _Work[T]]()
        try:
            while True:
                for number, steps in islice(coming, max(0, AT_ONCE - len(working))):
                    work = working[number] = _Work(number, steps)
                    yield from self._ended(working, [work])
                if not self._queue:
                    return
                with own_defaults():
                    ready = self._pass()
                yield from self._ended(working, ready)
        finally:
            for work in working.values():
                work.steps.close()

    def _ended(self, working: dict[int, _Work[T]], ready: Iterable[_Work[T]]) -> Iterator[tuple[int, T | Exception]]:
        """The generators that end when those that have their answers go on."""
        for work in ready:
            with own_defaults():
                outcome = self._advance(work)
            if outcome:
                del working[work.number]
                yield work.number, outcome[0]

    def _advance(self, work: _Work[T]) -> tuple[T | Exception] | None:
        """Sends a generator its answer; its result or error if it ends, else its next sequences are in the queue."""
        answer: Any = work.found
        if isinstance(work.request, Prefill):
            answer = work.found[0]
        try:
            while True:
                if work.error:
                    raise work.error
                work.request = request = work.steps.send(answer if work.request else None)
                if not isinstance(request, Ask | Prefill):
                    answer, work.found = self._look_inside(request), []
                    continue
                items = self._items(work, request)
                count = 1 if isinstance(request, Prefill) else len(request.changes)
                answer = work.found = [torch.zeros(0, 1, dtype=torch.float64)] * count  # where no target is read
                work.parts, work.left = {}, len(items)
                if items:
                    self._queue.extend(sorted(items, key=lambda item: -item.start))
                    return None
        except StopIteration as stop:
            return (stop.value,)
        except Exception as error:  # of one generator: the others go on
            work.steps.close()
            return (error,)

    def _look_inside(self, request: Request) -> Any:
        """The answer to a request that the model answers at once, with what it ran counted as progress."""
        spent: Spent = request.query.spent  # pyright: ignore
        before = spent.token_forwards
        answer = answer_inside(self.lm, request)
        self._report(spent.token_forwards - before)
        return answer

    def _items(self, work: _Work[T], request: Ask | Prefill) -> list[_Item]:
        if isinstance(request, Prefill):
            context = request.context
            start = context.done if self.lm.packs else 0
            return [_Item(work, 0, None, start, len(context.inputs), list(request.positions), 0, 1)]
        query, changes = request.query, [(i, c) for i, c in enumerate(request.changes) if c.targets != ()]
        for _, change in changes:
            _check(self.lm, change)
        return [_Item(work, i, c, *_extent(query, c, self.lm.packs), 0, c.samples) for i, c in changes]

    # ---- one pass ---------------------------------------------------------------------------------------------------

    def _pass(self) -> list[_Work[Any]]:
        """Runs as many of the waiting sequences as fit; the generators whose answers are complete now."""
        items = self._fill()
        contexts = {id(_context(item)): i for i, item in reversed(list(enumerate(items)))}
        items.sort(key=lambda item: (contexts[id(_context(item))], -item.start))
        branches: list[Branch] = []
        try:
            for item in items:
                branches.append(_branch(self.lm, item))
            logits = self.lm.run(branches)
        except Exception as error:  # of any kind: it ends the generators whose sequences these were
            if is_out_of_memory(error):
                free_memory()
                if sum(item.last - item.first for item in items) > 1:
                    self._most_tokens = max(1, sum(item.tokens for item in items) // 2)
                    self._queue.extendleft(reversed(items))
                    return []
                error = ModelError(
                    f"Not enough memory on {self.lm.device} to run one sequence of {items[0].stop} tokens. Shorten the "
                    "prompt, attribute fewer targets at once, or load the model in a smaller dtype."
                )
            if len(branches) < len(items):  # a change's own rows failed: the other sequences wait for the next pass
                culprit = items.pop(len(branches))
                self._queue.extendleft(reversed(items))
                items = [culprit]
            return self._fail(items, error)
        self._count(items)
        return [item.work for item, part in zip(items, logits, strict=True) if self._take(item, part)]

    def _fill(self) -> list[_Item]:
        """Takes sequences from the queue, in their order, up to the limits of a pass; at least one."""
        items: list[_Item] = []
        tokens, rows = self._most_tokens, max(1, LOGIT_BYTES // (self.lm.vocabulary_size * 4))
        while self._queue:
            item = self._queue[0]
            room = min(tokens // item.length, rows // max(1, len(item.wanted)))
            if room < 1 and items:
                break
            middle = min(item.last, item.first + max(1, room))
            taken = replace(item, last=middle)
            items.append(taken)
            tokens, rows = tokens - taken.tokens, rows - len(taken.wanted) * (middle - item.first)
            if middle == item.last:
                self._queue.popleft()
            else:
                item.first = middle
        return items

    def _take(self, item: _Item, logits: Tensor) -> bool:
        """Stores what was run; whether the generator has all of its answer."""
        work, request = item.work, item.work.request
        if isinstance(request, Prefill):
            work.found[0] = logits[0].to(torch.float32, copy=True)  # a copy: the other prompts' logits are let go
            return True
        assert isinstance(request, Ask)
        assert item.change
        parts = work.parts.setdefault(item.index, [])
        parts.append(logits)
        if sum(map(len, parts)) < item.change.samples:
            return False
        del work.parts[item.index]
        try:
            work.found[item.index] = _read(request, item.change, parts[0] if len(parts) == 1 else torch.cat(parts))
        except Exception as error:  # of the reading: it ends this generator
            work.error = error
        work.left -= 1
        return not work.left

    def _fail(self, items: Sequence[_Item], error: Exception) -> list[_Work[Any]]:
        works = list({id(item.work): item.work for item in items}.values())
        self._queue = deque(item for item in self._queue if item.work not in works)
        for work in works:
            work.error = error
        return works

    def _count(self, items: Sequence[_Item]) -> None:
        tokens: dict[int, tuple[Query, int]] = {}
        for item in items:
            if isinstance(item.work.request, Ask):
                query = item.work.request.query
                tokens[id(query.spent)] = (query, tokens.get(id(query.spent), (query, 0))[1] + item.tokens)
        for query, count in tokens.values():
            query.spent.add(count)
        self._report(sum(item.tokens for item in items))

    def _report(self, tokens: int) -> None:
        self._done += tokens
        if self.progress:
            self.progress(self._done, self._done + sum(item.tokens for item in self._queue))


@contextmanager
def own_defaults() -> Generator[None]:
    """Within it new tensors are float32 on the CPU, whatever defaults the caller has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def run_all(lm: LanguageModel, works: Iterable[Steps[T]], progress: Progress | None = None) -> list[T]:
    """What generators return, in their order. Raises the first error that one of them ends with."""
    results: dict[int, T] = {}
    with closing(Engine(lm, progress).run(works)) as outcomes:  # pyright: ignore[reportArgumentType]
        for number, outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            results[number] = outcome
    return [results[number] for number in sorted(results)]


def run_one(lm: LanguageModel, steps: Steps[T], progress: Progress | None = None) -> T:
    """What one generator returns."""
    return run_all(lm, [steps], progress)[0]


def ask(lm: LanguageModel, request: Request) -> Any:
    """The answer to one request."""

    def steps() -> Steps[Any]:
        return (yield request)

    return run_one(lm, steps())


# ---- from changes to sequences --------------------------------------------------------------------------------------


def _targets(query: Query, change: Change) -> Sequence[int]:
    return range(len(query.target_spans)) if change.targets is None else change.targets


def _check(lm: LanguageModel, change: Change) -> None:
    """Raises UnsupportedModelError for a change that the model cannot have."""
    if change.rows and not lm.takes_embeddings:
        raise UnsupportedModelError(
            f"{lm.identity.name} reads text alone: tokens can be taken out of it, not changed. Take a method with "
            "baseline='delete', such as noiser.Occlusion(baseline='delete')."
        )
    if change.hidden and not lm.packs:
        raise UnsupportedModelError(
            f"Attention to single tokens cannot be taken away in {type(lm.model).__name__}. Remove them in another "
            "way: baseline='zero' or 'delete'."
        )


def _extent(query: Query, change: Change, packs: bool) -> tuple[int, int, list[int]]:
    """The first position of a changed sequence that must run, the one after the last, and those that are read."""
    rows = [row for target in _targets(query, change) for row in query.target_rows[target]]
    wanted = [change.index(row) for row in rows]
    if -1 in wanted:
        raise ParameterError(
            f"Deleting {len(change.positions)} tokens leaves none before a target; expected at least one, from which "
            "to predict it: this prompt has no token that stays, such as BOS or a chat template's. Remove units in "
            "another way, such as 'zero', or give the prompt as chat messages."
        )
    first = max(change.positions[0] + 1, query.sources_stop) if change.hidden else change.positions[0]
    return (min(first, *wanted) if packs else 0), max(wanted) + 1, wanted


def _context(item: _Item) -> Any:
    request: Any = item.work.request
    return request.context if isinstance(request, Prefill) else request.query.context


def _branch(lm: LanguageModel, item: _Item) -> Branch:
    """An item as sequences of embeddings."""
    context, change, start, stop, request = _context(item), item.change, item.start, item.stop, item.work.request
    if isinstance(request, Prefill):
        inputs = context.inputs[start:stop][None]
        return Branch(context, start, inputs, item.wanted, record=lm.packs, tokens=request.tokens)
    assert isinstance(request, Ask)
    assert change
    tokens = request.query.tokens_of(change.targets)
    if change.deletes:
        gone = set(change.positions)
        kept = list(islice((i for i in range(start, len(context.inputs)) if i not in gone), stop - start))
        return Branch(context, start, context.inputs[kept][None], item.wanted, tokens=tokens)
    inputs = context.inputs[start:stop].repeat(item.last - item.first, 1, 1)
    if change.rows:
        places = list(change.positions)
        rows = change.rows(context.inputs[places].float() / context.scale)[item.first : item.last]
        inside = [i - start for i in places if i < stop]
        inputs[:, inside] = (rows[:, : len(inside)] * context.scale).to(inputs.dtype)
    return Branch(context, start, inputs, item.wanted, change.positions if change.hidden else (), tokens=tokens)


def _read(request: Ask, change: Change, logits: Tensor) -> Tensor:
    """The numbers of each target, float64 on the CPU."""
    query, values, at = request.query, list[Tensor](), 0
    check_finite(logits.amax(-1, keepdim=True), query.dtype)
    for target in _targets(query, change):
        size = len(query.target_spans[target])
        values.append(request.read(logits[:, at : at + size], query.clean_of[target], query.ids[target]))
        at += size
    return torch.stack(values).double().cpu()
