"""From a question to its query on a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine._prepare_text import prepare_text
from noiser.engine.query import FoilRun, Prefill, Query
from noiser.errors import ParameterError, PromptError, TargetError, UnitError
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.packing import Context
from noiser.model.scene import Scene
from noiser.notices import warn
from noiser.tensors import true_indices
from noiser.text import (
    Encoding,
    as_prompt,
    encode_target,
    end_of_word,
    extend,
    find_action,
    find_sources,
    make_target_spans,
    make_units,
    token_texts,
)
from noiser.text.pictures import Region
from noiser.types import WHOLE_ANSWER, Question, Source, Span, Target, TargetUnit

LONGEST_WORD = 12
"""Tokens by which a predicted piece of a word is completed at most."""

DRAFTED_FROM = 4
"""Tokens of an answer from which on a model elsewhere writes it in one call."""

Tokenisations = list[tuple[int, ...]]
"""What a text may be as a continuation: token ids with and without a space before it."""


async def prepare(
    lm: LanguageModel,
    question: Question,
    encoding: Encoding | None = None,
    *,
    pictures: bool = False,
) -> Query:
    """The query of a question: prompt and target in tokens, the input in units.

    `pictures` says that the caller removes units alone, so that a prompt may have pictures.

    Where a target or foil may begin with a space or not, the tokenisation whose first token the
    model finds more probable is taken. Units of the continuation that stand before no target are
    left out.

    Raises:
        PromptError, TargetError, UnitError: texts, spans or sources do not fit the model, or each
            other.
        UnsupportedModelError: the model does not predict from embeddings what it predicts from
            their tokens.
    """
    if lm.is_text_only:
        return await prepare_text(lm, question, encoding)
    if question.max_calls is not None:
        raise ParameterError(
            f"max_calls is for chat models, and {lm.identity.name} is none; leave it out."
        )
    asked = _in_tokens(lm, question, encoding, pictures=pictures)
    encoding = asked.encoding
    longest, more_tokens = _room_for(lm, asked)
    scene = lm.scene(encoding)
    context, logits = await _run_prompt(
        lm, encoding, asked.targets, asked.foils, longest + more_tokens, scene
    )
    _check_predictable(lm, logits, asked.targets, asked.foils)
    continuation = await _continuation(lm, asked, context, logits, more_tokens)

    whole = extend(lm.tokenizer, encoding, continuation.ids)
    spans = make_target_spans(
        whole, asked.prompt_tokens + continuation.shared, continuation.target_unit
    )
    # Nothing is asked about the tokens after the last target.
    ids = continuation.ids[: spans[-1][-1] + 1 - asked.prompt_tokens]
    logits = continuation.logits
    if len(ids) > len(logits):
        logits = await _run_target(lm, context, asked.prompt_tokens, ids, logits)
    foil = None
    if continuation.foil_ids:
        foil = await foil_run(
            lm, encoding, context, logits, ids, continuation.shared, continuation.foil_ids, scene
        )

    question = replace(asked.question, target_unit=continuation.target_unit)
    units = _cut_input(lm, question, encoding, ids, asked.sources)
    regions: dict[Span, Region] = {}
    if scene is not None and not asked.sources:
        regions = scene.units(question.image_unit)
        units = _with_regions(units, regions, scene)
    end = spans[-1][0] if _has_continuation_units(question) else asked.prompt_tokens
    units_before = [unit for unit in units if _stands_before(unit, end, asked.prompt_tokens)]
    query = query_of(
        lm, question, encoding, ids, spans, units_before, context, logits, foil, asked.sources
    )
    if scene is not None:
        removal = question.image_removal
        query = replace(query, scene=scene, regions=regions, image_removal=removal)
    _check_players(query, units)
    return replace(query, near_ties=continuation.near_ties) if continuation.near_ties else query


class _InTokens(NamedTuple):
    """A question whose texts are tokens.

    Attributes:
        question: with the prompt as it is encoded, and a length of the answer.
        encoding: of the prompt.
        sources: their places in it.
        targets: the tokenisations of the target; none where the model's own answer is explained.
        foils: those of the foil.
        explains_answer: whether the model's own answer to a chat is explained.
    """

    question: Question
    encoding: Encoding
    sources: tuple[Source, ...]
    targets: Tokenisations
    foils: Tokenisations
    explains_answer: bool

    @property
    def prompt_tokens(self) -> int:
        """How many tokens the prompt has."""
        return len(self.encoding.token_ids)


def _in_tokens(
    lm: LanguageModel, question: Question, encoding: Encoding | None, *, pictures: bool
) -> _InTokens:
    """The prompt, sources, target and foil of a question in tokens."""
    question, encoding, is_literal = _settle_prompt(lm, question, encoding)
    explains_answer = _explains_answer(question)
    if not question.max_new_tokens:
        question = replace(question, max_new_tokens=WHOLE_ANSWER if explains_answer else 1)
    if encoding is None:
        documents = question.sources is not None
        encoding = lm.encode(question.prompt, documents=documents, pictures=pictures)
    sources: tuple[Source, ...] = ()
    if question.sources is not None:
        sources = find_sources(encoding, question.sources, question.sources_begin)
    _check_unit_of_foil(question)
    targets = _tokenisations(lm, encoding, question.target, "target", literal=is_literal)
    foils = _tokenisations(lm, encoding, question.foil, "foil", literal=is_literal)
    _check_vocabulary(lm, encoding, targets, foils)
    return _InTokens(question, encoding, sources, targets, foils, explains_answer)


def _room_for(lm: LanguageModel, asked: _InTokens) -> tuple[int, int]:
    """How many tokens the prompt and its longest continuation have, and how many more may complete
    the last word of a greedy one.
    """
    longest = _longest_sequence(asked.question, asked.prompt_tokens, asked.targets, asked.foils)
    check_length(lm, longest)
    if not _completes_words(asked.question):
        return longest, 0
    if lm.context_length is None:
        return longest, LONGEST_WORD
    return longest, min(LONGEST_WORD, lm.context_length - longest)


class _Continuation(NamedTuple):
    """The continuation that is explained.

    Attributes:
        ids: its tokens.
        logits: of its first tokens, as far as they are known.
        shared: how many of its first tokens the foil has as well.
        foil_ids: the foil's tokens after these; none without a foil.
        target_unit: how the continuation is cut into targets.
        near_ties: see `Query.near_ties`.
    """

    ids: tuple[int, ...]
    logits: Float[Tensor, "tokens vocab"]
    shared: int
    foil_ids: tuple[int, ...]
    target_unit: TargetUnit
    near_ties: tuple[int, ...]


async def _continuation(
    lm: LanguageModel,
    asked: _InTokens,
    context: Context,
    logits: Float[Tensor, "tokens vocab"],
    more_tokens: int,
) -> _Continuation:
    """The target or, without one, what the model goes on with; and how the foil differs from it."""
    question = asked.question
    first_logits = logits[0]
    ties: tuple[int, ...] = ()
    if question.target is not None:
        ids = _likeliest(asked.targets, first_logits)
    else:
        ids = _generated(lm, asked.encoding, question, more_tokens)
        if ids is None:  # the most probable tokens
            ids, logits = await _greedy(
                lm, asked.encoding, context, first_logits, question, more_tokens
            )
            ties = near_ties(lm, logits)
    shared = 0
    foil_ids: tuple[int, ...] = ()
    if question.foil is not None:
        whole_foil = _likeliest(asked.foils, first_logits)
        shared = _first_difference(lm, ids, whole_foil)
        foil_ids = whole_foil[shared:]
    target_unit = _target_unit(question, ids, shared, asked.explains_answer)
    return _Continuation(ids, logits, shared, foil_ids, target_unit, ties)


def _settle_prompt(
    lm: LanguageModel, question: Question, encoding: Encoding | None
) -> tuple[Question, Encoding | None, bool]:
    """The question with its prompt in the form that is encoded, and whether the target is literal.

    Where the target is an action of a chat, the prompt becomes the text before the action. An
    encoding of the chat no longer fits then, so it is dropped, and no space may be put before the
    target.
    """
    prompt = as_prompt(lm.tokenizer, question.prompt)
    action = None
    if not isinstance(prompt, str) and not question.is_answer:
        action = find_action(lm.tokenizer, prompt, question.target, lm.chat_template_kwargs)
    if action is None:
        return replace(question, prompt=prompt), encoding, False
    prompt, target = action
    return replace(question, prompt=prompt, target=target), None, True


def _explains_answer(question: Question) -> bool:
    """Whether the model's own answer to a chat is explained."""
    names_nothing = question.target is None and question.foil is None and question.of is None
    return names_nothing and not isinstance(question.prompt, str)


