"""What one attribution asks of a model: tokens, targets, foil and units."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from noiser.checks import check_count, plain
from noiser.errors import ParameterError, PromptError, TargetError
from noiser.model.clean import Continuation, Passes, greedy_continuation, run_clean, without_sharing
from noiser.model.language_model import LanguageModel, check_finite
from noiser.objectives import Objective
from noiser.text import Encoding, encode_target, extend, find_sources, make_target_spans, make_units, token_texts
from noiser.types import AutoUnit, ModelIdentity, Prompt, Source, Sources, Span, SpecialTokens, TargetUnit, Unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """One attribution's question, in tokens.

    Attributes:
        prompt: the prompt as it was given.
        encoding: the prompt and the continuation that stands before the last target.
        prompt_tokens: how many of its tokens are the prompt.
        prompt_length: how many characters of its text are the prompt.
        target_ids: token ids whose probabilities are explained, in order.
        logit_positions: for each of these tokens, the position whose logits predict it.
        target_spans: what is explained, in order: for each target the indices of its tokens in `target_ids`.
        target_unit: name of that segmentation: "token", "word", "sentence", "all" or "spans".
        foil_id: token id that the (only) target, a token, is contrasted with, or None.
        foil_branch: the same question about another continuation, which the (only) target is contrasted with, or None.
        units: what gets a score.
        unit: name of the segmentation: "token", "word", "sentence", "turn", "source", "auto" or "spans".
        target_texts: the targets as text.
        model: the model that is asked.
        embedding_dim: length of a row of its embedding table.
        dtype: of the embeddings that the model reads.
        device: where they are.
        sources: documents in the prompt.
        of: the number that is explained, in place of the targets' probabilities; or None.
        continuation: the run that found the targets, if they are the greedy continuation; the engine goes on from it.
    """

    prompt: Prompt
    encoding: Encoding
    prompt_tokens: int
    prompt_length: int
    target_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    target_spans: tuple[tuple[int, ...], ...]
    target_unit: str
    units: tuple[Span, ...]
    unit: str
    target_texts: tuple[str, ...]
    model: ModelIdentity
    embedding_dim: int
    dtype: torch.dtype
    device: torch.device
    foil_id: int | None = None
    sources: tuple[Source, ...] = ()
    continuation: Continuation | None = field(default=None, repr=False)
    foil_branch: Query | None = None
    of: Objective | None = None

    @property
    def foil_ids(self) -> tuple[int, ...]:
        """The foil's tokens; none without a foil."""
        if self.foil_branch is not None:
            return self.foil_branch.target_ids
        return () if self.foil_id is None else (self.foil_id,)

    def without_foil(self) -> Query:
        """The same question about the target alone."""
        return replace(self, foil_id=None, foil_branch=None)

    @cached_property
    def token_ids(self) -> Int[Tensor, " length"]:
        """Everything that the model reads, on the CPU."""
        return torch.tensor(self.encoding.token_ids)

    @cached_property
    def target_rows(self) -> list[tuple[int, ...]]:
        """For each target, the positions whose logits predict its tokens."""
        return [tuple(self.logit_positions[token] for token in span) for span in self.target_spans]

    @cached_property
    def sources_stop(self) -> int:
        """The position after the last source, at most that which predicts the continuation; 0 without sources."""
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

    def with_units(self, units: Sequence[Span]) -> Query:
        """The same question with other units."""
        return replace(self, units=tuple(units))


def build_query(lm: LanguageModel, prompt: Prompt, **options: Any) -> Query:
    """The query of `query_passes`, for one prompt by itself; see there for the options."""
    return without_sharing(query_passes(lm, prompt, **options))


