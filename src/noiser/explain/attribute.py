"""`noiser.attribute`: prompt in, Attribution out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, TypeGuard, TypeVar, get_args, overload

import torch

from noiser.attribution import Attribution
from noiser.checks import check_choice, check_seed, plain
from noiser.engine import Clean, CleanStats, Counters, LocalEngine, Query, SharedProgress, Spent, Steps, run_interleaved
from noiser.errors import NoiserError, ParameterError
from noiser.explain.refine import BY_DEFAULT, Budget, SplitRule, refine
from noiser.methods import Method, check_answers, describe, make_method
from noiser.model.clean import Passes
from noiser.model.language_model import LanguageModel
from noiser.objectives import Objective, name_of
from noiser.text import token_texts
from noiser.types import AutoUnit, Progress, Prompt, Prompts, Sources, SpecialTokens, Target, TargetUnit, Unit
from noiser.version import __version__, version_of

T = TypeVar("T")


@overload
def attribute(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    method: str | Method = "noiser",
    target: str | int | None = None,
    foil: str | int | None = None,
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    unit: Unit | AutoUnit = "token",
    sources: Sources | None = None,
    continuation_units: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    special_tokens: SpecialTokens | None = None,
    of: Objective | None = None,
    progress: Progress | None = None,
) -> Attribution: ...


@overload
def attribute(
    lm: LanguageModel,
    prompt: Prompts,
    *,
    method: str | Method = "noiser",
    target: str | int | Sequence[str | int | None] | None = None,
    foil: str | int | Sequence[str | int | None] | None = None,
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    unit: Unit | AutoUnit = "token",
    sources: Sequence[Sources | None] | None = None,
    continuation_units: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int | Sequence[int] = 0,
    special_tokens: SpecialTokens | None = None,
    of: Objective | None = None,
    progress: Progress | None = None,
) -> list[Attribution]: ...


def attribute(
    lm: LanguageModel,
    prompt: Prompt | Prompts,
    *,
    method: str | Method = "noiser",
    target: str | int | Sequence[str | int | None] | None = None,
    foil: str | int | Sequence[str | int | None] | None = None,
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    unit: Unit | AutoUnit = "token",
    sources: Sources | Sequence[Sources | None] | None = None,
    continuation_units: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int | Sequence[int] = 0,
    special_tokens: SpecialTokens | None = None,
    of: Objective | None = None,
    progress: Progress | None = None,
) -> Attribution | list[Attribution]:
    """Which parts of the prompt made the model say that?

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text, or chat messages `[{"role": ..., "content": ...}]`, rendered with the model's own template. A
            list of texts or of chats is many prompts: they run side by side, which is faster, and give the same
            numbers as separate calls.
        method: a registry name (`noiser methods` lists them), or a method with its hyper-parameters. "inseq:NAME",
            "captum:NAME" and "shapiq:NAME" are the methods of those libraries.
        target: what is explained. None: the greedy continuation. Text: that continuation, token by token; a space is
            put before it where the model finds that reading more probable. int: a token id.
        foil: "why target rather than foil?"; text or token id. With several tokens, the question is about the first
            one in which target and foil differ; with target_unit="all", about the log-probabilities ("prob": the
            geometric means) of both continuations as wholes. With many prompts, `target`, `foil` and `seed` are one
            for all, or a list of one for each.
        max_new_tokens: how many continuation tokens to attribute when `target` is None. Fewer if the model ends.
        target_unit: what each row explains: "token", one token of the continuation; "word", "sentence", or "all" of it,
            as a span of tokens; or a list of (start, end) character spans of the continuation's text. What is explained
            of a span is the geometric mean of its tokens' probabilities ("prob"), the sum of their logarithms
            ("logprob"), or the root mean square of their distances ("hellinger"). See docs/concepts.md.
        unit: what gets a score: "token" (byte-level pieces of one character are one unit), "word", "sentence", "turn"
            (each message of a chat), "source", or a list of (start, end) character spans of the prompt. "auto", for
            long prompts: sources, or else sentences (of a very long prompt runs of them), first, then smaller units
            inside those that carry the score; a unit's parts add up to its score. See `noiser.explain.refine`.
        sources: documents in the prompt, or examples: texts or (title, text) pairs that each stand in it word for word;
            `noiser.place_sources` makes such a prompt. Nothing else in the prompt is then a unit. With many prompts,
            a list of sources, or None, for each.
        continuation_units: with several targets, the continuation's earlier tokens are units too.
        max_forwards: with unit="auto", about the most token-forwards to spend; the coarse units are always scored.
        max_seconds: likewise in seconds; many prompts then run one by one, each with that much.
        seed: of all random numbers; the global random state is neither used nor changed.
        special_tokens: "frozen": special tokens are neither perturbed nor scored; "perturbed": as the published
            script does. None: as the method's profile says, which is "frozen" unless it is "authors".
        of: what is explained in place of the targets' probabilities: a function from log-probabilities at a target's
            tokens to one number per sample, such as `noiser.objectives.entropy`. It takes the place of the method's
            `score`; `targets` still say where it is read. `info["of"]` names it.
        progress: called with (done, expected) token-forwards while it runs; with many prompts, in prompts.

    Returns:
        An `Attribution`: `scores` [targets, units], raw, and everything needed to run it again. For many prompts a
        list of them, in order.

    Raises:
        PromptError, TargetError, UnitError: the question cannot be asked; each says why and what to do,
            and which of many prompts it is about; all are tokenised before anything runs.
        UnknownNameError, ParameterError: no such method, or a hyper-parameter outside its domain.
        UnsupportedModelError: the method needs what the model does not give, such as gradients of one in vLLM.
        NumericalError: the model returned NaN or infinite logits.
        ModelError: memory does not suffice.
    """
    options: dict[str, Any] = {
        "method": make_method(method),
        "max_new_tokens": max_new_tokens,
        "target_unit": target_unit,
        "unit": unit,
        "continuation_units": continuation_units,
        "budget": Budget.of(max_forwards, max_seconds, unit),
        "special_tokens": special_tokens,
        "of": of,
    }
    prompt = plain(prompt)
    many = is_many(prompt)
    prompts: list[Any] = list(prompt) if many else [prompt]
    given: dict[str, Any] = {"target": target, "foil": foil, "seed": seed, "sources": sources}
    columns = [one_for_each(name, value, len(prompts)) if many else [value] for name, value in given.items()]
    engine = LocalEngine(lm, many=many and max_seconds is None)
    for index, text in enumerate(prompts if many else ()):
        try:
            lm.encode(text)
        except NoiserError as error:
            raise _about(error, index) from None
    shared = SharedProgress(len(prompts), progress) if many else None
    coroutines = (
        attribution_passes(
            engine,
            text,
            progress=shared.of(index) if shared else progress,
            **dict(zip(given, values, strict=True)),
            **options,
        )
        for index, (text, *values) in enumerate(zip(prompts, *columns, strict=True))
    )
    attributions = run_all(engine, coroutines, shared)
    return attributions if many else attributions[0]


def run_all(engine: LocalEngine, coroutines: Iterable[Passes[T]], shared: SharedProgress | None = None) -> list[T]:
    """What coroutines return, in their order; of many (`shared`) an error says which one it is about."""
    results: dict[int, T] = {}
    with closing(run_interleaved(engine, coroutines, shared)) as outcomes:
        for index, result, error in outcomes:
            if error is not None:
                raise _about(error, index) if shared else error
            results[index] = result
            if shared:
                shared.finish(index)
    return [results[index] for index in range(len(results))]


def attribution_passes(
    engine: LocalEngine,
    prompt: Prompt,
    *,
    method: Method,
    target: str | int | None = None,
    foil: str | int | None = None,
    max_new_tokens: int = 1,
    target_unit: TargetUnit = "token",
    unit: Unit | AutoUnit = "token",
    sources: Sources | None = None,
    continuation_units: bool = True,
    budget: Budget | None = None,
    seed: int = 0,
    special_tokens: SpecialTokens | None = None,
    of: Objective | None = None,
    progress: Progress | None = None,
) -> Passes[Attribution]:
    """The attribution of one prompt as a coroutine, for `noiser.engine.run_interleaved`; see `attribute`."""
    seed = check_seed(seed)
    if special_tokens is not None:
        check_choice("special_tokens", special_tokens, get_args(SpecialTokens))
    check_answers(method, engine.lm.identity.name, engine.lm.looks_inside)
    query = yield from engine.query(
        prompt,
        target=target,
        foil=foil,
        max_new_tokens=max_new_tokens,
        target_unit=target_unit,
        unit=unit,
        sources=sources,
        continuation_units=continuation_units,
        special_tokens=special_tokens or getattr(method, "special_tokens", "frozen"),
        of=of,
    )
    steps = attribution_steps(engine.lm, query, method, seed, budget or Budget())
    return (yield from engine.answer(query, steps, progress))


def is_many(prompt: Prompt | Prompts) -> TypeGuard[Prompts]:
    """Whether it is several prompts: a list of texts or chats. A list of messages is one chat."""
    return (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(one, str | list | tuple) for one in prompt)
    )


def attribution_steps(
    lm: LanguageModel,
    query: Query,
    method: Method,
    seed: int,
    budget: Budget,
    rule: SplitRule = BY_DEFAULT,
) -> Steps[Attribution]:
    """What a method says of a query, as an `Attribution`; with unit "auto", coarse units first, split by `rule`."""
    if query.unit == "auto":
        units, scores = yield from refine(method, query, seed, budget, rule)
    else:
        units, scores = query.units, (yield from method(query, torch.Generator().manual_seed(seed)))
    clean: CleanStats = yield Clean()
    spent: Counters = yield Spent()
    name, parameters = describe(method)
    ids = [tuple(query.target_ids[token] for token in span) for span in query.target_spans]
    columns = zip(query.target_texts, ids, clean.probabilities, clean.ranks, query.skipped_ids, strict=True)
    foil = None
    if clean.foil_probability is not None and clean.foil_rank is not None:
        first, *rest = query.foil_ids
        (text,) = query.foil_branch.target_texts if query.foil_branch else token_texts(lm.tokenizer, [first])
        foil = Target(text, first, clean.foil_probability, clean.foil_rank, rest=tuple(rest))
    ran: dict[str, Any] = {"token_forwards": spent.token_forwards, "passes": spent.passes} if spent.passes else {}
    ran |= {"left_out": spent.left_out} if spent.left_out else {}
    if not isinstance(query.prompt, str) and lm.chat_template_kwargs:
        ran["chat_template_kwargs"] = lm.chat_template_kwargs
    if special := [i for unit in units for i in unit.token_indices if query.encoding.frozen[i]]:
        ran["special_tokens"] = special
    if query.sources:
        ran["sources"] = [{"title": s.title, "start": s.start, "end": s.end} for s in query.sources]
    return Attribution(
        text=query.encoding.text,
        prompt_length=query.prompt_length,
        scores=scores.scores,
        units=units,
        targets=tuple(
            Target(text, ids[0], probability, rank, rest=ids[1:], before=before)
            for text, ids, probability, rank, before in columns
        ),
        thresholds=scores.thresholds,
        k_min=scores.k_min,
        stderr=scores.stderr,
        foil=foil,
        unit=query.unit,
        target_unit=query.target_unit,
        method=name,
        parameters=parameters,
        seed=seed,
        model=query.model,
        prompt=query.prompt if isinstance(query.prompt, str) else tuple(dict(message) for message in query.prompt),
        versions={"noiser": __version__} | {package: version_of(package) for package in ("torch", "transformers")},
        info={**scores.info, **ran, **({} if query.of is None else {"of": name_of(query.of)})},
    )


def one_for_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """One value for each prompt."""
    value = plain(value)
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ParameterError(
            f"{name} is a list of {len(value)} for {count} prompts; expected one for each, or one for all."
        )
    if name == "sources" and any(isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) for one in value):
        raise ParameterError(
            f"sources has a (title, text) pair for {count} prompts; expected a list of sources for each of them, as in "
            "sources=[[(title, text), ...], ...]. Repeat the list, if all have the same."
        )
    return list(value)


def _about(error: Exception, index: int) -> Exception:
    """The error, saying which prompt it is about: in its message if it is ours, else in a note."""
    text = f"Prompt {index}: {error}"
    if isinstance(error, NoiserError) and error.args and error.args[0] == str(error):
        error.args = (text, *error.args[1:])
    else:
        error.add_note(f"Prompt {index}, counted from 0, was being attributed.")
    return error
