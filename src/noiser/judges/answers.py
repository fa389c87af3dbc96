"""Answers that were paid for: stored on disk, counted, and kept within a budget."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from noiser.errors import CacheError, ParameterError
from noiser.files import write_text
from noiser.judges.protocol import Usage

FORMAT = 1
"""Raised whenever a stored answer would mean something else than before."""


class StoredAnswer(NamedTuple):
    """One reply of an endpoint.

    Attributes:
        reply: the text, unchanged.
        finish: why it ended, in the endpoint's words, such as "stop" or "length".
        model: the model that replied, as it names itself.
        usage: its tokens; None where the endpoint did not say.
    """

    reply: str
    finish: str
    model: str
    usage: Usage | None


def key_of(question: Mapping[str, Any]) -> str:
    """The name under which the answer to a question is stored: a hash of all of it."""
    text = json.dumps({"format": FORMAT, **question}, sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class AnswerStore:
    """A folder with one JSON file per answer, holding question and reply; readable without this package.

    Several processes may share it. A damaged file, or one of another question, counts as absent.
    """

    folder: Path

    def get(self, question: Mapping[str, Any]) -> StoredAnswer | None:
        """The stored answer to a question, or None."""
        try:
            entry = json.loads(self._path(question).read_text(encoding="utf-8"))
            if entry["format"] != FORMAT or key_of(entry["question"]) != key_of(question):
                return None
            counts = entry["usage"]
            usage = counts and Usage(int(counts["prompt_tokens"]), int(counts["completion_tokens"]))
            return StoredAnswer(str(entry["reply"]), str(entry["finish"]), str(entry["model"]), usage)
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def put(self, question: Mapping[str, Any], answer: StoredAnswer) -> None:
        """Stores an answer, whole or not at all. Raises CacheError when the folder cannot be written."""
        path = self._path(question)
        usage = answer.usage and answer.usage._asdict()
        entry = {"format": FORMAT, "question": question, **answer._asdict(), "usage": usage}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, json.dumps(entry, indent=1, ensure_ascii=True))
        except OSError as error:
            raise CacheError(
                f"The answer of a judge could not be stored in {self.folder}: {error}. Make room or choose another "
                "cache_dir; answers that are not stored are paid for again."
            ) from error

    def _path(self, question: Mapping[str, Any]) -> Path:
        key = key_of(question)
        return self.folder / key[:2] / f"{key}.json"


class Bill(NamedTuple):
    """What was counted so far. Every distinct request counts once, however often and from where it is answered.

    Attributes:
        asked: requests that were sent and answered.
        stored: requests whose answers were read from disk, paid for by an earlier run.
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


Entry = tuple[str, int, int]
"""What a question takes: its key, tokens read, tokens written; a later entry of the same key replaces it."""

Exchange = Callable[[Sequence[Entry], int], tuple[Sequence[Entry], int]]
"""Adds entries to a log that several ledgers share: given them and how much of the log is known, returns what was
added since by others, before these, and how much is known now."""


_NOTHING = Usage()


