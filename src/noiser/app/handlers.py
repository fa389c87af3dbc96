"""What the page's buttons do: fields in, what to show out. No components here, so all of it runs without a browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from noiser.app.answers import Answer, answer, check_faithfulness, check_tolerance
from noiser.app.chart import tolerance_html
from noiser.app.jobs import Job, Jobs, StoppedError
from noiser.app.models import Models
from noiser.app.numbers import numbers_html
from noiser.app.question import Question
from noiser.app.status import explain, note, problem, progress_line
from noiser.attribution import Attribution
from noiser.attribution.display import label
from noiser.attribution.html import compare_fragment, compare_html, fragment
from noiser.attribution.store import dumps
from noiser.durations import duration
from noiser.methods.search import SMALLEST

__all__ = ["File", "Handlers", "View", "file_of", "result_html", "target_choices", "unit_choices"]

T = TypeVar("T")

TIE = (
    "The prediction changes under noise as small as 1e-12: two tokens tie, or the precision is too low to tell them "
    "apart. The scores of this target mean little; serve the model with --dtype float32."
)


NEXT = "What you asked for meanwhile comes next."


class View(NamedTuple):
    """What to show while a question is answered, and then.

    Attributes:
        status: a line about the work, or the error; None where that of the visitor's question stays.
        busy: whether it goes on.
        answer: what was found; None as long as there is nothing new to show.
    """

    status: str | None
    busy: bool = False
    answer: Any = None


class File(NamedTuple):
    """Something to save: name, media type and text."""

    name: str
    media_type: str
    text: str


class Handlers:
    """Everything behind the page, for all visitors: models, and the job of each visitor while it runs."""

    def __init__(self, models: Models) -> None:
        self.models, self.jobs = models, Jobs()

    def ask(self, visitor: str, question: Question, longest_wait: float | None) -> Iterator[View]:
        """Answers a question: first states, then a view with the `Answer`."""
        return self._watched(
            visitor, lambda job: answer(self.models, question, job, longest_wait=longest_wait), _answered
        )

    def faithfulness(self, visitor: str, given: Answer) -> Iterator[View]:
        """Measures the attributions; the answer is HTML."""
        return self._watched(
            visitor,
            lambda job: check_faithfulness(self.models, given, job),
            lambda found: View(note("Measured."), answer=numbers_html(found)),
            aside=True,
        )

    def tolerance(self, visitor: str, given: Answer, unit_index: int, row: int) -> Iterator[View]:
        """Gives one unit more and more noise; the answer is HTML."""
        return self._watched(
            visitor,
            lambda job: check_tolerance(self.models, given, unit_index, job),
            lambda found: View(note("Done."), answer=tolerance_html(*found, min(row, len(found[1].targets) - 1))),
            aside=True,
        )

    def _watched(
        self, visitor: str, work: Callable[[Job[T]], T], show: Callable[[T], View], *, aside: bool = False
    ) -> Iterator[View]:
        with self.jobs.run(visitor, work, aside=aside) as job:
            yield self._told(visitor, View(progress_line(job.state), busy=True), aside)
            for state in job.watch():
                early = job.offered()
                answer = None if early is None else show(early).answer
                yield self._told(visitor, View(progress_line(state), busy=True, answer=answer), aside)
            try:
                view = show(job.result())
            except StoppedError:
                view = View(note("Stopped."))
            except Exception as error:
                view = View(explain(error))
        yield self._told(visitor, view, aside)

    def _told(self, visitor: str, view: View, aside: bool) -> View:
        """The view of a job; as long as there is a question, it alone has the status, and says what waits for it."""
        if aside:
            return view._replace(status=None) if self.jobs.has(visitor, aside=False) else view
        waits = view.busy and self.jobs.has(visitor, aside=True)
        return view._replace(status=f"{view.status}{note(NEXT)}") if waits else view


def _answered(found: Answer) -> View:
    failed = [explain(error, name) for name, error in found.failures]
    tied = [problem(att.method, TIE) for att in found.attributions if _is_tied(att)]
    return View(note(f"Done in {duration(found.seconds)}.") + "".join([*failed, *tied]), answer=found)


def _is_tied(att: Attribution) -> bool:
    return att.k_min is not None and bool((att.k_min <= SMALLEST).any())


def result_html(given: Answer) -> str:
    """The heat map, or several side by side."""
    found = given.attributions
    return fragment(found[0]) if len(found) == 1 else compare_fragment(found)


def unit_choices(given: Answer) -> list[tuple[str, int]]:
    """Names of the units and their places."""
    units = given.attributions[0].units
    return [(f"{index + 1}. {label(unit.text)[:60]}", index) for index, unit in enumerate(units)]


def target_choices(given: Answer) -> list[tuple[str, int]]:
    """Names of the targets and their places."""
    return [(f"{i + 1}. {label(target.text)}", i) for i, target in enumerate(given.attributions[0].targets)]


def file_of(given: Answer, form: Literal["json", "html"]) -> File:
    """The attributions as the commands would write them."""
    found = given.attributions
    name = f"noiser-{'-'.join(given.question.methods)[:60]}.{form}"
    if form == "html":
        return File(name, "text/html", found[0].to_html() if len(found) == 1 else compare_html(found))
    several = json.dumps([att.to_dict() for att in found], ensure_ascii=False, indent=1) + "\n"
    return File(name, "application/json", dumps(found[0]) if len(found) == 1 else several)
