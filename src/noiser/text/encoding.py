"""Text to tokens to character spans, for any Hugging Face tokenizer with a Rust backend, and back."""

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
from noiser.text.segments import Offset
from noiser.text.tokens import Tokens, continuation, cover, tokenise
from noiser.types import Prompt, Span

_CHARACTERS = 256  # per token: more than the tokens of any text have on average
_LOAD = "Load the model's tokenizer.json with transformers.PreTrainedTokenizerFast."
_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A prompt as the model reads it.

    Attributes:
        text: the prompt, or the rendered chat; with a continuation, followed by its text.
        token_ids: what the model reads, special tokens included.
        offsets: (start, end) of each token in `text`. Tokens of a region cover it without holes; added ones are empty.
        frozen: whether a token is never changed or scored: special ones but the unknown one, and a template's text.
        regions: (start, end) of the user's own text, of each content, and of a continuation, cut at special tokens.
        tokens: the vocabulary's name of each token, such as "<bos>" or "▁James".
        contents: (message, start, end) of the whole prompt, or of each content as the chat template shows it.
    """

    text: str
    token_ids: tuple[int, ...]
    offsets: tuple[Offset, ...]
    frozen: tuple[bool, ...]
    regions: tuple[Offset, ...]
    tokens: tuple[str, ...]
    contents: tuple[tuple[int, int, int], ...] = ()

    @cached_property
    def pieces(self) -> list[list[Span]]:
        """The smallest units of each region, in order: one token, or tokens that share a character."""
        starts, pieces, last = [start for start, _ in self.regions], list[list[Span]](), -1
        for index, (start, end) in enumerate(self.offsets):
            if not self.frozen[index]:
                region, indices = bisect_right(starts, start), (index,)
                pieces += [] if region == last else [[]]
                if pieces[-1] and start < pieces[-1][-1].end:
                    _, start, stop, before = pieces[-1].pop()
                    end, indices = max(stop, end), (*before, index)
                pieces[-1].append(Span(self.text[start:end], start, end, indices))
                last = region
        return pieces


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

    A text gets the tokenizer's own special tokens, but none that ends a text and no second BOS. `rendered` is the chat
    as it was rendered before: a template may print the date. With `documents`, those that the template is given are
    contents, too, and not frozen.

    Raises:
        PromptError: empty, only whitespace or special tokens, too long, not valid Unicode, or malformed messages.
        UnsupportedModelError: a tokenizer without a Rust backend, or that reads a chat as other tokens than its text.
    """
    if not getattr(tokenizer, "is_fast", False) or not hasattr(tokenizer, "backend_tokenizer"):
        text = f"{type(tokenizer).__name__} does not say where its tokens stand in a text; expected a Rust backend."
        raise UnsupportedModelError(f"{text} {_LOAD}")
    text, messages, kwargs = as_prompt(tokenizer, prompt), None, chat_template_kwargs or {}
    if not isinstance(text, str):
        messages = fit_messages(tokenizer, check_messages(text), kwargs)
        text = render_chat(tokenizer, messages, kwargs) if rendered is None else rendered
    if context_length is not None and len(text) > context_length * _CHARACTERS:
        raise PromptError(
            f"The prompt has {len(text):,} characters; the model can read {context_length:,} tokens."
        )
    ids, offsets, added = tokenise(tokenizer, text, add_special_tokens=messages is None)
    first, last = 0, len(ids)
    while (
        last
        and added[last - 1]
        and ids[last - 1] in (tokenizer.eos_token_id, tokenizer.sep_token_id)
    ):
        last -= 1  # the text is to go on
    if added[:2] == [True, False] and ids[0] == ids[1] == tokenizer.bos_token_id:
        first = 1  # it stands in the text, as in a chat that the caller has rendered
    tokens = Tokens(ids[first:last], offsets[first:last], added[first:last])
    if context_length is not None and (count := len(tokens.ids)) > context_length:
        raise PromptError(
            f"The prompt has {count} tokens; the model can read {context_length}. Shorten the prompt."
        )
    if (
        messages
        and rendered is None
        and list(render_chat(tokenizer, messages, kwargs, tokenize=True)) != tokens.ids
    ):
        kind = type(tokenizer).__name__
        raise UnsupportedModelError(
            f"{kind} gives other token ids by apply_chat_template than for its text. {_LOAD}"
        )
    contents = (
        content_places(tokenizer, messages, text, kwargs, documents=documents)
        if messages
        else [(0, 0, len(text))]
    )
    if messages and rendered is None:
        warn_of_dropped(messages, text)
    encoding = _encoding(tokenizer, text, tokens, contents)
    if not any(text[start:end].strip() for start, end in encoding.regions):
        raise PromptError(
            f"The prompt {text[:60]!r} holds only special tokens, whitespace or characters that the tokenizer drops; "
            "expected text that is more than whitespace."
        )
    return encoding


