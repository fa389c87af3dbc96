"""Benchmarks: a plan in, stored rows out, resumable, on this machine or on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noiser.bench.plan import Plan, read_plan
from noiser.bench.store import Row, Store

if TYPE_CHECKING:
    from noiser.bench.run import run_bench

__all__ = ["Plan", "Row", "Store", "read_plan", "run_bench"]


def __getattr__(name: str) -> Any:
    if name == "run_bench":  # it needs torch, which reading stored rows does not
        from noiser.bench.run import run_bench

        return run_bench
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
