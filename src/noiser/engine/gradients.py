"""Gradients of scores: one forward pass for all targets, and a backward pass for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from noiser.engine.inputs import Sequences, inputs_of
from noiser.engine.objectives import ObjectiveFn
from noiser.engine.perturbations import Perturbation
from noiser.engine.query import Query
from noiser.errors import NoiserError, NumericalError, ParameterError, UnsupportedModelError
from noiser.model.language_model import (
    AttentionOf,
    LanguageModel,
    attention_of_pass,
    check_finite,
)
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Branch, Context, continued
from noiser.model.runtime import add_hook

COPIES = 4
"""How much more memory a token takes than in a plain forward pass.

On a CPU batches are not limited by memory.
"""

T = TypeVar("T")

Options = Callable[[Context], Mapping[str, Any]]
"""From a clean sequence to the further arguments of a pass over it, changed or not."""


class Slope(NamedTuple):
    """One target's score under a change, and its gradient.

    Attributes:
        number: the index of the change.
        target: the index of the target.
        value: the score, [].
        gradient: with respect to unscaled rows of the embedding table, [length, dim].
    """

    number: int
    target: int
    value: Tensor
    gradient: Tensor


class Differentiation(NamedTuple):
    """A query, changes of rows in one sample each, and the score that is differentiated."""

    query: Query
    perturbations: Sequence[Perturbation]
    read: ObjectiveFn


def differentiate(
    lm: LanguageModel, query: Query, perturbations: Sequence[Perturbation], read: ObjectiveFn
) -> Iterator[Slope]:
    """Scores and gradients of each change's targets; the changes have rows, in one sample.

    Where the clean sequence is cached, sequences run from their first changed token on. Batches are
    half as long after memory has run out.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ParameterError: the score is a caller's function that cannot be differentiated.
        UnsupportedModelError: a layer has no backward pass.
    """
    for _, slope in differentiate_all(lm, [Differentiation(query, perturbations, read)]):
        yield slope


def differentiate_all(
    lm: LanguageModel, asked: Sequence[Differentiation]
) -> Iterator[tuple[int, Slope]]:
    """`differentiate` of several queries, which share passes: the number of each, and its slopes.

    Queries whose sequences cannot run end to end with others have passes of their own.
    """
    packed: list[_Point] = []
    for number, each in enumerate(asked):
        if each.query.context.supports_packing:
            packed += _points(number, each)
        else:
            for slope in _differentiate_alone(lm, *each):
                yield number, slope
    limit = pass_tokens(lm)
    while packed:
        taken = _fitting(packed, limit, lm.logit_rows)
        pass_of_points = partial(_slopes_of_points, lm, packed[:taken])
        slopes = _fitting_in_memory(pass_of_points, is_smallest=taken == 1)
        if slopes is None:
            limit = sum(point.tokens for point in packed[:taken]) // 2
        else:
            yield from slopes
            del packed[:taken]


def _fitting_in_memory(run: Callable[[], Iterable[T]], *, is_smallest: bool) -> list[T] | None:
    """What a pass gives; None where memory ran out and a smaller pass may fit.

    The memory is free again then. Raises what the pass raises where it is the smallest.
    """
    try:
        return list(run())
    except (MemoryError, RuntimeError) as error:
        if is_smallest or not is_out_of_memory(error):
            raise
    # Outside of the handler, whose error holds what the pass computed.
    free_memory()
    return None


def pass_tokens(lm: LanguageModel) -> int:
    """How many tokens run in a pass with gradients."""
    return lm.batch_tokens if lm.device.type == "cpu" else lm.batch_tokens // COPIES


class _Point(NamedTuple):
    """Change `change` of query `number`, at which targets are differentiated, from a token on."""

    number: int
    change: int
    asked: Differentiation
    targets: Sequence[int]
    start: int
    stop: int

    @property
    def query(self) -> Query:
        """The query."""
        return self.asked.query

    @property
    def tokens(self) -> int:
        """How many tokens run."""
        return self.stop - self.start + foil_length(self.query, self.start)

    @property
    def logit_rows(self) -> int:
        """How many rows of logits are read."""
        return sum(len(self.query.ids[target]) for target in self.targets)


def _points(number: int, asked: Differentiation) -> list[_Point]:
    """The points of one query that have targets."""
    query, perturbations, _ = asked
    points: list[_Point] = []
    for index, perturbation in enumerate(perturbations):
        targets = targets_of(query, perturbation)
        if not targets:
            continue
        positions = [*chain.from_iterable(map(query.positions_read, targets))]
        start = min(query.context.done, perturbation.positions[0], *positions)
        points.append(_Point(number, index, asked, targets, start, max(positions) + 1))
    return points


def _fitting(points: Sequence[_Point], tokens: int, logit_rows: int) -> int:
    """How many of the first points fit into a pass; at least one."""
    for count, point in enumerate(points):
        tokens -= point.tokens
        logit_rows -= point.logit_rows
        if count and min(tokens, logit_rows) < 0:
            return count
    return len(points)


def _slopes_of_points(lm: LanguageModel, points: Sequence[_Point]) -> Iterator[tuple[int, Slope]]:
    """One forward pass of all points; a backward pass for the first target of all, and so on."""
    scale = lm.abilities.embedding_scale
    with differentiating(lm):
        scored: list[ScoredBranches] = []
        asked: list[Sequences] = []
        for point in points:
            perturbation = point.asked.perturbations[point.change]
            asked.append(Sequences(point.query.context, point.start, point.stop, perturbation))
        for point, inputs in zip(points, inputs_of(asked), strict=True):
            leaf = inputs.clone().requires_grad_()
            branches = branches_of_scores(point.query, point.targets, point.start, leaf)
            scored.append(
                ScoredBranches(point.query, point.targets, point.asked.read, branches, leaf)
            )
        for number, target, values, gradient in slopes_of_pass(lm, scored):
            point = points[number]
            rest = len(point.query.token_ids) - point.stop  # tokens that no target depends on
            # The chain rule: the model reads scale × row.
            whole = pad(scale * gradient[0], (0, 0, point.start, rest))
            yield point.number, Slope(point.change, target, values[0], whole)
    for query, own in _by_query(points).items():
        passes = 1 + max(len(point.targets) for point in own)
        query.spent.add(sum(point.tokens for point in own), passes)


def _by_query(points: Iterable[_Point]) -> dict[Query, list[_Point]]:
    """The points of each query."""
    points_of: dict[Query, list[_Point]] = {}
    for point in points:
        points_of.setdefault(point.query, []).append(point)
    return points_of


class ScoredBranches(NamedTuple):
    """Sequences of a packed pass from which the scores of one query are read.

    Attributes:
        branches: the target's, and that of a foil that runs by itself; of equally many copies.
        leaf: gradients are taken with respect to it, [copies, ...].
    """

    query: Query
    targets: Sequence[int]
    read: ObjectiveFn
    branches: Sequence[Branch]
    leaf: Tensor


def branches_of_scores(
    query: Query, targets: Sequence[int], start: int, inputs: Float[Tensor, "copies length dim"]
) -> list[Branch]:
    """The target's sequences from `start` on, which read `inputs`; and a foil's own ones.

    A foil's begin with the same inputs, as far as its tokens are the target's.
    """
    positions = [*chain.from_iterable(map(query.positions_read, targets))]
    branches = [Branch(query.context, start, inputs, positions)]
    foil = query.foil_context
    if query.foil_runs and foil is not None:  # there is one target
        shared = query.foil_positions[0] + 1
        own = foil.inputs[None, shared:].expand(len(inputs), -1, -1).to(inputs)
        of_foil = torch.cat([inputs[:, : shared - start], own], 1)
        branches.append(Branch(foil, start, of_foil, query.foil_positions))
    return branches


def slopes_of_pass(
    lm: LanguageModel, scored: Sequence[ScoredBranches], attention: AttentionOf = attention_of_pass
) -> Iterator[tuple[int, int, Float[Tensor, " copies"], Float[Tensor, "copies ..."]]]:
    """The scores of the targets of several queries, and their gradients, from one forward pass.

    Sequences do not see each other, so that one backward pass serves a target of each query. It
    gives the number of the query, its target, the scores, and the gradient with respect to the
    leaf.

    The gradient with respect to the logits may be far below what half precision can hold, so each
    sequence's is brought to size 1 on its way through the model:

        size = max |d score / d logits|
        gradient = size × ((d score / d logits) / size) · (d logits / d leaf)
    """
    heads = logits_of_targets(lm, scored, attention, gradients=True)
    _check_kernels(lm, heads[0][0])
    most = max(len(each.targets) for each in scored)
    for place in range(most):
        numbers = [number for number, each in enumerate(scored) if place < len(each.targets)]
        scores: list[_Score] = []
        for number in numbers:
            query, targets, read, _, _ = scored[number]
            scores.append(_score(query, targets[place], read, heads[number][place]))
        outputs = [heads[number][place] for number in numbers]
        leaves = [scored[number].leaf for number in numbers]
        slopes = [score.slope for score in scores]
        gradients = _gradients(lm, outputs, leaves, slopes, retain_graph=place + 1 < most)
        for number, score, gradient in zip(numbers, scores, gradients, strict=True):
            sizes = score.size.view(-1, *[1] * (gradient.ndim - 1))
            whole = _checked_gradient(lm, gradient.float() * sizes.to(gradient.device))
            yield number, scored[number].targets[place], score.values, whole


def logits_of_targets(
    lm: LanguageModel,
    scored: Sequence[ScoredBranches],
    attention: AttentionOf = attention_of_pass,
    *,
    gradients: bool,
) -> list[list[Float[Tensor, "copies tokens vocab"]]]:
    """The logits that the scores of a pass read, of each query's targets, float32.

    Raises NumericalError for NaN or infinite ones.
    """
    branches = [*chain.from_iterable(each.branches for each in scored)]
    logits_of_branches = iter(lm.run_packed(branches, attention, gradients=gradients))
    heads: list[list[Tensor]] = []
    for each in scored:
        parts = [next(logits_of_branches).float() for _ in each.branches]
        for part in parts:
            check_finite(lm, part.detach().softmax(-1))
        heads.append(_split_by_target(each.query, each.targets, parts))
    return heads


def _split_by_target(
    query: Query, targets: Sequence[int], logits: Sequence[Float[Tensor, "copies _ vocab"]]
) -> list[Float[Tensor, "copies _ vocab"]]:
    """The logits that each target's score reads, from those of `branches_of_scores`."""
    counts = [len(query.positions_read(target)) for target in targets]
    of_targets = [*torch.split(logits[0], counts, 1)]
    if len(logits) > 1:  # a foil's, beside the one target's
        of_targets = [torch.cat([of_targets[0], logits[1]], 1)]
    return of_targets


