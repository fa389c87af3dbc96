"""Inputs of an evaluation: prompts, chats, attributions, records of a data set."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from noiser.attribution import Attribution
from noiser.errors import ParameterError
from noiser.types import Prompt, Sources


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One thing to evaluate.

    Attributes:
        index: its position among the examples.
        prompt: the prompt; of an attribution, the one that it was made from.
        target, foil: what to explain, and rather than what; see `noiser.attribute`.
        gold: the answer that a data set gives; None for the model's own.
        spans: named character spans, for localisation.
        sources: documents in the prompt; see `noiser.attribute`.
        without: prompts that lack parts that decide the gold answer, where a data set names these parts.
        attribution: the attribution, if it is there already.
        of_method: whether it is the evaluated method's, which can then make it again.
        cache: for numbers of a prompt that do not depend on the method; see `noiser.metrics.Case`.
        id, category: its name and its category in a data set.
    """

    index: int
    prompt: Prompt
    target: str | int | None = None
    foil: str | int | None = None
    gold: str | None = None
    spans: Mapping[str, Sequence[tuple[int, int]]] | None = None
    sources: Sources | None = None
    without: tuple[str, ...] = ()
    attribution: Attribution | None = None
    of_method: bool = False
    cache: dict[Hashable, Any] = field(default_factory=dict[Hashable, Any])
    id: str = ""
    category: str = ""


class Skipped(NamedTuple):
    """Something that could not be measured.

    Attributes:
        example: index of the example.
        prompt: its prompt.
        metric: the metric that is missing; None when the prompt could not be attributed, so that all are.
        error: why, with the type of the error.
    """

    example: int
    prompt: Prompt
    metric: str | None
    error: str


def read_examples(examples: Any) -> list[Item]:
    """Items out of one example or several; see `noiser.evaluate`. Raises ParameterError for something else, or none."""
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
        got = f"Example {index} is a {type(example).__name__}"
        raise ParameterError(f"{got}; expected a text, a chat, an attribution or a `prompt` in it.")
    gold = given.get("target")
    return Item(index=index, gold=gold if isinstance(gold, str) else None, **given)
