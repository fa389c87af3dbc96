"""What workers are given and what they give back: plain records, so that they can cross processes and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from noiser.bench.plan import DataEntry, Plan
from noiser.bench.records import Selection
from noiser.bench.store import File
from noiser.evaluation.examples import Item

__all__ = [
    "Assignment",
    "Event",
    "Finished",
    "Job",
    "JobAssignment",
    "ModelReady",
    "Preparation",
    "PreparationAssignment",
    "Sampled",
    "Selected",
    "Setup",
    "Task",
    "Wanted",
    "next_task",
]


class Sampled(NamedTuple):
    """An example in its place in the sample of a model and data set."""

    id: str
    category: str
    item: Item


class Preparation(NamedTuple):
    """A task: load a model, measure its speed, choose the examples that it gets right."""

    model: str

    @property
    def round(self) -> int:
        """Before all jobs."""
        return -1


class Job(NamedTuple):
    """A task: all methods and metrics on a block of examples, for one model and data set."""

    model: str
    data: str
    block: int

    @property
    def round(self) -> int:
        """Blocks of all models and data sets go side by side, so that a run that is stopped leaves balanced samples."""
        return self.block


Task = Preparation | Job


class Wanted(NamedTuple):
    """Examples of a data set to choose from.

    Attributes:
        entry: of the plan.
        examples: in the order of the draw.
        notes: what was done to the data set.
        known: what was chosen before.
    """

    entry: DataEntry
    examples: tuple[Sampled, ...]
    notes: tuple[str, ...]
    known: Selection | None


class PreparationAssignment(NamedTuple):
    """All that a worker needs for a preparation."""

    task: Preparation
    wanted: tuple[Wanted, ...]


class JobAssignment(NamedTuple):
    """All that a worker needs for a job.

    Attributes:
        task: the job.
        examples: of its block.
        attributions: stored ones by method, each by example.
        measured: examples that have a row, by method and metric.
    """

    task: Job
    examples: tuple[Sampled, ...]
    attributions: Mapping[str, Mapping[str, Mapping[str, Any]]]
    measured: Mapping[tuple[str, str], frozenset[str]]


Assignment = PreparationAssignment | JobAssignment


class ModelReady(NamedTuple):
    """Says what was loaded.

    Attributes:
        model: its label.
        identity: name, revision, dtype, architecture, and a hash of the weights.
        tokens_per_second: of a plain forward pass.
    """

    model: str
    identity: Mapping[str, Any]
    tokens_per_second: float


class Selected(NamedTuple):
    """Says which examples were chosen."""

    selection: Selection


class Finished(NamedTuple):
    """One finished chunk.

    Attributes:
        files: lines to add to files, to be written in this order; rows are last, as they say that all is there.
        method, metric: labels.
        examples: how many it is about.
        errors: how many of them failed.
        seconds: that it took.
    """

    files: tuple[tuple[File, Sequence[Mapping[str, Any]]], ...]
    task: Job
    method: str
    metric: str
    examples: int
    errors: int
    seconds: float


Event = ModelReady | Selected | Finished


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all workers of a run have in common.

    Attributes:
        plan: the plan.
        identities: what is known of models, by label: another identity is refused.
        threads: CPU threads a worker; None leaves them as they are.
    """

    plan: Plan
    identities: Mapping[str, Mapping[str, Any]]
    threads: int | None = None


def next_task(tasks: Sequence[Task], loaded: str | None) -> int:
    """The index of the task to take next: of the earliest round, for the model that is loaded if there is one."""
    first = min(task.round for task in tasks)
    candidates = [index for index, task in enumerate(tasks) if task.round == first]
    return next((index for index in candidates if tasks[index].model == loaded), candidates[0])
