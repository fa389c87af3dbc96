"""The forms of the facts about a run, which its folder and its packs hold as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter

from noiser.bench.resolve import Selection


class _Resolved(BaseModel, extra="allow"):
    """What a plan means; see `noiser.bench.resolve.resolve`."""

    seed: int
    block: int
    models: dict[str, dict[str, Any]]
    data: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    metrics: dict[str, dict[str, Any]]


class _Model(BaseModel, extra="allow"):
    """Which model made the rows."""

    identity: dict[str, Any]


class _StoredFacts(BaseModel, extra="allow"):
    """The facts that are read; others are kept as they are."""

    plan: str = ""
    resolved: _Resolved | None = None
    models: dict[str, _Model] = {}
    selections: list[Selection] = []
    sessions: list[dict[str, Any]] = []
    versions: dict[str, Any] = {}
    machine: dict[str, Any] = {}


@cache
def _reader() -> TypeAdapter[_StoredFacts]:
    return TypeAdapter(_StoredFacts)


def checked_facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts as they are. Raises ValueError, pydantic's, where one has another form."""
    _reader().validate_python(facts, strict=True)
    return facts
