"""How far a benchmark is, from its folder alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from noiser.bench.plan import combined
from noiser.bench.samples import is_enough
from noiser.bench.store import Store

__all__ = ["Part", "Status", "status"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One model on one data set.

    Attributes:
        model, data: labels.
        total, checked, right, chosen: of the examples; see `Selection`. None where nobody has chosen yet.
        rows: stored, of those that the plan asks for.
        wanted: rows that the plan asks for; None where nobody has chosen yet, or not to the end.
        errors: rows that are errors.
        seconds: that the stored rows took.
    """

    model: str
    data: str
    total: int | None
    checked: int | None
    right: int | None
    chosen: int | None
    rows: int
    wanted: int | None
    errors: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Status:
    """A benchmark.

    Attributes:
        name: of the plan.
        parts: one a model and data set, in the order of the plan.
        reasons: errors of rows and how often each occurs, most frequent first.
    """

    name: str
    parts: tuple[Part, ...]
    reasons: tuple[tuple[str, int], ...]

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return all(part.wanted is not None and part.rows >= part.wanted for part in self.parts)

    def __str__(self) -> str:
        heads = ("model", "data", "right of checked", "chosen", "rows", "of", "errors", "seconds")
        lines = [heads, *(_line(part) for part in self.parts)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        rows, seconds = sum(part.rows for part in self.parts), sum(part.seconds for part in self.parts)
        state = "complete" if self.complete else "not complete"
        reasons = [f"  {count} × {reason[:150]}" for reason, count in self.reasons[:10]]
        return "\n".join(
            [f"{self.name}: {state}, {rows:,} rows, {seconds:,.0f} seconds of work", "", *table]
            + (["", "Errors:", *reasons] if reasons else [])
        )


def _line(part: Part) -> tuple[str, ...]:
    right = "" if part.checked is None else f"{part.right} of {part.checked}"
    chosen = "not yet" if part.chosen is None else f"{part.chosen} of {part.total}"
    wanted = "?" if part.wanted is None else str(part.wanted)
    return (part.model, part.data, right, chosen, str(part.rows), wanted, str(part.errors), f"{part.seconds:.0f}")


def status(folder: Path) -> Status:
    """How far a benchmark is. Raises StoredFileError where there is none in the folder."""
    store = Store(folder)
    plan = store.plan
    rows: Counter[tuple[str, str]] = Counter()
    errors: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    seconds: Counter[tuple[str, str]] = Counter()
    wanted = plan.wanted()
    for row in store.rows():
        if not wanted(row):
            continue
        rows[row.model, row.data] += 1
        if row.error is not None:
            errors[row.model, row.data] += 1
            reasons[row.error] += 1
    for cost in store.costs():
        seconds[cost.model, cost.data] += cost.seconds  # pyright: ignore[reportArgumentType]
    parts: list[Part] = []
    for model in plan.labels("models"):
        for entry in plan.data:
            place, selection = (model, entry.label), store.selection(model, entry.label)
            chosen = combined((len(selection.chosen), entry.limit)) if selection else None
            settled = not entry.only_correct or is_enough(selection, entry.limit)
            kinds = plan.kinds(model, entry.label)
            parts.append(
                Part(
                    model=model,
                    data=entry.label,
                    total=selection.total if selection else None,
                    checked=selection.checked if selection else None,
                    right=selection.right if selection else None,
                    chosen=chosen,
                    rows=rows[place],
                    wanted=sum(combined((chosen, limit)) or 0 for *_, limit in kinds)
                    if chosen is not None and settled
                    else None,
                    errors=errors[place],
                    seconds=float(seconds[place]),
                )
            )
    return Status(name=plan.name, parts=tuple(parts), reasons=tuple(reasons.most_common()))
