"""Whether the label of a planted prompt is true of a model: what the model says of it and of
prompts that lack parts.

Texts are written anew without the parts (`Example.without`, `Example.enough`), so that no way of
removal is trusted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import noiser
from noiser.data import Example
from noiser.model import LanguageModel
from planted_prompts import places_of, sources_of

MOVED = 1.0
"""Nats by which documents that do not matter may change the answer's log-probability."""

Pair = tuple[str, Any]  # a prompt and an answer

WRITTEN = 4
"""Tokens of an answer that no document has."""


def is_what_it_says(lm: LanguageModel, example: Example) -> bool:
    """Whether the label is true of the model; see `faults`."""
    return not faults(lm, [example])[0]


def faults(lm: LanguageModel, examples: Sequence[Example]) -> list[str]:
    """For each example the reason why its label is not true of the model, or "".

    "answer": the model does not give the answer. "without": it still does in a prompt that lacks
    what decides. "enough": it does not in a prompt that lacks only what is not needed, such as one
    of two copies. "moved": documents that do not matter change the answer's log-probability by
    `MOVED` nats. "said": where the answer is in no document (without a target), the model's own
    answer has a word that only documents have, or no word.
    """
    asked = [(e.prompt, e.target) for e in examples if e.target is not None]
    given = _known(lm, asked)
    right = [e for e in examples if given.get((e.prompt, e.target), (False, 0.0))[0]]
    given |= _known(lm, [(other, e.target) for e in right for other in (*e.without, *e.enough)])

    def fault(example: Example) -> str:
        if example.target is None:
            return "said" if says_a_documents_word(example, written[example.id]) else ""
        said, log_p = given[example.prompt, example.target]
        if not said:
            return "answer"
        if any(given[other, example.target][0] for other in example.without):
            return "without"
        left = [given[other, example.target] for other in example.enough]
        if not all(said for said, _ in left):
            return "enough"
        matter = bool(example.spans["gold"])
        return "" if matter or all(abs(log_p - p) < MOVED for _, p in left) else "moved"

    written = answers(lm, [example for example in examples if example.target is None])
    return [fault(example) for example in examples]


def _known(lm: LanguageModel, pairs: Sequence[Pair]) -> dict[Pair, tuple[bool, float]]:
    """What `_read` says of each different pair."""
    different = list(dict.fromkeys(pairs))
    return dict(zip(different, _read(lm, different), strict=True))


def _read(lm: LanguageModel, pairs: Sequence[Pair]) -> list[tuple[bool, float]]:
    """For each prompt and answer: whether all its tokens are the greedy choice, and its
    log-probability.
    """
    if not pairs:
        return []
    prompts, targets = [prompt for prompt, _ in pairs], [target for _, target in pairs]
    options: Any = {"target": targets, "target_unit": "all", "method": "constant"}
    found: list[tuple[bool, float]] = []
    for att in noiser.attribute(lm, prompts, **{"unit": "token"} | options):
        (answer,) = att.targets
        log_probability = (1 + len(answer.rest)) * math.log(max(answer.probability, 1e-300))
        found.append((answer.rank == 1, log_probability))
    return found


def answers(lm: LanguageModel, examples: Sequence[Example]) -> dict[str, str]:
    """By ids, what the model writes."""
    if not examples:
        return {}
    options: Any = {"max_new_tokens": WRITTEN, "target_unit": "all", "method": "constant"}
    atts = noiser.attribute(
        lm, [example.prompt for example in examples], **{"unit": "token"} | options
    )
    pairs = zip(examples, atts, strict=True)
    return {example.id: att.targets[0].text for example, att in pairs}


def says_a_documents_word(example: Example, answer: str) -> bool:
    """Whether an answer has a word that documents have and the question has not; or no word at
    all.
    """
    documents = words(" ".join(sources_of(example)))
    _, end_of_documents = places_of(example)[-1]
    question = words(example.prompt[end_of_documents:])
    said = words(answer)
    return not said or bool(said & (documents - question))


def words(text: str) -> set[str]:
    """Words of at least three letters, in lower case."""
    return set(re.findall(r"[a-z]{3,}", text.lower()))
