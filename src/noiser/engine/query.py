"""A question made concrete on a model: token ids, units, targets as positions, and what the model says unperturbed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from noiser.engine.baselines import baseline_row
from noiser.engine.scores import Read, ScoreName, score_of
from noiser.errors import NoiserError, PromptError, TargetError
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.packing import Context
from noiser.question import Objective, Question
from noiser.text import (
    Encoding,
    as_prompt,
    encode_target,
    extend,
    find_sources,
    make_target_spans,
    make_units,
    token_texts,
)
from noiser.types import ModelIdentity, Prompt, Source, Span

T = TypeVar("T")


class Request:
    """Something that an engine answers."""


Steps = Generator[Request, Any, T]
"""A question, method or metric at work: yields requests, is sent their answers, returns its result."""


@dataclass(frozen=True, eq=False)
class Prefill(Request):
    """The request to run a clean sequence up to its end; answered by logits [positions, vocab], float32.

    Attributes:
        context: the sequence.
        positions: whose logits are wanted.
        tokens: for each of them the ids whose probabilities must be exact, where a server does not send all.
    """

    context: Context
    positions: Sequence[int]
    tokens: Sequence[tuple[int, ...]] = ()


@dataclass
class Spent:
    """Work so far on a query, its clean sequence apart.

    Attributes:
        token_forwards: tokens that have been run; a backward pass counts as much as a forward pass.
        passes: forward and backward passes.
    """

    token_forwards: int = 0
    passes: int = 0

    def add(self, tokens: int, passes: int = 1) -> None:
        """Counts passes over so many tokens each."""
        self.token_forwards += tokens * passes
        self.passes += passes


class CleanStats(NamedTuple):
    """Probability and rank (1 for the most probable) of every target, and of the foil.

    Of a span the geometric mean of its tokens' probabilities, and the largest of their ranks.
    """

    probabilities: list[float]
    ranks: list[int]
    foil_probability: float | None
    foil_rank: int | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """One attribution's question, in tokens.

    Attributes:
        prompt: the prompt as it was passed.
        encoding: the prompt and the continuation that stands before the last target.
        prompt_tokens: how many of its tokens are the prompt.
        prompt_length: how many characters of its text are the prompt.
        target_ids: token ids whose probabilities are explained, in order.
        logit_positions: for each of these tokens, the position whose logits predict it.
        target_spans: for each target the indices of its tokens in `target_ids`.
        target_unit: name of that segmentation: "token", "word", "sentence", "all" or "spans".
        target_texts: the targets as text.
        units: the parts of the input that get a score.
        unit: name of the segmentation, or "spans".
        foil_id: token id that the (only) target, a token, is contrasted with, or None.
        sources: documents in the prompt.
        of: the number that is explained, in place of the targets' probabilities; or None.
        model: the model that is asked.
        context: the clean sequence and what is cached of it.
        clean: [tokens, vocab], log-probabilities at the targets' tokens without a change, float32.
        baseline: from a baseline's name to its row of the embedding table, [dim].
        spent: the work so far, of all queries that were made from this one.
    """

    prompt: Prompt
    encoding: Encoding
    prompt_tokens: int
    prompt_length: int
    target_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    target_spans: tuple[tuple[int, ...], ...]
    target_unit: str
    target_texts: tuple[str, ...]
    units: tuple[Span, ...]
    unit: str
    foil_id: int | None = None
    sources: tuple[Source, ...] = ()
    of: Objective | None = None
    model: ModelIdentity
    context: Context = field(repr=False)
    clean: Float[Tensor, "tokens vocab"] = field(repr=False)
    baseline: Callable[[str], Tensor] = field(repr=False)
    spent: Spent = field(default_factory=Spent)

    @property
    def device(self) -> torch.device:
        """Where embeddings are."""
        return self.context.inputs.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings that the model reads."""
        return self.context.inputs.dtype

    @property
    def embedding_dim(self) -> int:
        """Length of a row of the embedding table."""
        return self.context.inputs.shape[1]

    @cached_property
    def token_ids(self) -> Int[Tensor, " length"]:
        """Everything that the model reads, on the CPU."""
        return torch.tensor(self.encoding.token_ids)

    @cached_property
    def target_rows(self) -> list[tuple[int, ...]]:
        """For each target, the positions whose logits predict its tokens."""
        return [tuple(self.logit_positions[token] for token in span) for span in self.target_spans]

    @cached_property
    def ids(self) -> list[Int[Tensor, " tokens"]]:
        """For each target, the ids of its tokens, on the device."""
        return [torch.tensor([self.target_ids[i] for i in span], device=self.device) for span in self.target_spans]

    @cached_property
    def clean_of(self) -> list[Float[Tensor, "tokens vocab"]]:
        """For each target, the clean log-probabilities at its tokens."""
        return [self.clean[span[0] : span[-1] + 1] for span in self.target_spans]

    @cached_property
    def sources_stop(self) -> int:
        """The position after the last source, at most the one that predicts the continuation; 0 without sources."""
        end = max((source.end for source in self.sources), default=0)
        inside = sum(start < end for start, _ in self.encoding.offsets[: self.prompt_tokens - 1])
        return inside if self.sources else 0

    @cached_property
    def causal_mask(self) -> Bool[Tensor, "targets units"]:
        """Whether all of a unit stands before all of a target, so that it can have a score for it."""
        last = torch.tensor([max(unit.token_indices) for unit in self.units], device="cpu")
        return last <= torch.tensor([rows[:1] for rows in self.target_rows], device="cpu")

    @cached_property
    def targets_per_unit(self) -> list[tuple[int, ...]]:
        """For each unit, the indices of the targets that it stands before."""
        return [tuple(g for g, seen in enumerate(column) if seen) for column in self.causal_mask.T.tolist()]

    @property
    def skipped_ids(self) -> list[tuple[int, ...]]:
        """For each target, the continuation's tokens between the target before and this one."""
        starts = [self.prompt_tokens, *(rows[-1] + 2 for rows in self.target_rows)]
        rows = zip(starts, self.target_rows, strict=False)
        return [self.encoding.token_ids[start : positions[0] + 1] for start, positions in rows]

    def tokens_of(self, targets: Sequence[int] | None) -> list[tuple[int, ...]]:
        """For each token of some targets (None: all) the ids that a score reads: its own, and the foil's."""
        foil = () if self.foil_id is None else (self.foil_id,)
        spans = [self.target_spans[g] for g in (range(len(self.target_spans)) if targets is None else targets)]
        return [(self.target_ids[token], *foil) for span in spans for token in span]

    def score(self, name: ScoreName) -> Read:
        """The score by name, of the target against its foil if there is one, or the query's own number."""
        return score_of(name, self.foil_id, self.of)

    def read_clean(self, read: Read) -> Float[Tensor, "targets ..."]:
        """A score without any change, float64 on the CPU."""
        values = [read(clean[None], clean, ids)[0] for clean, ids in zip(self.clean_of, self.ids, strict=True)]
        return torch.stack(values).double().cpu()

    def stats(self) -> CleanStats:
        """The model's own view of targets and foil, as plain numbers."""
        probabilities = self.read_clean(score_of("prob")).tolist()
        ranks = [
            1 + int((log_p > log_p.gather(-1, ids[:, None])).sum(-1).max())
            for log_p, ids in zip(self.clean_of, self.ids, strict=True)
        ]
        if self.foil_id is None:
            return CleanStats(probabilities, ranks, None, None)
        foil = self.clean[0, self.foil_id]
        return CleanStats(probabilities, ranks, float(foil.exp()), 1 + int((self.clean[0] > foil).sum()))

    def with_units(self, units: Sequence[Span]) -> Query:
        """The same question with other units."""
        return replace(self, units=tuple(units))


