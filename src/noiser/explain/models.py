"""`noiser.diff_models`: two models and a prompt in, the part of each unit in the difference of their answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from noiser.attribution import Attribution
from noiser.engine import Game, Query, Steps, StoredGame, prepare, remover, run_one
from noiser.errors import ParameterError
from noiser.explain.attribute import attribution_of
from noiser.methods import Joint, Scores, describe
from noiser.model.language_model import LanguageModel, check_model
from noiser.question import Question
from noiser.types import Prompt


def diff_models(
    lm: LanguageModel, other: LanguageModel, prompt: Prompt, *, method: Any = None, seed: int = 0, **question: Any
) -> Attribution:
    """The part of each unit of a prompt in log p(answer | other) - log p(answer | lm).

    Both models, or one in two precisions, run the same inputs, and the method is played on the paired differences, of
    which its standard errors are.

    Args:
        lm: the model whose greedy answer is explained, unless there is a target.
        other: the model with which it is compared.
        prompt: a text or chat messages.
        method: one that removes units; None: `Joint(score="logprob")`.
        seed: of the method's random numbers.
        question: further fields of `noiser.question.Question`; words are units unless `unit` is given.

    Raises:
        ParameterError: the models cut the prompt into other units, or the method removes none.

    Example:
        >>> noiser.diff_models(lm, quantised, "The capital of France is", target=" Paris")  # doctest: +SKIP
    """
    made = method or Joint(score="logprob")
    if not hasattr(made, "play"):
        raise ParameterError(f"method is {made!r}; expected one that removes units, such as noiser.Joint().")
    asked: dict[str, Any] = {"unit": "word", "max_new_tokens": 16, **question, "target_unit": "all", "prompt": prompt}
    pair: list[Query] = []
    for each in (lm, other):
        check_model(each)
        pair.append(run_one(each, prepare(each, Question(**asked))))
        asked["target"] = pair[0].target_texts[0]
    if pair[0].target_texts != pair[1].target_texts or len({tuple(u[:3] for u in each.units) for each in pair}) > 1:
        raise ParameterError("The models read the prompt or the answer in other units. Pass unit='word' or spans.")
    game = _Difference([lm, other], pair)

    def played(query: Query, rng: torch.Generator) -> Steps[Scores]:  # noqa: ARG001 - the game has both
        return (yield from made.play(game, rng))

    found = run_one(lm, attribution_of(lm, pair[0], played, seed))
    names = [f"{each.identity.name} ({each.identity.dtype})" for each in (other, lm)]
    info = {**found.info, "of": "log p in {} minus log p in {}".format(*names)}
    name, parameters = describe(made)
    return replace(found, method=name, parameters=parameters, info=info)


class _Difference(StoredGame):
    """The values of a game in one model minus those in another."""

    def __init__(self, lms: Sequence[LanguageModel], queries: Sequence[Query]) -> None:
        self._games = [
            (lm, Game(query, "logprob", remover(query, "zero", torch.Generator().manual_seed(0))))
            for lm, query in zip(lms, queries, strict=True)
        ]
        (_, one), (_, two) = self._games
        super().__init__(one.mask, two.whole - one.whole, "logprob")

    def _play(self, wanted: Any) -> Steps[None]:
        kept = torch.tensor([list(key) for _, key in wanted]).bool()
        one, two = (run_one(lm, game(kept))[0] for lm, game in self._games)
        self.table.update(zip(wanted, (two - one).tolist(), strict=True))
        return
        yield
