"""A question made concrete on a model: its tokens, units and targets, and the clean prediction."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from noiser.engine.objectives import ObjectiveFn, objective_of
from noiser.model.packing import Context
from noiser.model.scene import Scene
from noiser.notices import warn
from noiser.tensors import integers, true_indices
from noiser.text import Encoding
from noiser.text.pictures import Region
from noiser.types import ModelIdentity, Objective, Prompt, Source, Span, SpecialTokens, Target

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")


class Request(Generic[AnswerT]):
    """Something that an engine answers: `await` gives the answer, or raises the error."""

    def __await__(self) -> Generator[Request[Any], AnswerT, AnswerT]:
        return (yield self)


Steps = Coroutine[Request[Any], Any, T]
"""The coroutine of a question, method or metric: it awaits requests and returns a result."""


async def result_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a method or a metric returns, be it a plain function or a coroutine.

    Methods and metrics used to be generators, `answer = yield request`. They still work, with a
    DeprecationWarning, for one release.
    """
    call: Any = function if inspect.isroutine(function) else function.__call__
    if inspect.isgeneratorfunction(call):
        name = getattr(function, "__name__", type(function).__name__)
        warn(
            f"{name} is a generator. Write it as a coroutine: `async def` in place of `def`, and "
            "`await` in place of `yield` and `yield from`.",
            DeprecationWarning,
        )
        generator_function = getattr(call, "__func__", call)
        bound_to = [call.__self__] if inspect.ismethod(call) else []
        return await types.coroutine(generator_function)(*bound_to, *arguments)
    result = function(*arguments)
    return await result if inspect.isawaitable(result) else result


@dataclass(frozen=True, eq=False)
class Prefill(Request[Tensor]):
    """The request to run a clean sequence to its end.

    The answer is its logits [positions, vocab], float32. For each position `tokens` has the ids
    whose probabilities must be exact, where a server does not send all.
    """

    context: Context
    positions: Sequence[int]
    tokens: Sequence[tuple[int, ...]] = ()


@dataclass(eq=False)
class Cost:
    """The work so far on a query, without its clean sequence.

    Attributes:
        token_forwards: tokens that have been run, forwards and backwards.
        passes: how many passes ran them.
        unfinished: changes that were asked for and not run, where the call's time went by.
        max_seconds: the limit of time that was reached, or None.
    """

    token_forwards: int = 0
    passes: int = 0
    unfinished: int = 0
    max_seconds: float | None = None

    def add(self, tokens: int, passes: int = 1) -> None:
        """Counts passes over so many tokens each."""
        self.token_forwards += tokens * passes
        self.passes += passes


