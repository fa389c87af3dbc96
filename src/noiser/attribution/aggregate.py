"""Coarser units out of finer ones: token scores become word, sentence or span scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution.record import AttributionRecord
from noiser.checks import check_choice
from noiser.errors import UnitError, UnknownNameError
from noiser.text import checked_spans, owners, sentence_spans, snap, word_spans
from noiser.types import Span, Unit

AnyRecord = TypeVar("AnyRecord", bound=AttributionRecord)
Reduction = Literal["sum", "mean", "max", "abs_max", "min", "l2"]
Members = Float[Tensor, "targets members"]
Reduced = Float[Tensor, " targets"]
Columns = tuple[int, ...]


def aggregate(att: AnyRecord, unit: Unit | str, reduce: str) -> AnyRecord:
    """See `Attribution.aggregate`."""
    check_choice("reduction", reduce, REDUCTIONS)
    name = unit if isinstance(unit, str) else "spans"
    groups = _groups(att, unit)
    scores = _by_group(att.scores, groups, REDUCTIONS[reduce])
    spread = _STDERRS.get(reduce)
    return replace(
        att,
        scores=scores,
        units=tuple(_joined(att, columns) for columns in groups),
        unit=name,
        stderr=None if att.stderr is None or spread is None else _by_group(att.stderr, groups, spread),
        thresholds=None if att.thresholds is None else _by_group(att.thresholds, groups, REDUCTIONS["min"]),
        info={**att.info, "aggregated": {"from": att.unit, "reduce": reduce}},
    )


def _groups(att: AttributionRecord, unit: Unit | str) -> list[Columns]:
    """The columns of `att` that make up each new unit, in order."""
    if not isinstance(unit, str):
        return _groups_of_spans(att, unit)
    if unit == "source" and att.info.get("sources"):
        return _groups_of_spans(att, [(source["start"], source["end"]) for source in att.info["sources"]])
    if unit not in _COARSENESS:
        raise UnknownNameError("unit", unit, _COARSENESS, "A list of (start, end) character spans is possible too.")
    split = word_spans if unit == "word" else sentence_spans
    coarser = _COARSENESS[unit] < _COARSENESS.get(att.unit, _COARSENESS["word"])
    if coarser or (att.unit == "spans" and unit == "word") or att.unit in ("turn", "source"):
        raise _too_coarse(f"The scores belong to units of kind {att.unit!r}", unit)
    if unit == "token":
        return [(column,) for column in range(len(att.units))]
    for span in att.units if att.unit == "auto" else ():
        if len(span.token_indices) > 1 and len(split(span.text)) > 1:
            raise _too_coarse(f"The unit {span.text.strip()!r:.60} of unit='auto' holds several {unit}s", unit)
    special = {*att.info.get("special_tokens", ())}
    alone = [span.start == span.end or not special.isdisjoint(span.token_indices) for span in att.units]
    groups = [(column,) for column in range(len(att.units)) if alone[column]]
    for start, end in ((0, att.prompt_length), (att.prompt_length, len(att.text))):
        columns = [i for i, span in enumerate(att.units) if start <= span.start < end and not alone[i]]
        for first, last, run in _runs(att, columns) if att.unit != "spans" else [(start, end, columns)]:
            spans = [(first + a, first + b) for a, b in split(att.text[first:last])]
            tokens = [(att.units[i].start, att.units[i].end) for i in run]
            groups += [tuple(run[i] for i in group.tokens) for group in snap(att.text, spans, tokens)]
    return sorted(groups)


def _too_coarse(problem: str, unit: str) -> UnitError:
    return UnitError(f"{problem}; expected finer ones to make {unit!r} units from. Attribute again with unit={unit!r}.")


def _runs(att: AttributionRecord, columns: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Units with nothing between them, such as a chat template's text, and where they begin and end."""
    runs: list[tuple[int, int, list[int]]] = []
    for column in columns:
        start, end = att.units[column].start, att.units[column].end
        if runs and start <= runs[-1][1]:
            first, last, members = runs.pop()
            members.append(column)
            runs.append((first, max(last, end), members))
        else:
            runs.append((start, end, [column]))
    return runs


def _groups_of_spans(att: AttributionRecord, spans: Sequence[tuple[int, int]]) -> list[Columns]:
    """The units of which each span has more than any other span; units in no span are left out."""
    spans = checked_spans(spans, len(att.text), name="unit", of="text")
    for start, end in spans:
        if start < att.prompt_length < end:
            raise UnitError(
                f"Span {(start, end)} joins the prompt and its continuation, which begins at {att.prompt_length}; "
                "expected spans of the one or the other."
            )
    order = sorted(range(len(spans)), key=spans.__getitem__)
    found = owners(att.text, [(unit.start, unit.end) for unit in att.units], [spans[index] for index in order])
    groups: list[Columns] = []
    for place, (start, end) in enumerate(spans):
        columns = tuple(i for i, index in enumerate(found) if index is not None and order[index] == place)
        if not columns:
            raise UnitError(
                f"The span ({start}, {end}), {att.text[start:end]!r}, holds no {att.unit} of this attribution; "
                "expected at least one. Widen the span."
            )
        groups.append(columns)
    return groups


def _joined(att: AttributionRecord, columns: Columns) -> Span:
    members = [att.units[column] for column in columns]
    if len(members) == 1:
        return members[0]
    start, end = min(member.start for member in members), max(member.end for member in members)
    tokens = {index for member in members for index in member.token_indices}
    return Span(att.text[start:end], start, end, tuple(sorted(tokens)))


def _by_group(
    values: Float[Tensor, "targets units"], groups: Sequence[Columns], reduction: Callable[[Members], Reduced]
) -> Float[Tensor, "targets groups"]:
    """Reduces each group of columns; NaN in a row where any member is NaN."""
    if not groups:
        return values.new_empty((len(values), 0))
    columns: list[Tensor] = []
    for group in groups:
        members = values[:, list(group)]
        columns.append(reduction(members).masked_fill(members.isnan().any(-1), torch.nan))
    return torch.stack(columns, dim=-1)


def _l2(members: Members) -> Reduced:
    return members.norm(dim=-1)


def _mean_stderr(members: Members) -> Reduced:
    return members.norm(dim=-1) / members.shape[-1]


REDUCTIONS: dict[str, Callable[[Members], Reduced]] = {
    "sum": lambda members: members.sum(-1),
    "mean": lambda members: members.mean(-1),
    "max": lambda members: members.amax(-1),
    "abs_max": lambda members: members.gather(-1, members.abs().argmax(-1, keepdim=True)).squeeze(-1),
    "min": lambda members: members.amin(-1),
    "l2": _l2,
}
_STDERRS: dict[str, Callable[[Members], Reduced]] = {"sum": _l2, "mean": _mean_stderr}
_COARSENESS = {"token": 0, "word": 1, "sentence": 2}
