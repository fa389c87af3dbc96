"""The data sets of the paper, read from their upstream files, none of which is part of this
package.
"""

from noiser.data import known, longra, planted, wikibio, wikitext
from noiser.data.actions import draw_actions, messages_of
from noiser.data.dataset import (
    DATA_SETS,
    DataSet,
    Example,
    LoadedExamples,
    Provenance,
    Recipe,
    UpstreamFile,
)
from noiser.data.loading import cache_folder, fetch, load

__all__ = [
    "DATA_SETS",
    "DataSet",
    "Example",
    "LoadedExamples",
    "Provenance",
    "Recipe",
    "UpstreamFile",
    "cache_folder",
    "draw_actions",
    "fetch",
    "known",
    "load",
    "longra",
    "messages_of",
    "planted",
    "wikibio",
    "wikitext",
]
