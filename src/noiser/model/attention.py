"""A model's attention: another function in its place, its weights, and shares of its gradient."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from noiser.errors import UnsupportedModelError
from noiser.model.runtime import configs, held, put, running, unhook

_CAPTURING = "_output_capturing_hooks_installed"  # transformers' mark on a model whose hooks collect weights


def set_attention(model: Any, attention: Callable[..., Any] | str, *, masked: bool = True) -> None:
    """Replaces the attention while a model runs, by name or by a function (own, module, q, k, v, mask, **options)."""
    undo = held(model).undo
    if not isinstance(attention, str):
        from transformers import AttentionInterface, AttentionMaskInterface

        functions: Any = AttentionInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
        masks: Any = AttentionMaskInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
        own = "eager" if model.config._attn_implementation == "eager" else "sdpa"
        replaced = _eager if own == "eager" else functions[own]
        put(functions, name := f"noiser-{id(model)}", partial(attention, replaced), undo)
        if masked:  # transformers makes no mask for a name that is not there
            put(masks, name, masks[own], undo)
        if torch.backends.cuda.cudnn_sdp_enabled():  # it makes a plan for every new shape, 30 ms each
            undo.append(partial(torch.backends.cuda.enable_cudnn_sdp, True))
            torch.backends.cuda.enable_cudnn_sdp(False)
        attention = name
    for config in configs(model):  # the public setter checks, and may fetch, the kernels of what is put back
        put(vars(config), "_attn_implementation_internal", attention, undo)


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention function of a module's architecture."""
    return sys.modules[type(module).__module__].eager_attention_forward


def _eager(module: nn.Module, *args: Any, **options: Any) -> Any:
    return eager_of(module)(module, *args, **options)


def attention_maps(lm: Any, token_ids: Int[Tensor, " length"]) -> list[Float[Tensor, "length length"]]:
    """Attention weights of each layer that has attention, first to last, mean over heads, float32.

    Row i holds what position i attends to: zero after i, and outside the window of a layer that slides.

    Raises:
        UnsupportedModelError: no layer has attention, or the model does not return its weights.
    """
    length = len(token_ids)

    def are_weights(found: Any) -> bool:
        return isinstance(found, Tensor) and found.ndim == 4 and found.shape[-2:] == (length, length)

    def average(_module: Any, _inputs: Any, output: Any) -> Any:
        """Weights leave their layer averaged over heads: memory holds one map per layer, not per head."""
        if isinstance(output, tuple) and are_weights(output[1:2] and output[1]):
            return (output[0], output[1].float().mean(1, keepdim=True), *output[2:])
        return None

    with running(lm.model):
        set_attention(lm.model, "eager")
        undo = held(lm.model).undo
        for module in lm.model.modules():  # hooks that transformers installs to collect the weights are taken out again
            undo.append(partial(unhook, module._forward_hooks, {*module._forward_hooks}))
            put(vars(module), _CAPTURING, _CAPTURING in vars(module), undo)
            module.register_forward_hook(average, prepend=True)  # before the hooks that collect
        out = lm.output(lm.embed(token_ids)[None], positions=[length - 1], output_attentions=True)
    layers = [weights for weights in getattr(out, "attentions", None) or () if weights is not None]
    if not layers or not all(map(are_weights, layers)):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} gives no attention weights of shape [1, heads, length, length]. Take a method "
            "that does not read them, such as 'noiser' or 'occlusion', or load a model with code of its own with "
            "attn_implementation='eager'."
        )
    return [weights[0].float().mean(0) for weights in layers]


def divide_gradient(x: Tensor, by: float) -> Tensor:
    """`x`, whose gradient is divided by a number on its way back."""
    if not x.requires_grad:
        return x
    same = x.view_as(x)
    same.register_hook(partial(torch.mul, other=1 / by))
    return same


@contextlib.contextmanager
def shared_attention(model: Any, queries_keys: float, values: float) -> Generator[None]:
    """Within it, gradients that attention returns for queries, keys and values are divided by these numbers."""
    ran = False

    def share(own: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal ran
        ran = True
        q, k, v = (divide_gradient(x, by) for x, by in ((q, queries_keys), (k, queries_keys), (v, values)))
        return own(module, q, k, v, *args, **options)

    with running(model, gradients=True):
        set_attention(model, share)
        yield
    if not ran:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no attention that runs through transformers' AttentionInterface, which alone "
            "has rules for relevance. Take another method, such as 'integrated_gradients', 'occlusion' or 'noiser'."
        )
