"""Tables of mass-matched curves, and of differences between methods, prompt by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from noiser.bench.plan import DataEntry, MethodEntry
from noiser.registry import unversioned
from noiser.report.choices import AREAS, Source, ordinary, together
from noiser.report.grid import Asked, grid
from noiser.report.names import method_title
from noiser.report.results import Results, is_clear
from noiser.report.table import Head, Line, Number, Table

__all__ = ["differences", "mass_matched", "references"]

AREA_NOTE = (
    "Area: Soft-NS plus Soft-NC, mean height of their curves when every method keeps the same share of the input; "
    "about 1 without signal. Differences are paired: each prompt against random scores, or a permutation of the "
    "method's own, on that prompt."
)


def mass_matched(results: Results) -> Iterator[Table]:
    """Areas by score and by rank, and how far they are above random and permuted scores."""
    for data in results.data:
        for found in together(results, AREAS, data.label):
            source = next(iter(found.values()))
            methods = ordinary(results, found.values(), data.label)
            if methods:
                yield from grid(
                    results,
                    key=source.key("areas", data),
                    title=source.title("Mass-matched areas", data),
                    data=data.label,
                    methods=methods,
                    asked=_asked(found),
                    notes=[AREA_NOTE],
                )


def _asked(found: Mapping[str, Source]) -> list[Asked]:
    return [Asked.of(source, number, AREAS.get(number, number)) for number, source in found.items()]


def differences(results: Results) -> Iterator[Table]:
    """Noiser minus every other method, on the prompts that both have."""
    for data in results.data:
        for found in together(results, ("faithfulness", "area", "rank_area"), data.label):
            methods = ordinary(results, found.values(), data.label)
            for first in references(methods):
                others = [method for method in methods if method.label != first.label]
                if others:
                    yield from _difference(results, data, found, first, others)


def references(methods: Sequence[MethodEntry]) -> list[MethodEntry]:
    """Noiser as the paper has it and with relative noise; else every Noiser there is; else the first method."""
    plain = [m for m in methods if unversioned(m.name) in ("noiser", "noiser_relative") and not m.args]
    return plain or [m for m in methods if unversioned(m.name) == "noiser"] or list(methods[:1])


def _difference(
    results: Results, data: DataEntry, found: Mapping[str, Source], first: MethodEntry, others: Sequence[MethodEntry]
) -> list[Table]:
    asked = _asked(found)
    source = next(iter(found.values()))
    labels = results.plan.labels("models")
    apart = len(asked) > 2 and len(labels) > 1
    name = method_title(first.label)
    return [
        Table(
            key=source.key(f"differences-{first.label}", data) + f"-{models[0]}" * apart,
            title=source.title(f"{name} minus each other method", data) + f", {models[0]}" * apart,
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
        for models in ([[label] for label in labels] if apart else [labels])
    ]


def _gap(results: Results, one: Asked, model: str, data: str, first: MethodEntry, other: MethodEntry) -> Number:
    cells = one.cell(model, data, first.label), one.cell(model, data, other.label)
    found = results.paired(*cells, one.summary)
    return Number.of(found, form=one.form).marked("clear" if is_clear(found) else "")
