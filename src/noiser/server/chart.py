"""A unit's tolerance as a drawing: the prediction against the noise, and where the model changes its mind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from noiser.attribution.display import label
from noiser.pages import html_table

if TYPE_CHECKING:
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
        threshold = math.nan if att.thresholds is None else float(att.thresholds[row, curve.unit_index])
        k_min = math.nan if att.k_min is None else float(att.k_min[row])
        self.levels = {name: k for name, k in (("threshold", threshold), ("k_min", k_min)) if k > 0}
        self.foil: list[float] = [] if curve.foil_probabilities is None else curve.foil_probabilities.tolist()
        self.shown = [i for i, k in enumerate(self.ks) if k > 0]
        powers = [math.log2(self.ks[i]) for i in self.shown] or [0.0]
        self.low, self.high = min(powers), max(max(powers), min(powers) + 1)
        largest = max([*self.p, *self.foil, 1e-9])
        scale = 10.0 ** math.floor(math.log10(largest))  # quarters of the top are short numbers
        self.top = min(1.0, next((step * scale for step in (1, 2, 4, 6, 8) if step * scale >= largest), 10 * scale))

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
        for i, (name, k) in enumerate(self.levels.items()):
            x = self.x(k)
            anchor, side = ("end", -5) if x > WIDTH * 0.75 else ("start", 5)
            parts.append(f'<path class={name} d="M{x} {TOP}V{HEIGHT - BOTTOM}"/>')
            place = f'x="{x + side}" y="{TOP + 10 + 14 * i}" text-anchor={anchor}'
            parts.append(f"<text class=axis {place}>{name} {k:.3g}</text>")
        return "".join(parts)

    def _points(self, indices: Iterable[int], values: list[float]) -> str:
        return " ".join(f"{self.x(self.ks[i])},{self.y(values[i])}" for i in indices)

    def marks(self) -> str:
        parts: list[str] = []
        for i in self.shown:
            x, y, leader = self.x(self.ks[i]), self.y(self.p[i]), self.leaders[i]
            circle, diamond = f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", f"M{x} {y - 6}l6 6l-6 6l-6 -6z"
            kind, d = ("flips", diamond) if self.flips[i] else ("stays", circle)
            spread = "" if math.isnan(self.stderr[i]) else f" ± {self.stderr[i]:.2g}"
            leads = f", “{label(leader.text)}” leads with {leader.probability:.3g}" if self.flips[i] else ""
            words = f"k {self.ks[i]:.3g}: p(target) {self.p[i]:.3g}{spread}{leads}"
            parts.append(f'<path class="point {kind}" d="{d}"><title>{escape(words)}</title></path>')
        return "".join(parts)

    def in_words(self) -> str:
        change = f"The prediction does not change up to k = {max(self.ks):.3g}."
        if any(self.flips):
            leader, k = self.leaders[self.flips.index(True)], self.ks[self.flips.index(True)]
            leads = f"“{label(leader.text)}” leads with {leader.probability:.3g}"
            change = f"At k = {k:.3g} the model changes its mind: {leads}."
        searched = "Noiser's search put this unit's threshold at"
        threshold = f" {searched} {self.levels['threshold']:.3g}." if "threshold" in self.levels else ""
        return f"Without noise the probability is {self.target.probability:.3g}. {change}{threshold}"

    def table(self) -> str:
        rows: list[tuple[str, ...]] = []
        for k, p, stderr, flips, leader in zip(self.ks, self.p, self.stderr, self.flips, self.leaders, strict=True):
            leads = f"<bdi>{escape(label(leader.text))}</bdi>{' (flips)' if flips else ''}"
            spread = "" if math.isnan(stderr) else f"{stderr:.2g}"
            rows.append((f"{k:.4g}", f"{p:.4g}", spread, leads, f"{leader.probability:.4g}"))
        return html_table(("k", "p(target)", "±", "leads", "p(leader)"), rows)
