"""Requests to a server that completes: how a sequence is sent, and how a named token's log-probability comes back.

Each sequence is a request of its own and many are under way, so that the server makes the batches. A request that fails
is sent again; its answer goes to its own row, so that nothing is lost or counted twice when a server restarts.
"""

from __future__ import annotations

import base64
import io
import math
import re
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, ClassVar, NamedTuple

import torch

from noiser.errors import ModelError, TargetError
from noiser.files import parse_json
from noiser.model.endpoints import Endpoint, EndpointError, Retries, UnreadableResponseError
from noiser.model.served import Input, Prediction

LEAST = 1e-12  # of a probability; what is left out is never less, but for rounding
BIAS = 100  # the largest that the API has: the model says no other token

PROBE = "One two three four"

_Row = tuple[torch.Tensor, float]
"""Log-probabilities of all tokens, and the probability of those that were not sent."""


class UnscoredResponseError(UnreadableResponseError):
    """A completion without the log-probabilities that were asked for."""


class RefusedError(ModelError):
    """A server that answers, and refuses what was asked: fewer log-probabilities may be allowed."""


class ScoredToken(NamedTuple):
    """One token of a completion.

    Attributes:
        name: its text, or "token_id:" and its number.
        logprob: its log-probability; NaN of the first token of a text.
        top: log-probabilities of the most probable tokens in its place, by their names.
    """

    name: str
    logprob: float
    top: Mapping[str, float]


