"""`noiser.compare`: one prompt, several methods side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from noiser.attribution import Attribution, markdown, markup
from noiser.attribution.display import headings, visible
from noiser.attribution.saved import SavedResult
from noiser.attribution.store import restored
from noiser.checks import plain, random_state_kept
from noiser.errors import NoiserError, ParameterError
from noiser.explain._attribute import attribute
from noiser.explain.many import is_many
from noiser.files import write_if
from noiser.methods import Method, describe, make_method
from noiser.model.language_model import LanguageModel
from noiser.progress import progress_of
from noiser.types import Progress, Prompt

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Comparison(SavedResult):
    """The attributions of one prompt by the methods that can answer, in their order; of others name
    and reason.
    """

    attributions: Annotated[
        tuple[Annotated[Attribution, BeforeValidator(Attribution.from_dict)], ...],
        Field(min_length=1),
    ]
    failures: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Attribution]:
        return iter(self.attributions)

    def __str__(self) -> str:
        return self._text(plain=False)

    def to_text(self) -> str:
        """The scores of each method, without colours, and why other methods cannot answer."""
        return self._text(plain=True)

    def _text(self, *, plain: bool) -> str:
        with random_state_kept():
            from noiser.attribution.terminal import to_text
        scores = to_text(self.attributions, plain=plain)
        return "\n".join([scores, *map(visible, self.failures)])

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file: that of each attribution, and the failures."""
        attributions = [att.to_dict() for att in self.attributions]
        head = {"format": "noiser.comparison", "schema": 1}
        return {**head, "attributions": attributions, "failures": list(self.failures)}

    @classmethod
    def from_dict(cls, data: Any) -> Comparison:
        """The comparison whose `to_dict` gave the data. Raises StoredFileError where `load`
        does.
        """
        return restored(cls, Literal["noiser.comparison"], data)

    def to_dataframe(self) -> DataFrame:
        """The rows of each attribution, with its method in front."""
        import pandas as pd

        frames = [att.to_dataframe() for att in self.attributions]
        for frame, heading in zip(frames, headings(self.attributions), strict=True):
            frame.insert(0, "method", heading)
        return pd.concat(frames, ignore_index=True)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        return write_if(markup.page(self.attributions), path)

    def to_markdown(self) -> str:
        """The Markdown of each attribution, one after the other, and of the methods that cannot
        answer the reason.
        """
        parts = [att.to_markdown() for att in self.attributions]
        for text in self.failures:
            parts.append(f"{markdown.escaped_line(text)}\n")
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        problems = "".join(
            f'<p class="error" role=alert>{escape(text)}</p>' for text in self.failures
        )
        return problems + markup.fragment(self.attributions)


def compare(
    lm: LanguageModel,
    prompt: Prompt,
    methods: Sequence[str | Method] = ("joint", "noiser", "occlusion:objective=logprob"),
    progress: Progress | bool | None = None,
    **question: Any,
) -> Comparison:
    """The attributions of one prompt by several methods; one that cannot answer leaves the others'
    answers.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text or chat messages.
        methods: names, names with hyper-parameters such as
            "occlusion:objective=logprob:removal=mean", or methods.
        progress: as for `noiser.attribute`; done and expected count methods.
        question: further arguments of `noiser.attribute`, such as `target`, `foil`, `unit` and
            `seed`.

    Raises:
        NoiserError: a name or the question is wrong, or no method can answer.

    Example:
        >>> methods = ["joint", "occlusion"]
        >>> print(noiser.compare(lm, "The capital of France is", methods))  # doctest: +SKIP
    """
    if isinstance(methods, str) or not methods or is_many(plain(prompt)):
        got = f"prompt is {prompt!r:.60} and methods is {methods!r:.60}"
        raise ParameterError(
            f"{got}; expected one prompt and a list of methods, such as ['joint', 'occlusion']."
        )
    attributions = list[Attribution]()
    failures = list[str]()
    with progress_of(progress, "Comparing") as told:
        for index, method in enumerate([make_method(each) for each in methods]):

            def tell(done: float, expected: float, before: int = index) -> None:
                if told:
                    told(before + done / max(expected, 1), len(methods))

            try:
                attributions.append(attribute(lm, prompt, method=method, progress=tell, **question))
            except NoiserError as error:
                given = methods[index]
                failures.append(
                    f"{given if isinstance(given, str) else describe(method)[0]}: {error}"
                )
                if len(failures) == len(methods):
                    raise
    return Comparison(tuple(attributions), tuple(failures))
