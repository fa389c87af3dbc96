"""A model's attention: its weights, and other ways to compute it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from noiser.errors import UnsupportedModelError
from noiser.model.runtime import add_hook, held, put, running

_KNOWN_CODE = ("noiser", "torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao")


def is_known_code(code: Any) -> bool:
    """Whether a function or class is of a library whose attention is known."""
    while isinstance(code, partial):
        code = code.func
    return str(getattr(code, "__module__", "")).partition(".")[0] in _KNOWN_CODE


def callers_attention(model: Any) -> str | None:
    """The name of a model's attention in transformers' registry; None for those of libraries."""
    from transformers import AttentionInterface

    functions: Any = AttentionInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
    name: str = model.config.get_text_config()._attn_implementation
    return name if name in functions and not is_known_code(functions[name]) else None


def refuse_callers_attention(model: Any) -> None:
    """Raises UnsupportedModelError where a function of the caller's computes attention."""
    name = callers_attention(model)
    if name is not None:
        raise UnsupportedModelError(
            f"Attention of this {type(model).__name__} is computed by {name!r}, a function of "
            "your own, which gives no weights. Take a method that does not read them, such as "
            "'occlusion', or set_attn_implementation('eager') where that computes the same."
        )


def attention_maps(
    lm: Any, token_ids: Int[Tensor, " length"]
) -> list[Float[Tensor, "length length"]]:
    """Attention weights of each layer that has attention, first to last, mean over heads, float32.

    Row i holds what position i attends to: zero after i, and outside the window of a layer that
    slides.

    Raises UnsupportedModelError where a model gives no weights, or a function of the caller's
    computes its attention.
    """
    refuse_callers_attention(lm.model)
    length = len(token_ids)

    def are_weights(found: Any) -> bool:
        return (
            isinstance(found, Tensor) and found.ndim == 4 and found.shape[-2:] == (length, length)
        )

    def average(_module: Any, _inputs: Any, output: Any) -> Any:
        """Weights leave their layer averaged over heads: memory holds one map per layer, not per
        head.
        """
        if isinstance(output, tuple) and len(output) > 1 and are_weights(weights := output[1]):
            output = (output[0], weights.float().mean(1, keepdim=True), *output[2:])
        return output

    with running(lm.model):
        set_attention(lm.model, "eager")
        for module in (
            lm.model.modules()
        ):  # with ours, hooks that transformers installs to collect weights go again
            put(lm.model, vars(module), _CAPTURING, _CAPTURING in vars(module))
            add_hook(lm.model, module, average, prepend=True)  # before the hooks that collect
        out = lm.output(lm.embed(token_ids)[None], positions=[length - 1], output_attentions=True)
    layers = [weights for weights in getattr(out, "attentions", None) or () if weights is not None]
    if not layers or not all(map(are_weights, layers)):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} gives no attention weights of shape [1, heads, length, "
            f"length]. Take a method "
            "that does not read them, such as 'occlusion', or load a model of its own code with "
            "attn_implementation='eager'."
        )
    return [weights[0].float().mean(0) for weights in layers]


def divide_gradient(x: Tensor, by: float) -> Tensor:
    """`x`, whose gradient is divided by a number on its way back."""
    if x.requires_grad:
        x = x.view_as(x)
        x.register_hook(partial(torch.mul, other=1 / by))
    return x


def share_attention(
    model: Any, queries_keys: float, values: float, ran: list[Any]
) -> Callable[..., Any]:
    """Divides gradients that attention returns for queries, keys and values while a model runs.

    `ran` gets its layers. Returns the function that was put in place, see `set_attention`.
    """

    def share(
        own: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
    ) -> Any:
        ran.append(module)
        q = divide_gradient(q, queries_keys)
        k = divide_gradient(k, queries_keys)
        v = divide_gradient(v, values)
        return own(module, q, k, v, *args, **options)

    set_attention(model, share)
    return share


def set_attention(model: Any, attention: Callable[..., Any] | str, *, masked: bool = True) -> None:
    """Replaces the attention while a model runs, by name or by a function (own, module, q, k, v,
    mask, **options).

    `own` is the caller's function if the model has one, and otherwise eager or sdpa.
    """
    if not isinstance(attention, str):
        from transformers import AttentionInterface, AttentionMaskInterface

        functions: Any = AttentionInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
        masks: Any = AttentionMaskInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
        own = callers_attention(model)
        if own is None:
            own = "eager" if model.config._attn_implementation == "eager" else "sdpa"
        put(
            model,
            functions,
            name := f"noiser-{id(model)}",
            partial(attention, functions.get(own, eager)),
        )
        if masked and own in masks:  # transformers makes no mask for a name that is not there
            put(model, masks, name, masks[own])
        if (
            torch.backends.cuda.cudnn_sdp_enabled()
        ):  # it makes a plan for every new shape, 30 ms each
            held[model].undo.append(partial(torch.backends.cuda.enable_cudnn_sdp, True))
            torch.backends.cuda.enable_cudnn_sdp(False)
        attention = name
    for config in held[
        model
    ].configs:  # the public setter checks, and may fetch, the kernels of what is put back
        put(model, config, "_attn_implementation_internal", attention)


def eager(module: nn.Module, *states: Any, **options: Any) -> Any:
    """The output of the eager attention function of a module's architecture."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *states, **options)


_CAPTURING = (
    "_output_capturing_hooks_installed"  # transformers' mark on a model whose hooks collect weights
)
