"""From a question to its query on a model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine.query import FoilRun, Prefill, Query
from noiser.errors import PromptError, TargetError, UnitError
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
from noiser.types import WHOLE_ANSWER, Question, Source, Span, Target


async def prepare(lm: LanguageModel, question: Question, encoding: Encoding | None = None) -> Query:
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
    answers = not isinstance(prompt, str) and (target, question.foil, question.of) == (
        None,
        None,
        None,
    )
    most = question.max_new_tokens or (WHOLE_ANSWER if answers else 1)
    question = replace(question, prompt=prompt, target=target, max_new_tokens=most)
    encoding = encoding or lm.encode(prompt, documents=question.sources is not None)
    prompt_tokens = len(encoding.token_ids)
    documents = (
        ()
        if question.sources is None
        else find_sources(encoding, question.sources, question.sources_begin)
    )
    if question.foil is not None and question.target_unit not in (None, "token", "all"):
        raise TargetError(
            f"A foil is contrasted with the whole target, and target_unit is {question.target_unit!r}; "
            "leave target_unit out."
        )
    targets, foils = (
        _readings(lm, encoding, question, role, literal=action is not None)
        for role in ("target", "foil")
    )
    named = {"prompt": encoding.token_ids, "target": chain(*targets), "foil": chain(*foils)}
    for role, token in (
        (role, token) for role, ids in named.items() for token in ids if token >= lm.vocabulary_size
    ):
        raise (PromptError if role == "prompt" else TargetError)(
            f"The {role} has the token {token_texts(lm.tokenizer, [token])[0]!r}, id {token}; expected ids below "
            f"{lm.vocabulary_size}, the rows of the embedding table. Load the tokenizer that belongs to the model."
        )
    longest = prompt_tokens - 1
    longest += max([*map(len, foils), *(map(len, targets) if targets else [most])])
    check_length(lm, longest)
    ahead = targets[0] if len(targets) == 1 else ()  # there is one reading: it runs with the prompt
    context = lm.context((*encoding.token_ids, *ahead[:-1]), longest)
    exact = [tuple(ids[0] for ids in (*targets, *foils)), *((token,) for token in ahead[1:])]
    logits = await Prefill(context, range(prompt_tokens - 1, len(context.inputs)), exact)

    def likeliest(readings: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return max(readings, key=lambda reading: float(first_row[reading[0]]))

    for role, readings in (("target", targets), ("foil", foils)):
        for token in chain(*readings):
            if token >= logits.shape[-1]:
                raise TargetError(
                    f"The {role} has the token {token_texts(lm.tokenizer, [token])[0]!r}, id {token}, which "
                    f"{lm.identity.name} reads and cannot predict: it has logits for {logits.shape[-1]} of "
                    f"{lm.vocabulary_size} tokens. Name another {role}."
                )
    first_row, first, foil_ids = logits[0], 0, ()
    ties: tuple[int, ...] = ()
    if question.target is None:
        own = lm.generated(encoding.token_ids, most)
        if own is None:
            ids, logits = await _greedy(lm, context, first_row, question)
            ties = near_ties(lm, logits)
        else:
            ids = tuple(
                own[
                    : next(
                        (i for i in range(1, len(own)) if _ends(lm, own[: i + 1], question.stop)),
                        None,
                    )
                ]
            )
    else:
        ids = likeliest(targets)
    if question.foil is not None:
        foil_ids = likeliest(foils)
        first = _first_difference(lm, ids, foil_ids)
        foil_ids = foil_ids[first:]
    one_row = len(ids) > 1 and (answers or isinstance(question.target, str))
    target_unit = (
        ("all" if one_row else "token") if question.target_unit is None else question.target_unit
    )
    if question.foil is not None:
        target_unit = "all" if len(ids) > first + 1 else "token"
    spans = make_target_spans(
        extend(lm.tokenizer, encoding, ids), prompt_tokens + first, target_unit
    )
    ids = ids[: spans[-1][-1] + 1 - prompt_tokens]  # nothing is asked about the rest
    if len(ids) > len(logits):  # all of a target but its first token has yet to run
        context.extend(lm.context(ids[:-1]).inputs)
        after = range(prompt_tokens, prompt_tokens + len(ids) - 1)
        logits = torch.cat([logits, await Prefill(context, after, [(token,) for token in ids[1:]])])
    foil = None
    if foil_ids:
        foil = await foil_run(lm, encoding, context, logits, ids, first, foil_ids)
    special = question.special_tokens or "frozen"
    whole = extend(lm.tokenizer, encoding, ids[:-1])
    units = make_units(
        whole, question.unit, special_tokens=special, prompt_tokens=prompt_tokens, sources=documents
    )
    end = spans[-1][0] if question.continuation_units else prompt_tokens
    asked = [
        unit
        for unit in units
        if max(unit.token_indices) < end or unit.token_indices[0] < prompt_tokens
    ]
    question = replace(question, target_unit=target_unit)
    query = query_of(lm, question, encoding, ids, spans, asked, context, logits, foil, documents)
    if (query.before.any(1) & ~query.causal_mask.any(1)).any():
        raise UnitError(
            f"{units[0].text!r}, the first token of the input, is the only unit; the model leans on "
            "it whatever it says, so it is always kept, and nothing is left to score. Give a longer "
            "prompt, or other units."
        )
    return replace(query, near_ties=ties) if ties else query


async def foil_run(
    lm: LanguageModel,
    encoding: Encoding,
    context: Context,
    logits: Float[Tensor, "tokens vocab"],
    ids: tuple[int, ...],
    shared: int,
    foil_ids: tuple[int, ...],
) -> FoilRun:
    """The foil after the tokens that it shares with the target, with the logits that predict it.

    Where target and foil are one token each, the target's logits predict both. Else the foil is run by itself:

        prompt | Yes , you     predicts  Yes , you can
        prompt | No            predicts  No .

    Args:
        lm: the model.
        encoding: of the prompt.
        context: the clean sequence of prompt and target.
        logits: of the target's tokens, the shared ones included.
        ids: the target's tokens, the shared ones included.
        shared: how many tokens of the continuation target and foil share.
        foil_ids: the foil's tokens after the shared ones.
    """
    if len(foil_ids) == 1 and len(ids) == shared + 1:
        return FoilRun(foil_ids, context, logits[[shared]])
    own = lm.context((*encoding.token_ids, *ids[:shared], *foil_ids[:-1]))
    first = len(encoding.token_ids) + shared - 1
    positions = range(first, first + len(foil_ids))
    found = await Prefill(own, positions, [(token,) for token in foil_ids])
    return FoilRun(foil_ids, own, found)


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

    `spans` has the positions of each target's tokens, counted from the beginning of the prompt; `encoding` is that of
    the prompt alone.
    """
    begin, positions, sizes = (
        len(encoding.token_ids),
        [*chain(*spans)],
        [len(span) for span in spans],
    )
    clean = logits[[position - begin for position in positions]].log_softmax(-1)
    check_finite(lm, clean)
    wanted = [ids[position - begin] for position in positions]
    numbers = _probabilities_and_ranks(clean, wanted, sizes)
    whole, texts = extend(lm.tokenizer, encoding, ids), token_texts(lm.tokenizer, ids)
    last, targets = 0, list[Target]()
    for span, known in zip(spans, numbers, strict=True):
        first, stop = span[0] - begin, span[-1] + 1 - begin
        # a single token as `token_texts` has it, several as the continuation reads there
        start, end = whole.offsets[span[0]][0], max(whole.offsets[position][1] for position in span)
        text = texts[first] if len(span) == 1 else whole.text[start:end]
        targets.append(
            Target(text, ids[first], *known, rest=ids[first + 1 : stop], before=ids[last:first])
        )
        last = stop
    foil_target, foil_clean = None, None
    if foil is not None:
        foil_clean = foil.logits.log_softmax(-1)
        check_finite(lm, foil_clean)
        (known,) = _probabilities_and_ranks(foil_clean, foil.ids, [len(foil.ids)])
        shared = ids[: spans[0][0] - begin]
        text = _text_of_foil(lm, encoding, shared, foil.ids)
        foil_target = Target(text, foil.ids[0], *known, rest=foil.ids[1:])
    unit, target_unit = (
        u if isinstance(u, str) else "spans" for u in (question.unit, question.target_unit)
    )
    return Query(
        prompt=question.prompt,
        encoding=extend(lm.tokenizer, encoding, ids[:-1]),
        prompt_tokens=begin,
        prompt_length=len(encoding.text),
        target_ids=tuple(wanted),
        logit_positions=tuple(position - 1 for position in positions),
        targets=tuple(targets),
        target_unit=target_unit,
        units=tuple(units),
        unit=unit,
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


def _probabilities_and_ranks(
    log_p: Float[Tensor, "tokens vocab"], ids: Sequence[int], sizes: Sequence[int]
) -> list[tuple[float, int]]:
    """For spans of so many tokens the geometric mean of their probabilities, and the largest of their ranks."""
    of_ids = log_p.gather(-1, torch.tensor([*ids], device=log_p.device)[:, None])
    ranks = 1 + (log_p > of_ids).sum(-1)
    return [
        (float(some.mean().exp()), int(rank.max()))
        for some, rank in zip(of_ids.split([*sizes]), ranks.split([*sizes]), strict=True)
    ]


def _text_of_foil(
    lm: LanguageModel, encoding: Encoding, shared: tuple[int, ...], ids: tuple[int, ...]
) -> str:
    """A token's own text, or several tokens as the continuation reads there."""
    if len(ids) == 1:
        return token_texts(lm.tokenizer, ids)[0]
    whole = extend(lm.tokenizer, encoding, (*shared, *ids))
    offsets = whole.offsets[len(encoding.token_ids) + len(shared) :]
    return whole.text[offsets[0][0] : max(end for _, end in offsets)]


async def _greedy(
    lm: LanguageModel, context: Context, row: Float[Tensor, " vocab"], question: Question
) -> tuple[tuple[int, ...], Tensor]:
    """The most probable next tokens, up to one that ends the text, and the logits [tokens, vocab] of each."""
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
        (row,) = await Prefill(context, [len(context.inputs) - 1])
    return tuple(ids), torch.stack(rows)


def near_ties(lm: LanguageModel, logits: Float[Tensor, "tokens vocab"]) -> tuple[int, ...]:
    """The tokens of a greedy continuation, by index, whose lead is within half precision's rounding; warns of them.

    The largest logits here are sums in float32. `generate()` rounds them: bfloat16 has steps of 1/8 between 16 and 32.
    """
    if lm.dtype not in (torch.bfloat16, torch.float16) or not lm.looks_inside:
        return ()
    first, second = logits.float().topk(2).values.unbind(-1)
    step = torch.finfo(lm.dtype).eps * first.abs()
    ties = tuple((first - second <= 2 * step).nonzero().flatten().tolist())
    if ties:
        warnings.warn(
            f"{lm.identity.name}: token {ties[0]} of the continuation leads by less than "
            f"{str(lm.dtype).removeprefix('torch.')} rounds, so generate() may write another. "
            "Name the target, or load the model with dtype='float32'.",
            stacklevel=2,
        )
    return ties


def _ends(lm: LanguageModel, ids: Sequence[int], stop: str | None) -> bool:
    """Whether the last of two or more tokens ends the text, or completes `stop`."""
    return ids[-1] in lm.end_tokens or bool(
        stop and stop in lm.tokenizer.decode(ids[1:][-len(stop) - 1 :])
    )


def check_length(lm: LanguageModel, length: int) -> None:
    """Raises PromptError when the model cannot read that many tokens."""
    if lm.context_length is not None and length > lm.context_length:
        raise PromptError(
            f"The prompt and its continuation have {length} tokens; {lm.identity.name} can read {lm.context_length}. "
            "Shorten the prompt or ask for fewer targets."
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
        raise TargetError(
            f"The {role} is a {type(wanted).__name__}; expected a text or a token id."
        )
    if isinstance(wanted, int):
        if not 0 <= wanted < lm.vocabulary_size:
            raise TargetError(
                f"The {role} is token id {wanted}; expected 0 to {lm.vocabulary_size - 1}."
            )
        return [(wanted,)]
    if not wanted:
        raise TargetError(
            f"The {role} {wanted!r} has no tokens; expected a text that follows the prompt."
        )
    spaces = [""] if literal or wanted[0].isspace() or encoding.text[-1:].isspace() else ["", " "]
    return [encode_target(lm.tokenizer, encoding, space + wanted) for space in spaces]


def _first_difference(lm: LanguageModel, ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The index of the first token in which target and foil differ. Raises TargetError where there is none."""
    texts = [token_texts(lm.tokenizer, each) for each in (ids, other)]
    if ids == other:
        raise TargetError(
            f"Target and foil are the same tokens, {texts[0]}; expected a foil that differs."
        )
    at = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
    if at is None:
        longer, shorter = ("foil", "target") if len(other) > len(ids) else ("target", "foil")
        raise TargetError(
            f"The {longer} begins with the {shorter}, {min(texts, key=len)}; expected two that differ at some token. "
            f"Give a longer {shorter}, or with target=None a larger max_new_tokens."
        )
    return at