def prepare(lm: LanguageModel, question: Question) -> Steps[Query]:
    """Tokenises the prompt, settles the targets and cuts the input into units.

    Where a prompt ends in a word and a target or foil begins with one, both readings are possible (`" football"` and
    `"football"`): the one whose first token the model finds more probable is taken. Units of the continuation that
    stand before no target are left out.

    Raises:
        PromptError: the prompt is empty, holds only special tokens, or exceeds the model's context or vocabulary.
        TargetError: the target or foil has no token, is outside the vocabulary, or one begins with the other.
        UnitError: spans or sources that overlap, are empty or leave their text, or target spans that cut a token.
        UnsupportedModelError: the model does not predict from embeddings what it predicts from their tokens.
    """
    lm.check_embeddings()
    question = replace(question, prompt=as_prompt(lm.tokenizer, question.prompt))
    encoding = lm.encode(question.prompt)
    prompt_tokens = len(encoding.token_ids)
    check_length(lm, prompt_tokens)
    _check_vocabulary(lm, "The prompt", encoding.token_ids, PromptError)
    documents = () if question.sources is None else find_sources(encoding, question.sources, question.sources_begin)
    if question.target is None:
        check_length(lm, prompt_tokens + question.max_new_tokens - 1)
    if question.foil is not None and question.target_unit != "token":
        raise TargetError("A foil needs target_unit='token': the first token in which both differ is explained.")
    targets = _readings(lm, encoding, question.target, "target")
    foils = _readings(lm, encoding, question.foil, "foil")
    ahead = targets[0] if len(targets) == 1 else ()  # there is one reading: it runs with the prompt
    check_length(lm, prompt_tokens + max(0, len(ahead) - 1))
    context = lm.context((*encoding.token_ids, *ahead[:-1]))
    exact = [tuple(ids[0] for ids in (*targets, *foils)), *((token,) for token in ahead[1:])]
    logits = yield Prefill(context, range(prompt_tokens - 1, len(context.inputs)), exact)
    row = logits[0]
    check_finite(row.softmax(-1), lm.dtype)
    if question.target is None:
        ids, logits = yield from _greedy(lm, context, row, question)
    else:
        ids = _likeliest(targets, row)
    first, foil_id = 0, None
    if question.foil is not None:
        ids, first, foil_id = _first_difference(lm, ids, _likeliest(foils, row))
    check_length(lm, prompt_tokens + len(ids) - 1)

    spans = make_target_spans(extend(lm.tokenizer, encoding, ids), prompt_tokens + first, question.target_unit)
    ids = ids[: spans[-1][-1] + 1 - prompt_tokens]  # nothing is asked about the rest
    if (missing := len(ids) - len(logits)) > 0:
        context.extend(lm.context(ids[-1 - missing : -1]).inputs)
        after = range(prompt_tokens + len(logits) - 1, prompt_tokens + len(ids) - 1)
        more = yield Prefill(context, after, [(token,) for token in ids[len(logits) :]])
        logits = torch.cat([logits, more])
    whole = extend(lm.tokenizer, encoding, ids[:-1])
    units = make_units(
        whole,
        question.unit,
        special_tokens=question.special_tokens or "frozen",
        prompt_tokens=prompt_tokens,
        sources=documents,
    )
    end = spans[-1][0] if question.continuation_units else prompt_tokens
    return query_of(
        lm,
        question.prompt,
        encoding,
        ids,
        spans,
        context=context,
        logits=logits,
        target_unit=question.target_unit if isinstance(question.target_unit, str) else "spans",
        foil_id=foil_id,
        units=tuple(u for u in units if max(u.token_indices) < end or u.token_indices[0] < prompt_tokens),
        unit=question.unit if isinstance(question.unit, str) else "spans",
        sources=documents,
        of=question.of,
    )