class FoilRun(NamedTuple):
    """A foil's tokens, the clean sequence that predicts them, and its logits [tokens, vocab]."""

    ids: tuple[int, ...]
    context: Context
    logits: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """One attribution's question, in tokens.

    Attributes:
        encoding: the prompt and the continuation that stands before the last target.
        prompt_tokens: how many of its tokens are the prompt.
        prompt_length: how many characters of its text are the prompt.
        target_ids: token ids whose probabilities are explained, in order.
        logit_positions: for each of these tokens, the position whose logits predict it.
        targets: one or several of these tokens each, in order: texts, ids, and clean probabilities
            and ranks.
        target_unit: name of that segmentation, or "spans".
        units: the parts of the input that get a score.
        unit: name of the segmentation, or "spans".
        foil: the continuation that the (only) target is contrasted with, or None.
        foil_context: the clean sequence that predicts the foil: `context` itself where target and
            foil are one token each, else prompt and foil, which run beside prompt and target.
        foil_clean: log-probabilities at the foil's tokens without a change, float32.
        sources: documents in the prompt.
        of: the number that is explained, in place of the targets' probabilities; or None.
        special_tokens: "frozen" where special tokens and the sink stay as they are, or "perturbed".
        context: the clean sequence and what is cached of it.
        clean: log-probabilities at the targets' tokens without a change, float32.
        baseline: from a baseline's name to its row of the embedding table, [dim].
        near_ties: the tokens of a greedy continuation, by index, whose margin is within half
            precision's rounding.
        scene: the pictures of the prompt as the model reads them, or None.
        regions: the regions of pictures that are units.
        image_removal: how they are removed, one of `REMOVALS_OF_REGIONS`.
        spent: the work so far, of all queries that were made from this one.
        token_ids: everything that the model reads, on the CPU.
        target_positions: for each target, the positions whose logits predict its tokens.
        foil_positions: likewise of the foil, in `foil_context`; none without a foil.
        ids: for each target, the ids of its tokens and then of its foil's, on the device.
        clean_of: for each target, the clean log-probabilities at these tokens.
        sink: the first position, where the tokenizer puts no start token there; or None. Attention
            leans on whatever stands first, and without it the model breaks: answers that nothing in
            the prompt bears lose up to 10 nats. So this position is never hidden, zeroed or
            disturbed.
        positions: for each unit, the positions that may be changed: all of its tokens but the sink.
        before: whether all of a unit stands before all of a target.
        causal_mask: whether that is so and the unit is more than the sink, so that it has a score.
    """

    prompt: Prompt
    encoding: Encoding
    prompt_tokens: int
    prompt_length: int
    target_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    targets: tuple[Target, ...]
    target_unit: str
    units: tuple[Span, ...]
    unit: str
    foil: Target | None = None
    foil_context: Context | None = field(default=None, repr=False)
    foil_clean: Float[Tensor, "foil_tokens vocab"] | None = field(default=None, repr=False)
    sources: tuple[Source, ...] = ()
    of: Objective | None = None
    special_tokens: SpecialTokens = "frozen"
    near_ties: tuple[int, ...] = ()
    model: ModelIdentity
    context: Context = field(repr=False)
    clean: Float[Tensor, "tokens vocab"] = field(repr=False)
    baseline: Callable[[str], Tensor] = field(repr=False)
    scene: Scene | None = field(default=None, repr=False)
    regions: Mapping[Span, Region] = field(default_factory=dict[Span, Region], repr=False)
    image_removal: str = "grey"
    spent: Cost = field(default_factory=Cost)

    foil_ids: tuple[int, ...] = field(init=False)
    target_texts: tuple[str, ...] = field(init=False)
    device: torch.device = field(init=False)
    embedding_dim: int = field(init=False)
    token_ids: Int[Tensor, " length"] = field(init=False, repr=False)
    target_positions: list[tuple[int, ...]] = field(init=False)
    foil_positions: tuple[int, ...] = field(init=False)
    ids: Sequence[Int[Tensor, " tokens"]] = field(init=False, repr=False)
    clean_of: Sequence[Float[Tensor, "tokens vocab"]] = field(init=False, repr=False)
    sink: int | None = field(init=False)
    positions: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    before: Bool[Tensor, "targets units"] = field(init=False, repr=False)
    causal_mask: Bool[Tensor, "targets units"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        inputs = self.context.inputs
        sizes = [1 + len(target.rest) for target in self.targets]
        positions_of_targets = torch.split(torch.tensor(self.logit_positions), sizes)
        target_positions = [tuple(integers(positions)) for positions in positions_of_targets]
        first_position = target_positions[0][0]

        # A unit is before a target if its last token is at the position that predicts the target's
        # first token, or earlier.
        last_tokens = [max(unit.token_indices) for unit in self.units]
        first_positions = [positions[:1] for positions in target_positions]
        before = torch.tensor(last_tokens, device="cpu") <= torch.tensor(
            first_positions, device="cpu"
        )
        sink = sink_of(self.encoding) if self.special_tokens == "frozen" else None
        positions: list[tuple[int, ...]] = []
        for unit in self.units:
            positions.append(tuple(token for token in unit.token_indices if token != sink))
        has_positions = torch.tensor([len(tokens) > 0 for tokens in positions], device="cpu")

        ids = torch.split(torch.tensor(self.target_ids, device=inputs.device), sizes)
        clean_of = torch.split(self.clean, sizes)
        foil_ids = self.foil.token_ids if self.foil else ()
        if self.foil_clean is not None:  # there is one target
            ids = (torch.cat([ids[0], ids[0].new_tensor(foil_ids)]),)
            clean_of = (torch.cat([clean_of[0], self.foil_clean]),)
        vars(self).update(  # the class is frozen
            foil_ids=foil_ids,
            target_texts=tuple(target.text for target in self.targets),
            device=inputs.device,
            embedding_dim=inputs.shape[1],
            token_ids=torch.tensor(self.encoding.token_ids),
            target_positions=target_positions,
            foil_positions=tuple(range(first_position, first_position + len(foil_ids))),
            ids=ids,
            clean_of=clean_of,
            sink=sink,
            positions=tuple(positions),
            before=before,
            causal_mask=before & has_positions,
        )

    @property
    def foil_runs(self) -> bool:
        """Whether the foil is a sequence of its own, which every change is run on as well."""
        return self.foil is not None and self.foil_context is not self.context

    def positions_read(self, target: int) -> tuple[int, ...]:
        """The positions of `context` at which a target is read.

        Also the foil's, if it has no sequence of its own.
        """
        if self.foil_runs:
            return self.target_positions[target]
        return self.target_positions[target] + self.foil_positions

    @cached_property
    def sources_stop(self) -> int:
        """The position after the last source; 0 without sources.

        At most the position that predicts the continuation.
        """
        if not self.sources:
            return 0
        end = max(source.end for source in self.sources)
        offsets = self.encoding.offsets[: self.prompt_tokens - 1]
        return sum(start < end for start, _ in offsets)

    @cached_property
    def targets_per_unit(self) -> list[tuple[int, ...]]:
        """For each unit, the indices of the targets that it stands before."""
        targets_of_units: list[tuple[int, ...]] = []
        for is_before in self.causal_mask.T:
            targets_of_units.append(tuple(true_indices(is_before)))
        return targets_of_units

    def objective(self, name: str) -> ObjectiveFn:
        """The score by name, against the foil if there is one; or the query's own number."""
        return objective_of(name, len(self.foil_ids), self.of)

    def read_clean(self, read: ObjectiveFn) -> Float[Tensor, "targets ..."]:
        """A score without any change, float64 on the CPU."""
        values: list[Tensor] = []
        for clean, ids in zip(self.clean_of, self.ids, strict=True):
            values.append(read(clean[None], clean, ids)[0])
        return torch.stack(values).double().cpu()

    def with_units(self, units: Sequence[Span]) -> Query:
        """The same question with other units."""
        return replace(self, units=tuple(units))


def sink_of(encoding: Encoding) -> int | None:
    """The first position, 0, if it holds text of the prompt; None if a start token or the template
    stands there. See `Query.sink`.
    """
    if not encoding.frozen or encoding.frozen[0]:
        return None
    return 0
