"""The data sets of the paper, read from their upstream files, none of which is part of this package."""

from noiser.data.actions import draw_actions, messages_of
from noiser.data.dataset import DATA_SETS, DataSet, Example, Reading, Recipe, Source, UpstreamFile
from noiser.data.known import KNOWN
from noiser.data.loading import cache_folder, fetch, load
from noiser.data.longra import LONGRA
from noiser.data.planted import read_planted
from noiser.data.wikibio import WIKIBIO
from noiser.data.wikitext import WIKITEXT

__all__ = [
    "DATA_SETS",
    "KNOWN",
    "LONGRA",
    "WIKIBIO",
    "WIKITEXT",
    "DataSet",
    "Example",
    "Reading",
    "Recipe",
    "Source",
    "UpstreamFile",
    "cache_folder",
    "draw_actions",
    "fetch",
    "load",
    "messages_of",
    "read_planted",
]
