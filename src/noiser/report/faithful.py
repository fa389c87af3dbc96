"""Tables of faithfulness: the paper's score, its two parts, the boundings, and the authors' profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from noiser.bench.plan import DataEntry, MethodEntry
from noiser.report.choices import AREAS, Source, everywhere, ordinary, together, without_boundings
from noiser.report.grid import Asked, Printed, grid
from noiser.report.paper import bounding_of, data_of, method_of, published
from noiser.report.results import Results
from noiser.report.table import Table

__all__ = ["authors", "boundings", "faithfulness", "soft_scores"]

SCORE_NOTE = (
    "log(mean Soft-NS / that of random scores) + log(mean Soft-NC / that of random scores); 0 is no better than "
    "random. Random scores are measured on the very prompts of each method; n may differ between methods."
)
AUTHORS_NOTE = (
    "As the published script computes: special tokens are scored and masked, one mask sample, squared distance "
    "without the root, the last probe as k. For comparison with the paper's numbers only."
)


def faithfulness(results: Results) -> Iterator[Table]:
    """The paper's first table: one a data set."""
    for data, source in everywhere(results, "faithfulness"):
        methods = ordinary(results, [source], data.label)
        main = without_boundings(methods)
        notes = ["Other boundings of Noiser have a table of their own."] if len(main) < len(methods) else []
        if main:
            yield from _scores(results, data, source, main, "faithfulness", "Faithfulness", notes)


def authors(results: Results) -> Iterator[Table]:
    """The same for methods in the authors' profile."""
    for data, source in everywhere(results, "faithfulness"):
        methods = ordinary(results, [source], data.label, "authors")
        if methods:
            title = "Faithfulness in the authors' profile"
            yield from _scores(results, data, source, methods, "authors", title, [AUTHORS_NOTE])


def _scores(
    results: Results,
    data: DataEntry,
    source: Source,
    methods: Sequence[MethodEntry],
    key: str,
    title: str,
    notes: Sequence[str],
) -> list[Table]:
    def printed(method: MethodEntry, model: str | None) -> float | None:
        return _published(data, "faithfulness", method, model)

    return grid(
        results,
        key=source.key(key, data),
        title=source.title(title, data),
        data=data.label,
        methods=methods,
        asked=[Asked.of(source, "faithfulness", "faithfulness", printed=printed)],
        notes=[*notes, SCORE_NOTE, *_sample(data)],
    )


def soft_scores(results: Results) -> Iterator[Table]:
    """Soft-NS and Soft-NC: the log-ratios that the paper prints, and the means that they are made of."""
    for data, source in everywhere(results, "faithfulness"):
        asked = [
            Asked.of(source, "log_ratio_ns", "log-ratio Soft-NS", printed=_part(data, "soft_ns")),
            Asked.of(source, "log_ratio_nc", "log-ratio Soft-NC", printed=_part(data, "soft_nc")),
            Asked.of(source, "soft_ns", "mean Soft-NS"),
            Asked.of(source, "soft_nc", "mean Soft-NC"),
        ]
        methods = ordinary(results, [source], data.label)
        if methods:
            yield from grid(
                results,
                key=source.key("soft", data),
                title=source.title("Soft-NS and Soft-NC", data),
                data=data.label,
                methods=methods,
                asked=asked,
                notes=["Log-ratios are to random scores on the same prompts; 0 is no better.", *_sample(data)],
            )


def boundings(results: Results) -> Iterator[Table]:
    """Noiser with each bounding; the paper has it for KNOWN."""
    for data in results.data:
        for found in together(results, ("faithfulness", "area", "area_minus_random"), data.label):
            methods = [m for m in ordinary(results, found.values(), data.label) if bounding_of(m.name, m.args, m.unit)]
            if len(methods) > 1:
                yield from _bounding(results, data, found, methods)


def _bounding(
    results: Results, data: DataEntry, found: Mapping[str, Source], methods: Sequence[MethodEntry]
) -> list[Table]:
    def printed(method: MethodEntry, model: str | None) -> float | None:
        bounding = bounding_of(method.name, method.args, method.unit)
        return published("bounding_known", [bounding], model) if data_of(data.name) == "known" and bounding else None

    asked = [
        Asked.of(source, name, AREAS.get(name, name), printed=printed if name == "faithfulness" else None)
        for name, source in found.items()
        if sum(results.planned(method.label, source.measure.label, data.label) for method in methods) > 1
    ]
    source = next(iter(found.values()))
    return grid(
        results,
        key=source.key("bounding", data),
        title=source.title("Noiser's boundings", data),
        data=data.label,
        methods=methods,
        asked=asked,
        notes=[SCORE_NOTE, *_sample(data)],
        corner="bounding",
        labels=lambda method: bounding_of(method.name, method.args, method.unit) or method.label,
    )


def _part(data: DataEntry, column: str) -> Printed:
    return lambda method, model: _published(data, "soft_ns_nc", method, model, column)


def _published(
    data: DataEntry, table: str, method: MethodEntry, model: str | None, column: str | None = None
) -> float | None:
    names = data_of(data.name), method_of(method.name, method.args, method.unit)
    path = [name for name in names if name]
    return published(table, path, model, column) if len(path) == len(names) else None


def _sample(data: DataEntry) -> list[str]:
    """What sets the paper's sample apart from ours."""
    if data_of(data.name) == "wikibio":
        return ["The paper calls these 22 sentences WikiBio, and averages over ten continuation tokens."]
    if data_of(data.name) and (data.category or data.without_category):
        return ["The paper's numbers are for all categories of the data set, ours for some."]
    return []
