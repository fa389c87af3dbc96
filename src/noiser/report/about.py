"""What a report says of the run that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from noiser.report.names import data_title
from noiser.report.results import Results
from noiser.version import __version__

__all__ = ["about", "title"]


_IDENTITY = {"dtype": "", "revision": "revision", "weights": "weights"}


def title(results: Results) -> str:
    """The report's title."""
    return f"Benchmark “{results.plan.name}”"


def about(results: Results) -> list[tuple[str, str]]:
    """Models, data, seed, versions and machine, as (name, value)."""
    plan, run = results.plan, results.run
    found = [
        ("models", ", ".join(_model(label, run) for label in plan.labels("models"))),
        ("data", ", ".join(map(data_title, plan.data))),
        ("methods", str(len(plan.methods))),
        ("judges", ", ".join(dict.fromkeys(measure.judge for measure in plan.metrics if measure.judge))),
        ("seed", str(plan.seed)),
        ("intervals", f"{results.confidence:.0%}"),
        ("versions", _flat(run.get("versions"))),
        ("machine", _flat(run.get("machine"))),
        ("plan's fingerprint", str(run.get("fingerprint") or "")[:16]),
        ("reported by", f"noiser {__version__}"),
    ]
    return [(name, value) for name, value in found if value]


def _model(label: str, run: Mapping[str, Any]) -> str:
    models: Any = run.get("models")
    entry: Any = models.get(label) if isinstance(models, dict) else None
    known: Any = entry.get("identity") if isinstance(entry, dict) else None
    if not isinstance(known, dict):
        return label
    facts = [f"{name} {str(known[key])[:12]}".strip() for key, name in _IDENTITY.items() if known.get(key)]
    return f"{label} ({', '.join(facts)})" if facts else label


def _flat(values: Any) -> str:
    if isinstance(values, list):
        return ", ".join(map(str, cast("list[object]", values)))
    if not isinstance(values, dict):
        return "" if values is None else str(values)
    known = cast("dict[str, object]", values)
    return ", ".join(f"{name} {_flat(value)}" for name, value in known.items() if value not in (None, [], ""))
