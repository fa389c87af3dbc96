"""A question and its sources as the prompt that a model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from noiser.model.language_model import LanguageModel
from noiser.text import TEMPLATE, Encoding, begin_of_sources, mentions_a_source, place_sources
from noiser.text.pictures import has_pictures
from noiser.types import Prompt


class Placed(NamedTuple):
    """A prompt with its sources in it.

    Attributes:
        request: the question without the sources, in the form that the model is asked in.
        prompt: the question with the sources in it.
        encoding: of the prompt.
        begin: the character of the encoded text after which the sources stand.
    """

    request: Prompt
    prompt: Prompt
    encoding: Encoding
    begin: int


def placed(
    lm: LanguageModel,
    question: Prompt,
    sources: Sequence[Any],
    template: str | None,
    *,
    pictures: bool = False,
) -> Placed:
    """The question with the sources placed by the template; as it is where that is None.

    A text becomes a user's message where the model chats. `pictures` says that the caller knows
    what to do with those of a chat.
    """
    options: dict[str, Any] = {"documents": True}
    if pictures and has_pictures(question) and not lm.is_text_only:
        options["pictures"] = True
    request = question
    # A text that is the whole prompt is read as it is, except where messages alone are read.
    is_message = lm.is_text_only or (lm.chats and template is not None)
    if is_message and isinstance(question, str):
        request = [{"role": "user", "content": question}]
    if template is None:
        return Placed(request, request, lm.encode(request, **options), 0)
    prompt = place_sources(request, sources, template)
    encoding = lm.encode(prompt, **options)
    return Placed(request, prompt, encoding, begin_of_sources(request, template, encoding))


def placed_unless_there(lm: LanguageModel, question: Prompt, sources: Sequence[Any]) -> Placed:
    """The question as it is where it has a source in it; else with all of them, as `cite` asks."""
    as_it_is = placed(lm, question, sources, None, pictures=True)
    if mentions_a_source(as_it_is.encoding.text, sources):
        return as_it_is
    return placed(lm, question, sources, TEMPLATE, pictures=True)
