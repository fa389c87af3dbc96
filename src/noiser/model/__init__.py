"""Models: loading, embedding and running them, through a few operations."""

from noiser.model.backends import BACKENDS
from noiser.model.language_model import LanguageModel, wrap
from noiser.model.loading import load_model

__all__ = ["BACKENDS", "LanguageModel", "load_model", "wrap"]
