"""Answers of servers that complete text: one reader for all forms of log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from pydantic import BaseModel, Field
from torch import Tensor


class _Token(BaseModel):
    """A token as llama.cpp names it."""

    token: str
    logprob: float
    id: int | None = None


class _ScoredToken(_Token):
    top_logprobs: list[_Token] = []


class _ScoredTokens(BaseModel):
    """Log-probabilities token by token, as llama.cpp's server sends them."""

    content: list[_ScoredToken]


class _Columns(BaseModel):
    """Log-probabilities in columns, as OpenAI's completions have them."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class _Logprob(BaseModel):
    logprob: float


class _Choice(BaseModel):
    logprobs: _ScoredTokens | _Columns | None = None
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None  # vLLM's own


class Completion(BaseModel):
    """The parts of a completion that are read."""

    choices: list[_Choice] = Field(min_length=1)


class ScoredTokens(NamedTuple):
    """What is known about the next token after a sequence.

    Attributes:
        known: log-probabilities of some tokens, by their ids.
        bound: no other token has a larger log-probability.
    """

    known: dict[int, float]
    bound: float


class Slot(NamedTuple):
    """One place of a text: the token that stands there, and what the server sent about it.

    Attributes:
        text: the text of the token.
        token: its id; None where its text is not one token of the tokenizer.
        logprob: its log-probability; None for the first token of a text.
        top: log-probabilities of the most probable tokens there, by their ids.
        sent: the log-probabilities of `top`, also those of tokens whose ids are not known.
    """

    text: str
    token: int | None
    logprob: float | None
    top: dict[int, float]
    sent: list[float]

    def row(self) -> ScoredTokens:
        """The log-probabilities of the token itself and of the most probable ones."""
        known = dict(self.top)
        if self.token is not None and self.logprob is not None:
            known[self.token] = self.logprob
        unnamed = [value for value in self.sent if value not in known.values()]
        return ScoredTokens(known, max(unnamed, default=min(self.sent, default=0.0)))


class Reader:
    """Reads completions with the tokenizer of their model.

    Attributes:
        size: the number of tokens; ids from there on are dropped.
        names: texts that a server sent with ids, by these ids.
    """

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.names: dict[int, str] = {}
        self._ids: dict[str, int | None] = {}

    def places(self, answer: object) -> list[Slot]:
        """The scored tokens of a completion. Raises ValueError where it has none."""
        logprobs = Completion.model_validate(answer).choices[0].logprobs
        if logprobs is None:
            raise ValueError("logprobs is null")
        if isinstance(logprobs, _ScoredTokens):
            found = [self._place(each, each.top_logprobs) for each in logprobs.content]
        else:
            columns = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)
            found = [self._column(*each) for each in zip(*columns, strict=True)]
        if not found:
            raise ValueError("logprobs is empty")
        return found

    def prompt_rows(self, answer: object) -> list[dict[int, float]]:
        """The log-probabilities after every token of a prompt but the last one, as vLLM sends them.

        Raises ValueError where there are none.
        """
        rows = Completion.model_validate(answer).choices[0].prompt_logprobs
        if not rows:
            raise ValueError("prompt_logprobs is missing")
        return [{token: each.logprob for token, each in (row or {}).items()} for row in rows[1:]]

    def id_of(self, name: str) -> int | None:
        """The token of a name, its text or "token_id:5"; None where the text is not one token."""
        if name not in self._ids:
            if name.startswith("token_id:"):
                self._ids[name] = int(name.removeprefix("token_id:"))
            else:
                self._ids[name] = self._id_of_text(name)
        return self._ids[name]

    def _id_of_text(self, text: str) -> int | None:
        if "\ufffd" in text:  # bytes that are no character
            return None
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        read = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return ids[0] if len(ids) == 1 and read == text else None

    def _place(self, own: _Token, top: Sequence[_Token]) -> Slot:
        known: dict[int, float] = {}
        for each in top:
            token = self._token(each)
            if token is not None and token < self.size:
                known[token] = each.logprob
        sent = [each.logprob for each in top]
        return Slot(own.token, self._token(own), own.logprob, known, sent)

    def _token(self, named: _Token) -> int | None:
        if named.id is None:
            return self.id_of(named.token)
        self.names[named.id] = named.token
        return named.id

    def _column(self, name: str, logprob: float | None, top: Mapping[str, float] | None) -> Slot:
        tokens = [_Token(token=name, logprob=value) for name, value in (top or {}).items()]
        place = self._place(_Token(token=name, logprob=logprob or 0.0), tokens)
        return place._replace(logprob=logprob)


def is_distribution(values: Sequence[float], size: int, most: int) -> bool:
    """Whether values can be the `most` largest natural log-probabilities of `size` tokens.

    A smaller one may be among them.
    Fewer come where tokens have the same text, by which the server names them; any of them may
    be missing.
    """
    if not all(-1000 < value < 1e-3 for value in values):
        return False
    p = sorted(map(math.exp, values), reverse=True)[:most]
    rest = 1 - sum(p)
    largest_rest = (size - len(p)) * p[-1] if len(p) == most else 1.0
    return -0.01 <= rest <= largest_rest + 0.01


def spread(sent: Mapping[int, float], size: int) -> Float[Tensor, " size"]:
    """Log-probabilities of all tokens, of which some were sent and the others share the rest."""
    values = torch.tensor([*sent.values()], dtype=torch.float64)
    rest = max(1e-12, 1 - float(values.exp().sum()))
    row = torch.full((size,), math.log(rest / max(1, size - len(values))), dtype=torch.float32)
    row[[*sent]] = values.float()
    return row
