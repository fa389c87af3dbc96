"""Report: the rows of a benchmark as tables, figures and a page. It never runs a model."""

from noiser.report.cells import cells, rows_of
from noiser.report.formats import latex, markdown
from noiser.report.joined import Joined, join, select
from noiser.report.tables import Table, tables
from noiser.report.verdicts import TableVerdict, standings, verdict
from noiser.report.write import FORMATS, report_files, write_report

__all__ = [
    "FORMATS",
    "Joined",
    "Table",
    "TableVerdict",
    "cells",
    "join",
    "latex",
    "markdown",
    "report_files",
    "rows_of",
    "select",
    "standings",
    "tables",
    "verdict",
    "write_report",
]
