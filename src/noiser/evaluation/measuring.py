"""Examples, and the steps that attribute and measure them, which `noiser.evaluate` and benchmarks share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast, get_args

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import Engine, Query, Steps, prepare, restore, run_one
from noiser.errors import ParameterError
from noiser.explain.attribute import attribution_of
from noiser.methods import Method, check_answers
from noiser.metrics import Case, Metric, Settings, measured
from noiser.metrics.answerability import JudgeStoppedError
from noiser.metrics.metric import Measured
from noiser.model import LanguageModel
from noiser.types import AutoUnit, Profile, Prompt, Question, Sources, SpanUnit, TargetUnitName, UnitName

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One thing to evaluate."""

    index: int  # its position among the examples
    prompt: Prompt
    target: str | int | None = None
    foil: str | int | None = None
    gold: str | None = None  # the answer that a data set gives; None for the model's own
    spans: Mapping[str, Sequence[tuple[int, int]]] | None = None  # named character spans, for localisation
    sources: Sources | None = None
    without: tuple[str, ...] = ()  # prompts that lack parts that decide the gold answer, where a data set has them
    attribution: Attribution | None = None  # if it is there already
    of_method: bool = False  # whether the attribution is the evaluated method's, which can then make it again
    cache: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])  # see `noiser.metrics.Case`
    id: str = ""
    category: str = ""


class Skipped(NamedTuple):
    """Something that could not be measured: the example's index and prompt, the metric (None: all), and the error."""

    example: int
    prompt: Prompt
    metric: str | None
    error: str


def read_examples(examples: Any) -> list[Item]:
    """Items out of one example or several; see `noiser.evaluate`."""
    if hasattr(examples, "iterrows"):  # a table of pandas, whose empty cells say nothing
        examples = examples.astype(object).where(examples.notna(), None).to_dict("records")
    single = "prompt" in examples if isinstance(examples, Mapping) else hasattr(examples, "prompt")
    if single or isinstance(examples, str | Attribution) or _is_chat(examples):
        return [item_of(0, examples)]
    if not isinstance(examples, Iterable) or isinstance(examples, Mapping | bytes):
        kind = type(examples).__name__
        raise ParameterError(f"The examples are a {kind}; expected texts, chats, attributions or a `prompt` in each.")
    items = [item_of(index, example) for index, example in enumerate(cast("Iterable[object]", examples))]
    if not items:
        raise ParameterError("There is no example; expected at least one text, chat or attribution.")
    return items


def _is_chat(example: object) -> bool:
    messages: list[Any] = list(cast("Sequence[Any]", example)) if isinstance(example, list | tuple) else []
    return bool(messages) and all(isinstance(message, Mapping) and "role" in message for message in messages)


def item_of(index: int, example: Any) -> Item:
    """The item of one example; see `noiser.evaluate`."""
    if isinstance(example, Attribution):
        return Item(index=index, prompt=example.prompt, attribution=example)
    if isinstance(example, str) or _is_chat(example):
        return Item(index=index, prompt=example)
    names = ("prompt", "target", "foil", "spans", "sources", "without", "id", "category")
    read: Any = dict(cast("Any", example)).get if isinstance(example, Mapping) else partial(getattr, example)
    given = {name: value for name in names if (value := read(name, None)) is not None}
    if "prompt" not in given:
        expected = "expected a text, a chat, an attribution or a `prompt` in it"
        raise ParameterError(f"Example {index} is a {type(example).__name__}; {expected}.")
    gold = given.get("target")
    return Item(index=index, gold=gold if isinstance(gold, str) else None, **given)


def in_profile(method: Method, profile: Profile) -> Method:
    """The method in the authors' profile, if it has one."""
    if profile != "authors" or not is_dataclass(method) or not hasattr(method, "profile"):
        return method
    return replace(method, profile=profile)


def question_of(method: Method, profile: Profile, unit: Any, max_new_tokens: int, target_unit: Any) -> Question:
    """The question about every item, which lacks the prompt; in the authors' profile special tokens are scored."""
    if isinstance(unit, str):
        check_choice("unit", unit, (*get_args(UnitName), *get_args(AutoUnit), *get_args(SpanUnit)))
    if isinstance(target_unit, str):
        check_choice("target_unit", target_unit, get_args(TargetUnitName))
    special = "perturbed" if profile == "authors" else getattr(method, "special_tokens", None)
    asked: dict[str, Any] = {"unit": unit, "max_new_tokens": max_new_tokens, "target_unit": target_unit}
    return Question(prompt="", special_tokens=special, **asked)


