"""The queue: sequences of all coroutines wait in it, and a pass takes as many as fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from noiser.engine.gradients import pass_tokens
from noiser.engine.inputs import Sequences, inputs_of
from noiser.engine.inside import WhiteBoxRequest
from noiser.engine.objectives import ObjectiveFn, ReadTogether
from noiser.engine.perturbations import Perturbation, PictureChange, Predict
from noiser.engine.query import AnswerT, Cost, Prefill, Query, Request, Steps
from noiser.errors import (
    ModelError,
    OutOfTimeError,
    ParameterError,
    UnsupportedModelError,
)
from noiser.model.language_model import LanguageModel, check_model, not_finite
from noiser.model.memory import free_memory, is_out_of_memory, send, to_host
from noiser.model.packing import Branch, Context
from noiser.model.runtime import own_defaults
from noiser.model.scene import Handed, Scene
from noiser.tensors import booleans
from noiser.types import Progress

T = TypeVar("T")

AT_ONCE = 64
"""Coroutines that are open at the same time: each holds the keys and values of its prompt."""


@dataclass(eq=False)
class _Work(Generic[T]):
    """A coroutine, its request, and the answer or error that it gets next."""

    number: int
    steps: Steps[Any]
    request: Any = None
    answer: Any = None
    error: Exception | None = None
    left: int = 0  # parts of the answer that have yet to run


@dataclass(eq=False)
class _Item:
    """Equally long sequences: samples `first` to `last` of one change, or a clean sequence.

    They run from position `start` to `stop`. With a foil of several tokens a change is two items,
    one for the target and one for the foil, with one `_PendingChange`.
    """

    work: _Work[Any]
    context: Context
    start: int
    stop: int
    wanted: Sequence[int]  # positions whose logits are read
    tokens: Sequence[tuple[int, ...]]  # at each of them: ids whose probabilities must be exact
    pending: _PendingChange | None = None  # None for a clean sequence
    run: int = 0  # 0 for the target, 1 for a foil that runs by itself
    first: int = 0
    last: int = 1
    request: Any = field(init=False)  # of the coroutine

    def __post_init__(self) -> None:
        self.request = self.work.request

    @property
    def samples(self) -> int:
        """How many sequences the item has."""
        return self.last - self.first

    @property
    def length(self) -> int:
        """How many tokens of each of its sequences run."""
        return self.stop - self.start

    @property
    def size(self) -> int:
        """How many tokens run in all."""
        return self.samples * self.length


@dataclass(eq=False)
class _PendingChange:
    """A change, the targets that are read under it, and the logits that were collected so far.

    `runs` has a list for each sequence, the target's and a foil's of its own: the logits of its
    first samples, then of others.
    """

    work: _Work[Any]
    query: Query
    read: ObjectiveFn
    perturbation: Perturbation
    targets: Sequence[int]
    index: int  # its place in the answer
    runs: list[list[Tensor]]

    @property
    def is_whole(self) -> bool:
        """Whether all samples of all runs are there."""
        samples = self.perturbation.samples
        return all(sum(map(len, parts)) == samples for parts in self.runs)

    @property
    def sizes(self) -> list[int]:
        """How many tokens each of the targets has, with its foil's."""
        return [len(self.query.ids[target]) for target in self.targets]

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is equal in changes that can be read together.

        A `ReadTogether` is read for all prompts.
        """
        if isinstance(self.read, ReadTogether):
            return (self.read, self.perturbation.samples, *self.sizes)
        return (self.read, self.perturbation.samples, self.work, *self.targets)

    def logits(self) -> Tensor:
        """[samples, tokens, vocab], the target's tokens before the foil's."""
        runs = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self.runs]
        return runs[0] if len(runs) == 1 else torch.cat(runs, 1)

    def count_rows(self) -> int:
        """How many rows of logits are there."""
        return sum(part.shape[:2].numel() for parts in self.runs for part in parts)

    def free(self) -> None:
        """Lets go of the logits."""
        for parts in self.runs:
            parts.clear()


class _Running(NamedTuple):
    """A pass that has begun: its sequences, and their logits."""

    items: Sequence[_Item]
    logits: Sequence[Tensor]


class _Reading(NamedTuple):
    """What was read under some changes of one kind.

    Attributes:
        values: the answers, [changes, targets, ...].
        largest: of the logits at each token, [changes, samples and tokens].
    """

    pending_changes: Sequence[_PendingChange]
    values: Tensor
    largest: Tensor


@dataclass(eq=False)
class Engine:
    """A queue that answers the requests of many coroutines with passes of one model.

    `progress` is called before each pass with the token-forwards that are done and expected.

    When `max_seconds` have gone by, an OutOfTimeError is raised wherever a coroutine awaits an
    answer. It can return what it has by then: sequences are then run in the order of the requests.
    """

    lm: LanguageModel
    progress: Progress | None = None
    max_seconds: float | None = None
    _queue: deque[_Item] = field(default_factory=deque[_Item], init=False)
    # Coroutines whose requests look inside the model, and whether these share passes.
    _inside: deque[_Work[Any]] = field(default_factory=deque[_Work[Any]], init=False)
    _shares_inside: bool = field(default=True, init=False)
    # A pass whose logits have yet to be read.
    _running: _Running | None = field(default=None, init=False)
    # The limit of tokens in a pass after memory has run out.
    _most_tokens: int | None = field(default=None, init=False)
    _done: int = field(default=0, init=False)
    _deadline: float = field(default=math.inf, init=False)

    def run(self, works: Iterable[Steps[T]]) -> Generator[tuple[int, T | Exception]]:
        """The number and the result or error of every coroutine, in the order in which they end.

        Coroutines are taken from `works` as others end, `AT_ONCE` are open at a time.
        """
        if self.max_seconds is not None:
            self._deadline = monotonic() + self.max_seconds
        waiting = enumerate(works)
        opened: dict[int, _Work[T]] = {}
        ready: list[_Work[Any]] = []  # those that can go on without a pass
        try:
            while True:
                new: list[_Work[T]] = []
                for number, steps in islice(waiting, AT_ONCE - len(opened)):
                    work = _Work[T](number, steps)
                    opened[number] = work
                    new.append(work)
                if not new:  # new coroutines ask first, so that what is expected is known
                    self._show_progress()
                if not opened:
                    return
                outcomes: list[tuple[int, T | Exception]] = []
                with own_defaults():
                    turn = [*ready, *new]
                    if not turn:  # all that are open wait for the model
                        turn = self._pass() if self._queue or self._running else self._look_inside()
                    ready = []
                    with self._settled(turn):
                        for work in turn:
                            outcome = self._advance(work)
                            if outcome is not None:
                                outcomes.append((work.number, *outcome))
                            elif not work.left:  # it was answered at once
                                ready.append(work)
                for number, result in outcomes:
                    del opened[number]
                    yield number, result
        finally:
            self._running = None
            for work in opened.values():
                work.steps.close()
            # A coroutine that never begins warns. An iterator makes them as they are taken.
            if not isinstance(works, Iterator):
                for _, steps in waiting:
                    steps.close()

    @contextmanager
    def _settled(self, works: Sequence[_Work[Any]]) -> Generator[None]:
        """Within it the model is made ready once, and not for each prompt that is prepared."""
        preparing = [work for work in works if isinstance(work.request, Prefill | None)]
        if len(preparing) < 2 or not self.lm.needs_internals:
            yield
            return
        gradients = torch.is_grad_enabled()
        with self.lm.running(), torch.set_grad_enabled(gradients):
            yield

    def _show_progress(self) -> None:
        if self.progress:
            expected = self._done + sum(item.size for item in self._queue)
            self.progress(self._done, expected)

    def _advance(self, work: _Work[T]) -> tuple[T | Exception] | None:
        """Sends a coroutine its answer; returns its result or error if it ends.

        Else it has a next request: its sequences join the queue, or its answer is there at once.
        """
        try:
            request: Any = _next_request(work)
        except StopIteration as stop:
            return (stop.value,)
        except Exception as error:  # it ends one coroutine: the others go on
            return (error,)
        work.request = request
        items: list[_Item] = []
        try:
            if not isinstance(request, Request):
                raise ParameterError(
                    f"A method or metric awaited {request!r}; expected a request, such as "
                    "noiser.engine.Predict."
                )
            if isinstance(request, WhiteBoxRequest):
                if request.query.scene is not None:
                    raise refuse_other_methods("This method looks inside the model")
                self._inside.append(work)
                work.left = 1
                return None
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

    def _look_inside(self) -> list[_Work[Any]]:
        """Answers the first request that looks inside the model, and others that share its passes.

        Returns their coroutines, which can go on.
        """
        works = self._sharing()
        requests: list[WhiteBoxRequest[Any]] = [work.request for work in works]
        before = sum(request.query.spent.token_forwards for request in requests)
        try:
            with self.lm.alone(), self._stopped_in_time():
                answers = type(requests[0]).answer_all(self.lm, requests)
            for work, answer in zip(works, answers, strict=True):
                work.answer = answer
        except Exception as error:
            if len(works) > 1:  # the error is one coroutine's, so each is answered by itself
                self._inside.extendleft(reversed(works))
                self._shares_inside = False
                return []
            works[0].error = error
            if is_out_of_memory(error):
                works[0].error = _too_large(self.lm, len(requests[0].query.token_ids))
        for work in works:
            work.left = 0
        self._done += sum(request.query.spent.token_forwards for request in requests) - before
        return works

    def _sharing(self) -> list[_Work[Any]]:
        """Takes the first work that looks inside, and those that fit into the same pass."""
        works = [self._inside.popleft()]
        tokens_left = pass_tokens(self.lm)
        if not self._shares_inside:
            self._shares_inside = not self._inside
            return works
        for work in [works[0], *self._inside]:
            tokens = work.request.shared_tokens
            if tokens is None or work.request.kind != works[0].request.kind:
                break
            tokens_left -= tokens
            if tokens_left < 0:
                break
            if work is not works[0]:
                works.append(self._inside.popleft())
        return works

    def _out_of_time(self, partial_answer: Any = None) -> OutOfTimeError:
        return OutOfTimeError(
            f"max_seconds={self.max_seconds:g} went by before there was a result. Allow more time; "
            "or take larger units, such as unit='sentence', or the method 'occlusion', which "
            "returns the units that it reached.",
            partial_answer,
        )

    @contextmanager
    def _stopped_in_time(self) -> Generator[None]:
        """Within it every forward pass checks the time: a request that looks inside makes many."""
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
        """All coroutines that wait, each with what there is of its answer; empties the queue."""
        works = _works_of(self._queue)
        self._queue.clear()
        for work in works:
            if isinstance(work.request, Predict):
                work.request.query.spent.max_seconds = self.max_seconds
            _stop(work, self._out_of_time)
        return works

    def _take_part(self, items: Sequence[_Item], error: OutOfTimeError) -> list[_Work[Any]]:
        """Takes what a model ran before its limit: `error.found` has None for other sequences.

        The coroutines of these get the error. Returns the coroutines that can go on.
        """
        run: list[tuple[_Item, Tensor]] = []
        unrun: list[_Item] = []
        for item, logits in zip(items, error.found, strict=True):
            if logits is None:
                unrun.append(item)
            else:
                run.append((item, logits))
        ready = self._take([item for item, _ in run], [logits for _, logits in run])
        stopped = _works_of(unrun)
        self._queue = deque(item for item in self._queue if item.work not in stopped)
        for work in stopped:
            _stop(work, partial(OutOfTimeError, str(error)))
        return list(dict.fromkeys([*stopped, *ready]))

    def _pass(self) -> list[_Work[Any]]:
        """Runs as many of the waiting sequences as fit, and reads a pass.

        An accelerator gets the next pass before the last one is read, so that it never waits.

        Returns the coroutines that can go on: their answers are complete, or they have an error.
        """
        stopped: list[_Work[Any]] = []
        is_late = monotonic() >= self._deadline
        if self._running is None and not is_late:
            stopped += self._launch()
        running = self._running
        self._running = None
        if is_late:
            stopped += self._give_up()
        elif running is not None and self._queue and _runs_beside_the_host(self.lm):
            stopped += self._launch()
        if running is None:
            return stopped
        items: list[_Item] = []
        logits: list[Tensor] = []
        for item, part in zip(running.items, running.logits, strict=True):
            # A coroutine may have ended since, with an error of another pass.
            if item.request is item.work.request and item.work not in stopped:
                items.append(item)
                logits.append(part)
        return [*stopped, *self._take(items, logits)]

    def _launch(self) -> list[_Work[Any]]:
        """Begins a pass; returns the coroutines that can go on because it failed."""
        items = self._fill()
        _sort_by_context(items)
        try:
            handed = _hand_pictures(items)
            logits = self.lm.run(_branches_of(items, handed))
        except OutOfTimeError as error:
            return self._take_part(items, error)
        except Exception as error:  # of any kind: it ends the coroutines whose sequences these were
            return self._recover(items, error)
        self._count(items)
        self._running = _Running(items, logits)
        return []

    def _recover(self, items: Sequence[_Item], error: Exception) -> list[_Work[Any]]:
        """Halves the passes when memory has run out; else fails the coroutines of some items."""
        if is_out_of_memory(error):
            free_memory()
            if sum(item.samples for item in items) > 1:
                self._most_tokens = max(1, sum(item.size for item in items) // 2)
                self._queue.extendleft(reversed(items))
                return []
            error = _too_large(self.lm, items[0].stop)
        works = _works_of(items)
        self._queue = deque(item for item in self._queue if item.work not in works)
        for work in works:
            work.error = error
        return works

    def _count(self, items: Sequence[_Item]) -> None:
        """Adds a pass to what has been spent: to every query that took part in it, its tokens."""
        self._done += sum(item.size for item in items)
        tokens_of = Counter[Cost]()
        for item in items:
            if item.pending:  # clean sequences are not counted
                tokens_of[item.work.request.query.spent] += item.size
        for spent, tokens in tokens_of.items():
            spent.add(tokens)

    def _fill(self) -> list[_Item]:
        """Takes sequences from the queue, in their order, up to the limits of a pass; at least one.

        An item of many samples may be cut: its first samples run now, the others stay in the queue.
        """
        items: list[_Item] = []
        tokens_left = self._most_tokens or self.lm.batch_tokens
        rows_left = self.lm.logit_rows
        while self._queue:
            item = self._queue[0]
            rows_per_sample = len(item.wanted)
            room = min(tokens_left // item.length, rows_left // max(1, rows_per_sample))
            if room < 1 and items:
                break
            middle = min(item.last, item.first + max(1, room))
            if middle == item.last:
                part = self._queue.popleft()
            else:
                part = replace(item, last=middle)
                item.first = middle
            items.append(part)
            tokens_left -= part.size
            rows_left -= part.samples * rows_per_sample
        return items

    def _take(self, items: Sequence[_Item], logits: Sequence[Tensor]) -> list[_Work[Any]]:
        """Stores the logits of a pass; returns the coroutines whose answers are complete."""
        groups: dict[tuple[Any, ...], list[_PendingChange]] = {}
        for item, part in zip(items, logits, strict=True):
            pending = item.pending
            if pending is None:
                # A copy, so that the logits of other prompts in this pass can be freed.
                item.work.answer = part[0].to(torch.float32, copy=True)
                item.work.left = 0
                continue
            pending.runs[item.run].append(part)
            if pending.is_whole:
                groups.setdefault(pending.kind, []).append(pending)
        readings: list[_Reading] = []
        for pending_changes in groups.values():
            # Reading makes several copies of the logits, so a quarter of a pass at a time.
            size = max(1, self.lm.logit_rows // 4 // pending_changes[0].count_rows())
            for first in range(0, len(pending_changes), size):
                together = pending_changes[first : first + size]
                readings += self._read(together)
                for pending in together:
                    pending.free()
            for pending in pending_changes:
                pending.work.left -= len(pending.runs)
        self._store(readings)
        return [work for work in _works_of(items) if not work.left]

    def _read(self, pending_changes: Sequence[_PendingChange]) -> list[_Reading]:
        """Reads changes of one kind together."""
        try:
            return [_read_together(pending_changes)]
        except Exception as error:  # of the score, or of a lack of memory
            changes_of: dict[_Work[Any], list[_PendingChange]] = {}
            for pending in pending_changes:
                changes_of.setdefault(pending.work, []).append(pending)
            if len(changes_of) == 1:
                (work,) = changes_of
                if is_out_of_memory(error):
                    work.error = _too_large(self.lm, len(pending_changes[0].query.token_ids))
                else:
                    work.error = error
                return []
        # Each coroutine has its own error.
        return [reading for changes in changes_of.values() for reading in self._read(changes)]

    def _store(self, readings: Sequence[_Reading]) -> None:
        """Puts what was read into the answers: one copy to the host."""
        numbers = [reading.values for reading in readings]
        numbers += [reading.largest for reading in readings]
        on_host = to_host(numbers)
        values_of = on_host[: len(readings)]
        largest_of = on_host[len(readings) :]
        for reading, values, largest in zip(readings, values_of, largest_of, strict=True):
            is_finite = booleans(largest.isfinite().all(1))
            for pending, answer, is_sound in zip(
                reading.pending_changes, values, is_finite, strict=True
            ):
                if is_sound:
                    pending.work.answer[pending.index] = answer
                else:
                    pending.work.error = not_finite(self.lm)


def _read_together(pending_changes: Sequence[_PendingChange]) -> _Reading:
    """Reads changes of one kind."""
    first = pending_changes[0]
    logits = torch.stack([pending.logits() for pending in pending_changes])
    # NaN and infinite ones are found later: looking at a number waits for the device.
    largest = logits.amax(-1).flatten(1)
    values_of_targets: list[Tensor] = []
    for place, part in enumerate(torch.split(logits, first.sizes, 2)):
        if isinstance(first.read, ReadTogether):
            values = _values_of_prompts(first.read, pending_changes, place, part)
        else:
            target = first.targets[place]
            values = first.read(part, first.query.clean_of[target], first.query.ids[target])
        values_of_targets.append(values)
    return _Reading(pending_changes, torch.stack(values_of_targets, 1), largest)


def _values_of_prompts(
    read: ReadTogether, pending_changes: Sequence[_PendingChange], place: int, logits: Tensor
) -> Tensor:
    """The numbers of the `place`-th of the targets that are read under each change."""
    targets = [(pending.query, pending.targets[place]) for pending in pending_changes]
    number_of = {each: number for number, each in enumerate(dict.fromkeys(targets))}
    numbers = send(torch.tensor([number_of[each] for each in targets]), logits.device)
    ids = torch.stack([query.ids[target] for query, target in number_of])
    known = None
    if read.known is not None:
        clean = torch.stack([query.clean_of[target] for query, target in number_of])
        known = read.known(clean, ids, *read.options).index_select(0, numbers)
    of_changes = ids.index_select(0, numbers)[:, None]
    return read.of(logits, of_changes.expand(logits.shape[:-1]), known)


def _runs_beside_the_host(lm: LanguageModel) -> bool:
    """Whether a pass runs while the host goes on, as on an accelerator."""
    return lm.device.type != "cpu"


def _stop(work: _Work[Any], error_of: Callable[[Any], OutOfTimeError]) -> None:
    """Ends a coroutine's wait with an error that has what there is of its answer."""
    partial_answer = None
    if isinstance(work.request, Predict):
        partial_answer = work.answer
        work.request.query.spent.unfinished += sum(value is None for value in partial_answer)
    work.error = error_of(partial_answer)
    work.left = 0


