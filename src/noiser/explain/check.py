"""The check of scores against random removals, and tools' results that speak where the user's words do not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from noiser.attribution import Attribution
from noiser.checks import check_count
from noiser.engine import Absence, Game, Query, Steps, remover
from noiser.errors import ParameterError
from noiser.methods import Scores
from noiser.metrics.stability import spearman
from noiser.model.language_model import LanguageModel
from noiser.types import Span

_WIDTH = 1.96  # standard errors on each side, for 95 %
_LEAST = 4  # masks
_MOST = 0.99  # a correlation that counts in a mean

_ASKED = 0.2
"""The user's words speak for a target if their score is at least this share of the tool result's. Chosen on planted
actions of a development seed, see docs/howto/agents.md."""


def check_masks(masks: int) -> int:
    """The number of masks. Raises ParameterError for fewer than have an interval, unless it is 0."""
    if 0 < check_count("check", masks, least=0) < _LEAST:
        raise ParameterError(f"check is {masks}; expected 0, or at least {_LEAST} inputs, such as 8.")
    return masks


def checked(lm: LanguageModel, query: Query, att: Attribution, masks: int) -> Steps[Attribution]:
    """The attribution with LDS of its scores over a few random masks, per target, in `info["check"]`.

    Each mask keeps each unit with probability 1/2; all targets share the masks. Sources are hidden where the model can
    do it, so that only the text after them runs again; other units become zero rows, or are deleted. LDS is Spearman's
    rank correlation of the summed scores of the units that are kept with the target's log odds.

    Returns:
        In `info["check"]` `masks`, `removal` and `token_forwards`; `units`, a word for what is removed; `lds`, `low`
        and `high`, a number per target and its 95 % interval, NaN where either side does not vary; and `mean`, the
        three numbers for the mean over targets.
    """
    removal = removal_for(lm, hide=bool(query.sources))
    before = query.spent.token_forwards
    rng = torch.Generator().manual_seed(att.seed ^ 0x5EED)  # other masks than those of methods with this seed
    kept = torch.rand(masks, len(att.units), generator=rng) < 0.5
    asked = query.with_units(att.units)
    values = yield from Game(asked, "logit", remover(asked, removal), ~att.scores.isnan())(kept)
    sums = att.scores.double().nan_to_num() @ kept.double().T
    found = [float(spearman(one[None], other)) for one, other in zip(sums, values, strict=True)]
    low, high = zip(*(interval(rho, masks) for rho in found), strict=True)
    kind = {"auto": "units", "spans": "spans"}.get(att.unit, f"{att.unit}s")
    check = {
        "masks": masks,
        "removal": removal,
        "units": "sources" if query.sources else kind,
        "lds": found,
        "low": [*low],
        "high": [*high],
        "mean": mean_of(found, masks),
        "token_forwards": query.spent.token_forwards - before,
    }
    return replace(att, info={**att.info, "check": check})


def removal_for(lm: LanguageModel, *, hide: bool) -> Absence:
    """The removal that a model can do: hiding, if it is asked for, or else zero rows, or deletion."""
    if hide and lm.looks_inside and lm.abilities.packs:
        return "hidden"
    return "zero" if lm.takes_embeddings else "delete"


def interval(rho: float, n: int) -> tuple[float, float]:
    """The 95 % interval of a rank correlation of n pairs, by Fisher's z with Bonett and Wright's (2000) variance.

    A correlation of 1 among few pairs is what one a little lower often gives: it counts as half a step below 1, where
    a step is two neighbours exchanged.

    >>> [round(end, 2) for end in interval(0.8, 8)]
    [0.09, 0.97]
    """
    if n < _LEAST:
        return -1.0, 1.0
    most = 1 - 6 / (n * (n * n - 1))
    rho = max(min(rho, most), -most)  # NaN stays NaN
    width = _WIDTH * math.sqrt((1 + rho * rho / 2) / (n - 3))
    return math.tanh(math.atanh(rho) - width), math.tanh(math.atanh(rho) + width)


def mean_of(found: Sequence[float], n: int) -> tuple[float, float, float]:
    """The mean of correlations that share their masks, and its 95 % interval, as wide as that of one; or NaN."""
    known = [math.atanh(max(-_MOST, min(_MOST, rho))) for rho in found if not math.isnan(rho)]
    if not known:
        return math.nan, math.nan, math.nan
    rho = math.tanh(sum(known) / len(known))
    return rho, *interval(rho, n)


def unasked(query: Query, units: Sequence[Span], scores: Scores) -> list[int]:
    """Indices of the tools' messages that speak for the only target, as an instruction that the user did not give does.

    A message speaks for it with more than two standard errors, and at least half of the strongest one's score.
    """
    if len(scores.scores) != 1:
        return []
    errors = [0.0] * len(units) if scores.stderr is None else scores.stderr[0].nan_to_num().tolist()
    told, messages = dict[str, dict[int, tuple[float, float]]](), cast("Sequence[Mapping[str, str]]", query.prompt)
    for index, start, end in query.encoding.contents:
        inside = [i for i, unit in enumerate(units) if start <= unit.start < end]
        numbers = float(scores.scores[0, inside].nan_to_num().sum()), math.hypot(*(errors[i] for i in inside))
        if inside:
            told.setdefault(messages[index]["role"], {})[index] = numbers
    tools, asked = told.get("tool", {}), sum(score for score, _ in told.get("user", {}).values())
    least = max([score / 2 for score, _ in tools.values()], default=0.0)
    return [
        i
        for i, (score, e) in tools.items()
        if "user" in told and score >= least and asked < _ASKED * score > 2 * _ASKED * e
    ]
