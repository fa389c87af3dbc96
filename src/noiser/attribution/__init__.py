"""The result of every method: normalising, aggregating, saving and showing it."""

from noiser.attribution.record import TopUnit
from noiser.attribution.result import Attribution

__all__ = ["Attribution", "TopUnit"]
