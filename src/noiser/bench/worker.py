"""The work itself: a task in, events out. A worker holds the model; it writes nothing and knows no folder."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from noiser.bench.block import work_on
from noiser.bench.plan import MetricEntry, ModelEntry
from noiser.bench.samples import select
from noiser.bench.tasks import Assignment, Done, Event, Failed, JobAssignment, JudgeReady, ModelReady, Setup, Started
from noiser.errors import NoiserError, StoredFileError
from noiser.judges import Judge, kind_of, make_judge
from noiser.model import LanguageModel, load_model
from noiser.model.identity import sample_weights
from noiser.model.memory import free_memory

_PROBE = "The capital of France is Paris, and the"
"""A text after which models disagree."""

_LIKELY, _NOISE = 20, 0.25
"""How many likely tokens are stored of a served model; and how much their log-probabilities may change."""

_COMMIT = 40
"""Digits of a commit; a hash of files has 64."""


class Worker:
    """Does tasks one after the other and keeps the model between them.

    Args:
        setup: what all workers have in common.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._loaded: tuple[str, LanguageModel, Mapping[str, Any]] | None = None
        self._judge_models: dict[str, LanguageModel] = {}
        self._judges: dict[str, Judge] = {}
        self._new_judges: list[JudgeReady] = []
        self._known_judges: set[str] = set()
        self._steps: Iterator[Event | Started | Done] = iter(())
        if setup.threads is not None:
            torch.set_num_threads(setup.threads)

    def step(self, assignment: Assignment | None = None) -> Event | Started | Done | Failed:
        """One event at a time: the next of the current task or, with an assignment, `Started` of that one."""
        try:
            if assignment is not None:
                self._steps = self._from_start_to_end(assignment)
            return next(self._steps)
        except (NoiserError, OSError) as error:
            return Failed(str(error) or type(error).__name__, expected=True)
        except Exception:
            return Failed(traceback.format_exc(), expected=False)

    def _from_start_to_end(self, assignment: Assignment) -> Iterator[Event | Started | Done]:
        yield Started()
        yield from self.perform(assignment)
        yield Done(assignment.task)

    def perform(self, assignment: Assignment) -> Iterator[Event]:
        """Does a task; yields what is finished as soon as it is.

        Raises:
            NoiserError: the model cannot be loaded, or is another one than before; the judge cannot be made.
        """
        label = assignment.task.model
        lm, identity = self._model(label, assignment.identity)
        if isinstance(assignment, JobAssignment):
            plan = self.setup.plan
            entry = plan.entry("data", assignment.task.data)
            for event in work_on(
                assignment, lm=lm, plan=plan, data=entry, judge_of=lambda metric: self._judge(metric, lm)
            ):
                while self._new_judges:  # before rows that it gave
                    yield self._new_judges.pop()
                yield event
            return
        yield ModelReady(label, identity, tokens_per_second(lm))
        for candidates in assignment.candidates:
            yield from select(label, lm, candidates)

    def _model(self, label: str, stored: Mapping[str, Any] | None) -> tuple[LanguageModel, Mapping[str, Any]]:
        """The model and its identity, which has to be the stored one."""
        if self._loaded is None or self._loaded[0] != label:
            self._loaded = None  # before the next one needs its memory
            free_memory()
            lm = self._load(label, stored)
            _ = lm.packs  # measured once, which no example is charged for
            self._loaded = (label, lm, identity_of(lm))
        _, lm, identity = self._loaded
        if stored is not None:
            check_identity(f"The model {label!r}", identity, stored)
        return lm, identity

    def _load(self, name: str, identity: Mapping[str, Any] | None) -> LanguageModel:
        """A model of the plan by its label, or another one by its name."""
        plan = self.setup.plan
        entry = plan.entry("models", name) if name in plan.labels("models") else ModelEntry(name=name)
        return load_model(entry.name, **entry.load_options | stored_commit(identity))

    def _judge(self, entry: MetricEntry, lm: LanguageModel) -> Judge | None:
        if entry.judge is None:
            return None
        _, _, name = entry.judge.partition(":")
        if kind_of(entry.judge) != "local":
            if entry.label not in self._judges:  # one for all jobs: a budget is one for all of them too
                job = {"job": f"{self.setup.plan.name}/{entry.label}"} if kind_of(entry.judge) == "openai" else {}
                self._judges[entry.label] = make_judge(entry.judge, **job | entry.judge_args)
            return self._judges[entry.label]
        if name and name not in self._judge_models:
            self._judge_models[name] = self._load(name, self.setup.judges.get(entry.label))
        if name and entry.label not in self._known_judges:
            self._known_judges.add(entry.label)
            self._new_judges.append(JudgeReady(entry.label, identity_of(self._judge_models[name])))
        return make_judge("local", lm=self._judge_models[name] if name else lm, **entry.judge_args)


