"""Models that `torch.compile` has compiled: what the compiler is not to see, and when its code is not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn

__all__ = ["is_compiled", "opaque", "uncompiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it is compiled: by its own `compile()`, or by a `forward` that is."""
    return any(
        vars(module).get("_compiled_call_impl") is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def opaque(function: Function, model: nn.Module) -> Function:
    """A function that the model's compiled code calls, and that is not made part of it."""
    return _disabled(function) if is_compiled(model) else function


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, a model that is compiled runs as it is written."""
    return torch.compiler.set_stance("force_eager") if is_compiled(model) else contextlib.nullcontext()


@cache
def _disabled(function: Function) -> Function:
    return cast("Function", torch.compiler.disable(function))
