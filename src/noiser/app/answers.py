"""Questions to answers: attributions, an evaluation of them, and how much noise a unit tolerates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from noiser.app.jobs import Job, StoppedError
from noiser.app.models import Models
from noiser.app.question import Question
from noiser.attribution import Attribution
from noiser.durations import duration
from noiser.errors import NoiserError, ParameterError
from noiser.evaluation import Evaluation, evaluate
from noiser.methods import Method, Tolerance, attribute, tolerance
from noiser.model import LanguageModel
from noiser.model.text import encode
from noiser.model.units import make_units

__all__ = ["Answer", "TooLongError", "answer", "check_faithfulness", "check_tolerance"]


class TooLongError(NoiserError):
    """The work would take longer than the visitor wants to wait."""


class Answer(NamedTuple):
    """What a question gave.

    Attributes:
        question: what was asked.
        model: the name of the model that was asked.
        attributions: one a method that succeeded, in the order of the methods.
        failures: the methods that did not, and why.
        seconds: what it took.
    """

    question: Question
    model: str
    attributions: tuple[Attribution, ...]
    failures: tuple[tuple[str, Exception], ...]
    seconds: float


def answer(models: Models, question: Question, job: Job[Answer], *, longest_wait: float | None = None) -> Answer:
    """Attributes with every method of the question.

    Searches first stop at the smallest threshold, which settles all scores; that answer is offered while they go on to
    every unit's threshold.

    Args:
        models: what the page offers.
        question: what is asked.
        job: told how far the work is.
        longest_wait: seconds; work that would take longer is given up as soon as that is known. None for no limit.

    Raises:
        StoppedError: on request. When no method succeeds, what the first one raised, such as `TooLongError`.
    """
    with models.use(question.model, job) as lm:
        run = _Run(lm, question, job, longest_wait)
        for name in question.methods:
            run.attempt(name, f"{name} on {lm.identity.name}", question.method(name))
        if not run.found:
            raise run.failures[0][1]
        complete = {name: method for name in run.found if (method := question.complete_method(name)) is not None}
        if complete:
            job.offer(run.answer(models))
        for name, method in complete.items():
            run.attempt(name, f"{name}: thresholds of all units", method)
        return run.answer(models)


class _Run:
    """The methods of one question, one after the other, with what has been found so far."""

    def __init__(self, lm: LanguageModel, question: Question, job: Job[Answer], longest_wait: float | None) -> None:
        self.lm, self.question, self.job, self.longest_wait = lm, question, job, longest_wait
        self.asked = question.asked
        self.found: dict[str, Attribution] = {}
        self.failures: list[tuple[str, Exception]] = []
        self.began = time.monotonic()

    def attempt(self, name: str, label: str, method: Method) -> None:
        """Attributes with a method; if it fails, what was found before stays."""
        self.job.step(label)
        told = _limited(self.job, self.lm, self.question, name, self.began, self.longest_wait)
        try:
            self.found[name] = attribute(self.lm, method=method, progress=told, **self.asked)
        except StoppedError:
            raise
        except Exception as error:
            self.failures.append((label if name in self.found else name, error.with_traceback(None)))

    def answer(self, models: Models) -> Answer:
        """What there is to show."""
        model, seconds = self.question.model or models.names[0], time.monotonic() - self.began
        return Answer(self.question, model, tuple(self.found.values()), tuple(self.failures), seconds)


def _limited(
    job: Job[Any], lm: LanguageModel, question: Question, name: str, began: float, longest_wait: float | None
) -> Callable[[float, float], None]:
    """A progress callback that gives up as soon as it is known that the end would come too late."""

    def progress(done: float, expected: float) -> None:
        job.progress(done, expected)
        left = job.state.left
        if longest_wait is None or left is None:
            return
        whole = time.monotonic() - began + left
        if whole > 1.2 * longest_wait:
            raise TooLongError(_advice(lm, question, name, whole, longest_wait))

    return progress


def _advice(lm: LanguageModel, question: Question, name: str, seconds: float, longest_wait: float) -> str:
    encoding = encode(lm.tokenizer, question.asked["prompt"])
    counts = {unit: len(make_units(encoding, unit)) for unit in ("token", "word", "sentence")}
    coarser = [
        f"{unit} ({counts[unit]} units instead of {counts[question.unit]})"
        for unit in ("word", "sentence")
        if counts[unit] < counts[question.unit]
    ]
    remedies = [f"choose unit {' or '.join(coarser)}"] if coarser else []
    remedies += ["leave out the thresholds of all units"] if name == "noiser" and question.all_thresholds else []
    remedies += ["choose a faster method, such as occlusion or input_x_gradient", "shorten the prompt"]
    return (
        f"{name} by {question.unit} would take {duration(seconds)} for this prompt of {len(encoding.token_ids)} "
        f"tokens, and the longest wait is {duration(longest_wait)}. You can {'; '.join(remedies)}; "
        "or allow a longer wait under “More settings”."
    )


def check_faithfulness(models: Models, given: Answer, job: Job[Any]) -> list[Evaluation]:
    """`noiser.evaluate` on each attribution, measured as it is."""
    found: list[Evaluation] = []
    with models.use(given.model, job) as lm:
        for att in given.attributions:
            job.step(f"Faithfulness of {att.method}")
            found.append(evaluate(lm, att, metrics=("faithfulness",), seed=given.question.seed))
    return found


def check_tolerance(models: Models, given: Answer, unit_index: int, job: Job[Any]) -> tuple[Attribution, Tolerance]:
    """How much noise a unit tolerates, with the attribution that has its thresholds, or the first."""
    att = next((att for att in given.attributions if att.thresholds is not None), given.attributions[0])
    if not 0 <= unit_index < len(att.units):
        raise ParameterError(f"There is no unit {unit_index}; expected one of the {len(att.units)} of the heat map.")
    with models.use(given.model, job) as lm:
        job.step(f"Noise on “{att.units[unit_index].text.strip()[:40]}”")
        return att, tolerance(lm, att, unit_index, progress=job.progress)