class _Score(NamedTuple):
    """Scores, and their derivative by the logits over its size, which half precision can hold.

    size = max |d score / d logits|, of each sequence.
    """

    values: Float[Tensor, " copies"]
    slope: Float[Tensor, "copies tokens vocab"]
    size: Float[Tensor, "copies 1 1"]


def _score(query: Query, target: int, read: ObjectiveFn, logits: Tensor) -> _Score:
    """The score of a target. Raises ParameterError if it cannot be differentiated."""
    head = logits.detach().requires_grad_()
    values = read(head, query.clean_of[target].to(head.device), query.ids[target].to(head.device))
    if not values.requires_grad:
        raise ParameterError(
            "The function given as of= cannot be differentiated. Use torch's functions from "
            "its first argument on, or a method that only predicts, such as 'occlusion'."
        )
    (slope,) = torch.autograd.grad(values.sum(), head)
    size = slope.abs().amax((-1, -2), keepdim=True)
    return _Score(values.detach(), slope / torch.where(size > 0, size, 1), size)


def _gradients(
    lm: LanguageModel,
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    slopes: Sequence[Tensor],
    *,
    retain_graph: bool,
) -> Sequence[Tensor]:
    """Gradients with respect to the leaves. Raises UnsupportedModelError where there are none."""
    try:
        return torch.autograd.grad(outputs, leaves, slopes, retain_graph=retain_graph)
    except Exception as error:  # of any kind: kernels, rules and hooks of libraries run here
        if is_out_of_memory(error) or isinstance(error, NoiserError):
            raise
        raise _no_backward(
            lm, f"a layer's backward pass failed ({type(error).__name__}: {error})"
        ) from error


