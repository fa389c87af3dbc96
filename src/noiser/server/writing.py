"""An answer while it is written, by the model in this process or by another server."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from queue import SimpleQueue

from noiser.text import sentence_spans

_GONE_ON = re.compile(r"\s*\S+\s")  # a sentence has ended where a whole word follows it


class Answer:
    """The text so far. One thread writes, another reads sentences, and `tell` hears of every piece
    at once.

    Attributes:
        text: the text that was told, without any of the `stops` that may end it.
        ids: its tokens, where they are known.
        finish: "" while it is written, then the reason why it ended: "stop" or "length".
    """

    def __init__(
        self, tell: Callable[[str], object] = lambda _: None, stops: Sequence[str] = ()
    ) -> None:
        self.text, self.ids, self.finish = "", list[int](), ""
        self._tell = tell
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._lengths, self._news = list[tuple[int, int]](), SimpleQueue[None]()

    @contextmanager
    def written_by(self, write: Callable[[], None]) -> Generator[None]:
        """Writes in a thread. An error of the thread is raised here; one within ends the answer,
        and so the thread.
        """
        written = Future[None]()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                written.set_exception(error)
            else:
                written.set_result(None)
            self.end()

        # A daemon, so that an end of the server waits for no answer.
        threading.Thread(target=run, name="noiser-writer", daemon=True).start()
        try:
            yield
        except BaseException:
            self.end()
            wait([written])
            raise
        written.result()

    def add(self, piece: str, ids: Sequence[int] = ()) -> bool:
        """Adds text and its tokens; whether it goes on. What may be the beginning of a stop stays
        back.
        """
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
            piece = self._held[:count]
            self._held = self._held[count:]
            self.text += piece
            self._tell(piece)
            self._news.put(None)

    def sentences(self) -> Iterator[list[tuple[int, int]]]:
        """Spans of sentences, as they end: those that ended since the last time."""
        done = 0
        ended = False
        while not ended:
            ended = bool(self.finish)
            text = self.text
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