def _works_of(items: Iterable[_Item]) -> list[_Work[Any]]:
    """The coroutines whose sequences these are, each once."""
    return list(dict.fromkeys(item.work for item in items))


def _sort_by_context(items: list[_Item]) -> None:
    """Puts sequences of one prompt side by side, short ones first: they then attend together."""
    number_of: dict[Context, int] = {}
    for item in items:
        number_of.setdefault(item.context, len(number_of))
    items.sort(key=lambda item: (number_of[item.context], -item.start))


def _hand_pictures(items: Sequence[_Item]) -> dict[PictureChange, Handed]:
    """What the text model gets for the changed pictures of a pass.

    The vision tower reads the pictures of several changes at once. What it hands on is large, and
    is kept for this pass alone.
    """
    changes_of: dict[Scene, dict[PictureChange, None]] = {}
    for item in items:
        change = None if item.pending is None else item.pending.perturbation.pictures
        if change is not None and change.changes_pixels:
            changes_of.setdefault(change.scene, {})[change] = None
    handed: dict[PictureChange, Handed] = {}
    for scene, changes in changes_of.items():
        removal = next(iter(changes)).removal
        without = scene.without([change.regions for change in changes], removal)
        handed.update(zip(changes, without, strict=True))
    return handed


def _branches_of(items: Sequence[_Item], handed: Mapping[PictureChange, Handed]) -> list[Branch]:
    """The sequences of a pass, as the model runs them."""
    asked = [_sequences_of(item, handed) for item in items]
    branches: list[Branch] = []
    for item, each, inputs in zip(items, asked, inputs_of(asked), strict=True):
        context = item.context
        if item.pending is None:
            hidden: tuple[int, ...] = ()
            record = context.supports_packing
            layout = None if context.layout is None else context.layout.grown(item.stop)
        else:
            perturbation = item.pending.perturbation
            hidden = perturbation.positions if perturbation.hidden else ()
            record = False
            layout = perturbation.layout(each.context, item.stop)
        branches.append(
            Branch(context, item.start, inputs, item.wanted, hidden, record, item.tokens, layout)
        )
    return branches