def _completes_words(question: Question) -> bool:
    """Whether a greedy continuation that ends within a word goes on to the word's end.

    It does unless the caller asks for tokens, or for other parts of it.
    """
    names_tokens = "token" in (question.unit, question.target_unit) or isinstance(
        question.foil, int
    )
    if names_tokens or question.target is not None or question.of is not None:
        return False
    return question.target_unit in (None, "word")


def _check_unit_of_foil(question: Question) -> None:
    if question.foil is not None and question.target_unit not in (None, "token", "all"):
        raise TargetError(
            "A foil is contrasted with the whole target, and target_unit is "
            f"{question.target_unit!r}; leave target_unit out."
        )


def _check_vocabulary(
    lm: LanguageModel, encoding: Encoding, targets: Tokenisations, foils: Tokenisations
) -> None:
    """Raises PromptError or TargetError for a token id beyond the embedding table."""
    of_pictures = encoding.pictures.all_tokens if encoding.pictures else frozenset[int]()
    own_ids = [token for place, token in enumerate(encoding.token_ids) if place not in of_pictures]
    ids_of_roles = {
        "prompt": own_ids,
        "target": chain(*targets),
        "foil": chain(*foils),
    }
    for role, token_ids in ids_of_roles.items():
        for token in token_ids:
            if token >= lm.vocabulary_size:
                error = PromptError if role == "prompt" else TargetError
                raise error(
                    f"The {role} has the token {token_texts(lm.tokenizer, [token])[0]!r}, "
                    f"id {token}; expected ids below {lm.vocabulary_size}, the rows of the "
                    "embedding table. Load the tokenizer that belongs to the model."
                )


