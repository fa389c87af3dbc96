"""From a question to its query on a model of which the text alone is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from noiser.checks import is_list
from noiser.engine.query import Prefill, Query
from noiser.errors import ModelError, ParameterError, TargetError, UnitError
from noiser.model.language_model import LanguageModel
from noiser.text import (
    Encoding,
    action_of,
    calls_of,
    check_messages,
    checked_spans,
    find_sources,
    names_action,
)
from noiser.text.segments import SEGMENTATIONS
from noiser.text.units import make_units
from noiser.types import Question, Source, Span, Target

if TYPE_CHECKING:
    from noiser.answers import ChatAnswer
    from noiser.model.chat import ChatContext, ChatModel, Explained

_ONLY_TEXT = "A chat endpoint gives text only"


async def prepare_text(
    lm: LanguageModel, question: Question, encoding: Encoding | None = None
) -> Query:
    """The query of a question on a chat model.

    Every target is one token of a vocabulary of its own: the answers that are explained, the foil,
    and "another answer". All are read after the whole prompt, so all units stand before all
    targets. The question is checked before a request is made.

    Raises:
        PromptError, TargetError, UnitError, ParameterError: the question cannot be asked.
        ModelError: the endpoint does not answer.
        OutOfTimeError: `max_calls` are too few for the whole prompt.
    """
    chat = cast("ChatModel", lm)
    check_question(chat, question)
    prompt, action = _settle_action(question)
    if encoding is None or action is not None:
        encoding = chat.encode(prompt)
    messages = check_messages(prompt)
    is_named = not question.is_answer and names_action(question.prompt, question.target)
    if action is None and is_named:
        # The assistant has yet to act, so its own answer is explained.
        question = replace(question, target=None)
    question = replace(question, prompt=prompt)
    units, sources = units_of_text(encoding, question)
    max_tokens = question.max_new_tokens
    context = chat.chat_context(messages, encoding, max_tokens, question.max_calls)
    last = len(encoding.token_ids) - 1
    await Prefill(context, [last])

    explained = action or _answer_to_explain(chat, question, context.answers)
    texts, context.explained = _targets(chat, question, explained)
    if question.foil is not None:
        context.foil = str(question.foil)
    ids = [*range(len(texts))]
    clean = torch.stack([context.logits(context.answers, _read_ids(context, i)) for i in ids])
    return Query(
        prompt=messages,
        encoding=encoding,
        prompt_tokens=len(encoding.token_ids),
        prompt_length=len(encoding.text),
        target_ids=tuple(ids),
        logit_positions=tuple([last] * len(ids)),
        targets=tuple(Target(text, i, _rate(clean[i], i), rank=1) for i, text in enumerate(texts)),
        target_unit=question.target_unit if isinstance(question.target_unit, str) else "all",
        units=units,
        unit=question.unit if isinstance(question.unit, str) else "spans",
        foil=_foil(question, context, clean),
        foil_context=context if context.foil else None,
        foil_clean=clean if context.foil else None,
        sources=sources,
        model=chat.identity,
        context=context,
        clean=clean,
        baseline=_no_rows,
    )


def check_question(chat: ChatModel, question: Question) -> None:
    """Raises an error for a question that text alone cannot answer, before any request."""
    if question.unit == "token":
        raise UnitError(f"{_ONLY_TEXT}: take unit='word' or larger.")
    if question.target_unit in ("token", "word", "field"):
        raise TargetError(
            f"{_ONLY_TEXT}: take target_unit='all', 'sentence', 'line', 'paragraph' or spans."
        )
    if question.of is not None:
        raise ParameterError(f"{_ONLY_TEXT}, and of= is a number of probabilities; leave it out.")
    if question.special_tokens == "perturbed":
        raise ParameterError(f"{_ONLY_TEXT}: leave special_tokens= out.")
    if question.target is not None and not isinstance(question.target, str):
        raise TargetError(f"{_ONLY_TEXT}: name the target by its text, not by token ids.")
    if question.foil is not None and chat.same_name != "first":
        raise TargetError(
            f"{_ONLY_TEXT}: a foil needs same='first', of endpoints that send log-probabilities."
        )


def units_of_text(
    encoding: Encoding, question: Question
) -> tuple[tuple[Span, ...], tuple[Source, ...]]:
    """The units and the sources of a chat."""
    sources: tuple[Source, ...] = ()
    if question.sources is not None:
        sources = find_sources(encoding, question.sources, question.sources_begin)
    return make_units(encoding, question.unit, sources=sources), sources


def _settle_action(question: Question) -> tuple[Any, ChatAnswer | None]:
    """The messages before an action, and the action as an answer; None without one."""
    from noiser.answers import ChatAnswer

    found = None
    if not isinstance(question.prompt, str) and not question.is_answer:
        found = action_of(question.prompt, question.target)
    if found is None:
        return question.prompt, None
    messages, action = found
    if action is None:
        return messages, None
    text = "".join(_texts_of(action))
    answer = ChatAnswer(reply=text, finish="stop", model="", usage=None, calls=calls_of(action))
    return messages, answer


def _texts_of(message: Any) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content")
    if is_list(content):
        return [str(part.get("text") or "") for part in content]
    return [str(content or "")]


def _answer_to_explain(
    chat: ChatModel, question: Question, answers: Sequence[ChatAnswer]
) -> ChatAnswer:
    """The answer that is explained: the caller's, or the one that the endpoint gives most often."""
    from noiser.answers import ChatAnswer

    if isinstance(question.target, str):
        # The first token of the caller's answer is looked for among the alternatives.
        return ChatAnswer(
            reply=question.target,
            finish="stop",
            model="",
            usage=None,
            first=((question.target, 0.0),),
        )
    whole = [answer for answer in answers if answer.is_whole]
    if not whole:
        raise ModelError(
            f"{chat.where} gave no answer to the whole prompt (finish_reason "
            f"{answers[0].finish!r}). Allow longer answers with max_new_tokens=, or rephrase it."
        )
    most_usual = chat.most_usual(whole)
    if chat.same_name == "first" and not most_usual.first:
        raise ModelError(
            f"{chat.where} sends no log-probabilities, which same='first' reads; take same='text'."
        )
    return most_usual


