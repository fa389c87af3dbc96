"""Explaining: a prompt, a model and a method in, an `Attribution` out."""

from noiser.explain.attribute import attribute as attribute
from noiser.explain.attribute import attribution as attribution
from noiser.explain.citations import Citation as Citation
from noiser.explain.citations import Citations as Citations
from noiser.explain.citations import Opponent as Opponent
from noiser.explain.citations import Quote as Quote
from noiser.explain.citations import Sentence as Sentence
from noiser.explain.cite import cite as cite
from noiser.explain.compare import Comparison as Comparison
from noiser.explain.compare import compare as compare
from noiser.explain.compare import diff_models as diff_models
from noiser.explain.diff import Diff as Diff
from noiser.explain.diff import Edit as Edit
from noiser.explain.diff import diff as diff
from noiser.explain.games import Game as Game
from noiser.explain.tolerance import Tolerance as Tolerance
from noiser.explain.tolerance import tolerance as tolerance
