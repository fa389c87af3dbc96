"""A metric: on how few units an attribution puts its weight."""

from __future__ import annotations

from noiser.metrics import Case, Metric, NumberInfo


def concentration() -> Metric:
    """On how few units the weight lies: 1 / Σ share², in units and as a share of them."""
    return Metric(
        measure=_measure,
        others={
            "": NumberInfo(0, float("inf"), None, None, "mean over prompts")
        },  # columns of any name, by their mean
    )


def _measure(case: Case) -> dict[str, float]:
    shares = case.att.normalized(case.normalization or "abs_sum")
    effective = 1 / shares.square().nansum(-1)
    seen = shares.isfinite().sum(-1)
    return {
        "effective_units": float(effective.mean()),
        "effective_share": float((effective / seen).mean()),
    }
