"""Evaluations read back from what `Evaluation.save` wrote."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from noiser.errors import NoiserError, StoredFileError
from noiser.evaluation.result import FORMAT, SCHEMA, Evaluation, Skipped
from noiser.metrics.bootstrap import mean
from noiser.metrics.catalog import METRICS
from noiser.metrics.metric import Summary
from noiser.types import ModelIdentity

__all__ = ["from_dict", "load"]


def load(path: str | PathLike[str]) -> Evaluation:
    """Reads what `Evaluation.save` wrote; see there."""
    try:
        return from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except (StoredFileError, ValueError, RecursionError) as error:
        if isinstance(error, NoiserError) and not isinstance(error, StoredFileError):
            raise
        raise StoredFileError(
            f"{os.fspath(path)} is no saved evaluation that can be read: {error}. Expected a file that "
            "Evaluation.save wrote."
        ) from error


def from_dict(data: Any) -> Evaluation:
    """The evaluation that `to_dict` was given.

    Raises:
        StoredFileError: something else, or with another schema.
        UnknownNameError: a metric that is not installed here.
    """
    if not isinstance(data, dict) or (data.get("format"), data.get("schema")) != (FORMAT, SCHEMA):
        raise StoredFileError(f'expected an object with "format": "{FORMAT}" and "schema": {SCHEMA}')
    try:
        return _evaluation(cast("dict[str, Any]", data))
    except NoiserError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise StoredFileError(f"a key is missing or holds something else than `save` writes ({error!r})") from error


def _evaluation(data: Mapping[str, Any]) -> Evaluation:
    summaries = _summaries(data["metrics"], data["summary"])
    numeric = {column for summary in summaries.values() for column in summary.columns} | {"probability"}
    return Evaluation(
        records=tuple({key: _value(value, key in numeric) for key, value in row.items()} for row in data["rows"]),
        skipped=tuple(Skipped(**skipped) for skipped in data["skipped"]),
        metrics=tuple(data["metrics"]),
        summaries=summaries,
        method=data["method"],
        model=ModelIdentity(**data["model"]),
        settings=data["settings"] | {"rates": tuple(data["settings"]["rates"])},
        confidence=data["confidence"],
    )


def _summaries(metrics: list[str], lines: list[Mapping[str, Any]]) -> dict[str, Summary]:
    """What each saved number is made of, as the metric says; columns that no summary names are means."""
    found = [METRICS.get(name).factory() for name in metrics]
    known = {name: summary for metric in found for name, summary in metric.summaries.items()}
    scales = {metric.others.meaning: metric.others for metric in found if metric.others is not None}
    return {
        line["number"]: known.get(line["number"]) or Summary(mean, (line["number"],), scales[line["meaning"]])
        for line in lines
    }


def _value(value: Any, is_number: bool) -> Any:
    if value is None and is_number:
        return math.nan
    return float(value) if value in ("Infinity", "-Infinity") and is_number else value
