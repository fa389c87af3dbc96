"""A model behind a server that completes text, such as vLLM's or llama.cpp's.

Only tokens are sent to it, so tokens can be taken out and not changed. Servers differ in how they
score a token; a trial when the model is loaded finds the best way that works.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from pydantic import BaseModel, Field, StrictStr, ValidationError
from torch import Tensor

from noiser.checks import check_count
from noiser.errors import (
    DependencyError,
    ModelError,
    NoiserError,
    ParameterError,
    TargetError,
)
from noiser.model.checkpoints import find
from noiser.model.completions import Reader, ScoredTokens, Slot, is_distribution, spread
from noiser.model.packing import Branch
from noiser.model.remote import ServedModel, read_settings
from noiser.model.server_tokenizer import server_tokenizer
from noiser.notices import warn
from noiser.text.encoding import encode
from noiser.text.tokens import continuation
from noiser.types import ModelIdentity

try:
    import openai

    from noiser.endpoint import Endpoint, choose, client, problem
except ImportError as error:
    raise DependencyError("A model behind a server needs the package openai.", "openai") from error

_PROBES = ("One two three four five", "The sky is blue, and the grass is")
_BIAS = 100  # the largest of the API: the server says this token and no other
_SAME = 0.05  # nats between two ways to score a token; caches in half precision give 0.004
_REFUSALS = (400, 415, 422, 500, 501)  # what servers answer to a form of request that they lack


class Way(NamedTuple):
    """How a server scores a token.

    Attributes:
        name: a key of `_ABILITIES`.
        takes_ids: whether prompts are sent as token ids; else the server cuts text into tokens.
    """

    name: str
    takes_ids: bool

    def __str__(self) -> str:
        form = "token ids" if self.takes_ids else "text"
        return f"takes prompts as {form} and {_ABILITIES[self.name]}"


_ABILITIES = {
    "prompt_logprobs": "scores all tokens of a prompt (prompt_logprobs)",
    "echo": "scores all tokens of a prompt (echo)",
    "logit_bias": "scores any next token (logit_bias)",
    "top": "scores the most probable next tokens alone",
}

WAYS = [
    Way("prompt_logprobs", takes_ids=True),
    Way("echo", takes_ids=True),
    Way("logit_bias", takes_ids=True),
    Way("echo", takes_ids=False),
    Way("logit_bias", takes_ids=False),
    Way("top", takes_ids=True),
    Way("top", takes_ids=False),
]
"""The ways, the best first."""


class _RefusedError(Exception):
    """A server does not do what was asked; the text says what it answered."""


@dataclass
class Server:
    """A server that predicts by requests to /v1/completions; `load_server` has the fields."""

    endpoint: Endpoint
    client: openai.OpenAI
    model: str
    tokenizer: Any
    vocabulary_size: int
    logprobs: int
    concurrency: int
    way: Way = WAYS[0]
    reader: Reader = field(init=False)
    anchor: int = field(init=False)  # a token of whole characters

    def __post_init__(self) -> None:
        self.reader = Reader(self.tokenizer, self.vocabulary_size)
        self.anchor = encode(self.tokenizer, _PROBES[0]).token_ids[-1]

    @property
    def where(self) -> str:
        """The server, as the subject of a sentence."""
        return f"The server at {self.endpoint.address}"

    def close(self) -> None:
        """Closes the connections."""
        self.client.close()

    def predict(self, branches: Sequence[Branch]) -> list[Float[Tensor, "one rows vocab"]]:
        """Log-probabilities of all tokens after the wanted positions.

        They are exact for tokens that were asked for and for the most probable ones; the others
        share the rest evenly. Of a server that sends the most probable tokens alone, a token that
        was asked for may be missing. After the whole prompt that is an error. After a prompt
        without some units, the smallest that was sent stands for it: it is not less than the
        token's own, so the effect of those units is at least what is shown.
        """
        bounds: list[int] = []
        with ThreadPoolExecutor(self.concurrency) as pool:
            rows = [*pool.map(partial(self._rows, bounds=bounds), branches)]
        if bounds:
            warn(
                f"{self.where} {self.way}: {len(bounds)} log-probabilities of targets were not "
                f"among the {self.logprobs} that it sent, so effects there are lower bounds. "
                "Ask for more with logprobs=.",
            )
        return rows

    def write(self, token_ids: Sequence[int], count: int) -> str:
        """The text that the server writes next without sampling; empty where it refuses."""
        ids = [*token_ids]
        asked: dict[str, Any] = {"prompt": ids if self.way.takes_ids else self._text(ids)}
        try:
            reply = self.client.completions.create(
                model=self.model, max_tokens=count, temperature=0, **asked
            )
            text = reply.choices[0].text
        except openai.APIStatusError as error:
            if error.status_code in _REFUSALS:
                return ""
            raise unanswered(self.endpoint, error) from error
        except openai.OpenAIError as error:
            raise unanswered(self.endpoint, error) from error
        except (AttributeError, IndexError, TypeError):  # the client reads any JSON
            return ""
        return text if isinstance(text, str) else ""

    def _rows(self, branch: Branch, bounds: list[int]) -> Float[Tensor, "one rows vocab"]:
        ids = branch.inputs.flatten().long().tolist()[: branch.wanted[-1] + 1]
        is_whole = branch.inputs.shape[1] == len(branch.context.inputs)
        tokens = branch.tokens or [()] * len(branch.wanted)
        found = self._known(ids, branch.wanted, tokens[-1][:1])
        rows: list[Tensor] = []
        for place, wanted in zip(branch.wanted, tokens, strict=True):
            known = dict(found[place].known)
            for token in [token for token in wanted if token not in known]:
                exact = self._exactly(ids[: place + 1], token)
                known |= exact.known
                if token not in known:
                    if is_whole or not known:
                        raise self._missing(token, known)
                    known[token] = min(exact.bound, found[place].bound)
                    bounds.append(token)
            if not known:
                raise self._missing(ids[place], known)
            rows.append(spread(known, self.vocabulary_size))
        return torch.stack(rows)[None]

    def _known(
        self, ids: list[int], places: Sequence[int], last: Sequence[int]
    ) -> dict[int, ScoredTokens]:
        """The rows after some places; tokens `last` are asked for after the last one."""
        with self._explained():
            if self.way.name == "prompt_logprobs":
                return dict(enumerate(self._by_prompt_logprobs([*ids, *last])))
            if self.way.name == "echo":
                return dict(enumerate(self._by_echo([*ids, *last])))
            return {place: self._next(ids[: place + 1]) for place in places}

    def _exactly(self, ids: list[int], token: int) -> ScoredTokens:
        """The row after a sequence, in which the token is known if the server can name it."""
        with self._explained():
            if self.way.name == "prompt_logprobs":
                return self._by_prompt_logprobs([*ids, token])[len(ids) - 1]
            if self.way.name == "echo":
                return self._by_echo([*ids, token])[len(ids) - 1]
            if self.way.name == "logit_bias":
                return self._next(ids, token)
            return ScoredTokens({}, torch.inf)

    def _missing(self, token: int, known: dict[int, float]) -> TargetError:
        text = self.tokenizer.decode([token])
        if self.way.name == "echo":
            return TargetError(
                f"{self.where} {self.way}, and cuts the text elsewhere than around {text!r}. "
                "Give a target that begins a word."
            )
        best = sorted(known, key=lambda each: -known[each])[:5]
        likely = ", ".join(repr(self.tokenizer.decode([each])) for each in best)
        return TargetError(
            f"{self.where} {self.way}, and {text!r} is not among them. Take one of those "
            f"({likely}), ask for more with logprobs=, or use vLLM's or llama.cpp's server, "
            "which score any token."
        )

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turns the refusal of a server that did do this in the trial into a ModelError."""
        try:
            yield
        except _RefusedError as error:
            raise ModelError(
                f"{self.where} {self.way} no longer: {error}. "
                "See its log, and load the model again."
            ) from error

    def _by_prompt_logprobs(self, ids: list[int]) -> list[ScoredTokens]:
        """The rows after every token, by vLLM's own field."""
        answer, places = self._ask(ids, prompt_logprobs=self.logprobs)
        try:
            rows = self.reader.prompt_rows(answer)
        except ValueError as error:
            raise _RefusedError(str(error)) from error
        if len(rows) != len(ids) - 1:
            raise _RefusedError(f"prompt_logprobs has {len(rows) + 1} rows for {len(ids)} tokens")
        found: list[ScoredTokens] = []
        for row in rows:
            self._check([*row.values()], self.logprobs)
            known = {token: value for token, value in row.items() if token < self.vocabulary_size}
            found.append(ScoredTokens(known, min(row.values(), default=torch.inf)))
        return [*found, places[-1].row()]

    def _by_echo(self, ids: list[int]) -> list[ScoredTokens]:
        """The rows after every token of a sequence that the server sends back.

        Of a sequence sent as text, a row is known where the server's tokens begin and end as ours
        do; else it is empty. A token that the server reads as several gets the sum of their
        log-probabilities.
        """
        _, places = self._ask(ids, echo=True)
        *given, last = places
        if self.way.takes_ids:
            if len(given) != len(ids):
                raise _RefusedError(f"{len(given)} tokens came back for {len(ids)}")
            own = [place._replace(token=token) for place, token in zip(given, ids, strict=True)]
            return [place.row() for place in (*own[1:], last)]
        text, offsets = continuation(self.tokenizer, (), self._without_start(ids))
        joined = "".join(place.text for place in given)
        if not joined.endswith(text):
            raise _RefusedError(f"the text came back as {joined[-40:]!r}")
        # Which of the server's tokens begins at each character, for characters where one does.
        character = len(text) - len(joined)
        begins = {character: 0}
        for number, place in enumerate(given, 1):
            character += len(place.text)
            begins[character] = number
        nothing = ScoredTokens({}, torch.inf)
        rows = [nothing] * (len(ids) - len(offsets))  # for a start token, which the server adds
        for token, (start, stop) in zip(ids[len(rows) :], offsets, strict=True):
            first = begins.get(start, 0)
            after = begins.get(stop, 0)
            values = [place.logprob for place in given[first:after]]
            if start not in begins or not values or None in values:
                rows.append(nothing)
            else:
                whole_token = {token: sum(filter(None, values))}
                rows.append(ScoredTokens(given[first].top | whole_token, torch.inf))
        return [*rows[1:], last.row()]

    def _next(self, ids: list[int], token: int | None = None) -> ScoredTokens:
        """The row after a sequence, in which `token` is known if the server can name it.

        With `logit_bias` the server says the token, so that its log-probability comes back.
        llama.cpp's sends none at all where it says a part of a character: it then has to say
        another token, and to send the log-probabilities of all.
        """
        if self.way.name != "logit_bias":
            return self._ask(ids)[1][-1].row()
        is_part = token is not None and "\ufffd" in self.tokenizer.decode([token])
        said = self.anchor if token is None or is_part else token
        more: dict[str, Any] = {"logit_bias": {str(said): _BIAS}}
        if is_part:
            more["logprobs"] = self.vocabulary_size
        place = self._ask(ids, **more)[1][-1]
        if place.token != said:
            raise _RefusedError(f"it said {place.text!r} where logit_bias demands token {said}")
        return place.row()

    def _ask(self, ids: list[int], **more: Any) -> tuple[object, list[Slot]]:
        """The answer to one request, and what it says about the places.

        Raises `_RefusedError` where it has no log-probabilities.
        """
        asked: dict[str, Any] = {
            "model": self.model,
            "prompt": ids if self.way.takes_ids else self._text(ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": self.logprobs,
        }
        if self.way.takes_ids:
            more["return_tokens_as_token_ids"] = True  # vLLM's
        try:
            reply = self.client.completions.create(**asked, extra_body=more)
            answer: object = reply.to_dict()
        except openai.APIStatusError as error:
            if error.status_code in _REFUSALS:
                raise _RefusedError(problem(error, self.endpoint)) from error
            raise unanswered(self.endpoint, error) from error
        except openai.OpenAIError as error:
            raise unanswered(self.endpoint, error) from error
        except AttributeError as error:  # the client reads any JSON
            raise _RefusedError("an answer that is no completion") from error
        try:
            places = self.reader.places(answer)
        except ValueError as error:
            raise _RefusedError(f"no log-probabilities: {error!s:.100}") from error
        for place in places:
            self._check(place.sent, more.get("logprobs", self.logprobs))
        return answer, places

    def _check(self, values: Sequence[float], count: int) -> None:
        if not is_distribution(values, self.vocabulary_size, min(count, self.vocabulary_size)):
            raise ModelError(
                f"{self.where} sends log-probabilities that are not a distribution's, as "
                "placeholders are. Use a server without a logits processor, such as vLLM's or "
                "llama.cpp's."
            )

    def _text(self, ids: list[int]) -> str:
        """The text of tokens, without the start token that the server puts in front itself."""
        settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        text: str = self.tokenizer.decode(self._without_start(ids), **settings)
        if "\ufffd" in text:
            raise TargetError(
                f"{self.where} {self.way}, and {text[-20:]!r} ends within a character. "
                "Give targets and units of whole characters."
            )
        return text

    def _without_start(self, ids: list[int]) -> list[int]:
        return ids[1:] if ids[:1] == [self.tokenizer.bos_token_id] else ids

    def find_way(self) -> None:
        """Tries what the server can do, and keeps the best way.

        A way works if it gives a token the log-probability that the server sends with the plain
        request for the next token: every number is seen twice. Raises ModelError where no way
        works, with what was tried.
        """
        probes = [[*encode(self.tokenizer, text).token_ids] for text in _PROBES]
        tried: dict[bool, str] = {}
        plain: dict[bool, tuple[list[int], dict[int, float]] | None] = {}
        for way in WAYS:
            if way.takes_ids not in plain:
                self.way = way._replace(name="top")
                plain[way.takes_ids] = None
                for ids in probes:
                    try:
                        plain[way.takes_ids] = ids, self._next(ids).known
                        break
                    except _RefusedError as error:
                        tried[way.takes_ids] = str(error)
                self._check_tokenizer()
            self.way = way
            first = plain[way.takes_ids]
            if first is not None and self._works(*first):
                return
        raise ModelError(
            f"{self.where} gives no log-probabilities that can be used (asked with token ids: "
            f"{tried.get(True)}; with text: {tried.get(False)}). "
            "Use llama.cpp's server, or: vllm serve MODEL."
        )

    def _works(self, ids: list[int], plain: dict[int, float]) -> bool:
        """Whether the way gives a token the log-probability that the plain request gave it."""
        for token in sorted(plain, key=lambda each: plain[each]):
            try:
                if self.way.name == "top":
                    found = self._next(ids)
                elif self.way.name == "logit_bias":
                    found = self._next(ids, token)
                elif self.way.name == "echo":
                    found = self._by_echo([*ids, token])[len(ids) - 1]
                else:
                    found = self._by_prompt_logprobs([*ids, token])[len(ids) - 1]
            except _RefusedError:
                return False
            except TargetError:  # not whole characters, which a prompt of text cannot have
                continue
            if token in found.known:  # else the text is cut elsewhere
                return abs(found.known[token] - plain[token]) < _SAME
        return False

    def _check_tokenizer(self) -> None:
        """Raises ParameterError where the server names tokens otherwise than the tokenizer."""
        for token, name in self.reader.names.items():
            text: str = self.tokenizer.decode([token])
            is_part = "\ufffd" in name + text  # of a character
            if not is_part and text.strip() and name.strip() and text.strip() != name.strip():
                raise ParameterError(
                    f"{self.where} reads token {token} as {name!r}, and the tokenizer as {text!r}. "
                    "Give the tokenizer of its model: tokenizer=."
                )


def unanswered(endpoint: Endpoint, error: Exception) -> ModelError:
    """The error of a server that fails."""
    return ModelError(
        f"The server at {endpoint.address} gave no answer: {problem(error, endpoint)}. "
        "See whether it runs."
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
    """A model behind a server that completes text: vLLM's, llama.cpp's, or one like them.

    Args:
        address: of the server, up to and including "/v1".
        origin: the `revision` of the tokenizer, and `trust_remote_code`, whether its code may run.
        model: its name there; None for the only one.
        tokenizer: name, folder or hub id of the model, whose tokenizer is read. None for the one
            that the server names (vLLM), or for the server's own (llama.cpp).
        api_key_env: the variable that holds the key. None: `OPENAI_API_KEY`, if `OPENAI_BASE_URL`
            is this address.
        logprobs: how many of the most probable tokens the server sends for each position; vLLM
            sends 20 at most unless started with `--max-logprobs`. The target's log-probability is
            exact with any number, except with servers that score the most probable tokens alone.
        concurrency: how many requests are under way.
        timeout: seconds after which a request counts as lost.
        max_retries: how often a request is sent again.

    Raises:
        ParameterError: a parameter outside its domain, or code to be trusted that the server
            would choose.
        ModelError: the server does not answer, or sends no log-probabilities that can be used.
    """
    check_count("concurrency", concurrency)
    check_count("logprobs", logprobs)
    if origin["trust_remote_code"] and tokenizer is None:
        raise ParameterError(
            "With trust_remote_code the server would say whose code runs. "
            "Name the model: tokenizer=."
        )
    endpoint = choose(address, None, api_key_env, user="A served model", error=ModelError)
    sender = client(endpoint, timeout=timeout, max_retries=max_retries)
    try:
        card = _card(endpoint, sender, model)
        tokens, generation_config, revision = _tokenizer(endpoint, sender, card, tokenizer, origin)
        server = Server(endpoint, sender, card["id"], tokens, len(tokens), logprobs, concurrency)
        server.find_way()
    except BaseException:
        sender.close()
        raise
    identity = ModelIdentity(f"{card['id']} at {endpoint.address}", revision, "text", "")
    length = card.get("max_model_len") or (card.get("meta") or {}).get("n_ctx")
    room = (
        length - 2 if isinstance(length, int) else None
    )  # the target is sent, and one is generated
    lm = ServedModel(
        server.predict,
        tokens,
        generation_config,
        identity,
        room,
        close=server.close,
        write=server.write,
    )
    weakref.finalize(lm, sender.close)
    return lm


class _Card(BaseModel, extra="allow"):
    """A model in a server's list."""

    id: StrictStr = Field(max_length=1000)
    max_model_len: Any = None  # vLLM's
    meta: dict[str, Any] | None = None  # llama.cpp's


class _Cards(BaseModel):
    data: list[_Card]


def list_models(endpoint: Endpoint, sender: openai.OpenAI) -> list[dict[str, Any]]:
    """What a server says about its models. Raises ModelError where that is not a list of models."""
    try:
        reply = sender.models.with_raw_response.list().http_response
        cards = _Cards.model_validate_json(reply.content).data
    except openai.OpenAIError as error:
        raise unanswered(endpoint, error) from error
    except ValidationError as error:
        raise ModelError(
            f"The server at {endpoint.address} sent no list of models; expected "
            '{"data": [{"id": ...}]}. See whether it is an OpenAI-compatible server.'
        ) from error
    return [card.model_dump() for card in cards]


def _card(endpoint: Endpoint, sender: openai.OpenAI, model: str | None) -> dict[str, Any]:
    """What the server says about the model of that name, or about its only one."""
    cards = list_models(endpoint, sender)
    fitting = [card for card in cards if model in (None, card["id"])]
    if len(fitting) != 1:
        names = ", ".join(str(card["id"]) for card in cards[:10])
        raise ParameterError(
            f"model is {model!r}; expected one of the server's: {names or 'none'}. Give model=."
        )
    return fitting[0]


def _tokenizer(
    endpoint: Endpoint,
    sender: openai.OpenAI,
    card: dict[str, Any],
    named: str | None,
    origin: dict[str, Any],
) -> tuple[Any, Any, str | None]:
    """The tokenizer of the model named, or the server's own; settings to generate; a revision."""
    if named is None and not card.get("root"):
        own = server_tokenizer(endpoint.address, sender, card)
        if own is not None:
            return own, None, None
    place = find(named or card.get("root") or card["id"])
    try:
        return *read_settings(place, origin), place.revision
    except NoiserError as error:
        if named is not None:
            raise
        raise ModelError(
            f"The server at {endpoint.address} does not say which tokenizer its model "
            f"{card['id']!r} has. Name the model by hub id or folder: tokenizer=."
        ) from error
