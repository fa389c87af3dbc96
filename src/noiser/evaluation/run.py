"""`noiser.evaluate`: prompts in, numbers with intervals out."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from noiser.attribution import Attribution
from noiser.checks import check_count, check_probability
from noiser.errors import NoiserError
from noiser.evaluation.measuring import (
    Item,
    Measurement,
    Skipped,
    asked_of,
    measure_block,
    read_examples,
)
from noiser.evaluation.result import Evaluation
from noiser.judges import make_judge
from noiser.methods import Method, describe, make_method
from noiser.metrics import Aggregate, Metric, Settings, metrics_of
from noiser.model import LanguageModel
from noiser.model.language_model import check_model, check_probabilities
from noiser.types import AutoUnit, Progress, SpanUnit, TargetUnit, Unit

BLOCK = 32
"""The number of prompts that are attributed and measured side by side: each holds its keys and
values."""


def evaluate(
    lm: LanguageModel,
    examples: object,
    method: str | Method = "joint",
    metrics: str | Iterable[str] = ("faithfulness",),
    *,
    judge: Any = None,
    unit: Unit | AutoUnit | SpanUnit = "word",
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    seed: int = 0,
    confidence: float = 0.95,
    progress: Progress | None = None,
    **settings: Any,
) -> Evaluation:
    """Attributes prompts and measures whether the attributions can be believed.

    A failure on a prompt is in `Evaluation.skipped`, with its reason. A wrong method, metric or
    setting is an error.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        examples: one or several: a prompt as `noiser.attribute` takes it, an `Attribution`
            (measured unchanged, whatever `method` is), or an object or dict with `prompt` and
            perhaps `target`, `foil`, `sources`, `spans` (named character spans, for localisation).
        method: a registry name, or a method with its hyper-parameters.
        metrics: names; `noiser.metrics.METRICS.names()` lists them.
        judge: for "answerability": "local", "openai:MODEL", or a judge.
        unit: what gets a score; see `noiser.attribute`. "spans": the spans that each example names.
        max_new_tokens: tokens of the continuation to explain where an example has no target.
        target_unit: the part of it that each row explains; see `noiser.attribute`.
        seed: of masks, random references and intervals, at least 0; example i is attributed with
            seed + i.
        confidence: of the intervals.
        progress: called with (done, expected) prompts, in parts: one for the attribution, one for
            each metric.
        settings: of the metrics; see `noiser.metrics.Settings`.

    Raises:
        UnknownNameError: no such method, metric, judge or setting.
        ParameterError: a setting is outside its domain.
    """
    check_model(lm)
    check_probabilities(lm, "evaluate")
    items = read_examples(examples)
    entries = metrics_of(metrics, settings | {"judge": judge})
    check_probability("confidence", confidence)
    metric_settings = Settings(seed=check_count("seed", seed, least=0), **settings)
    if judge is not None:
        metric_settings = replace(metric_settings, judge=make_judge(judge, lm=lm))
    asked: dict[str, Any] = {
        "unit": unit,
        "max_new_tokens": max_new_tokens,
        "target_unit": target_unit,
    }
    method, question = asked_of(make_method(method), metric_settings.profile, **asked)

    parts_of_prompt = 1 + len(entries)
    parts_done = itertools.count(1)

    def tick() -> None:
        """Reports that one more part of a prompt is done."""
        if progress:
            progress(next(parts_done) / parts_of_prompt, len(items))

    runs = {name: (metric, metric_settings) for name, metric in entries.items()}
    measurements: list[Measurement] = []
    for start in range(0, len(items), BLOCK):
        block = items[start : start + BLOCK]
        measurements += measure_block(
            lm, method, question, block, runs, seed=metric_settings.seed, tick=tick
        )
    records: list[dict[str, Any]] = []
    skipped: list[Skipped] = []
    for item, measurement in zip(items, measurements, strict=True):
        record, failures = _record(item, measurement)
        records.append(record)
        skipped += failures

    first = _first_attribution(measurements)
    if first and any(item.attribution is first for item in items):
        # The attribution was there already, so its own units were measured.
        asked = {"unit": first.unit, "target_unit": first.target_unit}
    asked["parameters"] = first.parameters if first else {}
    asked["judge"] = getattr(metric_settings.judge, "name", None)
    return Evaluation(
        records=tuple(records),
        skipped=tuple(skipped),
        metrics=tuple(entries),
        summaries=_summaries(entries, measurements),
        primary=tuple(metric.primary for metric in entries.values() if metric.primary),
        method=first.method if first else describe(method)[0],
        model=lm.identity,
        settings=vars(metric_settings) | asked,
        confidence=confidence,
    )


def _first_attribution(measurements: Iterable[Measurement]) -> Attribution | None:
    """The attribution of the first prompt that has one."""
    for measurement in measurements:
        if isinstance(measurement.attribution, Attribution):
            return measurement.attribution
    return None


def _summaries(
    entries: Mapping[str, Metric], measurements: Iterable[Measurement]
) -> dict[str, Aggregate]:
    """The summaries of all metrics, and of the columns that only a measurement names."""
    summaries: dict[str, Aggregate] = {}
    for metric in entries.values():
        summaries |= metric.summaries
    for measurement in measurements:
        for name, columns in measurement.numbers.items():
            if isinstance(columns, Exception):
                continue
            numeric = [column for column, value in columns.items() if not isinstance(value, str)]
            summaries |= entries[name].other_summaries(numeric)
    return summaries


def _place_of(error: Exception) -> str:
    """Where an error of code outside the library was raised; "" for the library's own errors."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, NoiserError) or not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _record(item: Item, measurement: Measurement) -> tuple[dict[str, Any], list[Skipped]]:
    """The row of one prompt, with the columns of all metrics, and the parts that failed."""
    row: dict[str, Any] = {
        "index": item.index,
        "prompt": item.prompt,
        "method": "",
        "target": "",
        "error": "",
    }
    failures: list[Skipped] = []

    def add_failure(metric: str | None, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}{_place_of(error)}"
        failures.append(Skipped(item.index, item.prompt, metric, text))

    att = measurement.attribution
    if isinstance(att, Attribution):
        row["method"] = att.method
        row["target"] = "".join(target.text for target in att.targets)
        row["probability"] = att.targets[0].probability
        row["units"] = len(att.units)
    else:
        add_failure(None, att)
    for name, columns in measurement.numbers.items():
        if isinstance(columns, Exception):
            add_failure(name, columns)
        else:
            row |= columns
    errors = [f"{each.metric}: {each.error}" if each.metric else each.error for each in failures]
    row["error"] = "; ".join(errors)
    return row, failures
