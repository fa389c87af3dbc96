"""The engine: perturbations in, probabilities out; batching, prefix reuse, memory."""

from noiser.engine.engine import Engine, Progress
from noiser.engine.perturbation import Perturbation, add_noise, keep_dimensions, replace_rows

__all__ = ["Engine", "Perturbation", "Progress", "add_noise", "keep_dimensions", "replace_rows"]
