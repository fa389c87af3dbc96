"""Heat maps of the plan's own prompts, method below method, as a figure. Prompts of data sets are never shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution import Attribution
from noiser.attribution.display import cells, label, visible
from noiser.report.drawing import BLUE, INK, ORANGE, SOFT, Picture, canvas
from noiser.report.names import method_title
from noiser.report.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Shown", "heatmaps", "own_attributions"]

MOST = 6
"""Prompts a model that are shown."""

_COLUMNS = 78
"""Characters a line."""

_CHARACTER, _LINE = 0.082, 0.24
"""Inches a character of the monospaced font takes, and a line."""


class Shown(NamedTuple):
    """A prompt of the plan's own and what the methods say of it."""

    model: str
    data: str
    example: str
    attributions: tuple[tuple[str, Attribution], ...]


def own_attributions(results: Results) -> list[Shown]:
    """The attributions of the first prompts of the plan's own, by method; none where the folder is packed."""
    found: dict[tuple[str, str, str], list[tuple[str, Attribution]]] = {}
    for model in results.models:
        for data in results.data:
            if data.prompts is None:
                continue
            for method in results.plan.methods_for(model.label, data.label):
                for stored in results.attributions(model.label, data.label, method.label):
                    if stored.attribution is not None and stored.index < MOST:
                        key = (model.label, data.label, stored.example)
                        found.setdefault(key, []).append((method.label, stored.attribution))
    return [Shown(*key, tuple(attributions)) for key, attributions in found.items()]


def heatmaps(results: Results) -> Iterator[Picture]:
    """A figure a prompt: its first target, a block of lines a method."""
    for shown in own_attributions(results):
        blocks = [(method_title(method), _lines(att)) for method, att in shown.attributions]
        first = shown.attributions[0][1]
        height = sum(len(lines) for _, lines in blocks) * _LINE + 0.14 * len(blocks) + 0.35
        with canvas(2.0 + _COLUMNS * _CHARACTER, height) as (figure, (axes,)):
            figure.set_layout_engine("none")
            axes.set_position((0, 0, 1, 1))
            axes.set_axis_off()
            axes.set_xlim(0, 2.0 + _COLUMNS * _CHARACTER)
            axes.set_ylim(height, 0)
            axes.text(
                0.1,
                0.2,
                f"→ {label(first.targets[0].text)}   ({shown.model})",
                fontweight="bold",
                va="center",
                parse_math=False,
            )
            _draw(axes, blocks)
        best = [(method_title(method), [label(unit.text) for unit in att.top(3)]) for method, att in shown.attributions]
        said = "; ".join(f"{method}: {', '.join(units)}" for method, units in best)
        text = label(first.text[: first.prompt_length])
        yield Picture(
            f"heatmap-{shown.data}-{shown.example}-{shown.model}",
            f"Attributions of “{text}” → “{label(first.targets[0].text)}”, {shown.model}",
            f"Highest units. {said}.",
            figure,
        )


def _lines(att: Attribution) -> list[list[tuple[str, float | None]]]:
    """The pieces of the text with their weights, broken into lines; a piece longer than a line goes on in the next."""
    lines: list[list[tuple[str, float | None]]] = [[]]
    used = 0
    for piece in cells(att, 0):
        for text in _cut(visible(piece.text).replace("\n", "")):
            if used + len(text) > _COLUMNS and used:
                lines.append([])
                used = 0
            lines[-1].append((text, None if piece.score is None else piece.weight))
            used += len(text)
    return lines


def _cut(text: str) -> Iterator[str]:
    """Parts that fit a line, cut behind a space where there is one."""
    while len(text) > _COLUMNS:
        length = text.rfind(" ", 1, _COLUMNS) + 1 or _COLUMNS
        yield text[:length]
        text = text[length:]
    yield text


def _draw(axes: Axes, blocks: Sequence[tuple[str, list[list[tuple[str, float | None]]]]]) -> None:
    """Each unit on its tint, with a bar below it for a positive score and above it for a negative one."""
    top = 0.42
    for name, lines in blocks:
        axes.text(1.85, top + _LINE / 2, name, ha="right", va="center", color=SOFT, fontsize=8.5, parse_math=False)
        for line in lines:
            left = 2.0
            for text, weight in line:
                _draw_piece(axes, left, top, text, weight)
                left += len(text) * _CHARACTER
            top += _LINE
        top += 0.14


def _draw_piece(axes: Axes, left: float, top: float, text: str, weight: float | None) -> None:
    from matplotlib.patches import Rectangle

    body = text.lstrip()
    start = left + (len(text) - len(body)) * _CHARACTER
    width = len(body) * _CHARACTER
    if weight:
        colour = ORANGE if weight > 0 else BLUE
        axes.add_patch(Rectangle((start, top), width, _LINE * 0.92, facecolor=colour, alpha=0.85 * abs(weight), lw=0))
        thick = 0.035 * abs(weight)
        at = top + _LINE * 0.92 - thick if weight > 0 else top
        axes.add_patch(Rectangle((start, at), width, thick, facecolor=INK, lw=0))
    axes.text(
        start,
        top + _LINE * 0.46,
        body,
        family="monospace",
        fontsize=9.5,
        va="center",
        color=SOFT if weight is None else INK,
        parse_math=False,
    )
