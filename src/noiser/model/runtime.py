"""The state of a model while it runs: its lock, and one list of changes to undo."""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from collections.abc import Callable, Generator
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from noiser.model.products import PLAIN, forward_of

Undo = list[Callable[[], object]]
"""Functions that put things back, the newest last. Each may be called twice."""


@dataclass(eq=False)
class Held:
    """A model's reentrant lock, shared by everybody who wraps it, and the list of changes to undo."""

    lock: Any = field(default_factory=threading.RLock)
    undo: Undo = field(default_factory=list[Callable[[], object]])


_PLAIN_OUTPUT = {"return_dict": True, "output_hidden_states": False, "_output_attentions": False}
_REPACKS = "support_avx512bf16_for_cpu"
"""A mark of bitsandbytes' 4-bit layers: a pass without gradients would repack their weights, which then have none."""
_SETTLED = {"training": False, "_compiled_call_impl": None, _REPACKS: False}
_NAME = "noiser"
_ABSENT: Any = object()
_replaced: ContextVar[Any] = ContextVar("replaced")
_held: WeakKeyDictionary[nn.Module, Held] = WeakKeyDictionary()


def held(model: nn.Module) -> Held:
    """The lock and the undo list of a model."""
    return _held.setdefault(model, Held())


def _after_fork() -> None:
    """In a child process nobody holds a lock; what another thread was at is left to be put back."""
    for state in _held.values():
        state.lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def own_defaults() -> Generator[None]:
    """Within it new tensors are float32 on the CPU and no inference tensors, whatever the caller has set."""
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), contextlib.nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def running(model: Any, *, gradients: bool = False) -> Generator[None]:
    """Holds a model's lock while it runs, and undoes every change afterwards.

    The model is in evaluation mode, compiled parts run eagerly, and layers run as `products.forward_of` says. With
    `gradients` they are computed, but not those of parameters. Each change is on the undo list before it is made and
    leaves the list after it is put back: an interrupt at any moment leaves at most a list that the next call finishes.
    """
    state = held(model)
    lock, undo, within = state.lock, state.undo, state.lock._is_owned()
    # Inference mode of the caller's would leave no way back for gradients; its end puts the gradient mode back too.
    with lock, own_defaults():
        torch.set_grad_enabled(gradients)
        if not within:
            _put_back(undo, 0)
        size = len(undo)
        try:
            if not within:
                _settle(model, undo)
            if gradients:
                _freeze(model, undo)
            yield
        finally:
            _put_back(undo, size)


def twin(model: Any) -> Any:
    """A model of the same weights, which are in memory once, and the same hooks; its modules and flags are its own."""
    with held(model).lock:  # as the model is when nothing runs
        parts = [*model.modules()]
        hooks = chain(*(kind.values() for part in parts for kind in (part._forward_pre_hooks, part._forward_hooks)))
        shared: dict[int, Any] = {id(each): each for each in (*model.buffers(), *hooks)}
        for parameter in model.parameters():  # weights of a special class, such as quantised ones, are shared unchanged
            plain = type(parameter) is nn.Parameter
            shared[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False) if plain else parameter
        return copy.deepcopy(model, shared).eval()


def put(place: Any, name: Any, value: Any, undo: Undo) -> None:
    """Sets an entry of a dictionary; the undo list has what was there before."""
    before = place.get(name, _ABSENT)
    undo.append(partial(place.pop, name, None) if before is _ABSENT else partial(place.__setitem__, name, before))
    place[name] = value


def add_hook(model: nn.Module, module: Any, hook: Callable[..., Any], *, before: bool = False) -> None:
    """Adds a hook to a module of a model until what is `running` ends: after its forward passes, or before them."""
    hooks = module._forward_pre_hooks if before else module._forward_hooks
    held(model).undo.append(partial(unhook, hooks, {*hooks}))
    (module.register_forward_pre_hook if before else module.register_forward_hook)(hook)


def unhook(hooks: dict[int, Any], kept: set[int]) -> None:
    """Removes the hooks but some, by their numbers."""
    for key in hooks.keys() - kept:
        hooks.pop(key, None)


def _put_back(undo: Undo, size: int) -> None:
    while len(undo) > size:
        undo[-1]()
        undo.pop()


def _settle(model: Any, undo: Undo) -> None:
    """Evaluation mode, without compiled parts, with the fastest products; outputs are objects with logits alone."""
    head = model.get_output_embeddings()
    for module in model.modules():
        state = vars(module)
        for name, wanted in _SETTLED.items():
            if state.get(name):
                put(state, name, wanted, undo)
        if own := state.get("forward"):  # of another library's, which stays unless it is compiled
            forward = getattr(own, "_torchdynamo_orig_callable", None)
        else:
            forward = forward_of(module, is_head=module is head)
        if forward:
            put(state, "forward", forward, undo)
    for config in map(vars, _configs(model)):
        for name, value in _PLAIN_OUTPUT.items():
            if config.get(name, value) != value:
                put(config, name, value, undo)


def _freeze(model: nn.Module, undo: Undo) -> None:
    """Parameters without gradients; tensors that were made in inference mode as ordinary ones of the same memory."""
    for state in map(vars, model.modules()):
        for place in (state["_parameters"], state["_buffers"]):
            for name, tensor in [*place.items()]:
                if type(tensor) in PLAIN and tensor.is_inference():
                    same: Any = torch.from_dlpack(tensor.detach())
                    put(place, name, nn.Parameter(same, False) if isinstance(tensor, nn.Parameter) else same, undo)
                elif tensor is not None and tensor.requires_grad and tensor.is_leaf:
                    undo.append(partial(tensor.requires_grad_, True))
                    tensor.requires_grad_(False)


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that the model's modules read, sub-configurations included."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and "_attn_implementation_internal" in getattr(config, "__dict__", ()):
            found[id(config)] = config
            waiting += [vars(config).get(name) for name in getattr(config, "sub_configs", {})]
    return list(found.values())


def set_attention(model: Any, attention: Callable[..., Any] | str, *, masked: bool = True) -> None:
    """Sets the attention of a model and all its parts until what is `running` ends.

    Args:
        model: of transformers.
        attention: the name of an implementation; or a function of (own, module, query, key, value, mask, **options),
            where `own` is the attention that it replaces.
        masked: whether the function gets a mask, or None.
    """
    undo = held(model).undo
    if not isinstance(attention, str):
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, _mask)
        own = model.config._attn_implementation
        undo.append(partial(_replaced.set, _replaced.get(None)))
        _replaced.set((attention, own if own in ("eager", "sdpa") else "sdpa", masked))
        if torch.backends.cuda.cudnn_sdp_enabled():  # it makes a plan for every new shape, 30 ms each
            undo.append(partial(torch.backends.cuda.enable_cudnn_sdp, True))
            torch.backends.cuda.enable_cudnn_sdp(False)
        attention = _NAME
    for config in _configs(model):  # the public setter checks, and may fetch, the kernels of what is put back
        put(vars(config), "_attn_implementation_internal", attention, undo)


def _attend(module: Any, *args: Any, **options: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention, own, _ = _replaced.get()
    return attention(ALL_ATTENTION_FUNCTIONS.get(own) or eager_of(module), module, *args, **options)


def _mask(*args: Any, **options: Any) -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    _, own, masked = _replaced.get()
    return ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **options) if masked else None


def eager_of(module: nn.Module) -> Callable[..., Any]:
    """The eager attention function of a module's architecture."""
    return sys.modules[type(module).__module__].eager_attention_forward
