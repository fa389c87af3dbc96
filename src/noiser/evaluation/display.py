"""An evaluation as text and as HTML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from noiser.attribution.display import label
from noiser.attribution.markdown import escaped_line, table
from noiser.evaluation.examples import Skipped
from noiser.pages import html_page, html_table

_SHOWN = 10
"""Skipped prompts that are shown one by one; `skipped` has all."""


class View(NamedTuple):
    """What text and HTML show; every text is safe to show.

    Attributes:
        title: what was evaluated.
        rows: cells of a table, its heading first.
        notes: what is missing, one line each.
    """

    title: str
    rows: list[tuple[str, ...]]
    notes: list[str]


def view(title: str, lines: Sequence[Mapping[str, Any]], skipped: Sequence[Skipped]) -> View:
    """What is shown of an evaluation: its numbers, as `Evaluation.summary` has them, and what could not be measured."""
    rows = [("number", "value", "interval", "p", "without 3", "n", "no signal", "better", "meaning")]
    reasons: dict[str, list[str]] = {}
    for line in lines:
        name = label(line["number"])
        low, high = line["low"], line["high"]
        no_signal = "" if math.isnan(line["no_signal"]) else f"{line['no_signal']:g}"
        p = "" if math.isnan(line["p"]) else f"{line['p']:.2g}"
        without = "" if math.isnan(line["without_3"]) else number_text(line["without_3"], low, high)
        value, read = number_text(line["value"], low, high), (no_signal, line["better"], line["meaning"])
        rows.append((name, value, interval_text(low, high), p, without, str(line["n"]), *read))
        if line["reason"]:
            reasons.setdefault(line["reason"], []).append(name)
    notes = [
        f"{'All numbers' if len(names) == len(lines) else ', '.join(names)}: {reason}."
        for reason, names in reasons.items()
    ]
    notes += [f"Skipped: {len(skipped)}."] if skipped else []
    for example, prompt, metric, error in skipped[:_SHOWN]:
        missing = label(metric or "everything")
        notes.append(f"  prompt {example} ({label(str(prompt))[:60]}), {missing}: {label(error)}")
    notes += [f"  and {len(skipped) - _SHOWN} more"] if len(skipped) > _SHOWN else []
    return View(title, rows, notes)


def number_text(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A number with the digits that its interval allows: to two digits of a standard error; without one, four decimals.

    >>> number_text(0.123456, 0.05, 0.21), number_text(0.123456), number_text(1234567.0, 1.1e6, 1.3e6)
    ('0.123', '0.1235', '1.235e+06')
    """
    if math.isnan(value):
        return "undefined"
    if abs(value) >= 1000:
        return f"{value:.3e}"
    error = (high - low) / 4  # an interval is about four standard errors wide
    decimals = 1 - math.floor(math.log10(error)) if error > 0 else 4
    return f"{value:z.{min(6, max(0, decimals))}f}"


def interval_text(low: float, high: float) -> str:
    """Both ends of an interval, with as many digits as its number; empty if there is none."""
    return "" if math.isnan(low) else f"{number_text(low, low, high)} to {number_text(high, low, high)}"


def as_text(shown: View) -> str:
    """A title, a table of the numbers, and what is missing."""
    widths = [max(map(len, column)) for column in zip(*shown.rows, strict=True)]
    rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in shown.rows]
    return "\n".join([shown.title, "", *rows, *([""] if shown.notes else []), *shown.notes])


def as_markdown(shown: View) -> str:
    """The same as Markdown, in which nothing is mark-up."""
    notes = (escaped_line(note.strip()) for note in shown.notes)
    return "\n\n".join([escaped_line(shown.title), table(shown.rows), *notes]) + "\n"


def as_html(shown: View) -> str:
    """The same as a table; every text is escaped."""
    head, *rows = [[escape(cell) for cell in row] for row in shown.rows]
    notes = "".join(f"<p>{escape(note)}</p>" for note in shown.notes)
    return html_table(head, rows, escape(shown.title)) + notes


def as_page(shown: View, *before: str) -> str:
    """A complete page with that table, after other HTML, which needs nothing else."""
    style = (
        ":root { color-scheme: light dark; font-family: system-ui, sans-serif; } "
        ".wide { overflow-x: auto; } th, td { padding: 0.2em 0.8em; text-align: start; } caption { text-align: start; }"
    )
    return html_page(shown.title, style, "".join([*before, as_html(shown)]))
