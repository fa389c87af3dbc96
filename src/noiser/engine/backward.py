"""One backward pass from a score to the inputs of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from noiser.errors import NoiserError, NumericalError, ParameterError, UnsupportedModelError
from noiser.model.language_model import LanguageModel
from noiser.model.memory import is_out_of_memory
from noiser.model.runtime import add_hook

Score = Callable[[Tensor], Tensor]
"""From the logits of a target's tokens [batch, tokens, vocab] to [batch]."""


@contextlib.contextmanager
def differentiable(lm: LanguageModel) -> Generator[None]:
    """Within it only the input gets gradients, and layers that cut them off are refused."""

    def check(name: str, _: nn.Module, args: tuple[Any, ...], y: Any) -> None:
        x = args[0] if args else None
        if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.requires_grad) or y.requires_grad:
            return
        if y.is_floating_point() and x.ndim > 1 and x.shape[:-1] == y.shape[:-1]:
            raise _no_backward(lm, f"its layer {name} has no backward pass, as kernels of some quantisation schemes")

    with lm.running(gradients=True):
        for name, module in lm.model.named_modules():
            if not any(module.children()):
                add_hook(lm.model, module, partial(check, f"{name} ({type(module).__name__})"))
        yield


def _no_backward(lm: LanguageModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"No gradient passes through this {type(lm.model).__name__} ({lm.identity.dtype}): {reason}. Take a method "
        "without gradients, such as 'noiser' or 'occlusion', or load the model unquantised."
    )


def backward(
    lm: LanguageModel,
    logits: Float[Tensor, "batch tokens vocab"],
    embeddings: Float[Tensor, "batch length dim"],
    score: Score,
    wanted: Bool[Tensor, " batch"],
    *,
    keep: bool,
) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch length dim"]]:
    """Scores of one target, and their gradients with respect to the rows of the sequences that are wanted.

    The gradient with respect to the logits may be far below what half precision can hold, so each sequence's is brought
    to size 1 for the way through the model, and the factor put back afterwards.
    """
    head = logits.detach().requires_grad_()
    values = score(head)
    if not values.requires_grad:
        raise ParameterError(
            "The function given as of= cannot be differentiated. Use torch's functions from its first argument on, or "
            "a method that only predicts, such as 'occlusion'."
        )
    (slope,) = torch.autograd.grad(values.sum(), head)
    slope = slope * wanted.to(slope)[:, None, None]
    size = slope.abs().amax((-1, -2), keepdim=True)
    try:
        (found,) = torch.autograd.grad(logits, embeddings, slope / torch.where(size > 0, size, 1), retain_graph=keep)
    except Exception as error:  # of any kind: kernels, rules and hooks of other libraries run here
        if is_out_of_memory(error) or isinstance(error, NoiserError):
            raise
        raise _no_backward(lm, f"a layer's backward pass failed ({type(error).__name__}: {error})") from error
    found = found.float() * size.to(found.device) * lm.abilities.embedding_scale
    if not torch.isfinite(found).all():
        raise NumericalError(
            f"The gradient is NaN or infinite (dtype {str(lm.dtype).removeprefix('torch.')}); expected finite numbers. "
            "Where the whole input is zero, normalisation layers are too steep: choose another baseline. In float16, "
            "load the model with dtype='float32' or dtype='bfloat16'."
        )
    return values.detach(), found


def check_kernels(lm: LanguageModel, out: Tensor) -> None:
    """Raises UnsupportedModelError for a pass with a kernel whose gradient PyTorch takes to be zero."""
    waiting, seen = [out.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if node.name() == "torch::autograd::WarnNotImplemented":
                raise _no_backward(lm, "a kernel that one of its layers calls has no backward pass")
            seen.add(node)
            waiting += [after for after, _ in node.next_functions]
