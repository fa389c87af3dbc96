"""`noiser.without`: what the model says to a prompt without each of its units."""

from __future__ import annotations

from dataclasses import replace

import torch

from noiser.attribution import Attribution
from noiser.checks import check_choice
from noiser.engine import REMOVALS, LiveGame, remover, run_one
from noiser.explain._attribute import without_of
from noiser.explain._restore import restore
from noiser.model.language_model import LanguageModel, check_model
from noiser.progress import progress_of
from noiser.types import Progress, Prompt


def without(
    lm: LanguageModel,
    att: Attribution,
    *,
    removal: str | None = None,
    prompt: Prompt | None = None,
    progress: Progress | bool | None = None,
) -> Attribution:
    """The attribution with `without`: what the model says without each unit.

    `joint`, `occlusion` and other methods that remove one unit at a time give it already. Gradient
    and attention methods, and Noiser, do not run these inputs; this runs them, one for each unit.

    Args:
        lm: the model that made the attribution.
        att: from `noiser.attribute`, or loaded, or aggregated.
        removal: how a unit is removed, one of `noiser.engine.REMOVALS`: "zero" rows, "delete" ...;
            None: as the method removes units, or "zero".
        prompt: the chat that was explained, where it has pictures: a result keeps previews only.
        progress: as for `noiser.attribute`.

    Raises:
        ParameterError: the attribution is of another model or tokenizer, or explains a number of
            the caller's own, or its prompt has pictures and `prompt` is missing or another one.
            UnknownNameError: no such removal.

    Example:
        >>> att = noiser.attribute(lm, prompt, method="input_x_gradient")  # doctest: +SKIP
        >>> noiser.without(lm, att).without[0][3]  # doctest: +SKIP
        Without(probability=0.04, leader=' German', leader_probability=0.31)
    """
    check_model(lm)
    parameters = att.parameters
    chosen = removal or parameters.get("removal") or parameters.get("baseline") or "zero"
    check_choice("removal", chosen, REMOVALS.names())
    with progress_of(progress, "Removing each unit") as told:
        return run_one(lm, _without(lm, att, chosen, prompt), told)


async def _without(
    lm: LanguageModel, att: Attribution, removal: str, prompt: Prompt | None
) -> Attribution:
    query = await restore(lm, att, prompt)
    rng = torch.Generator().manual_seed(att.seed)
    way = remover(query, removal, rng)
    game = LiveGame(query, "logprob", way, asks_without_first=True)
    await game(~torch.eye(len(query.units), dtype=torch.bool))
    await game.without_first()
    predictions = game.without()
    if predictions is None:  # no unit stands before a target
        return att
    return replace(att, without=without_of(lm, query, predictions))
