"""What a run is recorded with: versions, the machine and the time."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from noiser.version import __version__, version_of

__all__ = ["core_count", "machine", "now", "versions"]


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of noiser, Python, and the packages that numbers depend on."""
    found = {"noiser": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "scipy", "scikit-learn", "ray"):
        try:
            found[package] = version_of(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Processor, cores and graphics cards of this machine; of a cluster, of the one that stores the rows."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"system": sys.platform, "cpu": _processor(), "cores": core_count(), "gpus": gpus}


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
