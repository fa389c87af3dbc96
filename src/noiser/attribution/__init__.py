"""The result record: normalising, aggregating, saving and showing it."""

from noiser.attribution.record import Attribution

__all__ = ["Attribution"]
