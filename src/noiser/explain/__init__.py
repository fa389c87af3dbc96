"""Explaining: a prompt, a model and a method in, an `Attribution` out."""

from noiser.explain.attribute import attribute, attribution_passes, is_many
from noiser.explain.tolerance import Tolerance, tolerance

__all__ = ["Tolerance", "attribute", "attribution_passes", "is_many", "tolerance"]
