"""Scores joined into coarser units."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution.regions import region_columns, with_columns
from noiser.checks import check_choice
from noiser.errors import UnitError
from noiser.tensors import booleans
from noiser.text.segments import SEGMENTATIONS, checked_spans, owners, snap
from noiser.types import Span, Unit, Without

if TYPE_CHECKING:
    from noiser.attribution.record import AnyRecord, AttributionRecord

UnitColumns = tuple[int, ...]
Reduction = Callable[[Float[Tensor, "targets members"]], Float[Tensor, " targets"]]

_ORDER = ("token", *SEGMENTATIONS)  # finest first
_REDUCTIONS: dict[str, Reduction] = {
    "sum": lambda members: members.sum(-1),
    "mean": lambda members: members.mean(-1),
    "max": lambda members: members.amax(-1),
}
# The standard errors of sums and means of independent scores; a maximum has none.
_STDERRS: dict[str, Reduction] = {
    "sum": lambda members: members.square().sum(-1).sqrt(),
    "mean": lambda members: members.square().sum(-1).sqrt() / members.shape[-1],
}


def aggregate(att: AnyRecord, unit: Unit | str, reduce: str) -> AnyRecord:
    """See `Attribution.aggregate`."""
    check_choice("reduction", reduce, _REDUCTIONS)
    groups = _groups(att, unit)
    stderr = None
    if att.stderr is not None and reduce in _STDERRS:
        stderr = _by_group(att.stderr, groups, _STDERRS[reduce])
    thresholds = None
    if att.thresholds is not None:
        thresholds = _by_group(att.thresholds, groups, lambda members: members.amin(-1))
    info = {name: value for name, value in att.info.items() if name != "check"}  # of other scores
    info["aggregated"] = {"from": att.unit, "reduce": reduce}
    info = with_columns(info, groups)
    return replace(
        att,
        scores=_by_group(att.scores, groups, _REDUCTIONS[reduce]),
        units=tuple(_joined(att, columns) for columns in groups),
        unit=unit if isinstance(unit, str) else "spans",
        stderr=stderr,
        pairs=(),
        without=_without(att, groups),
        thresholds=thresholds,
        info=info,
    )


def _without(
    att: AttributionRecord, groups: Sequence[UnitColumns]
) -> tuple[tuple[Without | None, ...], ...] | None:
    """What the model says without each new unit: it is known of a unit that was one before."""
    if att.without is None:
        return None
    rows: list[tuple[Without | None, ...]] = []
    for row in att.without:
        of_groups: list[Without | None] = []
        for group in groups:
            of_groups.append(row[group[0]] if len(group) == 1 else None)
        rows.append(tuple(of_groups))
    return tuple(rows)


def _groups(att: AttributionRecord, unit: Unit | str) -> list[UnitColumns]:
    """The columns of `att` that make up each new unit, in order."""
    if unit == "source" and att.info.get("sources"):
        places = [(source["start"], source["end"]) for source in att.info["sources"]]
        unit = [(start, end) for start, end in places if start < end]
    if not isinstance(unit, str):
        return _groups_of_spans(att, unit)
    check_choice("unit", unit, _ORDER, "A list of (start, end) character spans is possible too.")
    if unit == "token" and att.unit == "token":
        return [(column,) for column in range(len(att.units))]
    if not _is_finer(att, unit):
        raise UnitError(
            f"The scores belong to units of kind {att.unit!r}, which are not parts of {unit}s. "
            f"Attribute again with unit={unit!r}."
        )
    return _groups_of_text(att, unit)


def _groups_of_text(att: AttributionRecord, unit: str) -> list[UnitColumns]:
    """The columns that make up each named unit of the text.

    Special tokens and regions of pictures stay alone.
    """
    special = set(att.info.get("special_tokens", ()))
    regions = region_columns(att)
    groups: list[UnitColumns] = []
    ordinary: list[int] = []
    for column, span in enumerate(att.units):
        if (
            column in regions
            or span.start == span.end
            or not special.isdisjoint(span.token_indices)
        ):
            groups.append((column,))
        else:
            ordinary.append(column)
    for run in _runs(att, ordinary):
        offsets = [(att.units[column].start, att.units[column].end) for column in run]
        first = offsets[0][0]
        last = max(end for _, end in offsets)
        segments = SEGMENTATIONS[unit](att.text[first:last])
        spans = [(first + start, first + end) for start, end in segments]
        for group in snap(att.text, spans, offsets):
            groups.append(tuple(run[index] for index in group))
    return sorted(groups)


def _is_finer(att: AttributionRecord, unit: str) -> bool:
    """Whether units of this kind can be made of the attribution's."""
    if att.unit == "auto" and unit != "token":
        regions = region_columns(att)
        texts = [span for column, span in enumerate(att.units) if column not in regions]
        return not any(_is_divisible(span, unit) for span in texts)
    if att.unit == "spans" and unit == "word":
        return False
    # The caller's spans are taken to be about as fine as words.
    kind = "word" if att.unit == "spans" else att.unit
    return kind in _ORDER and _ORDER.index(kind) <= _ORDER.index(unit)


