"""The engine: answers requests with a model in this process, or with one that runs elsewhere (`noiser.model.served`).

It runs the clean sequence once, keeps its keys and values, and recomputes every perturbed sequence only from its first
changed position to the last target that is read, in batches under a token budget. Answers do not depend on the batches.
The clean sequence has no pass of its own where it can travel with another: in front of the first packed batch, or as
one input of a gradient pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.engine import gradients
from noiser.engine.baseline import baseline_row
from noiser.engine.contrast import contrasted, of_each_branch
from noiser.engine.perturbation import Baseline, Perturbation
from noiser.engine.plan import Batch, Limits, Piece, Work, pack_batches, plan_batches
from noiser.engine.readouts import CleanRun, EffectReadout, Readout, ValueReadout
from noiser.engine.requests import (
    Attentions,
    Call,
    Clean,
    Counters,
    Effects,
    Gradients,
    PathIntegrals,
    Relevance,
    Request,
    Spent,
    Steps,
    Values,
)
from noiser.engine.scheduler import Progress, complete
from noiser.errors import ModelError, ParameterError, UnsupportedModelError
from noiser.model.attention import attention_maps
from noiser.model.clean import Passes, run_clean
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branches, Group, Packed
from noiser.model.prefix import Prefix, empty_prefix
from noiser.model.query import Query, query_passes
from noiser.types import Prompt

__all__ = ["LocalEngine", "Session"]

T = TypeVar("T")

LOGIT_BYTES = 192 * 2**20
"""Distributions are float32 over the whole vocabulary: 1 MB a target for Gemma 3. A batch holds no more than this."""

KEYS = 16
"""The most keys of a plain batch, in the tokens of a pass: as long as a layer keeps a token's activations, it keeps a
key and its value, which are a small part of that."""

MOST_PROMPTS = 64
"""The most prompts that are at work at a time: each has a cache and its clean distributions."""

CACHED = 4
"""The cached tokens of all prompts at work, in the tokens of a pass."""


class LocalEngine:
    """A model that answers requests about one prompt or many.

    Args:
        lm: the model.
        many: whether several prompts will be at work side by side, so that their passes are worth merging.
    """

    def __init__(self, lm: LanguageModel, *, many: bool = False) -> None:
        self.lm = lm
        self.share = many and lm.packs
        if self.share:
            lm.check_embeddings()

    def query(self, prompt: Prompt, **options: Any) -> Passes[Query]:
        """What is asked about a prompt; see `noiser.model.query.query_passes` for the options."""
        return query_passes(self.lm, prompt, share=self.share, **options)

    def answer(self, query: Query, steps: Steps[T], progress: Progress | None = None) -> Passes[T]:
        """Answers everything that a method or metric asks about a query; returns its result.

        Args:
            query: what the requests are about.
            steps: the method or metric at work.
            progress: called with the work done and the work expected, in token-forwards.
        """
        return self.session(query, progress).drive(steps)

    def ask(self, query: Query, request: Request, progress: Progress | None = None) -> Any:
        """The answer to one request, now."""
        return complete(self, self.session(query, progress).answer(request))

    def session(self, query: Query, progress: Progress | None = None) -> Session:
        """What answers everything about a query."""
        return Session(self.lm, query, share=self.share, progress=progress)

    # ---- what the scheduler needs -----------------------------------------------------------------------------------

    def has_room(self, waiting: Sequence[Branches]) -> bool:
        """Whether one more prompt may be at work beside those that wait for a pass."""
        cached = sum(
            pass_.prefix.length + (pass_.groups[0].embeddings.shape[1] if pass_.clean else 0) for pass_ in waiting
        )
        return len(waiting) < MOST_PROMPTS and cached < CACHED * self.lm.batch_tokens

    def choose(self, waiting: Sequence[Branches]) -> list[int]:
        """Which of the waiting passes run as one: large ones first, so that small ones wait until many do."""
        most_rows = LOGIT_BYTES // (4 * self.lm.vocabulary_size)
        chosen: list[int] = []
        tokens = rows = 0
        for index in sorted(range(len(waiting)), key=lambda index: -waiting[index].tokens):
            more = (tokens + waiting[index].tokens, rows + waiting[index].rows)
            if not chosen or (more[0] <= self.lm.batch_tokens and more[1] <= most_rows):
                chosen.append(index)
                tokens, rows = more
        return chosen

    def run(self, passes: Sequence[Branches]) -> list[Packed | Exception]:
        """One pass for all, in halves when memory runs out; an error is for all that were in the pass."""
        try:
            return [*self.lm.run_packed(passes)]
        except Exception as error:
            if len(passes) == 1 or not is_out_of_memory(error):
                return [_light(error) for _ in passes]
        free_memory(self.lm.device)
        middle = len(passes) // 2
        return [*self.run(passes[:middle]), *self.run(passes[middle:])]


class Session:
    """One query on a local model: what has been run of it, and what that took.

    Args:
        lm: the model.
        query: tokens, targets and foil.
        share: whether every packed pass, that of the clean sequence too, is merged with those of other prompts.
        progress: called with the work done and the work expected, in token-forwards.

    Attributes:
        progress: may be changed between one method or metric and the next.
        embeddings: [length, dim], unscaled rows of the embedding table, float32.
        counters: what has been run.
    """

    def __init__(
        self, lm: LanguageModel, query: Query, *, share: bool = False, progress: Progress | None = None
    ) -> None:
        self.lm, self.query, self.share = lm, query, share
        self.counters = Counters()
        self.progress = progress
        self._foil = None if query.foil_branch is None else Session(lm, query.foil_branch, share=share)
        self._prefix: Prefix | None = None
        self._clean: CleanRun | None = None
        self._baselines: dict[Baseline, Float[Tensor, " dim"]] = {}
        self._batch_tokens, self._batch_keys = lm.batch_tokens, KEYS * lm.batch_tokens
        with lm.running():
            self._scaled = lm.embed(query.token_ids)
            self.embeddings = self._scaled.float() / lm.embedding_scale
        done = query.continuation
        if done is not None and done.model is lm.model:
            self._prefix = done.prefix
            self.take_clean(done.logits)
            self._note_left_out(done.left_out)

    # ---- answers ----------------------------------------------------------------------------------------------------

    def drive(self, steps: Steps[T]) -> Passes[T]:
        """Answers requests until there are none; an error is raised where the request was made."""
        try:
            request = next(steps)
            while True:
                try:
                    answer = yield from self.answer(request)
                except Exception as error:
                    request = steps.throw(error)
                else:
                    request = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        finally:
            steps.close()

    def answer(self, request: Request) -> Passes[Any]:
        """The answer to one request; see `noiser.engine.requests`.

        Raises:
            NumericalError: the model returned NaN or infinite logits.
            ModelError: memory does not suffice for a single sequence.
        """
        if self._foil is None or isinstance(request, Call):
            return (yield from self._answer(request))
        target = yield from self._answer(of_each_branch(request))
        foil = yield from self._foil._answer(of_each_branch(request))
        clean = (yield from self.clean()), (yield from self._foil.clean())
        return contrasted(self.query, request, target, foil, [run.stats() for run in clean])

    def _answer(self, request: Request) -> Passes[Any]:
        """The answer to one request about the target alone, if the foil is a continuation of its own."""
        if self.query.of is not None:
            yield from self.clean()
        match request:
            case Effects():
                if self.query.foil_ids and request.score == "hellinger":
                    raise ParameterError(
                        "score='hellinger' compares whole distributions and has no foil; expected 'prob' or 'logprob' "
                        "with one."
                    )
                readout = partial(EffectReadout, score=request.score)
                return (yield from self._read(request.perturbations, readout, request.expected))
            case Values():
                return (yield from self._read(request.perturbations, partial(ValueReadout, value=request.value)))
            case Clean():
                return (yield from self.clean()).stats()
            case Spent():
                return self.counters
            case _ if not self.lm.looks_inside:
                raise _elsewhere(request)
            case PathIntegrals():
                return (yield from gradients.path_integrals(self, request))
            case Gradients():
                return (yield from gradients.point_gradients(self, request))
            case Relevance():
                return gradients.relevance(self, request)
            case Attentions():
                return self._attentions()
            case Call():
                return request.function(self)
            case _:
                raise _unanswerable(request)

    def ask(self, request: Request) -> Any:
        """The answer to a request of a function that cannot wait; its passes run by themselves, without progress."""
        progress, self.progress = self.progress, None
        try:
            return complete(LocalEngine(self.lm), self.answer(request))
        finally:
            self.progress = progress

    def _attentions(self) -> list[Float[Tensor, "length length"]]:
        maps, logits = attention_maps(self.lm, self.query.token_ids, self.query.logit_positions)
        self.take_clean(logits)
        self.count(len(self.query.token_ids), head_rows=0)
        self.report()
        return maps

    # ---- the clean sequence -----------------------------------------------------------------------------------------

    def clean(self) -> Passes[CleanRun]:
        """The unperturbed distributions; run now if no other pass has brought them yet."""
        if self._clean is None:
            yield from self._run_clean()
        assert self._clean is not None
        return self._clean

    @property
    def known_clean(self) -> CleanRun | None:
        """The unperturbed distributions, if they are there already."""
        return self._clean

    def take_clean(self, logits: Float[Tensor, "targets vocab"]) -> None:
        """Takes the clean sequence's logits from a pass that had them anyway.

        Raises:
            NumericalError: they are NaN or infinite.
        """
        if self._clean is None:
            probabilities = logits.detach().float().softmax(-1)
            check_finite(probabilities, self.lm.dtype)
            self._clean = CleanRun(probabilities, self.query)

    def _run_clean(self) -> Passes[None]:
        positions = self.query.logit_positions
        tokens = self._exact(range(len(positions)))
        run = yield from run_clean(self.lm, self._scaled, positions, share=self.share, tokens=tokens)
        self._prefix = run.prefix
        self.take_clean(run.logits)
        self._note_left_out(run.left_out)

    def prepare_prefix(self, perturbations: Sequence[Perturbation]) -> Passes[None]:
        """Runs the clean sequence for its keys and values, if that saves more tokens than it costs."""
        saved = sum(self._start(p) * p.samples for p in perturbations)
        if self._prefix is None and self._reuses_prefix and saved > len(self.query.token_ids):
            yield from self._run_clean()

    @property
    def _reuses_prefix(self) -> bool:
        return self.lm.reuses_prefix(len(self.query.token_ids))

    def baseline(self, name: Baseline) -> Float[Tensor, " dim"]:
        """The row of a baseline, made once."""
        if name not in self._baselines:
            self._baselines[name] = baseline_row(self.lm, name)
        return self._baselines[name]

    # ---- distributions under perturbations --------------------------------------------------------------------------

    def _read(
        self,
        perturbations: Sequence[Perturbation],
        readout_of: Callable[[CleanRun], Readout[T]],
        expected: float = 0.0,
    ) -> Passes[T]:
        """What a readout makes of every perturbation, copied from the device once."""
        if not self.lm.takes_embeddings and any(perturbation.replaced for perturbation in perturbations):
            raise UnsupportedModelError(
                f"{self.lm.identity.name} reads text alone: tokens can be taken out of it, not changed; expected "
                "perturbations that only delete. Take a method with baseline='delete', such as "
                "noiser.Occlusion(baseline='delete')."
            )
        wanted = [i for i, p in enumerate(perturbations) if p.targets is None or p.targets]
        targets = [self.targets_of(p) for p in perturbations]
        numbers: list[Tensor] = [torch.empty(p.samples, 0, 0) for p in perturbations]
        readout: Readout[T] | None = None
        parts: dict[int, list[Tensor]] = {}
        missing = [p.samples for p in perturbations]
        packed = self.share or (self.lm.device.type == "cpu" and self.lm.packs)
        if wanted and not packed and self._prefix is None and self._reuses_prefix:
            yield from self._run_clean()
        batches = self.plan(perturbations, wanted, packed=packed)
        expected = max(expected, self.counters.token_forwards + sum(batch.tokens for batch in batches))
        for batch in batches:
            for piece, distributions in (yield from self._distributions(batch, perturbations, packed=packed)):
                index = piece.perturbation
                parts.setdefault(index, []).append(distributions)
                missing[index] -= piece.samples
                if not missing[index]:
                    readout = readout or readout_of((yield from self.clean()))
                    ready = parts.pop(index)
                    numbers[index] = readout.measure(ready[0] if len(ready) == 1 else torch.cat(ready), targets[index])
            self.report(expected)
        readout = readout or readout_of((yield from self.clean()))
        copied = torch.cat([numbers[i].flatten() for i in wanted]).cpu() if wanted else torch.empty(0)
        for i, part in zip(wanted, copied.split([numbers[i].numel() for i in wanted]) if wanted else (), strict=True):
            numbers[i] = part.view(numbers[i].shape)
        return readout.table(numbers, targets)

    def _distributions(
        self, batch: Batch, perturbations: Sequence[Perturbation], *, packed: bool
    ) -> Passes[list[tuple[Piece, Float[Tensor, "samples targets vocab"]]]]:
        """Distributions of a batch, in halves when memory runs out; later plans then stay that small."""
        try:
            if packed:
                return (yield from self._packed_pass(batch, perturbations))
            return self._plain_pass(batch, perturbations)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        first, second = self.halved(batch)
        return [
            *(yield from self._distributions(first, perturbations, packed=packed)),
            *(yield from self._distributions(second, perturbations, packed=packed)),
        ]

    def _packed_pass(
        self, batch: Batch, perturbations: Sequence[Perturbation]
    ) -> Passes[list[tuple[Piece, Float[Tensor, "samples targets vocab"]]]]:
        fresh = self._prefix is None
        with self.lm.running():
            groups = [
                Group(
                    piece.start,
                    self._piece_inputs(piece, perturbations),
                    self.rows(perturbations[piece.perturbation]),
                    self._exact(self._tokens_of(perturbations[piece.perturbation])),
                )
                for piece in batch.pieces
            ]
        if fresh:
            positions = self.query.logit_positions
            groups = [Group(0, self._scaled[None], positions, self._exact(range(len(positions)))), *groups]
        logits, prefix, left_out = yield Branches(self._prefix or empty_prefix(self.lm), groups, clean=fresh)
        self._note_left_out(left_out)
        if fresh:
            self._prefix = prefix
            self.take_clean(logits.pop(0)[0])
        self.count(batch.tokens, sum(part.shape[0] * part.shape[1] for part in logits))
        distributions = [part.softmax(-1) for part in logits]
        check_finite(torch.cat([each[..., :1].flatten(0, 1) for each in distributions]), self.lm.dtype)
        return list(zip(batch.pieces, distributions, strict=True))

    def _plain_pass(
        self, batch: Batch, perturbations: Sequence[Perturbation]
    ) -> list[tuple[Piece, Float[Tensor, "samples targets vocab"]]]:
        rows = self.batch_rows(batch, perturbations)
        with self.lm.running():
            inputs = self.inputs(batch, perturbations)
            found = self.lm.probabilities(
                inputs, positions=[row - batch.start for row in rows], prefix=self.prefix(batch)
            )
        self.count(batch.tokens, len(rows) * batch.sequences)
        ready: list[tuple[Piece, Tensor]] = []
        for piece, part in zip(batch.pieces, found.split([piece.samples for piece in batch.pieces]), strict=True):
            columns = [rows.index(row) for row in self.rows(perturbations[piece.perturbation])]
            ready.append((piece, part if columns == list(range(len(rows))) else part[:, columns]))
        return ready

    # ---- batches, shared with gradient passes -----------------------------------------------------------------------

    def plan(
        self, perturbations: Sequence[Perturbation], wanted: Sequence[int], *, copies: int = 1, packed: bool = False
    ) -> list[Batch]:
        """Batches that hold all samples of the wanted perturbations.

        Args:
            perturbations: what has to run.
            wanted: indices of those that are run.
            copies: how many times the memory of a plain forward pass each token takes.
            packed: whether each sequence has its own start and stop, or all of a batch the same.
        """
        after_prefix = packed or self._prefix is not None
        work = [
            Work(self._start(p) if after_prefix else 0, max(self.rows(p)) + 1, p.samples)
            for p in (perturbations[i] for i in wanted)
        ]
        rows = max((len(self.rows(perturbations[i])) for i in wanted), default=1)
        vocabulary_bytes = self.lm.vocabulary_size * 4 * rows
        max_tokens = max(1, self._batch_tokens // copies)
        max_sequences = max(1, LOGIT_BYTES // (vocabulary_bytes * copies))
        if packed:
            batches = pack_batches(work, max_tokens=max_tokens, max_sequences=max_sequences)
        else:
            overhead = 128 if self.lm.device.type == "cpu" else 4096
            limits = Limits(max_tokens, max_sequences, max(1, self._batch_keys // copies))
            batches = plan_batches(work, limits, overhead=overhead)
        return [
            Batch(tuple(piece._replace(perturbation=wanted[piece.perturbation]) for piece in batch.pieces))
            for batch in batches
        ]

    def run_directly(self, batch: Batch, run: Callable[[Batch], Iterable[T]], copies: int) -> Iterator[T]:
        """What `run` makes of a batch, in halves when memory runs out."""
        try:
            results = list(run(batch))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            results = None
        if results is not None:
            yield from results
            return
        for half in self.halved(batch, copies):
            yield from self.run_directly(half, run, copies)

    def halved(self, batch: Batch, copies: int = 1) -> tuple[Batch, Batch]:
        """The halves of a batch for which memory did not suffice; later plans stay that small.

        Raises:
            ModelError: it is a single sequence.
        """
        if batch.sequences == 1:
            raise ModelError(
                f"Not enough memory on {self.lm.device} to run one sequence of {batch.stop} tokens. "
                "Shorten the prompt, attribute fewer targets at once, or load the model in a smaller dtype."
            )
        free_memory(self.lm.device)
        self._batch_tokens = max(1, min(self._batch_tokens, batch.tokens * copies) // 2)
        self._batch_keys = max(1, min(self._batch_keys, batch.sequences * batch.stop * copies) // 2)
        singles = [p._replace(first=i, last=i + 1) for p in batch.pieces for i in range(p.first, p.last)]
        middle = len(singles) // 2
        return Batch(tuple(singles[:middle])), Batch(tuple(singles[middle:]))

    def targets_of(self, perturbation: Perturbation) -> tuple[int, ...]:
        """Indices of the targets that a perturbation is read at."""
        every = tuple(range(len(self.query.target_spans)))
        return every if perturbation.targets is None else perturbation.targets

    def rows(self, perturbation: Perturbation) -> list[int]:
        """The positions in the perturbed sequence whose logits predict the tokens of the targets that it is read at.

        Raises:
            ParameterError: every token before a target is deleted.
        """
        rows = [perturbation.index(self.query.logit_positions[token]) for token in self._tokens_of(perturbation)]
        if -1 in rows:
            raise ParameterError(
                f"Deleting {len(perturbation.deleted)} tokens leaves none before a target; expected at least one, from "
                "which to predict it. Keep a unit, or remove units in another way than by deletion."
            )
        return rows

    def _tokens_of(self, perturbation: Perturbation) -> list[int]:
        """Indices of the tokens of the targets that a perturbation is read at."""
        return [token for g in self.targets_of(perturbation) for token in self.query.target_spans[g]]

    def _exact(self, tokens: Iterable[int]) -> list[tuple[int, ...]]:
        """For each target token the ids whose probabilities must be exact: its own, and the foil's."""
        foil = () if self.query.foil_id is None else (self.query.foil_id,)
        return [(self.query.target_ids[token], *foil) for token in tokens]

    def batch_rows(self, batch: Batch, perturbations: Sequence[Perturbation]) -> list[int]:
        """The positions whose logits any sequence of a batch needs, ascending."""
        return sorted({row for piece in batch.pieces for row in self.rows(perturbations[piece.perturbation])})

    def prefix(self, batch: Batch) -> Prefix | None:
        """The clean cache before a batch; None if it begins with the sequence."""
        return self._prefix.branch(batch.start, batch.sequences) if self._prefix and batch.start else None

    def inputs(self, batch: Batch, perturbations: Sequence[Perturbation]) -> Float[Tensor, "batch length dim"]:
        """The embeddings that the model reads for a batch whose sequences have one start and stop."""
        return torch.cat([self._piece_inputs(piece, perturbations) for piece in batch.pieces])

    def at(self, positions: Sequence[int]) -> slice | Int[Tensor, " positions"]:
        """Ascending positions as an index; neighbours as a slice, for which the device need not be told anything."""
        first, stop = (positions[0], positions[-1] + 1) if positions else (0, 0)
        if stop - first == len(positions):
            return slice(first, stop)
        return torch.tensor(positions, device=self._scaled.device)

    def _start(self, perturbation: Perturbation) -> int:
        # One token at least is run after a prefix: a sequence cannot be empty.
        if not self._reuses_prefix:
            return 0
        return min(*perturbation.positions, min(self.rows(perturbation)))

    def _piece_inputs(self, piece: Piece, perturbations: Sequence[Perturbation]) -> Float[Tensor, "samples length dim"]:
        perturbation = perturbations[piece.perturbation]
        tokens = perturbation.tokens(piece.start, piece.stop, len(self._scaled))
        inputs = self._scaled[self.at(tokens)].repeat(piece.samples, 1, 1)
        clean = self.embeddings[self.at(perturbation.replaced)]
        rows = perturbation.rows(clean, self.baseline)[piece.first : piece.last]
        changed = (rows * self.lm.embedding_scale).to(inputs.dtype)
        inside = tuple(i - piece.start for i in map(perturbation.index, perturbation.replaced) if i < piece.stop)
        inputs[:, self.at(inside)] = changed[:, : len(inside)]
        missing = piece.stop - piece.start - len(tokens)  # of a shortened sequence among longer ones, never read
        return torch.cat([inputs, inputs[:, -1:].expand(-1, missing, -1)], 1) if missing else inputs

    # ---- what it took -----------------------------------------------------------------------------------------------

    def count(self, tokens: int, head_rows: int, passes: int = 1) -> None:
        """Counts a pass; `passes` is its backward passes too, each as much as a forward pass."""
        before = self.counters
        self.counters = before._replace(
            token_forwards=before.token_forwards + tokens * passes,
            passes=before.passes + passes,
            head_rows=before.head_rows + head_rows,
        )

    def _note_left_out(self, left_out: float) -> None:
        self.counters = self.counters._replace(left_out=max(self.counters.left_out, left_out))

    def report(self, expected: float = 0.0) -> None:
        """Tells the progress callback how much has been done of the work expected in all."""
        if self.progress is not None:
            done = self.counters.token_forwards
            self.progress(done, max(done, expected))


def _unanswerable(request: Request) -> ParameterError:
    return ParameterError(f"A local model cannot answer {type(request).__name__}; expected one of noiser.engine's.")


def _elsewhere(request: Request) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(request).__name__} needs the model's layers, and this model runs outside of this process, where it "
        "only predicts; expected Effects, Values, Clean or Spent. Take a method that asks for these, such as "
        "'occlusion'."
    )


def _light(error: Exception) -> Exception:
    """An error; where memory ran out, without its traceback, which would hold what the pass had made until then."""
    return torch.OutOfMemoryError(str(error)) if is_out_of_memory(error) else error
