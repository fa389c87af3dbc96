"""A benchmark's plan: which methods and metrics, on which models and data. Read from TOML, refused with reasons."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from noiser.bench.records import Cost, Label, Row
from noiser.errors import PlanError, UnknownNameError
from noiser.types import Profile, RemovalName, TargetUnitName

ATTRIBUTION = "attribution"
"""The metric of rows that say what an attribution took; no metric of a plan may be called so."""


def _as_tuple(value: Any) -> Any:
    """TOML's list as a tuple; one text stands for a list of it."""
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    return (value,) if isinstance(value, str) else value


AsTuple = BeforeValidator(_as_tuple)
Texts = Annotated[tuple[str, ...], AsTuple]
Count = Annotated[int, Field(ge=1)]
Limit = Count | dict[str, Count] | None
"""The most examples of each data set, or of those that are named."""


class Entry(BaseModel):
    """What all entries of a plan have: a label, by which rows and files are named."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    label: Label = ""

    @model_validator(mode="before")
    @classmethod
    def _labelled(cls, values: Any) -> Any:
        """The label unless given: the last part of the name, with what a file's name cannot hold replaced."""
        if isinstance(values, dict) and "label" not in values and isinstance(values.get("name"), str):
            last = re.split(r"[/\\]", values["name"].rstrip("/\\"))[-1]
            values = values | {"label": re.sub(r"[^A-Za-z0-9._+@-]+", "-", last).lstrip(".-_+@") or "unnamed"}
        return cast("Any", values)

    @property
    def restrictions(self) -> dict[str, tuple[str, ...]]:
        """Labels that an entry names, by kind: they say for what it is used, not what it means."""
        limit: Limit = getattr(self, "limit", None)
        named = {"data": tuple(limit)} if isinstance(limit, dict) else {}
        return {name: (*getattr(self, name, ()), *named.get(name, ())) for name in _KINDS}

    @property
    def meaning(self) -> dict[str, Any]:
        """All other fields, as JSON has them: rows are about these, so that they may not change."""
        return self.model_dump(mode="json", exclude=set(_RESTRICTIONS))


_KINDS = ("models", "data", "methods", "metrics")
_RESTRICTIONS = (*_KINDS, "limit")

WORKING = {
    "api_key_env", "budget_tokens", "cache_dir", "concurrency", "job", "max_retries", "timeout",
}  # fmt: skip
"""Settings of a judge that say how it works, and not what it answers."""


EngineArg = Literal[
    "api_key_env", "concurrency", "distributed_executor_backend", "enforce_eager",
    "gpu_memory_utilization", "logprobs", "max_model_len", "max_num_seqs", "max_retries", "model",
    "pipeline_parallel_size", "quantization", "tensor_parallel_size", "timeout", "tokenizer",
]  # fmt: skip
"""What a plan may say to vLLM or about a server: nothing that names code to be run."""


_WHICH = ("model", "quantization", "tokenizer")
"""Those that say which model it is, and what it reads."""


class ModelEntry(Entry):
    """A model; fields but the last are the parameters of `noiser.load_model`.

    Attributes:
        limit: only the first examples of each data set's sample, or of those named: `{ known = 60 }`.
    """

    name: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    device_map: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    engine_args: dict[EngineArg, str | int | float | bool] = Field(default_factory=dict)
    limit: Limit = None

    @property
    def meaning(self) -> dict[str, Any]:
        """Which weights in which precision; they may move to another device, and may be run differently."""
        which = {key: value for key, value in self.engine_args.items() if key in _WHICH}
        meaning = self.model_dump(mode="json", include={"label", "name", "dtype", "revision"})
        return meaning | ({"engine_args": which} if which else {})

    @property
    def load_options(self) -> dict[str, Any]:
        """The arguments of `noiser.load_model` after the name: a device or a map of devices."""
        excluded = {"label", "name", "engine_args", "limit", "device" if self.device_map else "device_map"}
        return self.model_dump(exclude=excluded) | dict(self.engine_args)


_OF_DATA_SETS = (
    "only_correct", "category", "without_category", "without_ids", "stratified", "max_characters", "explain",
    "as_published",
)  # fmt: skip


