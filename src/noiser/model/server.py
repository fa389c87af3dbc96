"""A model behind a server: `vllm serve MODEL --enable-prompt-embeds`, or one that completes text."""

from __future__ import annotations

import warnings
from threading import Event
from typing import Any

import torch

from noiser.checks import check_count, check_positive
from noiser.errors import DependencyError, ModelError, ParameterError
from noiser.files import parse_json
from noiser.model.checkpoint import Options
from noiser.model.served import ServedModel
from noiser.model.table import Checkpoint

try:
    from noiser.model.completions import CompletionBackend, RefusedError, text_backend
    from noiser.model.endpoints import Endpoint, EndpointError, Retries, UnreadableResponseError
except ImportError as error:
    raise DependencyError(
        f"A model behind a server needs a package that is not installed: {error}. Install it: pip install "
        "'noiser[openai]'."
    ) from error

MANY, FEW = 1000, 20
"""How many log-probabilities are sent: many are nearly as cheap, and few are the most that vLLM's servers send unless
they are told otherwise."""


_SHOWN = 10
"""How many names of models an error shows."""


def load_server(
    address: str,
    options: Options,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    api_key: str | None = None,
    api_key_env: str | None = None,
    logprobs: int | None = None,
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
        logprobs: how many log-probabilities are sent for each sequence; -1 for all. None: 1,000, or 20 where the server
            does not send so many, as vLLM's without `--max-logprobs`.
        concurrency: how many requests are under way.
        timeout: seconds of silence after which a request counts as lost.
        max_retries: how often a request is sent again, after waits that double from `backoff` up to a minute.
        backoff: seconds before the first new try.
        embeddings: whether the server takes them. False: it takes token ids or text, of which tokens can only be taken
            out: the methods with `baseline="delete"`. What it can score is tried; see `docs/scale.md`.

    Raises:
        ParameterError: a parameter outside its domain, or code to be trusted that the server would choose.
        ModelError: the server does not answer, or sends no log-probabilities.
    """
    check_count("concurrency", concurrency)
    check_count("max_retries", max_retries, least=0)
    check_positive("timeout", timeout)
    check_positive("backoff", backoff)
    if logprobs not in (None, -1):
        check_count("logprobs", logprobs)
    if options.trust_remote_code and tokenizer is None:
        raise ParameterError(
            "trust_remote_code is True, and the server would say whose code to run; expected tokenizer=, the folder or "
            "hub id of the model that you trust."
        )
    endpoint = Endpoint.choose(address, api_key, api_key_env, user="A served model", error=ModelError)
    retries = Retries(max_retries, backoff, 60.0)
    card = _model_card(endpoint, model, timeout, retries, needed=not (model and tokenizer))
    served, root, meta = card["id"], card.get("root"), card.get("meta")
    checkpoint = Checkpoint.of(tokenizer or (root if isinstance(root, str) and root else served), options)
    length = card.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)  # of vLLM; llama.cpp
    tokens, table, dtype = checkpoint.tokenizer(), None, "text"
    if embeddings:
        table = checkpoint.embedding_table()
        table = table.to(options.dtype if isinstance(options.dtype, torch.dtype) else torch.float32)
        dtype = str(table.dtype).removeprefix("torch.")

    def load(count: int) -> ServedModel:
        settings: dict[str, Any] = {"concurrency": concurrency, "timeout": timeout, "retries": retries}
        if table is None:
            settings["logprobs"] = len(tokens) if count == -1 else count
            backend = text_backend(endpoint, served, tokens, len(tokens), **settings)
        else:
            backend = CompletionBackend(endpoint, served, tokens, len(table), logprobs=count, **settings)
            backend.check()
        return ServedModel(
            backend,
            checkpoint,
            tokens,
            table,
            name=f"{served} at {endpoint.address}",
            dtype=dtype,
            architecture=backend.scores,
            context_length=length - 1 if isinstance(length, int) and length > 1 else None,  # one more is generated
        )

    if logprobs is not None:
        return load(logprobs)
    try:
        return load(MANY)
    except RefusedError:  # perhaps because that is too many
        return load(FEW)


def _model_card(
    endpoint: Endpoint, model: str | None, timeout: float, retries: Retries, *, needed: bool
) -> dict[str, Any]:
    """What a server says about its model of that name, or the only one; where it lists none, only what is needed."""

    def send() -> list[dict[str, Any]]:
        with endpoint.client() as client:
            text = client.models.with_raw_response.list(timeout=timeout).http_response.text
        try:
            cards = [dict(card) for card in parse_json(text)["data"]]
            return [card for card in cards if card.get("id") and isinstance(card["id"], str)]
        except (ValueError, LookupError, TypeError) as error:
            raise UnreadableResponseError(f"no list of models: {text[:200]}") from error

    try:
        try:
            cards = endpoint.call(send, retries._replace(times=0), Event())
        except EndpointError as error:
            if not (error.transient and retries.times):
                raise
            warnings.warn(
                f"The server at {endpoint.address} does not answer yet: {error}. It is asked up to {retries.times} "
                "more times, after longer and longer waits; press Ctrl-C if the address is wrong.",
                stacklevel=2,
            )
            cards = endpoint.call(send, retries._replace(times=retries.times - 1), Event())
    except EndpointError as error:
        if not (needed or error.transient):
            return {"id": model}
        raise ModelError(
            f"The server at {endpoint.address} does not answer: {error}. Expected the address of a server that runs; "
            "most end in /v1."
        ) from None
    cards = cards or ([{"id": model}] if model else [])
    fitting = [card for card in cards if model in (None, card["id"])]
    if len(fitting) != 1:
        names = ", ".join(repr(card["id"][:80]) for card in cards[:_SHOWN]) or "none"
        names += f", and {len(cards) - _SHOWN} more" if len(cards) > _SHOWN else ""
        raise ParameterError(
            f"model is {model!r}, and the server at {endpoint.address} has {names}; expected the name of one. "
            "Give model=."
        )
    return fitting[0]
