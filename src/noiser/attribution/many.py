"""Attributions of many prompts as one list, with means over prompts, a table and a page."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal, SupportsIndex, cast, get_args, overload

import torch
from jaxtyping import Float
from pydantic import BaseModel, BeforeValidator, ConfigDict
from torch import Tensor

from noiser.attribution import markdown, markup
from noiser.attribution.display import aligned, label, provenance
from noiser.attribution.normalize import normalize
from noiser.attribution.result import Attribution
from noiser.attribution.saved import SavedResult
from noiser.attribution.speakers import chat_messages, message_places
from noiser.attribution.store import restored
from noiser.checks import check_choice
from noiser.errors import ParameterError, UnitError
from noiser.files import write_if
from noiser.html import html_table
from noiser.notices import warn
from noiser.numbers import number_format
from noiser.types import Span

if TYPE_CHECKING:
    from pandas import DataFrame

Group = Literal["word", "role", "source", "position"]
"""What units of several prompts have in common."""

MAX_GROUPS = 60
"""Lines of a table: those with the largest means."""


class Attributions(SavedResult, list[Attribution]):
    """The attributions of many prompts, in the order of the prompts.

    A list, which also has means over prompts. A part of it, such as `results[:10]`, has them too.

    Example:
        >>> results = noiser.attribute(lm, prompts, unit="word")  # doctest: +SKIP
        >>> results.mean_by("word").head()  # doctest: +SKIP
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Attribution: ...

    @overload
    def __getitem__(self, index: slice) -> Attributions: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Attribution | Attributions:
        if isinstance(index, slice):
            return Attributions(super().__getitem__(index))
        return super().__getitem__(index)

    def to_dataframe(self) -> DataFrame:
        """The rows of each attribution's own `to_dataframe`, with `prompt_index` in front."""
        import pandas as pd

        frames: list[DataFrame] = []
        for prompt_index, att in enumerate(self):
            frame = att.to_dataframe()
            frame.insert(0, "prompt_index", prompt_index)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    def mean_by(self, group: Group = "word", normalization: str | None = None) -> DataFrame:
        """The mean score of each group of units over the prompts that have it.

        In a prompt, the scores of a group's units are added up, for each target; the prompt counts
        once, with its mean over targets. Units of the continuation and units without a score are
        left out. Raw scores of different prompts may differ in size; `normalization` makes each row
        comparable first.

        Args:
            group: "word": units with the same word, whatever its case; tokens are joined to words.
                "role": the role of the chat's message. "source": the source's title, or its number.
                "position": the unit's place in its prompt, 1 for the first.
            normalization: of each target's scores; see `Attribution.normalized`. None: raw scores,
                unless they are of several methods or units. Those of `joint` are in nats where a
                target has several tokens, and in no unit where it has one. Then each prompt's
                shares of its absolute scores are averaged, "abs_sum", and a warning says so.

        Returns:
            One row per group: the group, `mean`, `stderr` (over prompts; NaN for one prompt) and
            `prompts`, how many prompts have it. The largest means come first; positions are in
            their order.

        Raises:
            UnknownNameError: no such group or normalization.
            UnitError: units are not parts of words.
            ParameterError: no prompt is a chat, or none has sources.
        """
        check_choice("group", group, get_args(Group))
        normalization, note = self._comparable(normalization)
        if note:
            warn(f"The means are of {note}.")
        return self._means(group, normalization)

    def _comparable(self, normalization: str | None) -> tuple[str, str]:
        """The normalization, and a note of why it is one where none was asked for."""
        kinds: dict[str, None] = {}
        for att in self:
            for unit in att.info.get("score_units") or [""]:
                kinds[f"{att.method} in {unit}" if unit else att.method] = None
        if normalization is not None or len(kinds) < 2:
            return normalization or "none", ""
        return "abs_sum", (
            f"shares of each prompt's absolute scores, because scores of {' and '.join(kinds)} "
            "have no common unit"
        )

    def _means(self, group: Group, normalization: str) -> DataFrame:
        """As `mean_by`."""
        import pandas as pd

        values: dict[str | int, list[float]] = {}
        for att in self:
            for key, value in _sums(att, group, normalization).items():
                values.setdefault(key, []).append(value)
        if self and not values:
            raise ParameterError(_WITHOUT[group])
        rows: list[tuple[str | int, float, float, int]] = []
        for key, found in values.items():
            numbers = torch.tensor(found, dtype=torch.float64)
            count = len(found)
            error = float(numbers.std()) / count**0.5 if count > 1 else math.nan
            rows.append((key, float(numbers.mean()), error, count))
        if group == "position":
            rows.sort(key=lambda row: row[0])
        else:
            rows.sort(key=lambda row: -row[1])  # the largest mean first
        return pd.DataFrame(rows, columns=[group, "mean", "stderr", "prompts"])

    def to_html(
        self,
        path: str | PathLike[str] | None = None,
        *,
        by: Group | None = None,
        normalization: str | None = None,
    ) -> str:
        """A complete page without network and scripts, also written to `path` if given.

        A table has the means of `mean_by`, and below it each prompt is a line in its colours.

        Args:
            path: of the file.
            by: the groups of the table. None: words; of larger units sources, roles or positions,
                whichever there are.
            normalization: as for `mean_by`.
        """
        title = f"Attributions of {len(self)} prompts"
        return write_if(markup.page_of_card(self._card(by, normalization), title), path)

    def to_text(self) -> str:
        """The table of `mean_by`, with each prompt's own table below."""
        head, rows, _, note = self._table(None, None)
        lines = aligned([head, *rows])
        tables = [att.to_text() for att in self]
        return "\n\n".join(filter(None, ["\n".join(lines), note, *tables]))

    def to_markdown(self, by: Group | None = None, normalization: str | None = None) -> str:
        """The table of `mean_by` as Markdown."""
        head, rows, _, note = self._table(by, normalization)
        lines = [markdown.markdown_table([head, *rows], range(1, len(head))), note]
        return "\n\n".join(filter(None, lines)) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file."""
        records = [att.to_dict() for att in self]
        return {"format": "noiser.attributions", "schema": 1, "attributions": records}

    @classmethod
    def from_dict(cls, data: Any) -> Attributions:
        """The attributions whose `to_dict` gave the data. Raises StoredFileError where `load`
        does.
        """
        return cls(restored(_SavedAttributions, Literal["noiser.attributions"], data).attributions)

    def _repr_html_(self) -> str:
        return f"<style>{markup.css()}</style>{self._card(None, None)}"

    def _card(self, by: Group | None, normalization: str | None) -> str:
        """Table, lines and where the numbers come from, as HTML."""
        head, rows, weights, note = self._table(by, normalization)
        cells: list[list[str]] = []
        for row, weight in zip(rows, weights, strict=True):
            kind = "n" if weight < 0 else "p"
            bar = f'<i class="bar {kind}" style="--a:{abs(weight):.3f}"></i>'
            cells.append([*map(escape, row), bar])
        table = html_table([*map(escape, head), ""], cells) if rows else ""
        notes = f"<p class=facts>{escape(note)}</p>" if note else ""
        origins = dict.fromkeys(provenance(att) for att in self)
        feet = "".join(f"<p>{escape(origin)}</p>" for origin in origins)
        body = f"{table}{notes}{markup.lines(self)}<footer>{feet}</footer>"
        return f'<div class="noiser-att many">{body}</div>'

    def _table(
        self, by: Group | None, normalization: str | None
    ) -> tuple[list[str], list[list[str]], list[float], str]:
        """Heading, lines, each line's mean as a share of the largest, and notes about lines left
        out and scores that are shares.
        """
        normalization, note = self._comparable(normalization)
        notes = [note] if note else []
        frame = self._means(by, normalization) if by else self._first_means(normalization)
        group = str(frame.columns[0])
        head = [group, "mean score", "prompts"]
        records = frame.itertuples(index=False)
        lines = list(cast("Iterable[tuple[Any, float, float, int]]", records))
        if len(lines) > MAX_GROUPS:
            strongest_first = sorted(range(len(lines)), key=lambda index: -abs(lines[index][1]))
            lines = [lines[index] for index in sorted(strongest_first[:MAX_GROUPS])]
        show = number_format(mean for _, mean, _, _ in lines)
        largest = max((abs(mean) for _, mean, _, _ in lines), default=0.0) or 1.0
        rows = [
            [label(str(key)), show.with_error(mean, error), str(count)]
            for key, mean, error, count in lines
        ]
        if len(frame) > MAX_GROUPS:
            notes.append(f"the {MAX_GROUPS} strongest of {len(frame)} {group}s")
        weights = [mean / largest for _, mean, _, _ in lines]
        return head, rows, weights, "; ".join(notes)

    def _first_means(self, normalization: str) -> DataFrame:
        """The means by the first kind of group that these units have."""
        for group in ("word", "source", "role"):
            try:
                return self._means(group, normalization)
            except (UnitError, ParameterError):
                continue
        return self._means("position", normalization)


class _SavedAttributions(BaseModel):
    """The file: attributions in the form of their own files."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    attributions: list[Annotated[Attribution, BeforeValidator(Attribution.from_dict)]]


