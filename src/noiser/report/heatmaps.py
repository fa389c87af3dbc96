"""Heat maps of the plan's own prompts, method below method, as a figure. Prompts of data sets are never shown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from noiser.attribution import Attribution
from noiser.attribution.display import headings, label
from noiser.attribution.figure import figure
from noiser.errors import StoredFileError
from noiser.report.figures import Picture
from noiser.report.grid import method_title
from noiser.report.rows import Results

_MOST = 6
"""Prompts per model that are shown."""

_WIDTH = 6.5
"""Inches."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9._+@-]*"


class PromptAttributions(NamedTuple):
    """One of the plan's own prompts with its attributions, each by the title that its method has in the report."""

    model: str
    data: str
    example: str
    attributions: tuple[Attribution, ...]


def own_attributions(results: Results) -> list[PromptAttributions]:
    """The attributions of the first of the plan's own prompts, by method; none where the folder is packed.

    Raises:
        StoredFileError: an attribution's `example`, which names a file of the report, is not like a label of a plan.
    """
    by_prompt: dict[tuple[str, str, str], list[Attribution]] = {}
    for model, data in product(results.models, results.data):
        for method in results.plan.methods_for(model.label, data.label) if data.prompts is not None else ():
            for stored in results.attributions(model.label, data.label, method.label):
                _check_name(stored.example, (model.label, data.label, method.label))
                if stored.attribution is not None and stored.index < _MOST:
                    key = (model.label, data.label, stored.example)
                    by_prompt.setdefault(key, []).append(replace(stored.attribution, method=method_title(method.label)))
    return [PromptAttributions(*key, tuple(attributions)) for key, attributions in by_prompt.items()]


def _check_name(example: str, labels: tuple[str, ...]) -> None:
    if not re.fullmatch(_NAME, example):
        raise StoredFileError(
            f"An attribution of {', '.join(labels)} is damaged: its example is {example!r}; expected letters, digits "
            "and . _ + @ -, to name files by. Delete its file and run the plan again: it makes what is missing."
        )


def heatmaps(prompts: Sequence[PromptAttributions]) -> Iterator[Picture]:
    """A figure per prompt: its first target, method below method."""
    for prompt in prompts:
        attributions, first = prompt.attributions, prompt.attributions[0]
        text, target = label(first.text[: first.prompt_length]), label(first.targets[0].text)
        words = "; ".join(
            f"{heading}: {', '.join(label(unit.text) for unit in att.top(3))}"
            for heading, att in zip(headings(attributions), attributions, strict=True)
        )
        key = f"heatmap-{prompt.data}-{prompt.example}-{prompt.model}"
        title = f"Attributions of “{text}” → “{target}”, {prompt.model}"
        yield Picture(key, title, f"Highest units. {words}.", figure(attributions, 0, _WIDTH))
