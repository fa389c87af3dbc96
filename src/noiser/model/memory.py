"""Memory that runs out, on any device."""

from __future__ import annotations

import contextlib

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    text = str(error).lower()
    said = ("out of memory", "not enough memory", "allocate memory", "alloc_failed")
    said += (
        "bad_alloc",
        "could not create a primitive",
        "could not create a memory",
        "unable to allocate",
    )
    known = isinstance(error, RuntimeError | OSError) and any(words in text for words in said)
    return known or isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_memory() -> None:
    """Gives back what the accelerator's allocator keeps for later; a CPU's keeps nothing."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.get_device_module().empty_cache()
