"""Made-up benchmarks, small enough to be worked out by hand."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noiser.bench import Plan, Row, Store
from noiser.bench.resolve import Selection

METHODS = ("noiser", "noiser_relative", "occlusion", "input_x_gradient", "lime", "random")


@dataclass
class Run:
    """A benchmark's store in memory, as far as reports read it."""

    plan: Plan
    kept: Sequence[Row] = ()
    chosen: Sequence[Selection] = ()

    @property
    def meta(self) -> dict[str, Any]:
        return {"selections": [one._asdict() for one in self.chosen]}

    def rows(self) -> Iterator[Row]:
        return iter(self.kept)


def row(
    method: str,
    metric: str,
    example: int,
    values: dict[str, Any] | None = None,
    *,
    model: str = "gemma-3-270m",
    data: str = "known",
    category: str = "",
    error: str | None = None,
    seconds: float | None = None,
) -> Row:
    size = (0, 0, None) if error else (6, 1, 0.5)
    place = (model, data, f"{data}-{example}", category, example, method, metric, example)
    return Row(*place, *size, values or {}, error, seconds)


def soft(ns: float, nc: float, random_ns: float = 0.02, random_nc: float = 0.4) -> dict[str, float]:
    """The columns of `soft_scores`."""
    return {"soft_ns": ns, "soft_nc": nc, "random_soft_ns": random_ns, "random_soft_nc": random_nc}


def plan(**changes: Any) -> Plan:
    """One model, KNOWN, two methods, the paper's score."""
    named = {"models": "gemma-3-270m", "data": "known", "methods": "noiser occlusion", "metrics": "soft_scores"}
    entries = {kind: [{"name": name} for name in names.split()] for kind, names in named.items()}
    return Plan.model_validate({"name": "test"} | entries | changes)


FULL: dict[str, Any] = {
    "models": [{"name": "gemma-3-270m"}, {"name": "Qwen/Qwen2-0.5B"}],
    "data": [
        {"name": "known", "only_correct": True},
        {"name": "longra", "only_correct": True},
        {"label": "own", "prompts": ["LeBron James professionally plays the sport of"]},
    ],
    "methods": [
        *({"name": name} for name in METHODS),
        {"name": "noiser", "label": "noiser_k_max", "args": {"bounding": "k_max"}, "metrics": ["faithfulness"]},
        {"name": "noiser", "label": "noiser_authors", "profile": "authors", "metrics": ["faithfulness"]},
    ],
    "metrics": [
        {"name": "faithfulness"},
        {"name": "answerability", "judge": "local:smollm2-135m-instruct", "data": ["known"]},
        {"name": "minimum_top_k", "judge": "local:smollm2-135m-instruct", "data": ["known"]},
        {"name": "localisation", "data": ["longra"], "models": ["gemma-3-270m"]},
        {"name": "stability", "data": ["known"], "models": ["gemma-3-270m"]},
    ],
}
"""Something of everything."""

_AREAS = ("area_ns", "area_nc", "area", "random_area", "permuted_area")
_PARTS = ("antecedent", "distractor", "last_content_word")
COLUMNS = {
    "attribution": ("token_forwards", "passes"),
    "faithfulness": (*soft(0, 0), *(f"{prefix}{name}" for prefix in ("", "rank_") for name in _AREAS)),
    "answerability": ("answerability_rate", "answerability_score", "answerability_unscored"),
    "minimum_top_k": ("minimum_share", "unanswerable"),
    "localisation": tuple(f"{kind}_{part}" for kind in ("share", "uniform") for part in _PARTS),
    "stability": ("spearman", "kendall"),
}
"""The numbers of each metric."""


def full(prompts: int = 12, models: int = 2) -> Run:
    """A run with something of everything."""
    return made(plan(**FULL | {"models": FULL["models"][:models]}), prompts)


def made(wanted: Plan, prompts: int) -> Run:
    """Rows of a plan, drawn at random; LIME has fewer prompts, and the fourth kind of rows two failures."""
    drawn = random.Random(0)
    rows: list[Row] = []
    for number, (model, data, method, metric) in enumerate(_cells(wanted)):
        count = 1 if data == "own" else prompts // 2 if method == "lime" else prompts
        for example in range(count):
            error = "NumericalError" if number == 3 and example < 2 else None
            category = ("capital-world" if example % 2 else "family") if data == "longra" else ""
            lift = len(method) % 7 / 10
            values = {} if error else {name: lift + drawn.uniform(0.1, 1) for name in COLUMNS[metric]}
            labels = {"model": model, "data": data, "category": category, "error": error}
            rows.append(row(method, metric, example, values, seconds=drawn.uniform(0.1, 3), **labels))
    selections = [
        Selection(model, data, 1208, 100, 40, tuple(f"{data}-{i}" for i in range(prompts)), {}, ())
        for model in wanted.labels("models")
        for data in wanted.labels("data")
    ]
    return Run(wanted, rows, selections)


def _cells(wanted: Plan) -> Iterator[tuple[str, str, str, str]]:
    for model in wanted.labels("models"):
        for data in wanted.labels("data"):
            yield from ((model, data, *kind) for kind in wanted.kinds(model, data))


def near(statistic, data, seed, confidence):
    """An interval around the number, without resamples, for tests of other things."""
    value = float(statistic(*data))
    return value - 0.1, value + 0.1, ""


def write_folder(folder: Path, run: Run) -> Store:
    """A benchmark's folder with those rows."""
    store = Store(folder, create=True)
    store.set_meta(plan=toml(run.plan), resolved={}, models={}, **run.meta)
    store.add(run.kept)
    return store


def toml(wanted: Plan) -> str:
    """The plan as TOML."""
    fields = wanted.model_dump(mode="json", exclude_defaults=True)
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items()).replace('": ', '" = ')
