"""The engine: perturbations in, probabilities and gradients out; batching, prefix reuse, memory."""

from noiser.engine.crowd import Outcome, Shares, Task, together
from noiser.engine.engine import Engine, Progress
from noiser.engine.gradients import Gradient, Objective, ObjectiveScore, gradients
from noiser.engine.perturbation import Perturbation, add_noise, keep_dimensions, replace_rows, unchanged

__all__ = [
    "Engine",
    "Gradient",
    "Objective",
    "ObjectiveScore",
    "Outcome",
    "Perturbation",
    "Progress",
    "Shares",
    "Task",
    "add_noise",
    "gradients",
    "keep_dimensions",
    "replace_rows",
    "together",
    "unchanged",
]
