"""The sentences of a planted prompt: where they stand, and what they say."""

from __future__ import annotations

from noiser.data import Example


def places_of(example: Example) -> list[tuple[int, int]]:
    """The spans of all sentences in order."""
    return sorted(span for spans in example.spans.values() for span in spans)


def sources_of(example: Example) -> list[str]:
    """All sentences in order: the sources."""
    return [example.prompt[start:end] for start, end in places_of(example)]
