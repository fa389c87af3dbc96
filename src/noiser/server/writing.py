"""An answer while it is written: by the model in this process, or by another server."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from noiser.errors import ModelError
from noiser.text import sentence_spans

if TYPE_CHECKING:
    import openai

    from noiser.endpoint import Endpoint
    from noiser.server.jobs import QuestionJob

_GONE_ON = re.compile(r"\s*\S+\s")  # a sentence has ended where a whole word follows it


class Answer:
    """The text so far. One thread writes, another reads sentences, and `tell` hears of every piece at once.

    Attributes:
        text: the text that was told, without any of the `stops` that may end it.
        ids: its tokens, where they are known.
        finish: "" while it is written, then the reason why it ended: "stop" or "length".
    """

    def __init__(
        self, tell: Callable[[str], object] = lambda _: None, stops: Sequence[str] = ()
    ) -> None:
        self.text, self.ids, self.finish = "", list[int](), ""
        self._tell, self._stops, self._held = tell, [stop for stop in stops if stop], ""
        self._lengths, self._news = list[tuple[int, int]](), SimpleQueue[None]()

    @contextmanager
    def written_by(self, write: Callable[[], None]) -> Generator[None]:
        """Writes in a thread. An error of the thread is raised here; one within ends the answer, and so the thread."""
        with ThreadPoolExecutor(1, "noiser-writer") as pool:
            written = pool.submit(write)
            written.add_done_callback(lambda _: self.end())
            try:
                yield
            except BaseException:
                self.end()
                raise
            written.result()

    def add(self, piece: str, ids: Sequence[int] = ()) -> bool:
        """Adds text and its tokens; whether it goes on. What may be the beginning of a stop stays back."""
        if self.finish:
            return False
        self._held += piece
        self.ids += ids
        self._lengths.append((len(self.text) + len(self._held), len(self.ids)))
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self._held = self._held[: min(places)]
            self.end("stop")
        else:
            self._pass_on(len(self._held) - max(map(len, self._stops), default=1) + 1)
        return not self.finish

    def end(self, finish: str = "stop") -> None:
        """Ends the answer, if it has not ended."""
        if not self.finish:
            self._pass_on(len(self._held))
            self.finish = finish
            self._news.put(None)

    def _pass_on(self, count: int) -> None:
        if count > 0:
            piece, self._held = self._held[:count], self._held[count:]
            self.text += piece
            self._tell(piece)
            self._news.put(None)

    def sentences(self) -> Iterator[list[tuple[int, int]]]:
        """Spans of sentences, as they end: those that ended since the last time."""
        done, ended = 0, False
        while not ended:
            ended, text = bool(self.finish), self.text
            found = [(start + done, end + done) for start, end in sentence_spans(text[done:])]
            if spans := [
                (a, b) for a, b in found if (ended and text[a:b].strip()) or _GONE_ON.match(text, b)
            ]:
                yield spans
                done = spans[-1][1]
            elif not ended:
                self._news.get()

    def ids_until(self, end: int) -> tuple[int, ...]:
        """The tokens that write the first `end` characters; none where they are not known."""
        count = next((tokens for length, tokens in self._lengths if length >= end), len(self.ids))
        return tuple(self.ids[:count])


class Upstream(NamedTuple):
    """Another server, which writes the answers."""

    endpoint: Endpoint
    client: openai.OpenAI
    model: str

    @classmethod
    def at(cls, address: str, api_key_env: str | None = None) -> Upstream:
        """The server at an address up to and including "/v1". Raises ModelError where it does not answer."""
        from noiser.model.http import choose, client, openai, unanswered

        endpoint = choose(address, None, api_key_env, "The server upstream", ModelError)
        there = client(endpoint, timeout=600, max_retries=2)
        try:
            return cls(
                endpoint,
                there,
                there.with_options(timeout=10, max_retries=0).models.list().data[0].id,
            )
        except (openai.OpenAIError, IndexError) as error:
            there.close()
            raise unanswered(endpoint, error) from error

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
        """Writes an answer; `tell` hears of every piece of the server's stream as it is."""
        from noiser.model.http import openai, unanswered

        finish, asked = (
            "stop",
            dict[str, Any](model=self.model, messages=messages, extra_body=settings),
        )
        try:
            with self.client.chat.completions.create(stream=True, **asked) as stream:
                for chunk in stream:
                    job.check()
                    for choice in chunk.choices:
                        answer.add(choice.delta.content or "")
                        finish = choice.finish_reason or finish
                    tell(chunk.to_dict())
        except openai.OpenAIError as error:
            raise unanswered(self.endpoint, error) from error
        answer.end(finish)
