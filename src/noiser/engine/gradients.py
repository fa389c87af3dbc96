"""Gradients of scores: one forward pass for all targets, and a backward pass for each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from noiser.engine.changes import Change
from noiser.engine.objectives import Read
from noiser.engine.query import Query
from noiser.errors import NoiserError, NumericalError, ParameterError, UnsupportedModelError
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.memory import free_memory, is_out_of_memory
from noiser.model.packing import Context, continued
from noiser.model.runtime import add_hook

COPIES = 4
"""How many times the memory of a plain forward a token takes; on a CPU it is not memory that limits batches."""


Options = Callable[[Context], Mapping[str, Any]]
"""From a clean sequence to the further arguments of a pass over it, or over what a change makes of it."""


class Slope(NamedTuple):
    """Under change `number` one target's score [], and its gradient [length, dim] at unscaled rows of the table."""

    number: int
    target: int
    value: Tensor
    gradient: Tensor


def differentiate(
    lm: LanguageModel, query: Query, changes: Sequence[Change], read: Read
) -> Iterator[Slope]:
    """Scores and gradients under every change (of rows, in one sample), of each of its targets.

    Where the clean sequence is cached, sequences run from their first changed token on. Batches are half as long after
    memory has run out.

    Raises:
        NumericalError: a logit or a gradient is NaN or infinite.
        ParameterError: the score is a caller's function that cannot be differentiated.
        UnsupportedModelError: a layer has no backward pass.
    """
    tokens = max(
        (sum(len(query.ids[g]) for g in targets_of(query, change)) for change in changes),
        default=1,
    )
    most = min(lm.batch_tokens // len(query.token_ids), lm.logit_rows // max(1, tokens))
    most = max(1, most // (1 if lm.device.type == "cpu" else COPIES))
    continues = bool(query.context.cache) and query.context.continues
    for start, group in groupby(
        enumerate(changes), lambda one: one[1].positions[0] if continues else 0
    ):
        waiting = list(group)
        while waiting:
            part, found = waiting[:most], None
            try:
                found = list(_slopes(lm, query, part, read, start))
            except (MemoryError, RuntimeError) as error:
                if len(part) == 1 or not is_out_of_memory(error):
                    raise
            if found is None:  # outside of the handler, whose error holds what the pass computed
                free_memory()
                most = len(part) // 2
            else:
                yield from found
                waiting = waiting[most:]


def _slopes(
    lm: LanguageModel, query: Query, changes: Sequence[tuple[int, Change]], read: Read, start: int
) -> Iterator[Slope]:
    """One forward pass of a batch from the token `start` on, and one backward pass for each of its targets."""
    asked = [targets_of(query, change) for _, change in changes]
    targets = sorted({*chain(*asked)})
    if not targets:
        return
    stop, scale = query.target_rows[targets[-1]][-1] + 1, lm.abilities.embedding_scale
    with differentiable(lm):
        rows = torch.cat(
            [change.inputs(query.context, start, stop) for _, change in changes]
        ).requires_grad_()

        def options(_: Context) -> dict[str, Any]:  # target and foil have the same cached tokens
            return continued(query.context.cache, start, len(changes)) if start else {}

        for target, values, gradients in backward(
            lm, query, rows, rows, targets, read, start, options
        ):
            for (number, _), some, value, gradient in zip(
                changes, asked, values, gradients, strict=True
            ):
                if target in some:
                    whole = pad(scale * gradient, (0, 0, start, len(query.token_ids) - stop))
                    yield Slope(number, target, value, whole)
    query.spent.add(
        rows[..., 0].numel() + len(changes) * foil_length(query, start), 1 + len(targets)
    )


def targets_of(query: Query, change: Change | None) -> Sequence[int]:
    """The indices of the targets that are read under a change."""
    return range(len(query.targets)) if change is None or change.targets is None else change.targets


@contextlib.contextmanager
def differentiable(lm: LanguageModel) -> Generator[None]:
    """Within it only the input gets gradients, and layers that cut them off are refused."""

    def check(name: str, _: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        x = args[0] if args else None
        if (
            not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.requires_grad)
            or y.requires_grad
        ):
            return
        if y.is_floating_point() and x.ndim > 1 and x.shape[:-1] == y.shape[:-1]:
            raise _no_backward(
                lm,
                f"its layer {name} has no backward pass, as kernels of some quantisation schemes",
            )

    with lm.running(gradients=True):
        for name, module in lm.model.named_modules():
            if not any(module.children()):
                add_hook(lm.model, module, partial(check, f"{name} ({type(module).__name__})"))
        yield


def readable(
    lm: LanguageModel,
    query: Query,
    embeddings: Float[Tensor, "batch length dim"],
    targets: Sequence[int],
    start: int = 0,
    options: Options = lambda _: {},
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What a score reads of each target in a pass from the token `start` on: logits, clean log-probabilities, ids.

    A foil of several tokens is a second pass, which the same embeddings lead to as far as its tokens are the target's.
    `options` makes the further arguments of a pass over a clean sequence.
    """
    rows = [query.rows_of(target) for target in targets]
    positions = [row - start for some in rows for row in some]
    logits = lm.output(embeddings, positions=positions, **options(query.context)).logits.float()
    check_finite(lm, logits.detach().softmax(-1))
    _check_kernels(lm, logits)
    parts = list(logits.split([len(some) for some in rows], 1))
    if query.foil_runs and query.foil_context is not None:  # there is one target
        foil, shared = query.foil_context, query.foil_rows[0] + 1
        own = foil.inputs[None, shared:].expand(len(embeddings), -1, -1).to(embeddings)
        embeddings = torch.cat([embeddings[:, : shared - start], own], 1)
        positions = [row - start for row in query.foil_rows]
        logits = lm.output(embeddings, positions=positions, **options(foil)).logits.float()
        check_finite(lm, logits.detach().softmax(-1))
        parts = [torch.cat([parts[0], logits], 1)]
    return [
        (part, query.clean_of[g].to(part.device), query.ids[g].to(part.device))
        for part, g in zip(parts, targets, strict=True)
    ]


def foil_length(query: Query, start: int) -> int:
    """How many tokens from `start` on a foil adds to a pass."""
    return len(query.foil_context.inputs) - start if query.foil_context and query.foil_runs else 0


def backward(
    lm: LanguageModel,
    query: Query,
    embeddings: Float[Tensor, "batch length dim"],
    leaf: Float[Tensor, "batch rows columns"],
    targets: Sequence[int],
    read: Read,
    start: int = 0,
    options: Options = lambda _: {},
) -> Iterator[tuple[int, Float[Tensor, " batch"], Float[Tensor, "batch rows columns"]]]:
    """For each target its scores, and their gradients with respect to what the pass depends on.

    The gradient with respect to the logits may be far below what half precision can hold, so each sequence's is brought
    to size 1 for the way through the model, and the factor put back afterwards.
    """
    heads = readable(lm, query, embeddings, targets, start, options)
    for target, (logits, clean, ids) in zip(targets, heads, strict=True):
        head = logits.detach().requires_grad_()
        values = read(head, clean, ids)
        if not values.requires_grad:
            raise ParameterError(
                "The function given as of= cannot be differentiated. Use torch's functions from its first argument on, "
                "or a method that only predicts, such as 'occlusion'."
            )
        (slope,) = torch.autograd.grad(values.sum(), head)
        size = slope.abs().amax((-1, -2), keepdim=True)
        slope = slope / torch.where(size > 0, size, 1)
        try:
            (found,) = torch.autograd.grad(logits, leaf, slope, retain_graph=target != targets[-1])
        except (
            Exception
        ) as error:  # of any kind: kernels, rules and hooks of other libraries run here
            if is_out_of_memory(error) or isinstance(error, NoiserError):
                raise
            raise _no_backward(
                lm, f"a layer's backward pass failed ({type(error).__name__}: {error})"
            ) from error
        found = found.float() * size.to(found.device)
        if not torch.isfinite(found).all():
            raise NumericalError(
                f"The gradient is NaN or infinite (dtype {str(lm.dtype).removeprefix('torch.')}); expected finite "
                "numbers. Where the whole input is zero, normalisation layers are too steep: choose another baseline. "
                "In float16, load the model with dtype='float32' or dtype='bfloat16'."
            )
        yield target, values.detach(), found


def _check_kernels(lm: LanguageModel, out: Tensor) -> None:
    """Raises UnsupportedModelError for a pass with a kernel whose gradient PyTorch takes to be zero."""
    waiting, seen = [out.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if node.name() == "torch::autograd::WarnNotImplemented":
                raise _no_backward(lm, "a kernel that one of its layers calls has no backward pass")
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]


def _no_backward(lm: LanguageModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"No gradient passes through this {type(lm.model).__name__} ({lm.identity.dtype}): {reason}. Take a method "
        "without gradients, such as 'noiser' or 'occlusion', or load the model unquantised."
    )
