"""Examples, and the steps that attribute and measure them, which `noiser.evaluate` and benchmarks
share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast, get_args

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import Engine, Steps, prepare, run_one
from noiser.errors import ParameterError
from noiser.explain import restore
from noiser.explain._attribute import attribution_of
from noiser.methods import Method, check_answers
from noiser.metrics import Case, Metric, Settings, run_metric
from noiser.metrics.answerability import JudgeStoppedError
from noiser.metrics.metric import Measured
from noiser.model import LanguageModel
from noiser.notices import silenced
from noiser.types import (
    AutoUnit,
    Profile,
    Prompt,
    Question,
    Sources,
    SpanUnit,
    TargetUnitName,
    UnitName,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One thing to evaluate."""

    index: int  # its position among the examples
    prompt: Prompt
    target: str | int | None = None
    foil: str | int | None = None
    gold: str | None = None  # the answer that a data set gives; None for the model's own
    spans: Mapping[str, Sequence[tuple[int, int]]] | None = (
        None  # named character spans, for localisation
    )
    sources: Sources | None = None
    without: tuple[
        str, ...
    ] = ()  # prompts that lack parts that decide the gold answer, where a data set has them
    enough: tuple[str, ...] = ()  # prompts that lack parts without which the answer is still given
    attribution: Attribution | None = None  # if it is there already
    of_method: bool = (
        False  # whether the attribution is the evaluated method's, which can then make it again
    )
    cache: dict[Hashable, Any] = field(
        default_factory=dict[Hashable, Any]
    )  # see `noiser.metrics.Case`
    id: str = ""
    category: str = ""


class Skipped(NamedTuple):
    """Something that could not be measured: the example's index and prompt, the metric (None: all),
    and the error.
    """

    example: int
    prompt: Prompt
    metric: str | None
    error: str


def read_examples(examples: Any) -> list[Item]:
    """Items out of one example or several; see `noiser.evaluate`."""
    if hasattr(examples, "iterrows"):  # a table of pandas, whose empty cells say nothing
        examples = examples.astype(object).where(examples.notna(), None).to_dict("records")
    first = examples[0] if isinstance(examples, list | tuple) and examples else examples
    names = (
        {"role"} if first is not examples else {"prompt", "messages"}
    )  # of a message, of an example
    single = names & first.keys() if isinstance(first, Mapping) else hasattr(examples, "prompt")
    if single or isinstance(examples, str):
        return [item_of(0, examples)]
    if not isinstance(examples, Iterable) or isinstance(examples, Mapping | bytes):
        kind = type(examples).__name__
        raise ParameterError(
            f"The examples are a {kind}; expected texts, chats, attributions or a `prompt` in each."
        )
    items = [
        item_of(index, example) for index, example in enumerate(cast("Iterable[object]", examples))
    ]
    if not items:
        raise ParameterError(
            "There is no example; expected at least one text, chat or attribution."
        )
    return items


def item_of(index: int, example: Any) -> Item:
    """The item of one example; see `noiser.evaluate`."""
    if isinstance(example, Attribution):
        return Item(index=index, prompt=example.prompt, attribution=example)
    if isinstance(example, str | list | tuple) or (
        isinstance(example, Mapping) and "messages" in example
    ):
        return Item(index=index, prompt=cast("Prompt", example))
    names = ("prompt", "target", "foil", "spans", "sources", "without", "enough", "id", "category")
    read: Any = (
        dict(cast("Any", example)).get
        if isinstance(example, Mapping)
        else partial(getattr, example)
    )
    given = {name: value for name in names if (value := read(name, None)) is not None}
    if "prompt" not in given:
        expected = "expected a text, a chat, an attribution or a `prompt` in it"
        raise ParameterError(f"Example {index} is a {type(example).__name__}; {expected}.")
    gold = given.get("target")
    return Item(index=index, gold=gold if isinstance(gold, str) else None, **given)


def asked_of(
    method: Method,
    profile: Profile,
    unit: Any = "word",
    max_new_tokens: int = 1,
    target_unit: Any = "token",
) -> tuple[Method, Question]:
    """A method in its profile, and the question about every item, which lacks the prompt.

    In the authors' profile special tokens are scored, and methods that have that profile take it.
    """
    if isinstance(unit, str):
        check_choice("unit", unit, (*get_args(UnitName), *get_args(AutoUnit), *get_args(SpanUnit)))
    if isinstance(target_unit, str):
        check_choice("target_unit", target_unit, get_args(TargetUnitName))
    authors = profile == "authors"
    if authors and is_dataclass(method) and hasattr(method, "profile"):
        method = replace(method, profile=profile)
    special = "perturbed" if authors else getattr(method, "special_tokens", None)
    asked: dict[str, Any] = {
        "unit": unit,
        "max_new_tokens": max_new_tokens,
        "target_unit": target_unit,
    }
    return method, Question(prompt="", special_tokens=special, **asked)


