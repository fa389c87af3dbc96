"""Heat maps of the plan's own prompts, method below method, as a figure. Prompts of data sets are never shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from noiser.attribution import Attribution
from noiser.attribution.display import cells, label, visible
from noiser.errors import StoredFileError
from noiser.report.figures import BLUE, INK, ORANGE, SOFT, Picture, canvas
from noiser.report.grid import method_title
from noiser.report.rows import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_MOST = 6
"""Prompts per model that are shown."""

_COLUMNS = 78
"""Characters per line."""

_CHARACTER, _LINE, _LEFT, _GAP = 0.082, 0.24, 2.0, 0.14
"""Inches: the width of a character of the monospaced font, the height of a line, the column of names, and the space
between methods."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+@-]*"

_Piece = tuple[str, float | None]
"""A piece of a text and its weight; None for a piece without a score."""


class PromptAttributions(NamedTuple):
    """One of the plan's own prompts with its attributions by method."""

    model: str
    data: str
    example: str
    attributions: tuple[tuple[str, Attribution], ...]


def own_attributions(results: Results) -> list[PromptAttributions]:
    """The attributions of the first of the plan's own prompts, by method; none where the folder is packed.

    Raises:
        StoredFileError: an attribution's `example`, which names a file of the report, is not like a label of a plan.
    """
    by_prompt: dict[tuple[str, str, str], list[tuple[str, Attribution]]] = {}
    for model, data in product(results.models, results.data):
        for method in results.plan.methods_for(model.label, data.label) if data.prompts is not None else ():
            for stored in results.attributions(model.label, data.label, method.label):
                _check_name(stored.example, (model.label, data.label, method.label))
                if stored.attribution is not None and stored.index < _MOST:
                    key = (model.label, data.label, stored.example)
                    by_prompt.setdefault(key, []).append((method.label, stored.attribution))
    return [PromptAttributions(*key, tuple(attributions)) for key, attributions in by_prompt.items()]


def _check_name(example: str, labels: tuple[str, ...]) -> None:
    if not re.fullmatch(_NAME, example):
        raise StoredFileError(
            f"An attribution of {', '.join(labels)} is damaged: its example is {example!r}; expected letters, digits "
            "and . _ + @ -, to name files by. Delete its file and run the plan again: it makes what is missing."
        )


def heatmaps(prompts: Sequence[PromptAttributions]) -> Iterator[Picture]:
    """A figure per prompt: its first target, a block of lines per method."""
    for prompt in prompts:
        first = prompt.attributions[0][1]
        text, target = label(first.text[: first.prompt_length]), label(first.targets[0].text)
        blocks = [(method_title(method), _lines(att)) for method, att in prompt.attributions]
        width = _LEFT + _COLUMNS * _CHARACTER
        height = sum(len(lines) for _, lines in blocks) * _LINE + _GAP * len(blocks) + 0.35
        with canvas(width, height) as (figure, (axes,)):
            figure.set_layout_engine("none")
            axes.set_position((0, 0, 1, 1))
            axes.set_axis_off()
            axes.set_xlim(0, width)
            axes.set_ylim(height, 0)
            heading = f"→ {target}   ({prompt.model})"
            axes.text(0.1, 0.2, heading, fontweight="bold", va="center", parse_math=False)
            _draw(axes, blocks)
        best = [
            (method_title(method), [label(unit.text) for unit in att.top(3)]) for method, att in prompt.attributions
        ]
        words = "; ".join(f"{method}: {', '.join(units)}" for method, units in best)
        key = f"heatmap-{prompt.data}-{prompt.example}-{prompt.model}"
        title = f"Attributions of “{text}” → “{target}”, {prompt.model}"
        yield Picture(key, title, f"Highest units. {words}.", figure)


def _lines(att: Attribution) -> list[list[_Piece]]:
    """The pieces of the text with their weights, broken into lines; a piece longer than a line goes on in the next."""
    lines: list[list[_Piece]] = [[]]
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
    """Parts that fit a line, cut after a space where there is one."""
    while len(text) > _COLUMNS:
        length = text.rfind(" ", 1, _COLUMNS) + 1 or _COLUMNS
        yield text[:length]
        text = text[length:]
    yield text


def _draw(axes: Axes, blocks: Sequence[tuple[str, list[list[_Piece]]]]) -> None:
    """The lines of each method after its name."""
    top = 0.42
    for name, lines in blocks:
        axes.text(
            _LEFT - 0.15, top + _LINE / 2, name, ha="right", va="center", color=SOFT, fontsize=8.5, parse_math=False
        )
        for line in lines:
            left = _LEFT
            for text, weight in line:
                _draw_piece(axes, left, top, text, weight)
                left += len(text) * _CHARACTER
            top += _LINE
        top += _GAP


def _draw_piece(axes: Axes, left: float, top: float, text: str, weight: float | None) -> None:
    """A unit on its tint, with a bar below it for a positive score and above it for a negative one."""
    from matplotlib.patches import Rectangle

    body = text.lstrip()
    start, width = left + (len(text) - len(body)) * _CHARACTER, len(body) * _CHARACTER
    if weight:
        colour = ORANGE if weight > 0 else BLUE
        axes.add_patch(Rectangle((start, top), width, _LINE * 0.92, facecolor=colour, alpha=0.85 * abs(weight), lw=0))
        thick = 0.035 * abs(weight)
        at = top + _LINE * 0.92 - thick if weight > 0 else top
        axes.add_patch(Rectangle((start, at), width, thick, facecolor=INK, lw=0))
    colour, middle = SOFT if weight is None else INK, top + _LINE * 0.46
    axes.text(start, middle, body, family="monospace", fontsize=9.5, va="center", color=colour, parse_math=False)
