"""A unit's tolerance as a drawing: the prediction against the noise, and where the model changes its mind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from noiser.attribution.display import label

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.methods import Tolerance

__all__ = ["tolerance_html"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 300, 56, 20, 18, 46


def tolerance_html(att: Attribution, found: Tolerance, row: int) -> str:
    """A drawing of one target's probabilities, what it shows in words, and its numbers in a table.

    Flips are marked by shape, not by colour; every mark says its numbers under the pointer and by focus.
    """
    unit, target = label(found.unit.text), label(found.targets[row].text)
    if found.probabilities[row].isnan().all():
        text = f"<bdi>{escape(unit)}</bdi> does not stand before “{escape(target)}”: choose another unit or target."
        return f'<div class="noiser-att"><p>{text}</p></div>'
    axes = _Axes(found, row)
    said = _in_words(att, found, row)
    body = axes.grid() + _lines(att, found, row, axes) + _marks(found, row, axes)
    return (
        f'<div class="noiser-att"><h3 class=chart-title>Noise on “<bdi>{escape(unit)}</bdi>”, '
        f"prediction “<bdi>{escape(target)}</bdi>”</h3>"
        f'<svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=group aria-label="{escape(said)}">{body}</svg>'
        "<p class=facts>● the prediction stays&ensp;◇ another token leads&ensp;"
        "band: two standard errors over the noise samples</p>"
        f"<p>{escape(said)}</p><details><summary>the chart in numbers</summary>{_table(found, row)}</details></div>"
    )


class _Axes:
    """k on a scale of powers of two, from left to right; probability from 0 upwards."""

    def __init__(self, found: Tolerance, row: int) -> None:
        self.shown = [i for i, k in enumerate(found.ks.tolist()) if k > 0]
        powers = [math.log2(found.ks[i]) for i in self.shown] or [0.0]
        self.low, self.high = min(powers), max(max(powers), min(powers) + 1)
        highest = found.probabilities[row].max()
        if found.foil_probabilities is not None:
            highest = max(highest, found.foil_probabilities.max())
        self.top = _round_up(float(highest))

    def x(self, k: float) -> float:
        share = (math.log2(k) - self.low) / (self.high - self.low)
        return round(LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, probability: float) -> float:
        share = min(1.0, max(0.0, probability / self.top))
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def grid(self) -> str:
        parts: list[str] = []
        for tick in range(5):
            value = self.top * tick / 4
            parts.append(f'<path class=grid d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{self.y(value) + 4}" text-anchor=end>{value:.3g}</text>')
        first, last = math.ceil(self.low), math.floor(self.high)
        for power in range(first, last + 1, max(1, (last - first) // 5)):
            x = self.x(2.0**power)
            parts.append(f'<path class=grid d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 17}" text-anchor=middle>{2.0**power:.2g}</text>')
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(f'<text class=axis x="{middle}" y="{HEIGHT - 8}" text-anchor=middle>noise k</text>')
        side = (TOP + HEIGHT - BOTTOM) / 2
        parts.append(
            f'<text class=axis transform="translate(13 {side}) rotate(-90)" text-anchor=middle>p(target)</text>'
        )
        return "".join(parts)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 and 10 times a power of ten, so that quarters are short numbers."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return min(1.0, next((step * scale for step in (1, 2, 4, 6, 8, 10) if step * scale >= value), 1.0))


def _lines(att: Attribution, found: Tolerance, row: int, axes: _Axes) -> str:
    ks, p, spread = found.ks.tolist(), found.probabilities[row].tolist(), found.stderr[row].nan_to_num(0).tolist()
    upper = [(axes.x(ks[i]), axes.y(p[i] + 2 * spread[i])) for i in axes.shown]
    lower = [(axes.x(ks[i]), axes.y(p[i] - 2 * spread[i])) for i in reversed(axes.shown)]
    parts = [
        f'<polygon class=band points="{_points([*upper, *lower])}"/>',
        f'<path class=clean d="M{LEFT} {axes.y(found.targets[row].probability)}H{WIDTH - RIGHT}"/>',
        f'<polyline class=line points="{_points([(axes.x(ks[i]), axes.y(p[i])) for i in axes.shown])}"/>',
    ]
    if found.foil_probabilities is not None:
        foil = found.foil_probabilities.tolist()
        points = _points([(axes.x(ks[i]), axes.y(foil[i])) for i in axes.shown])
        parts.append(f'<polyline class="line foil" points="{points}"><title>the foil</title></polyline>')
    threshold, k_min = _threshold(att, found, row), _k_min(att, row)
    if k_min is not None and k_min != threshold:
        parts.append(_upright(axes, k_min, "k_min", "least", TOP + 24))
    if threshold is not None:
        parts.append(_upright(axes, threshold, "threshold", "threshold", TOP + 10))
    return "".join(parts)


def _upright(axes: _Axes, k: float, name: str, kind: str, height: int) -> str:
    x = axes.x(k)
    anchor, side = ("end", -5) if x > WIDTH * 0.75 else ("start", 5)
    text = f'<text class=axis x="{x + side}" y="{height}" text-anchor={anchor}>{name} {k:.3g}</text>'
    return f'<path class={kind} d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>{text}'


def _marks(found: Tolerance, row: int, axes: _Axes) -> str:
    parts: list[str] = []
    for place, i in enumerate(axes.shown):
        x, y = axes.x(float(found.ks[i])), axes.y(float(found.probabilities[row, i]))
        flips = bool(found.flips[row, i])
        d = f"M{x} {y - 6}l6 6l-6 6l-6 -6z" if flips else f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
        tip, kind = escape(_point_in_words(found, row, i)), "flips" if flips else "stays"
        parts.append(
            f'<path class="point {kind}" d="{d}" tabindex={-1 if place else 0} role=img aria-label="{tip}" '
            f'data-tip="{tip}"/>'
        )
    return "".join(parts)


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in pairs)


def _point_in_words(found: Tolerance, row: int, index: int) -> str:
    p, leader = float(found.probabilities[row, index]), found.leaders[row][index]
    text = f"k {float(found.ks[index]):.3g}: p(target) {p:.3g}"
    spread = float(found.stderr[row, index])
    text += "" if math.isnan(spread) else f" ± {spread:.2g}"
    return text + (f", “{label(leader.text)}” leads with {leader.probability:.3g}" if found.flips[row, index] else "")


def _in_words(att: Attribution, found: Tolerance, row: int) -> str:
    flipped = [i for i, flips in enumerate(found.flips[row].tolist()) if flips]
    parts = [f"Without noise the probability is {found.targets[row].probability:.3g}."]
    if flipped:
        first = flipped[0]
        leader = found.leaders[row][first]
        parts.append(
            f"At k = {float(found.ks[first]):.3g} the model changes its mind: “{label(leader.text)}” leads "
            f"with {leader.probability:.3g}."
        )
    else:
        parts.append(f"The model keeps its mind up to k = {float(found.ks.max()):.3g}.")
    if (threshold := _threshold(att, found, row)) is not None:
        parts.append(f"Noiser's search put this unit's threshold at {threshold:.3g}.")
    return " ".join(parts)


def _threshold(att: Attribution, found: Tolerance, row: int) -> float | None:
    value = math.nan if att.thresholds is None else float(att.thresholds[row, found.unit_index])
    return None if math.isnan(value) or value <= 0 else value


def _k_min(att: Attribution, row: int) -> float | None:
    value = math.nan if att.k_min is None else float(att.k_min[row])
    return None if math.isnan(value) or value <= 0 else value


def _table(found: Tolerance, row: int) -> str:
    head = "".join(f"<th scope=col>{name}</th>" for name in ("k", "p(target)", "±", "leads", "p(leader)"))
    lines: list[str] = []
    for index, leader in enumerate(found.leaders[row]):
        spread = float(found.stderr[row, index])
        cells = [
            f"{float(found.probabilities[row, index]):.4g}",
            "" if math.isnan(spread) else f"{spread:.2g}",
            f"<bdi>{escape(label(leader.text))}</bdi>{' (flips)' if found.flips[row, index] else ''}",
            f"{leader.probability:.4g}",
        ]
        body = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr><th scope=row>{float(found.ks[index]):.4g}</th>{body}</tr>")
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