def _check_predictable(
    lm: LanguageModel, logits: Tensor, targets: Tokenisations, foils: Tokenisations
) -> None:
    """Raises TargetError for a token that the model reads and has no logit for."""
    predicted = logits.shape[-1]
    for role, tokenisations in (("target", targets), ("foil", foils)):
        for token in chain(*tokenisations):
            if token >= predicted:
                raise TargetError(
                    f"The {role} has the token {token_texts(lm.tokenizer, [token])[0]!r}, "
                    f"id {token}, which {lm.identity.name} reads and cannot predict: it has "
                    f"logits for {predicted} of {lm.vocabulary_size} tokens. "
                    f"Name another {role}."
                )


def _longest_sequence(
    question: Question, prompt_tokens: int, targets: Tokenisations, foils: Tokenisations
) -> int:
    """The most tokens that will be read: the last token of a continuation is only predicted."""
    lengths = [len(tokenisation) for tokenisation in (*targets, *foils)]
    if not targets:
        lengths.append(question.max_new_tokens or 1)
    return prompt_tokens - 1 + max(lengths)


async def _run_prompt(
    lm: LanguageModel,
    encoding: Encoding,
    targets: Tokenisations,
    foils: Tokenisations,
    longest: int,
    scene: Scene | None,
) -> tuple[Context, Float[Tensor, "tokens vocab"]]:
    """The clean sequence, and its logits from the prompt's last token on.

    A target of one tokenisation runs with the prompt. Else its tokens depend on the first logits.
    """
    target = targets[0] if len(targets) == 1 else ()
    context = lm.context((*encoding.token_ids, *target[:-1]), longest, scene)
    first_tokens = tuple(tokenisation[0] for tokenisation in (*targets, *foils))
    exact = [first_tokens, *((token,) for token in target[1:])]
    positions = range(len(encoding.token_ids) - 1, len(context.inputs))
    return context, await Prefill(context, positions, exact)


