"""Coarser units out of finer ones: token scores become word, sentence or span scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.errors import UnitError
from noiser.text.segments import SEGMENTATIONS, checked_spans, owners, snap
from noiser.types import Span, Unit

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution

Members = Float[Tensor, "targets members"]
Reduced = Float[Tensor, " targets"]
Columns = tuple[int, ...]

_ORDER = ("token", *SEGMENTATIONS)


def aggregate(att: Attribution, unit: Unit | str, reduce: str) -> Attribution:
    """See `Attribution.aggregate`."""
    check_choice("reduction", reduce, REDUCTIONS)
    groups = _groups(att, unit)
    spread = _STDERRS.get(reduce)
    return replace(
        att,
        scores=_by_group(att.scores, groups, REDUCTIONS[reduce]),
        units=tuple(_joined(att, columns) for columns in groups),
        unit=unit if isinstance(unit, str) else "spans",
        stderr=None if att.stderr is None or spread is None else _by_group(att.stderr, groups, spread),
        pairs=(),
        thresholds=None if att.thresholds is None else _by_group(att.thresholds, groups, REDUCTIONS["min"]),
        info={
            **{name: value for name, value in att.info.items() if name != "check"},  # of other scores
            "aggregated": {"from": att.unit, "reduce": reduce},
        },
    )


def _groups(att: Attribution, unit: Unit | str) -> list[Columns]:
    """The columns of `att` that make up each new unit, in order."""
    if not isinstance(unit, str):
        return _groups_of_spans(att, unit)
    if unit == "source" and att.info.get("sources"):
        return _groups_of_spans(att, [(source["start"], source["end"]) for source in att.info["sources"]])
    check_choice("unit", unit, _ORDER, "A list of (start, end) character spans is possible too.")
    if unit == "token" and att.unit == "token":
        return [(column,) for column in range(len(att.units))]
    if not _is_finer(att, unit):
        raise UnitError(
            f"The scores belong to units of kind {att.unit!r}, which are not parts of {unit}s. Attribute again with "
            f"unit={unit!r}."
        )
    special = {*att.info.get("special_tokens", ())}
    alone = [span.start == span.end or not special.isdisjoint(span.token_indices) for span in att.units]
    groups = [(column,) for column in range(len(att.units)) if alone[column]]
    for run in _runs(att, [column for column in range(len(att.units)) if not alone[column]]):
        tokens = [(att.units[column].start, att.units[column].end) for column in run]
        first, last = tokens[0][0], max(end for _, end in tokens)
        spans = [(first + start, first + end) for start, end in SEGMENTATIONS[unit](att.text[first:last])]
        groups += [tuple(run[index] for index in group) for group in snap(att.text, spans, tokens)]
    return sorted(groups)


def _is_finer(att: Attribution, unit: str) -> bool:
    """Whether units of this kind can be made of the attribution's."""
    if att.unit == "auto" and unit != "token":
        return not any(len(span.token_indices) > 1 and len(SEGMENTATIONS[unit](span.text)) > 1 for span in att.units)
    kind = "word" if att.unit == "spans" else att.unit
    return kind in _ORDER and _ORDER.index(kind) <= _ORDER.index(unit) and (att.unit, unit) != ("spans", "word")


def _runs(att: Attribution, columns: Sequence[int]) -> list[list[int]]:
    """Units with nothing between them, such as a chat template's text or the end of the prompt."""
    runs: list[list[int]] = []
    covered = -1
    for column in columns:
        span = att.units[column]
        if not runs or span.start > covered or att.units[runs[-1][0]].start < att.prompt_length <= span.start:
            runs.append([])
        runs[-1].append(column)
        covered = max(covered, span.end)
    return runs


def _groups_of_spans(att: Attribution, spans: Sequence[tuple[int, int]]) -> list[Columns]:
    """The units of which each span has more than any other span; units in no span are left out."""
    spans = checked_spans(spans, len(att.text), name="unit", of="text")
    order = sorted(range(len(spans)), key=spans.__getitem__)
    found = owners(att.text, [(unit.start, unit.end) for unit in att.units], [spans[index] for index in order])
    groups: list[Columns] = []
    for place, (start, end) in enumerate(spans):
        if start < att.prompt_length < end:
            raise UnitError(
                f"Span {(start, end)} joins the prompt and its continuation, which begins at {att.prompt_length}."
            )
        columns = tuple(i for i, index in enumerate(found) if index is not None and order[index] == place)
        if not columns:
            raise UnitError(
                f"The span ({start}, {end}), {att.text[start:end]!r}, holds no {att.unit} of these. Widen it."
            )
        groups.append(columns)
    return groups


def _joined(att: Attribution, columns: Columns) -> Span:
    members = [att.units[column] for column in columns]
    start, end = min(member.start for member in members), max(member.end for member in members)
    tokens = {index for member in members for index in member.token_indices}
    text = att.text[start:end] if len(members) > 1 else members[0].text  # a special token's text is its name
    return Span(text, start, end, tuple(sorted(tokens)))


def _by_group(
    values: Float[Tensor, "targets units"], groups: Sequence[Columns], reduction: Callable[[Members], Reduced]
) -> Float[Tensor, "targets groups"]:
    """Reduces each group of columns; NaN in a row where any member is NaN."""
    result = values.new_empty((len(values), len(groups)))
    for index, group in enumerate(groups):
        members = values[:, list(group)]
        result[:, index] = reduction(members).masked_fill(members.isnan().any(-1), torch.nan)
    return result


REDUCTIONS: dict[str, Callable[[Members], Reduced]] = {
    "sum": lambda members: members.sum(-1),
    "mean": lambda members: members.mean(-1),
    "max": lambda members: members.amax(-1),
    "abs_max": lambda members: members.gather(-1, members.abs().argmax(-1, keepdim=True)).squeeze(-1),
    "min": lambda members: members.amin(-1),
    "l2": lambda members: members.square().sum(-1).sqrt(),
}
_STDERRS: dict[str, Callable[[Members], Reduced]] = {
    "sum": REDUCTIONS["l2"],
    "mean": lambda members: members.square().sum(-1).sqrt() / members.shape[-1],
}