class Ledger:
    """Counts what answers take and reserves the most that the next one may take. Safe to use from many threads.

    The budget covers all that is counted: answers to new questions, stored ones, and what earlier runs of the same job
    spent. So it holds for a job that is started several times.

    Args:
        prices: dollars per million tokens, (prompt, completion), or None.
        budget_usd: the most that all answers may cost, in dollars.
        budget_tokens: the most tokens that all answers may take.
        spent: tokens that earlier runs spent, as `spent` gave them: (prompt, completion) by key of the question.

    Raises:
        ParameterError: a negative budget, or dollars without prices.
    """

    def __init__(
        self,
        prices: Sequence[float] | None = None,
        budget_usd: float | None = None,
        budget_tokens: int | None = None,
        spent: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        for name, budget in (("budget_usd", budget_usd), ("budget_tokens", budget_tokens)):
            if budget is not None and not budget >= 0:
                raise ParameterError(f"{name} is {budget!r}; expected a number that is not negative, or None.")
        if prices is not None and (len(prices) != 2 or not min(prices) >= 0):
            raise ParameterError(
                f"prices are {tuple(prices)}; expected (prompt, completion), dollars per million tokens, not negative."
            )
        if budget_usd is not None and prices is None:
            raise ParameterError(
                "budget_usd is given without prices; expected prices=(prompt, completion), in dollars per million "
                "tokens, from the provider's price list. Or use budget_tokens."
            )
        self.prices, self.budget_usd, self.budget_tokens = prices, budget_usd, budget_tokens
        self._earlier = {key: Usage(*map(int, counts)) for key, counts in (spent or {}).items()}
        self._stored: dict[str, Usage] = {}
        self._asked: dict[str, Usage] = {}
        self._reserved: dict[str, Usage] = {}
        self._uncounted: set[str] = set()
        self._total = Usage().plus(*self._earlier.values())
        self._exchange: Exchange | None = None
        self._others: dict[str, Usage] = {}
        self._total_of_others = Usage()
        self._known = 0
        self._changed = threading.Condition()

    def share(self, exchange: Exchange) -> None:
        """Makes the budget one with that of other ledgers which share a log; they all got the same `spent`."""
        self._exchange = exchange

    def reserve(self, key: str, most: Usage) -> bool:
        """Sets aside what a request may take; False when that could exceed the budget.

        Where only reservations of requests under way stand against it, waits until they are settled.
        """
        with self._changed:
            self._publish()
            while not self._fits(most):
                if not self._reserved:
                    return False
                self._changed.wait()
            self._publish(key, most)
            if not self._fits(most):  # other ledgers' reservations came first
                self._publish(key, Usage())
                return False
            self._reserved[key] = most
            return True

    def settle(self, key: str, usage: Usage | None) -> None:
        """Counts the answer to a reserved request, at its reservation where the endpoint gave no usage."""
        with self._changed:
            most = self._reserved.pop(key)
            self._count(self._asked, key, usage, most)
            self._publish(key, usage or most)
            self._changed.notify_all()

    def release(self, key: str) -> None:
        """Gives back a reservation, if there still is one: there was no answer."""
        with self._changed:
            if self._reserved.pop(key, None) is not None:
                self._publish(key, Usage())
            self._changed.notify_all()

    def count_stored(self, key: str, usage: Usage | None, most: Usage) -> None:
        """Counts an answer that an earlier run paid for, once; `most` where its usage is not known."""
        with self._changed:
            if key not in self._asked and key not in self._stored:
                self._count(self._stored, key, usage, most)
                if key not in self._earlier:
                    self._publish(key, usage or most)

    @property
    def bill(self) -> Bill:
        """What was counted so far, without what earlier runs spent on answers that were not used again."""
        with self._changed:
            asked, stored = (Usage().plus(*counted.values()) for counted in (self._asked, self._stored))
            return Bill(
                asked=len(self._asked),
                stored=len(self._stored),
                usage=asked,
                stored_usage=stored,
                cost=self._cost(asked) if self.prices else None,
                stored_cost=self._cost(stored) if self.prices else None,
                uncounted=len(self._uncounted),
            )

    @property
    def spent(self) -> dict[str, Usage]:
        """All tokens that count against the budget, by key of the question, for `spent` of the next run."""
        with self._changed:
            spent = self._earlier | self._stored
            return spent | {key: usage.plus(self._earlier.get(key, Usage())) for key, usage in self._asked.items()}

    def _count(self, counted: dict[str, Usage], key: str, usage: Usage | None, most: Usage) -> None:
        counted[key] = usage or most
        if usage is None:
            self._uncounted.add(key)
        if counted is self._asked or not (key in self._earlier or key in self._others):  # a stored answer: once
            self._total = self._total.plus(counted[key])

    def _publish(self, key: str | None = None, usage: Usage = _NOTHING) -> None:
        """Tells the other ledgers what a question takes, if there is one, and learns what theirs took until then."""
        if self._exchange is None:
            return
        entries = [(key, usage.prompt_tokens, usage.completion_tokens)] if key is not None else []
        news, self._known = self._exchange(entries, self._known)
        for other, *counts in news:
            if other in self._others or not (other in self._stored or other in self._asked):
                before, self._others[other] = self._others.get(other, _NOTHING), Usage(*counts)
                change = Usage(*(now - then for now, then in zip(counts, before, strict=True)))
                self._total_of_others = self._total_of_others.plus(change)

    def _fits(self, more: Usage) -> bool:
        total = self._total.plus(more, *self._reserved.values(), self._total_of_others)
        if self.budget_tokens is not None and total.total > self.budget_tokens:
            return False
        return self.budget_usd is None or self._cost(total) <= self.budget_usd

    def _cost(self, usage: Usage) -> float:
        assert self.prices is not None
        return (usage.prompt_tokens * self.prices[0] + usage.completion_tokens * self.prices[1]) / 1e6
