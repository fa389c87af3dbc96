"""The common table: methods by numbers, model by model, the best marked, the paper's numbers beside ours."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, ModelEntry
from noiser.errors import UnknownNameError
from noiser.metrics import METRICS
from noiser.metrics.bootstrap import holm, mean
from noiser.metrics.metric import Metric, Scale, Summary
from noiser.registry import unversioned
from noiser.report.paper import MODELS, Printed, bounding_of, comparable, model_of
from noiser.report.rows import Cell, Results
from noiser.report.table import Column, Form, Legend, Number, Quoted, Row, Table, Value, clean

METHOD_TITLES: Mapping[str, str] = {
    "noiser": "Noiser",
    "noiser_relative": "Noiser, relative noise",
    "random": "Random",
    "position": "Position",
    "last_attention": "Last attention",
    "attention_rollout": "Attention rollout",
    "input_x_gradient": "Input × gradient",
    "integrated_gradients": "Integrated gradients",
    "gradient_shap": "Gradient SHAP",
    "deeplift": "DeepLIFT",
    "sequential_integrated_gradients": "Sequential IG",
    "lime": "LIME",
    "occlusion": "Occlusion",
    "noiser_joint": "Joint",
    "kernel_shap": "Kernel SHAP",
    "shapley_sampling": "Shapley sampling",
    "context_cite": "ContextCite",
    "attn_lrp": "AttnLRP",
}
_DATA_TITLES = {"known": "KNOWN", "longra": "LongRA", "wikitext": "Wikipedia sentences", "wikibio": "WikiBio"}

_PAPER_MEAN = f"paper, mean of its {len(MODELS)} models"
"""The group of the reference column for models that the paper does not have."""

_MOST_REASONS = 8
_SIDE_BY_SIDE = 2
"""Most numbers per model where models stand side by side."""


_COST = Scale(0, float("inf"), None, False, "cost of an attribution")
COSTS = {
    "token-forwards": Summary(mean, ("token_forwards",), _COST),
    "passes": Summary(mean, ("passes",), _COST),
}
"""What an attribution row says of its cost."""


def method_title(label: str) -> str:
    """A method's title; a label that is not a registry name is returned unchanged."""
    return METHOD_TITLES.get(unversioned(label), label)


def data_title(entry: DataEntry) -> str:
    """A data set's title, with its label where the plan has given it one."""
    title = _DATA_TITLES.get(unversioned(entry.name or ""), clean(entry.name or entry.label))
    return title if entry.name in (None, entry.label) else f"{title} ({entry.label})"


# ---- which metrics and methods a table is about ---------------------------------------------------------------------


def metric_of(measure: MetricEntry) -> Metric | None:
    """The registry's metric of that name; None where its package is not installed here."""
    try:
        return METRICS.get(measure.name).factory()
    except UnknownNameError:
        return None


def summaries_of(measure: MetricEntry) -> Mapping[str, Summary]:
    """The numbers over prompts that a metric has by name."""
    metric = metric_of(measure)
    return metric.summaries if metric else {}


class Topic(NamedTuple):
    """What a table or figure is about: numbers of metrics on a data set.

    Attributes:
        results: of the run.
        data: the data set.
        tag: what sets the metrics apart, in titles and keys, from the first ones with these numbers; empty for those,
            unless the plan has renamed them.
        measures: the plan's metric that has each number.
    """

    results: Results
    data: DataEntry
    tag: str
    measures: Mapping[str, MetricEntry]

    @property
    def measure(self) -> MetricEntry:
        """The metric of the first number."""
        return next(iter(self.measures.values()))

    @property
    def suffix(self) -> str:
        """The tag for titles."""
        return f" ({self.tag})" if self.tag else ""

    @property
    def tail(self) -> str:
        """The tag for keys."""
        return f"-{self.tag}" if self.tag else ""

    def key(self, name: str) -> str:
        """The key of a table or figure."""
        return f"{name}-{self.data.label}{self.tail}"

    def title(self, name: str) -> str:
        """The title of a table or figure."""
        return f"{name} on {data_title(self.data)}{self.suffix}"

    @property
    def models(self) -> list[ModelEntry]:
        """The models that the plan measures with any of the metrics."""
        pairs = product(self.results.methods, self.measures.values())
        planned = {
            model.label
            for method, measure in pairs
            for model in self.results.planned(method.label, measure.label, self.data.label)
        }
        return [model for model in self.results.models if model.label in planned]

    def methods(self, number: str = "", profile: str = "paper") -> list[MethodEntry]:
        """The methods of a profile that the plan measures with the metric of a number; "": of any number."""
        measures = [self.measures[number]] if number else self.measures.values()
        labels = {measure.label for measure in measures}
        return [
            method
            for method in self.results.methods
            if method.profile == profile and self.plans(method, labels, self.results.models)
        ]

    def plans(self, method: MethodEntry, metrics: Iterable[str], models: Sequence[ModelEntry]) -> bool:
        """Whether the plan has any of the metrics, by their labels, for a method on any of the models."""
        planned = [self.results.planned(method.label, metric, self.data.label) for metric in metrics]
        return any(model in those for model, those in product(models, planned))

    def has(self, number: str) -> bool:
        """Whether rows have a number; rows of earlier versions may lack some. True where there is no row yet."""
        columns = self.results.columns(self.data.label, self.measures[number].label)
        return not columns or set(columns).issuperset(summaries_of(self.measures[number])[number].columns)

    def number(self, number: str, name: str, form: Form = "decimal", printed: Printed | None = None) -> MeasuredNumber:
        """A number, to be shown under that name; without the paper's where that cannot be compared."""
        measure = self.measures[number]
        summary = summaries_of(measure)[number]
        return MeasuredNumber(name, measure.label, summary, form, printed if comparable(measure) else None)


