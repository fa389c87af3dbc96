"""All figures, in the order in which a report has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from noiser.report.bars import areas, localisation, minimum
from noiser.report.drawing import Picture
from noiser.report.heatmaps import heatmaps
from noiser.report.results import Results
from noiser.report.scatters import against_answerability, against_cost

__all__ = ["PLOTS", "figures", "plots"]

PLOTS: tuple[Callable[[Results], Iterator[Picture]], ...] = (
    areas,
    localisation,
    minimum,
    against_answerability,
    against_cost,
)
"""What draws numbers; each yields nothing where the run has nothing for it."""


def plots(results: Results) -> list[Picture]:
    """The figures of numbers. Raises DependencyError without matplotlib."""
    return [picture for draw in PLOTS for picture in draw(results)]


def figures(results: Results) -> list[Picture]:
    """All figures, heat maps of the plan's own prompts included."""
    return [*plots(results), *heatmaps(results)]
