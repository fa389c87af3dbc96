"""What the page shows besides heat maps, as HTML with every text escaped: progress, errors, numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from noiser.app.jobs import State
from noiser.attribution.display import label
from noiser.errors import NoiserError
from noiser.evaluation import Evaluation
from noiser.metrics import METRICS
from noiser.model.memory import is_out_of_memory
from noiser.numbers import duration
from noiser.pages import html_table

_FIRST = {
    "soft_ns": "Sufficiency (Soft-NS): what is kept gives back this much of the prediction",
    "soft_nc": "Comprehensiveness (Soft-NC): without it the prediction goes this far",
    "faithfulness": "The paper's score: both against random scores",
    "area": "Mass-matched area: both, with as much kept and removed as for every other method",
    "area_minus_random": "The area minus that of random scores",
    "area_minus_permuted": "The area minus that of the same scores, shuffled",
    "rank_area_minus_random": "By order alone: the area minus that of random scores",
}
"""The numbers of faithfulness to read first, in words."""

_PATH = re.compile(r"(?<![\w.:/\\])(?:~|…|[A-Za-z]:)?(?:[/\\][^/\\\s'\"“”,;:<>()]+)+([/\\][^/\\\s'\"“”,;:<>()]+)")


_QUOTED_PATH = re.compile(r"(['\"“])(?:~|[A-Za-z]:)?[/\\][^'\"”\n]*([/\\][^/\\'\"”\n]+)(?=['\"”])")  # with spaces, too


def explain(error: BaseException, name: str = "Error") -> str:
    """An error. Ours say what to do; of others the type and the text, and the server's log has the rest."""
    if isinstance(error, NoiserError):
        return problem(name, str(error))
    if is_out_of_memory(error):
        text = "The model ran out of memory. Shorten the prompt, or ask for fewer targets or a coarser unit."
        return problem(name, f"{text} ({type(error).__name__})")
    text = f"{type(error).__name__}: {error}. The server's log has the details; the page goes on working."
    return problem(name, text)


def problem(name: str, text: str) -> str:
    """A line that is read out at once. Of the paths in it only the ends are shown."""
    for folder in (Path.cwd(), Path.home()):  # their names may have spaces
        text = text.replace(f"{folder}/", "…/") if len(folder.parts) > 1 else text
    text = _PATH.sub(r"…\1", _QUOTED_PATH.sub(r"\1…\2", text))
    return f'<div class="noiser-line error" role=alert><b>{escape(name)}</b> {escape(text)}</div>'


def note(text: str) -> str:
    """A line that is read out."""
    return f'<div class="noiser-line" role=status>{escape(text)}</div>'


def example_note(model: str) -> str:
    """A line that says that what follows is an example."""
    return (
        f'<div class="noiser-line noiser-example"><span><b>Example</b>, answered by the built-in model '
        f"{escape(model)}: the stronger its orange, the more the boxed prediction needs a word. "
        "Point at a word for its numbers.</span></div>"
    )


def progress_line(state: State) -> str:
    """A line whose label is read out when it changes, and whose numbers are not, every time they do."""
    text, share, numbers = state.label, state.share, f"{state.seconds:.0f} s"
    if state.ahead:
        others = "one question" if state.ahead == 1 else f"{state.ahead} questions"
        text, share = f"Waiting: the model answers {others} first", None
    else:
        numbers = "" if share is None else f"{share:.0%}, {numbers}"
        numbers += "" if state.left is None else f", about {duration(state.left)} left"
    value = "" if share is None else f' value="{share:.3f}"'
    return (
        f'<div class="noiser-line busy" role=status><span>{escape(text)}</span> '
        f"<progress max=1{value} aria-label=progress></progress> <span aria-hidden=true>{escape(numbers)}</span></div>"
    )


def numbers_html(evaluations: Sequence[Evaluation]) -> str:
    """What was measured, one column per method: of faithfulness, less often read numbers are folded; and what failed.

    The words are those of docs/metrics.md; below them is the name that `noiser.evaluate` gives the number.
    """
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.estimates))
    skipped = [
        problem(label(evaluation.method), label(reason.error))
        for evaluation in evaluations
        for reason in evaluation.skipped
    ]
    seldom = METRICS.get("faithfulness").factory().summaries.keys() - _FIRST.keys()
    first = [name for name in _FIRST if name in names] + [n for n in names if n not in _FIRST and n not in seldom]
    shown = _numbers_table(first, evaluations)
    if others := [name for name in names if name in seldom]:
        shown += f"<details><summary>all other numbers</summary>{_numbers_table(others, evaluations)}</details>"
    return f'<div class="noiser-att numbers">{shown}{"".join(skipped)}</div>'


def _numbers_table(names: Sequence[str], evaluations: Sequence[Evaluation]) -> str:
    head = ["number", *(label(evaluation.method) for evaluation in evaluations), "no signal", "better"]
    return html_table(map(escape, head), (_row(name, evaluations) for name in names))


def _row(name: str, evaluations: Sequence[Evaluation]) -> list[str]:
    scale = next(evaluation.summaries[name].scale for evaluation in evaluations if name in evaluation.summaries)
    no_signal = "" if scale.no_signal is None else f"{scale.no_signal:g}"
    values = [_value(evaluation, name) for evaluation in evaluations]
    words = _FIRST.get(name) or f"{scale.meaning[:1].upper()}{scale.meaning[1:]}"
    return [f"{escape(words)}<small>{escape(name)}</small>", *values, no_signal, scale.better]


def _value(evaluation: Evaluation, name: str) -> str:
    if name not in evaluation.estimates:
        return ""
    value = evaluation.estimates[name].value
    return "undefined" if math.isnan(value) else f"{value:.3f}" if abs(value) < 1000 else f"{value:.3e}"
