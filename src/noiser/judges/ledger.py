"""What a judge's answers cost, and a budget that they may not exceed."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from noiser.errors import ParameterError
from noiser.judges.protocol import Usage

__all__ = ["Bill", "Ledger", "Prices"]


class Prices(NamedTuple):
    """What a million tokens cost, in US dollars."""

    prompt: float
    completion: float

    def cost(self, usage: Usage) -> float:
        """Dollars."""
        return (usage.prompt_tokens * self.prompt + usage.completion_tokens * self.completion) / 1e6


class Bill(NamedTuple):
    """What was counted so far. Every distinct request counts once, however often and from where it is answered.

    Attributes:
        asked: requests that were sent and answered.
        stored: requests whose answers were found on disk, paid for by an earlier run.
        usage: tokens of `asked`.
        stored_usage: tokens of `stored`.
        cost: dollars for `asked`; None where prices are not known.
        stored_cost: dollars that `stored` once cost; None where prices are not known.
        uncounted: answers whose endpoint did not say how many tokens they took; counted at the most they can have
            taken.
    """

    asked: int = 0
    stored: int = 0
    usage: Usage = Usage()
    stored_usage: Usage = Usage()
    cost: float | None = None
    stored_cost: float | None = None
    uncounted: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.asked} asked, {self.stored} stored",
            f"{self.usage.prompt_tokens:,} tokens read, {self.usage.completion_tokens:,} written",
        ]
        if self.cost is not None:
            parts.append(f"${self.cost:.4f}")
        if self.uncounted:
            parts.append(f"{self.uncounted} without counts, taken at their limit")
        return "; ".join(parts)


@dataclass
class Ledger:
    """Counts what answers take and reserves what the next one may take at the most.

    The budget covers everything that is counted, stored answers included, so that it holds for a job and not for a
    process: one that is stopped and started again does not begin a new budget. Safe to use from many threads.

    Args:
        prices: dollars a million tokens, or None.
        budget_usd: the most that all answers may cost, in dollars.
        budget_tokens: the most tokens that all answers may take.

    Raises:
        ParameterError: a negative budget, or dollars without prices.
    """

    prices: Prices | None = None
    budget_usd: float | None = None
    budget_tokens: int | None = None
    _seen: dict[str, Usage] = field(default_factory=dict[str, Usage], init=False)
    _stored: set[str] = field(default_factory=set[str], init=False)
    _uncounted: set[str] = field(default_factory=set[str], init=False)
    _spent: Usage = field(default=Usage(), init=False)
    _reserved: dict[str, Usage] = field(default_factory=dict[str, Usage], init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition, init=False)

    def __post_init__(self) -> None:
        for name in ("budget_usd", "budget_tokens"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ParameterError(f"{name} is {value!r}; expected a number that is not negative, or None.")
        if self.prices is not None and min(self.prices) < 0:
            raise ParameterError(f"prices are {tuple(self.prices)}; expected dollars a million tokens, not negative.")
        if self.budget_usd is not None and self.prices is None:
            raise ParameterError(
                "budget_usd is given without prices; expected prices=(prompt, completion), in dollars a million "
                "tokens, from the provider's price list. Or use budget_tokens."
            )

    def reserve(self, key: str, most: Usage) -> bool:
        """Sets aside what a request may take; False when that could exceed the budget.

        Where only reservations of requests under way stand against it, waits until they are settled.
        """
        with self._changed:
            while not self._fits(most):
                if not self._reserved:
                    return False
                self._changed.wait()
            self._reserved[key] = most
            return True

    def settle(self, key: str, usage: Usage | None) -> None:
        """Counts the answer to a reserved request; usage None: the endpoint did not say, so its reservation counts."""
        with self._changed:
            most = self._reserved.pop(key)
            if usage is None:
                self._uncounted.add(key)
            self._count(key, usage or most)
            self._changed.notify_all()

    def release(self, key: str) -> None:
        """Gives a reservation back: there was no answer."""
        with self._changed:
            self._reserved.pop(key, None)
            self._changed.notify_all()

    def found(self, key: str, usage: Usage | None, most: Usage) -> None:
        """Counts an answer that an earlier run paid for, once; `most` where its usage is not known."""
        with self._changed:
            if key not in self._seen:
                self._stored.add(key)
                if usage is None:
                    self._uncounted.add(key)
                self._count(key, usage or most)

    @property
    def bill(self) -> Bill:
        """What was counted so far."""
        with self._changed:
            stored = _sum(self._seen[key] for key in self._stored)
            asked = _sum(usage for key, usage in self._seen.items() if key not in self._stored)
            return Bill(
                asked=len(self._seen) - len(self._stored),
                stored=len(self._stored),
                usage=asked,
                stored_usage=stored,
                cost=self.prices.cost(asked) if self.prices else None,
                stored_cost=self.prices.cost(stored) if self.prices else None,
                uncounted=len(self._uncounted),
            )

    def _count(self, key: str, usage: Usage) -> None:
        self._seen[key] = usage
        self._spent = self._spent.plus(usage)

    def _fits(self, more: Usage) -> bool:
        total = self._spent.plus(more)
        for reserved in self._reserved.values():
            total = total.plus(reserved)
        if self.budget_tokens is not None and total.total > self.budget_tokens:
            return False
        return self.budget_usd is None or self.prices is None or self.prices.cost(total) <= self.budget_usd


def _sum(usages: Iterable[Usage]) -> Usage:
    total = Usage()
    for usage in usages:
        total = total.plus(usage)
    return total
