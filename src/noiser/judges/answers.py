"""Answers that were paid for: stored on disk, counted, and kept within a budget."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple, get_args

from noiser.errors import CacheError, ParameterError
from noiser.files import parse_json, write_text
from noiser.judges.protocol import Usage

LONGEST_WAIT, POLL = 10.0, 0.2
"""Seconds that other ledgers' reservations are waited for while nothing changes, and between two looks at the log."""

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
            entry = parse_json(self._path(question).read_bytes())
            if entry["format"] != FORMAT or key_of(entry["question"]) != key_of(question):
                return None
            counts = entry["usage"]
            usage = counts and Usage(int(counts["prompt_tokens"]), int(counts["completion_tokens"]))
            return StoredAnswer(str(entry["reply"]), str(entry["finish"]), str(entry["model"]), usage)
        except (OSError, ValueError, KeyError, TypeError):
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


Kind = Literal["earlier", "paid", "read", "reserved"]
"""What is counted: what earlier runs took, an answer that was paid, a stored one that was read, what is set aside."""


class Entry(NamedTuple):
    """What a question takes; a later entry of the same question, ledger and kind replaces it.

    Attributes:
        question: its key.
        ledger: whose entry it is; empty for what earlier runs took.
        kind: see `Kind`.
        prompt_tokens, completion_tokens: the tokens read and written.
    """

    question: str
    ledger: str
    kind: Kind
    prompt_tokens: int
    completion_tokens: int

    @property
    def usage(self) -> Usage:
        """Its tokens."""
        return Usage(self.prompt_tokens, self.completion_tokens)


Exchange = Callable[[Sequence[Entry], int], tuple[Sequence[Entry], int]]
"""Adds entries to a log that several ledgers share: given them and how much of the log is known, returns what was
added since by others, before these, and how much is known now."""


