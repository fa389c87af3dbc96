"""A model while it runs: its lock, one list of changes to undo, its products, and memory that runs
out.

PyTorch hands float32 products to MKL on x86; oneDNN is faster on AMD's processors, twice for a few
rows (`design/performance.md`). A head in bfloat16 rounds logits around 20 to eighths: tokens that
differ would tie.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Generator
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from noiser.model.products import PLAIN, forward_of
from noiser.model.sharing import holding, locks_of, users_of


class Held:
    """A model's reentrant lock, shared by everybody who wraps it, and what was changed for as long
    as it runs.

    Only who holds the locks of all of the model's parts (`sharing`) takes this one, which tells
    whether the model runs.
    """

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.undo: list[
            Callable[[], object]
        ] = []  # each may be called twice; the newest is the last
        self.configs: list[dict[str, Any]] = []  # attributes of all configurations


_WANTED = {
    "training": False,
    "_compiled_call_impl": None,
    # 4-bit layers of bitsandbytes: weights would be repacked, and lose gradients
    "support_avx512bf16_for_cpu": False,
    "return_dict": True,
    "output_hidden_states": False,
    "_output_attentions": False,
}
"""Attributes of modules and configurations while a model runs, where they have others."""

held: WeakKeyDictionary[nn.Module, Held] = WeakKeyDictionary()


def _after_fork() -> None:
    for state in held.values():
        state.lock = threading.RLock()


if hasattr(
    os, "register_at_fork"
):  # in a child nobody holds a lock; what another thread was at is left to be put back
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def own_defaults() -> Generator[None]:
    """Within it new tensors are float32 on the CPU and no inference tensors, whatever the caller
    has set.
    """
    dtype = torch.get_default_dtype()
    device = torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            contextlib.nullcontext() if device.type == "cpu" else torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def exactly(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which passes on a device have their own precision, whatever autocast a caller
    has set.
    """
    return torch.autocast(device.type, enabled=False)


@contextlib.contextmanager
def running(model: Any, *, gradients: bool = False) -> Generator[None]:
    """Holds a model's lock while it runs, and undoes every change afterwards.

    The model is in evaluation mode, compiled parts run eagerly, and layers run as `forward_of`
    says. With `gradients` they are computed, but not those of parameters. Each change is on the
    undo list before it is made and leaves it after it is put back, so an interrupt at any moment,
    also while changes are put back, leaves the model as it was. A second interrupt at that moment
    leaves a list that the next call finishes.
    """
    state = held.get(model) or held.setdefault(model, Held())
    lock = state.lock
    undo = state.undo
    within = state.lock._is_owned()
    shared = [] if within else locks_of(model, state)
    # Inference mode of the caller's would leave no way back for gradients; its end puts the
    # gradient mode back too.
    with holding(shared), lock, own_defaults():
        torch.set_grad_enabled(gradients)
        size = len(undo) if within else 0
        try:
            if not within:
                for other in users_of(shared):
                    if other is state or not other.lock._is_owned():
                        while other.undo:  # what an interrupt cut short
                            other.undo[-1]()
                            other.undo.pop()
                _settle(model)
            if gradients:
                _freeze(model)
            yield
        finally:
            # An interrupt may come while changes are put back: the rest is put back then, too.
            try:
                while len(undo) > size:
                    undo[-1]()
                    undo.pop()
            finally:
                while len(undo) > size:
                    undo[-1]()
                    undo.pop()


def is_running(model: nn.Module) -> bool:
    """Whether this thread runs the model: it is within `running`."""
    state = held.get(model)
    return state is not None and state.lock._is_owned()


def put(model: nn.Module, place: Any, name: Any, value: Any) -> None:
    """Sets an entry of a dictionary until what is `running` ends."""
    undo = (
        partial(place.__setitem__, name, place[name])
        if name in place
        else partial(place.pop, name, None)
    )
    held[model].undo.append(undo)
    place[name] = value


def add_hook(
    model: nn.Module, module: Any, hook: Callable[..., Any], *, before: bool = False, **options: Any
) -> None:
    """Adds a hook to a module of a model until what is `running` ends: after its forward passes, or
    before them.
    """
    name = "forward_pre_hook" if before else "forward_hook"
    put(model, vars(module), f"_{name}s", vars(module)[f"_{name}s"].copy())
    getattr(module, f"register_{name}")(hook, **options)


def twin(model: Any) -> Any:
    """A model of the same weights, which are in memory once, and the same hooks; its modules and
    flags are its own.
    """
    state = held.setdefault(model, Held())
    with holding(locks_of(model, state)), state.lock:  # as the model is when nothing runs
        kinds = ((part._forward_pre_hooks, part._forward_hooks) for part in model.modules())
        hooks = (hook for kind in chain(*kinds) for hook in kind.values())
        shared: dict[int, Any] = {
            id(each): each for each in (*model.parameters(), *model.buffers(), *hooks)
        }
        plain = (
            parameter for parameter in model.parameters() if type(parameter) is nn.Parameter
        )  # not quantised ones
        shared |= {id(parameter): nn.Parameter(parameter.detach(), False) for parameter in plain}
        if any("layers_are_rescaled" in vars(module) for module in model.modules()):
            shared = {}  # RWKV divides weights in place: it cannot share them
        return copy.deepcopy(model, shared).eval()


def _settle(model: Any) -> None:
    """Evaluation mode, without compiled parts, with the fastest products; outputs are objects with
    logits alone.
    """
    modules = [*model.modules()]
    found: list[Any] = [vars(module).get("config") for module in modules]
    found += [
        vars(config).get(name) for config in found for name in getattr(config, "sub_configs", {})
    ]
    states = {
        id(config): vars(config)
        for config in found
        if hasattr(config, "_attn_implementation_internal")
    }
    held[model].configs = configs = [*states.values()]
    for state in (*map(vars, modules), *configs):
        for name, wanted in _WANTED.items():
            if state.get(name, wanted) != wanted:
                put(model, state, name, wanted)
    head = model.get_output_embeddings()
    for module in modules:
        if "layers_are_rescaled" in vars(module):
            scaled = module.layers_are_rescaled
            held[model].undo.append(partial(_scale_as_before, module, scaled))
        own = vars(module).get("forward")  # of another library's, which stays unless it is compiled
        forward = (
            getattr(own, "_torchdynamo_orig_callable", None)
            if own
            else forward_of(module, module is head)
        )
        if forward:
            put(model, vars(module), "forward", forward)


def _scale_as_before(module: Any, scaled: bool) -> None:
    """Undoes what RWKV does to its weights in evaluation mode, where it divides them for half
    precision.
    """
    if module.layers_are_rescaled != scaled:
        training = module.training
        module.training = not scaled
        module._rescale_layers()
        module.training = training


def _freeze(model: nn.Module) -> None:
    """Parameters without gradients; tensors that were made in inference mode as ordinary ones of
    the same memory.
    """
    for state in map(vars, model.modules()):
        for place in (state["_parameters"], state["_buffers"]):
            for name, tensor in [*place.items()]:
                if type(tensor) in PLAIN and tensor.is_inference():
                    same: Any = torch.from_dlpack(tensor.detach())
                    put(
                        model,
                        place,
                        name,
                        nn.Parameter(same, False) if isinstance(tensor, nn.Parameter) else same,
                    )
                elif tensor is not None and tensor.requires_grad and tensor.is_leaf:
                    held[model].undo.append(partial(tensor.requires_grad_, True))
                    tensor.requires_grad_(False)