async def _run_target(
    lm: LanguageModel,
    context: Context,
    prompt_tokens: int,
    ids: tuple[int, ...],
    logits: Float[Tensor, "known vocab"],
) -> Float[Tensor, "tokens vocab"]:
    """The logits of all of a target's tokens, of which only the first has been predicted."""
    context.extend(lm.context(ids[:-1]).inputs)
    positions = range(prompt_tokens, prompt_tokens + len(ids) - 1)
    rest = await Prefill(context, positions, [(token,) for token in ids[1:]])
    return torch.cat([logits, rest])


def _likeliest(
    tokenisations: Tokenisations, first_logits: Float[Tensor, " vocab"]
) -> tuple[int, ...]:
    """The tokenisation whose first token is the most probable."""
    return max(tokenisations, key=lambda tokenisation: float(first_logits[tokenisation[0]]))


def _generated(
    lm: LanguageModel, encoding: Encoding, question: Question, more_tokens: int
) -> tuple[int, ...] | None:
    """The continuation by `generate()`; None where it is the most probable tokens."""
    count = question.max_new_tokens or 1
    ids = lm.generated(encoding.token_ids, count + more_tokens, encoding.pictures is not None)
    if ids is None:
        return None
    has_ended = len(ids) < count + more_tokens
    for length in range(1, len(ids)):
        if _ends(lm, ids[: length + 1], question.stop):
            ids = ids[:length]
            has_ended = True
            break
    if len(ids) <= count:
        return tuple(ids)
    whole = _tokens_of_whole_words(lm, encoding, ids, count, has_ended=has_ended)
    return tuple(ids[: whole or count])


def _tokens_of_whole_words(
    lm: LanguageModel, encoding: Encoding, ids: Sequence[int], count: int, *, has_ended: bool
) -> int | None:
    """How many tokens of a continuation end with a whole word, at least `count`.

    None where the last word, or character, may go on after these tokens, if they are not all.
    """
    whole = extend(lm.tokenizer, encoding, ids)
    begin = len(encoding.text)
    ends = [end - begin for _, end in whole.offsets[len(encoding.token_ids) :]]
    text = whole.text[begin:]
    for length in range(count, len(ids) + 1):
        start = ends[length - 2] if length > 1 else 0
        piece = text[start : ends[length - 1]]
        is_space = bool(piece) and not piece.strip(" ")
        is_broken = "\ufffd" in piece or (length < len(ids) and ends[length] == ends[length - 1])
        if is_space or is_broken:
            continue
        end = end_of_word(text, ends[length - 1], has_ended=has_ended)
        if end is None:
            return None
        if end == ends[length - 1]:
            return length
    return len(ids) if has_ended else None


def _target_unit(
    question: Question, ids: Sequence[int], shared: int, explains_answer: bool
) -> TargetUnit:
    """The segmentation of the target: a text or an answer of several tokens is one target."""
    if question.foil is not None:
        return "all" if len(ids) > shared + 1 else "token"
    if question.target_unit is not None:
        return question.target_unit
    is_text = explains_answer or isinstance(question.target, str)
    if is_text and len(ids) > 1:
        return "all"
    return "word" if _completes_words(question) else "token"


