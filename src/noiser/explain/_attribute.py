"""`noiser.attribute`: a prompt in, an `Attribution` out; or many prompts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, Unpack, overload

from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution, Attributions
from noiser.checks import check_positive, check_seed, plain
from noiser.engine import OBJECTIVES, Prediction, Query, prepare, run_one, sink_of
from noiser.errors import OutOfTimeError
from noiser.explain.announce import announce
from noiser.explain.check import check_masks, check_scores
from noiser.explain.injected import injected_messages
from noiser.explain.many import for_each, is_many, naming_prompt, run_many
from noiser.explain.refine import SplitRule, refine
from noiser.methods import (
    Method,
    Scores,
    check_answers,
    check_removes,
    describe,
    for_text,
    make_method,
    run_method,
)
from noiser.model.language_model import LanguageModel, check_model
from noiser.notices import warn
from noiser.objectives import name_of
from noiser.progress import progress_of, quicker_ways
from noiser.registry import __version__, version_of
from noiser.tensors import float_rows
from noiser.text import Encoding, token_texts
from noiser.text.pictures import has_pictures, preview, sha256_of_pixels, without_data
from noiser.types import (
    ANOTHER_ANSWER,
    AutoUnit,
    ImageRemoval,
    ImageUnit,
    Objective,
    Progress,
    Prompt,
    Prompts,
    Question,
    Sources,
    Span,
    SpecialTokens,
    TargetUnit,
    Unit,
    Without,
)

T = TypeVar("T")


class OptionsOfOne(TypedDict, total=False):
    """The keyword arguments of `attribute` for one prompt."""

    method: str | Method | None
    target: str | int | None
    foil: str | int | None
    max_new_tokens: int | None
    target_unit: TargetUnit | None
    unit: Unit | AutoUnit
    sources: Sources | None
    continuation_units: bool | None
    seed: int
    special_tokens: SpecialTokens | None
    of: Objective | None
    check: int | bool
    max_seconds: float | None
    max_calls: int | None
    image_unit: ImageUnit
    image_removal: ImageRemoval
    progress: Progress | bool | None


class OptionsOfMany(TypedDict, total=False):
    """The keyword arguments of `attribute` for many prompts: some are one for all, or a list of one
    for each.
    """

    method: str | Method | None
    target: str | int | Sequence[str | int | None] | None
    foil: str | int | Sequence[str | int | None] | None
    max_new_tokens: int | None
    target_unit: TargetUnit | None
    unit: Unit | AutoUnit
    sources: Sources | Sequence[Sources | None] | None
    continuation_units: bool | None
    seed: int | Sequence[int]
    special_tokens: SpecialTokens | None
    of: Objective | None
    check: int | bool
    max_seconds: float | None
    max_calls: int | None
    image_unit: ImageUnit
    image_removal: ImageRemoval
    progress: Progress | bool | None


def _saying_where_hyper_parameters_belong(function: Callable[..., T]) -> Callable[..., T]:
    """The function, whose TypeError for an argument that it does not have has a note."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> T:
        try:
            signature.bind(*arguments, **options)
        except TypeError as error:
            error.add_note(_where_hyper_parameters_belong(options))
            raise
        return function(*arguments, **options)

    return call


def _where_hyper_parameters_belong(options: Mapping[str, Any]) -> str:
    """A sentence with the caller's own argument in its place."""
    known = OptionsOfMany.__annotations__
    unknown = {key: value for key, value in options.items() if key not in known}
    if not unknown:
        return "See help(noiser.attribute)."
    key, value = next(iter(unknown.items()))
    method = type(make_method(options.get("method") or "joint")).__name__
    return f"Hyper-parameters belong to the method: method=noiser.{method}({key}={value!r})."


@overload
def attribute(
    lm: LanguageModel, prompt: Prompt, **options: Unpack[OptionsOfOne]
) -> Attribution: ...


@overload
def attribute(
    lm: LanguageModel, prompt: Prompts, **options: Unpack[OptionsOfMany]
) -> Attributions: ...


