"""Tables of mass-matched curves, and of differences between methods, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry
from noiser.report.choices import AREAS, measures_of, ordinary, suffix, summaries_of, tail
from noiser.report.grid import Asked, grid
from noiser.report.names import data_title, method_title
from noiser.report.results import Results
from noiser.report.table import Head, Line, Number, Table

__all__ = ["differences", "mass_matched", "references"]

MATCHED = ("faithfulness", "mass_matched", "mass_matched_rank", "soft_scores")
"""Metrics that methods are compared by, pair by pair."""

AREA_NOTE = (
    "Area: Soft-NS plus Soft-NC, mean height of their curves when every method keeps the same share of the input; "
    "about 1 without signal. Differences are paired: each prompt against random scores, or a permutation of the "
    "method's own, on that prompt."
)


def mass_matched(results: Results) -> Iterator[Table]:
    """Areas by score and by rank, and how far they are above random and permuted scores."""
    for data in results.data:
        for measure in measures_of(results, MATCHED, data.label):
            summaries = summaries_of(measure)
            asked = [Asked(head, measure.label, summaries[n]) for n, head in AREAS.items() if n in summaries]
            methods = ordinary(results, measure, data.label)
            if asked and methods:
                yield from grid(
                    results,
                    key=f"areas-{data.label}{tail(measure)}",
                    title=f"Mass-matched areas on {data_title(data.label)}{suffix(measure)}",
                    data=data.label,
                    methods=methods,
                    asked=asked,
                    notes=[AREA_NOTE],
                )


def differences(results: Results) -> Iterator[Table]:
    """Noiser minus every other method, on the prompts that both have."""
    for data in results.data:
        for measure in measures_of(results, MATCHED, data.label):
            methods = ordinary(results, measure, data.label)
            for first in references(methods):
                others = [method for method in methods if method.label != first.label]
                if others:
                    yield from _difference(results, data, measure, first, others)


def references(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Noiser as the paper has it and with relative noise; else every Noiser there is; else the first method."""
    plain = [m for m in methods if m.name.split("@")[0] in ("noiser", "noiser_relative") and not m.args]
    return plain or [m for m in methods if m.name.split("@")[0] == "noiser"] or list(methods[:1])


def _difference(
    results: Results, data: DataEntry, measure: MetricEntry, first: MethodEntry, others: Sequence[MethodEntry]
) -> list[Table]:
    summaries = summaries_of(measure)
    asked = [
        Asked(AREAS.get(name, name), measure.label, summaries[name])
        for name in ("faithfulness", "area", "rank_area")
        if name in summaries
    ]
    labels = results.plan.labels("models")
    apart = len(asked) > 2 and len(labels) > 1
    name = method_title(first.label)
    return [
        Table(
            key=f"differences-{first.label}-{data.label}{tail(measure)}" + f"-{models[0]}" * apart,
            title=f"{name} minus each other method on {data_title(data.label)}{suffix(measure)}"
            + f", {models[0]}" * apart,
            corner="minus",
            heads=tuple(Head(one.name, model) for model in models for one in asked),
            lines=tuple(
                Line(
                    method_title(other.label),
                    tuple(_gap(results, one, model, data.label, first, other) for model in models for one in asked),
                )
                for other in others
            ),
            notes=(f"Paired, over the prompts that both have: n is their number. Above 0: {name} is better.",),
            legend="clear",
        )
        for models in (
            [[model] for model in results.plan.labels("models")] if apart else [results.plan.labels("models")]
        )
    ]


def _gap(results: Results, one: Asked, model: str, data: str, first: MethodEntry, other: MethodEntry) -> Number:
    cells = one.cell(model, data, first.label), one.cell(model, data, other.label)
    found = results.paired(*cells, one.summary)
    clear = found.low > 0 or found.high < 0
    return Number.of(found, form=one.form).marked("clear" if clear else "")
