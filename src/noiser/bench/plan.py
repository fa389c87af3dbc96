"""A benchmark's plan: which methods and metrics, on which models and data. Read from TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from noiser.bench.rows import ATTRIBUTION, Kind, Label
from noiser.errors import PlanError, UnknownNameError
from noiser.types import Profile, SpanUnit, TargetUnitName, TextUnitName

Texts = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""A list of texts, or one text."""

Count = Annotated[int, Field(ge=1)]
Limit = Count | dict[str, Count] | None
"""The most examples of every data set, or of the data sets that are named."""

_KINDS = ("models", "data", "methods", "metrics")

WORKING = {
    "api_key_env",
    "budget_tokens",
    "cache_dir",
    "concurrency",
    "job",
    "max_retries",
    "timeout",
}
"""Settings of a judge that change no answer."""


class PlanEntry(BaseModel):
    """An entry of a plan, with the label that names its rows, and perhaps labels of other kinds
    that restrict it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: Label = ""

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, values: Any) -> Any:
        """The last part of the name is the label, unless the plan gives another one."""
        if isinstance(values, dict) and "label" not in values:
            last = re.split(r"[/\\]", str(values.get("name", "own")).rstrip("/\\"))[-1]
            values = values | {
                "label": re.sub(r"[^A-Za-z0-9._+@-]+", "-", last).lstrip(".-_+@") or "unnamed"
            }
        return cast("Any", values)

    @property
    def meaning(self) -> dict[str, Any]:
        """The fields, as JSON, that stored rows depend on."""
        return self.model_dump(mode="json", exclude={*_KINDS, "limit"})


class ModelEntry(PlanEntry):
    """A model; its fields are parameters of `noiser.load_model`."""

    name: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    engine_args: dict[str, str | int | float | bool] = Field(default_factory=dict)
    limit: Limit = None

    @property
    def meaning(self) -> dict[str, Any]:
        """Which model it is, and what it reads; the identity of the loaded model is stored beside
        it.
        """
        names = ("model", "quantization", "tokenizer")
        which = {name: self.engine_args[name] for name in names if name in self.engine_args}
        meaning = self.model_dump(mode="json", include={"label", "name", "dtype"})
        return meaning | ({"engine_args": which} if which else {})

    @property
    def load_options(self) -> dict[str, Any]:
        """The arguments of `noiser.load_model` after the name."""
        excluded = {"label", "name", "engine_args", "limit"}
        return self.model_dump(exclude=excluded, exclude_defaults=True) | dict(self.engine_args)


class DataEntry(PlanEntry):
    """A data set, whose examples are taken in an order drawn by the plan's seed, or the plan's own
    prompts.
    """

    name: str | None = None
    prompts: Texts | None = None
    limit: Count | None = None
    category: Texts = ()
    without_category: Texts = ()
    without_ids: Texts = ()
    stratified: bool = False
    max_characters: Count | None = None
    only_correct: bool = False
    explain: Literal["continuation", "answer"] = "continuation"
    max_new_tokens: Count = 1
    target_unit: TargetUnitName = "token"

    @model_validator(mode="after")
    def _one_source(self) -> DataEntry:
        if (self.name is None) == (self.prompts is None):
            raise ValueError("expected either name, of a data set, or prompts")
        if self.prompts is not None:
            if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
                raise ValueError("prompts: expected at least one text, and none that is blank")
            any_source = {"label", "prompts", "limit", "max_new_tokens", "target_unit"}
            if useless := sorted(self.model_fields_set - any_source):
                raise ValueError(f"{', '.join(useless)}: only for data sets, not for prompts")
        return self


class MethodEntry(PlanEntry):
    """A method, with its hyper-parameters and its unit; with unit "spans" those that each example
    names.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    profile: Profile = "paper"
    unit: TextUnitName | SpanUnit = "word"
    models: Texts = ()
    data: Texts = ()
    metrics: Texts = ()
    limit: Limit = None


class MetricEntry(PlanEntry):
    """A metric with its settings and its judge: the model itself, another model on this machine, or
    an endpoint's.
    """

    name: str
    masks: Count | None = None
    normalization: str | None = None
    rates: tuple[float, ...] | None = None
    draws: Count | None = None
    removal: str | None = None
    k: tuple[Count, ...] | None = None
    judge: str | None = None
    judge_args: dict[str, Any] = Field(default_factory=dict)
    models: Texts = ()
    data: Texts = ()
    methods: Texts = ()
    limit: Limit = None

    @model_validator(mode="after")
    def _judged(self) -> MetricEntry:
        if self.judge_args and self.judge is None:
            raise ValueError("judge_args are settings of a judge; expected judge as well")
        if "api_key" in self.judge_args:
            raise ValueError(
                "api_key would be stored; put it into OPENAI_API_KEY, or name a variable as "
                "api_key_env"
            )
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the plan gives, as for `noiser.metrics.Settings`."""
        names = ("masks", "normalization", "rates", "draws", "removal", "k")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def meaning(self) -> dict[str, Any]:
        """The fields that rows depend on, without the judge's `WORKING` settings."""
        args = {key: value for key, value in self.judge_args.items() if key not in WORKING}
        return super().meaning | {"judge_args": args}


