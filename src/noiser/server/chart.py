"""A unit's tolerance as a drawing: the prediction against the noise, and where the model changes its mind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from noiser.attribution.display import label
from noiser.pages import html_table

if TYPE_CHECKING:
    from torch import Tensor

    from noiser.attribution import Attribution
    from noiser.explain import Tolerance

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 300, 56, 20, 18, 46


def tolerance_html(att: Attribution, curve: Tolerance, row: int) -> str:
    """A drawing of one target's probabilities, the same in words, and its numbers in a table.

    Flips are marked by shape, not by colour; every mark says its numbers under the pointer.
    """
    unit, target = label(curve.unit.text), label(curve.targets[row].text)
    if curve.probabilities[row].isnan().all():
        text = f"<bdi>{escape(unit)}</bdi> does not stand before “{escape(target)}”: choose another unit or target."
        return f'<div class="noiser-att"><p>{text}</p></div>'
    chart = _Chart(att, curve, row)
    words = escape(chart.in_words())
    return (
        f'<div class="noiser-att"><h3 class=chart-title>Noise on “<bdi>{escape(unit)}</bdi>”, '
        f"prediction “<bdi>{escape(target)}</bdi>”</h3>"
        f'<div class=wide tabindex=0><svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{words}">'
        f"{chart.grid()}{chart.lines()}{chart.marks()}</svg></div>"
        "<p class=facts>● the prediction stays&ensp;◇ another token leads&ensp;"
        "band: two standard errors over the noise samples</p>"
        f"<p>{words}</p><details><summary>the chart in numbers</summary>{chart.table()}</details></div>"
    )


class _Chart:
    """One row of a tolerance curve: k on a scale of powers of two from left to right, probability from 0 upwards."""

    def __init__(self, att: Attribution, curve: Tolerance, row: int) -> None:
        self.target, self.leaders = curve.targets[row], curve.leaders[row]
        self.ks: list[float] = curve.ks.tolist()
        self.p: list[float] = curve.probabilities[row].tolist()
        self.stderr: list[float] = curve.stderr[row].tolist()
        self.flips: list[bool] = curve.flips[row].tolist()
        self.threshold = _known(att.thresholds, row, curve.unit_index)
        self.k_min = _known(att.k_min, row)
        self.foil: list[float] = [] if curve.foil_probabilities is None else curve.foil_probabilities.tolist()
        self.shown = [i for i, k in enumerate(self.ks) if k > 0]
        powers = [math.log2(self.ks[i]) for i in self.shown] or [0.0]
        self.low, self.high = min(powers), max(max(powers), min(powers) + 1)
        self.top = _round_up(max([*self.p, *self.foil]))

    def x(self, k: float) -> float:
        share = (math.log2(k) - self.low) / (self.high - self.low)
        return round(LEFT + min(1.0, max(0.0, share)) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, probability: float) -> float:
        share = min(1.0, max(0.0, probability / self.top))
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def grid(self) -> str:
        parts: list[str] = []
        for value in (self.top * tick / 4 for tick in range(5)):
            parts.append(f'<path class=grid d="M{LEFT} {self.y(value)}H{WIDTH - RIGHT}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{self.y(value) + 4}" text-anchor=end>{value:.3g}</text>')
        first, last = math.ceil(self.low), math.floor(self.high)
        for power in range(first, last + 1, max(1, (last - first) // 5)):
            x = self.x(2.0**power)
            parts.append(f'<path class=grid d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>')
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 17}" text-anchor=middle>{2.0**power:.2g}</text>')
        middle, side = (LEFT + WIDTH - RIGHT) / 2, f"translate(13 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)"
        parts.append(f'<text class=axis x="{middle}" y="{HEIGHT - 8}" text-anchor=middle>noise k</text>')
        parts.append(f'<text class=axis transform="{side}" text-anchor=middle>p(target)</text>')
        return "".join(parts)

    def lines(self) -> str:
        spread = [0.0 if math.isnan(value) else 2 * value for value in self.stderr]
        upper = self._points(self.shown, [p + s for p, s in zip(self.p, spread, strict=True)])
        lower = self._points(reversed(self.shown), [p - s for p, s in zip(self.p, spread, strict=True)])
        parts = [
            f'<polygon class=band points="{upper} {lower}"/>',
            f'<path class=clean d="M{LEFT} {self.y(self.target.probability)}H{WIDTH - RIGHT}"/>',
            f'<polyline class=line points="{self._points(self.shown, self.p)}"/>',
        ]
        if self.foil:
            points = self._points(self.shown, self.foil)
            parts.append(f'<polyline class="line foil" points="{points}"><title>the foil</title></polyline>')
        if self.k_min is not None and self.k_min != self.threshold:
            parts.append(self._upright(self.k_min, "k_min", "least", TOP + 24))
        if self.threshold is not None:
            parts.append(self._upright(self.threshold, "threshold", "threshold", TOP + 10))
        return "".join(parts)

    def _points(self, indices: Iterable[int], values: list[float]) -> str:
        return " ".join(f"{self.x(self.ks[i])},{self.y(values[i])}" for i in indices)

    def _upright(self, k: float, name: str, kind: str, height: int) -> str:
        x = self.x(k)
        anchor, side = ("end", -5) if x > WIDTH * 0.75 else ("start", 5)
        text = f'<text class=axis x="{x + side}" y="{height}" text-anchor={anchor}>{name} {k:.3g}</text>'
        return f'<path class={kind} d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>{text}'

    def marks(self) -> str:
        parts: list[str] = []
        for i in self.shown:
            x, y = self.x(self.ks[i]), self.y(self.p[i])
            circle, diamond = f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", f"M{x} {y - 6}l6 6l-6 6l-6 -6z"
            kind, d = ("flips", diamond) if self.flips[i] else ("stays", circle)
            parts.append(f'<path class="point {kind}" d="{d}"><title>{escape(self._point_in_words(i))}</title></path>')
        return "".join(parts)

    def _point_in_words(self, i: int) -> str:
        leader, spread = self.leaders[i], "" if math.isnan(self.stderr[i]) else f" ± {self.stderr[i]:.2g}"
        leads = f", “{label(leader.text)}” leads with {leader.probability:.3g}" if self.flips[i] else ""
        return f"k {self.ks[i]:.3g}: p(target) {self.p[i]:.3g}{spread}{leads}"

    def in_words(self) -> str:
        parts = [f"Without noise the probability is {self.target.probability:.3g}."]
        if any(self.flips):
            first = self.flips.index(True)
            leader = self.leaders[first]
            parts.append(
                f"At k = {self.ks[first]:.3g} the model changes its mind: “{label(leader.text)}” leads "
                f"with {leader.probability:.3g}."
            )
        else:
            parts.append(f"The prediction does not change up to k = {max(self.ks):.3g}.")
        if self.threshold is not None:
            parts.append(f"Noiser's search put this unit's threshold at {self.threshold:.3g}.")
        return " ".join(parts)

    def table(self) -> str:
        rows = [
            (
                f"{self.ks[i]:.4g}",
                f"{self.p[i]:.4g}",
                "" if math.isnan(self.stderr[i]) else f"{self.stderr[i]:.2g}",
                f"<bdi>{escape(label(leader.text))}</bdi>{' (flips)' if self.flips[i] else ''}",
                f"{leader.probability:.4g}",
            )
            for i, leader in enumerate(self.leaders)
        ]
        return html_table(("k", "p(target)", "±", "leads", "p(leader)"), rows)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 6, 8 and 10 times a power of ten, so that quarters are short numbers."""
    if value <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(value))
    return min(1.0, next((step * scale for step in (1, 2, 4, 6, 8, 10) if step * scale >= value), 1.0))


def _known(values: Tensor | None, *index: int) -> float | None:
    """A threshold that was searched; None for any other."""
    value = math.nan if values is None else float(values[index])
    return None if math.isnan(value) or value <= 0 else value
