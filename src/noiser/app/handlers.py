"""What the page's buttons do: fields in, what to show out. No components here, so all of it runs without a browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from noiser.app.chart import tolerance_html
from noiser.app.jobs import Job, Jobs, Models, StoppedError
from noiser.app.question import Question
from noiser.app.show import explain, note, numbers_html, problem, progress_line
from noiser.attribution import Attribution
from noiser.attribution.display import label
from noiser.attribution.html import fragment, page
from noiser.attribution.store import dumps
from noiser.errors import NoiserError, ParameterError
from noiser.evaluation import Evaluation, evaluate
from noiser.explain import Citations, Tolerance, attribute, cite, tolerance
from noiser.explain.citations_html import fragment as citations_fragment
from noiser.files import json_text
from noiser.methods import Method, make_method
from noiser.methods.search import SMALLEST, TIE
from noiser.model import LanguageModel
from noiser.numbers import duration
from noiser.text import make_units, place_sources
from noiser.types import Progress, Prompt

T = TypeVar("T")

_TYPES = {"json": "application/json", "html": "text/html"}
METRICS = ("faithfulness", "lds", "top_k", "erasure_curves", "erasure", "normalised_aopc")
"""What can be measured of one prompt without a judge or a known answer; the first unless others are chosen."""
NO_FOIL = "These numbers are about the target alone: metrics leave the foil out."
NEXT = "What you asked for meanwhile comes next."

LONG = 20_000
"""Characters of a prompt that is read before it waits for the model: one that is too long must not hold up others."""

_FASTER = {"occlusion": ("input_x_gradient",), "input_x_gradient": ()}
"""Methods to choose in place of a slow one, and those that are faster still than each."""

MOST_CITED = 96
"""Tokens of an answer from sources."""


class TooLongError(NoiserError):
    """The work would take longer than the visitor wants to wait."""


class Answer(NamedTuple):
    """What a question gave.

    Attributes:
        question: what was asked.
        model: the name of the model that was asked.
        attributions: one per method that succeeded, in the order of the methods.
        failures: the methods that did not, and why.
        seconds: what it took.
        citations: of a question with sources; its attribution is the only one.
    """

    question: Question
    model: str
    attributions: tuple[Attribution, ...]
    failures: tuple[tuple[str, Exception], ...]
    seconds: float
    citations: Citations | None = None


class View(NamedTuple):
    """What to show while a question is answered, and then.

    Attributes:
        status: a line about the work, or the error; None where that of the visitor's other work stays.
        busy: whether it goes on.
        answer: the result; None as long as there is nothing new to show.
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
    """What the page runs, for all visitors: models, and the jobs of each visitor while they run."""

    def __init__(self, models: Models) -> None:
        self.models, self.jobs = models, Jobs()

    def ask(self, visitor: str, question: Question, longest_wait: float | None) -> Iterator[View]:
        """Answers a question: first states, then a view with the `Answer`, or with nothing if another question came.

        Args:
            visitor: who asks.
            question: what is asked.
            longest_wait: seconds; work that would take longer is given up as soon as that is known. None: no limit.
        """
        work = _cited_answer if question.documents else _answer
        return self._watched(visitor, lambda job: work(self.models, question, job, longest_wait), _show_answer)

    def measure(
        self, visitor: str, answer: Answer, metrics: Sequence[str], longest_wait: float | None
    ) -> Iterator[View]:
        """Measures the attributions; the view's answer is HTML. For `longest_wait` see `ask`."""

        def advice(seconds: float, longest_wait: float) -> str:
            return (
                f"Measuring {', '.join(metrics)} would take {duration(seconds)}, and the longest wait is "
                f"{duration(longest_wait)}. Choose fewer metrics, ask for a coarser unit, or allow a longer wait under "
                "“Settings”."
            )

        def work(job: Job[list[Evaluation]]) -> list[Evaluation]:
            evaluations: list[Evaluation] = []
            if not metrics:
                raise ParameterError(f"No metric is chosen; expected some of {', '.join(METRICS)}.")
            with self.models.use(answer.model, job) as lm:
                progress = _impatient(job, time.monotonic(), longest_wait, advice)
                for att in answer.attributions:
                    job.step(f"Metrics of {att.method}")
                    seed = answer.question.seed
                    evaluations.append(evaluate(lm, att, metrics=metrics, seed=seed, progress=progress))
            return evaluations

        def show(evaluations: list[Evaluation]) -> View:
            without = note(NO_FOIL) if any(att.foil is not None for att in answer.attributions) else ""
            return View(note("Measured."), answer=without + numbers_html(evaluations))

        return self._watched(visitor, work, show, aside=True)

    def tolerance(self, visitor: str, answer: Answer, unit_index: int, row: int) -> Iterator[View]:
        """Gives one unit more and more noise; the view's answer is HTML."""
        given = answer.attributions
        att = next((att for att in given if att.thresholds is not None), given[0])

        def work(job: Job[Tolerance]) -> Tolerance:
            if not 0 <= unit_index < len(att.units):
                raise ParameterError(f"There is no unit {unit_index}; expected one of the heat map's {len(att.units)}.")
            with self.models.use(answer.model, job) as lm:
                job.step(f"Noise on “{att.units[unit_index].text.strip()[:40]}”")
                return tolerance(lm, att, unit_index, progress=job.progress)

        def show(curve: Tolerance) -> View:
            return View(note("Done."), answer=tolerance_html(att, curve, min(row, len(curve.targets) - 1)))

        return self._watched(visitor, work, show, aside=True)

    def _watched(
        self, visitor: str, work: Callable[[Job[T]], T], show: Callable[[T], View], *, aside: bool = False
    ) -> Iterator[View]:
        with self.jobs.run(visitor, work, aside=aside) as job:
            yield self._with_status(visitor, View(progress_line(job.state), busy=True), aside)
            for state in job.watch():
                early = job.offered()
                answer = None if early is None else show(early).answer
                yield self._with_status(visitor, View(progress_line(state), busy=True, answer=answer), aside)
            try:
                view = show(job.result())
            except StoppedError:
                view = View(note("Stopped."))
            except Exception as error:
                view = View(explain(error))
        yield self._with_status(visitor, View(None) if job.replaced else view, aside)

    def _with_status(self, visitor: str, view: View, aside: bool) -> View:
        """The view of a job; as long as there is a question, it alone has the status, and says what waits for it."""
        if aside:
            return view._replace(status=None) if self.jobs.has(visitor, aside=False) else view
        waits = view.busy and self.jobs.has(visitor, aside=True)
        return view._replace(status=f"{view.status}{note(NEXT)}") if waits else view


