"""`noiser.diff_models`: which units make one model's answer more probable than another model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from noiser.attribution import Attribution
from noiser.engine import Coalition, LiveGame, Query, StoredGame, prepare, remover, run_one
from noiser.errors import ParameterError
from noiser.explain._attribute import attribution_of
from noiser.methods import Joint, Scores, describe, make_method
from noiser.model.language_model import LanguageModel, check_probabilities
from noiser.tensors import floats
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
    """How much each unit of a prompt adds to log p(answer | other) - log p(answer | lm).

    Both models run the same inputs, and the method scores the paired differences.

    Args:
        lm: the model whose greedy answer is explained, unless there is a target.
        other: the model with which it is compared.
        prompt: a text or chat messages.
        method: one that removes units; None: `Joint(objective="logprob")`.
        seed: of the method's random numbers.
        question: further fields of `noiser.types.Question`; words are units unless `unit` is given.

    Raises:
        ParameterError: the models cut the prompt into other units, or the method removes none.

    Example:
        >>> prompt = "The capital of France is"
        >>> noiser.diff_models(lm, quantised, prompt, target=" Paris")  # doctest: +SKIP
    """
    for each in (lm, other):
        check_probabilities(each, "diff_models")
    removal_method: Any = make_method(method or Joint(objective="logprob"))
    if not hasattr(removal_method, "score_game"):
        raise ParameterError(
            f"method is {method!r}; expected one that removes units, such as noiser.Joint()."
        )
    defaults: dict[str, Any] = {"unit": "word", "max_new_tokens": 16}
    fields: dict[str, Any] = defaults | question | {"target_unit": "all", "prompt": prompt}
    query = run_one(lm, prepare(lm, Question(**fields)))
    # The other model explains the answer of the first.
    fields["target"] = query.target_texts[0]
    other_query = run_one(other, prepare(other, Question(**fields)))
    if query.target_texts != other_query.target_texts or _texts(query) != _texts(other_query):
        raise ParameterError(
            "The models read the prompt or the answer in other units. Pass unit='word' or spans."
        )
    game = LiveGame(query, "logprob", remover(query, "zero"))
    other_game = LiveGame(other_query, "logprob", remover(other_query, "zero"))

    async def evaluate(keys: Sequence[Coalition]) -> Mapping[Coalition, float]:
        """The difference between both models for each input."""
        kept = torch.tensor([list(units) for _, units in keys]).bool()
        values = run_one(lm, game(kept))[0]
        other_values = run_one(other, other_game(kept))[0]
        return dict(zip(keys, floats(other_values - values), strict=True))

    differences = StoredGame(game.mask, other_game.whole - game.whole, "logprob", evaluate=evaluate)

    # The game runs both models, so the query is not used.
    async def on_both(query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG001
        return await removal_method.score_game(differences, rng)

    attribution = run_one(lm, attribution_of(lm, query, on_both, seed))
    difference = f"log p in {_name(other)} minus log p in {_name(lm)}"
    name, parameters = describe(removal_method)
    return replace(
        attribution,
        method=name,
        parameters=parameters,
        info={**attribution.info, "of": difference},
    )


def _texts(query: Query) -> tuple[tuple[str, int, int], ...]:
    """The text and the characters of each unit; tokens may differ between models."""
    return tuple((unit.text, unit.start, unit.end) for unit in query.units)


def _name(lm: LanguageModel) -> str:
    return f"{lm.identity.name} ({lm.identity.dtype})"
