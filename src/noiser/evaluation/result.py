"""The result of an evaluation: numbers, intervals, one row per prompt, and what was skipped."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from noiser.attribution.display import label
from noiser.attribution.store import to_jsonable
from noiser.errors import ParameterError
from noiser.evaluation import store
from noiser.evaluation.display import View, as_html, as_markdown, as_page, as_text, view
from noiser.evaluation.examples import Skipped
from noiser.files import json_text, write_text
from noiser.metrics.bootstrap import INFLUENTIAL, Estimate, corrected, difference, estimate, without_influential
from noiser.metrics.metric import Summary
from noiser.types import ModelIdentity

if TYPE_CHECKING:
    from pandas import DataFrame


_SHARED = (
    "profile", "unit", "max_new_tokens", "target_unit", "normalization",
    "masks", "rates", "draws", "removal", "k", "judge",
)  # fmt: skip
"""Settings that numbers must share to be compared; a file may lack some, and an evaluation may have no judge."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of `noiser.evaluate`.

    Attributes:
        records: one mapping per prompt, skipped ones included: "index", "prompt", "method", "target", "probability",
            "units", "error", and what the metrics measured.
        skipped: what could not be measured, and why.
        metrics: versioned names of the metrics.
        summaries: what the numbers over prompts are made of, by name.
        method: versioned name of the method (of the first attribution, if the caller gave attributions).
        model: what is needed to load the same model again.
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

    @property
    def rows(self) -> DataFrame:
        """The records as a table, one row per prompt."""
        import pandas as pd

        return pd.DataFrame([dict(record) for record in self.records])

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        """The numbers over prompts with their intervals, by name.

        Those that are differences from a reference have a p-value, corrected by Holm's method for all of them.
        """
        return corrected(
            {
                name: self._estimate(summary.statistic, self._columns(summary), contrast=summary.contrast)
                for name, summary in self.summaries.items()
            }
        )

    def __getitem__(self, name: str) -> Estimate:
        """The number of that name, such as "faithfulness"."""
        if name not in self.estimates:
            known = ", ".join(map(label, self.estimates))
            raise ParameterError(f"There is no number {name!r}; expected one of {known}.")
        return self.estimates[name]

    def summary(self) -> DataFrame:
        """One row per number: value, interval, corrected p-value, prompts, and how to read it.

        The column `without_3` is the value without the three prompts that, each left out alone, move it most.
        """
        import pandas as pd

        return pd.DataFrame(self._lines()).set_index("number")

    def _lines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = []
        for name, number in self.estimates.items():
            summary = self.summaries[name]
            scale = summary.scale
            lines.append(
                {
                    "number": name,
                    "value": number.value,
                    "low": number.low,
                    "high": number.high,
                    "p": number.p_holm,
                    f"without_{INFLUENTIAL}": without_influential(summary.statistic, *self._columns(summary)).value,
                    "n": number.n,
                    "no_signal": math.nan if scale.no_signal is None else scale.no_signal,
                    "better": scale.better,
                    "meaning": scale.meaning,
                    "reason": number.reason,
                }
            )
        return lines

    def minus(self, other: Evaluation) -> Mapping[str, Estimate]:
        """For every number that both have, this one minus the other's, on the prompts that both have, paired.

        `Estimate.is_clear` says whether a difference can be believed: its interval leaves out 0, and its p-value, by a
        sign-flip test over prompts and corrected by Holm's method for all these numbers, is below 1 - confidence.

        Raises:
            ParameterError: the two are about different prompts (of one model, also different targets), or were
                measured with different settings.
        """
        ours, theirs = to_jsonable(self.settings), to_jsonable(other.settings)
        for name in _SHARED:
            if name == "judge" and None in (ours.get(name), theirs.get(name)):
                continue
            if name in ours and name in theirs and ours[name] != theirs[name]:
                raise ParameterError(
                    f"The two evaluations have different settings: {name} is {ours[name]!r} and {theirs[name]!r}; "
                    "expected the same. Evaluate both methods alike."
                )
        if self._prompts() != other._prompts():
            raise ParameterError(
                "The two evaluations are about different prompts; expected the same prompts in the same order. "
                "Evaluate both methods on the same examples."
            )
        for mine, its in zip(self.records, other.records, strict=True):
            if self.model == other.model and mine["target"] and its["target"] and mine["target"] != its["target"]:
                raise ParameterError(
                    f"The two evaluations explain different targets of prompt {mine['index']}: {mine['target']!r} and "
                    f"{its['target']!r}; expected the same. Evaluate both methods on the same examples."
                )
        gaps: dict[str, Estimate] = {}
        for name, summary in self.summaries.items():
            if name in other.summaries:
                columns = [*self._columns(summary), *other._columns(summary)]
                gaps[name] = self._estimate(difference(summary.statistic), columns, contrast=True)
        return corrected(gaps)

    def _prompts(self) -> list[Any]:
        """As JSON has them: a chat is the same as a list or as a tuple of messages."""
        return to_jsonable([record["prompt"] for record in self.records])

    def _columns(self, summary: Summary) -> list[list[float]]:
        return [[float(record.get(column, math.nan)) for record in self.records] for column in summary.columns]

    def _estimate(self, statistic: Any, columns: Sequence[Sequence[float]], *, contrast: bool) -> Estimate:
        settings: dict[str, Any] = {"seed": self.settings["seed"], "confidence": self.confidence}
        return estimate(statistic, *columns, contrast=contrast, **settings)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON has; NaN becomes None."""
        return to_jsonable(
            {
                "format": store.FORMAT,
                "schema": store.SCHEMA,
                "method": self.method,
                "model": self.model._asdict(),
                "metrics": self.metrics,
                "settings": self.settings,
                "confidence": self.confidence,
                "summary": self._lines(),
                "skipped": [skipped._asdict() for skipped in self.skipped],
                "rows": self.records,
            }
        )

    def dumps(self) -> str:
        """The JSON text that `save` writes."""
        return json_text(self.to_dict())

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON, whole or not at all."""
        write_text(path, self.dumps())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Evaluation:
        """Reads what `save` wrote, to be shown, or compared with another one by `minus`; intervals are computed again.

        Raises:
            StoredFileError: the file is damaged, of another schema, or not a saved evaluation.
            UnknownNameError: it has a metric of a package that is not installed.
            OSError: the file cannot be opened.
        """
        return cls(**store.read(path))

    def _view(self) -> View:
        measured = len({record["index"] for record in self.records if not record["error"]})
        title = (
            f"{label(self.method)} on {label(self.model.name)}: {', '.join(map(label, self.metrics))}; "
            f"{measured} of {len(self.records)} prompts measured in full, profile {label(self.settings['profile'])}, "
            f"{self.confidence:.0%} intervals"
        )
        return view(title, self._lines(), self.skipped)

    def __str__(self) -> str:
        return as_text(self._view())

    def to_html(self, *, page: bool = False) -> str:
        """A table, or a complete page with it; every text is escaped."""
        return (as_page if page else as_html)(self._view())

    def to_markdown(self) -> str:
        """A Markdown table, to be pasted into an issue or a page."""
        return as_markdown(self._view())

    def _repr_html_(self) -> str:
        return self.to_html()
