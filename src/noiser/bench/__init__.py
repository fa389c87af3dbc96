"""Benchmarks: a plan in, stored rows out, resumable, on this machine or on a cluster."""

from noiser.bench.plan import Plan, read_plan
from noiser.bench.store import Row, Store

__all__ = ["Plan", "Row", "Store", "read_plan"]