def query_passes(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    target: str | int | None = None,
    foil: str | int | None = None,
    max_new_tokens: int = 1,
    stop: str | None = None,
    target_unit: TargetUnit = "token",
    unit: Unit | AutoUnit = "token",
    sources: Sources | None = None,
    sources_begin: int = 0,
    continuation_units: bool = True,
    special_tokens: SpecialTokens = "frozen",
    of: Objective | None = None,
    share: bool = False,
) -> Passes[Query]:
    """Tokenises the prompt, settles the targets and cuts the input into units.

    A target or foil given as text is what follows the prompt. Where a prompt ends in a word and the text begins
    with one, both readings are possible (`" football"` and `"football"`): the one whose first token the model finds
    more probable is taken. A text that begins with whitespace is taken as it is. A greedy continuation ends before the
    text `stop`. Sources are looked for from `sources_begin` on. `share` is that of `run_clean`.

    Units of the continuation that stand before no target are left out.

    Raises:
        PromptError: the prompt is empty, holds only special tokens, or exceeds the model's context or vocabulary.
        TargetError: the target or foil has no token, is outside the vocabulary, or one begins with the other.
        UnitError: spans or sources that overlap, are empty or leave their text, or target spans that cut a token.
        UnsupportedModelError: the model does not predict from embeddings what it predicts from their tokens.
    """
    target, foil, target_unit, unit = map(plain, (target, foil, target_unit, unit))
    max_new_tokens = check_count("max_new_tokens", max_new_tokens)
    if of is not None and not callable(of):
        raise ParameterError(f"of is {of!r}; expected a function of log-probabilities, as noiser.objectives has them.")
    if of is not None and foil is not None:
        raise ParameterError(
            "There are a foil and a function of your own (of=); expected one of them. The function may contrast tokens "
            "itself, as noiser.objectives.ChoiceLogOdds does."
        )
    lm.check_embeddings()
    encoding = lm.encode(prompt)
    check_length(lm, len(encoding.token_ids))
    if max(encoding.token_ids, default=0) >= lm.vocabulary_size:
        raise PromptError(_unknown_token(lm, "The prompt", encoding.token_ids))
    documents = () if sources is None else find_sources(encoding, sources, sources_begin)
    if target is None:
        check_length(lm, len(encoding.token_ids) + max_new_tokens - 1)
        prompt_ids = torch.tensor(encoding.token_ids)
        continuation = yield from greedy_continuation(lm, prompt_ids, max_new_tokens, stop=stop, share=share)
        ids = continuation.token_ids
    else:
        continuation = None
        ids = yield from _token_ids_of(lm, encoding, target, "target", share)
    foil_ids = () if foil is None else (yield from _token_ids_of(lm, encoding, foil, "foil", share))
    first, foil_id = 0, None
    if foil_ids and target_unit == "all":
        _check_differs(lm, ids, foil_ids)
    elif foil_ids:
        if target_unit != "token":
            raise TargetError(
                f"There is a foil and target_unit is {target_unit!r}; expected 'all', which contrasts whole "
                "continuations, or 'token', which contrasts the first tokens in which they differ."
            )
        ids, first, foil_id = _first_difference(lm, ids, foil_ids)
        foil_ids = ()
    check_length(lm, len(encoding.token_ids) + max(len(ids), len(foil_ids)) - 1)

    prompt_tokens = len(encoding.token_ids)
    complete = extend(lm.tokenizer, encoding, ids)
    spans = make_target_spans(complete, prompt_tokens + first, target_unit)
    if (end := spans[-1][-1] + 1) < len(complete.token_ids):  # nothing is asked about the rest
        ids = ids[: end - prompt_tokens]
    whole = extend(lm.tokenizer, encoding, ids[:-1])
    units = make_units(whole, unit, special_tokens=special_tokens, prompt_tokens=prompt_tokens, sources=documents)
    end = spans[-1][0] if continuation_units else prompt_tokens
    units = tuple(u for u in units if max(u.token_indices) < end or u.token_indices[0] < prompt_tokens)
    if continuation is not None:
        explained = [position - prompt_tokens for span in spans for position in span]
        continuation = continuation._replace(logits=continuation.logits[explained])
    return query_of(
        lm,
        prompt,
        encoding,
        ids,
        spans,
        target_unit=target_unit if isinstance(target_unit, str) else "spans",
        foil_id=foil_id,
        foil_ids=foil_ids,
        units=units,
        unit=unit if isinstance(unit, str) else "spans",
        sources=documents,
        continuation=continuation if foil_id is None else None,
        of=of,
    )


def query_of(
    lm: LanguageModel,
    prompt: Prompt,
    encoding: Encoding,
    ids: tuple[int, ...],
    spans: Sequence[Sequence[int]],
    *,
    foil_ids: tuple[int, ...] = (),
    **fields: Any,
) -> Query:
    """The query about some of a continuation's tokens.

    Args:
        lm: the model to ask.
        prompt: as it was given.
        encoding: of the prompt alone.
        ids: the continuation, up to the last token that is explained.
        spans: for each target the positions of its tokens, counted from the beginning of the prompt.
        foil_ids: the whole continuation that the target is contrasted with.
        fields: the fields of the query that do not follow from these.
    """
    prompt_tokens = len(encoding.token_ids)
    positions = [position for span in spans for position in span]
    query = Query(
        prompt=prompt,
        encoding=extend(lm.tokenizer, encoding, ids[:-1]),
        prompt_tokens=prompt_tokens,
        prompt_length=len(encoding.text),
        target_ids=tuple(ids[position - prompt_tokens] for position in positions),
        logit_positions=tuple(position - 1 for position in positions),
        target_spans=group_consecutive(map(len, spans)),
        target_texts=target_texts(lm, extend(lm.tokenizer, encoding, ids), prompt_tokens, spans),
        model=lm.identity,
        embedding_dim=lm.embedding_dim,
        dtype=lm.dtype,
        device=lm.device,
        **fields,
    )
    if not foil_ids:
        return query
    span = range(prompt_tokens, prompt_tokens + len(foil_ids))
    fields["continuation"] = None
    branch = query_of(lm, prompt, encoding, foil_ids, [span], **fields)
    return replace(query, foil_branch=branch)


