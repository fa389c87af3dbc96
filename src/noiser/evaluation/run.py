"""`noiser.evaluate`: prompts in, numbers with intervals out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from noiser.attribution import Attribution
from noiser.checks import check_count, check_probability
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
from noiser.metrics import Settings, metrics_of
from noiser.model import LanguageModel
from noiser.model.language_model import check_model
from noiser.types import AutoUnit, Progress, SpanUnit, TargetUnit, Unit

BLOCK = 32  # prompts that are attributed and measured side by side: each holds its keys and values


def evaluate(
    lm: LanguageModel,
    examples: object,
    method: str | Method = "joint",
    metrics: str | Iterable[str] = ("faithfulness",),
    *,
    judge: Any = None,
    unit: Unit | AutoUnit | SpanUnit = "token",
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    seed: int = 0,
    confidence: float = 0.95,
    progress: Progress | None = None,
    **settings: Any,
) -> Evaluation:
    """Attributes prompts and measures whether the attributions can be believed.

    What fails on a prompt is in `Evaluation.skipped`, with its reason; a wrong method, metric or setting is an error.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        examples: one or several: a prompt as `noiser.attribute` takes it, an `Attribution` (measured unchanged,
            whatever `method` is), or an object or dict with `prompt` and perhaps `target`, `foil`, `sources`, `spans`
            (named character spans, for localisation).
        method: a registry name, or a method with its hyper-parameters.
        metrics: names; `noiser.metrics.METRICS.names()` lists them.
        judge: of "answerability": "local", "openai:MODEL", or a judge.
        unit: what gets a score; see `noiser.attribute`. "spans": the spans that each example names.
        max_new_tokens: tokens of the continuation to explain where an example has no target.
        target_unit: what each row explains of it; see `noiser.attribute`.
        seed: of masks, random references and intervals, at least 0; example i is attributed with seed + i.
        confidence: of the intervals.
        progress: called with (done, expected) prompts, in parts: one for the attribution, one for each metric.
        settings: of the metrics; see `noiser.metrics.Settings`.

    Raises:
        UnknownNameError: no such method, metric, judge or setting. ParameterError: a setting is outside its domain.
    """
    check_model(lm)
    items, entries = read_examples(examples), metrics_of(metrics, settings | {"judge": judge})
    check_probability("confidence", confidence)
    chosen = Settings(seed=check_count("seed", seed, least=0), **settings)
    if judge is not None:
        chosen = replace(chosen, judge=make_judge(judge, lm=lm))
    asked: dict[str, Any] = {
        "unit": unit,
        "max_new_tokens": max_new_tokens,
        "target_unit": target_unit,
    }
    method, question = asked_of(make_method(method), chosen.profile, **asked)
    runs, measurements = (
        {name: (metric, chosen) for name, metric in entries.items()},
        list[Measurement](),
    )
    steps, parts = itertools.count(1), 1 + len(runs)
    options: Any = {
        "tick": lambda: progress and progress(next(steps) / parts, len(items)),
        "seed": chosen.seed,
    }
    for start in range(0, len(items), BLOCK):
        measurements += measure_block(
            lm, method, question, items[start : start + BLOCK], runs, **options
        )
    made = [
        _record(item, measurement) for item, measurement in zip(items, measurements, strict=True)
    ]
    summaries = {
        name: summary for metric in entries.values() for name, summary in metric.summaries.items()
    }
    for name, columns in (
        pair for measurement in measurements for pair in measurement.numbers.items()
    ):
        if not isinstance(columns, Exception):
            summaries |= entries[name].other_summaries(
                c for c, v in columns.items() if not isinstance(v, str)
            )
    first = next(
        (m.attribution for m in measurements if isinstance(m.attribution, Attribution)), None
    )
    if first and any(item.attribution is first for item in items):  # it was asked for elsewhere
        asked = {"unit": first.unit, "target_unit": first.target_unit}
    asked |= {
        "parameters": first.parameters if first else {},
        "judge": getattr(chosen.judge, "name", None),
    }
    return Evaluation(
        records=tuple(record for record, _ in made),
        skipped=tuple(one for _, failed in made for one in failed),
        metrics=tuple(entries),
        summaries=summaries,
        primary=tuple(metric.primary for metric in entries.values() if metric.primary),
        method=first.method if first else describe(method)[0],
        model=lm.identity,
        settings=vars(chosen) | asked,
        confidence=confidence,
    )


def _record(item: Item, measurement: Measurement) -> tuple[dict[str, Any], list[Skipped]]:
    """The row of one prompt, with the columns of all metrics, and the parts that failed."""
    row: dict[str, Any] = {
        "index": item.index,
        "prompt": item.prompt,
        "method": "",
        "target": "",
        "error": "",
    }
    failed: list[Skipped] = []
    if isinstance(att := measurement.attribution, Attribution):
        target, probability = (
            "".join(target.text for target in att.targets),
            att.targets[0].probability,
        )
        row |= {
            "method": att.method,
            "target": target,
            "probability": probability,
            "units": len(att.units),
        }
    for name, part in {None: measurement.attribution, **measurement.numbers}.items():
        if isinstance(part, Exception):
            failed.append(Skipped(item.index, item.prompt, name, f"{type(part).__name__}: {part}"))
        elif not isinstance(part, Attribution):
            row |= part
    row["error"] = "; ".join(
        f"{each.metric}: {each.error}" if each.metric else each.error for each in failed
    )
    return row, failed
