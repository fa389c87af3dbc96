"""`noiser.cite`: a question and sources in, the answer with its citations out."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from noiser.attribution import Attribution
from noiser.checks import check_choice, check_probability
from noiser.engine import Absence, Effects, EffectTable, LocalEngine, Query, Steps, without
from noiser.engine.scheduler import Progress, complete
from noiser.errors import TargetError
from noiser.explain.attribute import attribution_steps
from noiser.explain.citations import Citations
from noiser.explain.refine import Budget, SplitRule
from noiser.methods import Method, Occlusion, make_method
from noiser.model.clean import Passes
from noiser.model.language_model import LanguageModel
from noiser.model.sources import TEMPLATE, place_sources, without_sources
from noiser.types import Prompt, Sources

__all__ = ["LEAST_SHARE", "MEMORY", "METHOD", "citation_passes", "cite"]

METHOD = Occlusion(score="logprob", baseline="hidden")
"""One run of question and answer per source, however long the sources are. Where a model cannot hide a source, its rows
become zeros; from a text server it is taken out."""

MEMORY = 3.0
"""A sentence is from memory if its log-probability falls by less than this many nats when all sources are removed: it
is then less than e³ ≈ 20 times as improbable."""

LEAST_SHARE = 0.2
"""A source is cited if it has at least this share of a sentence's positive scores."""

_LINE_END = "\n"


def cite(
    lm: LanguageModel,
    question: Prompt,
    sources: Sources,
    *,
    method: str | Method | None = None,
    answer: str | None = None,
    max_new_tokens: int = 128,
    template: str | None = TEMPLATE,
    unit: Literal["auto", "source", "sentence"] = "auto",
    memory: float = MEMORY,
    least_share: float = LEAST_SHARE,
    contrast: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Citations:
    """Answers a question from sources, and says which of them each sentence of the answer was written from.

    The sources are put into the prompt, the model answers, and each source is hidden from question and answer: what a
    sentence's log-probability loses is the source's score. Sources that carry the score are then taken apart into
    sentences. With all sources hidden, a sentence that loses less than `memory` is from the model's memory, and cites
    nothing.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        question: a text; it becomes a user's message if the tokenizer has a chat template. Or chat messages, whose last
            one gets the sources.
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
        memory: see above, in nats.
        least_share: a source is cited, and taken apart, if it has this share of a sentence's positive scores.
        contrast: whether the model is asked without the sources, too.
        max_forwards: with unit="auto", about the most token-forwards to spend; every source is always scored.
        max_seconds: likewise in seconds.
        seed: of all random numbers.
        progress: called with (done, expected) token-forwards while sources are scored.

    Raises:
        PromptError, UnitError: the prompt or a source is empty, too long, or does not stand in the prompt.
        TargetError: the answer is empty.
        ModelError: memory does not suffice; the message says what it would take.
        UnknownNameError, ParameterError: no such method, or a value outside its domain.
    """
    engine = LocalEngine(lm)
    passes = citation_passes(
        engine,
        question,
        sources,
        method=None if method is None else make_method(method),
        answer=answer,
        max_new_tokens=max_new_tokens,
        template=template,
        unit=unit,
        memory=memory,
        least_share=least_share,
        contrast=contrast,
        budget=Budget.of(max_forwards, max_seconds, unit),
        seed=seed,
        progress=progress,
    )
    return complete(engine, passes)


def citation_passes(
    engine: LocalEngine,
    question: Prompt,
    sources: Sources,
    *,
    method: Method | None = None,
    answer: str | None = None,
    max_new_tokens: int = 128,
    template: str | None = TEMPLATE,
    unit: Literal["auto", "source", "sentence"] = "auto",
    memory: float = MEMORY,
    least_share: float = LEAST_SHARE,
    contrast: bool = True,
    budget: Budget | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Passes[Citations]:
    """The citations of one answer as a coroutine, for `noiser.engine.run_interleaved`; see `cite`."""
    check_choice("unit", unit, ("auto", "source", "sentence"))
    check_probability("least_share", least_share)
    chat = bool(getattr(engine.lm.tokenizer, "chat_template", None))
    asked = [{"role": "user", "content": question}] if chat and template and isinstance(question, str) else question
    writing = {"max_new_tokens": max_new_tokens, "stop": None if chat else _LINE_END}
    query = yield from engine.query(
        asked if template is None else place_sources(asked, sources, template),
        target=answer,
        target_unit="sentence",
        unit=unit,
        sources=sources,
        continuation_units=False,
        **writing,
    )
    written = "".join(query.target_texts)
    if not written.strip():
        raise TargetError(
            f"{engine.lm.identity.name} answers nothing; expected text to cite sources for. Ask otherwise, or name the "
            "answer."
        )
    method = method or _default(engine.lm, query)
    steps = _steps(engine.lm, query, method, seed, budget or Budget(), memory, least_share)
    attribution, losses = yield from engine.answer(query, steps, progress)
    alone = without_sources(asked, query.sources, template) if contrast else None
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
    method: Method,
    seed: int,
    budget: Budget,
    memory: float,
    least_share: float,
) -> Steps[tuple[Attribution, tuple[float, ...]]]:
    """The attribution, and what each sentence loses without any source."""
    spans = [(source.start, source.end) for source in query.sources]
    inside = [u for u in query.units if any(start < u.end and u.start < end for start, end in spans)]
    positions = tuple(sorted(position for unit in inside for position in unit.token_indices))
    removal: EffectTable = yield Effects([without(positions, None, _default(lm, query).baseline)], score="logprob")
    losses = tuple(removal.score[0].tolist())
    relied = tuple(row for row, loss in enumerate(losses) if loss >= memory)
    rule = SplitRule(least_share, relied, "sentence")
    attribution = yield from attribution_steps(lm, query, method, seed, budget, rule)
    return attribution, losses
