"""Through the reasoning: the influence of the prompt on an answer by way of what was written in between.

W[t, u] = max(s, 0), each row divided by its sum, is a weighted acyclic graph: an edge for each unit that a target was
written from. The influence of a prompt unit on a target is the sum over all paths between them of the product of their
weights (CAGE, arXiv 2512.15663): with W_p the columns of the prompt and W_g those of the continuation, summed by the
target that they belong to, X = W_p + W_g X, so X = (I - W_g)^-1 W_p. No forward pass is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.attribution.arcs import Arc
from noiser.attribution.display import label
from noiser.errors import ParameterError

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution

_LEAST = 0.05
"""Arcs that carry a smaller part of the influence are not drawn."""


def through(att: Attribution) -> Attribution:
    """See `Attribution.through`."""
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
    scores = torch.linalg.solve_triangular(less, weights[:, prompt], upper=False, unitriangular=True)
    return replace(
        att,
        scores=scores.float(),
        units=tuple(att.units[column] for column in prompt),
        thresholds=None,
        k_min=None,
        stderr=None,
        pairs=(),
        info={**att.info, "through": between.tolist()},
    )


def _owners(att: Attribution, written: Sequence[int]) -> list[list[int]]:
    """The target that each unit is in; or all targets that are pieces of one character, as the unit is."""
    starts: list[int] = []  # counted from the first token of the continuation
    tokens: list[int | None] = []  # the target that each is in
    for row, target in enumerate(att.targets):
        tokens += [None] * len(target.before)
        starts.append(len(tokens))
        tokens += [row] * len(target.token_ids)
    last = att.scores.new_tensor([unit.token_indices[-1] for unit in att.units])
    rows = zip(att.scores, starts, strict=True)  # a row has scores up to the token before its target
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


def flow(att: Attribution, target: int) -> Float64[Tensor, "targets units_and_targets"]:
    """The part of the paths to one target that uses each edge, [to, from]: the prompt's units, then the targets.

    The target's row r of (I - W_g)^-1 has the weight of all paths from each target to it; an edge into target t carries
    r[t] times its own weight.
    """
    between = torch.tensor(att.info["through"], dtype=torch.float64)
    less = torch.ones_like(between[0]).diag() - between
    return torch.linalg.inv(less)[target, :, None] * torch.cat([less @ att.scores.double().cpu(), between], 1)


def links(att: Attribution, target: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """Lines and arcs of the paths to one target: the prompt's units and targets, each with the part that leaves it."""
    count, parts = len(att.units), flow(att, target)
    texts = [*(unit.text for unit in att.units), *(each.text for each in att.targets[: target + 1])]
    leaving: list[float] = parts.sum(0).tolist()
    shares = [f"{share:.0%}" for share in leaving[: count + target]]
    found = [
        Arc(start, count + row, weight, "p" if start < count else "n")
        for row, line in enumerate(parts.tolist())
        for start, weight in enumerate(line)
        if weight >= _LEAST
    ]
    return list(zip([*shares, ""], map(label, texts), strict=True)), found