class DataEntry(Entry):
    """A data set, or prompts of the plan's own.

    Attributes:
        name: of a data set; its examples are taken in an order drawn by the plan's seed.
        prompts: texts of the plan's own, in place of a data set.
        limit: the most examples to take; None for all. Those of a lower limit are among those of a higher one.
        category: only these categories.
        without_category: all but these categories.
        without_ids: all but these examples, such as those that a method was chosen on.
        stratified: takes examples of all categories in turn, so that few examples have some of each.
        max_characters: only examples whose prompts are no longer; None for all.
        only_correct: only examples whose answer the model gives greedily, all its tokens; of planted facts, only those
            whose answer changes without them.
        explain: "continuation", the first tokens that the model says; or "answer", those that the data set gives.
        max_new_tokens: how many tokens of the continuation.
        target_unit: what each row explains of it.
        as_published: leaves the errors of the published file in.
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
    as_published: bool = False

    @model_validator(mode="before")
    @classmethod
    def _own_prompts(cls, values: Any) -> Any:
        if isinstance(values, dict) and "label" not in values and "prompts" in values:
            values = values | {"label": "own"}
        return cast("Any", values)

    @model_validator(mode="after")
    def _one_source(self) -> DataEntry:
        if (self.name is None) == (self.prompts is None):
            raise ValueError("expected either name, of a data set, or prompts")
        if self.prompts is not None and (not self.prompts or not all(prompt.strip() for prompt in self.prompts)):
            raise ValueError("prompts: expected at least one text, and none that is blank")
        if self.explain == "answer" and "max_new_tokens" in self.model_fields_set:
            raise ValueError(
                'max_new_tokens has no effect with explain = "answer", which has its own length; leave it out'
            )
        of_data_sets = [key for key in _OF_DATA_SETS if getattr(self, key) != type(self).model_fields[key].default]
        if self.prompts is not None and of_data_sets:
            raise ValueError(
                "prompts of the plan's own have no category, no answer and no published file; leave out "
                + ", ".join(of_data_sets)
            )
        return self

    @property
    def meaning(self) -> dict[str, Any]:
        """As for any entry; prompts may be added after the existing ones.

        Later keys are left out where they say nothing, as in folders from before them.
        """
        later = ("target_unit", "max_characters", "without_ids", "stratified")
        fields = type(self).model_fields
        left_out = {"prompts"} | {key for key in later if getattr(self, key) == fields[key].default}
        return {key: value for key, value in super().meaning.items() if key not in left_out} | {
            "own": self.prompts is not None
        }


class MethodEntry(Entry):
    """A method.

    Attributes:
        name: in the registry.
        args: hyper-parameters.
        profile: "authors" for the published script's definitions, of the method and of its metrics.
        unit: what gets a score; "spans": the spans that each example names.
        models, data, metrics: only these labels; all if empty.
        limit: only the first examples of each data set's sample, or of those named: `{ known = 40 }`.
    """

    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    profile: Profile = "paper"
    unit: Literal["token", "word", "sentence", "spans"] = "token"
    models: Texts = ()
    data: Texts = ()
    metrics: Texts = ()
    limit: Limit = None


class MetricEntry(Entry):
    """A metric.

    Attributes:
        name: in the registry.
        masks, normalization, rates, draws, removal, k: as for `noiser.evaluate`.
        judge: "local", the model itself; "local:MODEL", another model on this machine, loaded as the plan says where
            MODEL is the label of one of its models; "openai:MODEL".
        judge_args: settings of the judge, without its key. Those in `WORKING` may change while rows are kept.
        models, data, methods: only these labels; all if empty.
        limit: only the first examples of each data set's sample, or of those named: `{ known = 40 }`.
    """

    name: str
    masks: Count | None = None
    normalization: str | None = None
    rates: Annotated[tuple[float, ...], AsTuple] | None = None
    draws: Count | None = None
    removal: RemovalName | None = None
    k: Annotated[tuple[Count, ...], AsTuple] | None = None
    judge: str | None = None
    judge_args: dict[str, Any] = Field(default_factory=dict)
    models: Texts = ()
    data: Texts = ()
    methods: Texts = ()
    limit: Limit = None

    @model_validator(mode="after")
    def _no_key(self) -> MetricEntry:
        if "api_key" in self.judge_args:
            raise ValueError(
                "judge_args has an api_key, which would be stored; put it into an environment variable, OPENAI_API_KEY "
                "or for another address the one that judge_args names as api_key_env"
            )
        return self

    @property
    def meaning(self) -> dict[str, Any]:
        """As for any entry, without settings of the judge that change no answer."""
        found = super().meaning
        if self.draws is None:
            del found["draws"]  # as in plans from before there was a choice; rows say how many they had
        return found | {"judge_args": {k: v for k, v in found["judge_args"].items() if k not in WORKING}}


class Plan(BaseModel):
    """A benchmark.

    Attributes:
        name: for people.
        seed: of samples, masks and random references; example i of a sample is attributed with seed + i.
        block: examples per job, and at most in a file.
        models, data, methods, metrics: entries with labels that differ, also in lower case.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    block: Count = 4
    models: Annotated[tuple[ModelEntry, ...], AsTuple]
    data: Annotated[tuple[DataEntry, ...], AsTuple]
    methods: Annotated[tuple[MethodEntry, ...], AsTuple]
    metrics: Annotated[tuple[MetricEntry, ...], AsTuple] = ()

    @model_validator(mode="after")
    def _labels(self) -> Plan:
        if not self.name.isprintable() or not self.name.strip():
            raise ValueError(f"name: got {self.name!r}, expected one line of text")
        for kind in _KINDS:
            labels = self.labels(kind)
            if not labels and kind != "metrics":
                raise ValueError(f"{kind} is empty; expected at least one [[{kind}]]")
            counts = Counter(map(str.casefold, labels))
            twice = [label for label in labels if counts[label.casefold()] > 1]
            if twice:
                raise ValueError(f"two {kind} have the label {twice[0]!r}; give each a label of its own")
        if ATTRIBUTION in self.labels("metrics"):
            raise ValueError(f"a metric has the label {ATTRIBUTION!r}, which is taken; give it another label")
        models, metrics = self.labels("models"), self.labels("metrics")
        tails = {*models, *metrics, *(f"{metric}-{model}" for metric in metrics for model in models)}
        for label in {f"{data}-{tail}" for data in self.labels("data") for tail in tails} & {*self.labels("data")}:
            raise ValueError(  # it is what tables of one metric or model are called by
                f"data have the label {label!r}, which other data have with a model or metric; give them another label"
            )
        for kind in ("models", "methods", "metrics"):
            for entry in cast("tuple[Entry, ...]", getattr(self, kind)):
                for name, restriction in entry.restrictions.items():
                    for label in restriction:
                        if label not in self.labels(name):
                            error = UnknownNameError(f"label in {name}", label, self.labels(name))
                            raise ValueError(f"{kind}, {entry.label!r}: {error}")
        return self

    def labels(self, kind: str) -> list[str]:
        """The labels of "models", "data", "methods" or "metrics"."""
        return [entry.label for entry in cast("tuple[Entry, ...]", getattr(self, kind))]

    def entry(self, kind: str, label: str) -> Any:
        """The entry of a label, which is there."""
        return next(entry for entry in getattr(self, kind) if entry.label == label)

    def data_for(self, model: str) -> Iterator[DataEntry]:
        """The data sets on which a method runs for a model, each with the limit that it has there."""
        for entry in self.data:
            if self.methods_for(model, entry.label):
                limits = (entry.limit, limit_for(self.entry("models", model), entry.label))
                yield entry.model_copy(update={"limit": combined(limits)})

    def methods_for(self, model: str, data: str) -> list[MethodEntry]:
        """The methods that run for a model and a data set, by their labels."""
        return [entry for entry in self.methods if _among(model, entry.models) and _among(data, entry.data)]

    def metrics_for(self, method: MethodEntry, model: str, data: str) -> list[MetricEntry]:
        """The metrics that a method's attributions for a model and a data set are measured with."""
        return [
            entry
            for entry in self.metrics
            if _among(model, entry.models)
            and _among(data, entry.data)
            and _among(method.label, entry.methods)
            and _among(entry.label, method.metrics)
        ]

    def kinds(self, model: str, data: str) -> Iterator[tuple[str, str, int | None]]:
        """Every kind of row for a model and a data set: method, metric, and how many examples it is limited to."""
        for method in self.methods_for(model, data):
            limit = limit_for(method, data)
            yield method.label, ATTRIBUTION, limit
            for metric in self.metrics_for(method, model, data):
                yield method.label, metric.label, combined((limit, limit_for(metric, data)))

    def wanted(self) -> Callable[[Row | Cost], bool]:
        """Tells of a row, or of its cost, whether the plan asks for it; a folder keeps rows of a larger plan before."""
        limits = {
            (model, entry.label, method, metric): combined((limit, entry.limit))
            for model in self.labels("models")
            for entry in self.data_for(model)
            for method, metric, limit in self.kinds(model, entry.label)
        }

        def asks_for(row: Row | Cost) -> bool:
            limit = limits.get((row.model, row.data, row.method, row.metric), 0)
            return limit is None or row.index < limit

        return asks_for


