"""What a metric is: what it measures on a prompt, how prompts are summed up, and how to read the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

from noiser.attribution import Attribution
from noiser.engine import LocalEngine, Query, RemovalName, Steps, complete
from noiser.errors import ParameterError
from noiser.metrics.bootstrap import Statistic, mean, mean_gap
from noiser.metrics.probe import FaithfulnessProbe
from noiser.model import LanguageModel, rebuild_query
from noiser.model.clean import Passes
from noiser.registry import Registry
from noiser.types import Profile, Progress

T = TypeVar("T")

RATES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the input that mass-matched curves keep."""

DRAWS = 10
"""Random scores, and permutations of a method's own, that a reference is the mean of."""

TOP = (1, 3, 5)
"""Numbers k of the highest units, for metrics of the top k."""

SETTINGS: Mapping[str, Any] = {
    "masks": None,
    "normalization": None,
    "rates": RATES,
    "draws": DRAWS,
    "removal": "zero",
    "k": TOP,
}
"""What can be set for metrics, and what holds where it is not; see `Case`."""

Measured = Mapping[str, Any]
"""Columns of a row: numbers, and texts worth keeping beside them."""


class Scale(NamedTuple):
    """How to read a number.

    Attributes:
        low, high: its range.
        no_signal: what scores without information give, or None where that depends on the prompt or the model.
        higher_is_better: None where neither is.
        meaning: the number in a few words.
    """

    low: float
    high: float
    no_signal: float | None
    higher_is_better: bool | None
    meaning: str

    @property
    def better(self) -> str:
        """Which way is better: "higher", "lower", or ""."""
        return {True: "higher", False: "lower", None: ""}[self.higher_is_better]


class Summary(NamedTuple):
    """A number over prompts: a statistic of some of the columns that a metric measures.

    Attributes:
        statistic: of the columns.
        columns: their names.
        scale: how to read it.
        contrast: whether it sets the first half of the columns against the second, so that exchanging them turns its
            sign. Then 0 is no difference, and there is a p-value for it.
    """

    statistic: Statistic
    columns: tuple[str, ...]
    scale: Scale
    contrast: bool = False


def mean_of_columns(**scales: Scale) -> dict[str, Summary]:
    """The means over prompts of columns, by the columns' names."""
    return {name: Summary(mean, (name,), scale) for name, scale in scales.items()}


