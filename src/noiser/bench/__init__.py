"""Benchmarks: a plan in, stored rows out, resumable, on this machine or on a cluster."""

from noiser.bench.plan import Plan, read_plan
from noiser.bench.rows import Row
from noiser.bench.store import Store

__all__ = ["Plan", "Row", "Store", "read_plan"]
