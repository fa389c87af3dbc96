"""Text to tokens to character spans, for any Hugging Face tokenizer, and back."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from noiser.errors import PromptError, TargetError
from noiser.text.chat import content_offsets, render_chat
from noiser.text.offsets import Offset, cover
from noiser.text.segments import join_overlapping
from noiser.text.tokenizing import (
    Tokens,
    content_ids,
    continuation_offsets,
    continuation_text,
    longest_token,
    special_tokens,
    tokenize,
)
from noiser.text.tokenizing import token_texts as token_texts
from noiser.types import Prompt, Span


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A prompt as the model reads it.

    Attributes:
        text: the prompt, or the rendered chat; with a continuation, followed by its text.
        token_ids: what the model reads, special tokens included.
        offsets: (start, end) of each token in `text`. The tokens of a region that are not frozen cover it without
            holes: whitespace and characters that the tokenizer drops belong to the token after them, at the end to
            the last one. Byte-level pieces of one character overlap in it. Tokens that the tokenizer adds, such as
            BOS, are empty: (i, i).
        frozen: whether each token is never perturbed, masked or scored: special tokens, added or typed (but never
            the unknown token), and chat-template text.
        regions: (start, end) of the user's own text: one for a text, one for each message's content, one for a
            continuation. A special token typed in it divides it; one without any token has no region.
        tokens: the vocabulary's name of each token, such as "<bos>" or "▁James".
        contents: (start, end) of the whole prompt, or of the content of each message that the chat template shows.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[Offset, ...]
    frozen: tuple[bool, ...]
    regions: tuple[Offset, ...]
    tokens: tuple[str, ...] = ()
    contents: tuple[Offset, ...] = ()

    @cached_property
    def region_pieces(self) -> list[list[Span]]:
        """The smallest units of each region, in order: one token, or tokens that share a character."""
        starts = [start for start, _ in self.regions]
        members: list[list[int]] = [[] for _ in starts]
        for index, (start, end) in enumerate(self.offsets):
            region = bisect_right(starts, start) - 1
            if not self.frozen[index] and region >= 0 and end <= self.regions[region][1]:
                members[region].append(index)
        pieces: list[list[Span]] = []
        for inside in members:
            offsets = [self.offsets[index] for index in inside]
            pieces.append([])
            for group in join_overlapping(offsets):
                start, end = offsets[group[0]][0], max(offsets[i][1] for i in group)
                pieces[-1].append(Span(self.text[start:end], start, end, tuple(inside[i] for i in group)))
        return pieces

    @cached_property
    def pieces(self) -> list[Span]:
        """Those of all regions."""
        return list(chain.from_iterable(self.region_pieces))


def encode(
    tokenizer: Any,
    prompt: Prompt | object,
    *,
    context_length: int | None = None,
    rendered: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Encoding:
    """A text or chat messages in tokens, with the characters of each token.

    Args:
        tokenizer: a Hugging Face tokenizer, fast or not; its settings are left as they are.
        prompt: a text, tokenised with the tokenizer's own special tokens but those that end a text, such as "</s>",
            as the model is to go on from there; or chat messages, rendered with its template and tokenised without
            further special tokens.
        context_length: the most tokens that the model can read. A text of more characters than so many of the
            vocabulary's longest tokens have is refused before it is tokenised.
        rendered: what chat messages were rendered as before, if they were; a template may print the date.
        chat_template_kwargs: further arguments of the chat template.

    Raises:
        PromptError: empty, only whitespace or special tokens, too long, not valid Unicode, or malformed messages.
    """
    if isinstance(prompt, str):
        _check_text(tokenizer, prompt, context_length)
        return _encode_text(tokenizer, prompt, [(0, len(prompt))], context_length, add_special_tokens=True)
    messages: Any = prompt
    arguments = chat_template_kwargs or {}
    text = render_chat(tokenizer, messages, arguments) if rendered is None else rendered
    _check_text(tokenizer, text, context_length)
    contents = content_offsets(tokenizer, messages, text, arguments)
    return _encode_text(tokenizer, text, contents, context_length, add_special_tokens=False)


def encode_target(
    tokenizer: Any, encoding: Encoding, text: str, *, context_length: int | None = None
) -> tuple[int, ...]:
    """The token ids of a text as it follows the prompt.

    Prompt and text are tokenised together; where that changes the prompt's own tokens, the text is tokenised after
    another character, or alone. The text is taken literally: no space is added where the tokenizer can do without.

    Args:
        tokenizer: the tokenizer that made `encoding`.
        encoding: what comes before.
        text: what follows, such as " basketball".
        context_length: the most tokens that the model can read; see `encode`.

    Raises:
        TargetError: the text is not valid Unicode, too long, or has no token.
    """
    if _surrogate(text) is not None:
        raise TargetError(f"The target {text[:60]!r} holds half of a surrogate pair; expected valid Unicode.")
    if excess := _excess(tokenizer, text, context_length):
        raise TargetError(f"The target has {excess} Shorten the target.")
    before = [i for i, (start, end) in zip(encoding.token_ids, encoding.offsets, strict=True) if start < end]
    readings: list[tuple[int, ...]] = []
    for anchor in (encoding.text, "\n", ".", "a", ""):
        kept = before if anchor == encoding.text else content_ids(tokenizer, anchor)
        ids = content_ids(tokenizer, anchor + text) if text else []
        if ids[: len(kept)] == kept and len(ids) > len(kept):
            readings.append(tuple(ids[len(kept) :]))
            if continuation_text(tokenizer, encoding.token_ids, readings[-1]) == text:
                return readings[-1]
    if not readings:
        raise TargetError(f"The target {text[:60]!r} has no token; expected a text that the tokenizer can read.")
    return readings[0]


def extend(tokenizer: Any, encoding: Encoding, token_ids: Sequence[int]) -> Encoding:
    """The encoding with the tokens of a continuation appended.

    Args:
        tokenizer: the tokenizer that made `encoding`.
        encoding: what comes before.
        token_ids: the continuation's tokens. Text that they do not complete, such as half an emoji, reads U+FFFD.

    Returns:
        An encoding with one more region: what the tokens decode to.
    """
    if not token_ids:
        return encoding
    text, offsets = continuation_offsets(tokenizer, encoding.token_ids, token_ids)
    shift = len(encoding.text)
    offsets = [(start + shift, end + shift) for start, end in offsets]
    special = special_tokens(tokenizer, token_ids, [text[start - shift : end - shift] for start, end in offsets])
    regions, offsets, frozen = cover(offsets, special, [(shift, shift + len(text))])
    return Encoding(
        text=encoding.text + text,
        token_ids=(*encoding.token_ids, *token_ids),
        offsets=(*encoding.offsets, *offsets),
        frozen=(*encoding.frozen, *frozen),
        regions=(*encoding.regions, *regions),
        tokens=(*encoding.tokens, *_names(tokenizer, token_ids)),
        contents=encoding.contents,
    )


def _encode_text(
    tokenizer: Any, text: str, contents: Sequence[Offset], context_length: int | None, *, add_special_tokens: bool
) -> Encoding:
    tokens = tokenize(tokenizer, text, add_special_tokens=add_special_tokens)
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    while any(tokens.added[-1:]) and tokens.token_ids[-1] in ends:
        tokens = Tokens(tokens.token_ids[:-1], tokens.offsets[:-1], tokens.added[:-1])
    if context_length is not None and len(tokens.token_ids) > context_length:
        count = len(tokens.token_ids)
        raise PromptError(f"The prompt has {count} tokens; the model can read {context_length}. Shorten the prompt.")
    special = special_tokens(tokenizer, tokens.token_ids, [text[start:end] for start, end in tokens.offsets])
    special = [typed or added for typed, added in zip(special, tokens.added, strict=True)]
    regions, offsets, frozen = cover(tokens.offsets, special, contents)
    if not any(text[start:end].strip() for start, end in regions):
        raise PromptError(
            f"The prompt {text[:60]!r} holds only special tokens or characters that the tokenizer drops; "
            "expected text. Add other text."
        )
    return Encoding(
        text=text,
        token_ids=tuple(tokens.token_ids),
        offsets=tuple(offsets),
        frozen=tuple(frozen),
        regions=tuple(regions),
        tokens=tuple(_names(tokenizer, tokens.token_ids)),
        contents=tuple(contents),
    )


def _names(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    return [str(name) for name in tokenizer.convert_ids_to_tokens(list(token_ids))]


def _check_text(tokenizer: Any, text: str, context_length: int | None) -> None:
    if not text.strip():
        raise PromptError(f"The prompt is {text[:60]!r}; expected text that is more than whitespace. Write something.")
    if excess := _excess(tokenizer, text, context_length):
        raise PromptError(f"The prompt has {excess} Shorten the prompt.")
    position = _surrogate(text)
    if position is not None:
        raise PromptError(
            f"The prompt has half of a surrogate pair, {text[position]!r}, at character {position}; expected valid "
            "Unicode. Decode the text with the right encoding, or remove the character."
        )


def _excess(tokenizer: Any, text: str, context_length: int | None) -> str | None:
    """What to say of a text that cannot fit into a context, whatever its tokens are; None if it may fit."""
    if context_length is None or len(text) <= context_length:
        return None
    longest = longest_token(tokenizer)
    if len(text) <= context_length * longest:
        return None
    return (
        f"{len(text):,} characters; expected at most {context_length * longest:,}: the model can read "
        f"{context_length:,} tokens of at most {longest:,} characters."
    )


def _surrogate(text: str) -> int | None:
    match = re.search("[\ud800-\udfff]", text)
    return match.start() if match else None