def _answer(models: Models, question: Question, job: Job[Answer], longest_wait: float | None) -> Answer:
    """Attributes with every method of the question.

    Searches first stop at the smallest threshold, which settles all scores; that answer is offered while they go on to
    every unit's threshold. When no method succeeds, raises what the first one raised.
    """
    asked = question.asked
    if len(question.prompt) > LONG:
        models.check_readable(question.model, asked["prompt"])
    with models.use(question.model, job) as lm:
        began = time.monotonic()
        attributions: dict[str, Attribution] = {}
        failures: list[tuple[str, Exception]] = []

        def run(name: str, method: Method) -> Attribution:
            progress = _impatient(job, began, longest_wait, partial(_advice, lm, question, name))
            return attribute(lm, method=method, progress=progress, **asked)

        def so_far() -> Answer:
            model, seconds = question.model or models.names[0], time.monotonic() - began
            return Answer(question, model, tuple(attributions.values()), tuple(failures), seconds)

        for name in question.methods:
            job.step(f"{name} on {lm.identity.name}")
            try:
                attributions[name] = run(name, make_method(name))
            except Exception as error:
                failures.append((name, error.with_traceback(None)))
        if not attributions:
            raise failures[0][1]
        searches = {name: search for name in attributions if (search := question.threshold_method(name)) is not None}
        if searches:
            job.offer(so_far())
        for name, search in searches.items():
            job.step(step := f"{name}: thresholds of all units")
            try:
                attributions[name] = _with_thresholds(attributions[name], run(name, search))
            except Exception as error:
                failures.append((step, error.with_traceback(None)))
        return so_far()


def _with_thresholds(att: Attribution, search: Attribution) -> Attribution:
    """The attribution as `all_thresholds=True` gives it, from one without them and a search of every unit."""
    work = {name: att.info[name] + search.info[name] for name in ("token_forwards", "passes") if name in att.info}
    parameters = {**att.parameters, "all_thresholds": True}
    return replace(att, thresholds=search.thresholds, parameters=parameters, info={**att.info, **work})


