"""A unit's tolerance as a drawing: the prediction against the noise, and where the model changes its mind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from noiser.attribution.display import label

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.explain import Tolerance

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 300, 56, 660, 18, 254
OCTAVES = 10
"""Powers of two from left to right; the last is k = 1."""


def tolerance_html(att: Attribution, curve: Tolerance, row: int) -> str:
    """A drawing of one target's probabilities, the same in words, and its numbers in a table.

    Flips are marked by shape, not by colour; every mark says its numbers under the pointer.
    """
    unit, target = (f"“<bdi>{escape(label(each.text))}</bdi>”" for each in (curve.unit, curve.targets[row]))
    frame: Any = curve.to_dataframe().query(f"target_index == {row}")
    frame["leader"] = frame["leader"].map(label)
    if frame.empty:
        text = f"{unit} does not stand before {target}: choose another unit or target."
        return f'<div class="noiser-att"><p>{text}</p></div>'
    found = {
        "threshold": math.nan if att.thresholds is None else float(att.thresholds[row, curve.unit_index]),
        "k_min": math.nan if att.k_min is None else float(att.k_min[row]),
    }
    levels, clean = {name: k for name, k in found.items() if k > 0}, curve.targets[row].probability
    points = list(frame.itertuples())
    words, columns = escape(_in_words(points, levels, clean)), ["k", "probability", "stderr", "leader", "flips"]
    numbers = frame[[*columns, "leader_probability"]].to_html(index=False, border=0, float_format="{:.4g}".format)
    return (
        f'<div class="noiser-att"><h3 class=chart-title>Noise on {unit}, prediction {target}</h3>'
        f'<div class=wide tabindex=0><svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{words}">'
        f"{_drawing([point for point in points if point.k > 0], levels, clean)}</svg></div>"
        "<p class=facts>● the prediction stays&ensp;◇ another token leads&ensp;"
        f"band: two standard errors over the noise samples</p><p>{words}</p><details>"
        f"<summary>the chart in numbers</summary><div class=wide tabindex=0>{numbers}</div></details></div>"
    )


def _drawing(points: Sequence[Any], levels: Mapping[str, float], clean: float) -> str:
    """The marks of a chart: k on a scale of powers of two, probability from 0 upwards."""
    largest = max(1e-9, *(max(point.probability, point.foil_probability) for point in points))
    unit = 10.0 ** math.floor(math.log10(largest))
    top = min(1.0, unit * math.ceil(largest / unit))

    def x(k: float) -> float:
        return round(LEFT + min(1.0, max(0.0, 1 + math.log2(k) / OCTAVES)) * (RIGHT - LEFT), 1)

    def y(p: float) -> float:
        return round(BOTTOM - min(1.0, max(0.0, p / top)) * (BOTTOM - TOP), 1)

    def places(values: Iterable[float]) -> str:
        return " ".join(f"{x(point.k)},{y(value)}" for point, value in zip(points, values, strict=True))

    middle, parts = (TOP + BOTTOM) / 2, list[str]()
    for p in (top * tick / 4 for tick in range(5)):
        parts.append(f'<path class=grid d="M{LEFT} {y(p)}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(p) + 4}" text-anchor=end>{p:.3g}</text>')
    for k in (2.0**-power for power in range(0, OCTAVES + 1, 2)):
        parts.append(f'<path class=grid d="M{x(k)} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{x(k)}" y="{BOTTOM + 17}" text-anchor=middle>{k:.2g}</text>')
    parts.append(f'<text class=axis x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor=middle>noise k</text>')
    parts.append(f'<text class=axis transform="translate(13 {middle}) rotate(-90)" text-anchor=middle>p(target)</text>')
    spread = [0.0 if math.isnan(point.stderr) else 2 * point.stderr for point in points]
    upper = places(point.probability + more for point, more in zip(points, spread, strict=True)).split()
    lower = places(point.probability - less for point, less in zip(points, spread, strict=True)).split()
    parts.append(f'<polygon class=band points="{" ".join(upper + lower[::-1])}"/>')
    parts.append(f'<path class=clean d="M{LEFT} {y(clean)}H{RIGHT}"/>')
    parts.append(f'<polyline class=line points="{places(point.probability for point in points)}"/>')
    if not math.isnan(points[0].foil_probability):
        foil = places(point.foil_probability for point in points)
        parts.append(f'<polyline class="line foil" points="{foil}"><title>the foil</title></polyline>')
    for number, (name, k) in enumerate(levels.items()):
        anchor, side = ("end", -5) if x(k) > WIDTH * 0.75 else ("start", 5)
        place = f'x="{x(k) + side}" y="{TOP + 10 + 14 * number}" text-anchor={anchor}'
        parts.append(f'<path class={name} d="M{x(k)} {TOP}V{BOTTOM}"/><text class=axis {place}>{name} {k:.3g}</text>')
    return "".join([*parts, *(_mark(point, x(point.k), y(point.probability)) for point in points)])


def _mark(point: Any, x: float, y: float) -> str:
    circle, diamond = f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", f"M{x} {y - 6}l6 6l-6 6l-6 -6z"
    kind, d = ("flips", diamond) if point.flips else ("stays", circle)
    spread = "" if math.isnan(point.stderr) else f" ± {point.stderr:.2g}"
    leads = f", {_leads(point)}" if point.flips else ""
    words = f"k {point.k:.3g}: p(target) {point.probability:.3g}{spread}{leads}"
    return f'<path class="point {kind}" d="{d}"><title>{escape(words)}</title></path>'


def _leads(point: Any) -> str:
    return f"“{point.leader}” leads with {point.leader_probability:.3g}"


def _in_words(points: Sequence[Any], levels: Mapping[str, float], clean: float) -> str:
    change = f"The prediction does not change up to k = {points[-1].k:.3g}."
    if first := next((point for point in points if point.flips), None):
        change = f"At k = {first.k:.3g} the model changes its mind: {_leads(first)}."
    searched = "Noiser's search put this unit's threshold at"
    threshold = f" {searched} {levels['threshold']:.3g}." if "threshold" in levels else ""
    return f"Without noise the probability is {clean:.3g}. {change}{threshold}"