def stored_commit(identity: Mapping[str, Any] | None) -> dict[str, Any]:
    """The commit that stored rows are about, as an option of `load_model`: the hub may have a newer one by now."""
    revision = (identity or {}).get("revision") or ""
    return {"revision": revision} if len(revision) == _COMMIT else {}


def identity_of(lm: LanguageModel) -> dict[str, Any]:
    """Name, revision, dtype, architecture, the sha256 of samples of weight tensors; and a served model's behaviour."""
    identity = {**lm.identity._asdict(), "weights": sample_weights(lm.model)}
    return identity if lm.looks_inside else identity | {"behaviour": _behaviour(lm)}


def _behaviour(lm: LanguageModel) -> str:
    """The most probable tokens after a text with their log-probabilities, in place of weights, which are elsewhere."""
    ids = torch.tensor([lm.encode(_PROBE).token_ids])
    with lm.running():
        found = lm.logits(lm.embed(ids), positions=[ids.shape[1] - 1])[0, 0].log_softmax(-1).topk(_LIKELY)
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return " ".join(f"{token}:{logprob:.3f}" for token, logprob in pairs)


def _behave_alike(behaviour: str, stored: str) -> bool:
    """Whether the tokens that were likeliest are as likely now, but for what batches and kernels do to numbers."""
    now, before = (
        {token: float(logprob) for token, _, logprob in (pair.partition(":") for pair in each.split())}
        for each in (behaviour, stored)
    )
    return all(abs(now.get(token, -math.inf) - before[token]) < _NOISE for token in [*before][: _LIKELY // 4])


def check_identity(what: str, identity: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raises StoredFileError where the model, called `what`, is not the one that rows are stored of.

    A revision, the hub's commit or a hash of files, tells of another configuration or tokenizer, too; the first edition
    had none of a folder.
    """
    keys = ["weights", "dtype", "architecture"]
    keys += ["revision"] if identity.get("revision") and stored.get("revision") else []
    changes = [
        f"{key} was {stored.get(key)!r} and is {identity[key]!r}" for key in keys if identity[key] != stored.get(key)
    ]
    now, before = identity.get("behaviour"), stored.get("behaviour")
    if now and before and not _behave_alike(now, before):
        changes.append("its server predicts other tokens after the same text")
    if changes:
        raise StoredFileError(
            f"{what} is not the one that the stored rows are about: {'; '.join(changes)}. Load the same weights, or "
            "start another folder. Nothing stored was changed."
        )


def tokens_per_second(lm: LanguageModel) -> float:
    """The speed of a plain forward pass, measured on one batch."""
    length = 16
    rows = max(1, min(lm.batch_tokens, 1024) // length)
    ids = torch.linspace(0, lm.vocabulary_size - 1, rows * length, dtype=torch.float64).long().reshape(rows, length)
    with lm.running():
        inputs = lm.embed(ids)
        lm.logits(inputs[:1], positions=[length - 1])  # what is done once
        started = time.perf_counter()
        lm.logits(inputs, positions=[length - 1]).sum().item()
        return rows * length / (time.perf_counter() - started)
