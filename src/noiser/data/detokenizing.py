"""Tokenised English put together again."""

from __future__ import annotations

import re

__all__ = ["detokenize"]

_SYMBOLS = {
    "-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "-lcb-": "{", "-rcb-": "}", "--": "–",
}  # fmt: skip
_CLITIC = re.compile(r" ('(?:s|m|d|re|ve|ll)|n't)(?!\S)", re.IGNORECASE)
_OPENING = re.compile(r"(?<!\S)([(\[{$£€]) ")
_CLOSING = re.compile(r" ([)\]},.;:!?%])(?=[\s)\]},.;:!?\"]|$)")


def detokenize(line: str) -> str:
    r"""A line of Penn Treebank tokens as text: brackets, quotation marks, dashes, punctuation and clitics as printed.

    >>> detokenize("ann -lrb- born 4 may 1945 -rrb- is a poet 's daughter , and `` does n't '' write .")
    'ann (born 4 may 1945) is a poet\'s daughter, and "doesn\'t" write.'
    """
    text = " ".join(_SYMBOLS.get(token.lower(), token) for token in line.split())
    text = _CLITIC.sub(r"\1", text)
    text = re.sub(r"(?<!\S)`` ?", '"', text)
    text = re.sub(r" ?''(?!\S)", '"', text)
    text = _OPENING.sub(r"\1", text)
    return _CLOSING.sub(r"\1", text)