def attributed(
    lm: LanguageModel, method: Method, question: Question, item: Item, seed: int
) -> Steps[tuple[Query, Attribution]]:
    """The query of an item and its attribution, made unless it is there already."""
    if item.attribution:
        return (yield restore(lm, item.attribution)), item.attribution
    check_answers(method, lm.identity.name, lm.looks_inside)
    if question.unit == "spans":
        if not item.spans:
            raise ParameterError("unit is 'spans' and the example names none; expected `spans`, or another unit.")
        question = replace(question, unit=sorted(span for spans in item.spans.values() for span in spans))
    asked = {name: getattr(item, name) for name in ("prompt", "target", "foil", "sources")}
    query: Query = yield prepare(lm, replace(question, **asked))
    attribution: Attribution = yield attribution_of(lm, query, method, seed)
    return query.with_units(attribution.units), attribution


class Measurement(NamedTuple):
    """An item's attribution and numbers, with seconds of wall clock: equal shares for items that ran side by side."""

    attribution: Attribution | Exception
    numbers: dict[str, Measured | Exception]  # by metric; empty where there is no attribution
    seconds: dict[str, float]  # by metric
    attribution_seconds: float | None  # None where it was there before


def measure_block(
    lm: LanguageModel,
    method: Method,
    question: Question,
    items: Sequence[Item],
    metrics: Mapping[str, tuple[Metric, Settings]],
    *,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """The attributions and numbers of items; an item's error takes nothing from the others.

    Args:
        lm: the model.
        method: the method, in the profile already; see `in_profile`.
        question: see `question_of`; with unit "spans" an item's named spans are its units.
        items: the items, attributed side by side; item i with `seed` + its index.
        metrics: with their settings, by any name.
        seed: of the first item of the sample.
        tick: called when an item is attributed, and when a metric of it is measured.
    """
    asked = partial(attributed, lm, method, question)
    found, share = _timed(lm, [asked(item, seed + item.index) for item in items], tick)
    measurements: list[Measurement] = []
    cases: list[Case] = []
    for item, pair in zip(items, found, strict=True):
        known, seconds = item.attribution, None if item.attribution else share
        if isinstance(pair, Exception):
            numbers = dict[str, Measured | Exception](dict.fromkeys(metrics, pair) if known else {})
            measurements.append(Measurement(known or pair, numbers, {}, seconds))
        else:
            measurements.append(Measurement(pair[1], {}, {}, seconds))
            again = None if known and not item.of_method else partial(_again, asked, item)
            more: dict[str, Any] = {"spans": item.spans, "gold": item.gold, "cache": item.cache}
            cases.append(Case(query=pair[0], att=pair[1], reattribute=again, **more))
    whole = [one for one, pair in zip(measurements, found, strict=True) if not isinstance(pair, Exception)]
    for name, (metric, settings) in metrics.items():
        columns, share = _measured(lm, metric, [replace(case, **vars(settings)) for case in cases], tick)
        for one, measured_columns in zip(whole, columns, strict=True):
            one.numbers[name], one.seconds[name] = measured_columns, share
    return measurements


def _again(asked: Callable[[Item, int], Steps[tuple[Query, Attribution]]], item: Item, seed: int) -> Steps[Attribution]:
    return (yield asked(replace(item, attribution=None), seed))[1]


def _timed(lm: LanguageModel, works: Sequence[Steps[T]], tick: Callable[[], None]) -> tuple[list[T | Exception], float]:
    """The result or the error of every generator, by shared passes, and the seconds of each, in equal shares."""
    started, outcomes = time.perf_counter(), dict[int, T | Exception]()
    for number, outcome in Engine(lm).run(works):
        outcomes[number] = outcome
        tick()
    return [outcomes[number] for number in range(len(works))], (time.perf_counter() - started) / max(1, len(works))


def _measured(
    lm: LanguageModel, metric: Metric, cases: Sequence[Case], tick: Callable[[], None]
) -> tuple[list[Measured | Exception], float]:
    """The columns of every case, or its error, and the seconds of each."""
    with warnings.catch_warnings(action="ignore"):
        if metric.measure_all is None or not cases:
            return _timed(lm, [measured(case, metric) for case in cases], tick)
        started, columns = time.perf_counter(), list[Measured | Exception]()
        try:
            columns += metric.measure_all(cases)
        except JudgeStoppedError:
            raise
        except Exception as error:  # it took them together, so they fail together
            columns += [error] * len(cases)
        return columns, (time.perf_counter() - started) / len(cases)


def says(lm: LanguageModel, prompt: Prompt, answer: str) -> bool:
    """Whether every token of the answer is the model's greedy choice."""
    query = run_one(lm, prepare(lm, Question(prompt=prompt, target=answer)))
    return all(target.rank == 1 for target in query.targets)
