"""A question made concrete on a model: token ids, units, targets as positions, and the clean prediction."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from noiser.engine.scores import SCORES, Read, ScoreName, score_of
from noiser.errors import NoiserError, PromptError, TargetError
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.packing import Context
from noiser.text import (
    Encoding,
    as_prompt,
    encode_target,
    extend,
    find_action,
    find_sources,
    make_target_spans,
    make_units,
    token_texts,
)
from noiser.types import WHOLE_ANSWER, ModelIdentity, Objective, Prompt, Question, Source, Span, Target

T = TypeVar("T")


class Request:
    """Something that an engine answers."""


Steps = Generator["Request | Generator[Any, Any, Any]", Any, T]
"""A question, method or metric at work: yields requests, is sent their answers, returns its result.

It may also yield other steps, whose result is the answer. Errors of either are raised where they were yielded.
"""


@dataclass(frozen=True, eq=False)
class Prefill(Request):
    """The request to run a clean sequence to its end; answered by logits [positions, vocab], float32.

    For each position `tokens` has the ids whose probabilities must be exact, where a server does not send all.
    """

    context: Context
    positions: Sequence[int]
    tokens: Sequence[tuple[int, ...]] = ()


@dataclass(eq=False)
class Spent:
    """Work so far on a query, its clean sequence apart: tokens that have been run, forwards and backwards; passes."""

    token_forwards: int = 0
    passes: int = 0

    def add(self, tokens: int, passes: int = 1) -> None:
        """Counts passes over so many tokens each."""
        self.token_forwards += tokens * passes
        self.passes += passes


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
        targets: of one or several of these tokens, in order: texts, ids, probabilities and ranks without a change.
        target_unit: name of that segmentation: "token", "word", "sentence", "all" or "spans".
        units: the parts of the input that get a score.
        unit: name of the segmentation, or "spans".
        foil: the token that the (only) target, a token, is contrasted with, or None; `foil_id` is its id.
        sources: documents in the prompt.
        of: the number that is explained, in place of the targets' probabilities; or None.
        model: the model that is asked.
        context: the clean sequence and what is cached of it.
        clean: [tokens, vocab], log-probabilities at the targets' tokens without a change, float32.
        baseline: from a baseline's name to its row of the embedding table, [dim].
        spent: the work so far, of all queries that were made from this one.
        device: of the embeddings that the model reads.
        embedding_dim: length of a row of the embedding table.
        token_ids: [length], everything that the model reads, on the CPU.
        target_rows: for each target, the positions whose logits predict its tokens.
        ids: for each target, the ids of its tokens [tokens], on the device.
        clean_of: for each target, the clean log-probabilities at its tokens, [tokens, vocab].
        causal_mask: [targets, units], whether all of a unit stands before all of a target, so that it has a score.
    """

    prompt: Prompt
    encoding: Encoding
    prompt_tokens: int
    prompt_length: int
    target_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    targets: tuple[Target, ...]
    target_unit: str
    units: tuple[Span, ...]
    unit: str
    foil: Target | None = None
    sources: tuple[Source, ...] = ()
    of: Objective | None = None
    model: ModelIdentity
    context: Context = field(repr=False)
    clean: Float[Tensor, "tokens vocab"] = field(repr=False)
    baseline: Callable[[str], Tensor] = field(repr=False)
    spent: Spent = field(default_factory=Spent)

    foil_id: int | None = field(init=False)
    target_texts: tuple[str, ...] = field(init=False)
    device: torch.device = field(init=False)
    embedding_dim: int = field(init=False)
    token_ids: Int[Tensor, " length"] = field(init=False, repr=False)
    target_rows: list[tuple[int, ...]] = field(init=False)
    ids: Sequence[Int[Tensor, " tokens"]] = field(init=False, repr=False)
    clean_of: Sequence[Float[Tensor, "tokens vocab"]] = field(init=False, repr=False)
    causal_mask: Bool[Tensor, "targets units"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        inputs, sizes = self.context.inputs, [1 + len(target.rest) for target in self.targets]
        rows = [tuple(some.tolist()) for some in torch.tensor(self.logit_positions).split(sizes)]
        last = torch.tensor([max(unit.token_indices) for unit in self.units], device="cpu")
        vars(self).update(
            foil_id=self.foil.token_id if self.foil else None,
            target_texts=tuple(target.text for target in self.targets),
            device=inputs.device,
            embedding_dim=inputs.shape[1],
            token_ids=torch.tensor(self.encoding.token_ids),
            target_rows=rows,
            ids=torch.tensor(self.target_ids, device=inputs.device).split(sizes),
            clean_of=self.clean.split(sizes),
            causal_mask=last <= torch.tensor([some[:1] for some in rows], device="cpu"),
        )

    @cached_property
    def sources_stop(self) -> int:
        """The position after the last source, at most the one that predicts the continuation; 0 without sources."""
        end = max((source.end for source in self.sources), default=0)
        inside = sum(start < end for start, _ in self.encoding.offsets[: self.prompt_tokens - 1])
        return inside if self.sources else 0

    @cached_property
    def targets_per_unit(self) -> list[tuple[int, ...]]:
        """For each unit, the indices of the targets that it stands before."""
        return [tuple(g for g, seen in enumerate(column) if seen) for column in self.causal_mask.T.tolist()]

    def score(self, name: ScoreName) -> Read:
        """The score by name, of the target against its foil if there is one, or the query's own number."""
        return score_of(name, self.foil_id, self.of)

    def read_clean(self, read: Read) -> Float[Tensor, "targets ..."]:
        """A score without any change, float64 on the CPU."""
        values = [read(clean[None], clean, ids)[0] for clean, ids in zip(self.clean_of, self.ids, strict=True)]
        return torch.stack(values).double().cpu()

    def with_units(self, units: Sequence[Span]) -> Query:
        """The same question with other units."""
        return replace(self, units=tuple(units))


def prepare(lm: LanguageModel, question: Question, encoding: Encoding | None = None) -> Steps[Query]:
    """Tokenises the prompt (unless its tokens are given), settles the targets and cuts the input into units.

    Where a target or foil may begin with a space or not, the reading whose first token the model finds more probable is
    taken. Units of the continuation that stand before no target are left out.

    Raises:
        PromptError, TargetError, UnitError: texts, spans or sources do not fit the model, or each other.
        UnsupportedModelError: the model does not predict from embeddings what it predicts from their tokens.
    """
    prompt, target, action = as_prompt(lm.tokenizer, question.prompt), question.target, None
    if not isinstance(prompt, str):
        action = find_action(lm.tokenizer, prompt, target, lm.chat_template_kwargs)
    if action is not None:
        (prompt, target), encoding = action, None
    answers = not isinstance(prompt, str) and (target, question.foil, question.of) == (None, None, None)
    most = question.max_new_tokens or (WHOLE_ANSWER if answers else 1)
    question = replace(question, prompt=prompt, target=target, max_new_tokens=most)
    encoding = encoding or lm.encode(prompt)
    prompt_tokens = len(encoding.token_ids)
    check_length(lm, prompt_tokens)
    _check_vocabulary(lm, "The prompt", encoding.token_ids, PromptError)
    documents = () if question.sources is None else find_sources(encoding, question.sources, question.sources_begin)
    if question.foil is not None and question.target_unit not in (None, "token"):
        raise TargetError("A foil needs target_unit='token': the first token in which both differ is explained.")
    targets, foils = (
        _readings(lm, encoding, question, role, literal=action is not None) for role in ("target", "foil")
    )
    check_length(lm, prompt_tokens + max(map(len, targets), default=most) - 1)
    ahead = targets[0] if len(targets) == 1 else ()  # there is one reading: it runs with the prompt
    context = lm.context((*encoding.token_ids, *ahead[:-1]))
    exact = [tuple(ids[0] for ids in (*targets, *foils)), *((token,) for token in ahead[1:])]
    logits = yield Prefill(context, range(prompt_tokens - 1, len(context.inputs)), exact)

    def likeliest(readings: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return max(readings, key=lambda reading: float(first_row[reading[0]]))

    first_row, first, foil_id = logits[0], 0, None
    if question.target is None:
        own = lm.generated(encoding.token_ids, most)
        if own is None:
            ids, logits = yield from _greedy(lm, context, first_row, question)
        else:
            ids = tuple(own[: next((i for i in range(1, len(own)) if _ends(lm, own[: i + 1], question.stop)), None)])
    else:
        ids = likeliest(targets)
    if question.foil is not None:
        ids, first, foil_id = _first_difference(lm, ids, likeliest(foils))
    one_row = len(ids) > 1 and question.foil is None and (answers or isinstance(question.target, str))
    target_unit = ("all" if one_row else "token") if question.target_unit is None else question.target_unit
    spans = make_target_spans(extend(lm.tokenizer, encoding, ids), prompt_tokens + first, target_unit)
    ids = ids[: spans[-1][-1] + 1 - prompt_tokens]  # nothing is asked about the rest
    if len(ids) > len(logits):  # all of a target but its first token has yet to run
        context.extend(lm.context(ids[:-1]).inputs)
        after = range(prompt_tokens, prompt_tokens + len(ids) - 1)
        logits = torch.cat([logits, (yield Prefill(context, after, [(token,) for token in ids[1:]]))])
    special = question.special_tokens or "frozen"
    whole = extend(lm.tokenizer, encoding, ids[:-1])
    units = make_units(whole, question.unit, special_tokens=special, prompt_tokens=prompt_tokens, sources=documents)
    end = spans[-1][0] if question.continuation_units else prompt_tokens
    return query_of(
        lm,
        question.prompt,
        encoding,
        ids,
        spans,
        context=context,
        logits=logits,
        target_unit=target_unit if isinstance(target_unit, str) else "spans",
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
    foil_id: int | None = None,
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
        foil_id: the token that the (only) target is contrasted with.
        fields: the other fields of the query.
    """
    begin, positions = len(encoding.token_ids), [position for span in spans for position in span]
    clean = logits[[position - begin for position in positions]].log_softmax(-1)
    check_finite(lm, clean)
    whole, texts = extend(lm.tokenizer, encoding, ids), token_texts(lm.tokenizer, ids)
    last, targets = 0, list[Target]()
    for span, log_p in zip(spans, clean.split(list(map(len, spans))), strict=True):
        first, stop = span[0] - begin, span[-1] + 1 - begin
        # a single token as `token_texts` has it, several as the continuation reads there
        start, end = whole.offsets[span[0]][0], max(whole.offsets[position][1] for position in span)
        text, own = texts[first] if len(span) == 1 else whole.text[start:end], ids[first:stop]
        targets.append(Target(text, own[0], *_probability(log_p, own), rest=own[1:], before=ids[last:first]))
        last = stop
    foil = None
    if foil_id is not None:
        foil = Target(token_texts(lm.tokenizer, [foil_id])[0], foil_id, *_probability(clean[:1], [foil_id]))
    return Query(
        prompt=prompt,
        encoding=extend(lm.tokenizer, encoding, ids[:-1]),
        prompt_tokens=begin,
        prompt_length=len(encoding.text),
        target_ids=tuple(ids[position - begin] for position in positions),
        logit_positions=tuple(position - 1 for position in positions),
        targets=tuple(targets),
        foil=foil,
        model=lm.identity,
        clean=clean,
        baseline=cache(lm.baseline_row),
        **fields,
    )


def _probability(log_p: Float[Tensor, "tokens vocab"], ids: Sequence[int]) -> tuple[float, int]:
    """The geometric mean of the probabilities of tokens, and the largest of their ranks, from 1."""
    at = torch.tensor(ids, device=log_p.device)
    ranks = 1 + (log_p > log_p.gather(-1, at[:, None])).sum(-1)
    return float(SCORES["prob"](log_p[None], log_p, at)), int(ranks.max())


def _greedy(
    lm: LanguageModel, context: Context, row: Float[Tensor, " vocab"], question: Question
) -> Steps[tuple[tuple[int, ...], Tensor]]:
    """The most probable next tokens, one after the other, and the logits [tokens, vocab] that they are taken from.

    An end-of-sequence token is left out, unless it is the very first one; so is the token that completes the text
    `stop`, such as an empty line, with which the continuation ends.
    """
    ids, rows = list[int](), list[Tensor]()
    while True:
        token = int(row.argmax())
        if ids and _ends(lm, [*ids, token], question.stop):
            break
        ids.append(token)
        rows.append(row)
        if token in lm.end_tokens or len(ids) == question.max_new_tokens:
            break
        context.extend(lm.context([token]).inputs)
        (row,) = yield Prefill(context, [len(context.inputs) - 1])
    return tuple(ids), torch.stack(rows)


def _ends(lm: LanguageModel, ids: Sequence[int], stop: str | None) -> bool:
    """Whether the last of two or more tokens ends the text, or completes `stop`."""
    return ids[-1] in lm.end_tokens or bool(stop and stop in lm.tokenizer.decode(ids[1:][-len(stop) - 1 :]))


def check_length(lm: LanguageModel, length: int) -> None:
    """Raises PromptError when the model cannot read that many tokens."""
    limit = lm.context_length
    if limit is not None and length > limit:
        raise PromptError(
            f"The prompt and its continuation have {length} tokens; {lm.identity.name} can read {limit}. "
            "Shorten the prompt or ask for fewer targets."
        )


def _check_vocabulary(lm: LanguageModel, name: str, ids: Iterable[int], error: type[NoiserError]) -> None:
    if beyond := [token for token in ids if token >= lm.vocabulary_size]:
        raise error(
            f"{name} has the token {token_texts(lm.tokenizer, beyond[:1])[0]!r}, id {beyond[0]}; expected ids below "
            f"{lm.vocabulary_size}, the rows of the embedding table. Load the tokenizer that belongs to the model."
        )


def _readings(
    lm: LanguageModel, encoding: Encoding, question: Question, role: str, *, literal: bool
) -> list[tuple[int, ...]]:
    """The tokens of a target or foil; two readings where a space may stand before its text."""
    wanted: Any = getattr(question, role)
    if wanted is None:
        return []
    if wanted and isinstance(wanted, tuple):  # as a model wrote them
        return [wanted]
    if isinstance(wanted, bool) or not isinstance(wanted, str | int):
        raise TargetError(f"The {role} is a {type(wanted).__name__}; expected a text or a token id.")
    if isinstance(wanted, int):
        if not 0 <= wanted < lm.vocabulary_size:
            raise TargetError(f"The {role} is token id {wanted}; expected 0 to {lm.vocabulary_size - 1}.")
        return [(wanted,)]
    if not wanted:
        raise TargetError(f"The {role} {wanted!r} has no tokens; expected a text that follows the prompt.")
    spaces = [""] if literal or wanted[0].isspace() or encoding.text[-1:].isspace() else ["", " "]
    readings = [encode_target(lm.tokenizer, encoding, space + wanted) for space in spaces]
    for reading in readings:
        _check_vocabulary(lm, f"The {role}", reading, TargetError)
    return readings


def _first_difference(lm: LanguageModel, ids: tuple[int, ...], other: tuple[int, ...]) -> tuple[Any, int, int]:
    """Target ids up to the first token in which target and foil differ, its index, and the foil's token there."""
    texts = [token_texts(lm.tokenizer, each) for each in (ids, other)]
    if ids == other:
        raise TargetError(f"Target and foil are the same tokens, {texts[0]}; expected a foil that differs.")
    at = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
    if at is None:
        longer, shorter = ("foil", "target") if len(other) > len(ids) else ("target", "foil")
        raise TargetError(
            f"The {longer} begins with the {shorter}, {min(texts, key=len)}; expected two that differ at some token. "
            f"Give a longer {shorter}, or with target=None a larger max_new_tokens."
        )
    return ids[: at + 1], at, other[at]
