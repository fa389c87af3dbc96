"""A call that stops wherever it asks for something, and goes on when it is told: a thread as a coroutine.

Methods are ordinary functions, which know nothing of each other. Run as strands, several of them can ask, wait, and be
answered together. Only one thread moves at any time, its starter or one strand, so that nothing is ever shared
between two that run.
"""

from __future__ import annotations

import contextvars
import ctypes
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Ask", "Stopped", "Strand"]

Found = TypeVar("Found")

Ask = Callable[[Any], Any]
"""From a request to its answer; raises the error that came instead."""


class Stopped(BaseException):
    """What a strand's call is left with when it is stopped; no error, so that nothing takes it for one."""


class Strand(Generic[Found]):
    """A call in a thread of its own, which moves only within `advance`.

    Args:
        call: given a function to ask with.

    Attributes:
        request: what it asks for and waits for; None before it begins and when it is done.
        done: whether it has returned or raised.
        error: what it raised.
    """

    def __init__(self, call: Callable[[Ask], Found]) -> None:
        self.request: Any = None
        self.done = False
        self.error: BaseException | None = None
        self._call = call
        self._found: list[Found] = []
        self._answer: Any = None
        self._failure: BaseException | None = None
        self._go, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="noiser-strand", daemon=True)

    @property
    def found(self) -> Found:
        """What the call has returned."""
        return self._found[0]

    def advance(self, answer: Any = None, failure: BaseException | None = None) -> None:
        """Lets it move until it asks for something or is done.

        Args:
            answer: to its request.
            failure: raised where it waits, instead of an answer.
        """
        self._answer, self._failure, self.request = answer, failure, None
        self._set_off()
        self._rest.acquire()

    def stop(self) -> None:
        """Ends it: its call is left with `Stopped`, where it waits or, if it was interrupted, where it is."""
        if not self._thread.ident:
            self.done = True
        elif not self.done and self.request is None:  # its starter was interrupted while it moved
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), ctypes.py_object(Stopped))
            self._await_rest()
        while not self.done:
            self._failure, self.request = Stopped(), None
            self._set_off()
            self._await_rest()

    def _set_off(self) -> None:
        if self._thread.ident:
            self._go.release()
        else:
            self._thread.start()

    def _await_rest(self) -> None:
        while not self._rest.acquire(timeout=0.1):
            if not self._thread.is_alive():
                self.done = True
                return

    def _run(self) -> None:
        try:
            self._found.append(self._call(self._ask))
        except BaseException as error:  # it is the starter's to raise
            self.error = error
        finally:
            self.done = True
            self._rest.release()

    def _ask(self, request: Any) -> Any:
        self.request = request
        self._rest.release()
        self._go.acquire()
        answer, failure = self._answer, self._failure
        self._answer = self._failure = None
        if failure is not None:
            raise failure
        return answer
