"""`POST /v1/chat/completions`: OpenAI's form with documents, and citations while the answer streams."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, Field, field_validator

from noiser.attribution.store import to_jsonable
from noiser.engine import Prefill, ask
from noiser.engine._prepare import check_length
from noiser.errors import NoiserError
from noiser.explain import Citations, cite
from noiser.model import LanguageModel
from noiser.model.writing import write
from noiser.server.jobs import Job, Models, error_body
from noiser.server.questions import Document, Message
from noiser.server.writing import Answer, Upstream
from noiser.text import encode_target, place_sources
from noiser.types import Accuracy, Prompt

Event = dict[str, Any]  # one chunk of the stream, in OpenAI's form; `citations` is a field of ours

_LONGEST = 512  # tokens of an answer where the request does not say; fewer where the model cannot read so many
_OURS = {
    "model",
    "messages",
    "documents",
    "accuracy",
    "stream",
    "stream_options",
}  # a server upstream gets the others


class Completion(BaseModel, extra="forbid"):
    """An answer to a chat, with citations of its documents: OpenAI's form. A field that it does not know is refused."""

    model: str = Field("", description="A model of /v1/models; empty for the first.")
    messages: list[Message] = Field(description="The chat, whose last message gets the documents.")
    documents: list[Document] = Field(
        [], description="Documents to answer from, with ids of your own."
    )
    accuracy: Accuracy = Field(
        "fast", description="Fast: in one pass, with a check. Accurate: documents are hidden."
    )
    stream: bool = Field(
        False, description="Whether the answer comes piece by piece, as server-sent events."
    )
    max_tokens: int | None = Field(None, ge=1, description="The longest answer.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The same.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy; null for the model's own setting."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Null for the model's own setting.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Of sampling.")
    stop: str | list[str] | None = Field(None, description="Texts with which the answer ends.")
    n: Literal[1] = Field(1, description="The number of answers.")
    stream_options: dict[str, Any] | None = Field(
        None, description="Ignored: usage is always sent."
    )

    @field_validator("documents")
    @classmethod
    def _differ(cls, documents: list[Document]) -> list[Document]:
        if len({document.id for document in documents}) < len(documents):
            raise ValueError("two documents have the same id")
        return documents

    def run(
        self, models: Models, upstream: Upstream | None, tell: Callable[[Event], object], job: Job
    ) -> None:
        """Writes the answer and cites its sentences as they end; `tell` hears of every chunk."""
        sources = [(document.title, document.text) for document in self.documents]
        head = {"id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion.chunk"}
        head |= {"created": int(time.time()), "model": self.model or next(iter(models.names))}

        def say(delta: Event, finish: str | None = None, **more: Any) -> None:
            tell(
                {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
            )

        with models.use(self.model, job) as lm:
            job.step("Writing")
            only = self.messages[0] if len(self.messages) == 1 and not lm.chats else {}
            text = only.get("content") if only.get("role") == "user" else None
            asked: Prompt = (
                text if isinstance(text, str) else self.messages
            )  # a model without chats reads a text
            prompt = place_sources(asked, sources) if sources else asked
            read = lm.encode(prompt)
            if upstream:
                answer = Answer()  # the other server's chunks are passed on as they are
                given = self.model_dump(exclude_unset=True, exclude=_OURS)
                writing = partial(upstream.write, prompt, given, answer, tell, job)
            else:
                stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
                answer = Answer(
                    lambda piece: say({"content": piece}), stops if lm.chats else [*stops, "\n"]
                )
                writing = partial(self._write, lm, read.token_ids, answer, say)
            options: Any = {
                "unit": "source",
                "contrast": False,
                "accuracy": self.accuracy,
                "progress": job.progress,
            }
            citations = list[Event]()
            with (
                answer.written_by(writing),
                _known(lm, read.token_ids if upstream and sources else ()),
            ):
                for spans in answer.sentences() if sources else ():
                    end = spans[-1][1]
                    said = answer.ids_until(end) or encode_target(
                        lm.tokenizer, read, answer.text[:end]
                    )
                    found = cite(lm, asked, sources, answer=said, target_unit=spans, **options)
                    for row, span in enumerate(spans):
                        citations.append(self._shown(found, row, span))
                        say({}, citations=citations[-1:])
            written = answer.ids or (answer.text and encode_target(lm.tokenizer, read, answer.text))
            used = {"prompt_tokens": len(read.token_ids), "completion_tokens": len(written)}
            say({}, citations=citations, usage={**used, "total_tokens": sum(used.values())})

    def answer(self, models: Models, upstream: Upstream | None, job: Job) -> Event:
        """The whole answer in OpenAI's form; the last chunk has all citations."""
        chunks = list[Event]()
        self.run(models, upstream, chunks.append, job)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        finish = next(
            (each["finish_reason"] for each in choices if each.get("finish_reason")), "stop"
        )
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": finish,
        }
        return {**chunks[-1], "object": "chat.completion", "choices": [choice]}

    def _write(
        self, lm: LanguageModel, ids: Sequence[int], answer: Answer, say: Callable[..., None]
    ) -> None:
        say({"role": "assistant", "content": ""})
        room = (lm.context_length or _LONGEST + len(ids)) - len(ids)
        most = self.max_completion_tokens or self.max_tokens or max(1, min(_LONGEST, room))
        check_length(lm, len(ids) + most)
        sampling: Any = {name: getattr(self, name) for name in ("temperature", "top_p", "seed")}
        answer.end(write(lm, ids, answer.add, max_new_tokens=most, **sampling))
        say({}, answer.finish)

    def _shown(self, found: Citations, row: int, span: tuple[int, int]) -> Event:
        """A sentence's citations, by the ids that were given."""
        sentence, check = found.sentences[row], found.attribution.info.get("check")

        ids = [document.id for document in self.documents]
        sources = [
            {"id": ids[one.number - 1], "score": one.score, "stderr": one.stderr}
            for one in sentence.citations
        ]
        pairs = [
            {
                "ids": [ids[n - 1] for n in pair.numbers],
                "kind": pair.kind,
                "score": pair.score,
                "stderr": pair.stderr,
            }
            for pair in sentence.pairs
        ]
        against = [
            {"id": ids[other.number - 1], "score": other.score, "stderr": other.stderr}
            for other in sentence.against
        ]
        place = {"start": span[0], "end": span[1], "text": sentence.text}
        if check:
            row_of_check = {name: check[name][row] for name in ("lds", "low", "high")}
            check = row_of_check | {name: check[name] for name in ("p", "predicts")}
        about = {
            "from_memory": sentence.from_memory,
            "method": found.attribution.method,
            "check": check,
        }
        return to_jsonable(
            {**place, "sources": sources, "pairs": pairs, "against": against, **about}
        )


@contextmanager
def _known(lm: LanguageModel, token_ids: tuple[int, ...]) -> Generator[None]:
    """Runs a prompt that another model reads; at the end forgets what is known of it, or of the model's own."""
    try:
        context = lm.context(token_ids) if token_ids else None
        if context and context.packs:
            ask(lm, Prefill(context, [len(token_ids) - 1]))
            lm.known[token_ids] = context.cache
        yield
    finally:
        lm.known.clear()


async def streamed(
    asked: Completion, models: Models, upstream: Upstream | None
) -> AsyncIterator[str]:
    """The answer's chunks as OpenAI's server sends them. A reader that goes away stops the work."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Event | None]()
    tell = partial(loop.call_soon_threadsafe, events.put_nowait)
    job, event = Job(lambda job: asked.run(models, upstream, tell, job)), Event()
    job.future.add_done_callback(lambda _: tell(None))
    try:
        while event is not None:
            yield f"data: {json.dumps(event, allow_nan=False)}\n\n" if event else ": waiting\n\n"
            try:
                event = await asyncio.wait_for(events.get(), 1)
            except TimeoutError:  # the next line notices a reader who has gone away
                event = Event()
        job.future.result()
        yield "data: [DONE]\n\n"
    except NoiserError as error:
        yield f"data: {json.dumps(error_body(error))}\n\n"
    finally:
        job.stop()
