"""Another server that writes the answers: its stream, read chunk by chunk."""

from __future__ import annotations

import codecs
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError

from noiser.errors import ModelError

if TYPE_CHECKING:
    import openai

    from noiser.endpoint import Endpoint
    from noiser.server.jobs import QuestionJob
    from noiser.server.writing import Answer


class _Delta(BaseModel):
    content: StrictStr | None = None


class _UpstreamChoice(BaseModel):
    index: StrictInt = Field(0, ge=0, le=0)  # one answer is asked for
    delta: _Delta | None = None
    finish_reason: StrictStr | None = None


class _Chunk(BaseModel):
    """The parts of a chunk that are read."""

    choices: list[_UpstreamChoice] = Field([], max_length=1)
    object: Any = None  # "error" in place of the field below, as some servers tell one
    error: Any = None


class Upstream(NamedTuple):
    """Another server, which writes the answers."""

    endpoint: Endpoint
    client: openai.OpenAI
    model: str

    @classmethod
    def at(cls, address: str, api_key_env: str | None = None) -> Upstream:
        """The server at an address up to and including "/v1".

        Raises ModelError where it does not answer, or names no model.
        """
        from noiser.model.http import choose, client, list_models

        endpoint = choose(address, None, api_key_env, "The server upstream", ModelError)
        there = client(endpoint, timeout=600, max_retries=2)
        try:
            cards = list_models(endpoint, there.with_options(timeout=10, max_retries=0))
            if not cards:
                raise ModelError(f"The server at {endpoint.address} has no model.")
        except ModelError:
            there.close()
            raise
        return cls(endpoint, there, cards[0]["id"])

    def close(self) -> None:
        """Closes the connections."""
        self.client.close()

    def write(
        self,
        messages: Any,
        settings: Any,
        answer: Answer,
        tell: Callable[[Any], object],
        job: QuestionJob,
    ) -> None:
        """Writes an answer; `tell` hears of every chunk of the server's stream.

        After `job.stop()` the connection is closed at once, also before the first byte.

        Raises:
            ModelError: the server fails, sends what is not a chunk, or ends without an end.
        """
        from noiser.endpoint import checked_while_reading, is_lost_connection
        from noiser.model.http import openai, unanswered

        create = self.client.chat.completions.with_streaming_response.create
        finish = None
        try:
            with (
                checked_while_reading(job.check),
                create(
                    stream=True, model=self.model, messages=messages, extra_body=settings
                ) as reply,
            ):
                for text in _events(_lines(reply.iter_bytes())):
                    if text.strip() == "[DONE]":
                        finish = finish or "stop"
                        break
                    data, chunk = _read(text)
                    for choice in chunk.choices:
                        answer.add((choice.delta and choice.delta.content) or "")
                        finish = choice.finish_reason or finish
                    tell(data)
            if finish is None:
                raise openai.OpenAIError("The answer was cut: neither finish_reason nor [DONE]")
        except Exception as error:
            if not isinstance(error, openai.OpenAIError) and not is_lost_connection(error):
                raise
            raise unanswered(self.endpoint, error) from error
        answer.end(finish)


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """The lines of a stream of events.

    httpx also splits them at other characters, which a JSON text may hold, such as U+2028.
    """
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")("replace"), translate=True
    )
    begun: list[str] = []
    for piece in chain(pieces, [b""]):
        rest, *others = decoder.decode(piece, final=not piece).split("\n")
        begun.append(rest)
        for other in others:
            yield "".join(begun)
            begun = [other]
    yield "".join(begun)


def _events(lines: Iterable[str]) -> Iterator[str]:
    """The data of server-sent events."""
    data: list[str] = []
    for line in lines:
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    # An event that no empty line ends was cut.


def _read(text: str) -> tuple[dict[str, Any], _Chunk]:
    """A chunk as it was sent, without citations, which are ours to make, and what is read of it.

    Raises OpenAIError for what is not a chunk, and for an error that the server tells.
    """
    from noiser.model.http import openai

    try:
        data = _parse(text)
        chunk = _Chunk.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the chunk"
        raise openai.OpenAIError(f"It sent a malformed chunk: {place}: {first['msg']}") from None
    except ValueError as error:
        raise openai.OpenAIError(f"It sent a malformed chunk: {error}") from None
    if chunk.error or chunk.object == "error":
        raise openai.OpenAIError(f"It sent an error: {chunk.error or data!r:.200}")
    data.pop("citations", None)
    return data, chunk


def _parse(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for numbers that JSON does not have."""
    try:
        value = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is refused
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


def _refuse_number(name: str) -> float:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse_number(digits[:20])
    return number
