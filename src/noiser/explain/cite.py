"""`noiser.cite`: a question and sources in, the answer with its citations out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, overload

from noiser.attribution import Attribution
from noiser.checks import check_choice, check_probability, check_seed, plain
from noiser.engine import Absence, Effects, EffectTable, LocalEngine, Query, SharedProgress, Steps, without
from noiser.errors import ParameterError, TargetError
from noiser.explain.attribute import attribution_steps, is_many, one_for_each, run_all
from noiser.explain.citations import Citations
from noiser.explain.refine import MIN_SHARE, Budget, SplitRule
from noiser.methods import Method, Occlusion, make_method
from noiser.model.clean import Passes
from noiser.model.language_model import LanguageModel
from noiser.text import TEMPLATE, begin_of_sources, place_sources, without_sources
from noiser.types import CitedUnit, Progress, Prompt, Prompts, Sources

METHOD = Occlusion(score="logprob", baseline="hidden")
"""One run of question and answer per source, however long the sources are. Where a model cannot hide a source, its rows
become zeros; from a text server it is taken out."""

MEMORY: dict[Absence, float] = {"hidden": 3.0, "zero": 4.0, "delete": 4.0}
"""A sentence is from memory if its log-probability falls by less than this many nats when all sources are removed in
this way. Chosen on planted development questions, see docs/howto/retrieval.md: e³ ≈ 20 times as improbable."""

LEAST_SHARE = 0.2
"""A source is cited if it has at least this share of a sentence's positive scores."""

_LINE_END = "\n"


