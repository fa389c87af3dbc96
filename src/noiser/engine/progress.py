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

    def of(self, index: int) -> Progress | None:
        """The progress callback of one task."""

        def report(done: float, expected: float) -> None:
            self._set(index, max(self._shares[index], min(1.0, done / expected if expected else 0.0)))

        return report if self._progress else None

    def finish(self, index: int) -> None:
        """A task is done."""
        self._set(index, 1.0)

    def _set(self, index: int, share: float) -> None:
        self._shares[index] = share
        if self._progress is None:
            return
        try:
            self._progress(sum(self._shares), len(self._shares))
        except BaseException as error:
            self.error = error
            raise
