"""Localisation: how much of the score is where a person says it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxtyping import Float
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.normalize import normalize
from noiser.errors import ParameterError, UnitError
from noiser.metrics.metric import Case, Measured, Metric, Scale
from noiser.text import checked_spans, visible_part
from noiser.types import Span

REST = "rest"


@dataclass(frozen=True, kw_only=True, eq=False)
class Localisation:
    """Shares of the score.

    Attributes:
        shares: for each name [targets], the normalised score on its spans; "rest" for all other units.
        uniform: for each name [targets], the share of the units themselves: what scores without information give.
        units: for each name, the indices of its units.
        normalization: what made shares of the raw scores.
    """

    shares: Mapping[str, Float[Tensor, " targets"]]
    uniform: Mapping[str, Float[Tensor, " targets"]]
    units: Mapping[str, tuple[int, ...]]
    normalization: str

    def share(self, name: str) -> float:
        """The share of a name, mean over targets."""
        return float(self.shares[name].mean())


def localisation(
    att: Attribution, spans: Mapping[str, Sequence[tuple[int, int]]], normalization: str = "positive"
) -> Localisation:
    """The share of the normalised score on named parts of the text, and on the rest (paper, figure on LongRA).

    A unit belongs as a whole to the name that has most of its visible characters, to the first of equals, and to "rest"
    only if no name has any.

    Args:
        att: the attribution.
        spans: for each name, (start, end) character spans of `att.text`; spans of different names do not overlap.
        normalization: how raw scores become shares; see `Attribution.normalized`. With "positive", "abs_sum" and
            "softmax" all shares are between 0 and 1 and sum to 1.

    Raises:
        UnitError: a span is empty, leaves the text, overlaps another, or holds no unit; or a name is "rest".
        UnknownNameError: no such normalization.
    """
    units = units_by_name(att, spans)
    shares = normalize(att.scores, normalization).nan_to_num(0.0)
    valid = (~att.scores.isnan()).to(shares.dtype)
    counts = valid.sum(-1)
    return Localisation(
        shares={name: shares[:, list(columns)].sum(-1) for name, columns in units.items()},
        uniform={name: valid[:, list(columns)].sum(-1) / counts for name, columns in units.items()},
        units=units,
        normalization=normalization,
    )


def units_by_name(att: Attribution, spans: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, tuple[int, ...]]:
    """For each name the indices of its units, and for "rest" those of all others; see `localisation`."""
    _check(att, spans)
    owners = [_owner(att.text, unit, spans) for unit in att.units]
    units = {name: tuple(i for i, owner in enumerate(owners) if owner == name) for name in (*spans, REST)}
    for name in spans:
        if not units[name]:
            raise UnitError(
                f"The spans of {name!r}, {list(spans[name])}, hold no {att.unit} of this attribution; expected at "
                "least one. Widen them."
            )
    return units


def _check(att: Attribution, spans: Mapping[str, Sequence[tuple[int, int]]]) -> None:
    if not isinstance(spans, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnitError(f"spans is {spans!r:.200}; expected lists of (start, end) by name, as in {{'gold': [(0, 5)]}}.")
    if REST in spans:
        raise UnitError(f"A span is named {REST!r}, which is what remains; expected another name.")
    if not spans:
        raise UnitError("There are no spans; expected (start, end) character spans of the text for at least one name.")
    length = len(att.text)
    named = [
        (span, name)
        for name, parts in spans.items()
        for span in checked_spans(parts, length, name=f"spans[{name!r}]", of="text", also="")
    ]
    for (before, one), (after, other) in pairwise(sorted(named)):
        if after[0] < before[1]:
            raise UnitError(
                f"Span {before} of {one!r} and span {after} of {other!r} overlap; expected disjoint spans. "
                f"End the first at {after[0]}."
            )


def _owner(text: str, unit: Span, spans: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    """The name that has most of the unit's visible characters."""
    start, end = visible_part(text, unit.start, unit.end)
    overlaps = {name: sum(max(0, min(end, b) - max(start, a)) for a, b in parts) for name, parts in spans.items()}
    best = max(overlaps, key=overlaps.__getitem__)
    return best if overlaps[best] else REST


def _measure(case: Case) -> Measured:
    if not case.spans:
        raise ParameterError(
            "The example names no spans; expected `spans`, a mapping from names to lists of (start, end), for "
            "localisation. Give examples that have them, or leave the metric out."
        )
    result = localisation(case.att, case.spans, case.normalization or "positive")
    return {f"share_{name}": result.share(name) for name in result.shares} | {
        f"uniform_{name}": float(share.mean()) for name, share in result.uniform.items()
    }


LOCALISATION = Metric(
    measure=_measure,
    others={
        "share_": Scale(0, 1, None, None, "share of the score"),
        "uniform_": Scale(0, 1, None, None, "share of the units"),
    },
    reads=frozenset({"normalization"}),
)
