"""The frontier: what each method reaches at each budget; which rows are one method at several budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noiser.bench.plan import MethodEntry
from noiser.report.grid import COSTS, MeasuredNumber, method_title, removal_note, table_of_columns, topics
from noiser.report.rows import ATTRIBUTION, Cell, Results
from noiser.report.table import Column, Number, Table, Value

NUMBERS = {
    "faithfulness": "faithfulness",
    "area": "area",
    "rank_area": "area by rank",
    "lds": "LDS",
    "insertion_area": "insertion area",
    "aopc": "AOPC",
}
"""The metrics' numbers that may stand against cost, and the headers of their columns."""

FORWARDS = "token-forwards"
_BUDGETS = frozenset({"samples", "permutations", "n_steps", "steps"})
"""Parameters that say how much a method may spend."""

_NOTE = (
    "Rows that differ in nothing but a number of samples, permutations or steps are one method at several budgets; the "
    "figure draws a line through them. Token-forwards: positions that the model computed, mean over prompts; 0 for "
    "scores that need no model."
)


def families(methods: Sequence[MethodEntry]) -> list[str]:
    """For each method the title of its family: those that differ in nothing but a budget have the same one."""
    keys = [(m.name, m.unit, m.profile, {k: v for k, v in m.args.items() if k not in _BUDGETS}) for m in methods]
    titles: list[str] = []
    for method, key in zip(methods, keys, strict=True):
        same = [other for other, theirs in zip(methods, keys, strict=True) if theirs == key]
        rest = ", ".join(f"{name} = {value}" for name, value in key[-1].items())
        several = method_title(method.name) + (f", {rest}" if rest else "")
        titles.append(several if len(same) > 1 else method_title(method.label))
    return titles


def frontier(results: Results) -> Iterator[Table]:
    """Cost and what it buys, per model, of plans that have a method at several budgets."""
    for data in results.data:
        for topic in topics(results, data, *NUMBERS):
            methods = topic.methods()
            if len(set(families(methods))) == len(methods):
                continue
            numbers = [topic.number(number, name) for number, name in NUMBERS.items() if number in topic.measures]
            numbers = [MeasuredNumber(FORWARDS, ATTRIBUTION, COSTS[FORWARDS], "quantity"), *numbers]
            notes = [_NOTE, removal_note(topic)]
            for model in topic.models:
                columns: list[tuple[Column, Sequence[Value]]] = []
                for number in numbers:
                    cells = [Cell(model.label, data.label, method.label, number.metric) for method in methods]
                    values: list[Number] = [number.value(results, cell) for cell in cells]
                    columns.append((Column(number.name, model.label, number.better), values))
                names = f"{topic.key('frontier')}-{model.label}", f"{topic.title('Frontier')}, {model.label}", "method"
                yield table_of_columns(*names, [method_title(method.label) for method in methods], columns, notes)
