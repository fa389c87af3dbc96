"""How far one piece of work is, and several as one."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "SharedProgress"]

Progress = Callable[[float, float], None]
"""Called with the work done and the work expected, in token-forwards (or in prompts, where there are many)."""


class SharedProgress:
    """The progress of several tasks as one: done and expected tasks, the parts of those at work counted.

    Args:
        count: of the tasks.
        progress: called so; what it raises ends everything.

    Attributes:
        error: what `progress` raised.
    """

    def __init__(self, count: int, progress: Progress | None) -> None:
        self._shares = [0.0] * count
        self._progress = progress
        self.error: BaseException | None = None

    def of(self, index: int, first: float = 0.0, last: float = 1.0) -> Progress | None:
        """The progress callback of one task, or of the part of it from `first` to `last`."""

        def report(done: float, expected: float) -> None:
            share = first + (last - first) * min(1.0, done / expected if expected else 0.0)
            self._set(index, max(self._shares[index], share))

        return report if self._progress else None

    def finish(self, index: int) -> None:
        """A task is done."""
        self._set(index, 1.0)

    def reraise(self, error: Exception) -> None:
        """Raises an error that the callback raised; others are the task's own."""
        if error is self.error:
            raise error

    def _set(self, index: int, share: float) -> None:
        self._shares[index] = share
        if self._progress is None:
            return
        try:
            self._progress(sum(self._shares), len(self._shares))
        except BaseException as error:
            self.error = error
            raise