class Plan(BaseModel):
    """A benchmark; docs/bench.md explains each key. Example i of a sample is attributed with seed +
    i.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    block: Count = 4
    models: Annotated[tuple[ModelEntry, ...], Field(min_length=1)]
    data: Annotated[tuple[DataEntry, ...], Field(min_length=1)]
    methods: Annotated[tuple[MethodEntry, ...], Field(min_length=1)]
    metrics: tuple[MetricEntry, ...] = ()

    @model_validator(mode="after")
    def _labels(self) -> Plan:
        for kind in _KINDS:
            labels = [*self.labels(kind), *([ATTRIBUTION] if kind == "metrics" else [])]
            if twice := [label for label in labels if labels.count(label) > 1]:
                raise ValueError(
                    f"two {kind} have the label {twice[0]!r}; give each a label of its own"
                )
        for entry in (*self.models, *self.methods, *self.metrics):
            limited = entry.limit if isinstance(entry.limit, dict) else ()
            named = [(kind, name) for kind in _KINDS for name in getattr(entry, kind, ())]
            for kind, name in (*named, *(("data", name) for name in limited)):
                if name not in self.labels(kind):
                    error = UnknownNameError(f"label in {kind}", name, self.labels(kind))
                    raise ValueError(f"{entry.label!r}: {error}")
        return self

    def labels(self, kind: str) -> list[str]:
        """The labels of "models", "data", "methods" or "metrics"."""
        return [entry.label for entry in cast("tuple[PlanEntry, ...]", getattr(self, kind))]

    def entry(self, kind: str, label: str) -> Any:
        """The entry with a label of the plan."""
        return next(entry for entry in getattr(self, kind) if entry.label == label)

    def kinds(self, model: str, data: str) -> dict[tuple[str, str], int | None]:
        """The limit of every kind of row for a model and a data set, by method and metric; None for
        all examples.
        """
        most = lowest(self.entry("data", data).limit, _limit(self.entry("models", model), data))
        kinds: dict[tuple[str, str], int | None] = {}
        for method in self.methods:
            if _allows(method.models, model) and _allows(method.data, data):
                kinds[method.label, ATTRIBUTION] = fewer = lowest(most, _limit(method, data))
                for metric in self.metrics:
                    allowed = _allows(metric.models, model) and _allows(metric.data, data)
                    if (
                        allowed
                        and _allows(metric.methods, method.label)
                        and _allows(method.metrics, metric.label)
                    ):
                        kinds[method.label, metric.label] = lowest(fewer, _limit(metric, data))
        return kinds

    def pairs(self) -> dict[tuple[str, str], int | None]:
        """The limit of every sample, by model and data set, where a method runs; None for all
        examples.
        """
        return {
            (model.label, data.label): lowest(data.limit, _limit(model, data.label))
            for model in self.models
            for data in self.data
            if self.kinds(model.label, data.label)
        }

    def row_count(self, model: str, data: str, examples: int) -> int:
        """The number of rows of a model and a data set with so many examples."""
        return sum(lowest(examples, limit) or 0 for limit in self.kinds(model, data).values())

    def limits(self) -> dict[Kind, int | None]:
        """The limit of every kind of row; a folder keeps rows of an earlier, larger plan."""
        return {
            Kind(*pair, *kind): limit
            for pair in self.pairs()
            for kind, limit in self.kinds(*pair).items()
        }


def lowest(*limits: int | None) -> int | None:
    """The lowest of several limits; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(entry: ModelEntry | MethodEntry | MetricEntry, data: str) -> int | None:
    return entry.limit.get(data) if isinstance(entry.limit, dict) else entry.limit


def _allows(labels: Sequence[str], label: str) -> bool:
    return not labels or label in labels


def read_plan(path: Path) -> tuple[Plan, str]:
    """A plan from a TOML file, and the file's text. Raises PlanError where it cannot be read, or is
    not valid.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"Cannot read the plan {path}: {error}. Expected a TOML file; see docs/bench.md."
        ) from error
    return parse_plan(text, str(path)), text


def parse_plan(text: str, source: str) -> Plan:
    """A plan from TOML; errors name `source`."""
    try:
        return Plan.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(
            f"{source} is not valid TOML: {error}. See docs/bench.md for the form of a plan."
        ) from error
    except ValidationError as error:
        found = [(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors()]
        problems = "; ".join(": ".join(filter(None, each)) for each in found).replace(
            "Value error, ", ""
        )
        raise PlanError(
            f"{source}: {problems}. See docs/bench.md for the form of a plan."
        ) from error