def _cited_answer(models: Models, question: Question, job: Job[Answer], longest_wait: float | None) -> Answer:
    """Answers from the sources, and cites them."""
    prompt: Prompt = question.asked["prompt"]
    if len(question.prompt) + len(question.sources) > LONG:
        models.check_readable(question.model, place_sources(prompt, question.documents))
    with models.use(question.model, job) as lm:
        began, count = time.monotonic(), len(question.documents)

        def advice(seconds: float, longest_wait: float) -> str:
            return (
                f"Citing {count} sources would take {duration(seconds)}, and the longest wait is "
                f"{duration(longest_wait)}. Give fewer or shorter sources, or allow a longer wait under “Settings”."
            )

        job.step(f"Answering from {count} sources")
        citations = cite(
            lm,
            prompt,
            question.documents,
            answer=question.target or None,
            max_new_tokens=MOST_CITED,
            seed=question.seed,
            progress=_impatient(job, began, longest_wait, advice),
        )
        model, seconds = question.model or models.names[0], time.monotonic() - began
        return Answer(question, model, (citations.attribution,), (), seconds, citations)


def _impatient(
    job: Job[Any], began: float, longest_wait: float | None, advice: Callable[[float, float], str]
) -> Progress:
    """A report of a job's progress that raises TooLongError as soon as the work is known to take too long.

    Args:
        job: whose progress it is.
        began: `time.monotonic()` when the model began to work for it.
        longest_wait: seconds; None for no limit.
        advice: what to do instead, from the seconds that the work would take and `longest_wait`.
    """

    def progress(done: float, expected: float) -> None:
        job.progress(done, expected)
        seconds = time.monotonic() - began + (job.state.left or 0.0)
        if longest_wait is not None and seconds > 1.2 * longest_wait:
            raise TooLongError(advice(seconds, longest_wait))

    return progress


def _advice(lm: LanguageModel, question: Question, name: str, seconds: float, longest_wait: float) -> str:
    encoding = lm.encode(question.asked["prompt"])
    counts = {unit: len(make_units(encoding, unit)) for unit in ("token", "word", "sentence")}
    coarser = [
        f"{unit} ({counts[unit]} units instead of {counts[question.unit]})"
        for unit in ("word", "sentence")
        if counts[unit] < counts[question.unit]
    ]
    remedies = [f"choose unit {' or '.join(coarser)}"] if coarser else []
    remedies += ["leave out the thresholds of all units"] if name == "noiser" and question.all_thresholds else []
    known = [each for each in _FASTER if lm.looks_inside or not getattr(make_method(each), "looks_inside", False)]
    faster = [each for each in known if each in _FASTER.get(name, known) and each not in question.methods]
    remedies += [f"choose a faster method, such as {' or '.join(faster)}"] if faster else []
    remedies += ["shorten the prompt"]
    return (
        f"{name} by {question.unit} would take {duration(seconds)} for this prompt of {len(encoding.token_ids)} "
        f"tokens, and the longest wait is {duration(longest_wait)}. You can {'; '.join(remedies)}; "
        "or allow a longer wait under “Settings”."
    )


def _show_answer(answer: Answer) -> View:
    failed = [explain(error, name) for name, error in answer.failures]
    tied = [
        problem(att.method, f"{TIE} Serve the model with --dtype float32.")
        for att in answer.attributions
        if att.k_min is not None and bool((att.k_min <= SMALLEST).any())
    ]
    return View(note(f"Done in {duration(answer.seconds)}.") + "".join([*failed, *tied]), answer=answer)


def result_html(answer: Answer) -> str:
    """The heat map, or several side by side; the answer with its citations."""
    given = answer.attributions
    shown = fragment(given) if answer.citations is None else citations_fragment(answer.citations)
    return f'<h2 class="noiser-unseen">Answer</h2>{shown}'


def unit_choices(answer: Answer) -> list[tuple[str, int]]:
    """Names of the units and their indices."""
    units = answer.attributions[0].units
    return [(f"{index + 1}. {label(unit.text)[:60]}", index) for index, unit in enumerate(units)]


def target_choices(answer: Answer) -> list[tuple[str, int]]:
    """Names of the targets and their indices."""
    return [(f"{i + 1}. {label(target.text)}", i) for i, target in enumerate(answer.attributions[0].targets)]


def file_of(answer: Answer, form: Literal["json", "html", "md"]) -> File:
    """The attributions or citations as the commands would write them."""
    given, cited = answer.attributions, answer.citations
    name = f"noiser-{'cite' if cited else '-'.join(answer.question.methods)[:60]}.{form}"
    if form == "md":
        shown = [cited] if cited else given
        return File(name, "text/markdown", "\n".join(each.to_markdown() for each in shown))
    if cited is not None:
        return File(name, _TYPES[form], cited.to_html() if form == "html" else cited.to_json())
    if form == "html":
        return File(name, _TYPES[form], page(given))
    text = dumps(given[0]) if len(given) == 1 else json_text([att.to_dict() for att in given])
    return File(name, _TYPES[form], text)
