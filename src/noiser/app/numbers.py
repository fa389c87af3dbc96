"""Evaluations side by side: a row a number, a column a method."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from noiser.app.status import problem
from noiser.attribution.display import label
from noiser.evaluation import Evaluation

__all__ = ["numbers_html"]


def numbers_html(found: Sequence[Evaluation]) -> str:
    """One table of what was measured, what each number means, and what could not be measured, with the reason."""
    names = list(dict.fromkeys(name for evaluation in found for name in evaluation.estimates))
    heads = ["number", *(label(evaluation.method) for evaluation in found), "no signal", "better"]
    head = "".join(f"<th scope=col>{escape(text)}</th>" for text in heads)
    rows = "".join(_row(name, found) for name in names)
    skipped = "".join(
        problem(label(evaluation.method), label(reason.error)) for evaluation in found for reason in evaluation.skipped
    )
    table = f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    return f'<div class="noiser-att numbers">{table}{skipped}</div>'


def _row(name: str, found: Sequence[Evaluation]) -> str:
    scale = next(evaluation.summaries[name].scale for evaluation in found if name in evaluation.summaries)
    values = [_value(evaluation, name) for evaluation in found]
    none = "" if scale.no_signal is None else f"{scale.no_signal:g}"
    better = {True: "higher", False: "lower", None: ""}[scale.higher_is_better]
    cells = "".join(f"<td>{cell}</td>" for cell in [*values, none, better])
    return f"<tr><th scope=row>{escape(name)}<small>{escape(scale.meaning)}</small></th>{cells}</tr>"


def _value(evaluation: Evaluation, name: str) -> str:
    if name not in evaluation.estimates:
        return ""
    value = evaluation.estimates[name].value
    return "undefined" if math.isnan(value) else f"{value:.4f}" if abs(value) < 1000 else f"{value:.3e}"
