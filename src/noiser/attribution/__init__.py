"""The result record: normalising, aggregating, saving and showing it."""

from noiser.attribution.record import Attribution, TopUnit

__all__ = ["Attribution", "TopUnit"]
