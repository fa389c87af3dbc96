"""`noiser.compare`: one prompt, several methods, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from noiser.attribution import Attribution, html
from noiser.attribution.display import headings
from noiser.checks import random_state_kept
from noiser.errors import ParameterError
from noiser.explain.attribute import attribute
from noiser.files import write_text
from noiser.methods import Method, make_method
from noiser.model.language_model import LanguageModel
from noiser.types import Prompt

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Comparison:
    """The attributions of one prompt by several methods, in their order."""

    attributions: tuple[Attribution, ...]

    def __iter__(self) -> Iterator[Attribution]:
        return iter(self.attributions)

    def __str__(self) -> str:
        with random_state_kept():
            from noiser.attribution.terminal import to_text
        return to_text(self.attributions)

    def to_dataframe(self) -> DataFrame:
        """The rows of each attribution, with its method in front."""
        import pandas as pd

        frames = [att.to_dataframe() for att in self.attributions]
        for frame, heading in zip(frames, headings(self.attributions), strict=True):
            frame.insert(0, "method", heading)
        return pd.concat(frames, ignore_index=True)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        page = html.page(self.attributions)
        if path is not None:
            write_text(path, page)
        return page

    def _repr_html_(self) -> str:
        return html.fragment(self.attributions)


def compare(
    lm: LanguageModel,
    prompt: Prompt,
    methods: Sequence[str | Method] = ("joint", "noiser", "occlusion:score=logprob"),
    **question: Any,
) -> Comparison:
    """Attributes one prompt by several methods.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text or chat messages.
        methods: names, names with hyper-parameters such as "occlusion:score=logprob:baseline=mean", or methods.
        question: further arguments of `noiser.attribute`, such as `target`, `foil`, `unit` and `seed`.

    Example:
        >>> print(noiser.compare(lm, "The capital of France is", ["joint", "occlusion"]))  # doctest: +SKIP
    """
    if isinstance(methods, str) or not methods:
        raise ParameterError(f"methods is {methods!r}; expected a list of methods, such as ['joint', 'occlusion'].")
    made = [make_method(each) for each in methods]
    return Comparison(tuple(attribute(lm, prompt, method=each, **question) for each in made))
