"""The saved form of an evaluation: one JSON object, described by `SavedEvaluation`."""

from __future__ import annotations

import math
from os import PathLike
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from noiser.attribution.store import read_saved, validated
from noiser.errors import StoredFileError
from noiser.evaluation.examples import Skipped
from noiser.metrics import METRICS
from noiser.metrics.metric import Summary
from noiser.types import ModelIdentity

FORMAT = "noiser.evaluation"
SCHEMA = 1


class _Saved(BaseModel):
    model_config = ConfigDict(strict=True)


class _Settings(_Saved):
    seed: int = Field(ge=0)
    profile: str
    rates: list[float]


class _Number(_Saved):
    number: str
    meaning: str


class _Row(_Saved):
    index: int
    prompt: Any
    error: str


class SavedEvaluation(_Saved):
    """The keys of the file that are read; intervals are computed again, and rows hold what metrics measured."""

    format: Literal["noiser.evaluation"]
    schema_: Literal[1] = Field(alias="schema")
    method: str
    model: ModelIdentity
    metrics: list[str]
    settings: _Settings
    confidence: float = Field(gt=0, lt=1)
    summary: list[_Number]
    skipped: list[Skipped]
    rows: list[_Row]


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """The fields of the `Evaluation` that a file holds.

    Raises:
        StoredFileError: the file is damaged, of another schema, or not a saved evaluation.
        UnknownNameError: a metric that is not installed here.
        OSError: the file cannot be opened.
    """
    return read_saved(path, _fields)


def _fields(data: Any) -> dict[str, Any]:
    saved = validated(SavedEvaluation, data)
    summaries = _summaries(saved)
    numeric = {column for summary in summaries.values() for column in summary.columns} | {"probability"}
    return {
        "records": tuple(
            {name: _number(name, value) if name in numeric else value for name, value in row.items()}
            for row in data["rows"]
        ),
        "skipped": tuple(saved.skipped),
        "metrics": tuple(saved.metrics),
        "summaries": summaries,
        "method": saved.method,
        "model": saved.model,
        "settings": data["settings"] | {"rates": tuple(saved.settings.rates)},
        "confidence": saved.confidence,
    }


def _summaries(saved: SavedEvaluation) -> dict[str, Summary]:
    """What each saved number is made of, as the metric says; columns that no summary names are means."""
    metrics = [METRICS.get(name).factory() for name in saved.metrics]
    known = {name: summary for metric in metrics for name, summary in metric.summaries.items()}
    numbers = [line.number for line in saved.summary]
    others = {name: summary for metric in metrics for name, summary in metric.other_summaries(numbers).items()}
    try:
        return {name: known.get(name) or others[name] for name in numbers}
    except KeyError as error:
        raise StoredFileError(f"The number {error} is of none of {', '.join(saved.metrics)}.") from error


def _number(name: str, value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, int | float) or value in ("Infinity", "-Infinity"):
        return float(value)
    raise StoredFileError(f"{name!r} of a row is {value!r:.80}; expected a number.")
