"""What all figures share: a style that reads without colour, and files that are the same every time."""

from __future__ import annotations

import io
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from noiser.attribution.figure import figure_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, SOFT, LINE, PAPER = "#14161b", "#59606e", "#d9dde5", "#ffffff"
ORANGE, BLUE = "#e69f00", "#56b4e9"  # of Okabe and Ito, for colour-blind readers

_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
    "savefig.facecolor": PAPER,
}

_SCALE = 1.5
"""Pixels of a page for a point of a figure, so that letters have one size in all figures."""


class Picture(NamedTuple):
    """A figure.

    Attributes:
        key: short name, for files.
        title: what it shows.
        description: the numbers in words, for readers who cannot see it.
        figure: matplotlib's.
    """

    key: str
    title: str
    description: str
    figure: Figure


@contextmanager
def canvas(width: float, height: float, columns: int = 1, **options: Any) -> Generator[tuple[Figure, Sequence[Axes]]]:
    """A figure of that many inches with panels side by side, in the common style.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    page_class = figure_class()
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        figure = page_class(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(1, columns, squeeze=False, **options).flat)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # it would move things a little at every drawing


def svg(picture: Picture) -> str:
    """The figure as SVG with real text; the same bytes every time."""
    return _saved(picture, {"svg.hashsalt": picture.key}, format="svg", metadata={"Date": None}).decode()


def png(picture: Picture) -> bytes:
    """The figure as PNG, 200 dots per inch."""
    return _saved(picture, {}, format="png", dpi=200, metadata={"Software": None})


def _saved(picture: Picture, style: dict[Any, Any], metadata: dict[str, Any], **options: Any) -> bytes:
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context(_STYLE | style):
        picture.figure.savefig(out, metadata=metadata | {"Title": picture.title}, **options)
    return out.getvalue()


def inline_svg(picture: Picture) -> str:
    """The SVG for a page: named and described for screen readers, its own ids, colours that follow the page's."""
    text = svg(picture)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, count=1, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{picture.key}-", text)
    for colour, name in ((INK, "ink"), (SOFT, "soft"), (LINE, "line"), (PAPER, "paper")):
        text = text.replace(colour, f"var(--{name})")
    head, rest = text.split(">", 1)
    width = float(re.search(r'\bwidth="([\d.]+)pt"', head)[1]) * _SCALE  # pyright: ignore[reportOptionalSubscript]
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    label = escape(f"{picture.title}. {picture.description}", quote=True)
    return f'{head} role="img" aria-label="{label}" style="width:{width:.0f}px">{rest}'
