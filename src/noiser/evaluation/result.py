"""The result of an evaluation, and the paired differences between several of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import BaseModel, Field

from noiser import numbers
from noiser.attribution.display import aligned, label, short
from noiser.attribution.latex import latex_table
from noiser.attribution.markdown import escaped_line, markdown_table
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import read_saved, restored, to_jsonable
from noiser.checks import check_choice
from noiser.errors import ParameterError, StoredFileError
from noiser.evaluation.measuring import Skipped
from noiser.files import csv_text, write_if, write_text
from noiser.html import html_page, html_table
from noiser.metrics import METRICS, Aggregate, Estimate, Metric
from noiser.metrics.bootstrap import Sample, difference, estimates, holm_correct
from noiser.metrics.metric import answers, gaps_of, prompts_needed, unfit_judge, verdict_on
from noiser.types import ModelIdentity

if TYPE_CHECKING:
    from pandas import DataFrame

_STYLE = (
    ":root { color-scheme: light dark; font-family: system-ui, sans-serif; } "
    ".wide { overflow-x: auto; } th, td { padding: 0.2em 0.8em; text-align: start; } caption { "
    "text-align: start; }"
)


def sample_of(rows: Any, summary: Aggregate, *, contrast: bool = False) -> Sample:
    """A number over the prompts of a DataFrame, to be estimated."""
    columns = _columns(rows, summary)
    return Sample(statistic=summary.statistic, columns=columns, contrast=contrast)


def paired_sample(ours: Any, theirs: Any, summary: Aggregate) -> Sample:
    """The paired difference of a number between two DataFrames, over shared index entries."""
    if not ours.index.equals(theirs.index):
        common = ours.index.intersection(theirs.index, sort=False)
        ours = ours.loc[common]
        theirs = theirs.loc[common]
    columns = [*_columns(ours, summary), *_columns(theirs, summary)]
    return Sample(statistic=difference(summary.statistic), columns=columns, contrast=True)


def _columns(rows: Any, summary: Aggregate) -> list[Any]:
    return [
        rows[name].to_numpy(float) if name in rows else [math.nan] * len(rows)
        for name in summary.columns
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation(SavedResult):
    """The result of `noiser.evaluate`.

    Attributes:
        records: one mapping per prompt, skipped ones included: "index", "prompt", "method",
            "target", "probability", "units", "error", and the columns that the metrics measured.
        skipped: what could not be measured, and why.
        metrics: versioned names of the metrics.
        summaries: statistic, columns and scale of each number, by name.
        primary: the numbers that are compared first, one per metric; see `noiser.metrics.Metric`.
        method: versioned name of the method, or of that of the first attribution that the caller
            gave.
        model: identity of the model.
        settings: the arguments of `noiser.evaluate`, and `parameters`, every hyper-parameter of the
            method; unit and target_unit of the first attribution that the caller gave.
        confidence: of the intervals.
    """

    records: tuple[Mapping[str, Any], ...]
    skipped: tuple[Skipped, ...]
    metrics: tuple[str, ...]
    summaries: Mapping[str, Aggregate]
    primary: tuple[str, ...]
    method: str
    model: ModelIdentity
    settings: Mapping[str, Any]
    confidence: float = 0.95

    @cached_property
    def rows(self) -> DataFrame:
        """The records as a table, one row per prompt."""
        import pandas as pd

        return pd.DataFrame(self.records)

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        """The numbers over prompts with their intervals, by name.

        Differences from a reference have p-values, corrected as by `minus`.
        """
        options: dict[str, Any] = {"seed": self.settings["seed"], "confidence": self.confidence}
        samples = [
            sample_of(self.rows, summary, contrast=summary.contrast)
            for summary in self.summaries.values()
        ]
        found = dict(zip(self.summaries, estimates(samples, **options), strict=True))
        return holm_correct(found, gaps_of(self.primary, self.summaries))

    @property
    def answer(self) -> list[str]:
        """Whether scores are better than scores without information, in a sentence per metric."""
        told = answers(self.primary, self.summaries, self.estimates, self.confidence)
        return list(map(label, told + unfit_judge(self.records)))

    def __getitem__(self, name: str) -> Estimate:
        """The number of that name, such as "faithfulness"."""
        check_choice("number", name, self.estimates)
        return self.estimates[name]

    def summary(self) -> DataFrame:
        """One row per number: value, interval, corrected p-value, prompts, and how to read it."""
        import pandas as pd

        columns = ["value", "low", "high", "p", "n", "chance_level", "better", "meaning", "reason"]
        pairs = [(self.summaries[name].scale, one) for name, one in self.estimates.items()]
        lines = [
            {**scale._asdict(), **asdict(one), "p": one.p_holm, "better": scale.better}
            for scale, one in pairs
        ]
        return pd.DataFrame(lines, pd.Index(self.estimates, name="number"), columns).astype(
            {"chance_level": float}
        )

    def minus(self, other: Evaluation) -> Mapping[str, Estimate]:
        """For every number that both have, this one minus the other's, paired, on the prompts that
        both have.

        `Estimate.is_clear` says whether a difference is significant: its interval leaves out 0, and
        its p-value, by a sign-flip test over prompts and corrected by Holm's method (primary
        numbers for each other, others for all), is below 1 - confidence. A number of which neither
        side is better has no p-value.

        Raises:
            ParameterError: the two are about different prompts or targets, or were measured with
                different settings.
        """
        self._check_comparable(other)
        options: dict[str, Any] = {"seed": self.settings["seed"], "confidence": self.confidence}
        shared = {
            name: summary for name, summary in self.summaries.items() if name in other.summaries
        }
        samples = [paired_sample(self.rows, other.rows, summary) for summary in shared.values()]
        gaps = dict(zip(shared, estimates(samples, **options), strict=True))
        for name, gap in gaps.items():
            if shared[name].scale.higher_is_better is None:
                gaps[name] = replace(gap, p=math.nan)
        return holm_correct(gaps, self.primary)

    def _check_comparable(self, other: Evaluation) -> None:
        """Raises ParameterError where the two do not measure the same."""
        has_targets = self.model == other.model  # models differ in what they say next
        ours = self._conditions(has_targets=has_targets)
        theirs = other._conditions(has_targets=has_targets)
        for name in ours:
            if name not in theirs or name in ("seed", "parameters"):
                continue
            pair = (ours[name], theirs[name])
            has_one_judge = name == "judge" and None in pair
            if pair[0] != pair[1] and not has_one_judge:
                both = f"{pair[0]!r:.80} and {pair[1]!r:.80}"
                raise ParameterError(
                    f"The two evaluations differ: {name} is {both}; expected the same."
                )

    def _conditions(self, *, has_targets: bool) -> dict[str, Any]:
        """The settings, the prompts, and with `has_targets` the targets, by their names."""
        prompts = [record["prompt"] for record in self.records]
        conditions: dict[str, Any] = to_jsonable({**self.settings, "prompts": prompts})
        if has_targets:
            for index, target in enumerate(self.rows["target"]):
                if target:
                    conditions[f"target of prompt {index}"] = target
        return conditions

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON has; NaN becomes None."""
        same = {
            name: getattr(self, name)
            for name in ("method", "model", "metrics", "settings", "confidence", "skipped")
        }
        summary = self.summary().reset_index().to_dict("records")
        head = {"format": "noiser.evaluation", "schema": 1}
        return to_jsonable({**head, **same, "summary": summary, "rows": self.records})

    def save(self, path: str | PathLike[str]) -> None:
        """Writes everything as JSON or, to a name that ends in .csv, `rows` as CSV.

        The whole file is written or, on OSError, nothing.
        """
        text = csv_text(self.rows) if Path(path).suffix == ".csv" else self.to_json()
        write_text(path, text)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Evaluation:
        """The evaluation that `save` wrote as JSON, with the same numbers and intervals.

        Raises:
            StoredFileError: any other or damaged file, also a CSV, which has no settings.
            UnknownNameError: a metric of a plugin that is not installed.
        """
        if Path(path).suffix == ".csv":
            raise StoredFileError(f"{path} has rows alone. Load the .json that `save` writes.")
        return read_saved(path, cls.from_dict)

    @classmethod
    def from_dict(cls, data: Any) -> Evaluation:
        """The evaluation whose `to_dict` gave the data. Raises as `load` does."""
        saved = restored(_SavedEvaluation, Literal["noiser.evaluation"], data)
        entries = {name: METRICS.get(name).factory() for name in saved.metrics}
        summaries = _summaries_of(entries, [line.number for line in saved.summary])
        numeric = {"probability"}
        for summary in summaries.values():
            numeric.update(summary.columns)
        return cls(
            records=tuple(_record(row, numeric) for row in data["rows"]),
            skipped=saved.skipped,
            metrics=saved.metrics,
            summaries=summaries,
            primary=tuple(metric.primary for metric in entries.values() if metric.primary),
            method=saved.method,
            model=saved.model,
            settings=data["settings"],
            confidence=saved.confidence,
        )

    @property
    def _title(self) -> str:
        measured = sum(not record["error"] for record in self.records)
        hyper = {
            name: value for name, value in self.settings["parameters"].items() if value is not None
        }
        unit = [
            f"unit {short(self.settings['unit'])}",
            *(f"{label(name)}={short(v)}" for name, v in hyper.items()),
        ]
        return (
            f"{label(self.method)} on {label(self.model.name)}: "
            f"{', '.join(map(label, self.metrics))}; "
            f"{', '.join(unit)}; {measured} of {len(self.records)} prompts measured in full, "
            f"profile {label(self.settings['profile'])}, {self.confidence:.0%} intervals"
        )

    def _cells(self) -> list[tuple[str, ...]]:
        """The printed table, its heading first."""
        cells = [("number", "value", "interval", "p_holm", "n", "chance", "better", "meaning")]
        lines: Any = self.summary().itertuples()
        for name, value, low, high, p, n, chance_level, better, meaning, _ in lines:
            shown = numbers.number(value), numbers.interval(low, high)
            p, chance_level = ("" if math.isnan(x) else f"{x:.2g}" for x in (p, chance_level))
            cells.append((label(name), *shown, p, str(n), chance_level, better, meaning))
        return cells

    def _notes(self) -> list[str]:
        """What is missing, one line each."""
        reasons = dict.fromkeys(
            number.reason for number in self.estimates.values() if number.reason
        )
        return [f"{label(reason)}." for reason in reasons] + [
            f"Skipped: prompt {example} ({label(str(prompt))[:60]}), "
            f"{label(metric or 'everything')}: {label(error)}"
            for example, prompt, metric, error in self.skipped[:10]
        ]

    def to_dataframe(self) -> DataFrame:
        """The records as a table, one row per prompt: `rows`. The numbers over prompts are in
        `summary`.
        """
        return self.rows

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Answers, table and notes, safe for a terminal."""
        lines = aligned(self._cells())
        return "\n".join([*self.answer, "", self._title, "", *lines, "", *self._notes()]).strip()

    def to_markdown(self) -> str:
        """Title, table and notes as Markdown, to be pasted into an issue or a page."""
        above = map(escaped_line, [*self.answer, self._title])
        below = map(escaped_line, self._notes())
        return "\n\n".join([*above, markdown_table(self._cells()), *below]) + "\n"

    def to_latex(self) -> str:
        """The table of numbers for a paper, with its title as caption; it needs booktabs."""
        columns = 5  # number, value, interval, p and n
        rows = [row[:columns] for row in self._cells()]
        return latex_table(rows, self._title)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        return write_if(html_page("Evaluation", _STYLE, self._repr_html_()), path)

    def _repr_html_(self) -> str:
        return self.fragment()

    def fragment(self) -> str:
        """A piece of a page: answers, table and notes; every text is escaped."""
        head, *rows = [[escape(cell) for cell in row] for row in self._cells()]
        answers = "".join(f"<p>{escape(line)}</p>" for line in self.answer)
        notes = "".join(f"<p>{escape(line)}</p>" for line in self._notes())
        return answers + html_table(head, rows, escape(self._title)) + notes


class _Row(BaseModel, extra="allow"):
    """A prompt; other keys are what metrics measured."""

    index: int
    prompt: Any
    method: str
    target: str
    error: str


class _Settings(BaseModel, extra="allow"):
    """The settings that are read here; others are compared."""

    seed: int = Field(ge=0)
    profile: str
    parameters: dict[str, Any]
    unit: Any


class _Number(BaseModel):
    """A line of the summary; everything but its name is computed again."""

    number: str


class _SavedEvaluation(BaseModel):
    """The keys of a file that are read."""

    method: str
    model: ModelIdentity
    metrics: tuple[str, ...]
    settings: _Settings
    confidence: float = Field(gt=0, lt=1)
    skipped: tuple[Skipped, ...]
    summary: list[_Number]
    rows: list[_Row]


def _summaries_of(entries: Mapping[str, Metric], numbers: Sequence[str]) -> dict[str, Aggregate]:
    """The summaries of numbers by name: a metric's own, or the mean of a column that it has no
    summary for.
    """
    own: dict[str, Aggregate] = {}
    others: dict[str, Aggregate] = {}
    for metric in entries.values():
        own |= metric.summaries
        others |= metric.other_summaries(numbers)
    summaries: dict[str, Aggregate] = {}
    for name in numbers:
        summary = own.get(name) or others.get(name)
        if summary is None:
            raise StoredFileError(
                f"summary: the number {name!r} is of none of {', '.join(entries)}. The file is "
                f"damaged."
            )
        summaries[name] = summary
    return summaries


def _record(row: Mapping[str, Any], numeric: AbstractSet[str]) -> dict[str, Any]:
    """A row of a file with numbers in the numeric columns: NaN for null, infinite ones for their
    names.
    """
    record = dict(row)
    for name in numeric & record.keys():
        value = math.nan if record[name] is None else record[name]
        try:
            record[name] = float(value)
        except (TypeError, ValueError):
            raise StoredFileError(
                f"rows: {name} is {value!r:.80}; expected a number. The file is damaged."
            ) from None
    return record


class Evaluations(SavedResult, dict[str, Evaluation]):
    """Evaluations of the same prompts by name, and how the first differs from each of the others.

    Example:
        >>> results = Evaluations({"joint": first, "lime": second})  # doctest: +SKIP
        >>> print(results)  # doctest: +SKIP
    """

    @cached_property
    def differences(self) -> DataFrame:
        """The first evaluation minus each of the others; see `noiser.evaluation.differences`."""
        return _table_of_differences(self._gaps)

    @cached_property
    def _gaps(self) -> Mapping[tuple[str, str], Estimate]:
        """The first evaluation minus each of the others, by the other's name and the number."""
        return _corrected_differences(self)

    @property
    def _heading(self) -> str:
        first = next(iter(self))
        return (
            f"{first} minus each other method, prompt by prompt. p_holm is corrected for the "
            "first number of each metric together, and for the others among all."
        )

    @property
    def answers(self) -> list[str]:
        """For each other method a sentence: is the first one better, by the primary numbers?"""
        (first_name, first), *others = self.items()
        gaps = {key: gap for key, gap in self._gaps.items() if key[1] in first.primary}
        needed = prompts_needed(len(gaps), first.confidence)
        sentences: list[str] = []
        for other, _ in others:
            clauses: list[str] = []
            for number in first.primary:
                higher_is_better = first.summaries[number].scale.higher_is_better
                if (other, number) in gaps and higher_is_better is not None:
                    verdict = verdict_on(gaps[other, number], higher_is_better, needed)
                    clauses.append(f"by {number}, {verdict}")
            if clauses:
                sentences.append(
                    f"Is {label(first_name)} better than {label(other)}? {'; '.join(clauses)}."
                )
        return sentences

    def _cells(self) -> list[tuple[str, ...]]:
        """The printed table of differences, its heading first."""
        cells = [("other", "number", "difference", "interval", "p_holm", "n")]
        repeated = self._repeated
        for (other, name), gap in self._gaps.items():
            if (other, name) not in repeated:
                value = numbers.number(gap.value)
                interval = numbers.interval(gap.low, gap.high)
                p = "" if math.isnan(gap.p_holm) else f"{gap.p_holm:.2g}"
                cells.append((label(other), label(name), value, interval, p, str(gap.n)))
        return cells

    @cached_property
    def _repeated(self) -> dict[tuple[str, str], str]:
        """Differences that repeat one above them, by their keys, with the number that it is of.

        Two methods differ as much by "area" as by "area minus that of random scores", which are
        the same for both.
        """
        repeated: dict[tuple[str, str], str] = {}
        shown: list[tuple[str, str]] = []
        for key, gap in self._gaps.items():
            for other, name in shown:
                of = self._gaps[other, name]
                is_equal = math.isclose(of.value, gap.value, rel_tol=1e-9, abs_tol=1e-12)
                if other == key[0] and of.n == gap.n and is_equal:
                    repeated[key] = name
                    break
            else:
                shown.append(key)
        return repeated

    def _notes(self) -> list[str]:
        """What the table leaves out, and what is missing, one line each."""
        also: dict[str, list[str]] = {}
        for (_, name), of in self._repeated.items():
            names = also.setdefault(of, [])
            if name not in names:
                names.append(name)
        notes = [
            f"The same difference as {label(of)}: {', '.join(map(label, names))}."
            for of, names in also.items()
        ]
        reasons = dict.fromkeys(gap.reason for gap in self._gaps.values() if gap.reason)
        return notes + [f"{label(reason)}." for reason in reasons]

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """Each evaluation, and the differences, safe for a terminal."""
        texts = [evaluation.to_text() for evaluation in self.values()]
        if len(self) > 1:
            texts.append("\n".join([self._heading, *self.answers]))
            texts.append("\n".join(aligned(self._cells())))
            notes = self._notes()
            if notes:
                texts.append("\n".join(notes))
        return "\n\n".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file: that of the only evaluation, or of all with their
        differences.
        """
        records = {name: evaluation.to_dict() for name, evaluation in self.items()}
        if len(records) == 1:
            return next(iter(records.values()))
        gaps = self.differences.to_dict("records")
        return to_jsonable({"evaluations": records, "differences": gaps})

    @classmethod
    def from_dict(cls, data: Any) -> Evaluations:
        """The evaluations whose `to_dict` gave the data. Raises StoredFileError where `load`
        does.
        """
        several = data.get("evaluations") if isinstance(data, dict) else None
        if isinstance(several, dict) and several:
            records = cast("dict[str, object]", several)
            found = cls({name: Evaluation.from_dict(record) for name, record in records.items()})
            try:
                _ = found._gaps  # which every form of them shows
            except ParameterError as error:
                raise StoredFileError(f"evaluations: {error} The file is damaged.") from error
            return found
        evaluation = Evaluation.from_dict(data)
        return cls({evaluation.method: evaluation})

    def to_dataframe(self) -> DataFrame:
        """The rows of each evaluation, one below the other; the column "evaluation" has its
        name.
        """
        import pandas as pd

        return pd.concat([each.rows.assign(evaluation=name) for name, each in self.items()])

    def to_markdown(self) -> str:
        """Each evaluation, and the differences, as Markdown."""
        parts = [evaluation.to_markdown() for evaluation in self.values()]
        if len(self) > 1:
            parts += map(escaped_line, [self._heading, *self.answers])
            parts.append(markdown_table(self._cells()))
            parts += map(escaped_line, self._notes())
        return "\n\n".join(parts) + "\n"

    def to_latex(self) -> str:
        """The tables of numbers, and the differences, for a paper; they need booktabs."""
        tables = [evaluation.to_latex() for evaluation in self.values()]
        if len(self) > 1:
            tables.append(latex_table(self._cells(), self._heading))
        return "\n".join(tables)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        return write_if(html_page("Evaluation", _STYLE, self._repr_html_()), path)

    def _repr_html_(self) -> str:
        tables = [evaluation.fragment() for evaluation in self.values()]
        if len(self) > 1:
            head, *rows = [[escape(cell) for cell in row] for row in self._cells()]
            tables += [f"<p>{escape(line)}</p>" for line in [self._heading, *self.answers]]
            tables.append(html_table(head, rows))
            tables += [f"<p>{escape(line)}</p>" for line in self._notes()]
        return "".join(tables)


def _corrected_differences(
    evaluations: Mapping[str, Evaluation],
) -> dict[tuple[str, str], Estimate]:
    """The first minus each of the others, corrected together."""
    (_, first), *others = evaluations.items()
    gaps: dict[tuple[str, str], Estimate] = {}
    for name, other in others:
        for number, gap in first.minus(other).items():
            gaps[name, number] = gap
    return holm_correct(gaps, [key for key in gaps if key[1] in first.primary])


def differences(evaluations: Mapping[str, Evaluation]) -> DataFrame:
    """The first of several evaluations, by name, minus each of the others: one line per other and
    number.

    Columns are other, number, value, low, high, n, reason, p, p_holm (corrected as by
    `Evaluation.minus`, for all others together) and clear (see `Estimate.is_clear`).
    """
    return _table_of_differences(_corrected_differences(evaluations))


def _table_of_differences(gaps: Mapping[tuple[str, str], Estimate]) -> DataFrame:
    """A line for each difference; see `differences`."""
    import pandas as pd

    lines = [
        {"other": other, "number": number, **asdict(gap), "clear": gap.is_clear}
        for (other, number), gap in gaps.items()
    ]
    return pd.DataFrame(lines).drop(columns="confidence", errors="ignore")
