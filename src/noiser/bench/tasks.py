"""Tasks, what workers need for them, and what they report: plain records that cross processes and machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from noiser.bench.plan import DataEntry, Plan
from noiser.bench.records import Selection
from noiser.bench.store import File
from noiser.evaluation.examples import Item


class Sampled(NamedTuple):
    """An example of the sample of a model and data set; `item.index` is its position there."""

    id: str
    category: str
    item: Item


class Preparation(NamedTuple):
    """A task: load a model, measure its speed, choose the examples that it gets right."""

    model: str


class Job(NamedTuple):
    """A task: all methods and metrics on a block of examples, for one model and data set."""

    model: str
    data: str
    block: int


Task = Preparation | Job


class Candidates(NamedTuple):
    """Examples to choose from, in the order of the draw; what was done to the data set; what was chosen before."""

    entry: DataEntry
    examples: tuple[Sampled, ...]
    notes: tuple[str, ...]
    selection: Selection | None


class PreparationAssignment(NamedTuple):
    """All that a worker needs for a preparation; the identity of the model, as stored, if it is known by now."""

    task: Preparation
    candidates: tuple[Candidates, ...]
    identity: Mapping[str, Any] | None


class JobAssignment(NamedTuple):
    """All that a worker needs for a job.

    Attributes:
        task, examples: the job, and the examples of its block.
        attributions: stored ones by method, each by example.
        measured: examples that have a row, by method and metric.
        identity: of the model, as stored; another one is refused.
    """

    task: Job
    examples: tuple[Sampled, ...]
    attributions: Mapping[str, Mapping[str, Mapping[str, Any]]]
    measured: Mapping[tuple[str, str], frozenset[str]]
    identity: Mapping[str, Any] | None


Assignment = PreparationAssignment | JobAssignment

Assign = Callable[[Task], Assignment | None]
"""What is left to do of a task; None if nothing is. Called when a worker is free, and again when one has died."""


class ModelReady(NamedTuple):
    """A model is loaded: its label, its identity with a hash of the weights, its plain forward passes' speed."""

    model: str
    identity: Mapping[str, Any]
    tokens_per_second: float


class JudgeReady(NamedTuple):
    """The model of a metric's local judge is loaded: the metric's label, the model's identity."""

    metric: str
    identity: Mapping[str, Any]


class Finished(NamedTuple):
    """A chunk of a job is finished.

    Attributes:
        files: lines to add to files, written in this order; rows are last, because they say that all is there.
        task, method, metric: the job, and the labels of what was done.
        examples, errors: how many examples it is about, and how many of them failed.
        seconds: that it took.
    """

    files: tuple[tuple[File, Sequence[Mapping[str, Any]]], ...]
    task: Job
    method: str
    metric: str
    examples: int
    errors: int
    seconds: float


Event = ModelReady | JudgeReady | Selection | Finished


class Started(NamedTuple):
    """A worker has taken up its task."""


class Done(NamedTuple):
    """A task is finished."""

    task: Task


class Lost(NamedTuple):
    """A task was given up."""

    task: Task
    reason: str


class Failed(NamedTuple):
    """A worker cannot work at all: the message of an expected error, or the traceback of another."""

    message: str
    expected: bool


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all workers of a run have in common.

    Attributes:
        plan: the plan.
        judges: identities of the models of local judges by metric, as stored.
        threads: CPU threads of each worker; None leaves them as they are.
    """

    plan: Plan
    judges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    threads: int | None = None


def next_task(tasks: Sequence[Task], loaded: str | None) -> int:
    """The index of the task to take next: preparations first, then by block; for the loaded model if there is one.

    All models and data sets advance together, so that a run that is stopped leaves balanced samples.
    """
    rounds = [task.block if isinstance(task, Job) else -1 for task in tasks]
    return min(range(len(tasks)), key=lambda index: (rounds[index], tasks[index].model != loaded, index))
