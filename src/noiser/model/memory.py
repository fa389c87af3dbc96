"""When memory runs out, on any device."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

_SAID = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""What PyTorch's allocators, the operating system and cuBLAS say."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(said in text for said in _SAID)


def free_memory(device: torch.device) -> None:
    """Gives back what the device's allocator keeps for later."""
    with contextlib.suppress(AttributeError, RuntimeError):
        torch.get_device_module(device.type).empty_cache()


def available_memory() -> float:
    """Bytes of main memory that this process may still take; infinite where the system does not say.

    Linux kills a process that takes more, without an error.
    """
    room = [float("inf")]
    with contextlib.suppress(OSError, ValueError, TypeError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        room += [1024.0 * int(kib) for kib in re.findall(r"MemAvailable: +(\d+) kB", text)]
    with contextlib.suppress(OSError, ValueError):  # a container's own limit
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii") for name in ("memory.max", "memory.current"))
        room.append(float(limit) - float(used))
    return min(room)
