"""Text to tokens to character spans, and back, for Hugging Face tokenizers with a Rust backend."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from noiser.checks import plain
from noiser.errors import PromptError, TargetError, UnsupportedModelError
from noiser.text.chat import (
    check_messages,
    content_places,
    fit_messages,
    render_chat,
    warn_of_dropped,
)
from noiser.text.pictures import Pictures
from noiser.text.segments import Offset
from noiser.text.tokens import TextTokens, assign_tokens, continuation, tokenise
from noiser.types import Prompt, Span

# Characters per token: more than the tokens of any text have on average.
_CHARACTERS = 256
_LOAD = "Load the model's tokenizer.json with transformers.PreTrainedTokenizerFast."
_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A prompt as the model reads it.

    Attributes:
        text: the prompt, or the rendered chat; with a continuation, followed by its text.
        token_ids: what the model reads, special tokens included.
        offsets: (start, end) of each token in `text`. Tokens of a region cover it without holes;
            added ones are empty.
        frozen: whether a token is never changed or scored: special ones except the unknown one, and
            a template's text.
        regions: (start, end) of the user's own text, of each content, and of a continuation, cut at
            special tokens.
        tokens: the vocabulary's name of each token, such as "<bos>" or "▁James".
        contents: (message, start, end) of the prompt, or of each content as the chat template shows
            it.
        pictures: those of a chat, each a character of `text`; or None.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[Offset, ...]
    frozen: tuple[bool, ...]
    regions: tuple[Offset, ...]
    tokens: tuple[str, ...]
    contents: tuple[tuple[int, int, int], ...] = ()
    pictures: Pictures | None = None

    @cached_property
    def pieces(self) -> list[list[Span]]:
        """The smallest units of each region: one token, or tokens that share a character."""
        region_starts = [start for start, _ in self.regions]
        by_region: list[list[Span]] = []
        previous_region = -1
        for index, (start, end) in enumerate(self.offsets):
            if self.frozen[index]:
                continue
            region = bisect_right(region_starts, start)
            if region != previous_region:
                by_region.append([])
                previous_region = region
            pieces = by_region[-1]
            token_indices = (index,)
            if pieces and start < pieces[-1].end:  # shares a character with the piece before it
                shared = pieces.pop()
                start = shared.start
                end = max(shared.end, end)
                token_indices = (*shared.token_indices, index)
            pieces.append(Span(self.text[start:end], start, end, token_indices))
        return by_region


# ---- a prompt as an encoding --------------------------------------------------------------------


def encode(
    tokenizer: Any,
    prompt: Prompt | object,
    *,
    context_length: int | None = None,
    rendered: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    documents: bool = False,
) -> Encoding:
    """A text or chat messages in tokens, with the characters of each token.

    A text gets the tokenizer's own special tokens, except one that ends a text, and no second BOS.
    `rendered` is the chat as it was rendered before: a template may print the date. With
    `documents`, the documents among the template's arguments are contents, too, and not frozen.

    Raises:
        PromptError: empty, only whitespace or special tokens, too long, not valid Unicode, or
            malformed messages.
        UnsupportedModelError: a tokenizer without a Rust backend, or that reads a chat as other
            tokens than its text.
    """
    check_backend(tokenizer)
    kwargs = chat_template_kwargs or {}
    text = as_prompt(tokenizer, prompt)
    messages = None
    if not isinstance(text, str):
        messages = fit_messages(tokenizer, check_messages(text), kwargs)
        text = render_chat(tokenizer, messages, kwargs) if rendered is None else rendered
    check_characters(text, context_length, "prompt", PromptError)
    tokens = tokenise(tokenizer, text, add_special_tokens=messages is None)
    tokens = _without_extra_specials(tokenizer, tokens)
    check_token_count(len(tokens.ids), context_length)
    if messages is not None and rendered is None:
        _check_chat_tokens(tokenizer, messages, kwargs, tokens)
    contents = [(0, 0, len(text))]
    if messages is not None:
        contents = content_places(tokenizer, messages, text, kwargs, documents=documents)
        if rendered is None:
            warn_of_dropped(messages, text)
    encoding = encoding_of(tokenizer, text, tokens, contents)
    if not any(text[start:end].strip() for start, end in encoding.regions):
        raise PromptError(
            f"The prompt {text[:60]!r} holds only special tokens, whitespace or characters that "
            "the tokenizer drops; expected text that is more than whitespace."
        )
    return encoding


def check_characters(
    text: str, context_length: int | None, role: str, error: type[PromptError | TargetError]
) -> None:
    """Raises an error for a text that is too long whatever its tokens are."""
    if context_length is not None and len(text) > context_length * _CHARACTERS:
        raise error(
            f"The {role} has {len(text):,} characters; the model can read {context_length:,} "
            "tokens."
        )


def check_token_count(count: int, context_length: int | None) -> None:
    """Raises PromptError for a prompt of more tokens than the model can read."""
    if context_length is not None and count > context_length:
        raise PromptError(
            f"The prompt has {count} tokens; the model can read {context_length}. Shorten the "
            "prompt."
        )


def check_backend(tokenizer: Any) -> None:
    """Raises UnsupportedModelError for a tokenizer without a Rust backend."""
    is_fast = getattr(tokenizer, "is_fast", False) and hasattr(tokenizer, "backend_tokenizer")
    if not is_fast:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} does not say where its tokens stand in a text; "
            f"expected a Rust backend. {_LOAD}"
        )


def _without_extra_specials(tokenizer: Any, tokens: TextTokens) -> TextTokens:
    """The tokens without added ones that end a text, and without a second BOS."""
    ids, offsets, added = tokens
    ends = (tokenizer.eos_token_id, tokenizer.sep_token_id)
    last = len(ids)
    while last > 0 and added[last - 1] and ids[last - 1] in ends:
        last -= 1  # the model is to continue the text
    first = 0
    # A chat that the caller has rendered begins with a BOS.
    if added[:2] == [True, False] and ids[0] == ids[1] == tokenizer.bos_token_id:
        first = 1
    return TextTokens(ids[first:last], offsets[first:last], added[first:last])


def _check_chat_tokens(
    tokenizer: Any, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], tokens: TextTokens
) -> None:
    """Raises UnsupportedModelError if the tokenizer reads a chat as other tokens than its text."""
    if list(render_chat(tokenizer, messages, kwargs, tokenize=True)) != tokens.ids:
        kind = type(tokenizer).__name__
        raise UnsupportedModelError(
            f"{kind} gives other token ids by apply_chat_template than for its text. {_LOAD}"
        )


def encoding_of(
    tokenizer: Any, text: str, tokens: TextTokens, contents: Sequence[tuple[int, int, int]]
) -> Encoding:
    """The encoding of a text.

    Special are the added tokens, and tokens whose characters in the text are a special name.
    """
    names = _special_names(tokenizer)
    special: list[bool] = []
    for token, (start, end), is_added in zip(*tokens, strict=True):
        special.append(is_added or names.get(token) == text[start:end].strip())
    spans = [(start, end) for _, start, end in contents]
    regions, offsets, frozen = assign_tokens(text, tokens.offsets, special, spans)
    return Encoding(
        text=text,
        token_ids=tuple(tokens.ids),
        offsets=tuple(offsets),
        frozen=tuple(frozen),
        regions=tuple(regions),
        tokens=tuple(map(str, tokenizer.convert_ids_to_tokens(tokens.ids))),
        contents=tuple(contents),
    )


def _special_names(tokenizer: Any) -> dict[Any, str]:
    """From the id of each special token to its text, without the unknown token."""
    names: dict[Any, str] = {}
    for index, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            names[index] = token.content
    unknown = getattr(tokenizer, "unk_token_id", None)
    # In GPT-2 the unknown token is also BOS and EOS, and stays special.
    if all(getattr(tokenizer, role, None) != unknown for role in _ROLES):
        names.pop(unknown, None)
    return names


def as_prompt(tokenizer: Any, prompt: object) -> Any:
    """The text or messages of a prompt.

    The prompt may be token ids, a tokenizer's output or {"messages": [...]}.
    """
    if isinstance(prompt, Mapping):
        prompt = prompt.get("messages", prompt.get("input_ids", prompt))
    ids: Any = plain(prompt)
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]  # a batch of one
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        return prompt
    text = _text_of_ids(tokenizer, ids)
    if text is None:
        raise PromptError(
            f"The prompt is token ids, {ids!r:.60}, whose text has other ids; expected text. "
            "Pass the text."
        )
    return text


def _text_of_ids(tokenizer: Any, ids: list[int]) -> str | None:
    """The text that has the given token ids, or None."""
    if not all(0 <= token < len(tokenizer) for token in ids):
        return None
    candidates = [ids]
    if ids[0] == tokenizer.bos_token_id:
        candidates.insert(0, ids[1:])  # `encode` adds the BOS again
    for candidate in candidates:
        text = tokenizer.decode(candidate, clean_up_tokenization_spaces=False)
        if list(encode(tokenizer, text).token_ids) == ids:
            return text
    return None


# ---- what follows a prompt ----------------------------------------------------------------------


def encode_target(
    tokenizer: Any,
    encoding: Encoding,
    text: str,
    *,
    role: str = "target",
    context_length: int | None = None,
) -> tuple[int, ...]:
    """The token ids of a text that follows the prompt, literally.

    The text is tokenised together with the prompt. Where that changes the prompt's own tokens, it
    is tokenised after another text, and the first reading that decodes to the text is taken.

    Raises:
        TargetError: the text is too long for the model, has no token, or is not valid Unicode.
    """
    check_characters(text, context_length, role, TargetError)
    readings: list[tuple[int, ...]] = []
    anchors = (encoding.text, "\n", ".", "a", "") if text else ()
    for anchor in anchors:
        reading = _ids_after(tokenizer, encoding, anchor, text)
        if reading is None:
            continue
        # Before the tokens are aligned with the text, which takes far longer.
        if context_length is not None and len(reading) > context_length:
            raise TargetError(
                f"The {role} has {len(reading)} tokens; the model can read {context_length}. "
                f"Shorten the {role}."
            )
        if continuation(tokenizer, encoding.token_ids, reading)[0] == text:
            return reading
        readings.append(reading)
    if not readings:
        raise TargetError(
            f"The {role} {text[:60]!r} has no token; expected a text that the tokenizer can read."
        )
    return readings[0]


def _ids_after(
    tokenizer: Any, encoding: Encoding, anchor: str, text: str
) -> tuple[int, ...] | None:
    """The token ids of a text after an anchor, or None if it changes the anchor's tokens."""
    if anchor == encoding.text:
        before: list[int] = []
        # Placeholders of pictures are not in the text: what stands after the last of them is.
        begin = max(encoding.pictures.places) + 1 if encoding.pictures else 0
        anchor = anchor[begin:]
        for token, (start, end) in zip(encoding.token_ids, encoding.offsets, strict=True):
            if begin <= start < end:  # not an added special token
                before.append(token)
    else:
        before = tokenise(tokenizer, anchor).ids
    ids = tokenise(tokenizer, anchor + text, error=TargetError).ids
    if ids[: len(before)] != before or len(ids) == len(before):
        return None
    return tuple(ids[len(before) :])


def extend(tokenizer: Any, encoding: Encoding, token_ids: Sequence[int]) -> Encoding:
    """The encoding with a continuation's tokens, and its text as one more region.

    Bytes that complete no character read U+FFFD.
    """
    if not token_ids:
        return encoding
    text, offsets = continuation(tokenizer, encoding.token_ids, token_ids)
    tokens = TextTokens(ids=[*token_ids], offsets=offsets, added=[False] * len(offsets))
    added = encoding_of(tokenizer, text, tokens, [(0, 0, len(text))])
    shift = len(encoding.text)
    new_offsets = [(start + shift, end + shift) for start, end in added.offsets]
    new_regions = [(start + shift, end + shift) for start, end in added.regions]
    return replace(
        encoding,
        text=encoding.text + text,
        token_ids=encoding.token_ids + added.token_ids,
        offsets=(*encoding.offsets, *new_offsets),
        frozen=encoding.frozen + added.frozen,
        regions=(*encoding.regions, *new_regions),
        tokens=encoding.tokens + added.tokens,
    )
