"""`noiser.evaluate`: prompts in, numbers with intervals out."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple, get_args

from noiser.attribution import Attribution
from noiser.attribution.normalize import NORMALIZATIONS
from noiser.checks import check_choice, check_count, check_probability, check_shares
from noiser.engine import REMOVALS, LocalEngine, RemovalName, SharedProgress, run_interleaved
from noiser.errors import ParameterError
from noiser.evaluation.examples import Item, read_examples
from noiser.evaluation.measuring import Attributor, in_profile, measure_together
from noiser.evaluation.result import Evaluation, Skipped
from noiser.methods import Method, describe, make_method
from noiser.metrics import METRICS
from noiser.metrics.metric import (
    DRAWS,
    RATES,
    TOP,
    Case,
    Measured,
    Metric,
    Summary,
    check_read,
    measure_passes,
)
from noiser.metrics.top_k import check_top
from noiser.model import LanguageModel
from noiser.model.clean import Passes
from noiser.types import AutoUnit, Profile, Progress, SpanUnit, TargetUnit, TargetUnitName, Unit, UnitName


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
        progress: called with (done, expected) prompts; one that was attributed here and not yet measured counts half.

    Raises:
        UnknownNameError: no such method, metric or judge. ParameterError: a setting is outside its domain.
    """
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
    run = _Run(
        Attributor(
            lm=lm,
            method=in_profile(make_method(method), profile),
            unit=unit,
            max_new_tokens=max_new_tokens,
            target_unit=target_unit,
            profile=profile,
        ),
        settings={
            "seed": check_count("seed", seed, least=0),
            **chosen,
            "judge": _judge(judge, lm, entries),
        },
        metrics=entries,
    )

    engine = LocalEngine(lm, many=len(items) > 1)
    shared = SharedProgress(len(items), progress)
    coroutines = (run.passes(engine, item, shared, index) for index, item in enumerate(items))
    with closing(run_interleaved(engine, coroutines, shared)) as outcomes:
        for index, measured, error in outcomes:
            if error is not None:
                raise error
            run.take(items[index], measured)
            shared.finish(index)
    run.take_together()
    first = run.first
    asked = {"unit": unit, "max_new_tokens": max_new_tokens, "target_unit": target_unit}
    if first and any(item.attribution is first for item in items):  # it was asked for elsewhere
        asked = {"unit": first.unit, "target_unit": first.target_unit}
    return Evaluation(
        records=tuple(run.records),
        skipped=tuple(sorted(run.skipped, key=lambda skipped: skipped.example)),
        metrics=tuple(entries),
        summaries={name: summary for metric in entries.values() for name, summary in metric.summaries.items()}
        | run.found,
        method=first.method if first else describe(make_method(method))[0],
        model=lm.identity,
        settings=run.settings
        | {
            "parameters": first.parameters if first else {},
            "judge": getattr(run.settings["judge"], "name", None),
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


class _Item(NamedTuple):
    """What came of one item: its attribution and case, and what each metric measured; or errors."""

    att: Attribution | Exception
    case: Case | None
    columns: Mapping[str, Measured | Exception]


class _Run:
    """The work in progress: records, summaries found on the way, and what was skipped."""

    def __init__(self, attributor: Attributor, *, settings: Mapping[str, Any], metrics: Mapping[str, Metric]) -> None:
        self.attributor, self.settings, self.metrics = attributor, dict(settings), metrics
        self.records: list[dict[str, Any]] = []
        self.skipped: list[Skipped] = []
        self.found: dict[str, Summary] = {}
        self._together: list[tuple[dict[str, Any], Case]] = []

    def passes(self, engine: LocalEngine, item: Item, shared: SharedProgress, index: int) -> Passes[_Item]:
        """Attributes and measures an item, as a coroutine; errors are part of what it returns."""
        report = shared.of(index, 0.0, 0.5)
        # Each item has a seed of its own, or random scores would favour the same positions in all of them.
        seed = self.settings["seed"] + item.index
        try:
            att = item.attribution or (yield from self.attributor.passes(engine, item, seed, report))
            case = self.attributor.case(item, att, **self.settings)
        except Exception as error:
            shared.reraise(error)
            return _Item(error, None, {})
        metrics = {name: metric for name, metric in self.metrics.items() if metric.measure is not None}
        columns: dict[str, Measured | Exception] = {}
        begin = 0.0 if item.attribution else 0.5
        for number, (name, metric) in enumerate(metrics.items()):
            first, last = (begin + (1 - begin) * part / len(metrics) for part in (number, number + 1))
            try:
                columns[name] = yield from measure_passes(engine, metric, case, shared.of(index, first, last))
            except Exception as error:
                shared.reraise(error)
                columns[name] = error
        return _Item(att, dataclasses.replace(case, cache={}, prepared={}), columns)  # without what it remembers

    def take(self, item: Item, measured: _Item) -> None:
        """Notes what was measured of an item, or why it has no attribution."""
        row: dict[str, Any] = {"index": item.index, "prompt": item.prompt, "method": "", "target": "", "error": ""}
        self.records.append(row)
        if isinstance(measured.att, Exception) or measured.case is None:
            assert isinstance(measured.att, Exception)
            self._skip(row, None, measured.att)
            return
        row |= _about(measured.att)
        for name, columns in measured.columns.items():
            self._fill(row, name, columns)
        self._together.append((row, measured.case))

    @property
    def first(self) -> Attribution | None:
        """The first prompt's attribution of those that have one, once all are in order."""
        return self._together[0][1].att if self._together else None

    def take_together(self) -> None:
        """Runs the metrics that measure all prompts at once; everything is in the prompts' order then."""
        self.records.sort(key=lambda row: row["index"])
        self._together.sort(key=lambda measured: measured[0]["index"])
        for name, metric in self.metrics.items():
            if metric.measure is None:
                measured = measure_together(metric, [case for _, case in self._together])
                for (row, _), columns in zip(self._together, measured, strict=True):
                    self._fill(row, name, columns)

    def _fill(self, row: dict[str, Any], name: str, columns: Measured | Exception) -> None:
        if isinstance(columns, Exception):
            self._skip(row, name, columns)
            return
        row |= columns
        self.found |= self.metrics[name].other_summaries(columns)

    def _skip(self, row: dict[str, Any], metric: str | None, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        row["error"] = "; ".join(filter(None, [row["error"], f"{metric}: {text}" if metric else text]))
        self.skipped.append(Skipped(row["index"], row["prompt"], metric, text))


def _about(att: Attribution) -> dict[str, Any]:
    return {
        "method": att.method,
        "target": "".join(target.text for target in att.targets),
        "probability": att.targets[0].probability,
        "units": len(att.units),
    }
