"""References that every method must beat: they never run the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Query
from noiser.methods.protocol import Scores
from noiser.text import sentence_spans


@dataclass(frozen=True, kw_only=True)
class Random:
    """Softmax of independent U(0, 1) numbers over the units before each target."""

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float32)
        for row, seen in zip(scores, query.causal_mask, strict=True):
            numbers = torch.rand(int(seen.sum()), generator=rng, dtype=torch.float32)
            row[seen] = numbers.softmax(0)
        return Scores(scores=scores)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Score 1 for every unit: what a metric gives to the number of units alone."""

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        ones = torch.ones_like(query.causal_mask, dtype=torch.float32)
        return Scores(scores=_seen(query, ones))


@dataclass(frozen=True, kw_only=True)
class Position:
    """Scores 1, 2, ..., n by position in the text.

    On short prompts they come close to the scores of other methods.
    """

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        return Scores(scores=_seen(query, query.causal_mask.float().cumsum(-1)))


@dataclass(frozen=True, kw_only=True)
class Length:
    """The number of characters of each unit."""

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        lengths = [float(len(unit.text)) for unit in query.units]
        row = torch.tensor(lengths, dtype=torch.float32, device="cpu")
        return Scores(scores=_seen(query, row.expand(query.causal_mask.shape)))


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Word overlap: the cosine of each unit's TF-IDF vector with that of question and target.

    Vectors are made as by scikit-learn's `TfidfVectorizer` with its defaults, fitted to the units
    before the target and to the text of question and target. Words have at least two letters or
    digits; upper and lower case are the same. A unit without such a word has the score 0.
    `question_of` says what the question is.
    """

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG002
        question = question_of(query)
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float32)
        for row, seen, target in zip(scores, query.causal_mask, query.target_texts, strict=True):
            units = [unit.text for unit, before in zip(query.units, seen, strict=True) if before]
            row[seen] = word_overlap(units, f"{question} {target}")
        return Scores(scores=scores)


def question_of(query: Query) -> str:
    """The part of the prompt that asks.

    In a prompt with sources it is the text after the last source, or the text before the first one
    if nothing follows. In another prompt it is the last sentence, and the one before it if that one
    ends with a question mark, as in "Where is the lute? Answer: in the". In a chat without sources
    only the last message is read.
    """
    prompt = query.encoding.text[: query.prompt_length]
    if query.sources:
        first = min(source.start for source in query.sources if source.text)
        last = max(source.end for source in query.sources)
        return prompt[last:].strip() or prompt[:first].strip()
    if query.encoding.contents:
        _, start, end = query.encoding.contents[-1]
        prompt = prompt[start:end]
    sentences = [prompt[start:end].strip() for start, end in sentence_spans(prompt)]
    asks = len(sentences) > 1 and sentences[-2].endswith("?")
    return " ".join(sentences[-2:] if asks else sentences[-1:])


def word_overlap(units: Sequence[str], said: str) -> Float[Tensor, " units"]:
    """The cosine of each unit's TF-IDF vector with the vector of question and target."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [*units, said]
    vectorizer: Any = TfidfVectorizer()
    words_of = vectorizer.build_analyzer()
    if not any(words_of(text) for text in texts):  # the vectorizer refuses texts without any word
        return torch.zeros(len(units), dtype=torch.float32, device="cpu")
    vectors = vectorizer.fit_transform(texts).toarray()  # rows have length 1, or 0 without words
    cosines = vectors[:-1] @ vectors[-1]
    return torch.tensor(cosines.tolist(), dtype=torch.float32, device="cpu")


def _seen(query: Query, scores: Float[Tensor, "targets units"]) -> Float[Tensor, "targets units"]:
    """The scores, with NaN where a unit does not stand before the target."""
    return scores.masked_fill(~query.causal_mask, torch.nan)
