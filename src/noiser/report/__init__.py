"""Report: the rows of a benchmark as tables, figures and pages. It never runs a model."""

from noiser.report.formats import csv_text, document, markdown, tabular
from noiser.report.rows import Cell, Results
from noiser.report.table import Column, Count, Number, Quoted, Row, Table
from noiser.report.tables import tables
from noiser.report.write import FORMATS, render, write_report

__all__ = [
    "FORMATS",
    "Cell",
    "Column",
    "Count",
    "Number",
    "Quoted",
    "Results",
    "Row",
    "Table",
    "csv_text",
    "document",
    "markdown",
    "render",
    "tables",
    "tabular",
    "write_report",
]
