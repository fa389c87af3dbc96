"""An attribution as a tidy table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pandas import DataFrame

    from noiser.attribution.record import Attribution

__all__ = ["to_dataframe"]


def to_dataframe(att: Attribution) -> DataFrame:
    """See `Attribution.to_dataframe`."""
    import pandas as pd

    rows, columns = att.scores.shape
    targets = torch.arange(rows).repeat_interleave(columns).tolist()
    units = torch.arange(columns).repeat(rows).tolist()
    missing = torch.full((rows, columns), torch.nan)

    def flat(values: Tensor | None) -> list[float]:
        return (missing if values is None else values).reshape(-1).tolist()

    k_min = None if att.k_min is None else att.k_min[:, None].expand(rows, columns)
    return pd.DataFrame(
        {
            "target_index": targets,
            "target": [att.targets[row].text for row in targets],
            "unit_index": units,
            "unit": [att.units[column].text for column in units],
            "start": [att.units[column].start for column in units],
            "end": [att.units[column].end for column in units],
            "score": flat(att.scores),
            "stderr": flat(att.stderr),
            "threshold": flat(att.thresholds),
            "k_min": flat(k_min),
        }
    )
