"""`noiser.cite`: a question and sources in, the answer with its citations out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, get_args, overload

from noiser.attribution import Attribution
from noiser.attribution.display import check_text
from noiser.checks import check_choice, check_positive, check_probability, check_seed, plain
from noiser.engine import Query, prepare, run_one
from noiser.errors import OutOfTimeError, ParameterError, TargetError, UnsupportedModelError
from noiser.explain._attribute import attribution_of, checked_in_time
from noiser.explain._rule import rules_of
from noiser.explain.alternatives import find_alternatives
from noiser.explain.announce import announce
from noiser.explain.check import check_masks, check_scores, removal_for
from noiser.explain.citations import Citations
from noiser.explain.citations_record import SourcePair, in_nats, scores_in_nats
from noiser.explain.decisive import (
    ALL,
    LEAST_FALL,
    Fall,
    find_decisive,
    losses_without_all,
    without_two,
)
from noiser.explain.many import for_each, is_many, run_many
from noiser.explain.placing import placed
from noiser.explain.refine import MIN_SHARE, SplitRule
from noiser.explain.rule_record import Rule
from noiser.explain.sameness import Sameness
from noiser.explain.source_removal import SourceRemoval
from noiser.methods import (
    AttentionGradient,
    Method,
    Occlusion,
    Search,
    describe,
    for_text,
    make_method,
)
from noiser.model.language_model import LanguageModel, check_model
from noiser.progress import progress_of
from noiser.tensors import floats, true_indices
from noiser.text import (
    TEMPLATE,
    make_units,
    read_documents,
    with_leads,
    without_sources,
)
from noiser.types import (
    Accuracy,
    CitedUnit,
    Documents,
    Progress,
    Prompt,
    Prompts,
    Question,
    TargetUnit,
)

METHOD = Occlusion(objective="logprob", removal="hidden")
"""One run of question and answer per source, however long the sources are. Where a model cannot
hide a source, its rows become zeros; from a text server it is taken out."""

FAST = AttentionGradient()
"""The method of accuracy="fast"."""

MASKS = 8
"""The number of random halves of the sources that check fast scores."""

FAST_FROM = 20
"""With fewer sources than this, accuracy="fast" saves no runs."""

MEMORY: dict[str, float] = {"hidden": 3.0, "zero": 4.0, "delete": 4.0}
"""A sentence needs no source if its log-probability falls by less than this many nats when all
sources are removed in this way, and when each one is. Chosen on planted development questions, see
docs/howto/retrieval.md: e³ ≈ 20 times as improbable."""

MEMORY_OF_TEXT = math.log(2)
"""`MEMORY` for a model of which the text alone is known: without sources a sentence is said half as
often."""

HARDLY = 1 / 3
"""A sentence hardly falls without a source if it loses at most this share of what it loses without
more of them: then another source says the same."""


class CiteOptions(TypedDict, total=False):
    """The keyword arguments of `cite` that are the same for one question and for many."""

    accuracy: Accuracy
    method: str | Method | None
    target_unit: TargetUnit
    max_new_tokens: int
    template: str | None
    unit: CitedUnit
    memory: float | None
    least_share: float
    contrast: bool | None
    rule: bool
    check: int | bool
    seed: int
    max_seconds: float | None
    progress: Progress | bool | None


@overload
def cite(
    lm: LanguageModel,
    question: Prompt,
    sources: Documents,
    *,
    answer: str | tuple[int, ...] | None = None,
    **options: Unpack[CiteOptions],
) -> Citations: ...


@overload
def cite(
    lm: LanguageModel,
    question: Prompts,
    sources: Sequence[Documents],
    *,
    answer: str | Sequence[str | Sequence[int] | None] | None = None,
    **options: Unpack[CiteOptions],
) -> list[Citations]: ...


def cite(
    lm: LanguageModel,
    question: Prompt | Prompts,
    sources: Documents | Sequence[Documents],
    *,
    accuracy: Accuracy = "accurate",
    method: str | Method | None = None,
    answer: str | Sequence[str | int | Sequence[int] | None] | None = None,
    target_unit: TargetUnit = "sentence",
    max_new_tokens: int = 128,
    template: str | None = TEMPLATE,
    unit: CitedUnit = "auto",
    memory: float | None = None,
    least_share: float = 0.2,
    contrast: bool | None = None,
    rule: bool = False,
    check: int | bool = False,
    seed: int = 0,
    max_seconds: float | None = None,
    progress: Progress | bool | None = None,
) -> Citations | list[Citations]:
    """Answers a question from sources, and says which of them each sentence of the answer was
    written from.

    The model answers a prompt with the sources, and each source is hidden from question and answer:
    what a sentence's log-probability loses is the source's score. Sources that carry the score are
    then taken apart into sentences. A sentence that loses less than `memory` with all sources
    hidden, and with each of them, and that the model still says then, does not need them and cites
    nothing. What the model says without the cited sources is named, too, where it rests on another
    source: that may say the opposite. A citation is influence: whether the source says what the
    sentence says is not checked.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        question: a text; it becomes a user's message if the tokenizer has a chat template. Or chat
            messages, whose last one gets the sources. A list of texts or of chats is many
            questions, each with its own list of sources (and of answers); they run side by side and
            give the same numbers as separate calls.
        sources: texts or (title, text) pairs; {title: text}; a folder, or paths of text files, as
            `pathlib.Path`; or documents of LangChain or LlamaIndex. One without text keeps its
            number and is not in the prompt.
        accuracy: "accurate": every source is hidden, see above. "fast": question and answer run
            forward twice and backward once; a check of 8 random halves of the sources says whether
            that predicts what hiding does. Where it does not, with fewer than 20 sources, or where
            the model cannot be read so, as "accurate". What the model says without the cited
            sources is not looked for.
        method: what scores the sources, by name or with its hyper-parameters. None for `METHOD`,
            the cheapest; one source at a time, it gives little to two sources that say the same, so
            the best are then hidden with each other one. `ContextCite(removal="hidden")` and
            `KernelShap(removal="hidden")` give such sources scores.
        answer: a text whose sentences are cited, or a tuple of its token ids, in place of the
            model's own answer.
        target_unit: the part of the answer that is cited by itself: "sentence", or (start, end)
            character spans of it.
        max_new_tokens: the longest answer. Without a chat template it is one line at most.
        template: how sources and question make a prompt; has "{sources}" and "{question}". None:
            the sources already stand in `question`, which is the whole prompt, word for word.
        unit: "auto" scores sources, and the sentences of those that carry a sentence's score;
            "source" only the former; "sentence" all sentences of all sources.
        memory: see above, in nats, which alone counts then; None for `MEMORY`.
        least_share: a source is cited if it has this share of a sentence's positive scores; or if
            the model says something else without it.
        contrast: whether the model also answers without the sources. None: only where it writes the
            answer itself, since writing takes far more passes than citing an answer that is given.
        rule: whether each sentence gets a rule of the sources that it needs, such as "[1] and [4],
            or [6]", in place of pairs; see `noiser.rule`. Sources are then taken out as text, at
            most 13 inputs a source and 41 more.
        check: as for `noiser.attribute`; "fast" has 8 unless more are given.
        seed: of all random numbers.
        max_seconds: as for `noiser.attribute`: the answer with the scores that are there by then.
        progress: called with (done, expected) token-forwards while sources are scored; with many
            questions, in questions. None and False as for `noiser.attribute`.

    Raises:
        NoiserError: the prompt, a source or the answer is empty or too long, or an argument is
            outside its domain.

    Example:
        >>> sources = ["The lute is in the attic."]
        >>> print(noiser.cite(lm, "Where is the lute?", sources))  # doctest: +SKIP
    """
    check_model(lm)
    check_choice("unit", unit, get_args(CitedUnit))
    check_choice("accuracy", accuracy, get_args(Accuracy))
    check_probability("least_share", least_share)
    _check_method(accuracy, method)
    _check_memory(memory)
    if max_seconds is not None:
        check_positive("max_seconds", max_seconds)
    masks = check_masks(check)
    seed = check_seed(seed)
    scoring = None if method is None else make_method(method)
    if lm.is_text_only:
        scoring = for_text(scoring or Search())
    asked = _CiteArguments(
        accuracy=accuracy,
        method=scoring,
        target_unit=target_unit,
        writing={"max_new_tokens": max_new_tokens, "stop": None if lm.chats else "\n"},
        template=template,
        unit=unit,
        memory=memory,
        least_share=least_share,
        contrast=contrast,
        rule=rule,
        masks=masks,
        seed=seed,
    )

    questions: Any = plain(question)
    columns: dict[str, Any] = {"sources": plain(sources), "answer": answer}
    many = is_many(questions)
    if many:
        rows = for_each(len(questions), **columns)
        works = [
            _cite_one(lm, asked, each, **row) for each, row in zip(questions, rows, strict=True)
        ]
    else:
        works = [_cite_one(lm, asked, questions, **columns)]
    with progress_of(progress, "Citing") as report:
        if many:
            return run_many(lm, works, report, max_seconds)
        return run_one(lm, works[0], report, max_seconds)


def _check_method(accuracy: Accuracy, method: str | Method | None) -> None:
    if accuracy == "fast" and method is not None:
        raise ParameterError(
            f"accuracy='fast' chooses the method, and method is {method!r}. Leave one of them out."
        )


def _check_memory(memory: Any) -> None:
    if memory is None:
        return
    if not isinstance(memory, int | float) or math.isnan(memory):
        raise ParameterError(
            f"memory is {memory!r}; expected a number of nats, or None for the default."
        )


@dataclass(frozen=True, kw_only=True)
class _CiteArguments:
    """The arguments of `cite` that are the same for all of its questions, checked.

    Attributes:
        method: what scores the sources; None for `METHOD`, with the removal that the model can do.
        writing: how the model writes an answer of its own.
        masks: how many inputs check the scores; 0 for none.
    """

    accuracy: Accuracy
    method: Method | None
    target_unit: TargetUnit
    writing: dict[str, Any]
    template: str | None
    unit: CitedUnit
    memory: float | None
    least_share: float
    contrast: bool | None
    rule: bool
    masks: int | bool
    seed: int


async def _cite_one(
    lm: LanguageModel, asked: _CiteArguments, question: Prompt, sources: Documents, answer: Any
) -> Citations:
    """The citations of one question."""
    sources = read_documents(sources)
    request, prompt, encoding, begin = placed(lm, question, sources, asked.template)
    parts = Question(
        prompt=prompt,
        target=answer,
        is_answer=True,
        sources=sources,
        sources_begin=begin,
        target_unit=asked.target_unit,
        unit=asked.unit,
        continuation_units=False,
        **asked.writing,
    )
    announce(lm, parts, asked.method or METHOD, asked.seed)
    query = await prepare(lm, parts, encoding)
    query = replace(query, sources=with_leads(query.sources, sources))
    answer_text = "".join(query.target_texts)
    if not answer_text.strip():
        raise TargetError(
            f"{lm.identity.name} generated an empty answer, so there is nothing to cite. "
            "Rephrase the question, or pass answer=."
        )

    # Which sentences need the sources?
    removal = removal_for(lm, query, hide=True)
    source_removal = SourceRemoval(query, removal)
    losses, turned = await losses_without_all(query, source_removal)
    min_loss = _min_loss(lm, asked, removal)
    # A limit of the caller's own says alone which sentences need sources. Of a model whose text
    # alone is known, no token beside the answer is, so none can turn.
    looks_for_decisive = asked.memory is None and not lm.is_text_only
    if not looks_for_decisive:
        turned = []
    lost_without_all = [row for row, loss in enumerate(losses) if loss >= min_loss or row in turned]

    attribution = await _scored(lm, asked, query, removal, min_loss, lost_without_all)
    answer_without = None
    wants_contrast = answer is None if asked.contrast is None else asked.contrast
    if wants_contrast:
        alone = without_sources(request, asked.template, encoding, query.sources)
        calls_left = query.context.left
        answer_without = await _answer_without_sources(lm, alone, asked.writing, calls_left)
    citations = Citations(
        question=question,
        sources=query.sources,
        answer=answer_text,
        answer_without=answer_without,
        attribution=attribution,
        losses=tuple(losses),
        memory=min_loss,
        least_share=asked.least_share,
    )

    # What can be told beside the scores, as far as time allows.
    if looks_for_decisive:
        decisive = [(ALL,) if row in turned else () for row in range(len(losses))]
        citations = replace(citations, decisive=tuple(decisive))
    with suppress(OutOfTimeError):
        if looks_for_decisive and asked.accuracy == "accurate":
            found = await find_decisive(query, source_removal, _candidates(citations))
            citations = replace(citations, decisive=_with_numbers(citations.decisive, found))
            if asked.method is None:
                falls = await without_two(query, source_removal, _undecided(citations))
                citations = replace(citations, repeats=_repeats(citations, falls))
        if asked.rule and len(query.sources) > 1:
            citations = replace(citations, rules=await _rules(lm, query, citations, asked.seed))
        if asked.accuracy == "accurate" and not lm.is_text_only:
            cited = _cited(citations)
            alternatives = await find_alternatives(lm.tokenizer, query, source_removal, cited)
            citations = replace(citations, alternatives=alternatives)
    return citations


def _min_loss(lm: LanguageModel, asked: _CiteArguments, removal: str) -> float:
    """The nats that a sentence loses at least without the sources if it needs them."""
    if asked.memory is not None:
        return asked.memory
    return MEMORY_OF_TEXT if lm.is_text_only else MEMORY[removal]


async def _scored(
    lm: LanguageModel,
    asked: _CiteArguments,
    query: Query,
    removal: str,
    min_loss: float,
    lost_without_all: Sequence[int],
) -> Attribution:
    """The sources' scores for each sentence; in one pass where that is asked for and predicts what
    hiding does.

    `lost_without_all` are the sentences that need the sources: a source is split into sentences
    where one of them relies on it.
    """
    least_share = min(asked.least_share, MIN_SHARE)
    splitting = SplitRule(least_share, tuple(lost_without_all), "sentence")
    failure = None
    if asked.accuracy == "fast" and lm.needs_internals and len(query.sources) >= FAST_FROM:
        attribution, failure = await _fast(lm, query, asked.masks or MASKS, asked.seed, splitting)
        if attribution is not None:
            return attribution

    method = replace(METHOD, removal=removal) if asked.method is None else asked.method
    # Those that need one source, and lose less without all, are known by their scores.
    if scores_in_nats(*describe(method)):
        splitting = splitting._replace(relied_on=min_loss)
    attribution = await attribution_of(lm, query, method, asked.seed, splitting)
    if failure:
        return replace(attribution, info={**attribution.info, "fell_back": failure})
    if asked.masks:
        return await checked_in_time(lm, query, attribution, asked.masks)
    return attribution


async def _fast(
    lm: LanguageModel, query: Query, masks: int | bool, seed: int, splitting: SplitRule
) -> tuple[Attribution | None, str | None]:
    """Scores of one pass that pass their check; or None, and the reason."""
    try:
        attribution = await attribution_of(lm, query, FAST, seed, splitting)
    except UnsupportedModelError as error:
        return None, str(error)
    lost_without_all = splitting.targets or ()
    attribution = await check_scores(lm, query, attribution, masks, lost_without_all or None)
    check = attribution.info["check"]
    # Where no sentence needs the sources, nothing is cited, and no score has to hold.
    if lost_without_all and not check["predicts"]:
        return None, check_text(check)
    return attribution, None


def _candidates(citations: Citations) -> list[list[int]]:
    """For each sentence the indices of the sources that may decide it, by their scores."""
    nats = in_nats(citations.attribution)
    candidates: list[list[int]] = []
    for scores in citations.scores:
        positive = scores.nan_to_num(0.0).clamp_min(0)
        least = LEAST_FALL if nats else MIN_SHARE * float(positive.sum())
        candidates.append(true_indices((positive > 0) & (positive >= least)))
    return candidates


def _with_numbers(
    decisive: Sequence[tuple[int, ...]], indices: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """What is decisive for each sentence, and the numbers of sources with some indices."""
    rows: list[tuple[int, ...]] = []
    for known, found in zip(decisive, indices, strict=True):
        rows.append((*known, *(index + 1 for index in sorted(found))))
    return tuple(rows)


def _undecided(citations: Citations) -> list[list[int]]:
    """For each sentence that falls without all sources, and that none of them decides alone, the
    indices of the best two that it cites.
    """
    undecided: list[list[int]] = []
    rows = zip(citations.sentences, citations.decisive, citations.scores, strict=True)
    for sentence, decisive, scores in rows:
        falls = ALL in decisive or sentence.loss >= citations.memory
        largest = float(scores.nan_to_num(-math.inf).amax())
        is_decided = any(number != ALL for number in decisive)
        is_decided |= largest > HARDLY * sentence.loss
        best = [citation.number - 1 for citation in sentence.citations[:2]]
        undecided.append(best if falls and not is_decided else [])
    return undecided


def _repeats(
    citations: Citations, falls_of_rows: Sequence[Sequence[Fall]]
) -> tuple[tuple[SourcePair, ...], ...]:
    """For each sentence the pairs of sources of which either would do, the largest first.

    It falls without both, and hardly without each of them. What both lose beyond the losses
    without each is at least `LEAST_FALL`, too.
    """
    rows: list[tuple[SourcePair, ...]] = []
    for scores, falls in zip(citations.scores, falls_of_rows, strict=True):
        repeats: list[SourcePair] = []
        for without_both in falls:
            first, second = without_both.sources
            losses = floats(scores[[first, second]])
            interaction = sum(losses) - without_both.loss
            does_fall = without_both.turned or without_both.loss >= citations.memory
            stands_with_one = max(losses) <= HARDLY * without_both.loss
            if does_fall and stands_with_one and interaction <= -LEAST_FALL:
                repeats.append(SourcePair((first + 1, second + 1), interaction, 0.0, "either"))
        rows.append(tuple(sorted(repeats, key=lambda repeat: repeat.score)))
    return tuple(rows)


async def _rules(
    lm: LanguageModel, query: Query, citations: Citations, seed: int
) -> tuple[Rule | None, ...]:
    """The rule of each sentence over whole sources; None for those that do not need them."""
    sentences = [row for row in range(len(query.targets)) if citations.needs_sources(row)]
    units = make_units(
        query.encoding, "source", prompt_tokens=query.prompt_tokens, sources=query.sources
    )
    in_prompt = [unit for unit in units if unit.end <= query.prompt_length]
    by_source = replace(query, units=tuple(in_prompt), unit="source")
    rules: list[Rule | None] = [None] * len(query.targets)
    if sentences:
        sameness = Sameness.of(lm, by_source, "logprob")
        found = await rules_of(sameness, sentences, seed=seed)
        for sentence, of_sentence in zip(sentences, found, strict=True):
            rules[sentence] = of_sentence
    return tuple(rules)


def _cited(citations: Citations) -> list[list[int]]:
    """For each sentence the indices of the sources that it cites."""
    cited: list[list[int]] = []
    for sentence in citations.sentences:
        cited.append([citation.number - 1 for citation in sentence.citations])
    return cited


async def _answer_without_sources(
    lm: LanguageModel, prompt: Prompt | None, writing: dict[str, Any], calls: int | None
) -> str | None:
    """The answer to a prompt that has no sources; None without a prompt, or when time is up.

    `calls` are the requests that a chat model has left.
    """
    if not prompt or calls == 0:
        return None
    unit = "turn" if lm.is_text_only else "token"  # nothing is asked about units
    question = Question(prompt=prompt, target_unit="all", unit=unit, max_calls=calls, **writing)
    try:
        query = await prepare(lm, question)
    except OutOfTimeError:
        return None
    return "".join(query.target_texts)