def _cut_input(
    lm: LanguageModel,
    question: Question,
    encoding: Encoding,
    ids: tuple[int, ...],
    sources: tuple[Source, ...],
) -> tuple[Span, ...]:
    """The units of the prompt and of the continuation up to the token before the last."""
    return make_units(
        extend(lm.tokenizer, encoding, ids[:-1]),
        question.unit,
        special_tokens=question.special_tokens or "frozen",
        prompt_tokens=len(encoding.token_ids),
        sources=sources,
    )


def _with_regions(
    units: Sequence[Span], regions: Mapping[Span, Region], scene: Scene
) -> tuple[Span, ...]:
    """Units of text and regions of pictures, each picture's in their order at its place."""
    place_of: dict[Span, tuple[int, ...]] = {unit: unit.token_indices for unit in units}
    for number, (unit, region) in enumerate(regions.items()):
        place_of[unit] = (scene.tokens[region.picture][0], number)
    return tuple(sorted(place_of, key=lambda unit: place_of[unit]))


def _has_continuation_units(question: Question) -> bool:
    """Whether earlier tokens of the continuation are units of later targets.

    Not for fields, unless asked for: the tokens of a call would be most of the units of a chat cut
    into turns. Each would cost a run, and would only say that JSON follows JSON.
    """
    if question.continuation_units is None:
        return question.target_unit != "field"
    return question.continuation_units


def _stands_before(unit: Span, end: int, prompt_tokens: int) -> bool:
    """Whether a unit begins in the prompt, or ends before the position `end`."""
    return unit.token_indices[0] < prompt_tokens or max(unit.token_indices) < end


def _check_players(query: Query, units: Sequence[Span]) -> None:
    """Raises UnitError where a target has no unit before it that can be removed."""
    has_units = query.before.any(1)
    has_players = query.causal_mask.any(1)
    if (has_units & ~has_players).any():
        raise UnitError(
            f"{units[0].text!r}, the first token of the input, is the only unit; the model leans "
            "on it whatever it says, so it is always kept, and nothing is left to score. Give a "
            "longer prompt, or other units."
        )


async def foil_run(
    lm: LanguageModel,
    encoding: Encoding,
    context: Context,
    logits: Float[Tensor, "tokens vocab"],
    ids: tuple[int, ...],
    shared: int,
    foil_ids: tuple[int, ...],
    scene: Scene | None = None,
) -> FoilRun:
    """The foil after the tokens that it shares with the target, with the logits that predict it.

    Where target and foil are one token each, the target's logits predict both. Else the foil is run
    by itself:

        prompt | Yes , you     predicts  Yes , you can
        prompt | No            predicts  No .

    Args:
        lm: the model.
        encoding: the prompt.
        context: the clean sequence of prompt and target.
        logits: the logits at the target's tokens, the shared ones included.
        ids: the target's tokens, the shared ones included.
        shared: how many tokens of the continuation target and foil share.
        foil_ids: the foil's tokens after the shared ones.
        scene: the pictures of the prompt.
    """
    if len(foil_ids) == 1 and len(ids) == shared + 1:
        return FoilRun(foil_ids, context, logits[[shared]])
    foil_tokens = (*encoding.token_ids, *ids[:shared], *foil_ids[:-1])
    foil_context = lm.context(foil_tokens, scene=scene)
    first = len(encoding.token_ids) + shared - 1
    positions = range(first, first + len(foil_ids))
    foil_logits = await Prefill(foil_context, positions, [(token,) for token in foil_ids])
    return FoilRun(foil_ids, foil_context, foil_logits)


