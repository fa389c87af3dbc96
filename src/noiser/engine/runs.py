"""One query on a model: its clean run, distributions under perturbations, and what was run.

The clean sequence runs once; its keys and values are kept, and every perturbed sequence is recomputed only from its
first changed position to the last target that is read, in batches under a token budget. Distributions do not depend on
the batches. The clean sequence has no pass of its own where it can travel with another: in front of the first packed
batch, or as one input of a gradient pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine.perturbation import BASELINES, Baseline, Perturbation
from noiser.engine.plan import Batch, Limits, Piece, Work, pack_batches, plan_batches
from noiser.engine.readouts import CleanRun, Predicted
from noiser.engine.requests import Counters
from noiser.errors import ModelError, ParameterError
from noiser.model.clean import Passes, run_clean
from noiser.model.language_model import LanguageModel
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branches, Group
from noiser.model.prefix import Prefix, empty_prefix
from noiser.model.query import Query
from noiser.types import Progress

T = TypeVar("T")

LOGIT_BYTES = 192 * 2**20
"""Logits are as long as the vocabulary: 1 MB per target for Gemma 3 in float32. A batch holds no more than this."""

KEYS = 16
"""The most keys of a plain batch, in the tokens of a pass: as long as a layer keeps a token's activations, it keeps a
key and its value, which are a small part of that."""

CHUNK = 8192
"""Rows of the embedding table that are averaged at a time."""


class QueryRun:
    """One query on a model: what has been run of it, and what that took.

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
            self._clean = CleanRun(Predicted(logits.detach()[None]), self.query)

    def _run_clean(self) -> Passes[None]:
        positions = self.query.logit_positions
        tokens = self._exact(range(len(positions)))
        run = yield from run_clean(self.lm, self._scaled, positions, share=self.share, tokens=tokens)
        self._prefix = run.prefix
        self.take_clean(run.logits)
        self._note_left_out(run.left_out)

    def prepare_prefix(self, perturbations: Sequence[Perturbation]) -> Passes[None]:
        """Runs the clean sequence for its keys and values, if that saves more tokens than it costs."""
        saved = sum(self._start(p, self.rows(p)) * p.samples for p in perturbations)
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

    # ---- logits under perturbations ---------------------------------------------------------------------------------

    def _logits(
        self, batch: Batch, perturbations: Sequence[Perturbation], *, packed: bool
    ) -> Passes[list[tuple[Piece, Float[Tensor, "samples targets vocab"]]]]:
        """Logits of a batch, in halves when memory runs out; later plans then stay that small."""
        try:
            if packed:
                return (yield from self._packed_pass(batch, perturbations))
            return self._plain_pass(batch, perturbations)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        first, second = self.halved(batch)
        return [
            *(yield from self._logits(first, perturbations, packed=packed)),
            *(yield from self._logits(second, perturbations, packed=packed)),
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
                    perturbations[piece.perturbation].hidden,
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
        return list(zip(batch.pieces, logits, strict=True))

    def _plain_pass(
        self, batch: Batch, perturbations: Sequence[Perturbation]
    ) -> list[tuple[Piece, Float[Tensor, "samples targets vocab"]]]:
        rows = self.batch_rows(batch, perturbations)
        with self.lm.running():
            inputs = self.inputs(batch, perturbations)
            found = self.lm.logits(inputs, positions=[row - batch.start for row in rows], prefix=self.prefix(batch))
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
        chosen = [(p, self.rows(p)) for p in (perturbations[i] for i in wanted)]
        work = [Work(self._start(p, rows) if after_prefix else 0, max(rows) + 1, p.samples) for p, rows in chosen]
        rows = max((len(rows) for _, rows in chosen), default=1)
        vocabulary_bytes = self.lm.vocabulary_size * (self.lm.dtype.itemsize if packed else 4) * rows
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
        free_memory()
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
                "which to predict it: this prompt has no token that stays, such as BOS or a chat template's. Remove "
                "units in another way, such as 'zero', or give the prompt as chat messages."
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

    def _start(self, perturbation: Perturbation, rows: Sequence[int]) -> int:
        # One token at least is run after a prefix: a sequence cannot be empty.
        if not self._reuses_prefix:
            return 0
        return min(perturbation.first(self.query.sources_stop), min(rows))

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
        """Counts a pass; `passes` counts backward passes too, each like a forward pass."""
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


# ---- what takes the place of a unit that is removed ------------------------------------------------------------------


def baseline_row(lm: LanguageModel, name: Baseline) -> Float[Tensor, " dim"]:
    """The row that replaces a removed unit's rows, before any factor that the embedding module puts on them.

    Args:
        lm: the model.
        name: "zero"; "pad" or "unk", the row of the tokenizer's padding or unknown token; "mean", the mean of the
            rows of all tokens that the tokenizer knows.

    Returns:
        [dim], float32, on the device of the embeddings.

    Raises:
        ParameterError: the tokenizer has no such token, or the table no such row.
        UnknownNameError: an unknown name.
    """
    check_choice("baseline", name, BASELINES)
    if name == "zero":
        return torch.zeros(lm.embedding_dim, device=lm.device, dtype=torch.float32)
    if name == "mean":
        return _mean_row(lm)
    return _rows(lm, torch.tensor([_token_id(lm, name)]))[0]


def _rows(lm: LanguageModel, token_ids: Tensor) -> Float[Tensor, "tokens dim"]:
    with lm.running():
        return lm.embed(token_ids).float() / lm.embedding_scale


def _mean_row(lm: LanguageModel) -> Float[Tensor, " dim"]:
    # A table is often padded to a round number of rows; those belong to no token.
    count = min(len(lm.tokenizer), lm.vocabulary_size)
    return torch.stack([_rows(lm, part).sum(0) for part in torch.arange(count).split(CHUNK)]).sum(0) / count


def _token_id(lm: LanguageModel, name: str) -> int:
    token_id = getattr(lm.tokenizer, f"{name}_token_id")
    size = lm.vocabulary_size
    if token_id is None:
        fault = f"the tokenizer ({type(lm.tokenizer).__name__}) has no {name}_token"
    elif not 0 <= token_id < size:
        fault = f"the tokenizer's {name}_token has id {token_id} and the model's embedding table {size} rows"
    else:
        return token_id
    raise ParameterError(
        f"baseline={name!r} asks for the embedding of the tokenizer's {name}_token, but {fault}; expected a token that "
        "the model has. Use baseline='zero' or 'mean', which need none."
    )
