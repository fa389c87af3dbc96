"""Several methods on the same prompts: the first against each of the others, prompt by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from noiser.attribution.display import label
from noiser.attribution.store import to_jsonable
from noiser.errors import ParameterError
from noiser.evaluation.display import View, as_html, as_markdown, as_page, as_text, interval_text, number_text
from noiser.evaluation.result import Evaluation
from noiser.files import json_text
from noiser.metrics.bootstrap import Estimate, corrected


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """The first of several evaluations against each of the others.

    Attributes:
        evaluations: of the same prompts with the same settings, by names that tell them apart; two or more.

    Raises:
        ParameterError: there are fewer than two, or (when asked for differences) prompts or settings differ.
    """

    evaluations: Mapping[str, Evaluation]

    def __post_init__(self) -> None:
        if len(self.evaluations) < 2:
            raise ParameterError(f"Got {len(self.evaluations)} evaluation; expected two or more, to be compared.")

    @cached_property
    def differences(self) -> Mapping[tuple[str, str], Estimate]:
        """The first evaluation minus another one, by the other's name and the number's.

        Paired, with p-values by sign-flip tests, corrected by Holm's method for all differences together; see
        `Evaluation.minus`.
        """
        (_, first), *others = self.evaluations.items()
        return corrected({(name, number): gap for name, other in others for number, gap in first.minus(other).items()})

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON has; NaN becomes None."""
        differences = [
            {
                "other": other,
                "number": number,
                "value": gap.value,
                "low": gap.low,
                "high": gap.high,
                "p": gap.p,
                "p_holm": gap.p_holm,
                "clear": gap.is_clear,
                "n": gap.n,
                "reason": gap.reason,
            }
            for (other, number), gap in self.differences.items()
        ]
        evaluations = {name: evaluation.to_dict() for name, evaluation in self.evaluations.items()}
        return to_jsonable({"evaluations": evaluations, "differences": differences})

    def dumps(self) -> str:
        """`to_dict` as JSON text."""
        return json_text(self.to_dict())

    @property
    def _view(self) -> View:
        name, one = next(iter(self.evaluations.items()))
        first = label(name)
        rows = [("number", "minus", "difference", "interval", "Holm's p", "n", "clear")]
        for (other, number), gap in self.differences.items():
            p = "" if math.isnan(gap.p_holm) else f"{gap.p_holm:.2g}"
            numbers = (number_text(gap.value, gap.low, gap.high), interval_text(gap.low, gap.high), p, str(gap.n))
            rows.append((label(number), label(other), *numbers, "yes" if gap.is_clear else ""))
        notes = [
            f"Above 0: the number of {first} is larger. Clear: the interval leaves out 0, and p, by a paired sign-flip "
            f"test and corrected for all these differences (Holm), is below {1 - one.confidence:.2g}.",
            *dict.fromkeys(f"{reason}." for gap in self.differences.values() if (reason := gap.reason)),
        ]
        return View(f"{first} minus each other method, prompt by prompt", rows, notes)

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.evaluations.values()), as_text(self._view)])

    def to_html(self, *, page: bool = False) -> str:
        """Every evaluation's table, then the differences; or a complete page with them. Every text is escaped."""
        parts = [evaluation.to_html() for evaluation in self.evaluations.values()]
        return as_page(self._view, *parts) if page else "".join([*parts, as_html(self._view)])

    def to_markdown(self) -> str:
        """Every evaluation's table, then the differences, as Markdown."""
        return "\n".join([*(each.to_markdown() for each in self.evaluations.values()), as_markdown(self._view)])
