"""Scores joined into coarser units."""

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
    from noiser.attribution.record import AnyRecord, AttributionRecord

Columns = tuple[int, ...]
Reduction = Callable[[Float[Tensor, "targets members"]], Float[Tensor, " targets"]]


_ORDER = ("token", *SEGMENTATIONS)
_REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda members: members.sum(-1),
    "mean": lambda members: members.mean(-1),
    "max": lambda members: members.amax(-1),
}
_STDERRS: dict[str, Reduction] = {
    "sum": lambda members: members.square().sum(-1).sqrt(),
    "mean": lambda members: members.square().sum(-1).sqrt() / members.shape[-1],
}


def aggregate(att: AnyRecord, unit: Unit | str, reduce: str) -> AnyRecord:
    """See `Attribution.aggregate`."""
    check_choice("reduction", reduce, _REDUCTIONS)
    groups, spread = _groups(att, unit), _STDERRS.get(reduce)
    info = {name: value for name, value in att.info.items() if name != "check"}  # of other scores
    return replace(
        att,
        scores=_by_group(att.scores, groups, _REDUCTIONS[reduce]),
        units=tuple(_joined(att, columns) for columns in groups),
        unit=unit if isinstance(unit, str) else "spans",
        stderr=None
        if att.stderr is None or spread is None
        else _by_group(att.stderr, groups, spread),
        pairs=(),
        thresholds=att.thresholds
        if att.thresholds is None
        else _by_group(att.thresholds, groups, lambda m: m.amin(-1)),
        info={**info, "aggregated": {"from": att.unit, "reduce": reduce}},
    )


def _groups(att: AttributionRecord, unit: Unit | str) -> list[Columns]:
    """The columns of `att` that make up each new unit, in order."""
    if unit == "source" and att.info.get("sources"):
        unit = [(source["start"], source["end"]) for source in att.info["sources"]]
    if not isinstance(unit, str):
        return _groups_of_spans(att, unit)
    check_choice("unit", unit, _ORDER, "A list of (start, end) character spans is possible too.")
    if unit == "token" and att.unit == "token":
        return [(column,) for column in range(len(att.units))]
    if not _is_finer(att, unit):
        said = f"The scores belong to units of kind {att.unit!r}, which are not parts of {unit}s"
        raise UnitError(f"{said}. Attribute again with unit={unit!r}.")
    special = {*att.info.get("special_tokens", ())}
    alone = [
        span.start == span.end or not special.isdisjoint(span.token_indices) for span in att.units
    ]
    groups = [(column,) for column, is_alone in enumerate(alone) if is_alone]
    for run in _runs(att, [column for column, is_alone in enumerate(alone) if not is_alone]):
        tokens = [(att.units[column].start, att.units[column].end) for column in run]
        first, last = tokens[0][0], max(end for _, end in tokens)
        spans = [
            (first + start, first + end) for start, end in SEGMENTATIONS[unit](att.text[first:last])
        ]
        groups += [tuple(run[index] for index in group) for group in snap(att.text, spans, tokens)]
    return sorted(groups)


def _is_finer(att: AttributionRecord, unit: str) -> bool:
    """Whether units of this kind can be made of the attribution's."""
    if att.unit == "auto" and unit != "token":
        return not any(
            len(span.token_indices) > 1 and len(SEGMENTATIONS[unit](span.text)) > 1
            for span in att.units
        )
    kind = "word" if att.unit == "spans" else att.unit
    return (
        kind in _ORDER
        and _ORDER.index(kind) <= _ORDER.index(unit)
        and (att.unit, unit) != ("spans", "word")
    )


def _runs(att: AttributionRecord, columns: Sequence[int]) -> list[list[int]]:
    """Units with nothing between them, such as a chat template's text or the end of the prompt."""
    runs: list[list[int]] = []
    covered = -1
    for column in columns:
        span = att.units[column]
        if (
            not runs
            or span.start > covered
            or att.units[runs[-1][0]].start < att.prompt_length <= span.start
        ):
            runs.append([])
        runs[-1].append(column)
        covered = max(covered, span.end)
    return runs


def _groups_of_spans(att: AttributionRecord, spans: Sequence[tuple[int, int]]) -> list[Columns]:
    """The units of which each span has more than any other span; units in no span are left out."""
    spans = checked_spans(spans, len(att.text), name="unit", of="text")
    order = sorted(range(len(spans)), key=spans.__getitem__)
    found = owners(
        att.text, [(unit.start, unit.end) for unit in att.units], [spans[index] for index in order]
    )
    groups = {
        place: tuple(i for i, index in enumerate(found) if index == rank)
        for rank, place in enumerate(order)
    }
    for place, (start, end) in enumerate(spans):
        span = f"Span {(start, end)}, {att.text[start:end]!r},"
        if start < att.prompt_length < end:
            raise UnitError(
                f"{span} joins the prompt and its continuation, which begins at {att.prompt_length}."
            )
        if not groups[place]:
            raise UnitError(f"{span} holds no {att.unit} of these. Widen it.")
    return [groups[place] for place in range(len(spans))]


def _joined(att: AttributionRecord, columns: Columns) -> Span:
    if len(columns) == 1:
        return att.units[columns[0]]
    members = [att.units[column] for column in columns]
    start, end = min(member.start for member in members), max(member.end for member in members)
    return Span(
        att.text[start:end],
        start,
        end,
        tuple(sorted({i for each in members for i in each.token_indices})),
    )


def _by_group(
    values: Float[Tensor, "targets units"], groups: Sequence[Columns], reduction: Reduction
) -> Float[Tensor, "targets groups"]:
    """Each group of columns reduced; NaN in a row where any member is NaN.

    A column without any number is left out of a group that has others: a first token that was kept.
    """
    nothing = values.isnan().all(0).tolist()
    reduced = [values[:, :0].sum(1)]
    for group in groups:
        members = [column for column in group if not nothing[column]] or [*group]
        reduced.append(reduction(values[:, members]))
    return torch.stack(reduced, 1)[:, 1:]
