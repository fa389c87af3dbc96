"""Explaining: a prompt, a model and a method in, an `Attribution` out."""

from noiser.explain.attribute import attribute, attribution, is_many
from noiser.explain.citations import Citation, Citations, Quote, Sentence
from noiser.explain.cite import cite
from noiser.explain.compare import Comparison, compare, diff_models
from noiser.explain.diff import Diff, Edit, diff
from noiser.explain.games import Game
from noiser.explain.tolerance import Tolerance, tolerance

__all__ = [
    "Citation",
    "Citations",
    "Comparison",
    "Diff",
    "Edit",
    "Game",
    "Quote",
    "Sentence",
    "Tolerance",
    "attribute",
    "attribution",
    "cite",
    "compare",
    "diff",
    "diff_models",
    "is_many",
    "tolerance",
]
