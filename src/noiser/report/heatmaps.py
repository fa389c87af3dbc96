"""Heat maps of the plan's own prompts, method below method, as a figure. Prompts of data sets are never shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from noiser.attribution import Attribution
from noiser.attribution.display import headings, label
from noiser.attribution.figure import figure
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
    """The attributions of the first of the plan's own prompts, by method; none where the folder is packed."""
    by_prompt: dict[tuple[str, str, str], list[Attribution]] = {}
    for model, data in product(results.models, results.data):
        for method in results.plan.methods_for(model.label, data.label) if data.prompts is not None else ():
            found = results.attributions(model.label, data.label, method.label)
            for example, attribution in list(found.items())[:_MOST]:
                key = (model.label, data.label, example)
                by_prompt.setdefault(key, []).append(replace(attribution, method=method_title(method.label)))
    return [PromptAttributions(*key, tuple(attributions)) for key, attributions in by_prompt.items()]


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
