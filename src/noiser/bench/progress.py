"""How far a benchmark is, and how long the rest takes: estimated from the plan, then from what rows have taken."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from noiser.bench.plan import ATTRIBUTION, combined
from noiser.bench.records import Cost, Selection
from noiser.bench.store import Store
from noiser.numbers import duration


class Key(NamedTuple):
    """Rows of one kind, by their labels; metric "attribution" for the attributions themselves."""

    model: str
    data: str
    method: str
    metric: str


class Load(NamedTuple):
    """What is to be done of a kind: how many examples, and an estimate of the token-forwards of each."""

    examples: int
    tokens: float


def attribution_tokens(
    method: object, name: str, parameters: Mapping[str, Any], length: float, targets: int = 1
) -> float:
    """Token-forwards of one attribution, roughly.

    Args:
        method: the method, which may say by `inputs_for(units)` how many inputs it runs.
        name: its name, without its version.
        parameters: its hyper-parameters, defaults included.
        length: of the prompt in tokens.
        targets: tokens that are explained.
    """
    if inputs_for := getattr(method, "inputs_for", None):
        return inputs_for(round(length)) * length
    samples = float(parameters.get("samples") or parameters.get("n_samples") or 10)
    one_by_one = length * (length + 1) / 2  # every unit once, each from its own position to the end
    if name == "noiser":
        searches = {"k_min": 1 + parameters.get("steps", 10) / length, "k_max": 3.0, "k_max_per_unit": 10.0}
        return samples * one_by_one * (1 + searches.get(str(parameters.get("bounding")), 0.0)) * targets
    steps = float(parameters.get("n_steps") or 50)
    estimates = {
        "noiser_relative": samples * one_by_one * targets,
        "occlusion": one_by_one,
        "random": 0.0,
        "last_attention": length,
        "attention_rollout": length,
        "input_x_gradient": 3 * length * targets,
        "deeplift": 6 * length * targets,
        "attn_lrp": 3 * length * targets,
        "gradient_shap": 3 * samples * length * targets,
        "integrated_gradients": 3 * steps * length * targets,
        "sequential_integrated_gradients": 3 * steps * length * length * targets,
    }
    return estimates.get(name, max(samples, 50) * length)


def metric_tokens(name: str, masks: int | None, rates: int, length: float, targets: int = 1) -> float:
    """Token-forwards of one measurement, roughly; arguments as for `attribution_tokens`."""
    samples = masks or 10
    soft, curve = (2 * samples + 1) * length * targets, 2 * samples * rates * length * targets
    estimates = {
        "soft_scores": soft,
        "mass_matched": 2 * curve,
        "mass_matched_rank": curve,
        "faithfulness": soft + 3 * curve,
        "erasure": 10 * length * targets,
        "erasure_curves": 2 * length * length * targets,
        "localisation": 0.0,
        "gold_spans": 0.0,
        "lds": (masks or 64) * length * targets,
        "top_k": 6 * length * targets,
        "normalised_aopc": 3 * length**3 * targets,
        "answerability": 100.0,
        "answerability_top5": 1000.0,
        "minimum_top_k": 100.0 * length,
    }
    return estimates.get(name, 20 * length * targets)


class Forecast:
    """What is left to do, and how long that takes.

    Args:
        loads: what is to be done.
        speeds: token-forwards per second, by model.
        costs: what stored rows took.
        workers: how many work side by side.
    """

    def __init__(
        self, loads: Mapping[Key, Load], speeds: Mapping[str, float], costs: Iterable[Cost] = (), workers: int = 1
    ) -> None:
        self.loads = {key: load for key, load in loads.items() if load.examples}
        self.workers = workers
        self._left = {key: load.examples for key, load in self.loads.items()}
        self._speeds = speeds
        self._seconds: dict[Key, float] = defaultdict(float)
        self._measured = Counter[Key]()
        for cost in costs:
            self._count(Key(cost.model, cost.data, cost.method, cost.metric), cost.seconds, 1)

    def done(self, key: Key, seconds: float, examples: int) -> None:
        """Counts a finished chunk."""
        self._count(key, seconds, examples)
        if key in self._left:
            self._left[key] -= min(examples, self._left[key])

    def _count(self, key: Key, seconds: float, examples: int) -> None:
        self._seconds[key] += seconds
        self._measured[key] += examples

    @property
    def rows(self) -> tuple[int, int]:
        """Rows that were made, and rows in all."""
        total = sum(load.examples for load in self.loads.values())
        return total - sum(self._left.values()), total

    def seconds_left(self) -> float | None:
        """Of wall clock; None where nothing is known about a model's speed."""
        scales = self._seconds_per_token()
        total = 0.0
        for key, count in self._left.items():
            if count and self._measured[key]:
                total += count * self._seconds[key] / self._measured[key]
            elif count and key.model in scales:
                total += count * self.loads[key].tokens * scales[key.model]
            elif count:
                return None
        return total / self.workers

    def _seconds_per_token(self) -> dict[str, float]:
        """By model: of what was measured, else of its plain forward pass."""
        scales = {model: 1 / speed for model, speed in self._speeds.items() if speed > 0}
        tokens, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
        for key in self.loads.keys() & self._measured.keys():
            tokens[key.model] += self._measured[key] * self.loads[key].tokens
            seconds[key.model] += self._seconds[key]
        return scales | {model: seconds[model] / count for model, count in tokens.items() if count > 0}

    def __str__(self) -> str:
        """What is to be done in all, before anything is."""
        total = self.rows[1]
        if not total:
            return "nothing is missing"
        attributions = sum(load.examples for key, load in self.loads.items() if key.metric == ATTRIBUTION)
        token_forwards = sum(load.examples * load.tokens for load in self.loads.values())
        seconds = self.seconds_left()
        time = "time not known before the models have run" if seconds is None else f"about {duration(seconds)}"
        return (
            f"{attributions:,} attributions and {total - attributions:,} measurements, about {token_forwards:.2g} "
            f"token-forwards, {time} with {self.workers} worker{'s' if self.workers > 1 else ''}"
        )


