"""All tables of a report: most are declared as a `TableSpec`, the others have a function that builds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry, combined
from noiser.bench.samples import Selection
from noiser.metrics.bootstrap import FEWEST, INFLUENTIAL, mean, mean_gap
from noiser.metrics.metric import Scale, Summary
from noiser.registry import unversioned
from noiser.report.frontier import frontier
from noiser.report.grid import (
    COSTS,
    MeasuredNumber,
    Topic,
    correct,
    data_title,
    grid,
    method_title,
    metric_of,
    named,
    removal_note,
    summaries_of,
    table_of_columns,
    topics,
    without_boundings,
)
from noiser.report.paper import Printed, bounding_of, data_of, model_of, published
from noiser.report.rows import ATTRIBUTION, Cell, Results
from noiser.report.table import DASH, Column, Count, Form, Number, Quoted, Row, Table, Value, format_cell
from noiser.types import Progress


class SpecNumber(NamedTuple):
    """A column: a metric's number by name, its header, how it is written, and the paper's number."""

    number: str
    name: str
    form: Form = "decimal"
    printed: Printed | None = None


Note = str | Callable[[Topic], str]
"""A text, or a function of what the table is about that returns one; an empty text is left out."""


class TableSpec(NamedTuple):
    """A table of every data set for which the plan has its numbers.

    Attributes:
        key, title: without the data set.
        numbers: the columns.
        metric_with: the columns are of one metric, which has this number; "": of several metrics, side by side.
        notes: how to read it.
        profile: of the methods.
        select: the methods that get a row.
        left_out: a note for tables where `select` left methods out.
        fewest: the least methods that a table, and each of its columns, is made for.
        stub_header, label: of the rows.
        alike: only examples that every row has which has enough for an interval.
    """

    key: str
    title: str
    numbers: tuple[SpecNumber, ...]
    metric_with: str = ""
    notes: tuple[Note, ...] = ()
    profile: str = "paper"
    select: Callable[[Sequence[MethodEntry]], Sequence[MethodEntry]] = list
    left_out: str = ""
    fewest: int = 1
    stub_header: str = "method"
    label: Callable[[MethodEntry], str] = lambda method: method_title(method.label)
    alike: bool = False

    def tables(self, results: Results) -> Iterator[Table]:
        """The tables, data set by data set."""
        names = [one.number for one in self.numbers]
        for data in results.data:
            if self.metric_with:
                with_it = topics(results, data, self.metric_with)
                about = [topic._replace(measures=dict.fromkeys(names, topic.measure)) for topic in with_it]
            else:
                about = topics(results, data, *names)
            for topic in about:
                yield from self._grid(topic)

    def _grid(self, topic: Topic) -> Iterator[Table]:
        measured = topic.methods(profile=self.profile)
        methods = self.select(measured)
        numbers = [
            topic.number(*one)._replace(alike=self.alike)
            for one in self.numbers
            if one.number in topic.measures
            and topic.has(one.number)
            and len(self.select(topic.methods(one.number, self.profile))) >= self.fewest
        ]
        notes = [self.left_out if len(methods) < len(measured) else ""]
        notes += [note if isinstance(note, str) else note(topic) for note in self.notes]
        names = topic.key(self.key), topic.title(self.title)
        yield from grid(topic, *names, methods, numbers, notes, self.stub_header, self.label, fewest=self.fewest)


# ---- the declared tables --------------------------------------------------------------------------------------------

_PAPER_JUDGE = "Llama-3.3-70B-Instruct-Turbo"
_SCORE_NOTE = (
    "log(mean Soft-NS / that of random scores) + log(mean Soft-NC / that of random scores); 0 is no better than "
    "random. Random scores are measured on the same prompts as each method; n may differ between methods."
)
_AREA_NOTE = (
    "Area: Soft-NS plus Soft-NC, mean height of their curves when every method keeps the same share of the input; "
    "by score it depends on the shape of the scores, not only on their order. About 1 where all units are kept alike. "
    "Differences are paired: each prompt against random scores, a permutation of the method's own, or the position "
    "(1 to n along the text), on that prompt."
)
_ANSWER_NOTE = (
    "From the top half of the words, in prompt order, a judge guesses the next word. Rate: share of prompts where it "
    "is right. Score: share of the method's score on those words where it is right, else 0, over all prompts; with "
    "negative scores that share can exceed 1. Unreadable: prompts without a reply that can be read, which count as "
    "wrong."
)
_MINIMUM_NOTE = (
    "The least important word is dropped until the judge fails: the share kept at its last success, over the prompts "
    "that it gets right with all words."
)


_FIELD_NOTE = (
    "LDS: rank correlation of summed scores with the target's log-odds, over random masks. Drop and hold: fall of "
    "log p(target) without the highest units, and with only them, mean over k. Normalised AOPC: mean fall of p(target) "
    "while units are removed, between the worst order found for the prompt (0) and the best (1). AUPRC and MRR: "
    "average precision of the units that decide the answer, and 1 / rank of the first, where the data name them."
)


def _authors_note(topic: Topic) -> str:
    """How the published script computes, and what the plan sets otherwise."""
    measure = topic.measure
    masks = "one mask sample" if measure.masks in (None, 1) else f"{measure.masks} mask samples (the script has one)"
    scores = f", scores normalised by {measure.normalization}" if measure.normalization else ""
    return (
        f"As the published script computes: special tokens are scored and masked, {masks}{scores}, squared distance "
        "without the root, the last probe as k. For comparison with the paper's numbers only."
    )


def _draws_note(topic: Topic) -> str:
    """How many draws references are the means of."""
    labels = dict.fromkeys(measure.label for measure in topic.measures.values())
    draws = [known for label in labels if (known := topic.results.draws(topic.data.label, label))]
    if not draws:
        return ""
    fewest, most = min(low for low, _ in draws), max(high for _, high in draws)
    if most == 1:
        return "References are one draw per prompt, so differences from them are noisier than they could be."
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    return f"References that are drawn are means of {number} draws per prompt."


def _sample_note(topic: Topic) -> str:
    """How the paper's sample differs from ours."""
    data = topic.data
    if data_of(data.name) == "wikibio":
        return "The paper calls these 22 sentences WikiBio, and averages over ten continuation tokens."
    if not data_of(data.name):
        return ""
    notes = ["The paper's numbers are for all of the data set, ours for a part of it."] if is_part(data) else []
    if data.max_new_tokens > 1 or data.target_unit != "token" or data.explain == "answer":
        notes.append("The paper's numbers are for the next token alone.")
    return " ".join(notes)