@_saying_where_hyper_parameters_belong
def attribute(
    lm: LanguageModel,
    prompt: Prompt | Prompts,
    *,
    method: str | Method | None = None,
    target: str | int | Sequence[str | int | None] | None = None,
    foil: str | int | Sequence[str | int | None] | None = None,
    max_new_tokens: int | None = None,
    target_unit: TargetUnit | None = None,
    unit: Unit | AutoUnit = "word",
    sources: Sources | Sequence[Sources | None] | None = None,
    continuation_units: bool | None = None,
    seed: int | Sequence[int] = 0,
    special_tokens: SpecialTokens | None = None,
    of: Objective | None = None,
    check: int | bool = False,
    max_seconds: float | None = None,
    max_calls: int | None = None,
    image_unit: ImageUnit = (4, 4),
    image_removal: ImageRemoval = "grey",
    progress: Progress | bool | None = None,
) -> Attribution | Attributions:
    """Which parts of the prompt made the model say that?

    Many prompts run side by side, which is faster, and give the same numbers as separate calls;
    `target`, `foil`, `seed` and `sources` are then one for all, or a list of one for each.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text, or chat messages `[{"role": ..., "content": ...}]`, rendered with the
            model's own template; or a list of texts or of chats: many prompts.
        method: a registry name (`noiser methods` lists them), or a method with its
            hyper-parameters. "inseq:NAME", "captum:NAME" and "shapiq:NAME" are the methods of those
            libraries.
        target: the continuation to explain. None: the greedy one. Text: that continuation; a space
            is put before it where the model finds that reading more probable. int: a token id. Of a
            chat "action": the assistant's last message, one with tool calls if there is one, by
            what stands before it; "action:3": message 3.
        foil: "why target rather than foil?"; text or token id. Tokens with which both begin stand
            before both. The rest of the target is contrasted with the rest of the foil as wholes,
            by two runs of the model if either has several tokens. One row; `target_unit` is left
            out.
        max_new_tokens: how many tokens of the greedy continuation to explain; fewer if the model
            ends. None: 1, or 40 of a chat's answer, which is explained where neither `target` nor
            `foil` nor `of` is given. A word that these tokens cut goes on to its end, unless `unit`
            or `target_unit` asks for tokens.
        target_unit: the part of the continuation that each row explains: "token", "word", "field",
            "sentence" or "all" of it, as a span of tokens; or a list of (start, end) character
            spans of its text. None: "all" of a chat's answer and of a target that is a text of
            several tokens, else "word", or "token" where `unit` is "token". See docs/prompts.md.
        unit: the part of the prompt that gets a score: "word" (with the punctuation that it
            touches), "token" (byte-level pieces of one character are one unit), "field" (of JSON,
            or an argument), "sentence", "line", "paragraph", "turn" (each message of a chat),
            "source", or a list of (start, end) character spans. "auto", for long prompts: sources,
            or else messages of a chat with more than four, or else sentences, first, then smaller
            units inside those that carry the score; a unit's parts add up to its score.
        sources: documents in the prompt, or examples: texts or (title, text) pairs that each stand
            in it word for word; `noiser.place_sources` makes such a prompt. Nothing else in the
            prompt is then a unit.
        continuation_units: with several targets, whether the continuation's earlier tokens are
            units too. None: they are, except where each row is a field of a call.
        seed: of all random numbers; the global random state is neither used nor changed.
        special_tokens: "frozen": special tokens are neither perturbed nor scored; "perturbed": as
            the published script does. None: "perturbed" for a method with the authors' profile,
            else "frozen".
        of: the number to explain in place of the targets' probabilities: a function from
            log-probabilities at a target's tokens to one number per sample, such as
            `noiser.objectives.entropy`. `info["of"]` names it.
        check: whether to test the scores on this prompt, with further inputs that keep half of the
            units: True for as many as the test needs, 20 to 64, or a number, such as 16.
            `info["check"]` says how well the scores predict them, and every display says it. See
            `noiser.explain.check`.
        max_seconds: a bound on the call. When so many seconds have gone by, what is there by then
            is returned, and `info["unfinished"]`, and every display, says how many inputs were not
            run: units without a score were not reached, and methods that draw inputs have used
            fewer. It is an error where there is nothing to return yet. Of many prompts, those that
            have no result are left out, with a warning.
        max_calls: of a chat model, the most requests for a prompt; None for the model's own limit.
            Stored answers do not count. Where it is reached, as where `max_seconds` go by.
        image_unit: the part of a picture in the prompt that gets a score: (rows, columns), "image"
            (one score each), boxes (left, top, right, bottom) in its pixels, {picture index:
            boxes}, or None. See docs/howto/pictures.md.
        image_removal: how a region is removed: "grey" pixels, those that the model's preprocessing
            maps to 0; "blur", which keeps colours; or "rows": its tokens lose what the method's
            own removal takes from words.
        progress: called with (done, expected) token-forwards while it runs; with many prompts, in
            prompts. None: a bar on a terminal or in a notebook, after a second; False: none.

    Returns:
        An `Attribution`: `scores` [targets, units], raw, and everything needed to run it again. For
        many prompts `Attributions`, a list of them in order that also has means over prompts, a
        table and a page.

    Raises:
        NoiserError: the question cannot be asked of this model; the message says which of many
            prompts it is about.

    Example:
        >>> prompt = "The capital of France is"
        >>> att = noiser.attribute(lm, prompt, method="occlusion")  # doctest: +SKIP
    """
    check_model(lm)
    masks = check_masks(check)
    if max_seconds is not None:
        check_positive("max_seconds", max_seconds)
    made = method_for(lm, method)
    given: Any = plain(prompt)
    own: dict[str, Any] = {"target": target, "foil": foil, "sources": sources, "seed": seed}
    shared: dict[str, Any] = {"unit": unit, "continuation_units": continuation_units, "of": of}
    shared["max_new_tokens"] = max_new_tokens
    shared["max_calls"] = max_calls
    shared["image_unit"] = image_unit
    shared["image_removal"] = image_removal
    shared["target_unit"] = (
        getattr(made, "target_unit", None) if target_unit is None else target_unit
    )
    shared["special_tokens"] = special_tokens or getattr(made, "special_tokens", None)
    many = is_many(given)
    name = describe(made)[0]
    title = f"Attributing by {name}"
    quicker = quicker_ways(unit, name)
    if not many:
        number = check_seed(own.pop("seed"))
        question = Question(prompt=given, **own, **shared)
        with progress_of(progress, title, quicker) as told:
            work = attribution(lm, question, made, number, masks)
            return run_one(lm, work, told, max_seconds)
    questions: list[Question] = []
    encodings: list[Encoding] = []
    seeds: list[int] = []
    for index, fields in enumerate(for_each(len(given), **own)):
        seeds.append(check_seed(fields.pop("seed")))
        question = Question(prompt=given[index], **fields, **shared)
        try:  # all are tokenised before anything runs
            documents = question.sources is not None
            encodings.append(lm.encode(question.prompt, documents=documents, pictures=True))
        except Exception as error:
            raise naming_prompt(index, error) from None
        questions.append(question)
    with progress_of(progress, title, quicker) as told:
        works = [
            attribution(lm, question, made, number, masks, encoding)
            for question, number, encoding in zip(questions, seeds, encodings, strict=True)
        ]
        return Attributions(run_many(lm, works, told, max_seconds))