_WITHOUT: Mapping[Group, str] = {
    "word": "No unit of the prompts has a score.",
    "position": "No unit of the prompts has a score.",
    "role": "None of the prompts is a chat whose messages stand in it word for word, so no unit "
    "has a role. "
    "Group by 'word' or 'position'.",
    "source": "None of the prompts was attributed with sources=. Group by 'word' or 'position'.",
}


def _sums(att: Attribution, group: Group, normalization: str) -> dict[str | int, float]:
    """For each group of a prompt's units the sum of their scores, as the mean over targets."""
    if group == "word":
        att = att.aggregate("word")
    keys = _keys(att, group)
    scores: Float[Tensor, "targets units"] = normalize(att.scores, normalization).double()
    sums: dict[str | int, float] = {}
    for key in dict.fromkeys(key for key in keys if key is not None):
        columns = scores[:, [column for column, own in enumerate(keys) if own == key]]
        seen = ~columns.isnan().all(1)
        if seen.any():
            sums[key] = float(columns[seen].nansum(1).mean())
    return sums


def _keys(att: Attribution, group: Group) -> list[str | int | None]:
    """The group of each unit; None for a unit of the continuation, and for one that has no
    group.
    """
    keys: list[str | int | None] = []
    for column, unit in enumerate(att.units):
        key: str | int | None = None
        if unit.start < att.prompt_length:
            if group == "word":
                key = _word(unit.text)
            elif group == "position":
                key = column + 1
            else:
                places = _sources(att) if group == "source" else _roles(att)
                key = _name_at(unit, places)
        keys.append(key)
    return keys


def _name_at(unit: Span, places: Iterable[tuple[str, int, int]]) -> str | None:
    """The name of the first place that shares characters with a unit; None if there is none."""
    for name, start, end in places:
        if unit.overlaps(start, end):
            return name
    return None


def _word(text: str) -> str:
    """The word without case, and without the marks around it unless it is made of marks."""
    word = text.strip().casefold()
    return re.sub(r"^\W+|\W+$", "", word) or word


def _sources(att: Attribution) -> list[tuple[str, int, int]]:
    """The title, or else the number, and the characters of each source."""
    sources: Sequence[Mapping[str, Any]] = att.info.get("sources", ())
    return [
        (str(source["title"]) or f"source {number}", int(source["start"]), int(source["end"]))
        for number, source in enumerate(sources, 1)
    ]


def _roles(att: Attribution) -> list[tuple[str, int, int]]:
    """The role and the characters of each message that stands in the rendered chat word for
    word.
    """
    messages = chat_messages(att)
    return [
        (str(messages[index].get("role")), start, end) for index, start, end in message_places(att)
    ]
