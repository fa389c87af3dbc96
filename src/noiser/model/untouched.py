"""Calls of a tokenizer that leave its settings as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

__all__ = ["content_ids", "untouched"]


def content_ids(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text alone, without any that the tokenizer adds."""
    with untouched(tokenizer):
        return list(
            tokenizer(text, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
        )


@contextlib.contextmanager
def untouched(tokenizer: Any) -> Generator[None]:
    """Puts back the backend's truncation and padding, which a call of a fast tokenizer switches off for good."""
    if not getattr(tokenizer, "is_fast", False):
        yield
        return
    backend = tokenizer.backend_tokenizer
    truncation, padding = backend.truncation, backend.padding
    splits = backend.encode_special_tokens
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
        backend.encode_special_tokens = splits
