"""Evaluation: prompts, a method and metrics in; numbers with intervals out."""

from noiser.evaluation.comparison import Comparison
from noiser.evaluation.result import Evaluation, Skipped
from noiser.evaluation.run import evaluate

__all__ = ["Comparison", "Evaluation", "Skipped", "evaluate"]
