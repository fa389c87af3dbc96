"""`Attribution`: the result of every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import figure, markdown, markup, schema, store
from noiser.attribution.aggregate import aggregate
from noiser.attribution.display import check_targets, label, method_text, shorten
from noiser.attribution.latex import latex
from noiser.attribution.normalize import normalize
from noiser.attribution.paths import through
from noiser.attribution.record import AttributionRecord, checked_places
from noiser.attribution.saved import SavedResult
from noiser.checks import check_count, random_state_kept
from noiser.files import write_if
from noiser.tensors import floats, integers
from noiser.types import Span, Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderResult


class TopUnit(NamedTuple):
    """A unit and its score for one target; the text has no whitespace around it, `index` is the
    column in `scores`.
    """

    text: str
    score: float
    index: int  # pyright: ignore[reportIncompatibleMethodOverride]
    span: Span


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution(AttributionRecord, SavedResult):
    """Which parts of the input made the model say that.

    Attributes:
        text: the prompt (for chat: the rendered template), followed by the continuation that was
            attributed.
        prompt_length: number of characters of `text` that are the prompt.
        scores: [targets, units], float32; raw, may be negative. NaN where the unit is not before
            the target.
        units: the unit of each column, in order.
        targets: the target of each row, in order.
        thresholds: [targets, units], the noise each unit tolerates; NaN where not searched. None
            but for Noiser.
        k_min: [targets], the smallest threshold, or NaN. None but for Noiser. The noise of each
            score is `info["k"]`.
        stderr: [targets, units], standard error of each score over the noise samples; None if there
            are none.
        pairs: units that decide only together, or of which either would do, for each target the
            largest first, from `joint`. `pandas.DataFrame(att.pairs)` is a table.
        without: for each target and unit, as in `without[0][3]`, what the model says without the
            unit: a `Without`, or None where that input was not run. `joint` and the methods that
            remove one unit at a time run them anyway; for other methods it is None, and
            `noiser.without` runs them.
        foil: the alternative token of a contrastive attribution, or None.
        unit, target_unit: kinds of units and targets, such as "token", "word", "spans", or "auto":
            of several sizes.
        method: versioned registry name, such as "noiser@2".
        parameters, seed: every hyper-parameter of the method, and the seed of the random numbers.
        model: identity of the model, to load it again.
        prompt: the caller's prompt: a text, or chat messages.
        versions: versions of noiser, torch and transformers.
        info: further results of the method, such as DeepLIFT's `delta`; "unasked" has the messages
            with tool results that speak for the target while the user's words do not.
    """

    def __eq__(self, other: object) -> bool:
        return (
            self.to_dict() == other.to_dict() if isinstance(other, Attribution) else NotImplemented
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def top(self, k: int = 5, target: int = 0) -> list[TopUnit]:
        """The `k` units of highest score for a target, best first. Raises ParameterError without
        such a target.
        """
        check_count("k", k)
        (target,) = check_targets(self, [target])
        row = self.scores[target]
        best_first = row.nan_to_num(-torch.inf).argsort(descending=True, stable=True)
        order = integers(best_first)
        with_score = [index for index in order if not row[index].isnan()]
        top: list[TopUnit] = []
        for index in with_score[:k]:
            span = self.units[index]
            top.append(TopUnit(span.text.strip() or span.text, float(row[index]), index, span))
        return top

    def normalized(self, kind: str = "sum") -> Float[Tensor, "targets units"]:
        """Scores made comparable between targets and methods, as a new tensor.

        Each row is normalised by itself over the units that have a score; the others stay NaN. With
        s the scores: "sum" s/Σs (the paper's choice), "positive" max(s, 0)/Σmax(s, 0), "abs_sum"
        |s|/Σ|s|, "minmax" (s - min)/(max - min), "softmax", "none". A row whose denominator is 0
        becomes uniform.
        """
        return normalize(self.scores, kind)

    def aggregate(self, unit: Unit | str = "word", reduce: str = "sum") -> Attribution:
        """The same attribution over coarser units.

        A unit goes to the word or sentence that holds its last visible character, and to the span
        or source that has most of its visible characters. Prompt and continuation are never joined;
        special tokens stay alone. A score is NaN where a part is. Thresholds are the smallest of
        the parts, standard errors those of independent parts, or None for "max".

        Args:
            unit: "word", "sentence", "line", "paragraph", "source" (if the attribution has
                sources), or (start, end) character spans of `text`; units in no span are left out.
            reduce: "sum", "mean" or "max".

        Raises:
            UnitError: bad spans, or units that are not parts of the wanted ones. UnknownNameError:
                a wrong name.
        """
        return aggregate(self, unit, reduce)

    def through(self) -> Attribution:
        """The influence of the prompt on each target by way of the continuation in between (CAGE,
        arXiv 2512.15663).

        max(s, 0), each row divided by its sum, are the weights of a graph; the influence of a
        prompt unit on a target is the sum over all paths between the two, which `to_html` draws.
        The result has the prompt's units alone; `info["through"]` has the weights between targets,
        [targets, targets].

        Raises:
            ParameterError: the continuation has no units, or a unit of it is not inside one target,
                as sentences are.
        """
        return through(self)

    def to_dataframe(self) -> DataFrame:
        """One row per target and unit, in that order; NaN where there is no value."""
        import pandas as pd

        units = [*enumerate(self.units)]
        rows = [
            (row, t.text, i, *unit[:3]) for row, t in enumerate(self.targets) for i, unit in units
        ]
        frame = pd.DataFrame(
            rows, columns=["target_index", "target", "unit_index", "unit", "start", "end"]
        )
        k_min = None if self.k_min is None else self.k_min[:, None]
        columns = {
            "score": self.scores,
            "stderr": self.stderr,
            "threshold": self.thresholds,
            "k_min": k_min,
        }
        for name, values in columns.items():
            if values is None:
                frame[name] = torch.nan
            else:
                frame[name] = floats(values.expand(self.scores.shape).flatten())
        return frame

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file as plain dicts, lists, texts and numbers, with None for
        NaN.
        """
        return schema.to_dict(self)

    def to_json(self) -> str:
        """The text of the saved file: a line for each unit, target and row of numbers."""
        return schema.dumps(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attribution:
        """The attribution whose `to_dict` gave the data. Raises StoredFileError where `load`
        does.
        """
        att = store.restored(cls, Literal["noiser.attribution"], data)
        checked_places(att)
        return att

    def to_html(
        self, path: str | PathLike[str] | None = None, *, targets: Sequence[int] | None = None
    ) -> str:
        """A complete page without network and scripts, of some targets or as many as a browser
        shows without delay.
        """
        return write_if(markup.page([self], targets), path)

    def to_text(self) -> str:
        """Aligned tables of scores with bars, without colours."""
        return _terminal().to_text([self], plain=True)

    def to_markdown(self) -> str:
        """A Markdown table of the scores for each target."""
        return markdown.markdown(self)

    def to_latex(self) -> str:
        """A table of the scores for each target, for a paper; it needs booktabs."""
        return latex(self)

    def plot(
        self, *others: Attribution, target: int = 0, width: float = 6.5, pairs: bool = False
    ) -> Figure:
        """A figure for a paper with matplotlib: the text with its colours and a colour scale.

        Args:
            others: attributions of the same prompt by other methods, shown below this one, each
                with its own scale.
            target: index of the target; below 0 it counts from the end.
            width: in inches, at most: 6.5 for a page, 3.3 for one of two columns.
            pairs: whether arcs join the units of pairs, dashed where either would do.
        """
        return figure.figure([self, *others], target, width, pairs=pairs)

    def _repr_html_(self) -> str:
        return markup.fragment([self])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _terminal().sections([self], console)

    def __str__(self) -> str:
        return _terminal().to_text([self])

    def __repr__(self) -> str:
        texts = (
            shorten(self.text[: self.prompt_length], 50),
            "".join(target.text for target in self.targets),
        )
        shape = f"{len(self.targets)} × {len(self.units)} {self.unit}"
        facts = ", ".join(map(label, (method_text(self), self.model.name, shape)))
        return f"Attribution({texts[0]!r} → {texts[1]!r}, {facts})"


def _terminal() -> Any:
    """The module, which imports rich, when it is needed."""
    with random_state_kept():
        from noiser.attribution import terminal
    return terminal
