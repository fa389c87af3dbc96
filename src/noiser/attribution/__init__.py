"""The result of every method: normalising, aggregating, saving and showing it."""

from noiser.attribution.result import Attribution, TopUnit

__all__ = ["Attribution", "TopUnit"]