class CompletionBackend:
    """Predicts by requests that send embeddings; see `noiser.model.server.load_server` for the other arguments.

    The server sends the most probable tokens, and always that which it says: so it is made to say each token that must
    be exact and is not among the former, one request each. It has the sequence in its cache then.

    Args:
        tokenizer: of the model.
        vocabulary_size: how many tokens it predicts.

    Attributes:
        scores_named: whether the log-probability of any one token can be asked for.
        scores: of a server without embeddings, which targets it can score, for the model's identity.
    """

    scores_named: ClassVar[bool] = True
    scores: ClassVar[str | None] = None

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        tokenizer: Any,
        vocabulary_size: int,
        *,
        logprobs: int,
        concurrency: int,
        timeout: float,
        retries: Retries,
    ) -> None:
        self.endpoint, self.model, self.tokenizer, self.vocabulary_size = endpoint, model, tokenizer, vocabulary_size
        self.logprobs, self.concurrency, self.timeout, self.retries = logprobs, concurrency, timeout, retries
        self._client = endpoint.client()
        weakref.finalize(self, self._client.close)

    def predict(self, inputs: Sequence[Input]) -> Prediction:
        """All sequences, `concurrency` of them under way.

        Raises:
            ModelError: a request failed for good; those that were waiting are not sent.
            TargetError: the server cannot score a target.
        """
        stop, waiting, answers = Event(), deque(enumerate(inputs)), SimpleQueue[tuple[int, _Row | Exception]]()

        def work() -> None:
            with suppress(IndexError):  # none is waiting
                while not stop.is_set():
                    number, one = waiting.popleft()
                    try:
                        answers.put((number, self._row(one, stop)))
                    except Exception as error:
                        answers.put((number, error))

        for _ in range(min(self.concurrency, len(inputs))):
            Thread(target=work, name="noiser-server", daemon=True).start()  # which an interrupted program leaves
        rows: dict[int, _Row] = {}
        try:
            for number, answer in (answers.get() for _ in inputs):
                if isinstance(answer, Exception):
                    raise answer
                rows[number] = answer
        except EndpointError as error:
            raise self._unanswered(error) from None
        finally:
            stop.set()
        return Prediction(
            torch.stack([rows[number][0] for number in range(len(inputs))]),
            max(left_out for _, left_out in rows.values()),
        )

    def works(self) -> bool:
        """Whether the server does what this needs: it sends log-probabilities."""
        self.ask(torch.tensor([0]), None)
        return True

    def flaw(self) -> str:
        """Why the server cannot be used; empty if it can. Raises EndpointError where there is no answer."""

        def attempt() -> str:
            try:
                return "" if self.works() else "other log-probabilities than expected"
            except UnscoredResponseError as error:  # and no other answer would come if it were sent again
                return str(error)

        return self.endpoint.call(attempt, self.retries, Event())

    def check(self) -> None:
        """Raises ModelError where the server cannot be used, or does not answer."""
        try:
            flaw = self.flaw()
        except EndpointError as error:
            raise self._unanswered(error, RefusedError if error.refused else ModelError) from None
        if flaw:
            raise self._unanswered(flaw)

    def _unanswered(self, error: object, kind: type[ModelError] = ModelError) -> ModelError:
        return kind(
            f"The model {self.model!r} at {self.endpoint.address} gave no answer: {error}. Expected a server such as "
            "vllm serve MODEL --enable-prompt-embeds; see whether it runs, and ask again."
        )

    def _row(self, one: Input, stop: Event) -> _Row:
        """Log-probabilities of all tokens, and the probability of those that were not sent."""
        sent: dict[int, float] = {}
        for token in one.tokens or (None,):
            if token not in sent and (self.scores_named or not sent):
                sent |= self.endpoint.call(partial(self.ask, one.sequence, token), self.retries, stop)
            if token is not None and token not in sent:
                self._miss(token, one, sent)
        return spread(sent, self.vocabulary_size)

    def _miss(self, token: int, one: Input, sent: Mapping[int, float]) -> None:  # noqa: ARG002 - for subclasses
        """What to do without the log-probability of a token that must be exact."""
        raise ModelError(
            f"The server at {self.endpoint.address} did not send the log-probability of token {token}, although it was "
            "told to say it and nothing else; expected a server that follows allowed_token_ids, as vLLM's does."
        )

    def ask(self, sequence: torch.Tensor, token: int | None) -> dict[int, float]:
        """One request: log-probabilities of the most probable next tokens, and of `token`, by their ids."""
        said = {} if token is None else {"allowed_token_ids": [token]}
        if sequence.is_floating_point():
            return self._by_id(self._send(None, prompt_embeds=_encoded(sequence), **said)[-1])
        return self._by_id(self._send(sequence.tolist(), **said)[-1])

    def _send(self, prompt: str | list[int] | None, **extra: Any) -> list[ScoredToken]:
        """One request, and the tokens that the server sends back.

        Raises:
            UnreadableResponseError: there are none, or without log-probabilities.
        """
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": self.logprobs,
        }  # fmt: skip
        if not isinstance(prompt, str):
            extra["return_tokens_as_token_ids"] = True
        raw = self._client.completions.with_raw_response.create(**body, extra_body=extra, timeout=self.timeout)
        return read_scored(raw.http_response.text)

    def _by_id(self, scored: ScoredToken) -> dict[int, float]:
        """Log-probabilities by token, of those names that are one token."""
        ids: dict[int, float] = {}
        for name, logprob in {**scored.top, scored.name: scored.logprob}.items():
            if number := re.fullmatch(r"token_id:(\d{1,9})", name):
                encoded = [int(number[1])]
            else:
                encoded = self.tokenizer.encode(name, add_special_tokens=False)
                encoded = encoded if self.tokenizer.decode(encoded) == name else []
            if len(encoded) == 1 and encoded[0] < self.vocabulary_size:
                ids[encoded[0]] = logprob
        return ids


