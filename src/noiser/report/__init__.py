"""Report: the rows of a benchmark as tables, figures and pages. It never runs a model."""

from noiser.report.catalog import tables
from noiser.report.latex import document, tabular
from noiser.report.results import Cell, Results
from noiser.report.table import Count, Head, Line, Number, Quoted, Table
from noiser.report.text import csv_text, markdown
from noiser.report.write import FORMATS, render, write_report

__all__ = [
    "FORMATS",
    "Cell",
    "Count",
    "Head",
    "Line",
    "Number",
    "Quoted",
    "Results",
    "Table",
    "csv_text",
    "document",
    "markdown",
    "render",
    "tables",
    "tabular",
    "write_report",
]
