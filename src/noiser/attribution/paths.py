"""The influence of a prompt on later targets by way of the continuation in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.errors import ParameterError

if TYPE_CHECKING:
    from noiser.attribution.record import AnyRecord, AttributionRecord


def through(att: AnyRecord) -> AnyRecord:
    """See `Attribution.through`.

    W[t, u] = max(s, 0), each row divided by its sum, is a weighted acyclic graph; the influence of a prompt unit on a
    target is the sum over all paths between them of the product of their weights (CAGE, arXiv 2512.15663). With W_p the
    columns of the prompt and W_g those of the continuation, summed by the target that they belong to,
    X = W_p + W_g X, so X = (I - W_g)^-1 W_p.
    """
    weights = att.scores.double().nan_to_num(0.0).clamp_min(0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    prompt = [i for i, unit in enumerate(att.units) if unit.start < att.prompt_length]
    written = [i for i, unit in enumerate(att.units) if unit.start >= att.prompt_length]
    if len(att.targets) > 1 and not written:
        raise ParameterError(
            "The continuation has no units, so nothing leads through it. Attribute with unit='sentence', "
            "target_unit='sentence' and continuation_units=True."
        )
    between = weights.new_zeros(len(att.targets), len(att.targets))
    for column, owners in zip(written, _owners(att, written), strict=True):
        between[:, owners] += weights[:, [column]] / len(owners)
    less = torch.ones_like(between[0]).diag() - between
    scores = torch.linalg.solve_triangular(
        less, weights[:, prompt], upper=False, unitriangular=True
    )
    nothing = dict.fromkeys(("thresholds", "k_min", "stderr"))
    info = {**att.info, "through": between.tolist()}
    return replace(
        att,
        scores=scores.float(),
        units=tuple(att.units[i] for i in prompt),
        pairs=(),
        info=info,
        **nothing,
    )


def _owners(att: AttributionRecord, written: Sequence[int]) -> list[list[int]]:
    """The target that each unit is in; or all targets that are pieces of one character, as the unit is."""
    starts, tokens = (
        list[int](),
        list[int | None](),
    )  # the first token of each target, and the target of each token
    for row, target in enumerate(att.targets):
        tokens += [None] * len(target.before)
        starts.append(len(tokens))
        tokens += [row] * len(target.token_ids)
    last = att.scores.new_tensor([unit.token_indices[-1] for unit in att.units])
    rows = zip(
        att.scores, starts, strict=True
    )  # a row has scores up to the token before its target
    first = max(int(last[~row.isnan()].amax()) + 1 - start for row, start in rows) if written else 0
    found: list[list[int]] = []
    for unit in (att.units[column] for column in written):
        inside = {tokens[index - first] for index in unit.token_indices}
        owners = sorted(row for row in inside if row is not None)
        if None in inside or len({att.targets[row].text.strip() for row in owners}) > 1:
            raise ParameterError(
                f"The unit {unit.text!r:.60} of the continuation is not inside one target. Attribute with the same "
                "unit and target_unit, such as 'sentence'."
            )
        found.append(owners)
    return found


def flow(att: AttributionRecord, target: int) -> Float64[Tensor, "targets units_and_targets"]:
    """The part of the paths to one target that uses each edge, [to, from]: the prompt's units, then the targets.

    An edge into target t carries its own weight times the weight of all paths from t, which is in (I - W_g)^-1.
    """
    between = torch.tensor(att.info["through"], dtype=torch.float64)
    less = torch.ones_like(between[0]).diag() - between
    return torch.linalg.inv(less)[target, :, None] * torch.cat(
        [less @ att.scores.double().cpu(), between], 1
    )
