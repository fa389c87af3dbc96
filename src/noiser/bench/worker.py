"""The work itself: a task in, events out. It holds the model; it writes nothing and knows no folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from noiser.bench.block import work_on
from noiser.bench.identity import check_identity, identity_of, tokens_per_second
from noiser.bench.plan import MetricEntry, ModelEntry
from noiser.bench.samples import is_enough, select, select_all
from noiser.bench.tasks import (
    Assignment,
    Event,
    JobAssignment,
    ModelReady,
    PreparationAssignment,
    Selected,
    Setup,
)
from noiser.judges import Judge, make_judge
from noiser.model import LanguageModel, load_model

__all__ = ["Worker"]


class Worker:
    """Does tasks one after the other and keeps the model between them.

    Args:
        setup: what all workers have in common.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._loaded: tuple[str, LanguageModel] | None = None
        self._checked: set[str] = set()
        self._judge_models: dict[str, LanguageModel] = {}
        self._judges: dict[str, Judge] = {}
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)

    def perform(self, assignment: Assignment) -> Iterator[Event]:
        """Does a task; tells what is finished as soon as it is.

        Raises:
            NoiserError: the model cannot be loaded, or is another one than before; the judge cannot be made.
        """
        lm = self._model(assignment.task.model)
        if isinstance(assignment, JobAssignment):
            entry = next(entry for entry in self.setup.plan.data if entry.label == assignment.task.data)
            yield from work_on(
                assignment, lm=lm, plan=self.setup.plan, data=entry, judge_of=lambda metric: self._judge(metric, lm)
            )
        else:
            yield from self._prepare(assignment, lm)

    def _prepare(self, assignment: PreparationAssignment, lm: LanguageModel) -> Iterator[Event]:
        label = assignment.task.model
        yield ModelReady(label, identity_of(lm), tokens_per_second(lm))
        for wanted in assignment.wanted:
            if not wanted.entry.only_correct:
                yield Selected(select_all(label, wanted))
            elif not is_enough(wanted.known, wanted.entry.limit):
                yield from map(Selected, select(label, lm, wanted))

    def _model(self, label: str) -> LanguageModel:
        if self._loaded is None or self._loaded[0] != label:
            self._loaded = None  # before the next one needs its memory
            with contextlib.suppress(AttributeError, RuntimeError):
                torch.cuda.empty_cache()
            entry = next(entry for entry in self.setup.plan.models if entry.label == label)
            self._loaded = (label, _load(entry))
            _ = self._loaded[1].packs  # measured once, which no example is charged for
        lm = self._loaded[1]
        stored = self.setup.identities.get(label)
        if stored is not None and label not in self._checked:
            check_identity(label, identity_of(lm), stored)
            self._checked.add(label)
        return lm

    def _judge(self, entry: MetricEntry, lm: LanguageModel) -> Judge | None:
        if entry.judge is None:
            return None
        kind, _, name = entry.judge.partition(":")
        if kind != "local":
            if entry.label not in self._judges:  # one for all jobs: a budget is one for all of them too
                self._judges[entry.label] = make_judge(entry.judge, **entry.judge_args)
            return self._judges[entry.label]
        if name and name not in self._judge_models:
            self._judge_models[name] = load_model(name)
        return make_judge("local", lm=self._judge_models[name] if name else lm, **entry.judge_args)


def _load(entry: ModelEntry) -> LanguageModel:
    options: dict[str, Any] = {"device_map": entry.device_map} if entry.device_map else {"device": entry.device}
    return load_model(
        entry.name,
        dtype=entry.dtype,
        revision=entry.revision,
        trust_remote_code=entry.trust_remote_code,
        **options,
    )