def gap_to(
    reference: str, meaning: str, scales: Mapping[str, Scale], *, prefix: str = "", no_signal: float | None = 0.0
) -> dict[str, Summary]:
    """Means over prompts of columns minus those of a reference, by names such as "area_minus_random".

    Args:
        reference: its name, which stands before the columns that hold its numbers: "random_area" for "area".
        meaning: what the reference is, in a few words.
        scales: of the columns.
        prefix: what stands before all columns' names, the reference's too.
        no_signal: the gap of scores without information.
    """
    return {
        f"{prefix}{column}_minus_{reference}": Summary(
            mean_gap,
            (f"{prefix}{column}", f"{prefix}{reference}_{column}"),
            Scale(
                -math.inf, math.inf, no_signal, scale.higher_is_better, f"{column.replace('_', ' ')} minus {meaning}"
            ),
            contrast=True,
        )
        for column, scale in scales.items()
    }


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One attribution to be measured, and the settings.

    Attributes:
        lm: the model to ask.
        att: the attribution.
        seed: of masks and references.
        masks: mask samples; None for the profile's.
        normalization: for metrics of shares of the score; None for each metric's own.
        profile: "paper" or "authors".
        rates: of the mass-matched curves.
        draws: random scores, and permutations of the attribution's, that each reference is the mean of.
        removal: how metrics that remove units do it; see `noiser.engine.Remover`.
        k: numbers of the highest units, for metrics of the top k.
        spans: named character spans, for localisation.
        reattribute: attributes the same prompt with another seed, for stability.
        gold: the answer that a data set gives, for answerability; None for the model's own.
        judge: for answerability.
        cache: what scores without information give on this prompt: the same for every method, so that cases of one
            prompt and model may share it.
        prepared: query, probes and the model's clean run; cases of one attribution with other settings may share them.
    """

    lm: LanguageModel
    att: Attribution
    seed: int = 0
    masks: int | None = None
    normalization: str | None = None
    profile: Profile = "paper"
    rates: tuple[float, ...] = RATES
    draws: int = DRAWS
    removal: RemovalName = "zero"
    k: tuple[int, ...] = TOP
    spans: Mapping[str, Sequence[tuple[int, int]]] | None = None
    reattribute: Callable[[int], Attribution] | None = None
    gold: str | None = None
    judge: Any = None

    cache: MutableMapping[Hashable, Any] = field(default_factory=dict[Hashable, Any], repr=False)
    prepared: MutableMapping[Hashable, Any] = field(default_factory=dict[Hashable, Any], repr=False)

    @property
    def query(self) -> Query:
        """What the attribution answers, without its foil.

        Raises:
            ParameterError: the model's tokens are not the attribution's, or it explains a number of the caller's own.
        """
        if "of" in self.att.info:
            raise ParameterError(
                f"The attribution explains a number of your own, {self.att.info['of']}, and metrics measure what "
                "becomes of the targets' probabilities; expected scores of these. Attribute again without `of` to "
                "measure them."
            )
        return self._once("query", lambda: rebuild_query(self.lm, self.att).without_foil())

    @property
    def probe(self) -> FaithfulnessProbe:
        """The attribution on its query, with frozen special tokens."""
        return self._probe("paper")

    @property
    def profiled_probe(self) -> FaithfulnessProbe:
        """The attribution on its query, as the profile says."""
        return self._probe(self.profile)

    def _probe(self, profile: Profile) -> FaithfulnessProbe:
        return self._once(("probe", profile), lambda: FaithfulnessProbe(self.query, self.att, profile=profile))

    def answer(
        self, engine: LocalEngine, steps: Steps[T], progress: Progress | None = None, sequences: int = 0
    ) -> Passes[T]:
        """What the steps return, as a coroutine; everything about this case goes on from one clean run.

        Args:
            engine: runs the passes.
            steps: the metric at work.
            progress: called with the work done and the work expected, in token-forwards.
            sequences: how many perturbed sequences the steps ask for; 0 if their first request is for all of them.
        """
        session = self._once(("session", engine.share), lambda: engine.session(self.query))
        before, least = session.counters.token_forwards, sequences * len(self.query.token_ids)

        def report(done: float, expected: float) -> None:
            if progress is not None:
                progress(done - before, max(expected - before, least))

        session.progress = report
        yield from session.clean()  # alone, so that no rounding depends on which metric came first
        return (yield from session.drive(steps))

    def run(self, steps: Steps[T], progress: Progress | None = None) -> T:
        """What the steps return, now."""
        engine = LocalEngine(self.lm)
        return complete(engine, self.answer(engine, steps, progress))

    def _once(self, what: Hashable, make: Callable[[], T]) -> T:
        if what not in self.prepared:
            self.prepared[what] = make()
        return cast("T", self.prepared[what])

    def cached(
        self, what: str, probe: FaithfulnessProbe, settings: Hashable, steps: Callable[[], Steps[T]]
    ) -> Steps[T]:
        """What `steps` return, run once for all cases that share a cache and ask about the same units.

        Args:
            what: a name for it.
            probe: whose text, targets and scored units it depends on; on its scores it does not.
            settings: whatever else it depends on.
            steps: measure it.
        """
        key = (what, probe.question, settings)
        if key not in self.cache:
            self.cache[key] = yield from steps()
        return cast("T", self.cache[key])


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric.

    Attributes:
        measure: from a case to named numbers, the columns; an error says why it has none. What needs the model is a
            generator of requests about `Case.query`, see `noiser.engine.Steps`.
        measure_all: likewise for all cases at once, where that is quicker: in their order, an error for a case that has
            none. One of the two is there.
        summaries: the numbers over prompts, by name.
        others: scales of the means of columns that no summary names, by the beginnings of their names; columns with
            another beginning are not summed up.
        needs_judge: whether cases must have a judge.
        sequences: how many perturbed sequences it asks the model for, for progress; None where its first request is
            for all of them, or it asks for none.
        reads: which of a case's `masks`, `normalization`, `rates`, `draws`, `removal` and `k` matter to it, so that a
            plan with one that does not is refused; None: any may.
    """

    measure: Callable[[Case], Measured | Steps[Measured]] | None = None
    measure_all: Callable[[Sequence[Case]], Sequence[Measured | Exception]] | None = None
    summaries: Mapping[str, Summary] = field(default_factory=dict)
    others: Mapping[str, Scale] = field(default_factory=dict)
    needs_judge: bool = False
    sequences: Callable[[Case], int] | None = None
    reads: frozenset[str] | None = None

    def other_summaries(self, columns: Iterable[str]) -> dict[str, Summary]:
        """The means of those of the columns that no summary names."""
        named = {column for summary in self.summaries.values() for column in summary.columns}
        scales = {
            column: scale
            for column in columns
            for beginning, scale in self.others.items()
            if column not in named and column.startswith(beginning)
        }
        return mean_of_columns(**scales)


