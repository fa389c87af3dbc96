"""`noiser.attribute`: prompt in, Attribution out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import torch

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import Engine, Progress
from noiser.errors import ParameterError
from noiser.methods.many import Asked, attribute_many, is_many
from noiser.methods.protocol import METHODS, Method, Scores
from noiser.methods.refine import Budget, refine
from noiser.model.language_model import LanguageModel
from noiser.model.query import build_query
from noiser.model.text import token_texts
from noiser.registry import Entry
from noiser.types import AutoUnit, Prompt, Prompts, Span, Target, Unit
from noiser.version import __version__, version_of

__all__ = ["attribute", "make_method"]


@overload
def attribute(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    method: str | Method = "noiser",
    target: str | int | None = None,
    foil: str | int | None = None,
    max_new_tokens: int = 1,
    unit: Unit | AutoUnit = "token",
    continuation_units: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int = 0,
    special_tokens: Literal["frozen", "perturbed"] | None = None,
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
    unit: Unit | AutoUnit = "token",
    continuation_units: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int | Sequence[int] = 0,
    special_tokens: Literal["frozen", "perturbed"] | None = None,
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
    unit: Unit | AutoUnit = "token",
    continuation_units: bool = True,
    max_forwards: int | None = None,
    max_seconds: float | None = None,
    seed: int | Sequence[int] = 0,
    special_tokens: Literal["frozen", "perturbed"] | None = None,
    progress: Progress | None = None,
) -> Attribution | list[Attribution]:
    """Which parts of the prompt made the model say that?

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text, or chat messages `[{"role": ..., "content": ...}]`, rendered with the model's own template. A
            list of texts or of chats is many prompts: they run side by side, which is faster, and give the same
            numbers as one by one.
        method: a registry name (`noiser methods` lists them), or a method with its hyper-parameters. "inseq:NAME" and
            "captum:NAME" are the methods of those libraries.
        target: what is explained. None: the greedy continuation. Text: that continuation, token by token; a space is
            put before it where the model finds that reading more probable. int: a token id.
        foil: "why target rather than foil?"; text or token id. With several tokens, the question is about the first
            one in which target and foil differ. With many prompts, `target`, `foil` and `seed` are one for all, or
            a list of one for each.
        max_new_tokens: how many continuation tokens to attribute when `target` is None. Fewer if the model ends.
        unit: what gets a score: "token" (byte-level pieces of one character are one unit), "word", "sentence", or
            a list of (start, end) character spans of the prompt. "auto", for long prompts: sentences (of a very long
            prompt runs of them) first, then smaller units inside those that carry the score; a unit's parts add up to
            its score. See `noiser.methods.refine`.
        continuation_units: with several targets, the continuation's earlier tokens are units too.
        max_forwards: with unit="auto", about the most token-forwards to spend; the coarse units are always scored.
        max_seconds: likewise in seconds; many prompts then run one by one, each with that much.
        seed: of all random numbers; the global random state is neither used nor changed.
        special_tokens: "frozen": special tokens are neither perturbed nor scored; "perturbed": as the published
            script does. None: as the method's profile says, which is "frozen" unless it is "authors".
        progress: called with (done, expected) token-forwards while it runs; with many prompts, in prompts.

    Returns:
        An `Attribution`: `scores` [targets, units], raw, and everything needed to run it again. For many prompts a
        list of them, in order.

    Raises:
        PromptError, TargetError, UnitError: the question cannot be asked; each says why and what to do,
            and which of many prompts it is about; all are tokenised before anything runs.
        UnknownNameError, ParameterError: no such method, or a hyper-parameter outside its domain.
        NumericalError: the model returned NaN or infinite logits.
    """
    chosen = make_method(method)
    budget = Budget.of(max_forwards, max_seconds, unit)
    if special_tokens is not None:
        check_choice("special_tokens", special_tokens, ("frozen", "perturbed"))

    def ask(lm: LanguageModel, asked: Asked) -> Attribution:
        prompt, target, foil, seed, progress = asked
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise ParameterError(f"seed is {seed!r}; expected an integer that torch takes, -2^63 to 2^64 - 1.")
        query = build_query(
            lm,
            prompt,
            target=target,
            foil=foil,
            max_new_tokens=max_new_tokens,
            unit=unit,
            continuation_units=continuation_units,
            special_tokens=special_tokens or getattr(chosen, "special_tokens", "frozen"),
        )
        engine = Engine(lm, query, progress=progress)
        if unit == "auto":
            units, found = refine(chosen, engine, seed, budget)
        else:
            units, found = query.units, chosen(engine, torch.Generator().manual_seed(seed))
        return _attribution(engine, chosen, seed, units, found)

    if not is_many(prompt):
        return ask(lm, Asked(prompt, target, foil, seed, progress))  # pyright: ignore[reportArgumentType] - checked by build_query
    return attribute_many(
        ask, lm, prompt, target=target, foil=foil, seed=seed, progress=progress, side_by_side=max_seconds is None
    )


def _attribution(engine: Engine, method: Method, seed: int, units: tuple[Span, ...], found: Scores) -> Attribution:
    query = engine.query
    name, parameters = _describe(method)
    return Attribution(
        text=query.encoding.text,
        prompt_length=query.prompt_length,
        scores=found.scores.float(),
        units=units,
        targets=tuple(
            _target(engine, g, token, text)
            for g, (token, text) in enumerate(zip(query.target_ids, query.target_texts, strict=True))
        ),
        thresholds=None if found.thresholds is None else found.thresholds.float(),
        k_min=None if found.k_min is None else found.k_min.float(),
        stderr=None if found.stderr is None else found.stderr.float(),
        foil=None if query.foil_id is None else _foil(engine, query.foil_id),
        unit=query.unit,
        method=name,
        parameters=parameters,
        seed=seed,
        model=engine.lm.identity,
        prompt=query.prompt if isinstance(query.prompt, str) else tuple(dict(message) for message in query.prompt),
        versions={"noiser": __version__} | {package: version_of(package) for package in ("torch", "transformers")},
        info=found.info,
    )


def make_method(method: str | Method, /, **parameters: Any) -> Method:
    """A method by registry name, with hyper-parameters; a method object is returned as it is.

    Raises:
        UnknownNameError: no such method. ParameterError: it has no such hyper-parameter, or refuses its value.
    """
    if isinstance(method, str):
        entry = METHODS.get(method)
        try:
            return entry.factory(**parameters)
        except TypeError as error:
            raise ParameterError(f"Method {entry.name!r} does not accept {parameters}: {error}.") from error
    if not isinstance(method, Method) or isinstance(method, type):
        raise ParameterError(
            f"method is {method!r}; expected a registry name such as 'noiser', or a method such as noiser.Noiser()."
        )
    return method


def _describe(method: Method) -> tuple[str, Mapping[str, Any]]:
    entry = _entry_of(method)
    qualified = f"{type(method).__module__}.{type(method).__qualname__}"
    name = entry.versioned_name if entry else getattr(method, "registry_name", qualified)
    fields = dataclasses.fields(method) if dataclasses.is_dataclass(method) else ()
    return name, {field.name: getattr(method, field.name) for field in fields}


def _entry_of(method: Method) -> Entry[Method] | None:
    """That of the method's class; but that of a function, such as "noiser_relative", where it makes an equal method."""
    own = METHODS.entry_of(type(method))
    if own is None or _makes(own, method):
        return own
    functions = [entry for entry in map(METHODS.get, METHODS.names()) if not isinstance(entry.factory, type)]
    return next((entry for entry in functions if _makes(entry, method)), own)


def _makes(entry: Entry[Method], method: Method) -> bool:
    try:
        return entry.factory() == method
    except Exception:  # a plugin's method may need an argument
        return False


def _target(engine: Engine, row: int, token: int, text: str) -> Target:
    clean = engine.clean[row]
    rank = 1 + int((clean > clean[token]).sum())
    return Target(text, token, float(clean[token]), rank)


def _foil(engine: Engine, token: int) -> Target:
    return _target(engine, 0, token, token_texts(engine.lm.tokenizer, [token])[0])
