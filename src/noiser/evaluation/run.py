"""`noiser.evaluate`: prompts in, numbers with intervals out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from noiser.attribution import Attribution
from noiser.attribution.normalize import NORMALIZATIONS
from noiser.checks import check_choice, check_count, check_probability, check_shares
from noiser.engine import REMOVALS
from noiser.errors import ParameterError
from noiser.evaluation.examples import Item, read_examples
from noiser.evaluation.measuring import Attributor, Measurement, MetricRun, in_profile, measure_block
from noiser.evaluation.result import Evaluation, Skipped
from noiser.methods import Method, describe, make_method
from noiser.metrics import METRICS
from noiser.metrics.metric import (
    DRAWS,
    RATES,
    TOP,
    Metric,
    Summary,
    check_read,
)
from noiser.metrics.top_k import check_top
from noiser.model import LanguageModel
from noiser.model.language_model import check_model
from noiser.types import AutoUnit, Profile, Progress, RemovalName, SpanUnit, TargetUnit, TargetUnitName, Unit, UnitName

BLOCK = 32
"""Prompts that are attributed and measured side by side: each holds its keys and values."""


def evaluate(
    lm: LanguageModel,
    examples: object,
    method: str | Method = "noiser",
    metrics: str | Iterable[str] = ("faithfulness",),
    *,
    judge: Any = None,
    unit: Unit | AutoUnit | SpanUnit = "token",
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    seed: int = 0,
    masks: int | None = None,
    normalization: str | None = None,
    rates: Sequence[float] = RATES,
    draws: int = DRAWS,
    removal: RemovalName = "zero",
    k: int | Sequence[int] = TOP,
    profile: Profile = "paper",
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> Evaluation:
    """Attributes prompts and measures whether the attributions can be believed.

    Nothing is left out silently: what fails on a prompt is in `Evaluation.skipped`, with its reason, and the others go
    on. A wrong method, metric or setting is an error at once.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        examples: one or several: a text, chat messages, an `Attribution` (measured unchanged, whatever `method` is),
            or an object with `prompt` and perhaps `target` (explained in place of the greedy continuation), `spans`
            (named character spans, for localisation) and `sources` (documents in the prompt; see `noiser.attribute`).
        method: a registry name, or a method with its hyper-parameters.
        metrics: names; `noiser.metrics.METRICS.names()` lists them.
        judge: of "answerability": "local", "openai:MODEL", or a judge.
        unit: what gets a score; see `noiser.attribute`. "spans": the spans that each example names.
        max_new_tokens: tokens of the continuation to explain where an example has no target.
        target_unit: what each row explains of it; see `noiser.attribute`.
        seed: of masks, random references and intervals, at least 0; example i is attributed with seed + i.
        masks: mask samples per prompt; None: 10, or 1 for soft scores in the authors' profile, and 64 for LDS.
        normalization: how scores become shares; None for each metric's own ("positive" for localisation, else "sum").
        rates: of the mass-matched curves.
        draws: random scores, and permutations of a method's own, that each reference is the mean of.
        removal: how metrics that remove whole units do it: "zero", "mean", "noise" or "delete".
        k: number or numbers of the highest units, of "top_k" and "gold_spans".
        profile: "paper", or "authors": special tokens are scored and masked, as in the published script.
        confidence: of the intervals.
        progress: called with (done, expected) prompts, in parts: one for the attribution, one for each metric.

    Raises:
        UnknownNameError: no such method, metric or judge. ParameterError: a setting is outside its domain.
    """
    check_model(lm)
    items = read_examples(examples)
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    entries = {entry.versioned_name: entry.factory() for entry in map(METRICS.get, names)}
    if not names:
        raise ParameterError(f"metrics is empty; expected at least one of {', '.join(METRICS.names())}.")
    chosen = {
        "masks": None if masks is None else check_count("masks", masks),
        "normalization": normalization,
        "rates": check_shares("rates", rates, at_least=2),
        "draws": check_count("draws", draws),
        "removal": removal,
        "k": check_top(k),
    }
    _check(confidence, profile, normalization, removal, unit, max_new_tokens, target_unit)
    check_read(entries.values(), chosen | {"judge": judge})
    attributor = Attributor(
        lm=lm,
        method=in_profile(make_method(method), profile),
        unit=unit,
        max_new_tokens=max_new_tokens,
        target_unit=target_unit,
        profile=profile,
    )
    settings: dict[str, Any] = {"seed": check_count("seed", seed, least=0), **chosen}
    settings["judge"] = _judge(judge, lm, entries)
    runs = {name: MetricRun(metric, settings) for name, metric in entries.items()}
    records: list[dict[str, Any]] = []
    skipped: list[Skipped] = []
    attributions: list[Attribution] = []
    found: dict[str, Summary] = {}
    steps = 0

    def tick() -> None:
        nonlocal steps
        steps += 1
        if progress:
            progress(steps / (1 + len(runs)), len(items))

    for start in range(0, len(items), BLOCK):
        block = items[start : start + BLOCK]
        existing = {item.index: item.attribution for item in block if item.attribution}
        measurements = measure_block(attributor, block, runs, seed=settings["seed"], attributions=existing, tick=tick)
        for item, measurement in zip(block, measurements, strict=True):
            records.append(_record(item, measurement))
            skipped += _failures(item, measurement)
            attributions += [measurement.attribution] if isinstance(measurement.attribution, Attribution) else []
            for name, columns in measurement.numbers.items():
                if not isinstance(columns, Exception):
                    found |= entries[name].other_summaries(columns)
        if progress and steps < len(records) * (1 + len(runs)):  # some failed
            steps = len(records) * (1 + len(runs))
            progress(len(records), len(items))
    first = attributions[0] if attributions else None
    asked = {"unit": unit, "max_new_tokens": max_new_tokens, "target_unit": target_unit}
    if first and any(item.attribution is first for item in items):  # it was asked for elsewhere
        asked = {"unit": first.unit, "target_unit": first.target_unit}
    return Evaluation(
        records=tuple(records),
        skipped=tuple(skipped),
        metrics=tuple(entries),
        summaries={name: summary for metric in entries.values() for name, summary in metric.summaries.items()} | found,
        method=first.method if first else describe(make_method(method))[0],
        model=lm.identity,
        settings=settings
        | {
            "parameters": first.parameters if first else {},
            "judge": getattr(settings["judge"], "name", None),
            "profile": profile,
        }
        | asked,
        confidence=confidence,
    )


def _check(
    confidence: float,
    profile: str,
    normalization: str | None,
    removal: str,
    unit: Unit | AutoUnit | SpanUnit,
    max_new_tokens: int,
    target_unit: TargetUnit,
) -> None:
    """What every prompt would fail at."""
    check_probability("confidence", confidence)
    check_choice("profile", profile, get_args(Profile))
    check_choice("removal", removal, REMOVALS)
    if normalization is not None:
        check_choice("normalization", normalization, tuple(NORMALIZATIONS))
    if isinstance(unit, str):
        check_choice("unit", unit, (*get_args(UnitName), *get_args(AutoUnit), *get_args(SpanUnit)))
    if isinstance(target_unit, str):
        check_choice("target_unit", target_unit, get_args(TargetUnitName))
    check_count("max_new_tokens", max_new_tokens)


def _judge(judge: Any, lm: LanguageModel, metrics: Mapping[str, Metric]) -> Any:
    judged = [name for name, metric in metrics.items() if metric.needs_judge]
    if not judged:
        return None
    if judge is None:
        raise ParameterError(f"{judged[0]} has no judge; expected judge='local', 'openai:MODEL', or a judge.")
    from noiser.judges import make_judge

    return make_judge(judge, lm=lm)


def _record(item: Item, measurement: Measurement) -> dict[str, Any]:
    """The row of one prompt: facts, and the columns of all metrics."""
    row: dict[str, Any] = {"index": item.index, "prompt": item.prompt, "method": "", "target": "", "error": ""}
    att = measurement.attribution
    if isinstance(att, Attribution):
        row |= {
            "method": att.method,
            "target": "".join(target.text for target in att.targets),
            "probability": att.targets[0].probability,
            "units": len(att.units),
        }
    for columns in measurement.numbers.values():
        row |= {} if isinstance(columns, Exception) else columns
    row["error"] = "; ".join(
        f"{failure.metric}: {failure.error}" if failure.metric else failure.error
        for failure in _failures(item, measurement)
    )
    return row


def _failures(item: Item, measurement: Measurement) -> list[Skipped]:
    """The parts of a measurement that failed, with their reasons."""
    failed = [(name, error) for name, error in measurement.numbers.items() if isinstance(error, Exception)]
    whole = [(None, measurement.attribution)] if isinstance(measurement.attribution, Exception) else []
    return [
        Skipped(item.index, item.prompt, name, f"{type(error).__name__}: {error}") for name, error in (*whole, *failed)
    ]
