"""Perturbations in, next-token distributions out: the one place where perturbed inputs meet the model.

The engine runs the clean sequence once, keeps its keys and values, and recomputes every perturbed sequence only
from its first changed position to the last target that is wanted, in batches under a token budget. What comes out
does not depend on the batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine.perturbation import Perturbation
from noiser.engine.plan import Batch, Piece, Work, plan_batches
from noiser.errors import ModelError
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.prefix import Prefix, record_prefix
from noiser.model.query import Query

__all__ = ["Engine", "Progress"]

Progress = Callable[[float, float], None]
"""Called with the work done and the work expected, in token-forwards."""

LOGIT_BYTES = 192 * 2**20
"""Distributions are float32 over the whole vocabulary: 1 MB a target for Gemma 3. A batch holds no more than this."""


class Engine:
    """A model, ready to answer one query under many perturbations.

    Args:
        lm: the model.
        query: tokens, targets and units.
        progress: told about the work as it goes.

    Attributes:
        clean: [targets, vocab], the unperturbed next-token distributions, float32.
        table_rows: [length, dim], the clean input as rows of the embedding table, float32.
        token_forwards: tokens that have been run since the clean pass.
        passes: forward passes since the clean pass.
        head_rows: rows of logits that have been computed since the clean pass.
    """

    def __init__(self, lm: LanguageModel, query: Query, *, progress: Progress | None = None) -> None:
        self.lm, self.query = lm, query
        self.token_forwards = self.passes = self.head_rows = 0
        self._progress = progress
        self._prefix: Prefix | None = None
        self._batch_tokens = lm.batch_tokens
        with lm.running():
            self._embeddings = lm.embed(query.token_ids)
            self.table_rows = self._embeddings.float() / lm.embedding_scale
            if lm.reuses_prefix:
                self._prefix, logits = record_prefix(lm, self._embeddings, list(query.rows))
            else:
                logits = lm.logits(self._embeddings[None], positions=query.rows)[0]
            self.clean = logits.softmax(-1)
            check_finite(self.clean, lm.dtype)

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
        for batch in self._plan(perturbations):
            for piece, distributions in self._run(batch, perturbations):
                parts.setdefault(piece.index, []).append(distributions)
                missing[piece.index] -= piece.last - piece.first
                if not missing[piece.index]:
                    ready = parts.pop(piece.index)
                    yield piece.index, ready[0] if len(ready) == 1 else torch.cat(ready)

    def _plan(self, perturbations: Sequence[Perturbation]) -> list[Batch]:
        work = [Work(self._start(p), max(self._rows(p)) + 1, p.samples) for p in perturbations]
        vocabulary_bytes = self.clean.shape[-1] * 4 * max((len(self._rows(p)) for p in perturbations), default=1)
        return plan_batches(
            work,
            max_tokens=self._batch_tokens,
            max_sequences=max(1, LOGIT_BYTES // vocabulary_bytes),
            overhead=128 if self.lm.device.type == "cpu" else 4096,
        )

    def _start(self, perturbation: Perturbation) -> int:
        # One clean token at least is run behind a prefix: a sequence cannot be empty.
        return min(*perturbation.positions, min(self._rows(perturbation))) if self._prefix else 0

    def _rows(self, perturbation: Perturbation) -> list[int]:
        rows = self.query.rows
        return list(rows) if perturbation.targets is None else [rows[i] for i in perturbation.targets]

    def _run(
        self, batch: Batch, perturbations: Sequence[Perturbation]
    ) -> Iterator[tuple[Piece, Float[Tensor, "samples targets vocab"]]]:
        """Runs a batch, in halves when memory runs out; later batches then stay that small."""
        try:
            with self.lm.running():
                results = list(self._forward(batch, perturbations))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
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
        _free_memory(self.lm.device)
        self._batch_tokens = max(1, batch.tokens // 2)
        for half in _halves(batch):
            yield from self._run(half, perturbations)

    def _forward(
        self, batch: Batch, perturbations: Sequence[Perturbation]
    ) -> Iterator[tuple[Piece, Float[Tensor, "samples targets vocab"]]]:
        rows = sorted({row for piece in batch.pieces for row in self._rows(perturbations[piece.index])})
        inputs = self._inputs(batch, perturbations)
        prefix = self._prefix.branch(batch.start, len(inputs)) if self._prefix and batch.start else None
        found = self.lm.probabilities(inputs, positions=[row - batch.start for row in rows], prefix=prefix)
        self.token_forwards += batch.tokens
        self.passes += 1
        self.head_rows += len(inputs) * len(rows)
        offset = 0
        for piece in batch.pieces:
            wanted = [rows.index(row) for row in self._rows(perturbations[piece.index])]
            size = piece.last - piece.first
            part = found[offset : offset + size]
            yield piece, part if wanted == list(range(len(rows))) else part[:, wanted]
            offset += size

    def _inputs(self, batch: Batch, perturbations: Sequence[Perturbation]) -> Float[Tensor, "batch length dim"]:
        inputs = self._embeddings[batch.start : batch.stop].repeat(batch.sequences, 1, 1)
        offset = 0
        for piece in batch.pieces:
            perturbation = perturbations[piece.index]
            positions = torch.tensor(perturbation.positions, device=inputs.device)
            rows = perturbation.rows(self.table_rows[positions])[piece.first : piece.last]
            inside = positions < batch.stop
            size = piece.last - piece.first
            changed = (rows * self.lm.embedding_scale).to(inputs.dtype)
            inputs[offset : offset + size, positions[inside] - batch.start] = changed[:, inside]
            offset += size
        return inputs


def _halves(batch: Batch) -> tuple[Batch, Batch]:
    singles = [Piece(p.index, i, i + 1) for p in batch.pieces for i in range(p.first, p.last)]
    middle = len(singles) // 2
    return batch._replace(pieces=tuple(singles[:middle])), batch._replace(pieces=tuple(singles[middle:]))


def _is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in text or "out of memory" in text


def _free_memory(device: torch.device) -> None:
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.get_device_module(device.type).empty_cache()