class Spending:
    """What questions take. All payments count; a stored answer counts once, and not where somebody paid for it.

    Attributes:
        settled: the sum of what was paid or read.
        reserved: the sum of what is set aside.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.settled = self.reserved = Usage()
        self._by_question: dict[str, dict[tuple[str, Kind], Entry]] = {}
        self.add(*entries)

    def add(self, *entries: Entry) -> None:
        """Adds entries, or replaces those of the same question, ledger and kind."""
        for entry in entries:
            settled, reserved = self.of(entry.question)
            self._by_question.setdefault(entry.question, {})[entry.ledger, entry.kind] = entry
            settled_now, reserved_now = self.of(entry.question)
            self.settled = self.settled.plus(settled_now).minus(settled)
            self.reserved = self.reserved.plus(reserved_now).minus(reserved)

    def of(self, question: str) -> tuple[Usage, Usage]:
        """What was paid or read for a question, and what is set aside for it."""
        kinds = {kind: Usage() for kind in get_args(Kind)}
        for (_, kind), entry in self._by_question.get(question, {}).items():
            kinds[kind] = entry.usage if kind == "read" else kinds[kind].plus(entry.usage)
        paid = kinds["earlier"].plus(kinds["paid"])
        return paid if any(paid) else kinds["read"], kinds["reserved"]

    def get(self, question: str, ledger: str, kind: Kind) -> Usage | None:
        """The tokens of one entry, or None."""
        entry = self._by_question.get(question, {}).get((ledger, kind))
        return entry and entry.usage

    def by(self, ledger: str, kind: Kind) -> dict[str, Usage]:
        """The tokens of a ledger's entries of a kind, by question."""
        return {question: usage for question in self._by_question if (usage := self.get(question, ledger, kind))}

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_question)


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
        self.name = secrets.token_hex(8)
        self._spending = Spending(earlier_entries(spent or {}))
        self._uncounted: set[str] = set()
        self._exchange: Exchange | None = None
        self._known = 0
        self._changed = threading.Condition()

    def share(self, exchange: Exchange) -> None:
        """Makes the budget one with that of other ledgers which share a log; they all got the same `spent`."""
        self._exchange = exchange

    def reserve(self, key: str, most: Usage) -> bool:
        """Sets aside what a request may take; False when that could exceed the budget.

        Where only reservations of requests under way stand against it, waits until they are settled; for those of other
        ledgers, whose process may be gone, no longer than `LONGEST_WAIT` seconds without any change.
        """
        with self._changed:
            self._record()
            changed = monotonic()
            while not (self._fits(most) and self._reserve(key, most)):
                before = self._known
                if not self._fits(most, reserved=False) or monotonic() - changed > LONGEST_WAIT:
                    return False
                self._changed.wait(POLL)
                self._record()
                if self._known != before or any(map(any, self._spending.by(self.name, "reserved").values())):
                    changed = monotonic()
            return True

    def _reserve(self, key: str, most: Usage) -> bool:
        self._record(Entry(key, self.name, "reserved", *most))
        if self._fits(Usage()):
            return True
        self._record(Entry(key, self.name, "reserved", *Usage()))  # other ledgers' reservations came first
        return False

    def settle(self, key: str, usage: Usage | None) -> None:
        """Counts the answer to a reserved request, at its reservation where the endpoint gave no usage."""
        with self._changed:
            taken = usage or self._own(key, "reserved")
            if usage is None:
                self._uncounted.add(key)
            paid = self._own(key, "paid").plus(taken)
            self._record(Entry(key, self.name, "paid", *paid), Entry(key, self.name, "reserved", *Usage()))
            self._changed.notify_all()

    def release(self, key: str) -> None:
        """Gives back a reservation, if there still is one: there was no answer."""
        with self._changed:
            if any(self._own(key, "reserved")):
                self._record(Entry(key, self.name, "reserved", *Usage()))
            self._changed.notify_all()

    def count_stored(self, key: str, usage: Usage | None, most: Usage) -> None:
        """Counts an answer that an earlier run paid for, once; `most` where its usage is not known."""
        with self._changed:
            if not any(self._own(key, "paid")) and self._spending.get(key, self.name, "read") is None:
                self._record(Entry(key, self.name, "read", *(usage or most)))
                if usage is None:
                    self._uncounted.add(key)

    @property
    def bill(self) -> Bill:
        """What was counted so far, without what earlier runs spent on answers that were not used again."""
        with self._changed:
            paid, read = (self._spending.by(self.name, kind) for kind in ("paid", "read"))
            asked, stored = Usage().plus(*paid.values()), Usage().plus(*read.values())
            return Bill(
                asked=len(paid),
                stored=len(read),
                usage=asked,
                stored_usage=stored,
                cost=self._cost(asked) if self.prices else None,
                stored_cost=self._cost(stored) if self.prices else None,
                uncounted=len(self._uncounted),
            )

    @property
    def spent(self) -> dict[str, Usage]:
        """All tokens that count against the budget, of its questions, by their keys; for `spent` of the next run."""
        with self._changed:
            by = self._spending.by
            own = by("", "earlier") | by(self.name, "paid") | by(self.name, "read")
            return {key: self._spending.of(key)[0] for key in own}

    def _own(self, key: str, kind: Kind) -> Usage:
        return self._spending.get(key, self.name, kind) or Usage()

    def _record(self, *entries: Entry) -> None:
        """Adds entries, tells the other ledgers if there are any, and learns theirs until then."""
        self._spending.add(*entries)
        if self._exchange is not None:
            news, self._known = self._exchange(entries, self._known)
            self._spending.add(*news)

    def _fits(self, more: Usage, *, reserved: bool = True) -> bool:
        total = self._spending.settled.plus(more)
        if reserved:
            total = total.plus(self._spending.reserved)
        if self.budget_tokens is not None and total.total > self.budget_tokens:
            return False
        return self.budget_usd is None or self._cost(total) <= self.budget_usd

    def _cost(self, usage: Usage) -> float:
        assert self.prices is not None
        return (usage.prompt_tokens * self.prices[0] + usage.completion_tokens * self.prices[1]) / 1e6


def earlier_entries(spent: Mapping[str, Sequence[int]]) -> list[Entry]:
    """What earlier runs spent, as entries."""
    return [Entry(key, "", "earlier", int(read), int(written)) for key, (read, written) in spent.items()]
