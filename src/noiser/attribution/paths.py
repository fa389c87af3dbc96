"""The influence of a prompt on later targets by way of the continuation in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.attribution.regions import with_columns
from noiser.errors import ParameterError
from noiser.tensors import float_rows, solve_unit_triangular

if TYPE_CHECKING:
    from noiser.attribution.record import AnyRecord, AttributionRecord


def through(att: AnyRecord) -> AnyRecord:
    """See `Attribution.through`.

    W[t, u] = max(s, 0), each row divided by its sum, is a weighted acyclic graph. The influence of
    a prompt unit on a target is the sum over all paths between them of the product of their weights
    (CAGE, arXiv 2512.15663). With W_p the columns of the prompt and W_g those of the continuation,
    summed by the target that they belong to, X = W_p + W_g X, so X = (I - W_g)^-1 W_p.
    """
    weights = att.scores.double().nan_to_num(0.0).clamp_min(0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    prompt: list[int] = []
    written: list[int] = []  # units of the continuation
    for column, unit in enumerate(att.units):
        if unit.start < att.prompt_length:
            prompt.append(column)
        else:
            written.append(column)
    if len(att.targets) > 1 and not written:
        raise ParameterError(
            "The continuation has no units, so nothing leads through it. Attribute with "
            "unit='sentence', target_unit='sentence' and continuation_units=True."
        )
    between = weights.new_zeros(len(att.targets), len(att.targets))  # W_g
    for column, owners in zip(written, _owners(att, written), strict=True):
        between[:, owners] += weights[:, [column]] / len(owners)
    scores = solve_unit_triangular(_identity_minus(between), weights[:, prompt])
    without = None
    if att.without is not None:
        without = tuple(tuple(row[column] for column in prompt) for row in att.without)
    return replace(
        att,
        scores=scores.float(),
        units=tuple(att.units[column] for column in prompt),
        pairs=(),
        without=without,
        info={
            **with_columns(att.info, [(column,) for column in prompt]),
            "through": float_rows(between),
        },
        thresholds=None,
        k_min=None,
        stderr=None,
    )


def _identity_minus(
    between: Float64[Tensor, "targets targets"],
) -> Float64[Tensor, "targets targets"]:
    """I - W_g."""
    return torch.ones_like(between[0]).diag() - between


def _owners(att: AttributionRecord, written: Sequence[int]) -> list[list[int]]:
    """The target that each unit of the continuation is in.

    A unit of several tokens that make up one character may be in several targets, of which each is
    a piece of that character.
    """
    starts, target_of_token = _target_tokens(att)
    first = _first_target_token(att, starts) if written else 0
    owners_of_units: list[list[int]] = []
    for column in written:
        unit = att.units[column]
        inside: set[int | None] = set()
        for index in unit.token_indices:
            is_written = 0 <= index - first < len(target_of_token)
            inside.add(target_of_token[index - first] if is_written else None)
        owners = sorted(row for row in inside if row is not None)
        texts = {att.targets[row].text.strip() for row in owners}
        if None in inside or len(texts) > 1:
            raise ParameterError(
                f"The unit {unit.text!r:.60} of the continuation is not inside one target. "
                "Attribute with the same unit and target_unit, such as 'sentence'."
            )
        owners_of_units.append(owners)
    return owners_of_units


def _target_tokens(att: AttributionRecord) -> tuple[list[int], list[int | None]]:
    """The first token of each target, and the target of each token, None between targets.

    Tokens count from the first that the model wrote.
    """
    starts: list[int] = []
    target_of_token: list[int | None] = []
    for row, target in enumerate(att.targets):
        target_of_token += [None] * len(target.before)
        starts.append(len(target_of_token))
        target_of_token += [row] * len(target.token_ids)
    return starts, target_of_token


def _first_target_token(att: AttributionRecord, starts: Sequence[int]) -> int:
    """The position in the input of the first token that the model wrote.

    A row has scores up to the token before its target.
    """
    last_tokens = att.scores.new_tensor([unit.token_indices[-1] for unit in att.units])
    positions: list[int] = []
    for row, start in zip(att.scores, starts, strict=True):
        last_before_target = int(last_tokens[~row.isnan()].amax())
        positions.append(last_before_target + 1 - start)
    return max(positions)


def flow(att: AttributionRecord, target: int) -> Float64[Tensor, "targets units_and_targets"]:
    """The part of the paths to one target that uses each edge, [to, from].

    The edges come from the prompt's units, then from the targets. An edge into target t carries its
    own weight times the weight of all paths from t, which is in (I - W_g)^-1.
    """
    between = torch.tensor(att.info["through"], dtype=torch.float64)
    less = _identity_minus(between)
    weight_from = less.inverse()[target, :, None]
    from_prompt = less @ att.scores.double().cpu()  # W_p = (I - W_g) X
    return weight_from * torch.cat([from_prompt, between], 1)
