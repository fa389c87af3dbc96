"""Through the reasoning: the influence of the prompt on an answer by way of what was written in between.

With an attribution whose targets and units are of the same text, such as the sentences of the prompt and of the
continuation, W[t, u] = max(s, 0), each row divided by its sum, is a weighted acyclic graph: an edge for each unit that
a target was written from. The influence of a prompt unit on a target is the sum over all paths between them of the
product of their weights (CAGE, arXiv 2512.15663): with W_p the columns of the prompt and W_g those of the continuation,
summed by the target that they belong to, X = W_p + W_g X, so X = (I - W_g)^-1 W_p. No forward pass is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.attribution.record import AttributionRecord
from noiser.errors import ParameterError


class Paths(NamedTuple):
    """The weights of the edges.

    Attributes:
        prompt: [targets, prompt units], from a unit of the prompt to a target, W_p.
        generated: [targets, targets], from one target to another, W_g; 0 on and above the diagonal.
        columns: indices of the prompt's units in the attribution.
    """

    prompt: Float64[Tensor, "targets prompt"]
    generated: Float64[Tensor, "targets targets"]
    columns: tuple[int, ...]


def paths(att: AttributionRecord) -> Paths:
    """The graph of an attribution.

    Raises:
        ParameterError: a unit of the continuation is not inside one target, or the continuation has no units.
    """
    weights = att.scores.double().nan_to_num(0.0).clamp_min(0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    columns = tuple(i for i, unit in enumerate(att.units) if unit.start < att.prompt_length)
    written = [i for i, unit in enumerate(att.units) if unit.start >= att.prompt_length]
    if len(att.targets) > 1 and not written:
        raise ParameterError(
            "The continuation has no units, so nothing leads through it; expected sentences of the prompt and of the "
            "continuation. Attribute with unit='sentence', target_unit='sentence' and continuation_units=True."
        )
    generated = weights.new_zeros(len(att.targets), len(att.targets))
    targets = _targets_of_tokens(att, written) if written else {}
    for column in written:
        owners = _owners(att, column, targets)
        generated[:, owners] += weights[:, [column]] / len(owners)
    return Paths(weights[:, list(columns)], generated, columns)


def influence(graph: Paths) -> Float64[Tensor, "targets prompt"]:
    """The sum over all paths from each prompt unit to each target."""
    system = _identity(graph) - graph.generated
    return torch.linalg.solve_triangular(system, graph.prompt, upper=False, unitriangular=True)


def flow(graph: Paths, target: int) -> Float64[Tensor, "targets units_and_targets"]:
    """What of the paths to one target uses each edge, [to, from]: the prompt's units first, then the targets.

    With e the unit vector of the target, r = (I - W_gᵀ)^-1 e is the weight of all paths from each target to it, and an
    edge into target t carries r[t] times its own weight. What leaves the prompt adds up to `influence`.
    """
    identity = _identity(graph)
    system, wanted = identity - graph.generated.T, identity[:, [target]]
    reach = torch.linalg.solve_triangular(system, wanted, upper=True, unitriangular=True)
    return reach * torch.cat([graph.prompt, graph.generated], 1)


def _identity(graph: Paths) -> Float64[Tensor, "targets targets"]:
    return torch.ones_like(graph.generated[0]).diag()


def _targets_of_tokens(att: AttributionRecord, written: Sequence[int]) -> dict[int, int]:
    """The target that each token of the continuation is in; one between two targets is in none."""
    starts: list[int] = []  # counted from the first token of the continuation
    owners: list[int | None] = []
    for row, target in enumerate(att.targets):
        owners += [None] * len(target.before)
        starts.append(len(owners))
        owners += [row] * len(target.token_ids)
    first = att.units[written[0]]
    begin = first.token_indices[0]
    if first.start > att.prompt_length:  # it begins with a token that is no unit: targets see all tokens before them
        last = att.scores.new_tensor([unit.token_indices[-1] for unit in att.units])
        begin = max(int(last[~row.isnan()].max()) + 1 - start for row, start in zip(att.scores, starts, strict=True))
    return {begin + index: row for index, row in enumerate(owners) if row is not None}


def _owners(att: AttributionRecord, column: int, targets: Mapping[int, int]) -> list[int]:
    """The target that a unit is in; or the targets that are pieces of one character, as the unit is."""
    unit = att.units[column]
    rows = [targets.get(token) for token in unit.token_indices]
    owners = sorted({row for row in rows if row is not None})
    texts = {att.targets[row].text.strip() for row in owners}
    if None in rows or len(texts) > 1:
        raise ParameterError(
            f"The unit {unit.text!r:.60} of the continuation is not inside one target; expected targets that cover the "
            "continuation, and units no larger. Attribute with the same unit and target_unit, such as 'sentence'."
        )
    return owners