def _sequences_of(item: _Item, handed: Mapping[PictureChange, Handed]) -> Sequences:
    """What an item asks of `inputs_of`: a change of pictures changes the clean rows first."""
    if item.pending is None:
        return Sequences(item.context, item.start, item.stop)
    perturbation = item.pending.perturbation
    context = item.context
    if perturbation.pictures is not None:
        context = perturbation.pictures.applied(context, handed.get(perturbation.pictures))
    return Sequences(context, item.start, item.stop, perturbation, item.first, item.last)


def _next_request(work: _Work[Any]) -> Request[Any]:
    """Sends a coroutine its answer or error; the next request. StopIteration has the result."""
    answer = work.answer
    error = work.error
    work.answer = None
    work.error = None
    if error:
        return work.steps.throw(error)
    return work.steps.send(answer)


def _items(lm: LanguageModel, work: _Work[Any]) -> list[_Item]:
    """The sequences that answer a coroutine's request; where there are none the answer is set."""
    request = work.request
    if isinstance(request, Prefill):
        context = request.context
        start = context.done if context.supports_packing else 0
        stop = len(context.inputs)
        return [_Item(work, context, start, stop, request.positions, request.tokens)]
    query: Query = request.query
    no_values = torch.zeros(0, 1, dtype=torch.float64)  # the answer to a change without targets
    work.answer = [no_values] * len(request.perturbations)
    items: list[_Item] = []
    for index, perturbation in enumerate(request.perturbations):
        targets = (
            range(len(query.targets)) if perturbation.targets is None else perturbation.targets
        )
        if targets:
            _check_change(lm, query, perturbation)
            work.answer[index] = None
            items += _items_of_change(work, query, perturbation, targets, index)
    return items


