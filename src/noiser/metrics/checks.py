"""Arguments that several metrics take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from noiser.errors import ParameterError

__all__ = ["check_shares"]


def check_shares(name: str, values: Sequence[float], *, at_least: int = 1) -> tuple[float, ...]:
    """Numbers between 0 and 1, 0 left out, ascending."""
    shares = tuple(float(value) for value in values)
    ascending = all(a < b for a, b in itertools.pairwise(shares))
    if len(shares) < at_least or not ascending or not all(math.isfinite(x) and 0 < x <= 1 for x in shares):
        raise ParameterError(
            f"{name} is {values!r}; expected {at_least} or more numbers above 0 and at most 1, in ascending order."
        )
    return shares