def check_read(metrics: Collection[Metric], settings: Mapping[str, Any], shown: Callable[[str], str] = str) -> None:
    """Whether at least one of the metrics reads each of the settings, and a judge, that is given.

    Args:
        metrics: that are to be measured.
        settings: by name; None and what holds anyway are not given.
        shown: how a setting is called where it was given.

    Raises:
        ParameterError: none does.
    """
    if not metrics or any(metric.reads is None for metric in metrics):
        return
    read = {name for metric in metrics for name in [*(metric.reads or ()), *["judge"] * metric.needs_judge]}
    given = [name for name, value in settings.items() if value is not None and value != SETTINGS.get(name)]
    if ignored := [shown(name) for name in given if name not in read]:
        expected = " or ".join(map(shown, sorted(read & settings.keys()))) or "no setting"
        raise ParameterError(
            f"{' and '.join(ignored)} would change nothing; expected {expected} for "
            f"{'this metric' if len(metrics) == 1 else 'these metrics'}. "
            f"Leave {'it' if len(ignored) == 1 else 'them'} out."
        )


def joined(*metrics: Metric) -> Metric:
    """All that several metrics measure, one after another."""

    def measure(case: Case) -> Steps[Measured]:
        columns: dict[str, Any] = {}
        for metric in metrics:
            measured = metric.measure(case) if metric.measure else {}
            columns |= (yield from measured) if isinstance(measured, Generator) else measured
        return columns

    return Metric(
        measure=measure,
        summaries={name: summary for metric in metrics for name, summary in metric.summaries.items()},
        sequences=lambda case: sum(metric.sequences(case) for metric in metrics if metric.sequences),
        reads=frozenset[str]().union(*(metric.reads or () for metric in metrics)),
    )


def measure_passes(
    engine: LocalEngine, metric: Metric, case: Case, progress: Progress | None = None
) -> Passes[Measured]:
    """What a metric measures of a case, as a coroutine for `noiser.engine.run_interleaved`.

    Args:
        engine: runs the passes.
        metric: one with `measure`.
        case: what is measured. Several metrics of it go one after another, and then share the clean run.
        progress: called with the work done and the work expected, in token-forwards.
    """
    assert metric.measure is not None, "the metric measures all cases at once"
    measured = metric.measure(case)
    if not isinstance(measured, Generator):
        return measured
    return (yield from case.answer(engine, measured, progress, metric.sequences(case) if metric.sequences else 0))


METRICS: Registry[Metric] = Registry("metric", "noiser.metrics")
"""Every metric by name; packages add theirs through the entry point `noiser.metrics`."""