def as_prompt(tokenizer: Any, prompt: object) -> Any:
    """The text or messages of a prompt that may be token ids, a tokenizer's output or {"messages": [...]}."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("messages", prompt.get("input_ids", prompt))
    ids: Any = plain(prompt)
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        (ids,) = ids
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        return prompt
    if all(0 <= token < len(tokenizer) for token in ids):
        for first in range(
            ids[0] == tokenizer.bos_token_id, -1, -1
        ):  # better without a BOS that is added anyway
            text = tokenizer.decode(ids[first:], clean_up_tokenization_spaces=False)
            if list(encode(tokenizer, text).token_ids) == ids:
                return text
    raise PromptError(
        f"The prompt is token ids, {ids!r:.60}, whose text has other ids; expected text. Pass the text."
    )


def _encoding(
    tokenizer: Any, text: str, tokens: Tokens, contents: Sequence[tuple[int, int, int]]
) -> Encoding:
    """The encoding of a text whose special tokens are those that were added, and those typed as they are named."""
    names = {
        index: token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special
    }
    unknown = getattr(tokenizer, "unk_token_id", None)
    if all(
        getattr(tokenizer, role, None) != unknown for role in _ROLES
    ):  # in GPT-2 it has another role
        names.pop(unknown, None)
    rows = zip(*tokens, strict=True)
    special = [
        added or names.get(index) == text[start:end].strip() for index, (start, end), added in rows
    ]
    regions, offsets, frozen = cover(
        text, tokens.offsets, special, [(start, end) for _, start, end in contents]
    )
    return Encoding(
        text=text,
        token_ids=tuple(tokens.ids),
        offsets=tuple(offsets),
        frozen=tuple(frozen),
        regions=tuple(regions),
        tokens=tuple(map(str, tokenizer.convert_ids_to_tokens(tokens.ids))),
        contents=tuple(contents),
    )


def encode_target(tokenizer: Any, encoding: Encoding, text: str) -> tuple[int, ...]:
    """The ids of a text after the prompt, literally; tokenised apart where the prompt's own tokens would change."""
    before = [
        i
        for i, (start, end) in zip(encoding.token_ids, encoding.offsets, strict=True)
        if start < end
    ]
    readings: list[tuple[int, ...]] = []
    for anchor in (encoding.text, "\n", ".", "a", "") if text else ():
        kept = before if anchor == encoding.text else tokenise(tokenizer, anchor).ids
        ids = tokenise(tokenizer, anchor + text, error=TargetError).ids
        if ids[: len(kept)] == kept and len(ids) > len(kept):
            readings.append(tuple(ids[len(kept) :]))
            if continuation(tokenizer, encoding.token_ids, readings[-1])[0] == text:
                return readings[-1]
    if not readings:
        raise TargetError(
            f"The target {text[:60]!r} has no token; expected a text that the tokenizer can read."
        )
    return readings[0]


def extend(tokenizer: Any, encoding: Encoding, token_ids: Sequence[int]) -> Encoding:
    """The encoding with a continuation's tokens, and its text as one more region; half a character reads U+FFFD."""
    if not token_ids:
        return encoding
    text, offsets = continuation(tokenizer, encoding.token_ids, token_ids)
    added = _encoding(
        tokenizer, text, Tokens([*token_ids], offsets, [False] * len(offsets)), [(0, 0, len(text))]
    )
    shift = len(encoding.text)
    return replace(
        encoding,
        text=encoding.text + text,
        token_ids=encoding.token_ids + added.token_ids,
        offsets=(
            *encoding.offsets,
            *((start + shift, end + shift) for start, end in added.offsets),
        ),
        frozen=encoding.frozen + added.frozen,
        regions=(
            *encoding.regions,
            *((start + shift, end + shift) for start, end in added.regions),
        ),
        tokens=encoding.tokens + added.tokens,
    )