def method_for(lm: LanguageModel, method: str | Method | None) -> Method:
    """The method that is asked for, or the model's default: "joint", or "search" of chat models.

    Raises UnsupportedModelError where the model cannot answer it, before it is run.
    """
    if method is None:
        method = "search" if lm.is_text_only else "joint"
    made = make_method(method)
    if lm.is_text_only:
        return for_text(made)
    check_answers(made, lm.identity.name, lm.needs_internals)
    return made


async def attribution(
    lm: LanguageModel,
    question: Question,
    method: Method,
    seed: int = 0,
    masks: int | bool = False,
    encoding: Encoding | None = None,
) -> Attribution:
    """The attribution of one question, checked with some masks, as a coroutine for
    `noiser.engine.Engine`.
    """
    announce(lm, question, method, seed)
    if has_pictures(question.prompt):
        check_removes(method)
    query = await prepare(lm, question, encoding, pictures=True)
    is_text = isinstance(question.prompt, str) and question.target is None
    if is_text and query.target_ids[0] in lm.end_tokens and lm.chats:
        hint = "Pass a chat, [{'role': 'user', 'content': ...}], or --chat on the command line."
        warn(
            f"{lm.identity.name} is a chat model, and says nothing after this text. {hint}",
        )
    att = await attribution_of(lm, query, method, seed)
    return await checked_in_time(lm, query, att, masks) if masks else att


async def checked_in_time(
    lm: LanguageModel, query: Query, att: Attribution, masks: int | bool
) -> Attribution:
    """The attribution with its check; without it where the call's time went by."""
    try:
        return await check_scores(lm, query, att, masks)
    except OutOfTimeError:
        stop = {"unfinished": query.spent.unfinished, "max_seconds": query.spent.max_seconds}
        return replace(att, info={**att.info, **stop})


