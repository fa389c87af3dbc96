"""One model for all visitors: their questions share its passes, and take turns where they cannot.

Every question has a thread and an engine of its own, with its own progress, limits and errors.
Their engines meet here: a pass that one of them wants takes along what others want that fits.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import ModuleList

from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.runtime import is_running

if TYPE_CHECKING:
    from noiser.model import LanguageModel
    from noiser.model.packing import Branch

PATIENCE = 0.2
"""The seconds that a pass waits for those who shared the last one: they often want the next."""

LEAD = 0.5
"""Who had so many seconds of the model more than another does not share the other's pass. A long
document would make each of the small passes of a short question long."""

TURN_ALONE = 0.5
"""The seconds after which writing lets others go first."""

_CHECK_EVERY = 0.05
"""The seconds between two checks of a question that waits."""

_of_thread = threading.local()
"""Its `check` raises Stopped where nobody waits any more for what the thread does."""

_numbers = count()


class Stopped(BaseException):
    """The visitor stopped the work, or went away. Not an Exception, so that no loop over prompts
    goes on after it.
    """


@contextmanager
def checked_by(check: Callable[[], object]) -> Generator[None]:
    """Within it, `check` is called before every pass of the thread and every layer in it."""
    before = getattr(_of_thread, "check", None)
    _of_thread.check = check
    try:
        yield
    finally:
        _of_thread.check = before


class Visitor:
    """A question at a model, until it is stopped."""

    def __init__(self, passes: Passes, is_stopped: Callable[[], bool]) -> None:
        self.passes = passes
        self.is_stopped = is_stopped
        self.seconds = 0.0  # of the model, by its clock
        self.thread: int | None = None  # the one that has the model for itself


@dataclass(eq=False)
class _Wish:
    """What a visitor wants next: the logits of branches; or, without any, the model for itself.

    It is called when it is its turn, with the group whose pass it runs; or when another one ran it.
    """

    visitor: Visitor
    start: float  # on the clock of the model
    branches: Sequence[Branch] = ()
    number: int = field(default_factory=lambda: next(_numbers))
    called: threading.Event = field(default_factory=threading.Event)
    group: Sequence[_Wish] = ()
    logits: list[Tensor] | None = None
    error: BaseException | None = None

    @property
    def tokens(self) -> int:
        """How many tokens run."""
        return sum(branch.inputs.shape[:2].numel() for branch in self.branches)

    @property
    def rows(self) -> int:
        """How many rows of logits are read."""
        return sum(len(branch.inputs) * len(branch.wanted) for branch in self.branches)

    def answer(self) -> list[Tensor]:
        """The logits. Raises the error that came instead."""
        if self.error is not None:
            raise self.error
        assert self.logits is not None
        return self.logits


class Passes:
    """The passes of a model, and the questions that want one.

    The next one is for the question that had the least of the model's time. A new question begins
    level with one that had an equal share of all questions at the model. So a long document holds a
    short question up by a pass at a time, slows short ones that follow each other down by its own
    share alone, and waits for nobody for ever. Only one thread runs the model.
    """

    def __init__(self, lm: LanguageModel) -> None:
        self.lm = lm
        self.most_tokens = lm.batch_tokens  # of a shared pass; fewer after memory ran out
        self._lock = threading.Lock()
        self._waiting: list[_Wish] = []
        self._is_taken = False
        self._clock = 0.0  # the seconds of the model that a visitor had with an equal share
        self._expected: set[Visitor] = set()
        self._patient_until = 0.0
        self._visitors = 0
        self._hooks = ExitStack()

    @contextmanager
    def visited(self, visitor: Visitor) -> Generator[None]:
        """Within it the visitor asks: passes of its threads, and layers in them, check for a
        stop.
        """
        with self._lock:
            if not self._visitors:
                self._add_checks()
            self._visitors += 1
        try:
            yield
        finally:
            with self._lock:
                self._visitors -= 1
                if not self._visitors:
                    self._hooks.close()
                self._expected.discard(visitor)
                self._call()

    def run(
        self,
        visitor: Visitor,
        branches: Sequence[Branch],
        run: Callable[[Sequence[Branch]], list[Tensor]],
    ) -> list[Tensor]:
        """The logits of branches by `run`, in a pass that may run those of other visitors, too."""
        if self._has_model(visitor):
            return run(branches)
        wish = self._wait(visitor, branches)
        if wish.group:
            with self._turn(wish.group):
                _run_group(self, wish.group, run)
        return wish.answer()

    @contextmanager
    def alone(self, visitor: Visitor) -> Generator[Callable[[], None]]:
        """Within it the visitor has the model for itself.

        Yields a function that lets others go first who wait, after a turn.
        """
        if self._has_model(visitor):
            yield lambda: None
            return
        turn = ExitStack()
        began = 0.0

        def begin() -> None:
            nonlocal began
            wish = self._wait(visitor)
            turn.enter_context(self._turn(wish.group))
            turn.callback(setattr, visitor, "thread", None)
            visitor.thread = threading.get_ident()
            began = time.monotonic()

        def let_others() -> None:
            if self._waiting and time.monotonic() - began >= TURN_ALONE:
                turn.close()
                begin()

        with turn:
            begin()
            yield let_others

    def _has_model(self, visitor: Visitor) -> bool:
        """Whether this thread has the model already; to wait for a turn then would wait forever."""
        return visitor.thread == threading.get_ident() or is_running(self.lm.model)

    def _wait(self, visitor: Visitor, branches: Sequence[Branch] = ()) -> _Wish:
        """The wish, when it was answered or its turn has come. Raises Stopped."""
        with self._lock:
            start = visitor.seconds
            if visitor not in self._expected:  # new, or it was away and may not catch up
                start = max(start, self._clock)
            wish = _Wish(visitor, start, branches)
            self._waiting.append(wish)
            self._expected.discard(visitor)
            self._call()
        try:
            while not wish.called.wait(_CHECK_EVERY):
                if visitor.is_stopped():
                    raise Stopped
                with self._lock:
                    self._call()  # nobody waits longer than `PATIENCE` for another
        except BaseException:
            self._withdraw(wish)
            raise
        return wish

    def _withdraw(self, wish: _Wish) -> None:
        with self._lock:
            if wish in self._waiting:
                self._waiting.remove(wish)
            if wish.group:  # it was called at the same moment
                self._waiting += [other for other in wish.group if other is not wish]
                self._is_taken = False
            self._call()

    def _call(self) -> None:
        """Calls the next one, and those who share the pass; where the model is free."""
        if self._is_taken or not self._waiting:
            return
        if self._expected and time.monotonic() < self._patient_until:
            return
        self._expected.clear()
        group = self._next_group()
        self._waiting = [wish for wish in self._waiting if wish not in group]
        self._is_taken = True
        first = group[0]
        first.group = group
        first.called.set()

    def _next_group(self) -> list[_Wish]:
        """The wish whose visitor had the least of the model, and others that fit in its pass."""
        first, *others = sorted(self._waiting, key=lambda wish: (wish.start, wish.number))
        group = [first]
        if not first.branches or not self.lm.needs_internals:
            return group
        tokens_left = min(self.most_tokens, self.lm.batch_tokens) - first.tokens
        rows_left = self.lm.logit_rows - first.rows
        for wish in others:
            fits = wish.tokens <= tokens_left and wish.rows <= rows_left
            if wish.branches and fits and wish.start <= first.start + LEAD:
                group.append(wish)
                tokens_left -= wish.tokens
                rows_left -= wish.rows
        return group

    @contextmanager
    def _turn(self, group: Sequence[_Wish]) -> Generator[None]:
        """The model is taken within it; each of the group had its share of the time."""
        began = time.monotonic()
        try:
            with checked_by(lambda: _check_all(group)):
                yield
        finally:
            now = time.monotonic()
            tokens = sum(wish.tokens for wish in group)
            for wish in group:
                share = wish.tokens / tokens if tokens else 1.0
                wish.visitor.seconds = wish.start + (now - began) * share
            with self._lock:
                self._clock += (now - began) / max(1, self._visitors)
                self._is_taken = False
                self._expected |= {wish.visitor for wish in group if wish.branches}
                self._patient_until = now + PATIENCE
                self._call()
            for wish in group:
                wish.called.set()

    def _add_checks(self) -> None:
        """Makes every pass and every layer check for a stop, until the last visitor leaves."""
        modules = [*self.lm.model.modules()]
        layers = [layer for each in modules if isinstance(each, ModuleList) for layer in each]
        for each in (self.lm.model, *layers):
            self._hooks.callback(each.register_forward_pre_hook(_check_thread).remove)


def _check_thread(*_: Any) -> None:
    """A forward hook of the model: raises Stopped where the thread's work was stopped."""
    check = getattr(_of_thread, "check", None)
    if check:
        check()