def query_of(
    lm: LanguageModel,
    question: Question,
    encoding: Encoding,
    ids: tuple[int, ...],
    spans: Sequence[Sequence[int]],
    units: Sequence[Span],
    context: Context,
    logits: Float[Tensor, "tokens vocab"],
    foil: FoilRun | None = None,
    sources: tuple[Source, ...] = (),
) -> Query:
    """The query about some tokens of a continuation, `ids`, whose logits are known.

    `spans` has the positions of each target's tokens, counted from the beginning of the prompt;
    `encoding` is the prompt alone.
    """
    prompt_tokens = len(encoding.token_ids)
    positions = [*chain(*spans)]
    explained_ids = [ids[position - prompt_tokens] for position in positions]
    clean = logits[[position - prompt_tokens for position in positions]].log_softmax(-1)
    check_finite(lm, clean)
    foil_target = None
    foil_clean = None
    if foil is not None:
        foil_clean = foil.logits.log_softmax(-1)
        check_finite(lm, foil_clean)
        shared = ids[: spans[0][0] - prompt_tokens]
        foil_target = _foil_of(lm, encoding, shared, foil.ids, foil_clean)
    return Query(
        prompt=question.prompt,
        encoding=extend(lm.tokenizer, encoding, ids[:-1]),
        prompt_tokens=prompt_tokens,
        prompt_length=len(encoding.text),
        target_ids=tuple(explained_ids),
        logit_positions=tuple(position - 1 for position in positions),
        targets=_targets_of(lm, encoding, ids, spans, clean),
        target_unit=_unit_name(question.target_unit),
        units=tuple(units),
        unit=_unit_name(question.unit),
        foil=foil_target,
        foil_context=foil.context if foil else None,
        foil_clean=foil_clean,
        sources=sources,
        of=question.of,
        special_tokens=question.special_tokens or "frozen",
        model=lm.identity,
        context=context,
        clean=clean,
        baseline=cache(lm.baseline_row),
    )


def _unit_name(unit: object) -> str:
    """The name of a segmentation; "spans" for the caller's own."""
    return unit if isinstance(unit, str) else "spans"


def _targets_of(
    lm: LanguageModel,
    encoding: Encoding,
    ids: tuple[int, ...],
    spans: Sequence[Sequence[int]],
    clean: Float[Tensor, "tokens vocab"],
) -> tuple[Target, ...]:
    """The targets with their texts, ids, and clean probabilities and ranks."""
    prompt_tokens = len(encoding.token_ids)
    explained_ids = [ids[position - prompt_tokens] for position in chain(*spans)]
    sizes = [len(span) for span in spans]
    probabilities_and_ranks = _probabilities_and_ranks(clean, explained_ids, sizes)
    whole = extend(lm.tokenizer, encoding, ids)
    texts = token_texts(lm.tokenizer, ids)
    targets: list[Target] = []
    previous_stop = 0
    for span, (probability, rank) in zip(spans, probabilities_and_ranks, strict=True):
        first = span[0] - prompt_tokens
        stop = span[-1] + 1 - prompt_tokens
        if len(span) == 1:
            text = texts[first]
        else:  # several tokens, as the continuation reads there
            start = whole.offsets[span[0]][0]
            end = max(whole.offsets[position][1] for position in span)
            text = whole.text[start:end]
        rest = ids[first + 1 : stop]
        before = ids[previous_stop:first]
        targets.append(Target(text, ids[first], probability, rank, rest=rest, before=before))
        previous_stop = stop
    return tuple(targets)


def _foil_of(
    lm: LanguageModel,
    encoding: Encoding,
    shared: tuple[int, ...],
    ids: tuple[int, ...],
    clean: Float[Tensor, "tokens vocab"],
) -> Target:
    """The foil after the tokens that it shares with the target, as a target."""
    ((probability, rank),) = _probabilities_and_ranks(clean, ids, [len(ids)])
    text = _text_of_foil(lm, encoding, shared, ids)
    return Target(text, ids[0], probability, rank, rest=ids[1:])