def _is_divisible(span: Span, unit: str) -> bool:
    """Whether a unit of several tokens holds several named units."""
    if len(span.token_indices) < 2:
        return False
    named_units = SEGMENTATIONS[unit](span.text)
    return len(named_units) > 1


def _runs(att: AttributionRecord, columns: Sequence[int]) -> list[list[int]]:
    """Units with nothing between them, such as a chat template's text or the end of the prompt."""
    runs: list[list[int]] = []
    covered = -1
    for column in columns:
        start = att.units[column].start
        begins_run = not runs or start > covered
        if not begins_run:
            run_start = att.units[runs[-1][0]].start
            begins_run = run_start < att.prompt_length <= start
        if begins_run:
            runs.append([])
        runs[-1].append(column)
        covered = max(covered, att.units[column].end)
    return runs


def _groups_of_spans(att: AttributionRecord, spans: Sequence[tuple[int, int]]) -> list[UnitColumns]:
    """The units of which each span has more than any other span.

    Units in no span are left out. Regions of pictures stay alone, before them.
    """
    spans = checked_spans(spans, len(att.text), name="unit", of="text")
    order = sorted(range(len(spans)), key=spans.__getitem__)
    offsets = [(unit.start, unit.end) for unit in att.units]
    owner_of = owners(att.text, offsets, [spans[place] for place in order])
    members = [list[int]() for _ in spans]
    regions = region_columns(att)
    for column, owner in enumerate(owner_of):
        if owner is not None and column not in regions:
            members[order[owner]].append(column)
    for (start, end), columns in zip(spans, members, strict=True):
        span = f"Span {(start, end)}, {att.text[start:end]!r},"
        if start < att.prompt_length < end:
            raise UnitError(
                f"{span} joins the prompt and its continuation, which begins at "
                f"{att.prompt_length}."
            )
        if not columns:
            raise UnitError(f"{span} holds no {att.unit} of these. Widen it.")
    return [*((column,) for column in regions), *(tuple(columns) for columns in members)]


def _joined(att: AttributionRecord, columns: UnitColumns) -> Span:
    """One unit from the first character of some units to the last, with the tokens of all."""
    if len(columns) == 1:
        return att.units[columns[0]]
    members = [att.units[column] for column in columns]
    start = min(member.start for member in members)
    end = max(member.end for member in members)
    tokens: set[int] = set()
    for member in members:
        tokens.update(member.token_indices)
    return Span(att.text[start:end], start, end, tuple(sorted(tokens)))


def _by_group(
    values: Float[Tensor, "targets units"], groups: Sequence[UnitColumns], reduction: Reduction
) -> Float[Tensor, "targets groups"]:
    """Each group of columns reduced; NaN in a row where any member is NaN.

    A column without any number is left out of a group that has others: a first token that was
    kept.
    """
    has_no_number = booleans(values.isnan().all(0))
    reduced: list[Float[Tensor, " targets"]] = []
    for group in groups:
        members = [column for column in group if not has_no_number[column]]
        reduced.append(reduction(values[:, members or list(group)]))
    if not reduced:
        return values[:, :0]
    return torch.stack(reduced, 1)
