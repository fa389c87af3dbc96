"""The numbers behind a heat map, as HTML tables with every text escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from torch import Tensor

from noiser.attribution.display import DARK_PAPER, dark_ink, headings, label, number_format, strongest

if TYPE_CHECKING:
    from noiser.attribution.record import Attribution

__all__ = ["joint_table", "score_table"]


def score_table(att: Attribution, row: int, most: int | None = None) -> str:
    """Scores, standard errors, thresholds and bars of the units that have a score for target `row`.

    Args:
        att: what is shown.
        row: the target.
        most: how many units to show at most, the strongest; None for all.
    """
    scores = att.scores[row].tolist()
    columns = [("score", _texts(scores, scores))]
    if att.stderr is not None:
        columns.append(("±", _texts(att.stderr[row].tolist(), scores)))
    if att.thresholds is not None:
        columns.append(("threshold", _texts(thresholds := att.thresholds[row].tolist(), thresholds)))
    largest = _largest(att.scores[row])
    chosen = strongest(att, row, len(scores) if most is None else most)
    lines = [
        [text[index] for _, text in columns]
        + [f'<i class="{_sign(scores[index])}" style="--a:{abs(scores[index]) / largest:.3f}"></i>']
        for index in chosen
    ]
    table = _table(att.unit, [name for name, _ in columns], [att.units[index].text for index in chosen], lines)
    return table + _left_out(len(chosen), sum(not math.isnan(score) for score in scores))


def joint_table(attributions: Sequence[Attribution], row: int, most: int | None = None) -> str:
    """Units by methods, for attributions of the same units; each column has a colour scale of its own.

    Args:
        attributions: of the same units.
        row: the target.
        most: how many units of each to show at most, the strongest; None for all.
    """
    first = attributions[0]
    columns = [_tinted(att.scores[row]) for att in attributions]
    chosen = range(len(first.units))
    if most is not None:
        chosen = sorted({index for att in attributions for index in strongest(att, row, most)})
    lines = [[column[index] for column in columns] for index in chosen]
    table = _table(first.unit, headings(attributions), [first.units[i].text for i in chosen], lines)
    return table + _left_out(len(chosen), len(first.units))


def _left_out(shown: int, present: int) -> str:
    return "" if shown == present else f"<p class=facts>the {shown} strongest of {present} units</p>"


def _table(corner: str, heads: Sequence[str], units: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of ready-made cells; what lies beyond the heads is a column of bars."""
    head = "".join(f"<th scope=col>{escape(label(text))}</th>" for text in [corner, *heads])
    head += "<td></td>" * (len(lines[0]) - len(heads) if lines else 0)
    body: list[str] = []
    for unit, line in zip(units, lines, strict=True):
        cells = "".join(f"<td>{cell}</td>" for cell in line[: len(heads)])
        bars = "".join(f"<td class=bar>{cell}</td>" for cell in line[len(heads) :])
        body.append(f"<tr><th scope=row dir=auto>{escape(label(unit))}</th>{cells}{bars}</tr>")
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"


def _texts(values: Sequence[float], like: Sequence[float]) -> list[str]:
    """The values with as many decimals as those of `like` need; nothing for NaN."""
    show = number_format(like)
    return ["" if math.isnan(value) else show(value) for value in values]


def _tinted(scores: Tensor) -> list[str]:
    values, largest = scores.tolist(), _largest(scores)
    shares = [0.0 if math.isnan(value) else value / largest for value in values]
    return [
        text and f'<span class="v {_sign(share)}{_ink(share)}" style="--a:{abs(share):.3f}">{text}</span>'
        for text, share in zip(_texts(values, values), shares, strict=True)
    ]


def _sign(score: float) -> str:
    return "n" if score < 0 else "p"


def _ink(weight: float) -> str:
    return " k" if dark_ink(weight, DARK_PAPER) else ""


def _largest(scores: Tensor) -> float:
    return float(scores.abs().nan_to_num(0.0).max()) or 1.0 if scores.numel() else 1.0