def query_of(
    lm: LanguageModel,
    prompt: Prompt,
    encoding: Encoding,
    ids: tuple[int, ...],
    spans: Sequence[Sequence[int]],
    *,
    logits: Float[Tensor, "tokens vocab"],
    **fields: Any,
) -> Query:
    """The query about some of a continuation's tokens.

    Args:
        lm: the model to ask.
        prompt: as it was passed.
        encoding: of the prompt alone.
        ids: the continuation, up to the last token that is explained.
        spans: for each target the positions of its tokens, counted from the beginning of the prompt.
        logits: of the whole continuation's tokens.
        fields: the fields of the query that do not follow from these.
    """
    prompt_tokens = len(encoding.token_ids)
    positions = [position for span in spans for position in span]
    numbers = itertools.count()
    clean = logits[[position - prompt_tokens for position in positions]].log_softmax(-1)
    check_finite(clean, lm.dtype)
    complete = extend(lm.tokenizer, encoding, ids)
    return Query(
        prompt=prompt,
        encoding=extend(lm.tokenizer, encoding, ids[:-1]),
        prompt_tokens=prompt_tokens,
        prompt_length=len(encoding.text),
        target_ids=tuple(ids[position - prompt_tokens] for position in positions),
        logit_positions=tuple(position - 1 for position in positions),
        target_spans=tuple(tuple(itertools.islice(numbers, len(span))) for span in spans),
        target_texts=_target_texts(lm, complete, prompt_tokens, spans),
        model=lm.identity,
        clean=clean,
        baseline=cache(partial(baseline_row, lm)),
        **fields,
    )


