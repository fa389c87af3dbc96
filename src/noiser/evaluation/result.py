"""What an evaluation found: numbers, intervals, a row a prompt, and what was skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

from noiser.errors import ParameterError
from noiser.metrics.bootstrap import Estimate, estimate
from noiser.metrics.metric import Summary
from noiser.types import ModelIdentity, Prompt

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Evaluation", "Skipped"]

FORMAT = "noiser.evaluation"
SCHEMA = 1

_SHARED = ("profile", "unit", "max_new_tokens", "normalization", "masks", "rates")
"""Settings that numbers must share to be compared; a file may lack some."""


class Skipped(NamedTuple):
    """Something that could not be measured.

    Attributes:
        example: its place among the examples.
        prompt: its prompt.
        metric: what is missing; None when the prompt could not be attributed, so that everything is.
        error: why, with the type of the error.
    """

    example: int
    prompt: Prompt
    metric: str | None
    error: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of `noiser.evaluate`.

    Attributes:
        records: one mapping a prompt, skipped ones included: "index", "prompt", "method", "target", "probability",
            "units", "error", and what the metrics measured.
        skipped: what could not be measured, and why.
        metrics: versioned names of the metrics.
        summaries: what the numbers over prompts are made of, by name.
        method: versioned name of the method (of the first attribution, if the caller gave attributions).
        model: what is needed to load the same model again.
        settings: seed, masks, normalization, rates, judge, profile, unit, max_new_tokens, and `parameters`: every
            hyper-parameter of the method.
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
        """The records as a table, one row a prompt."""
        import pandas as pd

        return pd.DataFrame([dict(record) for record in self.records])

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        """The numbers over prompts with their intervals, by name."""
        return {
            name: self._estimate(summary.statistic, self._columns(summary)) for name, summary in self.summaries.items()
        }

    def __getitem__(self, name: str) -> Estimate:
        """The number of that name, such as "faithfulness"."""
        if name not in self.estimates:
            raise ParameterError(f"There is no number {name!r}; expected one of {', '.join(self.estimates)}.")
        return self.estimates[name]

    def summary(self) -> DataFrame:
        """One row a number: value, interval, prompts, and how to read it."""
        import pandas as pd

        return pd.DataFrame([self._line(name, found) for name, found in self.estimates.items()]).set_index("number")

    def _line(self, name: str, found: Estimate) -> dict[str, Any]:
        scale = self.summaries[name].scale
        return {
            "number": name,
            "value": found.value,
            "low": found.low,
            "high": found.high,
            "n": found.n,
            "no_signal": math.nan if scale.no_signal is None else scale.no_signal,
            "better": {True: "higher", False: "lower", None: ""}[scale.higher_is_better],
            "meaning": scale.meaning,
            "reason": found.reason,
        }

    def minus(self, other: Evaluation) -> Mapping[str, Estimate]:
        """For every number that both have, this one minus the other's, on the prompts that both have, paired.

        Raises:
            ParameterError: the two are about different prompts, or were measured with different settings.
        """
        own, others = self._shared(), other._shared()
        for name in own:
            if name in others and own[name] != others[name]:
                raise ParameterError(
                    f"The two evaluations have different settings: {name} is {own[name]!r} and {others[name]!r}; "
                    "expected the same. Evaluate both methods alike."
                )
        if self._prompts() != other._prompts():
            raise ParameterError(
                "The two evaluations are about different prompts; expected the same prompts in the same order. "
                "Evaluate both methods on the same examples."
            )
        found: dict[str, Estimate] = {}
        for name in self.summaries.keys() & other.summaries.keys():
            summary = self.summaries[name]
            own, others = self._columns(summary), other._columns(summary)

            def gap(*columns: Any, summary: Summary = summary) -> Any:
                count = len(summary.columns)
                return summary.statistic(*columns[:count]) - summary.statistic(*columns[count:])

            found[name] = self._estimate(gap, [*own, *others])
        return {name: found[name] for name in self.summaries if name in found}

    def _prompts(self) -> list[Any]:
        """As JSON has them: a chat is the same as a list or as a tuple of messages."""
        from noiser.attribution.store import plain

        return plain([record["prompt"] for record in self.records])

    def _shared(self) -> dict[str, Any]:
        from noiser.attribution.store import plain

        return {name: plain(self.settings[name]) for name in _SHARED if name in self.settings}

    def _columns(self, summary: Summary) -> list[list[float]]:
        return [[float(record.get(column, math.nan)) for record in self.records] for column in summary.columns]

    def _estimate(self, statistic: Any, columns: Sequence[Sequence[float]]) -> Estimate:
        return estimate(statistic, *columns, seed=self.settings["seed"], confidence=self.confidence)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON has; NaN becomes None."""
        from noiser.attribution.store import plain

        return plain(
            {
                "format": FORMAT,
                "schema": SCHEMA,
                "method": self.method,
                "model": self.model._asdict(),
                "metrics": self.metrics,
                "settings": self.settings,
                "confidence": self.confidence,
                "summary": [self._line(name, found) for name, found in self.estimates.items()],
                "skipped": [skipped._asdict() for skipped in self.skipped],
                "rows": self.records,
            }
        )

    def dumps(self) -> str:
        """The JSON text that `save` writes."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON, whole or not at all."""
        from noiser.files import write_text

        write_text(path, self.dumps())

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Evaluation:
        """Reads what `save` wrote, to be shown, or compared with another one by `minus`; intervals are computed again.

        Raises:
            StoredFileError: the file is damaged, of another schema, or no saved evaluation.
            UnknownNameError: it has a metric of a package that is not installed.
            OSError: the file cannot be opened.
        """
        from noiser.evaluation.restore import load

        return load(path)

    def __str__(self) -> str:
        from noiser.evaluation.display import as_text

        return as_text(self)

    def to_html(self) -> str:
        """A table, with every text escaped."""
        from noiser.evaluation.display import as_html

        return as_html(self)

    def _repr_html_(self) -> str:
        return self.to_html()