def _check_change(lm: LanguageModel, query: Query, perturbation: Perturbation) -> None:
    """Raises UnsupportedModelError where the model cannot be run with such a change."""
    if query.scene is not None and perturbation.pictures is None and not perturbation.hidden:
        of_pictures = query.scene.pictures.all_tokens
        if not of_pictures.isdisjoint(perturbation.positions):
            raise refuse_other_methods("This method changes the tokens of pictures")
    cannot_change = perturbation.rows and not lm.accepts_embeddings
    cannot_hide = perturbation.hidden and not query.context.supports_packing
    if cannot_change or cannot_hide:
        raise UnsupportedModelError(
            f"Tokens can be taken out of {lm.identity.name} ({type(lm.model).__name__}), but not "
            f"{'changed' if perturbation.rows else 'hidden'}. Take a method with "
            f"removal='delete', such "
            "as noiser.Occlusion(removal='delete')."
        )


def refuse_other_methods(why: str) -> UnsupportedModelError:
    """The error of methods that do not remove units from a prompt with pictures."""
    return UnsupportedModelError(
        f"{why}, and the prompt has pictures. Take a method that removes units, such as 'joint' or "
        "'occlusion'."
    )


def _items_of_change(
    work: _Work[Any], query: Query, perturbation: Perturbation, targets: Sequence[int], index: int
) -> list[_Item]:
    """The sequences of one change: the target's, and those of a foil that runs by itself."""
    runs = _runs(query, targets)
    read = perturbation.read or work.request.read
    collected: list[list[Tensor]] = [[] for _ in runs]
    pending = _PendingChange(work, query, read, perturbation, targets, index, collected)
    items: list[_Item] = []
    for run, (context, positions, tokens) in enumerate(runs):
        wanted = _moved_up(perturbation, positions)
        start = 0
        if context.supports_packing:
            # From the first token on that the change makes different, or that is read.
            start = min(_first_changed(query, context, perturbation), *wanted)
            if context.layout is not None:
                start = context.layout.begin(start)  # earlier tokens of a block see it
        stop = max(wanted) + 1
        item = _Item(
            work, context, start, stop, wanted, tokens, pending, run, last=perturbation.samples
        )
        items.append(item)
    return items


