"""Chats with pictures as tokens: the processor writes a picture's tokens, and text is as ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from noiser.errors import PromptError, UnsupportedModelError
from noiser.text.chat import (
    check_messages,
    content_places,
    fit_messages,
    part_texts,
    render_chat,
    warn_of_dropped,
)
from noiser.text.encoding import (
    Encoding,
    check_backend,
    check_characters,
    check_token_count,
    encoding_of,
)
from noiser.text.pictures import MARK, Pictures, read_pictures
from noiser.text.segments import Offset
from noiser.text.tokens import TextTokens, tokenise


@dataclass(frozen=True)
class _Expansion:
    """The placeholder of a picture, and what the processor writes in its place."""

    rendered: Offset  # the placeholder's characters in the rendered chat
    written: str


def encode_pictures(
    processor: Any,
    tokenizer: Any,
    messages: Any,
    *,
    context_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Encoding:
    """A chat with pictures in tokens, with the characters of each token.

    The text shows one character for each picture, `MARK`. A picture's tokens all stand there, and
    are frozen.

    Raises:
        PromptError: malformed messages, pictures that cannot be read, a text that holds a
            placeholder or `MARK`.
        UnsupportedModelError: the processor does not say where its pictures stand, or gives other
            tokens than the tokenizer.
    """
    check_backend(tokenizer)
    checked = check_messages(messages, pictures=True)
    images = read_pictures(messages)
    _check_texts(checked, [MARK, getattr(processor, "image_token", None)])
    kwargs = _with_template(processor, chat_template_kwargs or {})
    fitted = fit_messages(tokenizer, checked, kwargs)
    rendered = render_chat(tokenizer, fitted, kwargs)
    check_characters(rendered, context_length, "prompt", PromptError)
    expected_ids, expansions = _processed(processor, rendered, images)

    expanded, inside = _expanded(rendered, expansions)
    tokens = tokenise(tokenizer, expanded)
    if tokens.ids != expected_ids:
        raise UnsupportedModelError(
            f"{type(processor).__name__} gives other token ids for a chat with pictures than the "
            "tokenizer gives for its text. Take another model."
        )
    check_token_count(len(tokens.ids), context_length)
    owners = [_inside(offset, inside) for offset in tokens.offsets]
    _check_texts(checked, _special_texts(tokenizer, tokens, owners))

    shown, places = _shown(rendered, expansions)
    offsets: list[Offset] = []
    for (start, end), owner in zip(tokens.offsets, owners, strict=True):
        if owner is not None:
            offsets.append((places[owner], places[owner] + 1))
        else:
            last = max(start, end - 1)
            offsets.append((_place(start, inside), _place(last, inside) + end - last))
    added = [
        is_added or owner is not None for is_added, owner in zip(tokens.added, owners, strict=True)
    ]
    contents: list[tuple[int, int, int]] = []
    placeholders = [expansion.rendered for expansion in expansions]
    for message, start, end in content_places(tokenizer, fitted, rendered, kwargs):
        first = _place(start, placeholders)
        contents.append((message, first, first + end - start))
    warn_of_dropped(fitted, rendered)
    encoding = encoding_of(tokenizer, shown, TextTokens(tokens.ids, offsets, added), contents)
    of_pictures = tuple(
        tuple(index for index, owner in enumerate(owners) if owner == number)
        for number in range(len(images))
    )
    pictures = Pictures(images=images, rendered=rendered, places=places, tokens=of_pictures)
    return replace(encoding, pictures=pictures)


def _with_template(processor: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The template's arguments, with the processor's own template if the caller names none."""
    template = getattr(processor, "chat_template", None)
    if "chat_template" in kwargs or not isinstance(template, str):
        return kwargs
    return {**kwargs, "chat_template": template}


def _check_texts(messages: Sequence[Mapping[str, Any]], placeholders: Sequence[str | None]) -> None:
    """Raises PromptError for a text in which the processor would see a picture."""
    for index, message in enumerate(messages):
        for text in part_texts(message):
            for placeholder in placeholders:
                if placeholder and placeholder in text:
                    raise PromptError(
                        f"The text of message {index} has {placeholder!r}, which stands for a "
                        "picture. Leave it out."
                    )


def _processed(
    processor: Any, rendered: str, images: Sequence[Any]
) -> tuple[list[int], list[_Expansion]]:
    """The token ids by the processor, and what it writes for each picture."""
    kind = type(processor).__name__
    try:
        out = processor(
            text=[rendered],
            images=[list(images)],
            return_text_replacement_offsets=True,
            add_special_tokens=False,
        )
    except Exception as error:  # processors raise whatever their authors chose
        raise PromptError(
            f"{kind} refuses the chat with {len(images)} pictures: {error}."
        ) from error
    replaced = out.get("text_replacement_offsets")
    found = [each for each in replaced[0] if each.get("type") == "image"] if replaced else []
    if len(found) != len(images):
        raise UnsupportedModelError(
            f"{kind} does not say where the {len(images)} pictures of the chat stand in its text: "
            f"it shows {len(found)}. Take a chat template with a placeholder for each picture, or "
            "another model."
        )
    expansions = [_Expansion(tuple(each["span"]), each["replacement"]) for each in found]
    return [int(token) for token in out["input_ids"][0]], expansions


def _expanded(rendered: str, expansions: Sequence[_Expansion]) -> tuple[str, list[Offset]]:
    """The text that is tokenised, and the characters in it that stand for each picture."""
    return _replaced(rendered, expansions, [expansion.written for expansion in expansions])


def _shown(rendered: str, expansions: Sequence[_Expansion]) -> tuple[str, tuple[int, ...]]:
    """The text with a mark for each picture, and the places of the marks."""
    text, marks = _replaced(rendered, expansions, [MARK] * len(expansions))
    return text, tuple(start for start, _ in marks)


def _replaced(
    rendered: str, expansions: Sequence[_Expansion], texts: Sequence[str]
) -> tuple[str, list[Offset]]:
    """The rendered chat with a text for each picture, and the characters of these texts."""
    whole = ""
    inside: list[Offset] = []
    position = 0
    for expansion, text in zip(expansions, texts, strict=True):
        start, end = expansion.rendered
        whole += rendered[position:start]
        inside.append((len(whole), len(whole) + len(text)))
        whole += text
        position = end
    return whole + rendered[position:], inside


def _inside(offset: Offset, inside: Sequence[Offset]) -> int | None:
    """The picture whose text holds all of a token, or None."""
    start, end = offset
    for number, (first, stop) in enumerate(inside):
        if first <= start < end <= stop:
            return number
    return None


def _place(position: int, inside: Sequence[Offset]) -> int:
    """The character of the shown text to which a character of another one belongs.

    `inside` has the characters of the other text that stand for each picture.
    """
    moved = position
    for first, stop in inside:
        if position < first:
            break
        # All characters of a picture's text are one, its mark.
        moved -= min(position, stop - 1) - first
    return moved


def _special_texts(
    tokenizer: Any, tokens: TextTokens, owners: Sequence[int | None]
) -> list[str | None]:
    """The special tokens that stand for pictures, as texts."""
    special = {
        token: added.content
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    of_pictures = {
        token for token, owner in zip(tokens.ids, owners, strict=True) if owner is not None
    }
    return [special[token] for token in sorted(of_pictures) if token in special]