def _check_all(group: Sequence[_Wish]) -> None:
    """Raises Stopped where all who share a pass were stopped."""
    if all(wish.visitor.is_stopped() for wish in group):
        raise Stopped


def _run_group(
    passes: Passes, group: Sequence[_Wish], run: Callable[[Sequence[Branch]], list[Tensor]]
) -> None:
    """Answers the wishes of a group by one pass; where it fails, by a pass for each."""
    branches = [branch for wish in group for branch in wish.branches]
    try:
        logits = iter(run(branches))
    except Exception as error:
        if len(group) == 1:
            group[0].error = error
            return
        if is_out_of_memory(error):
            free_memory()
            passes.most_tokens = max(1, sum(wish.tokens for wish in group) // 2)
        for wish in group:  # the error is of one of them
            _run_group(passes, [wish], run)
    except BaseException as stop:
        for wish in group:
            wish.error = stop
        raise
    else:
        for wish in group:
            wish.logits = [next(logits) for _ in wish.branches]


class _SharedModel:
    """The part of a visitor's model that shares its passes with other visitors'."""

    visitor: Visitor

    def run(self, branches: Sequence[Branch], **options: Any) -> list[Tensor]:
        """The logits of branches; see `LanguageModel.run`."""
        lm: Any = super()
        visitor = self.visitor
        return visitor.passes.run(visitor, branches, lambda given: lm.run(given, **options))

    @property
    def abilities(self) -> Any:
        """Those of the model itself, which are found once."""
        return self.visitor.passes.lm.abilities

    def alone(self) -> Any:
        """See `LanguageModel.alone`."""
        return self.visitor.passes.alone(self.visitor)


def visitor_of(lm: LanguageModel) -> Visitor:
    """The visitor that a model of `model_of` is for."""
    shared: Any = lm
    return shared.visitor


@cache
def _shared_class(kind: type[Any]) -> type[Any]:
    return type(kind.__name__, (_SharedModel, kind), {})


def model_of(visitor: Visitor) -> LanguageModel:
    """The model for a visitor: the same weights and what is known about them, in its passes.

    What it remembers of prompts is its own.
    """
    own: Any = copy.copy(visitor.passes.lm)
    own.__class__ = _shared_class(type(own))
    own.visitor = visitor
    own.known = {}
    return own