class TokenBackend(CompletionBackend):
    """Sends token ids, to a server that takes no embeddings; a token's number stands for its embedding."""

    scores = "any token"
    form: ClassVar[str] = "token ids, with logit_bias for the token to say"

    def predict(self, inputs: Sequence[Input]) -> Prediction:
        """See `CompletionBackend`."""
        return super().predict([one._replace(sequence=one.sequence.flatten().long()) for one in inputs])

    def ask(self, sequence: torch.Tensor, token: int | None) -> dict[int, float]:
        """See `CompletionBackend`."""
        return self._by_id(self._say(sequence.tolist(), token))

    def _say(self, ids: list[int], token: int | None) -> ScoredToken:
        scored = self._send(ids, **({} if token is None else {"logit_bias": {str(token): BIAS}}))[-1]
        if not scored.name.startswith("token_id:"):
            raise UnscoredResponseError(f"tokens without their ids: {scored.name!r}")
        return scored

    def works(self) -> bool:
        """See `CompletionBackend`: a token that the server is made to say has the log-probability it had."""
        ids: list[int] = self.tokenizer.encode(PROBE)
        token, logprob = min(self._by_id(self._say(ids, None)).items(), key=lambda item: item[1])
        said = self._say(ids, token)
        return said.name == f"token_id:{token}" and abs(said.logprob - logprob) < 0.1

    def _text(self, ids: Sequence[int]) -> str:
        """The text of tokens, without the one that the server puts before every text itself."""
        first = 1 if ids and ids[0] == self.tokenizer.bos_token_id else 0
        return self.tokenizer.decode(ids[first:], skip_special_tokens=False, clean_up_tokenization_spaces=False)


class EchoBackend(TokenBackend):
    """Sends text, to a server that scores a given text: the target is the end of it."""

    scores = "text"
    form = "text, with echo"

    def ask(self, sequence: torch.Tensor, token: int | None) -> dict[int, float]:
        """See `CompletionBackend`."""
        text = self._text(sequence.tolist())
        if token is None:
            return self._by_id(self._send(text)[-1])
        continuation = self._text([*sequence.tolist(), token])
        piece = continuation.removeprefix(text)
        if piece in ("", continuation) or "\ufffd" in piece:
            raise TargetError(
                f"Token {token}, {self.tokenizer.decode([token])!r}, is not text of its own after {text[-40:]!r}; "
                "expected a target of whole characters, since this server takes text alone."
            )
        tokens = self._end(self._send(continuation, echo=True)[:-1], piece)
        ids = self._by_id(tokens[0]._replace(name=""))
        return ids | {token: sum(scored.logprob for scored in tokens)}

    def _end(self, tokens: list[ScoredToken], piece: str) -> list[ScoredToken]:
        """The last tokens of a text, which read the piece that it ends with."""
        for start in range(len(tokens) - 1, -1, -1):
            if "".join(scored.name for scored in tokens[start:]) == piece:
                return tokens[start:]
        raise TargetError(
            f"The server's tokenizer does not cut the text before {piece!r}: it reads "
            f"{[scored.name for scored in tokens[-4:]]}; expected tokens that end there. Give a target that "
            "begins a word."
        )

    def works(self) -> bool:
        """See `TokenBackend`."""
        tokens = self._send(PROBE, echo=True)[:-1]
        return "".join(scored.name for scored in tokens).endswith(PROBE[4:]) and not math.isnan(tokens[-1].logprob)


class GeneratedBackend(TokenBackend):
    """Sends text, to a server that scores what it generates: a target is known while it is among the most probable."""

    scores = "the most probable tokens"
    form = "text, with logprobs of the token generated"
    scores_named = False

    def ask(self, sequence: torch.Tensor, token: int | None) -> dict[int, float]:  # noqa: ARG002
        """See `CompletionBackend`."""
        return self._by_id(self._send(self._text(sequence.tolist()))[-1])

    def _miss(self, token: int, one: Input, sent: Mapping[int, float]) -> None:
        if one.clean:
            likely = sorted(sent, key=lambda other: -sent[other])
            raise TargetError(
                f"The server at {self.endpoint.address} scores only tokens that it generates, and "
                f"{self.tokenizer.decode([token])!r} is not among the {len(sent)} that it sent; expected one of "
                f"{', '.join(repr(self.tokenizer.decode([other])) for other in likely[:5])}, ... Take such a target, "
                "ask for more with logprobs=, or use a server that scores any target (docs/scale.md)."
            )

    def works(self) -> bool:
        """See `TokenBackend`."""
        return bool(self._by_id(self._send(PROBE)[-1]))


