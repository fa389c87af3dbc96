"""The engine: answers requests with a model in this process, or one that runs elsewhere (`noiser.model.served`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from noiser.engine import inside
from noiser.engine.contrast import contrasted, of_each_branch
from noiser.engine.gradients import Input, Slope, differentiate
from noiser.engine.perturbation import Perturbation
from noiser.engine.readouts import CleanRun, EffectReadout, Predicted, Readout, ValueReadout, log_of
from noiser.engine.requests import (
    Attentions,
    Call,
    Clean,
    Effects,
    Integrals,
    Relevance,
    Request,
    Spent,
    Steps,
    Values,
)
from noiser.engine.runs import LOGIT_BYTES, QueryRun
from noiser.engine.scheduler import complete
from noiser.engine.scores import Read
from noiser.errors import ParameterError, TargetError, UnsupportedModelError
from noiser.model.attention import attention_maps
from noiser.model.cache import Cache
from noiser.model.clean import Passes
from noiser.model.language_model import LanguageModel
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branches, Packed
from noiser.model.query import Query, query_passes
from noiser.types import Progress, Prompt

T = TypeVar("T")

MOST_PROMPTS = 64
"""The most prompts that are at work at a time: each has a cache and its clean distributions."""

CACHED = 4
"""The cached tokens of all prompts at work, in the tokens of a pass."""


class LocalEngine:
    """A model that answers requests about one prompt or many.

    Args:
        lm: the model.
        many: whether several prompts will be at work side by side, so that their passes are worth merging.

    Raises:
        ParameterError: lm is no LanguageModel.
    """

    def __init__(self, lm: LanguageModel, *, many: bool = False) -> None:
        if not isinstance(lm, LanguageModel):  # pyright: ignore[reportUnnecessaryIsInstance] - a caller's mistake
            raise ParameterError(
                f"The model is a {type(lm).__name__}; expected what noiser.load_model(name) or "
                "noiser.wrap(model, tokenizer) returns."
            )
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
        most_rows = LOGIT_BYTES // (self.lm.dtype.itemsize * self.lm.vocabulary_size)
        chosen: list[int] = []
        tokens = rows = 0
        for index in sorted(range(len(waiting)), key=lambda index: -waiting[index].tokens):
            more = (tokens + waiting[index].tokens, rows + waiting[index].rows)
            if not chosen or (more[0] <= self.lm.batch_tokens and more[1] <= most_rows):
                chosen.append(index)
                tokens, rows = more
        return chosen

    def run(self, passes: Sequence[Branches]) -> list[Packed | Exception]:
        """One pass for all, in halves when memory runs out or a target cannot be scored; other errors are for all."""
        try:
            return [*self.lm.run_packed(passes)]
        except Exception as error:
            if len(passes) == 1 or not (isinstance(error, TargetError) or is_out_of_memory(error)):
                return [_light(error) for _ in passes]
        free_memory()
        middle = len(passes) // 2
        return [*self.run(passes[:middle]), *self.run(passes[middle:])]


class Session(QueryRun):
    """Answers what is asked about one query; arguments and attributes as for `QueryRun`."""

    def __init__(
        self, lm: LanguageModel, query: Query, *, share: bool = False, progress: Progress | None = None
    ) -> None:
        super().__init__(lm, query, share=share, progress=progress)
        self._foil = None if query.foil_branch is None else Session(lm, query.foil_branch, share=share)

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
        return contrasted(self.query, target, foil, [run.stats() for run in clean])

    def _answer(self, request: Request) -> Passes[Any]:
        """The answer to one request about the target alone, if the foil is a continuation of its own."""
        if self.query.of is not None:
            yield from self.clean()
        match request:
            case Effects(score="hellinger") | Values(value="hellinger" | "squared") if self.query.foil_ids:
                raise ParameterError(
                    "score='hellinger' compares whole distributions and has no foil; expected another score with one."
                )
            case Effects():
                readout = partial(EffectReadout, score=request.score, leads=request.leads)
                return (yield from self._read(request.perturbations, readout, request.expected))
            case Values():
                return (yield from self._read(request.perturbations, partial(ValueReadout, value=request.value)))
            case Clean():
                return (yield from self.clean()).stats()
            case Spent():
                return self.counters
            case Call():
                return request.function(self)
            case _ if not self.lm.looks_inside:
                raise _elsewhere(request)
            case Integrals():
                clean = log_of((yield from self.clean()).probabilities)
                return inside.integrals(self.lm, self.query, request, clean, self.cache, self.spend)
            case Relevance():
                clean = log_of((yield from self.clean()).probabilities)
                return inside.relevance(self.lm, self.query, request, clean, self.spend)
            case Attentions():
                self.spend(len(self.query.token_ids), 1)
                return attention_maps(self.lm, self.query.token_ids)
            case _:
                name = type(request).__name__
                raise ParameterError(f"A local model cannot answer {name}; expected one of noiser.engine's.")

    def ask(self, request: Request) -> Any:
        """The answer to a request of a function that cannot wait; its passes run by themselves, without progress."""
        return self._at_once(self.answer(request))

    def run(self, steps: Steps[T]) -> T:
        """The result of a generator of requests, for a function that cannot wait; as `ask`."""
        return self._at_once(self.drive(steps))

    def differentiate(self, inputs: Sequence[Input], read: Read) -> list[Slope]:
        """Scores and gradients, for a function that cannot wait; see `noiser.engine.differentiate`."""
        clean = log_of(self._at_once(self.clean()).probabilities)
        return list(differentiate(self.lm, self.query, inputs, read, clean, self.cache, self.spend))

    def _at_once(self, passes: Passes[T]) -> T:
        progress, self.progress = self.progress, None
        try:
            return complete(LocalEngine(self.lm), passes)
        finally:
            self.progress = progress

    @property
    def cache(self) -> Cache | None:
        """Keys and values of the clean sequence once it has run, if the model can go on from them."""
        return None if self._prefix is None else [(layer.keys, layer.values) for layer in self._prefix.cache.layers]

    def spend(self, tokens: int, passes: int) -> None:
        """Counts and reports passes over so many tokens each."""
        self.count(tokens, 0, passes)
        self.report()

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
        hides = any(perturbation.hidden for perturbation in perturbations)
        if hides and not self.lm.hides_tokens(len(self.query.token_ids)):
            raise UnsupportedModelError(
                f"Attention to single tokens cannot be taken away in {self.lm.identity.name}; expected a model in this "
                "process whose sequences can run packed (LanguageModel.packs). Take another baseline than 'hidden', "
                "such as 'zero'."
            )
        packed = self.share or hides or (self.lm.device.type == "cpu" and self.lm.packs)
        if wanted and not packed and self._prefix is None and self._reuses_prefix:
            yield from self._run_clean()
        batches = self.plan(perturbations, wanted, packed=packed)
        expected = max(expected, self.counters.token_forwards + sum(batch.tokens for batch in batches))
        self.report(expected)
        for batch in batches:
            for piece, logits in (yield from self._logits(batch, perturbations, packed=packed)):
                index = piece.perturbation
                missing[index] -= piece.samples
                # a copy: what waits for its other samples must not keep the logits of a whole pass
                parts.setdefault(index, []).append(logits.clone() if missing[index] else logits)
                del logits
                if not missing[index]:
                    readout = readout or readout_of((yield from self.clean()))
                    ready = parts.pop(index)
                    predicted = Predicted(ready[0] if len(ready) == 1 else torch.cat(ready))
                    numbers[index] = readout.measure(predicted, targets[index])
                    del predicted, ready  # whole distributions
            self.report(expected)
        readout = readout or readout_of((yield from self.clean()))
        copied = torch.cat([numbers[i].flatten() for i in wanted]).cpu() if wanted else torch.empty(0)
        for i, part in zip(wanted, copied.split([numbers[i].numel() for i in wanted]) if wanted else (), strict=True):
            numbers[i] = part.view(numbers[i].shape)
        return readout.table(numbers, targets)


def _elsewhere(request: Request) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(request).__name__} needs the model's layers, and this model runs outside of this process, where it "
        "only predicts; expected Effects, Values, Clean or Spent. Take a method that asks for these, such as "
        "'occlusion'."
    )


def _light(error: Exception) -> Exception:
    """An error; where memory ran out, without its traceback, which would hold what the pass had made until then."""
    return torch.OutOfMemoryError(str(error)) if is_out_of_memory(error) else error
