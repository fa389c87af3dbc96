"""Can the scores of one answer be believed? A test of a few seconds, and what it found in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.amounts import probability_text
from noiser.attribution.display import label
from noiser.attribution.heatmap import with_signal
from noiser.attribution.summary import Piece, names_of
from noiser.engine import LiveGame, Query, remover, run_one
from noiser.engine.objectives import prob
from noiser.explain._restore import restore
from noiser.explain.check import check_scores, removal_for
from noiser.model.language_model import LanguageModel
from noiser.tensors import booleans, floats, integers
from noiser.types import Progress, Prompt

# Prompts of more tokens are tested on fewer inputs, so that the test takes seconds.
_LONG = 300
_FEW = 16
# Two units are compared with two others, which takes four.
_FEWEST_UNITS = 4
# Changes the attribution's seed, so that the draw of the others is not one of the method's.
_OWN_DRAW = 0x7E57


class Removed(NamedTuple):
    """Two units that were removed together.

    Attributes:
        units: their columns.
        probability: the target's without them; of a span the geometric mean of its tokens'.
    """

    units: tuple[int, ...]
    probability: float


class SpotCheck(NamedTuple):
    """What a test of an attribution found for one target.

    Attributes:
        attribution: with `info["check"]`, see `noiser.explain.check`.
        target: the row that was tested.
        strongest: the two units with the largest scores; None where there are no two.
        others: two other units, drawn at random; None where there are no two.
    """

    attribution: Attribution
    target: int
    strongest: Removed | None
    others: Removed | None

    @property
    def verdict(self) -> str:
        """One sentence: whether the scores foretold the model, and what to believe."""
        return _verdict(self.attribution.info["check"])

    @property
    def pieces(self) -> list[Piece]:
        """A sentence about the two pairs of units; empty where they were not removed."""
        if self.strongest is None:
            return []
        target = self.attribution.targets[self.target]
        before = probability_text(target)
        after = probability_text(target, self.strongest.probability)
        names = names_of(self.attribution, self.strongest.units)
        pieces = [Piece("Without "), *names, Piece(f" {before} becomes {after}")]
        if self.others is not None:
            names = names_of(self.attribution, self.others.units, "instead")
            after = probability_text(target, self.others.probability)
            pieces += [Piece("; without two others, "), *names, Piece(f", {after}")]
        return [*pieces, Piece(".")]


def spot_check(
    lm: LanguageModel,
    att: Attribution,
    target: int = 0,
    progress: Progress | None = None,
    *,
    prompt: Prompt | None = None,
) -> SpotCheck:
    """A test of an attribution's scores for one target, on inputs that had no part in it.

    The scores foretell the model on inputs with half of the units (`noiser.explain.check`). The two
    strongest units are then removed together, and two others that are drawn with the attribution's
    seed.

    Args:
        lm: the model that made the attribution, or one that cuts its text into the same tokens.
        att: an attribution by any method.
        target: the row to test.
        progress: called with (done, expected) token-forwards.
        prompt: as for `noiser.without`.

    Raises:
        ParameterError: the model does not fit the attribution.
    """
    return run_one(lm, _spot_check(lm, att, target, prompt), progress)


async def _spot_check(
    lm: LanguageModel, att: Attribution, target: int, prompt: Prompt | None
) -> SpotCheck:
    query = await restore(lm, att, prompt)
    masks = _FEW if len(query.encoding.token_ids) > _LONG else True
    checked = await check_scores(lm, query, att, masks, [target])
    foil_tokens = len(query.foil_ids)

    def probability(logits: Tensor, clean: Tensor, ids: Tensor) -> Tensor:
        """The target's, also where there is a foil."""
        own = len(ids) - foil_tokens
        return prob(logits[..., :own, :], clean[..., :own, :], ids[:own])

    removal = remover(query, removal_for(lm, query, hide=bool(query.sources)))
    game = LiveGame(query, probability, removal)
    strongest, others = _two_pairs(att, target, booleans(game.mask[target]))
    removed: list[Removed | None] = []
    for columns in (strongest, others):
        removed.append(await _removed(game, query, target, columns) if columns else None)
    return SpotCheck(checked, target, *removed)


def _two_pairs(
    att: Attribution, target: int, plays: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The two strongest units for the target, and two others; empty where there are too few."""
    scores = floats(att.scores[target])
    players = [
        column for column, score in enumerate(scores) if plays[column] and not math.isnan(score)
    ]
    positive = [column for column in with_signal(att, target) if scores[column] > 0]
    best = tuple(column for column in positive if plays[column])[:2]
    if len(best) < 2:
        return (), ()
    rest = [column for column in players if column not in best]
    if len(players) < _FEWEST_UNITS:
        return best, ()
    chance = torch.Generator().manual_seed(att.seed ^ _OWN_DRAW)
    order = integers(torch.randperm(len(rest), generator=chance))
    return best, tuple(sorted(rest[place] for place in order[:2]))


async def _removed(game: LiveGame, query: Query, target: int, columns: Sequence[int]) -> Removed:
    kept = torch.ones(1, len(query.units), dtype=torch.bool)
    kept[0, list(columns)] = False
    values = await game(kept)
    return Removed(tuple(columns), float(values[target, 0]))


def _verdict(check: Mapping[str, Any]) -> str:
    """What a check found, for readers who do not know what a correlation is."""
    units = label(str(check["units"]))
    if check["fewest_units"] < _FEWEST_UNITS:
        return f"Fewer than four {units}: too few for a test."
    rho, low, high = check["mean"]
    if math.isnan(rho):
        return f"Not testable: nothing changed when half of the {units} were taken out."
    width = "" if low == high else f"; {low:.2f} to {high:.2f}"  # equal where all inputs were run
    found = f"({rho:.2f} of at most 1{width})"
    versions = f"On {check['masks']} other versions of this prompt, each with half of its {units},"
    if math.isnan(check["p"]):
        few = f"four {units} are too few for a verdict"
        return f"{versions} the scores agree with the model {found}; {few}."
    if check["predicts"]:
        advice = f"believe the order of the strongest {units}"
        return f"{versions} the scores foretold the model {found}: {advice}."
    return f"{versions} the scores did not foretell the model {found}: do not rely on their order."