def text_backend(endpoint: Endpoint, *arguments: Any, **settings: Any) -> TokenBackend:
    """The backend with which a server can score the most targets, found by trying; the arguments are a backend's.

    Raises:
        RefusedError: the server refuses whatever it is sent.
        ModelError: it does not answer, or sends no log-probabilities.
    """
    reasons: list[str] = []
    refused = False
    for kind in (TokenBackend, EchoBackend, GeneratedBackend):
        backend = kind(endpoint, *arguments, **settings)
        try:
            reason = backend.flaw()
        except EndpointError as error:
            if not error.refused:
                raise ModelError(
                    f"The server at {endpoint.address} gave no answer: {error}. Expected one that completes text at "
                    f"{endpoint.address}/completions; chat endpoints cannot be used."
                ) from None
            refused, reason = True, str(error)
        if not reason:
            return backend
        reasons.append(f"{kind.form}: {reason}")
    raise (RefusedError if refused else ModelError)(
        f"The server at {endpoint.address} gives no log-probabilities that can be used. Tried {'; '.join(reasons)}. "
        "Expected completions with logprobs, as of vLLM or llama.cpp (docs/scale.md has a table of servers)."
    )


def spread(sent: Mapping[int, float], size: int) -> tuple[torch.Tensor, float]:
    """Log-probabilities of all tokens, of which some were sent and the others share the rest; and that rest."""
    ids, values = torch.tensor([*sent], dtype=torch.long), torch.tensor([*sent.values()], dtype=torch.float64)
    others = size - len(ids)
    left_out = max(LEAST, 1 - float(values.exp().sum())) if others else 0.0
    row = torch.full((size,), math.log(left_out / others) if others else 0.0, dtype=torch.float32)
    row[ids] = values.float()
    return row, left_out


def read_scored(body: str) -> list[ScoredToken]:
    """The scored tokens in the body of a completion: in columns, as OpenAI and vLLM send them, or in llama.cpp's rows.

    Raises:
        UnscoredResponseError: there are none. UnreadableResponseError: it is not valid JSON.
    """
    try:
        data = parse_json(body)
    except ValueError as error:
        raise UnreadableResponseError(f"no log-probabilities of tokens: {body[:100]}") from error
    try:
        logprobs = data["choices"][0]["logprobs"]
        if "content" in logprobs:
            rows = [(_name(row), row["logprob"], dict(map(_entry, row["top_logprobs"]))) for row in logprobs["content"]]
        else:
            columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
            rows = zip(*columns, strict=True)
        scored = [
            ScoredToken(str(name), math.nan if value is None else float(value), dict(top or {}))
            for name, value, top in rows
        ]
        values = [*scored[-1].top.values(), *(each.logprob for each in scored[1:]), scored[-1].logprob]
        if not all(float(value) <= 1e-3 for value in values):  # NaN is not
            raise UnscoredResponseError(f"log-probabilities that are not: {body[:100]}")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UnscoredResponseError(f"no log-probabilities of tokens: {body[:100]}") from error
    return scored


def _name(entry: Mapping[str, Any]) -> str:
    return f"token_id:{entry['id']}" if "id" in entry else entry["token"]


def _entry(entry: Mapping[str, Any]) -> tuple[str, float]:
    return _name(entry), entry["logprob"]


def _encoded(embeddings: torch.Tensor) -> str:
    """A tensor as vLLM's servers take it: what `torch.save` writes, in base64."""
    buffer = io.BytesIO()
    torch.save(embeddings.detach().cpu().clone(), buffer)  # saving a view would save its whole storage
    return base64.b64encode(buffer.getvalue()).decode()
