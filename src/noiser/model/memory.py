"""When memory runs out, on any device."""

from __future__ import annotations

import contextlib

import torch

_SAID = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""What PyTorch's allocators, the operating system and cuBLAS say."""

LOGIT_BYTES = 192 * 2**20
"""The most bytes of logits of one pass."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(said in text for said in _SAID)


def free_memory() -> None:
    """Gives back what the accelerator's allocator keeps for later; a CPU's keeps nothing."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.get_device_module().empty_cache()
