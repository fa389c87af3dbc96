"""Evaluation: prompts, a method and metrics in; numbers with intervals out."""

from noiser.evaluation._measure import measure
from noiser.evaluation.measuring import Skipped
from noiser.evaluation.result import (
    Evaluation,
    Evaluations,
    differences,
    paired_sample,
    sample_of,
)
from noiser.evaluation.run import evaluate

__all__ = [
    "Evaluation",
    "Evaluations",
    "Skipped",
    "differences",
    "evaluate",
    "measure",
    "paired_sample",
    "sample_of",
]
