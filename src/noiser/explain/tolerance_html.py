"""The chart of a tolerance: how much noise each unit stands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from noiser.attribution.display import label

WIDTH = 680
HEIGHT = 300
LEFT = 56
RIGHT = 660
TOP = 18
BOTTOM = 254


OCTAVES = 10  # powers of two from left to right; the last is k = 1


def tolerance_html(curve: Any, row: int) -> str:
    """A drawing of one target's probabilities in a `Tolerance`, the same in words, and its numbers
    in a table.

    Flips are marked by shape, not by colour; every mark says its numbers under the pointer.
    """
    unit, target = (
        f"“<bdi>{escape(label(each.text))}</bdi>”" for each in (curve.unit, curve.targets[row])
    )
    frame: Any = curve.to_dataframe().query(f"target_index == {row} and k > 0")
    if frame.empty:
        return (
            f'<div class="noiser-att"><p>{unit} does not stand before {target}: choose another '
            f"of them.</p></div>"
        )
    frame["leader"] = frame["leader"].map(label)
    frame["leads"] = [
        f"“{point.leader}” leads with {point.leader_probability:.3g}"
        for point in frame.itertuples()
    ]
    levels: dict[str, float] = {}
    for name, ks in (("threshold", curve.thresholds), ("k_min", curve.k_min)):
        if ks is not None and float(ks[row]) > 0:
            levels[name] = float(ks[row])
    clean = curve.targets[row].probability
    flips = frame[frame["flips"]]
    words = f"Without noise the probability is {clean:.3g}. "
    if flips.empty:
        words += f"The prediction does not change up to k = {frame['k'].iloc[-1]:.3g}."
    else:
        words += (
            f"At k = {flips['k'].iloc[0]:.3g} the model changes its mind: {flips['leads'].iloc[0]}."
        )
    if "threshold" in levels:
        words += f" Noiser's search put this unit's threshold at {levels['threshold']:.3g}."
    words = escape(words)
    columns = ["k", "probability", "stderr", "leader", "flips", "leader_probability"]
    numbers = frame[columns].to_html(index=False, border=0, float_format="{:.4g}".format)
    return (
        f'<div class="noiser-att"><h3 class=chart-title>Noise on {unit}, prediction {target}</h3>'
        f'<div class=wide tabindex=0><svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=img '
        f'aria-label="{words}">'
        f"{_drawing(frame, levels, clean)}</svg></div>"
        "<p class=facts>● the prediction stays&ensp;◇ another token leads&ensp;"
        f"band: two standard errors over the noise samples</p><p>{words}</p><details>"
        f"<summary>the chart in numbers</summary><div class=wide "
        f"tabindex=0>{numbers}</div></details></div>"
    )


def _drawing(frame: Any, levels: Mapping[str, float], clean: float) -> str:
    """The marks of a chart: k on a scale of powers of two, probability from 0 upwards."""
    largest = max(1e-9, frame[["probability", "foil_probability"]].max(axis=None))
    unit = 10.0 ** math.floor(math.log10(largest))
    top = min(1.0, unit * math.ceil(largest / unit))

    def x(k: Any) -> Any:
        return (LEFT + (1 + np.log2(k) / OCTAVES).clip(0, 1) * (RIGHT - LEFT)).round(1)

    def y(p: Any) -> Any:
        return (BOTTOM - np.divide(p, top).clip(0, 1) * (BOTTOM - TOP)).round(1)

    def places(values: Any) -> list[str]:
        return [f"{across},{up}" for across, up in zip(x(frame["k"]), y(values), strict=True)]

    middle = (TOP + BOTTOM) / 2
    parts = list[str]()
    for p in (top * tick / 4 for tick in range(5)):
        parts.append(f'<path class=grid d="M{LEFT} {y(p)}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(p) + 4}" text-anchor=end>{p:.3g}</text>')
    for k in (2.0**-power for power in range(0, OCTAVES + 1, 2)):
        parts.append(f'<path class=grid d="M{x(k)} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{x(k)}" y="{BOTTOM + 17}" text-anchor=middle>{k:.2g}</text>')
    parts.append(
        f'<text class=axis x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor=middle>noise '
        f"k</text>"
    )
    parts.append(
        f'<text class=axis transform="translate(13 {middle}) rotate(-90)" '
        f"text-anchor=middle>p(target)</text>"
    )
    upper, lower = (
        places(frame["probability"] + 2 * sign * frame["stderr"].fillna(0)) for sign in (1, -1)
    )
    parts.append(f'<polygon class=band points="{" ".join(upper + lower[::-1])}"/>')
    parts.append(f'<path class=clean d="M{LEFT} {y(clean)}H{RIGHT}"/>')
    parts.append(f'<polyline class=line points="{" ".join(places(frame["probability"]))}"/>')
    if frame["foil_probability"].notna().all():
        foil = " ".join(places(frame["foil_probability"]))
        parts.append(
            f'<polyline class="line foil" points="{foil}"><title>the foil</title></polyline>'
        )
    for number, (name, k) in enumerate(levels.items()):
        anchor, side = ("end", -5) if x(k) > WIDTH * 0.75 else ("start", 5)
        place = f'x="{x(k) + side}" y="{TOP + 10 + 14 * number}" text-anchor={anchor}'
        parts.append(
            f'<path class={name} d="M{x(k)} {TOP}V{BOTTOM}"/><text class=axis {place}>{name} '
            f"{k:.3g}</text>"
        )
    return "".join(
        [*parts, *(_mark(point, x(point.k), y(point.probability)) for point in frame.itertuples())]
    )


def _mark(point: Any, x: float, y: float) -> str:
    circle = f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
    diamond = f"M{x} {y - 6}l6 6l-6 6l-6 -6z"
    kind, d = ("flips", diamond) if point.flips else ("stays", circle)
    spread = "" if math.isnan(point.stderr) else f" ± {point.stderr:.2g}"
    leads = f", {point.leads}" if point.flips else ""
    words = f"k {point.k:.3g}: p(target) {point.probability:.3g}{spread}{leads}"
    return f'<path class="point {kind}" d="{d}"><title>{escape(words)}</title></path>'
