"""The result of an evaluation, and the paired differences between several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noiser import numbers
from noiser.attribution.display import label
from noiser.attribution.markdown import escaped_line, table
from noiser.attribution.store import to_jsonable
from noiser.errors import ParameterError
from noiser.evaluation.examples import Skipped
from noiser.files import csv_text, json_text, write_text
from noiser.metrics.bootstrap import Estimate, corrected, difference, estimate
from noiser.metrics.metric import Summary
from noiser.pages import html_table
from noiser.types import ModelIdentity

if TYPE_CHECKING:
    from pandas import DataFrame

_SHARED = (
    "profile", "unit", "max_new_tokens", "target_unit", "normalization",
    "masks", "rates", "draws", "removal", "k", "judge",
)  # fmt: skip
"""Settings that two evaluations must share to be compared; each may lack some, such as a judge."""

_LISTED = 10
"""Skipped prompts that are printed; `Evaluation.skipped` has all of them."""


def estimated(rows: Any, summary: Summary, **options: Any) -> Estimate:
    """A number over the prompts of a DataFrame, with its interval; options are those of `estimate`."""
    return estimate(summary.statistic, *_columns(rows, summary), **options)


def paired(ours: Any, theirs: Any, summary: Summary, **options: Any) -> Estimate:
    """A number of one DataFrame minus that of another, over the index entries that both have, with a p-value."""
    if not ours.index.equals(theirs.index):
        common = ours.index.intersection(theirs.index, sort=False)
        ours, theirs = ours.loc[common], theirs.loc[common]
    columns = [*_columns(ours, summary), *_columns(theirs, summary)]
    return estimate(difference(summary.statistic), *columns, contrast=True, **options)


def _columns(rows: Any, summary: Summary) -> list[Any]:
    return [rows[name].to_numpy(float) if name in rows else [math.nan] * len(rows) for name in summary.columns]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of `noiser.evaluate`.

    Attributes:
        records: one mapping per prompt, skipped ones included: "index", "prompt", "method", "target", "probability",
            "units", "error", and the columns that the metrics measured.
        skipped: what could not be measured, and why.
        metrics: versioned names of the metrics.
        summaries: statistic, columns and scale of each number, by name.
        method: versioned name of the method (of the first attribution, if the caller gave attributions).
        model: identity of the model.
        settings: seed, masks, normalization, rates, draws, removal, k, judge, profile, unit, max_new_tokens,
            target_unit, and `parameters`: every hyper-parameter of the method. Where the caller gave attributions, unit
            and target_unit are the first one's, and there is no max_new_tokens.
        confidence: of the intervals.
    """

    records: tuple[Mapping[str, Any], ...]
    skipped: tuple[Skipped, ...]
    metrics: tuple[str, ...]
    summaries: Mapping[str, Summary]
    method: str
    model: ModelIdentity
    settings: Mapping[str, Any]
    confidence: float = 0.95

    @cached_property
    def rows(self) -> DataFrame:
        """The records as a table, one row per prompt."""
        import pandas as pd

        return pd.DataFrame([dict(record) for record in self.records])

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        """The numbers over prompts with their intervals, by name.

        Differences from a reference have p-values, corrected by Holm's method for all of them.
        """
        raw = {
            name: estimated(self.rows, one, contrast=one.contrast, **self._options)
            for name, one in self.summaries.items()
        }
        return corrected(raw)

    @property
    def _options(self) -> dict[str, Any]:
        return {"seed": self.settings["seed"], "confidence": self.confidence}

    def __getitem__(self, name: str) -> Estimate:
        """The number of that name, such as "faithfulness"."""
        if name not in self.estimates:
            names = ", ".join(map(label, self.estimates))
            raise ParameterError(f"There is no number {name!r}; expected one of {names}.")
        return self.estimates[name]

    def summary(self) -> DataFrame:
        """One row per number: value, interval, corrected p-value, prompts, and how to read it."""
        import pandas as pd

        lines: list[dict[str, Any]] = []
        for name, number in self.estimates.items():
            scale = self.summaries[name].scale
            no_signal = math.nan if scale.no_signal is None else scale.no_signal
            words = {"better": scale.better, "meaning": scale.meaning, "reason": number.reason}
            lines.append({"number": name, **asdict(number), "p": number.p_holm, "no_signal": no_signal, **words})
        columns = ["value", "low", "high", "p", "n", "no_signal", "better", "meaning", "reason"]
        return pd.DataFrame(lines, columns=["number", *columns]).set_index("number")

    def minus(self, other: Evaluation) -> Mapping[str, Estimate]:
        """For every number that both have, this one minus the other's, on the prompts that both have, paired.

        `Estimate.is_clear` says whether a difference is significant: its interval leaves out 0, and its p-value, by a
        sign-flip test over prompts and corrected by Holm's method for all these numbers, is below 1 - confidence.

        Raises:
            ParameterError: the two are about different prompts (of one model, also different targets), or were
                measured with different settings.
        """
        self._check_comparable(other)
        shared = {name: summary for name, summary in self.summaries.items() if name in other.summaries}
        return corrected({name: paired(self.rows, other.rows, one, **self._options) for name, one in shared.items()})

    def _check_comparable(self, other: Evaluation) -> None:
        ours, theirs = to_jsonable(self.settings), to_jsonable(other.settings)
        for name in _SHARED:
            pair = ours.get(name), theirs.get(name)
            if name in ours and name in theirs and pair[0] != pair[1] and not (name == "judge" and None in pair):
                raise ParameterError(
                    f"The two evaluations have different settings: {name} is {pair[0]!r} and {pair[1]!r}; "
                    "expected the same. Evaluate both methods alike."
                )
        prompts = [to_jsonable([record["prompt"] for record in one.records]) for one in (self, other)]
        if prompts[0] != prompts[1]:
            raise ParameterError("The two evaluations are about different prompts; expected the same, in one order.")
        for mine, its in zip(self.records, other.records, strict=True):
            if self.model == other.model and mine["target"] and its["target"] and mine["target"] != its["target"]:
                raise ParameterError(
                    f"The two evaluations explain different targets of prompt {mine['index']}: {mine['target']!r} and "
                    f"{its['target']!r}; expected the same."
                )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON has; NaN becomes None."""
        return to_jsonable(
            {
                "format": "noiser.evaluation",
                "method": self.method,
                "model": self.model._asdict(),
                "metrics": self.metrics,
                "settings": self.settings,
                "confidence": self.confidence,
                "summary": self.summary().reset_index().to_dict("records"),
                "skipped": [skipped._asdict() for skipped in self.skipped],
                "rows": self.records,
            }
        )

    def dumps(self) -> str:
        """`to_dict` as JSON text."""
        return json_text(self.to_dict())

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON or, to a name that ends in .csv, `rows` as CSV; whole or not at all."""
        write_text(path, csv_text(self.rows) if Path(path).suffix == ".csv" else self.dumps())

    @property
    def _title(self) -> str:
        measured = sum(not record["error"] for record in self.records)
        return (
            f"{label(self.method)} on {label(self.model.name)}: {', '.join(map(label, self.metrics))}; "
            f"{measured} of {len(self.records)} prompts measured in full, profile {label(self.settings['profile'])}, "
            f"{self.confidence:.0%} intervals"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        """The printed table, its heading first."""
        cells = [("number", "value", "interval", "p", "n", "no signal", "better", "meaning")]
        lines: Any = self.summary()
        for line in lines.itertuples():
            p, no_signal = ("" if math.isnan(x) else f"{x:.2g}" for x in (line.p, line.no_signal))
            value, interval = numbers.number(line.value), numbers.interval(line.low, line.high)
            cells.append((label(line.Index), value, interval, p, str(line.n), no_signal, line.better, line.meaning))
        return cells

    def _notes(self) -> list[str]:
        """What is missing, one line each."""
        names: dict[str, list[str]] = {}
        for name, number in self.estimates.items():
            names.setdefault(number.reason, []).append(label(name))
        names.pop("", None)
        notes = [
            f"{'All numbers' if len(some) == len(self.estimates) else ', '.join(some)}: {reason}."
            for reason, some in names.items()
        ]
        notes += [f"Skipped: {len(self.skipped)}."] if self.skipped else []
        for example, prompt, metric, error in self.skipped[:_LISTED]:
            what = label(metric or "everything")
            notes.append(f"  prompt {example} ({label(str(prompt))[:60]}), {what}: {label(error)}")
        more = len(self.skipped) - _LISTED
        return notes + ([f"  and {more} more"] if more > 0 else [])

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([self._title, "", *lines, "", *self._notes()]).rstrip()

    def to_markdown(self) -> str:
        """Title, table and notes as Markdown, to be pasted into an issue or a page."""
        notes = (escaped_line(note.strip()) for note in self._notes())
        return "\n\n".join([escaped_line(self._title), table(self._cells()), *notes]) + "\n"

    def to_html(self) -> str:
        """Table and notes as HTML, in which every text is escaped."""
        head, *rows = [[escape(cell) for cell in row] for row in self._cells()]
        return html_table(head, rows, escape(self._title)) + "".join(f"<p>{escape(note)}</p>" for note in self._notes())

    def _repr_html_(self) -> str:
        return self.to_html()


def differences(evaluations: Mapping[str, Evaluation]) -> DataFrame:
    """The first of several evaluations minus each of the others, prompt by prompt: one line per other and number.

    Columns are other, number, value, low, high, n, reason, p, p_holm (corrected for all lines) and clear (see
    `Estimate.is_clear`).

    Args:
        evaluations: of the same prompts with the same settings, by name.

    Raises:
        ParameterError: as for `Evaluation.minus`.
    """
    import pandas as pd

    (_, first), *others = evaluations.items()
    gaps = {(name, number): gap for name, other in others for number, gap in first.minus(other).items()}
    lines = [
        {"other": other, "number": number, **asdict(gap), "clear": gap.is_clear}
        for (other, number), gap in corrected(gaps).items()
    ]
    return pd.DataFrame(lines).drop(columns="confidence", errors="ignore")