def _greedy(
    lm: LanguageModel, context: Context, row: Float[Tensor, " vocab"], question: Question
) -> Steps[tuple[tuple[int, ...], Tensor]]:
    """The most probable next tokens, one after the other, and the logits [tokens, vocab] that they are taken from.

    An end-of-sequence token is left out, unless it is the very first one; so is the token that completes the text
    `stop`, such as an empty line, with which the continuation ends.
    """
    ids: list[int] = []
    rows: list[Tensor] = []
    while True:
        check_finite(row.softmax(-1), lm.dtype)
        token = int(row.argmax())
        if ids and token in lm.end_tokens:
            break
        stop = question.stop
        if stop and ids and stop in lm.tokenizer.decode([*ids[1:][-len(stop) :], token]):
            break
        ids.append(token)
        rows.append(row)
        if token in lm.end_tokens or len(ids) == question.max_new_tokens:
            break
        context.extend(lm.context([token]).inputs)
        (row,) = yield Prefill(context, [len(context.inputs) - 1])
    return tuple(ids), torch.stack(rows)


def _target_texts(
    lm: LanguageModel, encoding: Encoding, prompt_tokens: int, spans: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Target spans as text: a single token as `token_texts` has it, several as the continuation reads there."""
    tokens = token_texts(lm.tokenizer, encoding.token_ids[prompt_tokens:])
    ends = [(encoding.offsets[span[0]][0], max(encoding.offsets[position][1] for position in span)) for span in spans]
    return tuple(
        tokens[span[0] - prompt_tokens] if len(span) == 1 else encoding.text[start:end]
        for span, (start, end) in zip(spans, ends, strict=True)
    )


def check_length(lm: LanguageModel, length: int) -> None:
    """Raises PromptError when the model cannot read that many tokens."""
    limit = lm.context_length
    if limit is not None and length > limit:
        raise PromptError(
            f"The prompt and its continuation have {length} tokens; {lm.identity.name} can read {limit}. "
            "Shorten the prompt or ask for fewer targets."
        )


def _check_vocabulary(lm: LanguageModel, name: str, ids: Iterable[int], error: type[NoiserError]) -> None:
    for token in (token for token in ids if token >= lm.vocabulary_size):
        (text,) = token_texts(lm.tokenizer, (token,))
        raise error(
            f"{name} has the token {text!r}, id {token}; expected ids below {lm.vocabulary_size}, the rows of the "
            "model's embedding table. Load the tokenizer that belongs to the model."
        )


def _readings(lm: LanguageModel, encoding: Encoding, wanted: str | int | None, role: str) -> list[tuple[int, ...]]:
    """The tokens of a target or foil; two readings where a space may stand before its text."""
    if wanted is None:
        return []
    if isinstance(wanted, bool) or not isinstance(wanted, str | int):
        raise TargetError(f"The {role} is a {type(wanted).__name__}; expected a text or a token id.")
    if isinstance(wanted, int):
        size = lm.vocabulary_size
        if not 0 <= wanted < size:
            raise TargetError(f"The {role} is token id {wanted}; expected 0 to {size - 1}, the model's vocabulary.")
        return [(wanted,)]
    if not wanted:
        raise TargetError(f"The {role} {wanted!r} has no tokens; expected a text that follows the prompt.")
    readings = [encode_target(lm.tokenizer, encoding, wanted, context_length=lm.context_length)]
    if not wanted[0].isspace() and not encoding.text[-1:].isspace():
        readings.append(encode_target(lm.tokenizer, encoding, " " + wanted, context_length=lm.context_length))
    for reading in readings:
        _check_vocabulary(lm, f"The {role}", reading, TargetError)
    return readings


def _likeliest(readings: Sequence[tuple[int, ...]], row: Float[Tensor, " vocab"]) -> tuple[int, ...]:
    """The reading whose first token is most probable after the prompt."""
    return max(readings, key=lambda reading: float(row[reading[0]]))


def _first_difference(
    lm: LanguageModel, ids: tuple[int, ...], other: tuple[int, ...]
) -> tuple[tuple[int, ...], int, int]:
    """Target ids up to the first token in which target and foil differ, its index, and the foil's token there."""
    texts = [token_texts(lm.tokenizer, each) for each in (ids, other)]
    if ids == other:
        raise TargetError(f"Target and foil are the same tokens, {texts[0]}; expected a foil that differs.")
    shared = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
    if shared is None:
        longer, shorter = ("foil", "target") if len(other) > len(ids) else ("target", "foil")
        raise TargetError(
            f"The {longer} begins with the {shorter}, {min(texts, key=len)}; expected two that differ at some token. "
            f"Give a longer {shorter}, or with target=None a larger max_new_tokens."
        )
    return ids[: shared + 1], shared, other[shared]