def _targets(
    chat: ChatModel, question: Question, answer: ChatAnswer
) -> tuple[list[str], tuple[Explained, ...]]:
    """The texts of the targets, and how each is compared.

    All of an answer is compared by the model's `same`; a part of it must stand in the other answer,
    of which no more need be known, as where it is still being written.
    """
    from noiser.model.chat import Explained, part_is_said

    text = answer.reply
    if not text.strip():
        text = " ".join(f"{function}({arguments})" for function, arguments in answer.calls)
    unit: Any = question.target_unit or "all"
    if unit == "all" or answer.calls:
        return [text], (Explained(answer, chat.same),)
    if isinstance(unit, str):
        cut: Callable[[str], list[tuple[int, int]]] = SEGMENTATIONS[unit]
        spans = cut(text)
    else:
        spans = sorted(checked_spans(unit, len(text), name="target_unit", of="answer"))
    parts = [text[start:end] for start, end in spans]
    return parts, tuple(Explained(answer._replace(reply=part), part_is_said) for part in parts)


def _read_ids(context: ChatContext, target: int) -> tuple[int, ...]:
    """The ids that are read for a target: its own, and the foil's."""
    return (target, len(context.explained)) if context.foil else (target,)


def _rate(row: Tensor, token: int) -> float:
    return float(row[token].exp())


def _foil(question: Question, context: ChatContext, clean: Tensor) -> Target | None:
    """The foil as a target: an answer's other first token."""
    if not context.foil:
        return None
    token = len(context.explained)
    return Target(str(question.foil), token, _rate(clean[0], token), rank=1)


def _no_rows(name: str) -> Tensor:
    raise ParameterError(f"{_ONLY_TEXT}: units can only be taken out, not replaced by {name!r}.")
