"""Attribute and measure: the steps that `noiser.evaluate` and benchmarks share."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast, get_args

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import Engine, Query, Steps, prepare, restore, run_one
from noiser.errors import ParameterError
from noiser.evaluation.examples import Item
from noiser.explain.attribute import attribution_of
from noiser.methods import Method, check_answers
from noiser.metrics import Case, Metric, Settings, measured
from noiser.metrics.judged import JudgeStoppedError
from noiser.metrics.metric import Measured
from noiser.model import LanguageModel
from noiser.question import Question
from noiser.types import AutoUnit, Profile, Prompt, SpanUnit, TargetUnit, TargetUnitName, Unit, UnitName

T = TypeVar("T")


def in_profile(method: Method, profile: Profile) -> Method:
    """The method in the authors' profile, if it has one."""
    if profile != "authors" or not dataclasses.is_dataclass(method) or not hasattr(method, "profile"):
        return method
    return dataclasses.replace(method, profile=profile)


def question_of(
    method: Method, profile: Profile, unit: Unit | AutoUnit | SpanUnit, max_new_tokens: int, target_unit: TargetUnit
) -> Question:
    """The question about every item, which lacks the prompt; in the authors' profile special tokens are scored.

    With unit "spans" an item's named spans are its units.
    """
    if isinstance(unit, str):
        check_choice("unit", unit, (*get_args(UnitName), *get_args(AutoUnit), *get_args(SpanUnit)))
    if isinstance(target_unit, str):
        check_choice("target_unit", target_unit, get_args(TargetUnitName))
    special = "perturbed" if profile == "authors" else getattr(method, "special_tokens", None)
    unit = cast("AutoUnit", unit)  # "spans" is replaced by an item's
    return Question(
        prompt="", unit=unit, max_new_tokens=max_new_tokens, target_unit=target_unit, special_tokens=special
    )


def attributed(
    lm: LanguageModel, method: Method, question: Question, item: Item, seed: int, known: Attribution | None = None
) -> Steps[tuple[Query, Attribution]]:
    """The query of an item and its attribution, unless that is known."""
    if known:
        return (yield restore(lm, known)), known
    check_answers(method, lm.identity.name, lm.looks_inside)
    if question.unit == "spans":
        if not item.spans:
            raise ParameterError("unit is 'spans' and the example names none; expected `spans`, or another unit.")
        question = dataclasses.replace(question, unit=sorted(span for spans in item.spans.values() for span in spans))
    asked = {"prompt": item.prompt, "target": item.target, "foil": item.foil, "sources": item.sources}
    query: Query = yield prepare(lm, dataclasses.replace(question, **asked))
    attribution: Attribution = yield attribution_of(lm, query, method, seed)
    return query.with_units(attribution.units), attribution


class Measurement(NamedTuple):
    """An item's attribution and numbers.

    Attributes:
        attribution: the attribution, or its error.
        numbers: columns or the error, by metric; empty where there is no attribution.
        seconds: wall clock of each metric; items that ran side by side get equal shares.
        attribution_seconds: wall clock of the attribution; None where it was there before.
    """

    attribution: Attribution | Exception
    numbers: dict[str, Measured | Exception]
    seconds: dict[str, float]
    attribution_seconds: float | None


def measure_block(
    lm: LanguageModel,
    method: Method,
    question: Question,
    items: Sequence[Item],
    metrics: Mapping[str, tuple[Metric, Settings]],
    *,
    seed: int,
    attributions: Mapping[int, Attribution] | None = None,
    caches: Mapping[int, dict[Hashable, Any]] | None = None,
    tick: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """The attributions and numbers of items; an item's error takes nothing from the others.

    Args:
        lm: the model.
        method: the method, in the profile already; see `in_profile`.
        question: see `question_of`.
        items: the items; item i is attributed with `seed` + its index.
        metrics: with their settings, by any name.
        seed: of the first item of the sample.
        attributions: existing attributions of the same method, by index; the other items are attributed side by side.
        caches: by index, for numbers of a prompt that do not depend on the method; see `Case.cache`.
        tick: called when an item is attributed, and when a metric of it is measured.

    Raises:
        JudgeStoppedError: a judge cannot work at all.
    """
    asked, existing = partial(attributed, lm, method, question), attributions or {}
    works = {item.index: asked(item, seed + item.index, existing.get(item.index)) for item in items}
    found, share = _timed(lm, works, tick)
    measurements: dict[int, Measurement] = {}
    cases: dict[int, Case] = {}
    for item in items:
        index, pair, att = item.index, found[item.index], existing.get(item.index)
        attribution = att or (pair if isinstance(pair, Exception) else pair[1])
        measurements[index] = Measurement(attribution, {}, {}, None if att else share)
        if not isinstance(pair, Exception):
            again = None if item.attribution else partial(_again, asked, item)
            more: dict[str, Any] = {"spans": item.spans, "gold": item.gold, "cache": (caches or {}).get(index, {})}
            cases[index] = Case(query=pair[0], att=pair[1], reattribute=again, **more)
        elif att:
            measurements[index].numbers.update(dict.fromkeys(metrics, pair))
    for name, (metric, settings) in metrics.items():
        ready = {index: dataclasses.replace(case, **vars(settings)) for index, case in cases.items()}
        numbers, share = _measured(lm, metric, ready, tick)
        for index, columns in numbers.items():
            measurements[index].numbers[name], measurements[index].seconds[name] = columns, share
    return [measurements[item.index] for item in items]


def _again(asked: Callable[[Item, int], Steps[tuple[Query, Attribution]]], item: Item, seed: int) -> Steps[Attribution]:
    return (yield asked(item, seed))[1]


def _timed(
    lm: LanguageModel, works: Mapping[int, Steps[T]], tick: Callable[[], None]
) -> tuple[dict[int, T | Exception], float]:
    """The result or the error of every generator, by shared passes, and the seconds of each, in equal shares."""
    started, indices, outcomes = time.perf_counter(), list(works), dict[int, T | Exception]()
    for number, outcome in Engine(lm).run(works.values()):
        outcomes[indices[number]] = outcome
        tick()
    return outcomes, (time.perf_counter() - started) / max(1, len(works))


def _measured(
    lm: LanguageModel, metric: Metric, cases: Mapping[int, Case], tick: Callable[[], None]
) -> tuple[dict[int, Measured | Exception], float]:
    """The columns of every case, or its error, and the seconds of each."""
    with warnings.catch_warnings(action="ignore"):
        if metric.measure_all is None or not cases:
            return _timed(lm, {index: measured(case, metric) for index, case in cases.items()}, tick)
        started = time.perf_counter()
        try:
            columns = metric.measure_all(list(cases.values()))
        except JudgeStoppedError:
            raise
        except Exception as error:  # it took them together, so they fail together
            columns = [error] * len(cases)
        return dict(zip(cases, columns, strict=True)), (time.perf_counter() - started) / len(cases)


def says(lm: LanguageModel, prompt: Prompt, answer: str) -> bool:
    """Whether every token of the answer is the model's greedy choice."""
    query = run_one(lm, prepare(lm, Question(prompt=prompt, target=answer)))
    return all(target.rank == 1 for target in query.targets)