def _first_changed(query: Query, context: Context, perturbation: Perturbation) -> int:
    """The first position that may differ under a change; the length of the context for none."""
    layout = context.layout
    first = len(context.inputs)
    if perturbation.positions:
        first = perturbation.positions[0]
        in_block = layout is not None and layout.in_block(first)
        if perturbation.hidden and not in_block:
            # The hidden token itself is as it was, and so is what stands in the sources after it.
            first = max(first + 1, query.sources_stop)
    if perturbation.pictures is not None:
        first = min(first, perturbation.pictures.positions[0])
    return first


def _moved_up(perturbation: Perturbation, positions: list[int]) -> list[int]:
    """Where the tokens at some positions stand under a change: a deletion moves them up.

    A token that is itself deleted is read where the last one before it stands.
    """
    if not perturbation.deletes:
        return positions
    moved: list[int] = []
    for position in positions:
        deleted_before = bisect_right(perturbation.positions, position)
        moved.append(position - deleted_before)
    if -1 in moved:
        raise ParameterError(
            f"Deleting {len(perturbation.positions)} tokens leaves none before a target to "
            "predict it from. Remove units in another way, such as 'zero', or give the prompt as "
            "chat messages, whose template stays."
        )
    return moved


def _runs(
    query: Query, targets: Sequence[int]
) -> list[tuple[Context, list[int], list[tuple[int, ...]]]]:
    """The clean sequences in which some targets, and the foil, are read.

    For each sequence: the positions that are read, and the ids whose probabilities must be exact
    there.
    """
    positions: list[int] = []
    tokens: list[tuple[int, ...]] = []
    for target in targets:
        positions += query.positions_read(target)
        tokens += [(token,) for token in query.targets[target].token_ids]
    if query.foil_runs and query.foil_context is not None:
        foil_tokens = [(token,) for token in query.foil_ids]
        return [
            (query.context, positions, tokens),
            (query.foil_context, list(query.foil_positions), foil_tokens),
        ]
    if query.foil_ids:  # one token each, read at the same place
        both = (tokens[0][0], query.foil_ids[0])
        tokens = [both, both]
    return [(query.context, positions, tokens)]


def _too_large(lm: LanguageModel, tokens: int) -> ModelError:
    return ModelError(
        f"Not enough memory on {lm.device} to run one sequence of {tokens} tokens. Shorten the "
        "prompt, attribute fewer targets at once, or load the model in a smaller dtype."
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


def ask(lm: LanguageModel, request: Request[AnswerT]) -> AnswerT:
    """The answer to one request."""

    async def steps() -> AnswerT:
        return await request

    return run_one(lm, steps())
