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


def tables(results: Results, progress: Callable[[float, float], None] | None = None) -> list[Table]:
    """All tables that the plan of a run has.

    Args:
        results: of a run.
        progress: called with (done, expected) kinds of tables; intervals take most of the time.
    """
    found: list[Table] = []
    for done, build in enumerate(BUILDERS):
        if progress is not None:
            progress(done, len(BUILDERS))
        found += build(results)
    return found
