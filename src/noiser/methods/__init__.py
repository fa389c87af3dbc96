"""Methods: an engine with a query in, scores out; one file a family."""

from __future__ import annotations

from typing import Any

from noiser.methods.attribute import attribute, make_method
from noiser.methods.noiser import Noiser
from noiser.methods.protocol import METHODS, Method, Scores

__all__ = ["METHODS", "Method", "Noiser", "Scores", "attribute", "make_method"]


def _noiser_relative(**parameters: Any) -> Noiser:
    return Noiser(**({"bounding": "relative", "score": "hellinger"} | parameters))


METHODS.register("noiser", Noiser, summary="bounded noise on one unit at a time (the paper's method)")
METHODS.register(
    "noiser_relative", _noiser_relative, summary="noise in proportion to each embedding, Hellinger score; no search"
)
