"""The old address of `Attribution.from_dict` and `load`."""

from noiser.attribution.result import Attribution

__all__ = ["from_dict", "load"]

from_dict, load = Attribution.from_dict, Attribution.load
