"""A model behind a vLLM server. Only token ids are sent to it, so tokens can be taken out and not changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_count
from noiser.errors import DependencyError, ModelError, ParameterError
from noiser.model.loading import find
from noiser.model.packing import Branch
from noiser.model.served import ServedModel, read_settings
from noiser.types import ModelIdentity

try:
    import openai

    from noiser.endpoint import Endpoint, choose, client, problem
except ImportError as error:
    raise DependencyError("A model behind a server needs the package openai.", "openai") from error


@dataclass
class Server:
    """A server that predicts by requests to /v1/completions with `prompt_logprobs`; `load_server` has the fields."""

    endpoint: Endpoint
    client: openai.OpenAI
    model: str
    vocabulary_size: int
    logprobs: int
    concurrency: int

    def predict(self, branches: Sequence[Branch]) -> list[Float[Tensor, "one rows vocab"]]:
        """Log-probabilities, exact for tokens that were asked for and the most probable ones, even for all others."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return [
                *pool.map(self._rows, branches)
            ]  # after an error or interrupt those that wait are cancelled

    def _rows(self, branch: Branch) -> Float[Tensor, "one rows vocab"]:
        ids = branch.inputs.flatten().long().tolist()[: branch.wanted[-1] + 1]
        tokens, rows = branch.tokens or [()] * len(branch.wanted), list[Tensor]()
        found = self.score([*ids, *tokens[-1][:1]])
        for row, wanted in zip(branch.wanted, tokens, strict=True):
            for token in {*wanted} - found[row].keys():
                found[row] |= self.score([*ids[: row + 1], token])[row]
            rows.append(spread(found[row], self.vocabulary_size))
        return torch.stack(rows)[None]

    def score(self, ids: list[int]) -> list[dict[int, float]]:
        """After every token, log-probabilities of the token that follows and of the most probable ones."""
        where, top = f"The server at {self.endpoint.address}", self.logprobs
        asked: dict[str, Any] = {
            "model": self.model,
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": top,
        }
        more = {"prompt_logprobs": top, "return_tokens_as_token_ids": True}
        try:
            answer = self.client.completions.create(prompt=ids, extra_body=more, **asked)
            choice: dict[str, Any] = answer.choices[0].to_dict()
            rows = [
                {int(i): each["logprob"] for i, each in row.items()}
                for row in choice["prompt_logprobs"][1:]
            ]
            last = choice["logprobs"]["top_logprobs"][0].items()
            rows.append({int(name.removeprefix("token_id:")): value for name, value in last})
            fit = all(is_distribution([*row.values()], self.vocabulary_size, top) for row in rows)
        except openai.OpenAIError as error:
            raise unanswered(self.endpoint, error) from error
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"{where} does not send prompt_logprobs of token ids. Use: vllm serve MODEL."
            ) from error
        if not fit:
            what = f"{where} sends log-probabilities that are not a distribution's, as placeholders are"
            raise ModelError(f"{what}. Use vLLM's server, without a logits processor.")
        return [
            {token: value for token, value in row.items() if token < self.vocabulary_size}
            for row in rows
        ]


def is_distribution(values: Sequence[float], size: int, most: int) -> bool:
    """Whether natural log-probabilities can be the `most` largest of `size` tokens, and perhaps a smaller one."""
    if not all(-1000 < value < 1e-3 for value in values):
        return False
    p = sorted(map(math.exp, values), reverse=True)[:most]
    return -0.01 <= 1 - sum(p) <= (size - len(p)) * p[-1] + 0.01


def spread(sent: Mapping[int, float], size: int) -> Float[Tensor, " size"]:
    """Log-probabilities of all tokens, of which some were sent and the others share the rest."""
    values = torch.tensor([*sent.values()], dtype=torch.float64)
    rest = max(1e-12, 1 - float(values.exp().sum()))
    row = torch.full((size,), math.log(rest / max(1, size - len(values))), dtype=torch.float32)
    row[[*sent]] = values.float()
    return row


def unanswered(endpoint: Endpoint, error: Exception) -> ModelError:
    """The error of a server that fails."""
    return ModelError(
        f"The server at {endpoint.address} gave no answer: {problem(error, endpoint)}. See whether it runs."
    )


def load_server(
    address: str,
    origin: dict[str, Any],
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    api_key_env: str | None = None,
    logprobs: int = 5,
    concurrency: int = 32,
    timeout: float = 600.0,
    max_retries: int = 10,
) -> ServedModel:
    """A model behind vLLM's server.

    Args:
        address: of the server, up to and including "/v1".
        origin: the `revision` of the tokenizer, and `trust_remote_code`, whether its code may run.
        model: its name there; None for the only one.
        tokenizer: name, folder or hub id of the model, whose tokenizer is read; None for the one that the server names.
        api_key_env: the variable that holds the key. None: `OPENAI_API_KEY`, if `OPENAI_BASE_URL` is this address.
        logprobs: how many of the most probable tokens the server sends for each position; vLLM sends 20 at most unless
            started with `--max-logprobs`. The target's log-probability is exact with any number.
        concurrency: how many requests are under way.
        timeout: seconds after which a request counts as lost.
        max_retries: how often a request is sent again.

    Raises:
        ParameterError: a parameter outside its domain, or code to be trusted that the server would choose.
        ModelError: the server does not answer, or sends no log-probabilities of a given text.
    """
    check_count("concurrency", concurrency)
    check_count("logprobs", logprobs)
    if origin["trust_remote_code"] and tokenizer is None:
        raise ParameterError(
            "With trust_remote_code the server would say whose code runs. Name the model: tokenizer=."
        )
    endpoint = choose(address, None, api_key_env, user="A served model", error=ModelError)
    sender = client(endpoint, timeout=timeout, max_retries=max_retries)
    try:
        cards: list[Any] = [card.to_dict() for card in sender.models.list()]
    except openai.OpenAIError as error:
        raise unanswered(endpoint, error) from error
    fitting = [card for card in cards if model in (None, card["id"])]
    if len(fitting) != 1:
        names = ", ".join(str(card["id"]) for card in cards[:10])
        raise ParameterError(
            f"model is {model!r}; expected one of the server's: {names or 'none'}. Give model=."
        )
    name, length = fitting[0]["id"], fitting[0].get("max_model_len")
    place = find(tokenizer or fitting[0].get("root") or name)
    tokens, generation_config = read_settings(place, origin)
    server = Server(endpoint, sender, name, len(tokens), logprobs, concurrency)
    server.score([0, 1])  # one that cannot be used is refused now
    identity = ModelIdentity(f"{name} at {endpoint.address}", place.revision, "text", "")
    room = (
        length - 2 if isinstance(length, int) else None
    )  # the target is sent, and one is generated
    return ServedModel(server.predict, tokens, generation_config, identity, room)