def topics(results: Results, data: DataEntry, *numbers: str) -> list[Topic]:
    """The numbers that the plan has for a data set, those of metrics with the same tag together."""
    by_tag: dict[str, dict[str, MetricEntry]] = {}
    for number in numbers:
        measures = [measure for measure in results.measures if number in summaries_of(measure)]
        for tag, measure in _tagged(results, data, measures):
            by_tag.setdefault(tag, {})[number] = measure
    return [Topic(results, data, tag, measures) for tag, measures in by_tag.items()]


def named(results: Results, data: DataEntry, name: str) -> list[Topic]:
    """The metrics with that name in the registry that the plan has for a data set."""
    measures = [measure for measure in results.measures if unversioned(measure.name) == name]
    return [Topic(results, data, tag, {name: measure}) for tag, measure in _tagged(results, data, measures)]


def _tagged(results: Results, data: DataEntry, measures: Iterable[MetricEntry]) -> list[tuple[str, MetricEntry]]:
    """Those of these metrics that the plan has for a data set, with their tags."""
    planned = [
        measure
        for measure in measures
        if any(results.planned(method.label, measure.label, data.label) for method in results.methods)
    ]
    return [
        ("" if position == 0 and measure.label == unversioned(measure.name) else measure.label, measure)
        for position, measure in enumerate(planned)
    ]