def _checked_gradient(lm: LanguageModel, gradient: Tensor) -> Tensor:
    """A gradient. Raises NumericalError if it is not finite."""
    if not torch.isfinite(gradient).all():
        raise NumericalError(
            f"The gradient is NaN or infinite (dtype {str(lm.dtype).removeprefix('torch.')}); "
            "expected finite numbers. Where the whole input is zero, normalisation layers are "
            "too steep: choose another baseline. In float16, load the model with "
            "dtype='float32' or dtype='bfloat16'."
        )
    return gradient


def _differentiate_alone(
    lm: LanguageModel, query: Query, perturbations: Sequence[Perturbation], read: ObjectiveFn
) -> Iterator[Slope]:
    """`differentiate` of a query whose sequences run as batches, each from its beginning or after
    the cached tokens.
    """
    batch_size = _batch_size(lm, query, perturbations)
    supports_cached_prefix = bool(query.context.cache) and query.context.supports_cached_prefix

    def first_token(numbered: tuple[int, Perturbation]) -> int:
        _, perturbation = numbered
        return perturbation.positions[0] if supports_cached_prefix else 0

    for start, group in groupby(enumerate(perturbations), first_token):
        waiting = list(group)
        while waiting:
            batch = waiting[:batch_size]
            pass_of_batch = partial(_slopes, lm, query, batch, read, start)
            slopes = _fitting_in_memory(pass_of_batch, is_smallest=len(batch) == 1)
            if slopes is None:
                batch_size = len(batch) // 2
            else:
                yield from slopes
                waiting = waiting[batch_size:]