def target_texts(
    lm: LanguageModel, encoding: Encoding, prompt_tokens: int, spans: Sequence[Sequence[int]]
) -> tuple[str, ...]:
    """Target spans as text: a single token as `token_texts` has it, several as what the continuation reads there.

    Args:
        lm: whose tokenizer made them.
        encoding: the prompt and the whole continuation.
        prompt_tokens: how many of its tokens are the prompt.
        spans: positions of each span's tokens.
    """
    tokens = token_texts(lm.tokenizer, encoding.token_ids[prompt_tokens:])
    ends = [(encoding.offsets[span[0]][0], max(encoding.offsets[position][1] for position in span)) for span in spans]
    return tuple(
        tokens[span[0] - prompt_tokens] if len(span) == 1 else encoding.text[start:end]
        for span, (start, end) in zip(spans, ends, strict=True)
    )


def group_consecutive(sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """Numbers from 0 on, in groups of the given sizes."""
    numbers = itertools.count()
    return tuple(tuple(itertools.islice(numbers, size)) for size in sizes)


def check_length(lm: LanguageModel, length: int) -> None:
    """Raises PromptError when the model cannot read that many tokens."""
    limit = lm.context_length
    if limit is not None and length > limit:
        raise PromptError(
            f"The prompt and its continuation have {length} tokens; {lm.identity.name} can read {limit}. "
            "Shorten the prompt or ask for fewer targets."
        )


def _token_ids_of(
    lm: LanguageModel, encoding: Encoding, wanted: str | int, role: str, share: bool
) -> Passes[tuple[int, ...]]:
    if isinstance(wanted, bool) or not isinstance(wanted, str | int):
        raise TargetError(f"The {role} is a {type(wanted).__name__}; expected a text or a token id.")
    if isinstance(wanted, int):
        size = lm.vocabulary_size
        if not 0 <= wanted < size:
            raise TargetError(f"The {role} is token id {wanted}; expected 0 to {size - 1}, the model's vocabulary.")
        return (wanted,)
    if not wanted:
        raise TargetError(f"The {role} {wanted!r} has no tokens; expected a text that follows the prompt.")
    readings = [encode_target(lm.tokenizer, encoding, wanted, context_length=lm.context_length)]
    if max(readings[0]) >= lm.vocabulary_size:
        raise TargetError(_unknown_token(lm, f"The {role}", readings[0]))
    if not wanted[0].isspace() and not encoding.text[-1:].isspace():
        readings.append(encode_target(lm.tokenizer, encoding, " " + wanted, context_length=lm.context_length))
    return (yield from _most_probable(lm, encoding, readings, share))


def _unknown_token(lm: LanguageModel, what: str, token_ids: Sequence[int]) -> str:
    token = next(token for token in token_ids if token >= lm.vocabulary_size)
    (text,) = token_texts(lm.tokenizer, (token,))
    return (
        f"{what} has the token {text!r}, id {token}; expected ids below {lm.vocabulary_size}, the rows of the model's "
        "embedding table. The tokenizer is another model's, or tokens were added to it without resizing the model."
    )


def _most_probable(
    lm: LanguageModel, encoding: Encoding, readings: Sequence[tuple[int, ...]], share: bool
) -> Passes[tuple[int, ...]]:
    if len({reading[0] for reading in readings}) == 1:
        return readings[0]
    with lm.running():
        embeddings = lm.embed(torch.tensor(encoding.token_ids))
    first = tuple(reading[0] for reading in readings)
    run = yield from run_clean(lm, embeddings, [len(embeddings) - 1], share=share, tokens=[first])
    probabilities = run.logits[0].softmax(-1)
    check_finite(probabilities, lm.dtype)
    return max(readings, key=lambda reading: float(probabilities[reading[0]]))


def _first_difference(
    lm: LanguageModel, ids: tuple[int, ...], other: tuple[int, ...]
) -> tuple[tuple[int, ...], int, int]:
    """Target ids, the index of the first one to explain, and the foil's token.

    With a foil the question is about one place: the first token in which target and foil differ. Tokens that they
    share stand before it.
    """
    _check_differs(lm, ids, other)
    shared = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
    if shared is None:
        longer, shorter = ("foil", "target") if len(other) > len(ids) else ("target", "foil")
        raise TargetError(
            f"The {longer} begins with the {shorter}, {token_texts(lm.tokenizer, min(ids, other, key=len))}; expected "
            f"two that differ at some token. Give a longer {shorter}, or with target=None a larger max_new_tokens; or "
            "contrast the whole of both with target_unit='all'."
        )
    return ids[: shared + 1], shared, other[shared]


def _check_differs(lm: LanguageModel, ids: tuple[int, ...], other: tuple[int, ...]) -> None:
    if ids == other:
        raise TargetError(
            f"Target and foil are the same tokens, {token_texts(lm.tokenizer, ids)} and "
            f"{token_texts(lm.tokenizer, other)}; expected a foil that differs. Choose another foil or target."
        )