def without_boundings(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """The methods without Noiser's other boundings, which have a table of their own."""
    return [method for method in methods if bounding_of(method.name, method.args, method.unit) in (None, "k_min")]


# ---- numbers --------------------------------------------------------------------------------------------------------


class MeasuredNumber(NamedTuple):
    """A number of a metric, to be shown for every method.

    Attributes:
        name: header of its column.
        metric: label of the metric whose rows have it.
        summary: the number.
        form: how it is written.
        printed: the paper's number, if the paper has this column.
        category: only rows of that category.
        alike: only examples that every method of the table has which has enough for an interval.
    """

    name: str
    metric: str
    summary: Summary
    form: Form = "decimal"
    printed: Printed | None = None
    category: str | None = None
    alike: bool = False

    @property
    def better(self) -> str:
        """Which way is better, as `Column` has it."""
        return self.summary.scale.better

    def value(self, results: Results, cell: Cell) -> Number:
        """The number of a cell."""
        return Number.of(results.estimate(cell, self.summary), results.errors(cell).total(), self.form)

    def numbers(
        self, results: Results, model: str, data: str, methods: Sequence[MethodEntry], minus: MethodEntry | None = None
    ) -> list[Number]:
        """The numbers of methods with the best marked, or the paired differences of `minus` and each method."""
        beside = tuple(method.label for method in methods) if self.alike else ()
        cells = [Cell(model, data, method.label, self.metric, self.category, beside) for method in methods]
        if minus is None:
            return mark_best(results, cells, self.summary, [self.value(results, cell) for cell in cells])
        gaps = [results.paired(cell._replace(method=minus.label), cell, self.summary) for cell in cells]
        return [
            replace(Number.of(gap, form=self.form), mark="clear" if gap.is_clear else "", p=gap.p, difference=True)
            for gap in gaps
        ]


def mark_best(results: Results, cells: Sequence[Cell], summary: Summary, numbers: Sequence[Number]) -> list[Number]:
    """The numbers of one column with the best of them marked, and all that are not told apart from it.

    The best is the highest (or lowest) value that has an interval, of those over at least half as many examples as the
    column's most; there is none where all are equal. Another is told apart from it if their paired difference, over the
    examples that both have, is clear (`Estimate.is_clear`) and on the best one's side of 0. The p-values are those of
    each pair by itself; `correct` corrects those of a table.
    """
    sign = {True: 1.0, False: -1.0, None: math.nan}[summary.scale.higher_is_better]
    ranked = [index for index, number in enumerate(numbers) if not math.isnan(number.low * sign)]
    marked = list(numbers)
    if len({numbers[index].value for index in ranked}) < 2:
        return marked
    most = max(numbers[index].n for index in ranked)
    best = max((i for i in ranked if 2 * numbers[i].n >= most), key=lambda index: sign * numbers[index].value)
    marked[best] = numbers[best].marked("best")
    for index, number in enumerate(numbers):
        if index != best and not math.isnan(number.value):
            gap = results.paired(cells[best], cells[index], summary)
            marked[index] = number.marked("" if gap.is_clear and gap.value * sign > 0 else "level", gap.p)
    return marked


def correct(columns: Sequence[Sequence[Value]], alpha: float) -> list[list[Value]]:
    """The cells of a table with their p-values corrected by Holm's method; marks that no longer hold are taken back."""
    numbers = [cell for column in columns for cell in column if isinstance(cell, Number)]
    values = iter(holm([number.p for number in numbers]))

    def one(cell: Value) -> Value:
        if not isinstance(cell, Number):
            return cell
        p = next(values)
        return cell.marked(cell.mark if not p >= alpha else "" if cell.difference else "level", p)

    return [[one(cell) for cell in column] for column in columns]


# ---- tables ---------------------------------------------------------------------------------------------------------


Columns = Sequence[tuple[Column, Sequence[Value]]]
"""Columns with their cells, one per row."""


def table_of_columns(
    key: str, title: str, stub: str, labels: Iterable[str], columns: Columns, notes: Iterable[str], legend: Legend = ""
) -> Table:
    """A table with the rows of these labels; empty notes are left out."""
    rows = tuple(Row(label, tuple(cells[i] for _, cells in columns)) for i, label in enumerate(labels))
    heads = tuple(head for head, _ in columns)
    shown = tuple(filter(None, notes))
    return Table(key=key, title=title, stub_header=stub, columns=heads, rows=rows, notes=shown, legend=legend)


def grid(
    topic: Topic,
    key: str,
    title: str,
    methods: Sequence[MethodEntry],
    numbers: Sequence[MeasuredNumber],
    notes: Sequence[str] = (),
    stub_header: str = "method",
    label: Callable[[MethodEntry], str] = lambda method: method_title(method.label),
    minus: MethodEntry | None = None,
    fewest: int = 1,
) -> Iterator[Table]:
    """Methods by numbers on one data set: models side by side or, where there are many numbers, one table per model.

    A table has the methods that the plan has for its models; none is made of fewer than `fewest`. With `minus`, the
    numbers are paired differences of that method minus each of the others.
    """
    results, data, all_methods = topic.results, topic.data, methods
    every = topic.models
    ranked = any(one.summary.scale.higher_is_better is not None for one in numbers)
    legend: Legend = "clear" if minus else "best" if ranked else ""
    apart = len(numbers) > _SIDE_BY_SIDE and len(every) > 1
    for models in [[model] for model in every] if apart else [every]:
        methods = [method for method in all_methods if topic.plans(method, {one.metric for one in numbers}, models)]
        if len(methods) < fewest:
            continue
        labels = [label(method) for method in methods]
        columns: list[tuple[Column, Sequence[Value]]] = []
        reasons: list[str] = []
        for model, number in product(models, numbers):
            cells = number.numbers(results, model.label, data.label, methods, minus)
            columns.append((Column(number.name, model.label, "" if minus else number.better), cells))
            columns += _printed(number, f"{number.name}, paper", model.label, data, methods, model_of(model.name))
            reasons += [
                f"{name}, {number.name}, {model.label}: {cell.reason}."
                for name, cell in zip(labels, cells, strict=True)
                if cell.n and math.isnan(cell.value) and not minus  # a cell without rows says so itself
            ]
        if not all(model_of(model.name) for model in models):
            for number in numbers:
                columns += _printed(number, number.name, _PAPER_MEAN, data, methods, "average")
        if (rest := len(reasons) - _MOST_REASONS) > 0:
            reasons[_MOST_REASONS:] = [f"And {rest} more such cells; the CSV has the reason of each."]
        names = (f"{key}-{models[0].label}", f"{title}, {models[0].label}") if apart else (key, title)
        cells = correct([cells for _, cells in columns], 1 - results.confidence)
        columns = [(head, column) for (head, _), column in zip(columns, cells, strict=True)]
        yield table_of_columns(*names, stub_header, labels, columns, [*notes, *reasons], legend)


def _printed(
    number: MeasuredNumber, name: str, group: str, data: DataEntry, methods: Sequence[MethodEntry], model: str | None
) -> Columns:
    """The paper's column for one of its models, or their average; none if it has no number for any of the methods."""
    if number.printed is None or model is None:
        return []
    values = [number.printed.number(data, method, model) for method in methods]
    known = any(value is not None for value in values)
    return [(Column(name, group), [Quoted(value, number.form) for value in values])] if known else []


def removal_note(topic: Topic) -> str:
    """How units were removed, where a metric removes any."""
    removals = {
        measure.label: measure.removal or "zero"
        for measure in topic.measures.values()
        if (metric := metric_of(measure)) and "removal" in (metric.reads or ())
    }
    if len({*removals.values()}) == 1:
        return f"Removal: {next(iter(removals.values()))}."
    several = "; ".join(f"{label}: {removal}" for label, removal in removals.items())
    return f"Removal, by metric: {several}." if several else ""