def _batch_size(lm: LanguageModel, query: Query, perturbations: Sequence[Perturbation]) -> int:
    """How many changes run in one pass."""
    rows = 1  # of logits, the most under one change
    for perturbation in perturbations:
        rows = max(rows, sum(len(query.ids[target]) for target in targets_of(query, perturbation)))
    size = min(lm.batch_tokens // len(query.token_ids), lm.logit_rows // rows)
    if lm.device.type != "cpu":
        size //= COPIES
    return max(1, size)


def _slopes(
    lm: LanguageModel,
    query: Query,
    perturbations: Sequence[tuple[int, Perturbation]],
    read: ObjectiveFn,
    start: int,
) -> Iterator[Slope]:
    """One forward pass of a batch from the token `start` on, one backward pass for each target."""
    targets_of_changes = [targets_of(query, perturbation) for _, perturbation in perturbations]
    targets = sorted({*chain(*targets_of_changes)})
    if not targets:
        return
    stop = query.target_positions[targets[-1]][-1] + 1
    rest = len(query.token_ids) - stop  # tokens that no target depends on
    scale = lm.abilities.embedding_scale
    with differentiating(lm):
        asked = [Sequences(query.context, start, stop, each) for _, each in perturbations]
        rows = torch.cat(inputs_of(asked)).requires_grad_()

        def options(_: Context) -> dict[str, Any]:  # target and foil have the same cached tokens
            return continued(query.context.cache, start, len(perturbations)) if start else {}

        passes = scores_with_gradients(
            lm, query, targets, read, start, options, embeddings=rows, leaf=rows
        )
        for target, values, gradients in passes:
            for index, (number, _) in enumerate(perturbations):
                if target in targets_of_changes[index]:
                    # The chain rule: the model reads scale × row.
                    gradient = pad(scale * gradients[index], (0, 0, start, rest))
                    yield Slope(number, target, values[index], gradient)
    tokens = rows[..., 0].numel() + len(perturbations) * foil_length(query, start)
    query.spent.add(tokens, 1 + len(targets))


def targets_of(query: Query, perturbation: Perturbation | None) -> Sequence[int]:
    """The indices of the targets that are read under a change."""
    return (
        range(len(query.targets))
        if perturbation is None or perturbation.targets is None
        else perturbation.targets
    )


@contextlib.contextmanager
def differentiating(lm: LanguageModel) -> Generator[None]:
    """Within it only the input gets gradients, and layers that cut them off are refused."""

    def check(name: str, _: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return
        cuts_off = x.requires_grad and not y.requires_grad
        # Only of layers that map vectors to vectors: others may return indices or masks.
        maps_vectors = y.is_floating_point() and x.ndim > 1 and x.shape[:-1] == y.shape[:-1]
        if cuts_off and maps_vectors:
            raise _no_backward(
                lm,
                f"its layer {name} has no backward pass, as kernels of some quantisation schemes",
            )

    with lm.running(gradients=True):
        for name, module in lm.model.named_modules():
            if next(module.children(), None) is None:
                add_hook(lm.model, module, partial(check, f"{name} ({type(module).__name__})"))
        yield


def forward_for_scores(
    lm: LanguageModel,
    query: Query,
    targets: Sequence[int],
    start: int = 0,
    options: Options = lambda _: {},
    *,
    embeddings: Float[Tensor, "batch length dim"],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The logits, clean log-probabilities and ids that a score reads, for each target.

    The pass begins at the token `start`. `options` makes the further arguments of a pass over a
    clean sequence. A foil of several tokens is a second pass: it begins with the same embeddings,
    as far as its tokens are the target's.
    """
    logits: list[Tensor] = []
    for branch in branches_of_scores(query, targets, start, embeddings):
        arguments = options(branch.context)
        logits.append(_checked_logits(lm, branch.inputs, branch.wanted, start, arguments))
    _check_kernels(lm, logits[0])
    parts = _split_by_target(query, targets, logits)
    inputs_of_targets: list[tuple[Tensor, Tensor, Tensor]] = []
    for target, part in zip(targets, parts, strict=True):
        clean = query.clean_of[target].to(part.device)
        ids = query.ids[target].to(part.device)
        inputs_of_targets.append((part, clean, ids))
    return inputs_of_targets


def _checked_logits(
    lm: LanguageModel,
    embeddings: Float[Tensor, "batch length dim"],
    positions: Sequence[int],
    start: int,
    options: Mapping[str, Any],
) -> Float[Tensor, "batch positions vocab"]:
    """Logits of a pass from `start` on, float32. Raises NumericalError for NaN or infinite ones."""
    places = [position - start for position in positions]
    logits = lm.output(embeddings, positions=places, **options).logits.float()
    check_finite(lm, logits.detach().softmax(-1))
    return logits


def foil_length(query: Query, start: int) -> int:
    """How many tokens from `start` on a foil adds to a pass."""
    if query.foil_context is None or not query.foil_runs:
        return 0
    return len(query.foil_context.inputs) - start


def scores_with_gradients(
    lm: LanguageModel,
    query: Query,
    targets: Sequence[int],
    read: ObjectiveFn,
    start: int = 0,
    options: Options = lambda _: {},
    *,
    embeddings: Float[Tensor, "batch length dim"],
    leaf: Float[Tensor, "batch rows columns"],
) -> Iterator[tuple[int, Float[Tensor, " batch"], Float[Tensor, "batch rows columns"]]]:
    """Each target with its scores, and their gradients with respect to the leaf of the pass.

    The pass runs on `embeddings`, which `leaf` made or is.

    The gradient with respect to the logits may be far below what half precision can hold, so each
    sequence's is brought to size 1 on its way through the model:

        size = max |d score / d logits|
        gradient = size × ((d score / d logits) / size) · (d logits / d leaf)
    """
    heads = forward_for_scores(lm, query, targets, start, options, embeddings=embeddings)
    for target, (logits, _, _) in zip(targets, heads, strict=True):
        score = _score(query, target, read, logits)
        retained = target != targets[-1]
        (gradient,) = _gradients(lm, [logits], [leaf], [score.slope], retain_graph=retained)
        size = score.size.to(gradient.device)
        yield target, score.values, _checked_gradient(lm, gradient.float() * size)


def _check_kernels(lm: LanguageModel, out: Tensor) -> None:
    """Raises UnsupportedModelError for a kernel whose gradient PyTorch takes to be zero."""
    waiting = [out.grad_fn]
    visited: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        if node.name() == "torch::autograd::WarnNotImplemented":
            raise _no_backward(lm, "a kernel that one of its layers calls has no backward pass")
        visited.add(node)
        waiting += [before for before, _ in node.next_functions]


def _no_backward(lm: LanguageModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"No gradient passes through this {type(lm.model).__name__} ({lm.identity.dtype}): "
        f"{reason}. Take a method without gradients, such as 'noiser' or 'occlusion', or load the "
        "model unquantised."
    )
