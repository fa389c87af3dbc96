"""Perturbations in, next-token distributions out: the one place where perturbed inputs meet the model.

The engine runs the clean sequence once, keeps its keys and values, and recomputes every perturbed sequence only
from its first changed position to the last target that is wanted, in batches under a token budget. What comes out
does not depend on the batches. The clean sequence has no pass of its own where it can travel with another: in front of
the first packed batch, or as the input of a method's own run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.engine.perturbation import Perturbation
from noiser.engine.plan import Batch, Limits, Piece, Work, pack_batches, plan_batches
from noiser.errors import ModelError
from noiser.model.clean import run_clean
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branches, Group
from noiser.model.prefix import Prefix, empty_prefix
from noiser.model.query import Query
from noiser.types import Span

__all__ = ["LOGIT_BYTES", "Engine", "Progress"]

Found = TypeVar("Found")

Progress = Callable[[float, float], None]
"""Called with the work done and the work expected, in token-forwards."""

LOGIT_BYTES = 192 * 2**20
"""Distributions are float32 over the whole vocabulary: 1 MB a target for Gemma 3. A batch holds no more than this."""

KEYS = 16
"""The most keys of a plain batch, in the tokens of a pass: as long as a layer keeps a token's activations, it keeps a
key and its value, which are a small part of that."""


class Engine:
    """A model, ready to answer one query under many perturbations.

    Args:
        lm: the model.
        query: tokens, targets and units.
        progress: told about the work as it goes.

    Attributes:
        table_rows: [length, dim], the clean input as rows of the embedding table, float32.
        token_forwards: tokens that have been run, the clean sequence's apart.
        passes: forward passes, the clean sequence's own apart.
        head_rows: rows of logits that have been computed, the clean sequence's apart.
    """

    def __init__(self, lm: LanguageModel, query: Query, *, progress: Progress | None = None) -> None:
        self.lm, self.query = lm, query
        self.token_forwards = self.passes = self.head_rows = 0
        self._progress = progress
        self._prefix: Prefix | None = None
        self._clean: Float[Tensor, "targets vocab"] | None = None
        self._batch_tokens, self._batch_keys = lm.batch_tokens, KEYS * lm.batch_tokens
        with lm.running():
            self._embeddings = lm.embed(query.token_ids)
            self.table_rows = self._embeddings.float() / lm.embedding_scale
        done = query.continuation
        if done is not None and done.model is lm.model:
            self._prefix = done.prefix
            self.take_clean(done.logits)

    @property
    def clean(self) -> Float[Tensor, "targets vocab"]:
        """The unperturbed next-token distributions, float32; run now if no other run has brought them yet."""
        if self._clean is None:
            self._run_clean()
        assert self._clean is not None
        return self._clean

    @property
    def knows_clean(self) -> bool:
        """Whether the unperturbed distributions are there already."""
        return self._clean is not None

    def take_clean(self, logits: Float[Tensor, "targets vocab"]) -> None:
        """Takes the clean sequence's logits from a run that had them anyway.

        Raises:
            NumericalError: they are NaN or infinite.
        """
        if self._clean is None:
            clean = logits.detach().float().softmax(-1)
            check_finite(clean, self.lm.dtype)
            self._clean = clean

    def _run_clean(self) -> None:
        logits, self._prefix = run_clean(self.lm, self._embeddings, self.query.rows)
        self.take_clean(logits)

    def narrowed(self, units: tuple[Span, ...]) -> Engine:
        """An engine for other units of the same query; what has been run of the clean sequence is shared."""
        other = copy.copy(self)
        other.query = replace(self.query, units=units)
        done = self.token_forwards
        other.token_forwards = other.passes = other.head_rows = 0
        if (progress := self._progress) is not None:

            def shifted(now: float, expected: float) -> None:
                progress(done + now, done + expected)

            other._progress = shifted
        return other

    def absorb(self, other: Engine) -> None:
        """Books what a narrowed engine has done, and keeps what it knows of the clean sequence."""
        self.token_forwards += other.token_forwards
        self.passes += other.passes
        self.head_rows += other.head_rows
        self._prefix, self._clean = self._prefix or other._prefix, other._clean if self._clean is None else self._clean

    def report(self, expected: float) -> None:
        """Tells the progress callback how much has been done of the work expected in all."""
        if self._progress is not None:
            self._progress(min(self.token_forwards, expected), expected)

    def distributions(
        self, perturbations: Sequence[Perturbation]
    ) -> Iterator[tuple[int, Float[Tensor, "samples targets vocab"]]]:
        """Next-token distributions of the wanted targets under each perturbation.

        Yields:
            (index, distributions) in the order in which they get ready, each perturbation once with all its samples:
            float32 [samples, its targets, vocab] on the model's device. The tensor may be used freely.

        Raises:
            NumericalError: the model returned NaN or infinite logits.
            ModelError: memory does not suffice for a single sequence.
        """
        parts: dict[int, list[Float[Tensor, "samples targets vocab"]]] = {}
        missing = [p.samples for p in perturbations]
        packed = self.lm.shares_passes or (self.lm.device.type == "cpu" and self.lm.packs)
        if not packed and self._prefix is None and self._reuses_prefix:
            self._run_clean()
        forward = self._packed_forward if packed else self._forward
        for batch in self.plan(perturbations, packed=packed):
            for piece, distributions in self.run(batch, partial(forward, perturbations), packed=packed):
                parts.setdefault(piece.perturbation, []).append(distributions)
                missing[piece.perturbation] -= piece.samples
                if not missing[piece.perturbation]:
                    ready = parts.pop(piece.perturbation)
                    yield piece.perturbation, ready[0] if len(ready) == 1 else torch.cat(ready)

    def plan(self, perturbations: Sequence[Perturbation], *, copies: int = 1, packed: bool = False) -> list[Batch]:
        """Batches that hold all samples of the perturbations.

        Args:
            perturbations: what has to run.
            copies: how many times the memory of a plain forward pass each token takes.
            packed: whether each sequence has its own start and stop, or all of a batch the same.
        """
        behind_prefix = packed or self._prefix is not None
        work = [Work(self._start(p) if behind_prefix else 0, max(self.rows(p)) + 1, p.samples) for p in perturbations]
        rows = max((len(self.rows(p)) for p in perturbations), default=1)
        vocabulary_bytes = self.lm.vocabulary_size * 4 * rows
        max_tokens = max(1, self._batch_tokens // copies)
        max_sequences = max(1, LOGIT_BYTES // (vocabulary_bytes * copies))
        if packed:
            return pack_batches(work, max_tokens=max_tokens, max_sequences=max_sequences)
        overhead = 128 if self.lm.device.type == "cpu" else 4096
        limits = Limits(max_tokens, max_sequences, max(1, self._batch_keys // copies))
        return plan_batches(work, limits, overhead=overhead)

    def _start(self, perturbation: Perturbation) -> int:
        # One token at least is run behind a prefix: a sequence cannot be empty.
        return min(*perturbation.positions, min(self.rows(perturbation)))

    @property
    def _reuses_prefix(self) -> bool:
        return self.lm.reuses_prefix(len(self.query.token_ids))

    def prepare_prefix(self, perturbations: Sequence[Perturbation]) -> None:
        """Runs the clean sequence for its keys and values, if that saves more tokens than it costs."""
        saved = sum(self._start(p) * p.samples for p in perturbations)
        if self._prefix is None and self._reuses_prefix and saved > len(self.query.token_ids):
            self._run_clean()

    def rows(self, perturbation: Perturbation) -> list[int]:
        """The positions whose logits predict the targets that a perturbation asks for."""
        rows = self.query.rows
        return list(rows) if perturbation.targets is None else [rows[i] for i in perturbation.targets]

    def run(
        self, batch: Batch, passes: Callable[[Batch], Iterable[Found]], *, copies: int = 1, packed: bool = False
    ) -> Iterator[Found]:
        """What `passes` finds for a batch, in halves when memory runs out; later plans then stay that small.

        Args:
            batch: sequences that run together.
            passes: runs them; called again for each half when memory runs out.
            copies: as for `plan`.
            packed: whether the passes are packed, so that they may run together with other prompts'.

        Raises:
            ModelError: memory does not suffice for a single sequence.
        """
        try:
            results = list(passes(batch)) if packed else self.lm.in_turn(lambda: list(passes(batch)))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            results = None
        if results is not None:
            yield from results
            return
        if batch.sequences == 1:
            raise ModelError(
                f"Not enough memory on {self.lm.device} to run one sequence of {batch.stop} tokens. "
                "Shorten the prompt, attribute fewer targets at once, or load the model in a smaller dtype."
            )
        free_memory(self.lm.device)
        self._batch_tokens = max(1, min(self._batch_tokens, batch.tokens * copies) // 2)
        self._batch_keys = max(1, min(self._batch_keys, batch.sequences * batch.stop * copies) // 2)
        for half in _halves(batch):
            yield from self.run(half, passes, copies=copies, packed=packed)

    def _forward(
        self, perturbations: Sequence[Perturbation], batch: Batch
    ) -> Iterator[tuple[Piece, Float[Tensor, "samples targets vocab"]]]:
        rows = self.batch_rows(batch, perturbations)
        with self.lm.running():
            inputs = self.inputs(batch, perturbations)
            found = self.lm.probabilities(
                inputs, positions=[row - batch.start for row in rows], prefix=self.prefix(batch)
            )
        self.count(batch, len(rows) * batch.sequences)
        parts = found.split([piece.samples for piece in batch.pieces])
        for piece, part in zip(batch.pieces, parts, strict=True):
            wanted = [rows.index(row) for row in self.rows(perturbations[piece.perturbation])]
            yield piece, part if wanted == list(range(len(rows))) else part[:, wanted]

    def _packed_forward(
        self, perturbations: Sequence[Perturbation], batch: Batch
    ) -> Iterator[tuple[Piece, Float[Tensor, "samples targets vocab"]]]:
        fresh = self._prefix is None
        with self.lm.running():
            groups = [
                Group(
                    piece.start, self._piece_inputs(piece, perturbations), self.rows(perturbations[piece.perturbation])
                )
                for piece in batch.pieces
            ]
        if fresh:
            groups = [Group(0, self._embeddings[None], self.query.rows), *groups]
        found, prefix = self.lm.packed(Branches(self._prefix or empty_prefix(self.lm), groups, clean=fresh))
        if fresh:
            self._prefix = prefix
            self.take_clean(found.pop(0)[0])
        self.count(batch, sum(part.shape[0] * part.shape[1] for part in found))
        distributions = [logits.softmax(-1) for logits in found]
        check_finite(torch.cat([each[..., :1].flatten(0, 1) for each in distributions]), self.lm.dtype)
        yield from zip(batch.pieces, distributions, strict=True)

    def batch_rows(self, batch: Batch, perturbations: Sequence[Perturbation]) -> list[int]:
        """The positions whose logits any sequence of a batch needs, ascending."""
        return sorted({row for piece in batch.pieces for row in self.rows(perturbations[piece.perturbation])})

    def prefix(self, batch: Batch) -> Prefix | None:
        """The clean cache in front of a batch; None if it begins with the sequence."""
        return self._prefix.branch(batch.start, batch.sequences) if self._prefix and batch.start else None

    def count(self, batch: Batch, head_rows: int, passes: int = 1) -> None:
        """Books the work of a batch; `passes` is its backward passes too, each as much as a forward pass."""
        self.token_forwards += batch.tokens * passes
        self.passes += passes
        self.head_rows += head_rows

    def inputs(self, batch: Batch, perturbations: Sequence[Perturbation]) -> Float[Tensor, "batch length dim"]:
        """The embeddings that the model reads for a batch whose sequences have one start and stop."""
        return torch.cat([self._piece_inputs(piece, perturbations) for piece in batch.pieces])

    def _piece_inputs(self, piece: Piece, perturbations: Sequence[Perturbation]) -> Float[Tensor, "samples length dim"]:
        inputs = self._embeddings[piece.start : piece.stop].repeat(piece.samples, 1, 1)
        perturbation = perturbations[piece.perturbation]
        rows = perturbation.rows(self.table_rows[self._places(perturbation.positions)])[piece.first : piece.last]
        changed = (rows * self.lm.embedding_scale).to(inputs.dtype)
        inside = tuple(position - piece.start for position in perturbation.positions if position < piece.stop)
        inputs[:, self._places(inside)] = changed[:, : len(inside)]
        return inputs

    def _places(self, positions: tuple[int, ...]) -> slice | Int[Tensor, " positions"]:
        """Ascending positions as an index; neighbours as a slice, for which the device need not be told anything."""
        first, stop = (positions[0], positions[-1] + 1) if positions else (0, 0)
        if stop - first == len(positions):
            return slice(first, stop)
        return torch.tensor(positions, device=self._embeddings.device)


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    singles = [p._replace(first=i, last=i + 1) for p in batch.pieces for i in range(p.first, p.last)]
    middle = len(singles) // 2
    return Batch(tuple(singles[:middle])), Batch(tuple(singles[middle:]))