async def case_of(
    lm: LanguageModel, method: Method, question: Question, item: Item, seed: int
) -> Case:
    """The case of an item, with its attribution, which is made unless it is there already."""

    async def again(seed: int) -> Attribution:
        return (await case_of(lm, method, question, replace(item, attribution=None), seed)).att

    if att := item.attribution:
        query = await restore(lm, att)
    else:
        check_answers(method, lm.identity.name, lm.needs_internals)
        if question.unit == "spans":
            if not item.spans:
                raise ParameterError(
                    "unit is 'spans' and the example names none; expected `spans`, or another unit."
                )
            question = replace(
                question, unit=sorted(span for spans in item.spans.values() for span in spans)
            )
        asked = {name: getattr(item, name) for name in ("prompt", "target", "foil", "sources")}
        query = await prepare(lm, replace(question, **asked))
        att = await attribution_of(lm, query, method, seed)
        query = query.with_units(att.units)
    reattribute = again if item.of_method or not item.attribution else None
    more: dict[str, Any] = {"spans": item.spans, "gold": item.gold, "cache": item.cache}
    return Case(query=query, att=att, reattribute=reattribute, **more)


class Measurement(NamedTuple):
    """An item's attribution and numbers, with seconds of wall clock: equal shares for items that
    ran side by side.
    """

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
    tick: Callable[[], object] = lambda: None,
) -> list[Measurement]:
    """The attributions and numbers of items; an item's error takes nothing from the others.

    Args:
        lm: the model.
        method: see `asked_of`.
        question: likewise; with unit "spans" an item's named spans are its units.
        items: the items, attributed side by side; item i with `seed` + its index.
        metrics: with their settings, by any name.
        seed: of the first item of the sample.
        tick: called once for the attribution of each item, and once for each metric of it.
    """
    found, share = _timed(
        lm, [case_of(lm, method, question, item, seed + item.index) for item in items], tick
    )
    measurements: list[Measurement] = []
    for item, case in zip(items, found, strict=True):
        att = item.attribution or (case.att if isinstance(case, Case) else case)
        lost = dict[str, Any](
            dict.fromkeys(metrics, case) if item.attribution and isinstance(case, Exception) else {}
        )
        measurements.append(Measurement(att, lost, {}, None if item.attribution else share))
    whole = [
        (one, case) for one, case in zip(measurements, found, strict=True) if isinstance(case, Case)
    ]
    for name, (metric, settings) in metrics.items():
        cases = [replace(case, **vars(settings)) for _, case in whole]
        with silenced():
            if metric.measure_all:
                columns, share = _together(metric.measure_all, cases)
            else:
                columns, share = _timed(
                    lm, [run_metric(case, metric, name) for case in cases], tick
                )
        for (one, _), numbers in zip(whole, columns, strict=True):
            one.numbers[name], one.seconds[name] = numbers, share
        for _ in range(len(items) - (0 if metric.measure_all else len(cases))):
            tick()
    return measurements


def _timed(
    lm: LanguageModel, works: Sequence[Steps[T]], tick: Callable[[], object]
) -> tuple[list[T | Exception], float]:
    """The result or the error of every coroutine, by shared passes, and the seconds of each, in
    equal shares.
    """
    started = time.perf_counter()
    outcomes = dict[int, T | Exception]()
    for number, outcome in Engine(lm).run(works):
        outcomes[number] = outcome
        tick()
    return [outcomes[number] for number in range(len(works))], (
        time.perf_counter() - started
    ) / max(1, len(works))


def _together(measure_all: Any, cases: Sequence[Case]) -> tuple[list[Measured | Exception], float]:
    """The columns of every case, or its error, and the seconds of each; they are judged, and so
    fail, together.
    """
    started = time.perf_counter()
    columns = list[Measured | Exception]()
    try:
        columns += measure_all(cases) if cases else ()
    except JudgeStoppedError:
        raise
    except Exception as error:
        columns += [error] * len(cases)
    return columns, (time.perf_counter() - started) / max(1, len(cases))


def says(lm: LanguageModel, prompt: Prompt, answer: str) -> bool:
    """Whether every token of the answer is the model's greedy choice."""
    query = run_one(lm, prepare(lm, Question(prompt=prompt, target=answer)))
    return all(target.rank == 1 for target in query.targets)
