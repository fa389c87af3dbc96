"""`noiser.diff_models`: which units make one model's answer more probable than another model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from noiser.attribution import Attribution
from noiser.engine import Game, Key, Query, StoredGame, prepare, remover, run_one
from noiser.errors import ParameterError
from noiser.explain._attribute import attribution_of
from noiser.methods import Joint, Scores, describe, make_method
from noiser.model.language_model import LanguageModel
from noiser.types import Prompt, Question


def diff_models(
    lm: LanguageModel,
    other: LanguageModel,
    prompt: Prompt,
    *,
    method: Any = None,
    seed: int = 0,
    **question: Any,
) -> Attribution:
    """The part of each unit of a prompt in log p(answer | other) - log p(answer | lm).

    Both models run the same inputs, and the method is played on the paired differences.

    Args:
        lm: the model whose greedy answer is explained, unless there is a target.
        other: the model with which it is compared.
        prompt: a text or chat messages.
        method: one that removes units; None: `Joint(score="logprob")`.
        seed: of the method's random numbers.
        question: further fields of `noiser.types.Question`; words are units unless `unit` is given.

    Raises:
        ParameterError: the models cut the prompt into other units, or the method removes none.

    Example:
        >>> noiser.diff_models(lm, quantised, "The capital of France is", target=" Paris")  # doctest: +SKIP
    """
    made: Any = make_method(method or Joint(score="logprob"))
    if not hasattr(made, "play"):
        raise ParameterError(
            f"method is {method!r}; expected one that removes units, such as noiser.Joint()."
        )
    asked: dict[str, Any] = {
        "unit": "word",
        "max_new_tokens": 16,
        **question,
        "target_unit": "all",
        "prompt": prompt,
    }
    pair: list[Query] = []
    for each in (lm, other):
        pair.append(run_one(each, prepare(each, Question(**asked))))
        asked["target"] = pair[0].target_texts[0]
    if (
        pair[0].target_texts != pair[1].target_texts
        or len({tuple(u[:3] for u in each.units) for each in pair}) > 1
    ):
        raise ParameterError(
            "The models read the prompt or the answer in other units. Pass unit='word' or spans."
        )
    games = [Game(query, "logprob", remover(query, "zero")) for query in pair]

    async def play(wanted: Sequence[Key]) -> Mapping[Key, float]:
        kept = torch.tensor([list(units) for _, units in wanted]).bool()
        first, second = (
            run_one(each, game(kept))[0] for each, game in zip((lm, other), games, strict=True)
        )
        return dict(zip(wanted, (second - first).tolist(), strict=True))

    game = StoredGame(games[0].mask, games[1].whole - games[0].whole, "logprob", play=play)

    async def on_both(query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG001 - the game has both
        return await made.play(game, rng)

    found = run_one(lm, attribution_of(lm, pair[0], on_both, seed))
    names = [f"{each.identity.name} ({each.identity.dtype})" for each in (other, lm)]
    info = {**found.info, "of": "log p in {} minus log p in {}".format(*names)}
    name, parameters = describe(made)
    return replace(found, method=name, parameters=parameters, info=info)