def is_part(data: DataEntry) -> bool:
    """Whether a data set is taken in part, other than by chance."""
    return bool(data.category or data.without_category or data.max_characters)


def _judge_note(topic: Topic) -> str:
    """Who judged, and whom the paper asked."""
    judge = topic.measure.judge or "not named in the plan"
    same = _PAPER_JUDGE.lower() in judge.lower()
    rest = (
        "" if same else f" The paper asked {_PAPER_JUDGE}: its numbers are of another judge, also for the same model."
    )
    return f"Judge: {judge}.{rest}"


def _bounding(method: MethodEntry) -> str:
    return bounding_of(method.name, method.args, method.unit) or ""


def _with_bounding(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """One method for each bounding: the first, where there are several searches."""
    first: dict[str, MethodEntry] = {}
    for method in methods:
        if bounding := _bounding(method):
            first.setdefault(bounding, method)
    return [*first.values()]


_FAITHFULNESS = SpecNumber("faithfulness", "faithfulness", printed=Printed("faithfulness"))
_AREAS = (
    SpecNumber("area", "area"),
    SpecNumber("area_minus_random", "area − random"),
    SpecNumber("area_minus_permuted", "area − permuted"),
    SpecNumber("area_minus_position", "area − position"),
    SpecNumber("rank_area", "area by rank"),
    SpecNumber("rank_area_minus_random", "area by rank − random"),
    SpecNumber("rank_area_minus_position", "area by rank − position"),
)
_TRUSTED = (
    _FAITHFULNESS._replace(printed=None),
    _AREAS[0],
    _AREAS[4],
    SpecNumber("lds", "LDS"),
    SpecNumber("insertion_area", "insertion area"),
)
"""The numbers that methods are compared by."""
_FIELD = (
    SpecNumber("lds", "LDS"),
    SpecNumber("lds_minus_permuted", "LDS − permuted"),
    SpecNumber("drop", "top-k drop"),
    SpecNumber("drop_minus_random", "drop − random"),
    SpecNumber("hold", "top-k hold"),
    SpecNumber("hold_minus_random", "hold − random"),
    SpecNumber("naopc", "normalised AOPC"),
    SpecNumber("auprc", "AUPRC"),
    SpecNumber("mrr", "MRR"),
)
"""Side by side; a metric that has more numbers than these has a table of its own too."""


def _answerability(prefix: str, printed: str, title: str) -> TableSpec:
    return TableSpec(
        prefix.replace("_", "-"),
        f"Answerability by {title}",
        (
            SpecNumber(f"{prefix}_rate", "rate", "percent", Printed(printed, "rate_percent")),
            SpecNumber(f"{prefix}_score", "score", printed=Printed(printed, "score")),
            SpecNumber(f"{prefix}_unscored", "unreadable", "percent"),
        ),
        metric_with=f"{prefix}_rate",
        notes=(_ANSWER_NOTE, _judge_note),
    )


# ---- differences between methods ------------------------------------------------------------------------------------


def differences(results: Results) -> Iterator[Table]:
    """Noiser minus every other method, on the prompts that both have."""
    note = "Paired, over the prompts that both have: n is their number. Above 0: {} is better."
    for data in results.data:
        for topic in topics(results, data, *(one.number for one in _TRUSTED)):
            numbers = [topic.number(*one) for one in _TRUSTED if one.number in topic.measures]
            methods = topic.methods()
            for first in references(methods) if len(methods) > 1 else []:
                name, others = method_title(first.label), [method for method in methods if method is not first]
                names = topic.key(f"differences-{first.label}"), topic.title(f"{name} minus each other method")
                notes = [note.format(name), removal_note(topic)]
                yield from grid(topic, *names, others, numbers, notes, "minus", minus=first)


_ROBUST_NOTE = (
    f"Beside each number: what it is without the {INFLUENTIAL} prompts that, each left out alone, move it most. Those "
    "were chosen, so there is no interval."
)
_LIMITS_NOTE = (
    "No positive sum: prompts on which a target's scores sum to 0 or less, so "
    "that dividing by it turns their order around. Clipped: prompts on which a retaining probability was cut to 0 or 1."
)
_COUNTED = {"sum_not_positive": "no positive sum", "clipped": "clipped"}


def robustness(results: Results) -> Iterator[Table]:
    """What the numbers are without the prompts that matter most, and how often the paper's measure meets its limits."""
    for data in results.data:
        about = topics(results, data, *(one.number for one in _TRUSTED))
        for topic, model in [(each, model) for each in about for model in each.models]:
            labels = {measure.label for measure in topic.measures.values()}
            methods = [method for method in topic.methods() if topic.plans(method, labels, [model])]
            columns: list[tuple[Column, Sequence[Value]]] = []
            for spec in _TRUSTED:
                if spec.number in topic.measures:
                    number = topic.number(*spec)
                    cells = [Cell(model.label, data.label, method.label, number.metric) for method in methods]
                    without = [Number.of(results.robust(cell, number.summary)) for cell in cells]
                    values = [replace(number.value(results, cell), low=math.nan, high=math.nan) for cell in cells]
                    columns += [(Column(spec.name, "", number.better), values)]
                    columns += [(Column(f"{spec.name} without {INFLUENTIAL}", "", number.better), without)]
            notes = [_ROBUST_NOTE]
            label = topic.measures["faithfulness"].label if "faithfulness" in topic.measures else ""
            if set(_COUNTED) <= set(results.columns(data.label, label)):  # rows of earlier versions lack them
                notes.append(_LIMITS_NOTE)
                rows = [results.numbers(Cell(model.label, data.label, method.label, label)) for method in methods]
                for column, name in _COUNTED.items():
                    counts = [Count(int(numbers[column].sum()) if column in numbers else None) for numbers in rows]
                    columns.append((Column(name), counts))
            title = f"{topic.title('Without the most influential prompts')}, {model.label}"
            names = f"{topic.key('robustness')}-{model.label}", title
            yield table_of_columns(*names, "method", [method_title(m.label) for m in methods], columns, notes)


def references(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Noiser as the paper has it, with relative noise, and joint; else every Noiser there is; else the first method."""
    ours = ("noiser", "noiser_relative", "noiser_joint")
    plain = [m for m in methods if unversioned(m.name) in ours and not m.args]
    return plain or [m for m in methods if unversioned(m.name) == "noiser"] or list(methods[:1])


# ---- localisation ---------------------------------------------------------------------------------------------------

CATEGORY = "capital-world"
"""The category of the paper's figure: its prompts name a country and end in "capital"."""


def _mean_sum(*columns: Any) -> Any:
    return mean(sum(columns))


def _excess(*columns: Any) -> Any:
    """Mean of the shares of the score minus mean of those of the units, half of the columns each."""
    half = len(columns) // 2
    return mean_gap(sum(columns[:half]), sum(columns[half:]))


def _rest(distractor: Any) -> Any:
    return 1 - mean(distractor)


_UP, _DOWN = Scale(0, 1, None, True, "share of the score"), Scale(0, 1, None, False, "share of the score")
_PLAIN, _GAIN = Scale(0, 1, None, None, "share of the units"), Scale(-1, 1, 0.0, True, "share above that of the units")
_CRITICAL = ("share_antecedent", "share_last_content_word")
_CRITICAL_UNITS = ("uniform_antecedent", "uniform_last_content_word")

PARTS: Mapping[str, Summary] = {
    "critical": Summary(_mean_sum, _CRITICAL, _UP),
    "critical, of units": Summary(_mean_sum, _CRITICAL_UNITS, _PLAIN),
    "critical − units": Summary(_excess, (*_CRITICAL, *_CRITICAL_UNITS), _GAIN),
    "main part": Summary(_rest, ("share_distractor",), _UP),
    "distractor": Summary(mean, ("share_distractor",), _DOWN),
    "distractor, of units": Summary(mean, ("uniform_distractor",), _PLAIN),
}
"""The numbers of the category with a country and "capital"."""

_ALL_CATEGORIES: Mapping[str, Summary] = {
    "antecedent": Summary(mean, ("share_antecedent",), _UP),
    "antecedent, of units": Summary(mean, ("uniform_antecedent",), _PLAIN),
    "antecedent − units": Summary(mean_gap, ("share_antecedent", "uniform_antecedent"), _GAIN),
    "distractor": PARTS["distractor"],
    "distractor, of units": PARTS["distractor, of units"],
}
_LOCATED_NOTE = (
    "{} on a part of the prompt. Critical: antecedent and last content word, such as the country and “capital”. Main "
    "part: all but the distractor. “Of units”: the share of the units themselves, which scores without information "
    "would get."
)


def share_of(measure: MetricEntry) -> str:
    """What a localisation is a share of."""
    kind = measure.normalization or "positive"
    return "Share of the positive scores" if kind == "positive" else f"Share of the scores, normalised by {kind},"


def localisation(results: Results) -> Iterator[Table]:
    """The paper's LongRA figure in numbers, and the antecedent over all categories."""
    for data in results.data:
        for topic in named(results, data, "localisation"):
            categories = results.categories(data.label, topic.measure.label)
            if CATEGORY in categories:
                yield from _located(topic, PARTS, CATEGORY)
            if categories != [CATEGORY]:
                yield from _located(topic, _ALL_CATEGORIES, None)


def _located(topic: Topic, parts: Mapping[str, Summary], category: str | None) -> Iterator[Table]:
    label = topic.measure.label
    columns = set(topic.results.columns(topic.data.label, label))
    if columns:  # a plan's own data may name other spans
        whatever = {
            column.replace("share_", "").replace("uniform_", "of units: "): Summary(mean, (column,), _PLAIN)
            for column in sorted(columns)
        }
        parts = {name: part for name, part in parts.items() if set(part.columns) <= columns} or whatever
    numbers = [MeasuredNumber(name, label, part, "percent", category=category) for name, part in parts.items()]
    title = f"Localisation on {data_title(topic.data)}{f', {category}' if category else ''}{topic.suffix}"
    note = _LOCATED_NOTE.format(share_of(topic.measure))
    yield from grid(topic, topic.key(f"localisation-{category or 'all'}"), title, topic.methods(), numbers, [note])


# ---- what no table of the paper has ---------------------------------------------------------------------------------

_HEADLINE = (
    SpecNumber("faithfulness", "faithfulness"),
    SpecNumber("area", "area"),
    SpecNumber("rank_area", "area by rank"),
    SpecNumber("answerability_rate", "answerability rate", "percent"),
    SpecNumber("answerability_top5_rate", "top-5 answerability rate", "percent"),
    SpecNumber("minimum_share", "minimum top-k%", "percent"),
)
"""The numbers that the first table is about; metrics with one of them have a table of their own."""


def glance(results: Results) -> Iterator[Table]:
    """The leading method of each number, and how many are not told apart from it, per model and data set."""
    compared = list(_compared(results))
    corrected = correct([one.numbers for one in compared], 1 - results.confidence)
    rows: dict[str, dict[str, str]] = {}
    for one, numbers in zip(compared, corrected, strict=True):
        if text := _leader([number for number in numbers if isinstance(number, Number)], one.methods):
            rows.setdefault(one.row, {})[one.column] = text
    names = dict.fromkeys(name for leaders in rows.values() for name in leaders)
    columns = [(Column(name), [leaders.get(name, DASH) for leaders in rows.values()]) for name in names]
    note = (
        "The best method of each column of the tables below, with its value and n, and how many others are not told "
        "apart from it (paired differences, on the prompts that both have; p-values corrected for all of this table)."
    )
    if columns:
        yield table_of_columns("glance", "At a glance", "model, data", rows, columns, [note])


class _Compared(NamedTuple):
    """A cell of the first table: the numbers of all methods, marked."""

    row: str
    column: str
    numbers: Sequence[Number]
    methods: Sequence[MethodEntry]


def _compared(results: Results) -> Iterator[_Compared]:
    """The headline numbers per model and data set; other boundings are not in the table of faithfulness."""
    for model, data, spec in product(results.models, results.data, (*_HEADLINE, *_FIELD)):
        for topic in topics(results, data, spec.number):
            if model not in topic.models:
                continue
            methods = topic.methods()
            methods = without_boundings(methods) if spec.number == "faithfulness" else methods
            number = topic.number(spec.number, f"{spec.name}{topic.suffix}", spec.form)
            numbers = number.numbers(results, model.label, data.label, methods)
            yield _Compared(f"{model.label}, {data_title(data)}", number.name, numbers, methods)


def _leader(numbers: Sequence[Number], methods: Sequence[MethodEntry]) -> str:
    titled = [(number, method_title(method.label)) for number, method in zip(numbers, methods, strict=True)]
    level = [title for number, title in titled if number.mark == "level"]
    rest = f"; level with {', '.join(level) if len(level) < 3 else f'{len(level)} others'}" if level else ""
    for number, title in titled:
        if number.mark == "best":
            text = format_cell(number)
            return f"{title} {text.value}{text.unit} ({text.base}){rest}"
    return ""


def others(results: Results) -> Iterator[Table]:
    """All numbers of the metrics that no table above shows whole."""
    names = dict.fromkeys(unversioned(measure.name) for measure in results.measures)
    headline, field = ({one.number for one in group} for group in (_HEADLINE, _FIELD))
    for data, name in product(results.data, names):
        for topic in named(results, data, name):
            label = topic.measure.label
            if name == "localisation" or headline & summaries_of(topic.measure).keys():
                continue
            numbers, methods = _all_numbers(topic), topic.methods()
            if methods and not field.issuperset(numbers):
                title = f"{label.replace('_', ' ').capitalize()} on {data_title(data)}"
                notes = [f"{one.name}: {one.summary.scale.meaning}." for one in numbers.values()]
                notes.append(removal_note(topic))
                yield from grid(topic, topic.key(name.replace("_", "-")), title, methods, [*numbers.values()], notes)


def _all_numbers(topic: Topic) -> dict[str, MeasuredNumber]:
    """The numbers of a metric, and the means of its other columns where it has a scale for them."""
    metric, label = metric_of(topic.measure), topic.measure.label
    if metric is None:
        return {}
    columns = topic.results.columns(topic.data.label, label)
    summaries = {**metric.summaries, **metric.other_summaries(columns)}
    return {
        name: MeasuredNumber(name.replace("_", " "), label, summary)
        for name, summary in summaries.items()
        if not columns or set(columns).issuperset(summary.columns)  # rows of earlier versions may lack some
    }


# ---- counts ---------------------------------------------------------------------------------------------------------


def selections(results: Results) -> Iterator[Table]:
    """Prompts before and after the filter "the model's greedy continuation is the gold answer"."""
    if not results.selections:
        return
    known = {(selection.model, selection.data): selection for selection in results.selections}
    heads = ["total", "checked", "right", "right of checked", "chosen"]
    heads += ["paper: right", "paper: right of total", "paper, mean of its 6 models: right of total"]
    rows = [
        Row(
            f"{model.label}, {data_title(data)}",
            (*_selected(known.get((model.label, data.label)), data.limit), *_correct(data, model_of(model.name))),
        )
        for model in results.models
        for data in results.plan.data_for(model.label)
    ]
    yield Table(
        key="selections",
        title="Correct predictions",
        stub_header="model, data",
        columns=tuple(map(Column, heads)),
        rows=tuple(rows),
        notes=(
            "Total: prompts of the data set, without duplicates. Checked: prompts whose greedy continuation was "
            "compared with the answer. Chosen: prompts that are attributed, all of them right where the plan asks "
            "for that.",
        ),
    )


def _selected(selection: Selection | None, limit: int | None) -> list[Value]:
    if selection is None:
        return [Count(None), Count(None), Count(None), Number(value=math.nan, form="percent"), Count(None)]
    right, checked = selection.right, selection.checked
    share = right / checked if right is not None and checked else math.nan
    return [
        Count(selection.total),
        Count(checked),
        Count(right),
        Number(value=share, n=checked or 0, errors=len(selection.failed), form="percent"),
        Count(combined((len(selection.chosen), limit))),
    ]


def _correct(data: DataEntry, model: str | None) -> list[Value]:
    """The paper's counts, which are of whole data sets."""
    name = None if is_part(data) else data_of(data.name)
    right, total = (published("correct_predictions", [name], key) if name else None for key in (model, "total"))
    share = Quoted(right / total if right and total else None, "percent")
    none = Quoted(None)
    return [Quoted(right, "quantity"), share, none] if model else [none, none, share]


def cost(results: Results) -> Iterator[Table]:
    """Seconds, token-forwards and passes of an attribution."""
    note = (
        "Means over prompts. Token-forwards: positions that the model computed. Seconds are of this machine and of "
        "what else ran on it; prompts that were done side by side share them equally, and then there is no interval. "
        "Prompts that failed are left out."
    )
    for data in results.data:
        known = set(results.columns(data.label, ATTRIBUTION))
        methods = [method for method in results.methods if data.label in (method.data or (data.label,))]
        numbers = [MeasuredNumber(name, ATTRIBUTION, summary, "quantity") for name, summary in COSTS.items()]
        columns: list[tuple[Column, Sequence[Value]]] = []
        for model in results.models_with(data.label):
            cells = [Cell(model.label, data.label, method.label, ATTRIBUTION) for method in methods]
            if results.timed(data.label):
                seconds = [Number.of(results.seconds(cell), results.errors(cell).total(), "quantity") for cell in cells]
                columns.append((Column("seconds", model.label, "lower"), seconds))
            columns += [
                (Column(one.name, model.label, "lower"), [one.value(results, cell) for cell in cells])
                for one in numbers
                if known.issuperset(one.summary.columns)
            ]
        if columns:
            title, labels = f"Cost of an attribution on {data_title(data)}", [method.label for method in methods]
            yield table_of_columns(f"cost-{data.label}", title, "method", map(method_title, labels), columns, [note])


def failures(results: Results) -> Iterator[Table]:
    """Every cell of the plan with failures: rows, how many failed, with which errors."""
    rows: list[Row] = []
    metrics = [ATTRIBUTION, *(measure.label for measure in results.measures)]
    for model, data, method, metric in product(results.models, results.data, results.methods, metrics):
        cell = Cell(model.label, data.label, method.label, metric)
        if errors := results.errors(cell):
            label = ", ".join((model.label, data_title(data), method_title(method.label), metric))
            kinds = ", ".join(f"{kind} × {count}" for kind, count in errors.most_common())
            rows.append(Row(label, (Count(len(results.rows(cell))), Count(errors.total()), kinds)))
    note = "A failed prompt is left out of its cell's numbers and counted here. Cells without a failure are not listed."
    yield Table(
        key="failures",
        title="What failed",
        stub_header="model, data, method, metric",
        columns=(Column("rows"), Column("failed"), Column("errors")),
        rows=tuple(rows),
        notes=(note if rows else "Nothing failed.",),
    )


# ---- all of them ----------------------------------------------------------------------------------------------------

BUILDERS: tuple[Callable[[Results], Iterator[Table]], ...] = (
    glance,
    selections,
    TableSpec(
        "faithfulness",
        "Faithfulness",
        (_FAITHFULNESS,),
        select=without_boundings,
        left_out="Other boundings of Noiser have a table of their own.",
        notes=(_SCORE_NOTE, _draws_note, _sample_note),
    ).tables,
    TableSpec("areas", "Mass-matched areas", _AREAS, notes=(_AREA_NOTE, _draws_note)).tables,
    differences,
    robustness,
    TableSpec(
        "soft",
        "Soft-NS and Soft-NC",
        (
            SpecNumber("log_ratio_ns", "log-ratio Soft-NS", printed=Printed("soft_ns_nc", "soft_ns")),
            SpecNumber("log_ratio_nc", "log-ratio Soft-NC", printed=Printed("soft_ns_nc", "soft_nc")),
            SpecNumber("soft_ns", "mean Soft-NS"),
            SpecNumber("soft_nc", "mean Soft-NC"),
        ),
        metric_with="faithfulness",
        notes=("Log-ratios are to random scores on the same prompts; 0 is no better.", _draws_note, _sample_note),
    ).tables,
    TableSpec(
        "bounding",
        "Noiser's boundings",
        (_FAITHFULNESS._replace(printed=Printed("bounding_known")), *_AREAS[:2], *_AREAS[4:6]),
        select=_with_bounding,
        notes=(f"All rows are of the same prompts, but for rows with fewer than {FEWEST}.", _SCORE_NOTE, _sample_note),
        fewest=2,
        stub_header="bounding",
        label=_bounding,
        alike=True,
    ).tables,
    _answerability("answerability", "answerability_top1", "first answer").tables,
    _answerability("answerability_top5", "answerability_top5", "five answers").tables,
    TableSpec(
        "minimum",
        "Minimum top-k%",
        (
            SpecNumber("minimum_share", "words needed", "percent"),
            SpecNumber("unanswerable", "never right", "percent"),
            SpecNumber("minimum_unscored", "unreadable", "percent"),
        ),
        metric_with="minimum_share",
        notes=(_MINIMUM_NOTE, _judge_note),
    ).tables,
    TableSpec("field", "The field's metrics", _FIELD, notes=(_FIELD_NOTE, removal_note)).tables,
    localisation,
    TableSpec(
        "authors",
        "Faithfulness in the authors' profile",
        (_FAITHFULNESS,),
        profile="authors",
        notes=(_authors_note, _SCORE_NOTE, _sample_note),
    ).tables,
    others,
    frontier,
    cost,
    failures,
)
"""The tables in the order of a report; each yields none where the run has nothing for it."""


def tables(results: Results, progress: Progress | None = None) -> list[Table]:
    """All tables that the plan of a run has.

    Args:
        results: of a run.
        progress: called with (done, expected) kinds of tables; intervals take most of the time.
    """
    made: list[Table] = []
    for done, build in enumerate(BUILDERS):
        if progress is not None:
            progress(done, len(BUILDERS))
        made += build(results)
    return [replace(table, alpha=1 - results.confidence) for table in made]
