"""All tables, in the order in which a report has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from noiser.report.counts import cost, failures, selections
from noiser.report.faithful import authors, boundings, faithfulness, soft_scores
from noiser.report.judged import answerability, minimum
from noiser.report.located import localisation
from noiser.report.matched import differences, mass_matched
from noiser.report.others import glance, others
from noiser.report.results import Results
from noiser.report.table import Table

__all__ = ["BUILDERS", "tables"]

BUILDERS: tuple[Callable[[Results], Iterator[Table]], ...] = (
    glance,
    selections,
    faithfulness,
    mass_matched,
    differences,
    soft_scores,
    boundings,
    answerability,
    minimum,
    localisation,
    authors,
    others,
    cost,
    failures,
)
"""What makes the tables; each yields none where the run has nothing for it."""


def tables(results: Results) -> list[Table]:
    """All tables that the rows of a run have numbers for."""
    return [table for build in BUILDERS for table in build(results)]
