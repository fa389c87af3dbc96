"""An evaluation as text and as HTML."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from noiser.attribution.display import label
from noiser.pages import html_page

if TYPE_CHECKING:
    from noiser.evaluation.result import Evaluation

__all__ = ["as_html", "as_page", "as_text"]

_SHOWN = 10
"""Skipped prompts that are shown one by one; `skipped` has all."""

_HEADS = ("number", "value", "interval", "n", "no signal", "better", "meaning")


def as_text(evaluation: Evaluation) -> str:
    """A title, a table of the numbers, and what is missing."""
    lines = _lines(evaluation)
    widths = [max(len(line[column]) for line in [_HEADS, *lines]) for column in range(len(_HEADS))]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [_HEADS, *lines]
    ]
    return "\n".join([_title(evaluation), "", *(row.rstrip() for row in table), *_notes(evaluation)])


def as_html(evaluation: Evaluation) -> str:
    """The same as a table; every text is escaped."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in _HEADS)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in _lines(evaluation))
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(evaluation) if note)
    caption = f"<caption>{escape(_title(evaluation))}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{notes}"


def as_page(evaluation: Evaluation) -> str:
    """A complete page with that table, which needs nothing else."""
    style = (
        ":root { color-scheme: light dark; font-family: system-ui, sans-serif; } "
        "th, td { padding: 0.2em 0.8em; text-align: start; } caption { text-align: start; }"
    )
    return html_page(_title(evaluation), style, as_html(evaluation))


def _title(evaluation: Evaluation) -> str:
    profile = evaluation.settings["profile"]
    measured = len({record["index"] for record in evaluation.records if not record["error"]})
    return (
        f"{label(evaluation.method)} on {label(evaluation.model.name)}: {', '.join(evaluation.metrics)}; "
        f"{measured} of {len(evaluation.records)} prompts measured in full, profile {profile}, "
        f"{evaluation.confidence:.0%} intervals"
    )


def _lines(evaluation: Evaluation) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for name, found in evaluation.estimates.items():
        scale = evaluation.summaries[name].scale
        interval = "" if math.isnan(found.low) else f"{_number(found.low)} to {_number(found.high)}"
        better = {True: "higher", False: "lower", None: ""}[scale.higher_is_better]
        none = "" if scale.no_signal is None else f"{scale.no_signal:g}"
        lines.append((name, _number(found.value), interval, str(found.n), none, better, scale.meaning))
    return lines


def _number(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.4f}" if abs(value) < 1000 else f"{value:.3e}"


def _notes(evaluation: Evaluation) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, found in evaluation.estimates.items():
        if found.reason:
            reasons.setdefault(found.reason, []).append(name)
    every = len(evaluation.estimates)
    notes = [
        f"{'All numbers' if len(names) == every else ', '.join(names)}: {reason}." for reason, names in reasons.items()
    ]
    skipped = evaluation.skipped
    notes += [f"Skipped: {len(skipped)}."] if skipped else []
    for example, prompt, metric, error in skipped[:_SHOWN]:
        notes.append(f"  prompt {example} ({label(str(prompt))[:60]}), {metric or 'everything'}: {label(error)}")
    notes += [f"  and {len(skipped) - _SHOWN} more"] if len(skipped) > _SHOWN else []
    return ["", *notes] if notes else []