async def attribution_of(
    lm: LanguageModel, query: Query, method: Method, seed: int, splitting: SplitRule | None = None
) -> Attribution:
    """A method's scores of a query, as an `Attribution`; with unit "auto", coarse units first,
    split by `splitting`.
    """
    if query.unit == "auto":
        units, scores = await refine(method, query, seed, splitting)
    else:
        units = query.units
        scores = await run_method(method, query, seed)
    name, parameters = describe(method)
    frozen = query.encoding.frozen
    prompt = query.prompt
    facts = {
        **vars(query.spent),
        **query.context.facts,
        "chat_template_kwargs": None if isinstance(prompt, str) else lm.chat_template_kwargs,
        "special_tokens": [i for unit in units for i in unit.token_indices if frozen[i]],
        "sources": [{"title": s.title, "start": s.start, "end": s.end} for s in query.sources],
        "of": query.of and name_of(query.of),
        "first_token": _first_token(method, query.with_units(units), scores),
        "near_ties": list(query.near_ties),
        "unasked": await _unasked(query, units, scores),
        "score_units": scores.info.get("score_units") or _score_units(method, query),
        "images": _pictures(query, units),
    }
    return Attribution(
        text=query.encoding.text,
        prompt_length=query.prompt_length,
        scores=scores.scores,
        units=units,
        targets=query.targets,
        thresholds=scores.thresholds,
        k_min=scores.k_min,
        stderr=scores.stderr,
        pairs=scores.pairs,
        without=None if scores.without is None else without_of(lm, query, scores.without),
        foil=query.foil,
        unit=query.unit,
        target_unit=query.target_unit,
        method=name,
        parameters=parameters,
        seed=seed,
        model=query.model,
        prompt=prompt if isinstance(prompt, str) else tuple(without_data(prompt)),
        versions={"noiser": __version__}
        | {package: version_of(package) for package in ("torch", "transformers")},
        info={**scores.info, **{name: fact for name, fact in facts.items() if fact}},
    )


def _score_units(method: Method, query: Query) -> list[str] | None:
    """The unit of the scores of each target, by the method's objective; None if it has none."""
    name = getattr(method, "objective", None)
    if query.of is not None or name not in OBJECTIVES.names():
        return None
    return [OBJECTIVES.get(str(name)).factory().unit] * len(query.targets)


def _pictures(query: Query, units: Sequence[Span]) -> dict[str, Any] | None:
    """The pictures of a prompt with what is shown of them, and each unit's region; or None."""
    scene = query.scene
    if scene is None:
        return None
    shown: list[dict[str, Any]] = []
    pictures = scene.pictures
    for image, place, tokens in zip(pictures.images, pictures.places, scene.tokens, strict=True):
        shown.append(
            {
                "size": [image.width, image.height],
                "place": place,
                "tokens": len(tokens),
                "sha256": sha256_of_pixels(image),
                "data": preview(image),
            }
        )
    boxes: list[list[int] | None] = []
    for unit in units:
        region = query.regions.get(unit)
        boxes.append(None if region is None else [region.picture, *region.box])
    return {
        "removal": query.image_removal,
        "runs": scene.runs,
        "pictures": shown,
        "boxes": boxes,
    }


def without_of(
    lm: LanguageModel, query: Query, predictions: Float[Tensor, "targets units 3"]
) -> tuple[tuple[Without | None, ...], ...]:
    """The predictions without each unit, with the leading tokens as text."""
    rows: list[tuple[Without | None, ...]] = []
    for target, predictions_of_target in zip(query.targets, predictions, strict=True):
        row: list[Without | None] = []
        for numbers in float_rows(predictions_of_target):
            prediction = Prediction(*numbers)
            if math.isnan(prediction.probability):
                row.append(None)
                continue
            leader = target.text
            if prediction.top_token >= 0:
                leader = _leader_text(lm, query, int(prediction.top_token))
            row.append(Without(prediction.probability, leader, prediction.top_probability))
        rows.append(tuple(row))
    return tuple(rows)


def _leader_text(lm: LanguageModel, query: Query, token: int) -> str:
    """The text of a token that leads; of a chat endpoint only answers as wholes are known."""
    if not lm.is_text_only:
        (text,) = token_texts(lm.tokenizer, [token])
        return text
    if query.foil is not None and token == query.foil.token_id:
        return query.foil.text
    return ANOTHER_ANSWER


async def _unasked(query: Query, units: Sequence[Span], scores: Scores) -> list[int] | None:
    """Tools' results that ask for a chat's answer, which the user did not; None where time is
    up.
    """
    if isinstance(query.prompt, str) or query.foil is not None or query.of is not None:
        return None
    try:
        return await injected_messages(query, units, scores)
    except OutOfTimeError:
        return None


def _first_token(method: Method, query: Query, scores: Scores) -> str | None:
    """What became of a first token that is text: "kept", "deleted" to score it, "disturbed" as any.

    None where a method scores it that removes nothing, such as one that counts letters.
    """
    if sink_of(query.encoding) is None:
        return None
    if query.sink is None:
        return "disturbed"
    alone = [unit for unit, positions in enumerate(query.positions) if not positions]
    if not alone or scores.scores[:, alone].isnan().all():
        return "kept"
    return "deleted" if hasattr(method, "removal") else None
