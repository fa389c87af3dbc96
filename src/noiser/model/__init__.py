"""Models: text to tokens to character spans; loading; embedding and running, through a few operations."""

from noiser.model.language_model import LanguageModel, wrap
from noiser.model.loading import load_model
from noiser.model.query import Query, build_query
from noiser.model.rebuild import rebuild_query
from noiser.text import place_sources

__all__ = ["LanguageModel", "Query", "build_query", "load_model", "place_sources", "rebuild_query", "wrap"]
