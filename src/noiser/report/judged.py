"""Tables of what a judge says: answerability and the minimum top-k%."""

from __future__ import annotations

from collections.abc import Iterator

from noiser.bench.plan import DataEntry, MethodEntry, MetricEntry
from noiser.report.choices import Source, everywhere, ordinary, sources
from noiser.report.grid import Asked, Printed, grid
from noiser.report.paper import data_of, method_of, published
from noiser.report.results import Results
from noiser.report.table import Table

__all__ = ["PAPER_JUDGE", "answerability", "minimum"]

PAPER_JUDGE = "Llama-3.3-70B-Instruct-Turbo"

_KINDS = {
    "answerability_": ("answerability_top1", "first answer"),
    "answerability_top5_": ("answerability_top5", "five answers"),
}
"""Prefix of the numbers, the paper's table, and what it is."""

ANSWER_NOTE = (
    "From the top half of the words, in prompt order, a judge guesses the next word. Rate: share of prompts where it "
    "is right. Score: share of the method's score on those words where it is right, else 0, over all prompts; with "
    "negative scores that share can exceed 1. Unreadable: prompts without a reply that can be read, which count as "
    "wrong."
)


def answerability(results: Results) -> Iterator[Table]:
    """Rate and score by first answer and among five, as the paper's two tables."""
    for data in results.data:
        for prefix in _KINDS:
            for source in sources(results, f"{prefix}rate", data.label):
                yield from _answers(results, data, source, prefix)


def _answers(results: Results, data: DataEntry, source: Source, prefix: str) -> list[Table]:
    table, what = _KINDS[prefix]
    rate = Asked.of(source, f"{prefix}rate", "rate", "percent", _printed(data, table, "rate_percent"))
    score = Asked.of(source, f"{prefix}score", "score", printed=_printed(data, table, "score"))
    unreadable = Asked.of(source, f"{prefix}unscored", "unreadable", "percent")
    return grid(
        results,
        key=source.key(prefix.rstrip("_").replace("_", "-"), data),
        title=source.title(f"Answerability by {what}", data),
        data=data.label,
        methods=ordinary(results, [source], data.label),
        asked=[rate, score, unreadable],
        notes=[ANSWER_NOTE, judge_note(source.measure)],
    )


def judge_note(measure: MetricEntry) -> str:
    """Who judged, and whom the paper asked."""
    asked = measure.judge or "not named in the plan"
    same = PAPER_JUDGE.lower() in asked.lower()
    rest = "" if same else f" The paper asked {PAPER_JUDGE}: its numbers are of another judge, also for the same model."
    return f"Judge: {asked}.{rest}"


def minimum(results: Results) -> Iterator[Table]:
    """The smallest share of words from which the judge is right; the paper has a figure of it, without numbers."""
    for data, source in everywhere(results, "minimum_share"):
        yield from grid(
            results,
            key=source.key("minimum", data),
            title=source.title("Minimum top-k%", data),
            data=data.label,
            methods=ordinary(results, [source], data.label),
            asked=[
                Asked.of(source, "minimum_share", "words needed", "percent"),
                Asked.of(source, "unanswerable", "never right", "percent"),
                Asked.of(source, "minimum_unscored", "unreadable", "percent"),
            ],
            notes=[
                "The least important word is dropped until the judge fails: the share kept at its last success, "
                "over the prompts that it gets right with all words.",
                judge_note(source.measure),
            ],
        )


def _printed(data: DataEntry, table: str, column: str) -> Printed | None:
    if data_of(data.name) != "known":
        return None

    def printed(method: MethodEntry, model: str | None) -> float | None:
        name = method_of(method.name, method.args, method.unit)
        found = published(table, [name], model, column) if name else None
        return found / 100 if found is not None and column == "rate_percent" else found

    return printed
