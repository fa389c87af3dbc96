"""The chart of a tolerance: how much noise each unit stands."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

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
    """The marks of a chart: grid and axes, curves with their band, levels of k, and points."""
    chart = _Scales.of(frame)
    return "".join(
        [
            *_grid(chart),
            *_curves(chart, frame, clean),
            *_levels(chart, levels),
            *_points(chart, frame),
        ]
    )


class _Scales(NamedTuple):
    """From numbers to pixels: k on a scale of powers of two, probability from 0 to `top`."""

    top: float

    @classmethod
    def of(cls, frame: Any) -> _Scales:
        """Scales up to the first multiple of a power of ten above all probabilities."""
        largest = max(1e-9, frame[["probability", "foil_probability"]].max(axis=None))
        unit = 10.0 ** math.floor(math.log10(largest))
        return cls(min(1.0, unit * math.ceil(largest / unit)))

    def x(self, k: Any) -> Any:
        """The pixels from the left of one k or of many."""
        share = (1 + np.log2(k) / OCTAVES).clip(0, 1)
        return (LEFT + share * (RIGHT - LEFT)).round(1)

    def y(self, probability: Any) -> Any:
        """The pixels from above of one probability or of many."""
        share = np.divide(probability, self.top).clip(0, 1)
        return (BOTTOM - share * (BOTTOM - TOP)).round(1)

    def places(self, frame: Any, values: Any) -> list[str]:
        """The places "x,y" of values, each at its row's k."""
        across = self.x(frame["k"])
        down = self.y(values)
        return [f"{x},{y}" for x, y in zip(across, down, strict=True)]


def _grid(chart: _Scales) -> Iterator[str]:
    """Lines with their numbers, and the names of both axes."""
    for tick in range(5):
        p = chart.top * tick / 4
        y = chart.y(p)
        yield f'<path class=grid d="M{LEFT} {y}H{RIGHT}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor=end>{p:.3g}</text>'
    for power in range(0, OCTAVES + 1, 2):
        k = 2.0**-power
        x = chart.x(k)
        yield f'<path class=grid d="M{x} {TOP}V{BOTTOM}"/>'
        yield f'<text x="{x}" y="{BOTTOM + 17}" text-anchor=middle>{k:.2g}</text>'
    centre = (LEFT + RIGHT) / 2
    middle = (TOP + BOTTOM) / 2
    yield f'<text class=axis x="{centre}" y="{HEIGHT - 8}" text-anchor=middle>noise k</text>'
    yield (
        f'<text class=axis transform="translate(13 {middle}) rotate(-90)" '
        "text-anchor=middle>p(target)</text>"
    )


def _curves(chart: _Scales, frame: Any, clean: float) -> Iterator[str]:
    """The band of two standard errors, the clean probability, and the lines of target and foil."""
    probability = frame["probability"]
    two_errors = 2 * frame["stderr"].fillna(0)
    upper = chart.places(frame, probability + two_errors)
    lower = chart.places(frame, probability - two_errors)
    around = " ".join(upper + lower[::-1])
    line = " ".join(chart.places(frame, probability))
    yield f'<polygon class=band points="{around}"/>'
    yield f'<path class=clean d="M{LEFT} {chart.y(clean)}H{RIGHT}"/>'
    yield f'<polyline class=line points="{line}"/>'
    if frame["foil_probability"].notna().all():
        foil = " ".join(chart.places(frame, frame["foil_probability"]))
        yield f'<polyline class="line foil" points="{foil}"><title>the foil</title></polyline>'


def _levels(chart: _Scales, levels: Mapping[str, float]) -> Iterator[str]:
    """A vertical line for each level of k, with its name."""
    for number, (name, k) in enumerate(levels.items()):
        x = chart.x(k)
        is_at_the_right = x > WIDTH * 0.75
        anchor = "end" if is_at_the_right else "start"
        text_x = x - 5 if is_at_the_right else x + 5
        text_y = TOP + 10 + 14 * number
        place = f'x="{text_x}" y="{text_y}" text-anchor={anchor}'
        yield f'<path class={name} d="M{x} {TOP}V{BOTTOM}"/>'
        yield f"<text class=axis {place}>{name} {k:.3g}</text>"


def _points(chart: _Scales, frame: Any) -> Iterator[str]:
    """A circle where the prediction stays, a diamond where it flips; each says its numbers."""
    for point in frame.itertuples():
        x = chart.x(point.k)
        y = chart.y(point.probability)
        if point.flips:
            kind = "flips"
            shape = f"M{x} {y - 6}l6 6l-6 6l-6 -6z"
            leads = f", {point.leads}"
        else:
            kind = "stays"
            shape = f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"
            leads = ""
        spread = "" if math.isnan(point.stderr) else f" ± {point.stderr:.2g}"
        words = f"k {point.k:.3g}: p(target) {point.probability:.3g}{spread}{leads}"
        yield f'<path class="point {kind}" d="{shape}"><title>{escape(words)}</title></path>'
