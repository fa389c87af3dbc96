"""A device's memory: what runs out of it, and what is sent to it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor


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


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on a device. The host does not wait for what runs there."""
    return numbers.to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device as float64 on the host, by a single copy."""
    if not tensors:
        return []
    at_once = torch.cat([tensor.flatten() for tensor in tensors]).cpu().double()
    parts = at_once.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