def _probabilities_and_ranks(
    log_p: Float[Tensor, "tokens vocab"], ids: Sequence[int], sizes: Sequence[int]
) -> list[tuple[float, int]]:
    """For each span: the geometric mean of its tokens' probabilities, and their largest rank.

    `sizes` has the number of tokens of each span.
    """
    token_log_p = log_p.gather(-1, torch.tensor([*ids], device=log_p.device)[:, None])
    token_ranks = 1 + (log_p > token_log_p).sum(-1)
    log_p_of_spans = torch.split(token_log_p, [*sizes])
    ranks_of_spans = torch.split(token_ranks, [*sizes])
    return [
        (float(span_log_p.mean().exp()), int(span_ranks.max()))
        for span_log_p, span_ranks in zip(log_p_of_spans, ranks_of_spans, strict=True)
    ]


def _text_of_foil(
    lm: LanguageModel, encoding: Encoding, shared: tuple[int, ...], ids: tuple[int, ...]
) -> str:
    """A token's own text, or several tokens as the continuation reads there."""
    if len(ids) == 1:
        return token_texts(lm.tokenizer, ids)[0]
    whole = extend(lm.tokenizer, encoding, (*shared, *ids))
    offsets = whole.offsets[len(encoding.token_ids) + len(shared) :]
    start = offsets[0][0]
    end = max(end for _, end in offsets)
    return whole.text[start:end]


async def _greedy(
    lm: LanguageModel,
    encoding: Encoding,
    context: Context,
    row: Float[Tensor, " vocab"],
    question: Question,
    more_tokens: int,
) -> tuple[tuple[int, ...], Float[Tensor, "tokens vocab"]]:
    """The most probable next tokens, up to one that ends the text, and the logits of each.

    With `more_tokens` the last word is completed by at most so many; else it stays as it is.
    """
    count = question.max_new_tokens or 1
    draft, rows_of_draft = await _drafted(lm, encoding, context, count)
    ids: list[int] = []
    rows: list[Tensor] = []
    whole: int | None = None
    while True:
        token = int(row.argmax())
        has_ended = bool(ids) and _ends(lm, [*ids, token], question.stop)
        if not has_ended:
            ids.append(token)
            rows.append(row)
            has_ended = token in lm.end_tokens
        if len(ids) >= count and more_tokens:
            whole = _tokens_of_whole_words(lm, encoding, ids, count, has_ended=has_ended)
        if has_ended or whole is not None or len(ids) >= count + more_tokens:
            break
        if [*draft[: len(ids)]] == ids:
            row = rows_of_draft[len(ids) - 1]
            continue
        context.shorten(len(encoding.token_ids) + len(ids) - 1)  # the draft was wrong, or ends
        context.extend(lm.context([token]).inputs)
        (row,) = await Prefill(context, [len(context.inputs) - 1])
    length = min(len(ids), whole or count)
    context.shorten(len(encoding.token_ids) + length - 1)
    if len(ids) > 1:  # each token ran in a pass of its own, with other prompts'
        context.copy_cache()
    return tuple(ids[:length]), torch.stack(rows[:length])


async def _drafted(
    lm: LanguageModel, encoding: Encoding, context: Context, count: int
) -> tuple[Sequence[int], Float[Tensor, "tokens vocab"]]:
    """What the model probably goes on with, appended to the context, and the logits after each.

    A model elsewhere writes it in one call, and another one gives all logits; token by token each
    would be a call.
    """
    draft = lm.draft(encoding, count) if count >= DRAFTED_FROM else ()
    if not draft:
        return (), torch.zeros(0, lm.vocabulary_size)
    context.extend(lm.context(draft).inputs)
    first = len(encoding.token_ids)
    return draft, await Prefill(context, range(first, first + len(draft)))