def limit_for(entry: ModelEntry | MethodEntry | MetricEntry, data: str) -> int | None:
    """The most examples of a data set that an entry is used for; None for all."""
    return entry.limit.get(data) if isinstance(entry.limit, dict) else entry.limit


def _among(label: str, wanted: Sequence[str]) -> bool:
    return not wanted or label in wanted


def read_plan(path: Path) -> tuple[Plan, str]:
    """A plan from a TOML file, and the file's text.

    Raises:
        PlanError: no such file, no TOML, or a plan that means nothing; says which key, what it got, what is expected.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise PlanError(f"Cannot read the plan {path}: {reason}. Expected a TOML file; see docs/bench.md.") from error
    return parse_plan(text, str(path)), text


def parse_plan(text: str, source: str) -> Plan:
    """A plan from TOML; `source` is what errors call it. Raises PlanError."""
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise PlanError(f"{source} is not valid TOML: {error}. See docs/bench.md for the form of a plan.") from error
    try:
        return Plan.model_validate(values)
    except ValidationError as error:
        problems = list(dict.fromkeys(_problem(values, dict(detail)) for detail in error.errors()))
        raise PlanError(f"{source}: " + "; ".join(problems) + ". See docs/bench.md for the form of a plan.") from error


def _problem(values: dict[str, Any], detail: dict[str, Any]) -> str:
    """One of pydantic's errors in our words: key, got, expected, nearest name."""
    where: list[str | int] = [part for part in detail["loc"] if part != "__root__"]
    place = _place(values, where)
    if detail["type"] == "extra_forbidden":
        owner = _ENTRIES.get(str(where[0]), Plan) if len(where) > 1 else Plan
        return f"{place}: {UnknownNameError('key', where[-1], owner.model_fields)}"
    if detail["type"] == "missing":
        return f"{place} is missing"
    if detail["type"] == "value_error":
        said = str(detail["ctx"]["error"])
        return f"{place}: {said}" if place else said
    expected = detail["msg"].replace("Input should be ", "")
    if detail["type"] == "string_pattern_mismatch":
        expected = "letters, digits and . _ + @ -, to name files by"
    return f"{place}: got {detail.get('input')!r}, expected {expected}"


def _place(values: dict[str, Any], where: Sequence[str | int]) -> str:
    """Such as `methods, "noiser_k_max", limit`: an entry by its label or name rather than its number."""
    parts: list[str] = []
    at: Any = values
    for part in where:
        try:
            at = at[part]
        except (LookupError, TypeError):
            at = None
        named = isinstance(part, int) and isinstance(at, dict) and (at.get("label") or at.get("name"))
        parts.append(repr(named) if named else str(part))
    return ", ".join(parts)


_ENTRIES = {"models": ModelEntry, "data": DataEntry, "methods": MethodEntry, "metrics": MetricEntry}


def combined(limits: Iterable[int | None]) -> int | None:
    """The lowest of several limits; None where there is none."""
    return min((limit for limit in limits if limit is not None), default=None)
