"""Explaining: a prompt, a model and a method in, an `Attribution` out."""

from noiser.explain._attribute import attribute as attribute
from noiser.explain._attribute import attribution as attribution
from noiser.explain._cite import cite as cite
from noiser.explain._compare import Comparison as Comparison
from noiser.explain._compare import compare as compare
from noiser.explain._diff import Diff as Diff
from noiser.explain._diff import Edit as Edit
from noiser.explain._diff import diff as diff
from noiser.explain._diff_models import diff_models as diff_models
from noiser.explain._restore import restore as restore
from noiser.explain._tolerance import Tolerance as Tolerance
from noiser.explain._tolerance import tolerance as tolerance
from noiser.explain._without import without as without
from noiser.explain.citations import Citations as Citations
from noiser.explain.citations_record import Citation as Citation
from noiser.explain.citations_record import Opponent as Opponent
from noiser.explain.citations_record import Quote as Quote
from noiser.explain.citations_record import Sentence as Sentence
from noiser.explain.games import Game as Game
