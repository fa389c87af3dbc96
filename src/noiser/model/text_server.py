"""A model behind a server that takes text alone: tokens can be taken out, but not changed.

To the rest of the package such a model has an embedding table like any other, in which the row of a token is its
number: taking out rows takes out tokens, and whatever else is done to them is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import torch

from noiser.endpoint import Endpoint, EndpointError, Retries, UnreadableResponseError
from noiser.errors import ModelError
from noiser.model.served import Input, ServedModel
from noiser.model.server import ServerBackend, spread

__all__ = ["Scored", "TextBackend", "TextModel", "can_echo", "read_scored"]


class TextModel(ServedModel):
    """A model that reads text alone."""

    takes_embeddings = False


class Scored(NamedTuple):
    """One token of a completion: its text, its log-probability, and those of the most probable ones, by their texts."""

    text: str
    logprob: float
    top: Mapping[str, float]


class TextBackend(ServerBackend):
    """Predicts by requests to a server that takes text; see `noiser.model.server.load_server` for the other arguments.

    Args:
        tokenizer: of the model: the server's own cuts the text again.
        echo: whether the server scores a given text: then that of every token is exact. Otherwise a token is known only
            while it is among the most probable ones.
    """

    def __init__(self, endpoint: Endpoint, model: str, tokenizer: Any, *, echo: bool, **settings: Any) -> None:
        super().__init__(endpoint, model, len(tokenizer), **settings)
        self.tokenizer, self.echo = tokenizer, echo

    def _row(self, one: Input, stop: Event) -> tuple[torch.Tensor, float]:
        ids = one.sequence.flatten().long().tolist()
        text = self._text(ids)
        sent: dict[int, float] = {}
        for token in one.tokens if self.echo else ():
            continuation = self._text([*ids, token])
            if not continuation.startswith(text) or continuation == text or "\ufffd" in continuation[len(text) :]:
                raise ModelError(
                    f"Token {token}, {self.tokenizer.decode([token])!r}, is not text of its own after {text[-40:]!r}; "
                    "expected a target of whole characters, since this server takes text alone."
                )
            piece = continuation[len(text) :]
            echoed = self.endpoint.call(partial(self._send, continuation), self.retries, stop)
            tokens = self._tokens_of(echoed, piece)
            sent |= self._by_id(tokens[0].top)
            sent[token] = sum(scored.logprob for scored in tokens)
        if not sent:
            answer = self.endpoint.call(partial(self._send, text, echo=False), self.retries, stop)
            if not answer:
                raise ModelError(f"The server at {self.endpoint.address} sent no log-probabilities; expected some.")
            sent = self._by_id(answer[0].top)
        return spread(sent, self.vocabulary_size)

    def _text(self, ids: list[int]) -> str:
        """The text of tokens, without the one that the server puts before every text itself."""
        first = 1 if ids and ids[0] == self.tokenizer.bos_token_id else 0
        return self.tokenizer.decode(ids[first:], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _tokens_of(self, tokens: list[Scored], piece: str) -> list[Scored]:
        """The last tokens of a text, which read the piece that it ends with."""
        for start in range(len(tokens) - 1, -1, -1):
            read = "".join(scored.text for scored in tokens[start:])
            if len(read) >= len(piece):
                if read == piece:
                    return tokens[start:]
                break
        raise ModelError(
            f"The server's tokenizer does not cut the text before {piece!r}: it reads "
            f"{[scored.text for scored in tokens[-4:]]}; expected tokens that end there. Give a target that "
            "begins a word."
        )

    def _by_id(self, top: Mapping[str, float]) -> dict[int, float]:
        """Log-probabilities by token, of those texts that are one token."""
        ids: dict[int, float] = {}
        for text, logprob in top.items():
            encoded = self.tokenizer.encode(text, add_special_tokens=False)
            if len(encoded) == 1 and self.tokenizer.decode(encoded) == text:
                ids[encoded[0]] = logprob
        return ids

    def _send(self, text: str, echo: bool = True) -> list[Scored]:
        """One request: the tokens of the text if it is echoed, else the one that the model says."""
        raw = self._client.completions.with_raw_response.create(
            model=self.model,
            prompt=text,
            max_tokens=1,
            temperature=0,
            logprobs=max(1, self.logprobs),
            echo=echo,
            timeout=self.timeout,
        )
        tokens = read_scored(raw.http_response.text)
        return tokens[:-1] if echo else tokens[-1:]


def read_scored(body: str) -> list[Scored]:
    """The scored tokens in the body of a completion. Raises UnreadableResponseError where there are none."""
    try:
        logprobs = json.loads(body)["choices"][0]["logprobs"]
        columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        return [
            Scored(str(text), math.nan if value is None else float(value), dict(top or {}))
            for text, value, top in zip(*columns, strict=True)
        ]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableResponseError(f"no log-probabilities of tokens: {body[:200]}") from error


def can_echo(backend: TextBackend) -> bool:
    """Whether a server sends back the log-probabilities of a text that it is given.

    Raises:
        ModelError: it sends none at all.
    """
    text = "One two three four"

    def send() -> bool:
        tokens = backend._send(text)  # pyright: ignore[reportPrivateUsage]
        return "".join(scored.text for scored in tokens).endswith(text[4:]) and not math.isnan(tokens[-1].logprob)

    try:
        return backend.endpoint.call(send, Retries(0, 1.0, 1.0), Event())
    except EndpointError as error:
        if error.fatal:
            raise ModelError(f"The server at {backend.endpoint.address} gave no answer: {error}.") from None
        return False