@overload
def cite(
    lm: LanguageModel,
    question: Prompt,
    sources: Sources,
    *,
    method: str | Method | None = None,
    answer: str | None = None,
    max_new_tokens: int = 128,
    template: str | None = TEMPLATE,
    unit: CitedUnit = "auto",
    memory: float | None = None,
    least_share: float = LEAST_SHARE,
    contrast: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Citations: ...


@overload
def cite(
    lm: LanguageModel,
    question: Prompts,
    sources: Sequence[Sources],
    *,
    method: str | Method | None = None,
    answer: Sequence[str | None] | None = None,
    max_new_tokens: int = 128,
    template: str | None = TEMPLATE,
    unit: CitedUnit = "auto",
    memory: float | None = None,
    least_share: float = LEAST_SHARE,
    contrast: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Citations]: ...


def cite(
    lm: LanguageModel,
    question: Prompt | Prompts,
    sources: Sources | Sequence[Sources],
    *,
    method: str | Method | None = None,
    answer: str | Sequence[str | None] | None = None,
    max_new_tokens: int = 128,
    template: str | None = TEMPLATE,
    unit: CitedUnit = "auto",
    memory: float | None = None,
    least_share: float = LEAST_SHARE,
    contrast: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Citations | list[Citations]:
    """Answers a question from sources, and says which of them each sentence of the answer was written from.

    The sources are put into the prompt, the model answers, and each source is hidden from question and answer: what a
    sentence's log-probability loses is the source's score. Sources that carry the score are then taken apart into
    sentences. With all sources hidden, a sentence that loses less than `memory` is from the model's memory, and cites
    nothing.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        question: a text; it becomes a user's message if the tokenizer has a chat template. Or chat messages, whose last
            one gets the sources. A list of texts or of chats is many questions, each with its own list of sources (and
            of answers); they run side by side and give the same numbers as separate calls.
        sources: texts or (title, text) pairs.
        method: what scores the sources, by name or with its hyper-parameters. None for `METHOD`, the cheapest; one
            source at a time, it gives little to two sources that say the same. `ContextCite(baseline="hidden")` and
            `KernelShap(baseline="hidden")` see that.
        answer: a text whose sentences are cited, in place of the model's own answer.
        max_new_tokens: the longest answer. Without a chat template it is one line at most.
        template: how sources and question make a prompt; has "{sources}" and "{question}". None: the sources already
            stand in `question`, which is the whole prompt, word for word.
        unit: "auto" scores sources, and the sentences of those that carry a sentence's score; "source" only the
            former; "sentence" all sentences of all sources.
        memory: see above, in nats; None for `MEMORY`: 3 where sources are hidden, 4 where they are removed otherwise.
        least_share: a source is cited if it has this share of a sentence's positive scores. It is taken apart if it has
            a twentieth of all scores: what is not cited helps to predict, too.
        contrast: whether the model is also asked without the sources.
        max_forwards: with unit="auto", about the most token-forwards to spend; every source is always scored.
        max_seconds: likewise in seconds; many questions then run one by one, each with that much.
        seed: of all random numbers.
        progress: called with (done, expected) token-forwards while sources are scored; with many questions, in
            questions.

    Raises:
        PromptError, UnitError: the prompt or a source is empty, too long, or does not stand in the prompt.
        TargetError: the answer is empty.
        ModelError: memory does not suffice.
        UnknownNameError, ParameterError: no such method, or a value outside its domain.
    """
    options: dict[str, Any] = {
        "method": None if method is None else make_method(method),
        "max_new_tokens": max_new_tokens,
        "template": template,
        "unit": unit,
        "memory": memory,
        "least_share": least_share,
        "contrast": contrast,
        "budget": Budget.of(max_forwards, max_seconds, unit),
        "seed": seed,
    }
    question, sources = plain(question), plain(sources)
    many = is_many(question)
    questions: list[Any] = list(question) if many else [question]
    documents: Sequence[Any] = one_for_each("sources", sources, len(questions)) if many else [sources]
    answers: Sequence[Any] = one_for_each("answer", answer, len(questions)) if many else [answer]
    engine = LocalEngine(lm, many=many and max_seconds is None)
    shared = SharedProgress(len(questions), progress) if many else None
    coroutines = (
        _citation_passes(engine, *texts, answer=text, progress=shared.of(i) if shared else progress, **options)
        for i, (*texts, text) in enumerate(zip(questions, documents, answers, strict=True))
    )
    citations = run_all(engine, coroutines, shared)
    return citations if many else citations[0]


def _citation_passes(
    engine: LocalEngine,
    question: Prompt,
    sources: Sources,
    *,
    method: Method | None,
    answer: str | None,
    max_new_tokens: int,
    template: str | None,
    unit: CitedUnit,
    memory: float | None,
    least_share: float,
    contrast: bool,
    budget: Budget,
    seed: int,
    progress: Progress | None,
) -> Passes[Citations]:
    """The citations of one answer; see `cite`."""
    check_choice("unit", unit, ("auto", "source", "sentence"))
    seed = check_seed(seed)
    check_probability("least_share", least_share)
    if memory is not None and (not isinstance(memory, int | float) or math.isnan(memory)):
        raise ParameterError(f"memory is {memory!r}; expected a number of nats, or None for the default.")
    lm = engine.lm
    chat = bool(getattr(lm.tokenizer, "chat_template", None))
    asked = [{"role": "user", "content": question}] if chat and template and isinstance(question, str) else question
    prompt = asked if template is None else place_sources(asked, sources, template)
    read = lm.encode(prompt)
    begin = 0 if template is None else begin_of_sources(asked, prompt, template, read.text)
    writing = {"max_new_tokens": max_new_tokens, "stop": None if chat else _LINE_END}
    query = yield from engine.query(
        prompt,
        target=answer,
        target_unit="sentence",
        unit=unit,
        sources=sources,
        sources_begin=begin,
        continuation_units=False,
        **writing,
    )
    written = "".join(query.target_texts)
    if not written.strip():
        raise TargetError(
            f"{lm.identity.name} answers nothing; expected text to cite sources for. Ask otherwise, or name the answer."
        )
    default = _default(lm, query)
    memory = MEMORY[default.baseline] if memory is None else memory
    steps = _steps(lm, query, method, default, seed, budget, memory, least_share)
    attribution, losses = yield from engine.answer(query, steps, progress)
    alone = None
    if contrast:
        alone = without_sources(asked, template, read.text, read.contents, query.sources)
    other = None if alone is None else (yield from engine.query(alone, target_unit="all", **writing))
    return Citations(
        question=question,
        sources=query.sources,
        answer=written,
        answer_without=None if other is None else "".join(other.target_texts),
        attribution=attribution,
        losses=losses,
        memory=memory,
        least_share=least_share,
    )


def _default(lm: LanguageModel, query: Query) -> Occlusion:
    """`METHOD`, as far as the model can do it."""
    if lm.hides_tokens(len(query.token_ids)):
        return METHOD
    baseline: Absence = "zero" if lm.takes_embeddings else "delete"
    return replace(METHOD, baseline=baseline)


def _steps(
    lm: LanguageModel,
    query: Query,
    method: Method | None,
    default: Occlusion,
    seed: int,
    budget: Budget,
    memory: float,
    least_share: float,
) -> Steps[tuple[Attribution, tuple[float, ...]]]:
    """The attribution, and what each sentence loses without any source."""
    spans = [(source.start, source.end) for source in query.sources]
    inside = [u for u in query.units if any(start < u.end and u.start < end for start, end in spans)]
    positions = tuple(sorted(position for unit in inside for position in unit.token_indices))
    removal: EffectTable = yield Effects([without(positions, None, default.baseline)], score="logprob", leads=False)
    losses = tuple(removal.score[0].tolist())
    relied = tuple(row for row, loss in enumerate(losses) if loss >= memory)
    rule = SplitRule(min(least_share, MIN_SHARE), relied, "sentence")
    attribution = yield from attribution_steps(lm, query, method or default, seed, budget, rule)
    return attribution, losses