class Part(NamedTuple):
    """One model on one data set.

    Attributes:
        model, data: labels.
        selection: of its examples; None where none are chosen yet.
        chosen: how many examples the plan takes of them.
        rows: stored, of those that the plan asks for.
        wanted: rows that the plan asks for; None where examples are not chosen yet, or not all.
        errors: rows that are errors.
        seconds: that the stored rows took.
    """

    model: str
    data: str
    selection: Selection | None
    chosen: int
    rows: int
    wanted: int | None
    errors: int
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """As texts, for a table."""
        selection = self.selection
        return (
            self.model,
            self.data,
            f"{selection.right} of {selection.checked}" if selection and selection.checked is not None else "",
            f"{self.chosen} of {selection.total}" if selection else "not yet",
            str(self.rows),
            "?" if self.wanted is None else str(self.wanted),
            str(self.errors),
            f"{self.seconds:.0f}",
        )


@dataclass(frozen=True, kw_only=True)
class Status:
    """How far a benchmark is.

    Attributes:
        name: of the plan.
        parts: one per model and data set, in the order of the plan.
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
        lines = [heads, *(part.cells() for part in self.parts)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        rows, seconds = sum(part.rows for part in self.parts), sum(part.seconds for part in self.parts)
        state = "complete" if self.complete else "not complete"
        reasons = [f"  {count} × {_printable(reason[:150])}" for reason, count in self.reasons[:10]]
        return "\n".join(
            [f"{self.name}: {state}, {rows:,} rows, {seconds:,.0f} seconds of work", "", *table]
            + (["", "Errors:", *reasons] if reasons else [])
        )


def _printable(text: str) -> str:
    """The text without what moves a terminal's cursor or colours it."""
    return "".join(char if char.isprintable() else "�" for char in text)


def status(folder: Path) -> Status:
    """How far a benchmark is. Raises StoredFileError where there is none in the folder."""
    store = Store(folder)
    plan, is_wanted = store.plan, store.plan.wanted()
    rows, errors, reasons = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[str]()
    for row in filter(is_wanted, store.rows()):
        rows[row.model, row.data] += 1
        if row.error is not None:
            errors[row.model, row.data] += 1
            reasons[row.error] += 1
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for cost in store.costs():
        seconds[cost.model, cost.data] += cost.seconds
    parts: list[Part] = []
    for model in plan.labels("models"):
        for entry in plan.data_for(model):
            pair, selection = (model, entry.label), store.selection(model, entry.label)
            chosen = (combined((len(selection.chosen), entry.limit)) or 0) if selection else 0
            is_chosen = selection is not None and (not entry.only_correct or selection.serves(entry.limit))
            wanted = sum(combined((chosen, limit)) or 0 for *_, limit in plan.kinds(*pair)) if is_chosen else None
            parts.append(Part(*pair, selection, chosen, rows[pair], wanted, errors[pair], seconds[pair]))
    return Status(name=plan.name, parts=tuple(parts), reasons=tuple(reasons.most_common()))
