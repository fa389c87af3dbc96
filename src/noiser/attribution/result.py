"""`Attribution`: the result of every method, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution import figure, html, inseq, reasoning, store, through
from noiser.attribution.aggregate import aggregate
from noiser.attribution.display import label, method_text
from noiser.attribution.markdown import markdown
from noiser.attribution.normalize import normalize
from noiser.attribution.record import AttributionRecord
from noiser.checks import random_state_kept
from noiser.files import write_text
from noiser.types import Unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, kw_only=True, eq=False)
class Attribution(AttributionRecord):
    """Which parts of the input made the model say that.

    Attributes:
        text: the prompt (for chat: the rendered template), followed by the continuation that was attributed.
        prompt_length: number of characters of `text` that are the prompt.
        scores: [targets, units], float32; raw, may be negative. NaN where the unit is not before the target.
        units: what each column belongs to, in order.
        targets: what each row explains, in order.
        thresholds: [targets, units], the noise each unit tolerates; NaN where not searched. None for methods
            other than Noiser.
        k_min: [targets], the smallest threshold; NaN where it was not searched for. None for methods other than
            Noiser. The noise that each score was made with is `info["k"]`.
        stderr: [targets, units], standard error of each score over the noise samples; None if there are none.
        foil: the alternative token of a contrastive attribution, or None.
        unit: "token", "word", "sentence", "turn", "source", "spans", or "auto": of several sizes.
        target_unit: what a target is: "token", "word", "sentence", "all" or "spans".
        method: versioned registry name, such as "noiser@2".
        parameters: every hyper-parameter of the method.
        seed: seed of the random numbers.
        model: what is needed to load the same model again.
        prompt: the prompt as it was given: a text, or chat messages.
        versions: versions of noiser, torch and transformers.
        info: what else the method reports, such as DeepLIFT's `delta`.
    """

    def normalized(self, kind: str = "sum") -> Float[Tensor, "targets units"]:
        """Scores made comparable between targets and methods, as a new tensor.

        Each row is normalised by itself over the units that have a score; the others stay NaN. With s the scores:
        "sum" s/Σs (the paper's choice), "positive" max(s, 0)/Σmax(s, 0), "abs_sum" |s|/Σ|s|, "minmax"
        (s - min)/(max - min), "softmax", "none". A row whose denominator is 0 becomes uniform.

        Raises:
            UnknownNameError: another kind.
            NumericalError: a score is infinite.
        """
        return normalize(self.scores, kind)

    def aggregate(self, unit: Unit | str = "word", reduce: str = "sum") -> Attribution:
        """The same attribution over coarser units.

        A unit goes to the word or sentence that holds its last visible character, and to the span or source that has
        most of its visible characters. Units of the prompt and of the continuation are never joined, and special tokens
        and a template's stay alone. A score is NaN where any of its parts is.

        Args:
            unit: "word", "sentence", "source" (those that the attribution was given), or (start, end) character spans
                of `text`; units in no span are left out. Of `unit="auto"`, "word" and "sentence" can be made if no unit
                holds several of them.
            reduce: "sum", "mean", "max", "min", "abs_max" (the score of largest magnitude, with its sign) or "l2".

        Returns:
            A new record. Its thresholds are the smallest of the parts. Its standard errors are the root of the sum
            of squares for "sum", that divided by the number of parts for "mean", as if the parts' errors were
            independent, and None otherwise. `info["aggregated"]` says what was done; the rest of `info` still belongs
            to the finer units, including lists such as `info["k"]`.

        Raises:
            UnitError: spans that overlap, are empty, leave the text, join prompt and continuation or hold no unit;
                or the present units are coarser than the wanted ones.
            UnknownNameError: an unknown unit or reduction.
        """
        return aggregate(self, unit, reduce)

    def through(self) -> Attribution:
        """What the prompt has to do with each target by way of the continuation in between.

        With units and targets of the same text, such as `unit="sentence"` and `target_unit="sentence"`, the scores say
        which sentences each sentence was written from. max(s, 0), each row divided by its sum, are the weights of a
        graph, and a prompt unit's influence on a target is the sum over all paths between the two (CAGE, arXiv
        2512.15663); see `noiser.attribution.through`. A row sums to 1 where every sentence on its paths has a positive
        score. No model is run.

        Returns:
            A new record of the prompt's units alone, whose scores are these influences. It has no standard errors and
            no thresholds; `info["through"]` has the weights of the edges between targets, [targets, targets].

        Raises:
            ParameterError: the continuation has no units, or a unit of it is not inside one target. A character of
                several tokens is shared by their targets.
        """
        graph = through.paths(self)
        return replace(
            self,
            scores=through.influence(graph).float(),
            units=tuple(self.units[column] for column in graph.columns),
            thresholds=None,
            k_min=None,
            stderr=None,
            info={**self.info, "through": graph.generated.tolist()},
        )

    def to_dataframe(self) -> DataFrame:
        """One row per target and unit, in that order; NaN where there is no value.

        Columns: target_index, target, unit_index, unit, start, end, score, stderr, threshold, k_min.
        """
        import pandas as pd

        def column(values: Tensor | None) -> list[float]:
            missing = self.scores.new_tensor(torch.nan) if values is None else values
            return missing.expand(self.scores.shape).flatten().tolist()

        pairs = list(product(range(len(self.targets)), range(len(self.units))))
        return pd.DataFrame(
            {
                "target_index": [row for row, _ in pairs],
                "target": [self.targets[row].text for row, _ in pairs],
                "unit_index": [index for _, index in pairs],
                "unit": [self.units[index].text for _, index in pairs],
                "start": [self.units[index].start for _, index in pairs],
                "end": [self.units[index].end for _, index in pairs],
                "score": column(self.scores),
                "stderr": column(self.stderr),
                "threshold": column(self.thresholds),
                "k_min": column(None if self.k_min is None else self.k_min[:, None]),
            }
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON (docs/schema.md): the whole file or, on failure, nothing.

        Raises:
            OSError: the file cannot be written. What was there before still is.
        """
        write_text(path, store.dumps(self))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Attribution:
        """Reads what `save` wrote; scores come back exactly.

        Raises:
            StoredFileError: the file is damaged, of a newer schema, or not a saved attribution.
            OSError: the file cannot be opened.
        """
        return cls(**store.read(path))

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes, as plain dicts, lists, texts and numbers, with None for NaN."""
        return store.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attribution:
        """The record that `to_dict` was given. Raises StoredFileError where `load` does."""
        return cls(**store.from_dict(data))

    def to_inseq(self) -> Any:
        """The same scores as Inseq's `FeatureAttributionOutput`, for its heat maps, aggregators and files.

        A unit of the prompt is one token of Inseq's; text in no unit, such as a chat template, is a token without
        scores. A unit of several continuation tokens gives each of them an equal share. Everything else goes along in
        `info["noiser"]`, so that `from_inseq` brings the whole record back, unless Inseq has changed tokens or scores.

        Raises:
            DependencyError: Inseq is not installed.
        """
        return inseq.to_inseq(self)

    @classmethod
    def from_inseq(cls, source: Any, index: int = 0) -> Attribution:
        """A result of Inseq as an attribution, to be shown, saved and measured like any other.

        Scores keep Inseq's values; of gradient methods each token has the L2 norm over the embedding's dimensions, of
        attention the mean over layers and heads, as Inseq shows them, but not normalised. Every token is a unit,
        special tokens too; pieces of one character are one unit with the sum of their scores. What Inseq does not keep
        is NaN (probabilities, unless it ran with `step_scores=["probability"]`), 0 (ranks) or "unknown".

        Args:
            source: Inseq's `FeatureAttributionOutput` of a decoder-only model, or the path of a file that its `save`
                wrote (.json, compressed or not), for which Inseq need not be installed.
            index: which of its sequences.

        Raises:
            ParameterError: something else, of an encoder-decoder model, or no such sequence.
            StoredFileError: the file is damaged, or not a file of Inseq. OSError: it cannot be opened.
        """
        return cls(**inseq.from_inseq(source, index))

    def to_html(self, path: str | PathLike[str] | None = None, *, targets: Sequence[int] | None = None) -> str:
        """A complete page: no network, no scripts, every token escaped.

        Args:
            path: if given, the page is also written to this file.
            targets: indices of the targets to show; those below 0 count from the end. None for all; of a very long
                continuation, for the first ones, as many as a browser shows without delay, and the page says so.

        Raises:
            ParameterError: there is no such target. OSError: the file cannot be written.
        """
        page = html.page(self, targets)
        if path is not None:
            write_text(path, page)
        return page

    def to_markdown(self) -> str:
        """A Markdown table of the scores for each target, to be pasted into an issue or a page."""
        return markdown(self)

    def plot(self, *others: AttributionRecord, target: int = 0, width: float = 6.5) -> Figure:
        """A figure for a paper: the text with its colours and a colour scale, with matplotlib.

        `att.plot().savefig("figure.pdf")` writes it as vector graphics with real text. Fonts are those of
        `matplotlib.rcParams`. A notebook shows it after `%matplotlib inline`. Words of Arabic and Hebrew are set from
        right to left; letters are not joined across two tokens, and matplotlib before 3.11 neither orders nor joins
        those of one token.

        Args:
            others: attributions of the same prompt, by other methods, shown below this one. Each has a scale of its
                own, as methods have no common unit.
            target: index of the target; below 0 it counts from the end.
            width: in inches: 6.5 for a page, 3.3 for one of two columns. The height follows from the text.

        Raises:
            DependencyError: matplotlib is not installed.
            ParameterError: different prompts, or no such target.
        """
        return figure.figure([self, *others], target, width)

    def plot_through(self, *, target: int = -1, width: float = 6.5, least: float = 0.05) -> Figure:
        """The graph of `through` as a figure: the prompt's units and what was written, and how they lead to a target.

        One line for each unit of the prompt and each target up to the one that is asked about, in order. Arcs lead from
        a line to those that were written from it, as thick as the part of the paths to the target that goes that
        way. The number before a line is that part for all arcs that leave it: for a line of the prompt its score in
        `through`.

        Args:
            target: index of the target that the graph leads to; -1 for the last.
            width: in inches; the height follows from the number of lines.
            least: arcs that carry a smaller part are left out.

        Raises:
            DependencyError: matplotlib is not installed.
            ParameterError: no such target, or what `through` raises.
        """
        return reasoning.reasoning_figure(self, target, width, least)

    def _repr_html_(self) -> str:
        return html.fragment(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with random_state_kept():
            from noiser.attribution import terminal  # rich is imported when it is needed

        return terminal.render(self, console, options)

    def __str__(self) -> str:
        with random_state_kept():
            from noiser.attribution import terminal

        return terminal.to_text(self)

    def __repr__(self) -> str:
        prompt = self.text[: self.prompt_length]
        prompt = prompt if len(prompt) <= 50 else prompt[:49] + "…"
        continuation = "".join(target.text for target in self.targets)
        names = ", ".join(label(name) for name in (method_text(self), self.model.name))
        shape = f"{len(self.targets)} × {len(self.units)} {label(self.unit)}"
        return f"Attribution({prompt!r} → {continuation!r}, {names}, {shape})"
