"""The result of every method: normalising, aggregating, saving and showing it."""

from noiser.attribution.many import Attributions
from noiser.attribution.result import Attribution, TopUnit

__all__ = ["Attribution", "Attributions", "TopUnit"]
