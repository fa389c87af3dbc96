"""The state of a model while it runs: its lock, its mode, its attention."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_making = threading.Lock()


def model_lock(model: nn.Module) -> threading.RLock:
    """The reentrant lock of a model, the same for everybody who wraps it.

    Whoever waits for it must hold no other lock that its holder may want.
    """
    with _making:
        return _locks.setdefault(model, threading.RLock())


def on_the_cpu() -> AbstractContextManager[object]:
    """Puts tensors that name no device on the CPU, whatever `torch.set_default_device` says."""
    return contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """Evaluation mode, in which compiled models run eagerly; modules in training mode return to it."""
    modules = list(model.modules())
    training = [module for module in modules if module.training]
    compiled = any(
        vars(module).get("_compiled_call_impl") is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        for module in modules
    )
    for module in training:
        module.training = False
    try:
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def attention_implementation(model: Any, name: str) -> Generator[None]:
    """An attention implementation in the model and all its parts; what each configuration had comes back afterwards.

    The setting is written directly: the public setter checks, and may fetch, the kernels of what is put back. Hooks
    that transformers installs to collect the weights are taken out again.
    """
    configs = _configs(model)
    settings = [config._attn_implementation_internal for config in configs]
    hooks = [(module, set(module._forward_hooks)) for module in model.modules()]
    flagged = {id(module) for module in model.modules() if "_output_capturing_hooks_installed" in vars(module)}
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, setting in zip(configs, settings, strict=True):
            config._attn_implementation_internal = setting
        for module, before in hooks:
            for key in [key for key in module._forward_hooks if key not in before]:
                del module._forward_hooks[key]
            if id(module) not in flagged:
                vars(module).pop("_output_capturing_hooks_installed", None)


def _configs(model: Any) -> list[Any]:
    """Every configuration that the model's modules read, sub-configurations included, one entry per object."""
    configs: dict[int, Any] = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) in configs or not hasattr(config, "_attn_implementation_internal"):
            continue
        configs[id(config)] = config
        waiting += [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    return list(configs.values())