def near_ties(lm: LanguageModel, logits: Float[Tensor, "tokens vocab"]) -> tuple[int, ...]:
    """The indices of near ties in a greedy continuation; warns where there are any.

    A near tie is a token whose margin over the second is within half precision's rounding. The
    largest logits here are sums in float32. `generate()` rounds them: bfloat16 has steps of 1/8
    between 16 and 32.
    """
    if lm.dtype not in (torch.bfloat16, torch.float16) or not lm.needs_internals:
        return ()
    first, second = logits.float().topk(2).values.unbind(-1)
    step = torch.finfo(lm.dtype).eps * first.abs()
    is_near_tie = first - second <= 2 * step
    ties = tuple(true_indices(is_near_tie))
    if ties:
        warn(
            f"{lm.identity.name}: token {ties[0]} of the continuation leads by less than "
            f"{str(lm.dtype).removeprefix('torch.')} can tell apart, so generate() may write "
            "another. Name the target, or load the model with dtype='float32'.",
        )
    return ties


def _ends(lm: LanguageModel, ids: Sequence[int], stop: str | None) -> bool:
    """Whether the last of two or more tokens ends the text, or completes `stop`.

    The first token is never looked at, so that an answer has at least one. The last len(stop) + 1
    tokens are taken to hold any `stop` that the last one completes: a token is mostly at least one
    character, and one more stands before them, since some tokenizers drop a space at the beginning
    of what they decode.
    """
    if ids[-1] in lm.end_tokens:
        return True
    if not stop:
        return False
    tail = ids[1:][-len(stop) - 1 :]
    return stop in lm.tokenizer.decode(tail)


def check_length(lm: LanguageModel, length: int) -> None:
    """Raises PromptError when the model cannot read that many tokens."""
    if lm.context_length is not None and length > lm.context_length:
        raise PromptError(
            f"The prompt and its continuation have {length} tokens; {lm.identity.name} can read "
            f"{lm.context_length}. Shorten the prompt or ask for fewer targets."
        )


def _tokenisations(
    lm: LanguageModel, encoding: Encoding, continuation: object, role: str, *, literal: bool
) -> Tokenisations:
    """The tokens of a target or foil; two tokenisations where a space may stand before its text."""
    if continuation is None:
        return []
    if continuation and isinstance(continuation, tuple):  # token ids, as a model wrote them
        return [continuation]
    if isinstance(continuation, bool) or not isinstance(continuation, str | int):
        raise TargetError(
            f"The {role} is a {type(continuation).__name__}; expected a text or a token id."
        )
    if isinstance(continuation, int):
        if not 0 <= continuation < lm.vocabulary_size:
            raise TargetError(
                f"The {role} is token id {continuation}; expected 0 to {lm.vocabulary_size - 1}."
            )
        return [(continuation,)]
    if not continuation:
        raise TargetError(
            f"The {role} {continuation!r} has no tokens; expected a text that follows the prompt."
        )
    options: Any = {"role": role, "context_length": lm.context_length}
    tokenisations = [encode_target(lm.tokenizer, encoding, continuation, **options)]
    has_space = continuation[0].isspace() or encoding.text[-1:].isspace()
    if not literal and not has_space:
        tokenisations.append(encode_target(lm.tokenizer, encoding, " " + continuation, **options))
    return tokenisations


def _first_difference(lm: LanguageModel, ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The index of the first token in which target and foil differ, or a TargetError."""
    texts = [token_texts(lm.tokenizer, ids), token_texts(lm.tokenizer, other)]
    if ids == other:
        raise TargetError(
            f"Target and foil are the same tokens, {texts[0]}; expected a foil that differs."
        )
    for index, (token, other_token) in enumerate(zip(ids, other, strict=False)):
        if token != other_token:
            return index
    if len(other) > len(ids):
        longer = "foil"
        shorter = "target"
    else:
        longer = "target"
        shorter = "foil"
    raise TargetError(
        f"The {longer} begins with the {shorter}, {min(texts, key=len)}; expected two that differ "
        f"at some token. Give a longer {shorter}, or with target=None a larger max_new_tokens."
    )
