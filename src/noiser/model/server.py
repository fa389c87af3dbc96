"""A model behind a server: `vllm serve MODEL --enable-prompt-embeds`, or another that speaks the same language.

Each sequence is a request of its own and many are under way, so that the server makes the batches. A request that fails
is sent again; its answer goes to its own place, so that nothing is lost or counted twice when a server restarts.
"""

from __future__ import annotations

import base64
import io
import json
import math
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any, NamedTuple

import torch

from noiser.checks import check_count
from noiser.errors import DependencyError, ModelError, ParameterError
from noiser.model.checkpoint import Options
from noiser.model.served import Input, Prediction, ServedModel, ServedNetwork, measure_embedding_scale
from noiser.model.table import Checkpoint
from noiser.types import ModelIdentity

try:
    from noiser.endpoint import Endpoint, EndpointError, Retries, UnreadableResponseError
except ImportError as error:
    raise DependencyError(
        f"A model behind a server needs a package that is not installed: {error}. Install it: pip install "
        "'noiser[openai]'."
    ) from error

__all__ = ["ServerBackend", "load_server"]

LEAST = 1e-12  # of a probability; what is left out is never less, apart from rounding


class ServerBackend:
    """Predicts by requests to a server; see `load_server` for the arguments."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        vocabulary_size: int,
        *,
        logprobs: int,
        concurrency: int,
        timeout: float,
        retries: Retries,
    ) -> None:
        self.endpoint, self.model, self.vocabulary_size = endpoint, model, vocabulary_size
        self.logprobs, self.concurrency, self.timeout, self.retries = logprobs, concurrency, timeout, retries
        self._client = endpoint.client()
        weakref.finalize(self, self._client.close)

    def predict(self, inputs: Sequence[Input]) -> Prediction:
        """All sequences, `concurrency` of them under way.

        Raises:
            ModelError: a request failed for good; those that were waiting are not sent.
        """
        stop = Event()
        pool = ThreadPoolExecutor(min(self.concurrency, len(inputs)), "noiser-server")
        try:
            rows = [*pool.map(partial(self._row, stop=stop), inputs)]
        except EndpointError as error:
            raise ModelError(
                f"The model {self.model!r} at {self.endpoint.address} gave no answer: {error}. Expected a server such "
                "as vllm serve MODEL --enable-prompt-embeds; see whether it runs, and ask again."
            ) from None
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
        return Prediction(torch.stack([row for row, _ in rows]), max(left_out for _, left_out in rows))

    def _row(self, one: Input, stop: Event) -> tuple[torch.Tensor, float]:
        """Log-probabilities of all tokens, and the probability of those that were not sent.

        The server sends the most probable ones, and always that of the token it says: so it is made to say each token
        that must be exact and is not among the former, one request each. It has the sequence in its cache then.
        """
        sent: dict[int, float] = {}
        for token in one.tokens or (None,):
            if token is None or token not in sent:
                sent |= self.endpoint.call(lambda token=token: self._ask(one, token), self.retries, stop)
            if token is not None and token not in sent:
                raise ModelError(
                    f"The server at {self.endpoint.address} did not send the log-probability of token {token}, "
                    "although allowed_token_ids names it alone; expected a server that follows it, as vLLM's does."
                )
        return spread(sent, self.vocabulary_size)

    def _ask(self, one: Input, token: int | None) -> dict[int, float]:
        """One request: log-probabilities of the most probable tokens, and of the one that it must say."""
        extra: dict[str, Any] = {"return_tokens_as_token_ids": True}
        prompt: Any = None
        if one.sequence.is_floating_point():
            extra["prompt_embeds"] = _encoded(one.sequence)
        else:
            prompt = one.sequence.tolist()
        if token is not None:
            extra["allowed_token_ids"] = [token]
        raw = self._client.completions.with_raw_response.create(
            model=self.model,
            prompt=prompt,
            max_tokens=1,
            temperature=0,
            logprobs=self.logprobs,
            extra_body=extra,
            timeout=self.timeout,
        )
        return read_logprobs(raw.http_response.text)


def spread(sent: Mapping[int, float], size: int) -> tuple[torch.Tensor, float]:
    """Log-probabilities of all tokens, of which some were sent and the others share the rest; and that rest."""
    ids, values = torch.tensor([*sent]), torch.tensor([*sent.values()], dtype=torch.float64)
    others = size - len(ids)
    left_out = max(LEAST, 1 - float(values.exp().sum())) if others else 0.0
    row = torch.full((size,), math.log(left_out / others) if others else 0.0)
    row[ids] = values.float()
    return row, left_out


def read_logprobs(body: str) -> dict[int, float]:
    """Log-probabilities by token id in the body of a completion of one token.

    Raises:
        UnreadableResponseError: it has none.
    """
    try:
        logprobs = json.loads(body)["choices"][0]["logprobs"]
        named: dict[str, float] = {
            **logprobs["top_logprobs"][0],
            logprobs["tokens"][0]: logprobs["token_logprobs"][0],
        }
        values = {int(name.removeprefix("token_id:")): float(value) for name, value in named.items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableResponseError(f"no log-probabilities of tokens by their ids: {body[:200]}") from error
    if not all(value <= 1e-3 for value in values.values()):  # NaN is not
        raise UnreadableResponseError(f"log-probabilities that are not: {body[:200]}")
    return values


class _Served(NamedTuple):
    """What a server says about its model."""

    model: str
    root: str
    length: int | None


def load_server(
    address: str,
    options: Options,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    api_key: str | None = None,
    api_key_env: str | None = None,
    logprobs: int = 20,
    concurrency: int = 32,
    timeout: float = 600.0,
    max_retries: int = 10,
    backoff: float = 1.0,
    embeddings: bool = True,
) -> ServedModel:
    """A model behind a server.

    Args:
        address: of the server, up to and including "/v1".
        options: of which a server takes the type of the embeddings, float32 unless given.
        model: its name there; None for the only one.
        tokenizer: name, folder or hub id of the model, whose tokenizer and embedding table are read; None for the one
            that the server names.
        api_key: a key. None: `OPENAI_API_KEY`, if `OPENAI_BASE_URL` is this address.
        api_key_env: the environment variable that holds it.
        logprobs: how many log-probabilities are sent for each sequence; -1 for all. More than 20 need a server with
            `--max-logprobs`.
        concurrency: how many requests are under way.
        timeout: seconds of silence after which a request counts as lost.
        max_retries: how often a request is sent again, after waits that double from `backoff` up to a minute.
        backoff: seconds before the first new try.
        embeddings: whether the server takes them. False: it takes text alone, of which tokens can only be taken out:
            the methods with `baseline="delete"`.

    Raises:
        ParameterError: a parameter outside its domain. ModelError: the server does not answer, or has no such model.
    """
    check_count("concurrency", concurrency)
    check_count("max_retries", max_retries, least=0)
    if logprobs != -1:
        check_count("logprobs", logprobs)
    endpoint = Endpoint.choose(address, api_key, api_key_env, user="A served model", error=ModelError)
    retries = Retries(max_retries, backoff, 60.0)
    served = _served(endpoint, model, timeout, retries)
    checkpoint = Checkpoint.of(tokenizer or served.root, options)
    length = None if served.length is None else served.length - 1  # one more is generated
    settings: dict[str, Any] = {
        "logprobs": logprobs, "concurrency": concurrency, "timeout": timeout, "retries": retries,
    }  # fmt: skip
    name = f"{served.model} at {endpoint.address}"
    if not embeddings:
        return _text_model(endpoint, served.model, checkpoint, name, length, settings)
    table = checkpoint.embedding_table()
    table = table.to(options.dtype if isinstance(options.dtype, torch.dtype) else torch.float32)
    backend = ServerBackend(endpoint, served.model, len(table), **settings)
    config = checkpoint.config()
    scale = measure_embedding_scale(backend, table, config)
    return ServedModel(
        ServedNetwork(backend, config, table, scale, checkpoint.generation_config()),
        checkpoint.tokenizer(),
        identity=ModelIdentity(
            name,
            checkpoint.revision,
            str(table.dtype).removeprefix("torch."),
            next(iter(getattr(config, "architectures", None) or []), type(config).__name__),
        ),
        context_length=length,
    )


def _text_model(
    endpoint: Endpoint, model: str, checkpoint: Checkpoint, name: str, length: int | None, settings: Mapping[str, Any]
) -> ServedModel:
    from noiser.model.text_server import TextBackend, TextModel, can_echo

    tokenizer = checkpoint.tokenizer()
    backend = TextBackend(endpoint, model, tokenizer, echo=False, **settings)
    backend.echo = can_echo(backend)
    numbers = torch.arange(len(tokenizer), dtype=torch.float32)[:, None]
    network = ServedNetwork(backend, None, numbers, 1.0, checkpoint.generation_config())
    identity = ModelIdentity(name, checkpoint.revision, "text", "echo" if backend.echo else "no echo")
    return TextModel(network, tokenizer, identity=identity, context_length=length)


def _served(endpoint: Endpoint, model: str | None, timeout: float, retries: Retries) -> _Served:
    """The model of that name on a server, or the only one."""

    def send() -> list[dict[str, Any]]:
        with endpoint.client() as client:
            text = client.models.with_raw_response.list(timeout=timeout).http_response.text
        try:
            return [dict(card) for card in json.loads(text)["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise UnreadableResponseError(f"no list of models: {text[:200]}") from error

    try:
        cards = endpoint.call(send, retries, Event())
    except EndpointError as error:
        raise ModelError(
            f"The server at {endpoint.address} does not answer: {error}. Expected the address of a server that runs; "
            "most end in /v1."
        ) from None
    fitting = [card for card in cards if model in (None, card.get("id"))]
    if len(fitting) != 1:
        names = ", ".join(repr(card.get("id")) for card in cards) or "none"
        raise ParameterError(
            f"model is {model!r}, and the server at {endpoint.address} has {names}; expected the name of one. "
            "Give model=."
        )
    card = fitting[0]
    length = card.get("max_model_len")
    return _Served(str(card["id"]), str(card.get("root") or card["id"]), length if isinstance(length, int) else None)


def _encoded(embeddings: torch.Tensor) -> str:
    """A tensor as vLLM's servers take it: what `torch.save` writes, in base64."""
    buffer = io.BytesIO()
    torch.save(embeddings.detach().cpu().clone(), buffer)  # a view would be saved with all that it is a view of
    return base64.b64encode(buffer.getvalue()).decode()
