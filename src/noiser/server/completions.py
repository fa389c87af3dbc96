"""`POST /v1/chat/completions`: OpenAI's form with documents.

Sentences are cited while the answer streams.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Annotated, Any

from pydantic import Field, field_validator
from torch.random import fork_rng

from noiser.attribution.store import to_jsonable
from noiser.engine import Prefill, ask
from noiser.engine._prepare import check_length
from noiser.errors import NoiserError
from noiser.explain import Citations, Quote, cite
from noiser.model import LanguageModel
from noiser.model.writing import write
from noiser.server.bounds import SOURCES, BoundedChat, BoundedName, Names, items
from noiser.server.jobs import Models, QuestionJob, error_body
from noiser.server.neutral import NeutralFields
from noiser.server.offsets import Offsets, citation_in_utf16
from noiser.server.questions import Document
from noiser.server.upstream import Upstream
from noiser.server.writing import Answer
from noiser.text import Encoding, encode_target, place_sources
from noiser.types import Accuracy, CitedUnit, Prompt

Event = dict[str, Any]
"""One chunk of the stream, in OpenAI's form; `citations` is a field of ours."""

Send = Callable[..., None]
"""Sends a chunk: called with its delta, why the answer ends (or None), and other fields."""

_MAX_TOKENS = 512
"""Tokens of an answer if the request has no limit; fewer where the model cannot read so many."""

_SETTINGS = {"max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop"}
"""Fields that a server upstream gets, beside the messages."""

_WAITING = ": waiting\n\n"
"""A comment in a stream of server-sent events."""


def _or_texts(schema: dict[str, Any]) -> None:
    """Says in a JSON schema that a list may also have texts."""
    schema["items"] = {"anyOf": [{"type": "string"}, schema["items"]]}


class CompletionBody(NeutralFields):
    """An answer to a chat, with citations of its documents: OpenAI's form.

    A field that it does not know is refused.
    """

    model: BoundedName = Field("", description="A model of /v1/models; empty for the first.")
    messages: BoundedChat = Field(description="The chat, whose last message gets the documents.")
    documents: Annotated[list[Document], *items(SOURCES)] = Field(
        [],
        description="Documents to answer from, with ids of your own; or texts, whose ids are their "
        'numbers, "1" for the first.',
        json_schema_extra=_or_texts,
    )
    accuracy: Accuracy = Field(
        "fast", description="Fast: in one pass, with a check. Accurate: documents are hidden."
    )
    unit: CitedUnit = Field(
        "auto",
        description="What is cited: documents, and the sentences of those that matter; "
        "source: documents alone, which is quicker.",
    )
    offsets: Offsets = "code_points"
    stream: bool | None = Field(
        False, description="Whether the answer comes piece by piece, as server-sent events."
    )
    max_tokens: int | None = Field(None, ge=1, description="The longest answer.")
    max_completion_tokens: int | None = Field(None, ge=1, description="The same.")
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy; null for the model's own setting."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Null for the model's own setting.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="Of sampling.")
    stop: BoundedName | Names | None = Field(None, description="Texts with which the answer ends.")

    @field_validator("documents")
    @classmethod
    def _with_ids(cls, documents: list[Document]) -> list[Document]:
        for number, document in enumerate(documents, 1):
            document.id = document.id or str(number)
        if len({document.id for document in documents}) < len(documents):
            raise ValueError("two documents have the same id")
        return documents

    def run(
        self,
        models: Models,
        upstream: Upstream | None,
        tell: Callable[[Event], object],
        job: QuestionJob,
    ) -> Answer:
        """Writes the answer and cites its sentences as they end; `tell` gets every chunk."""
        sources = [(document.title, document.text) for document in self.documents]
        send = self._sender(models, tell)
        lm = models.find(self.model, job)
        question = self._question(lm)
        prompt = place_sources(question, sources) if sources else question
        encoding = lm.encode(prompt)
        if upstream:
            answer = Answer()  # the other server's chunks are passed on as they are
            settings = self.model_dump(exclude_unset=True, include=_SETTINGS)
            write_answer = partial(upstream.write, prompt, settings, answer, tell, job)
        else:
            answer = Answer(lambda piece: send({"content": piece}), self._stops(lm))
            write_answer = partial(self._write, lm, encoding.token_ids, answer, send)
        turn = partial(models.use, self.model, job)

        citations: list[Event] = []
        # While another server writes, the model is free for others between two sentences.
        with (
            nullcontext() if upstream else turn(),
            answer.written_by(job.own(write_answer)),
            _forgetting(lm),
        ):
            job.step("Writing")
            if upstream and sources and not lm.is_text_only:
                with turn():
                    _run_ahead(lm, encoding.token_ids)
            for spans in answer.sentences() if sources else ():
                job.step("Citing")
                with turn():
                    for citation in self._cite(lm, question, encoding, answer, spans, job):
                        citations.append(citation)
                        send({}, citations=[citation])
                if not answer.finish:
                    job.step("Writing")
        if lm.is_text_only:  # its tokens are not known
            send({}, citations=citations, warnings=job.warnings)
            return answer
        written = answer.ids
        if not written and answer.text:
            written = encode_target(lm.tokenizer, encoding, answer.text)
        usage = {
            "prompt_tokens": len(encoding.token_ids),
            "completion_tokens": len(written),
            "total_tokens": len(encoding.token_ids) + len(written),
        }
        send({}, citations=citations, usage=usage, warnings=job.warnings)
        return answer

    def _sender(self, models: Models, tell: Callable[[Event], object]) -> Send:
        """A function that completes a chunk and tells it."""
        head = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.model or next(iter(models.names)),
        }

        def send(delta: Event, finish: str | None = None, **more: Any) -> None:
            choice = {"index": 0, "delta": delta, "finish_reason": finish}
            tell({**head, "choices": [choice], **more})

        return send

    def _question(self, lm: LanguageModel) -> Prompt:
        """The chat; for a model without chats, the text of a single message from the user."""
        if len(self.messages) == 1 and not lm.chats:
            message = self.messages[0]
            text = message.get("content")
            if message.get("role") == "user" and isinstance(text, str):
                return text
        return self.messages

    def _stops(self, lm: LanguageModel) -> list[str]:
        """The texts that end the answer. A model without chats would go on after its first line."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return stops if lm.chats else [*stops, "\n"]

    def _cite(
        self,
        lm: LanguageModel,
        question: Prompt,
        encoding: Encoding,
        answer: Answer,
        spans: list[tuple[int, int]],
        job: QuestionJob,
    ) -> Iterator[Event]:
        """The citations of each sentence that has ended, as the stream has them."""
        end = spans[-1][1]
        written: str | Sequence[int] = answer.ids_until(end)
        if lm.is_text_only:
            written = answer.text[:end]
        elif not written:  # another server wrote the answer
            context_length = lm.context_length
            text = answer.text[:end]
            written = encode_target(lm.tokenizer, encoding, text, context_length=context_length)
        options: dict[str, Any] = {
            "answer": written,
            "target_unit": spans,
            "unit": self.unit,
            "contrast": False,
            "accuracy": "accurate" if lm.is_text_only else self.accuracy,
            "progress": job.progress,
        }
        sources = [(document.title, document.text) for document in self.documents]
        cited = cite(lm, question, sources, **options)
        for row, (start, end) in enumerate(spans):
            piece = answer.text[start:end]
            begin = start + len(piece) - len(piece.lstrip())
            citation = self._citation(cited, row, begin, piece.strip())
            if self.offsets == "utf16":
                documents = [document.text for document in self.documents]
                citation = citation_in_utf16(citation, answer.text[:end], documents)
            yield citation

    def answer(self, models: Models, upstream: Upstream | None, job: QuestionJob) -> Event:
        """The whole answer in OpenAI's form; the last chunk has all citations."""
        chunks: list[Event] = []
        answer = self.run(models, upstream, chunks.append, job)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": answer.finish,
        }
        return {**chunks[-1], "object": "chat.completion", "choices": [choice]}

    def _write(self, lm: LanguageModel, ids: Sequence[int], answer: Answer, send: Send) -> None:
        """Writes the answer to a prompt of these tokens with the model itself."""
        send({"role": "assistant", "content": ""})
        limit = self.max_completion_tokens or self.max_tokens
        if not limit:
            limit = _MAX_TOKENS
            if lm.context_length:
                limit = max(1, min(limit, lm.context_length - len(ids)))
        check_length(lm, len(ids) + limit)
        sampling: Any = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        with lm.alone() as let_others:

            def hear(piece: str, tokens: Sequence[int]) -> bool:
                goes_on = answer.add(piece, tokens)
                if goes_on:
                    # Others may write meanwhile, who draw random numbers, too.
                    with fork_rng(enabled=self.seed is not None):
                        let_others()
                return goes_on

            reason = write(lm, ids, hear, max_new_tokens=limit, **sampling)
        answer.end(reason)
        send({}, answer.finish)

    def _citation(self, cited: Citations, row: int, start: int, text: str) -> Event:
        """The citations of a sentence of that text and start, by the ids of the request."""
        ids = [document.id for document in self.documents]
        sentence = cited.sentences[row]
        sources: list[Event] = []
        for citation in sentence.citations:
            sources.append(
                {
                    "id": ids[citation.number - 1],
                    "number": citation.number,
                    "score": citation.score,
                    "stderr": citation.stderr,
                    "share": citation.share,
                    "quotes": [_quoted(quote) for quote in citation.quotes],
                }
            )
        pairs: list[Event] = []
        for pair in sentence.pairs:
            pairs.append(
                {
                    "ids": [ids[number - 1] for number in pair.numbers],
                    "kind": pair.kind,
                    "score": pair.score,
                    "stderr": pair.stderr,
                }
            )
        alternatives: list[Event] = []
        for source in sentence.alternatives:
            alternatives.append(
                {
                    "id": ids[source.number - 1],
                    "number": source.number,
                    "says": source.says,
                    "probability": source.probability,
                    "loss": source.loss,
                }
            )
        return to_jsonable(
            {
                "start": start,
                "end": start + len(text),
                "text": text,
                "log_probability": sentence.log_probability,
                "loss": sentence.loss,
                "sources": sources,
                "pairs": pairs,
                "alternatives": alternatives,
                "verdict": sentence.verdict,
                "method": cited.attribution.method,
                "check": _check_of_row(cited.attribution.info.get("check"), row),
            }
        )


def _quoted(quote: Quote) -> Event:
    """A part of a document, with its place in the document's own text."""
    return {
        "text": quote.text,
        "start": quote.start_in_source,
        "end": quote.end_in_source,
        "score": quote.score,
    }


def _check_of_row(check: Any, row: int) -> Any:
    """What the check of all sentences says about one of them; None without a check."""
    if not check:
        return check
    return {
        "lds": check["lds"][row],
        "low": check["low"][row],
        "high": check["high"][row],
        "p": check["p"],
        "predicts": check["predicts"],
    }


def _run_ahead(lm: LanguageModel, token_ids: tuple[int, ...]) -> None:
    """Runs a prompt that another model answers, so that citing need not run it again."""
    context = lm.context(token_ids)
    if context.supports_packing:
        ask(lm, Prefill(context, [len(token_ids) - 1]))
        lm.known[token_ids] = context.cache


@contextmanager
def _forgetting(lm: LanguageModel) -> Generator[None]:
    """At its end, what the model knows about prompts that have run is forgotten."""
    try:
        yield
    finally:
        lm.known.clear()


def streamed(
    completion: CompletionBody, models: Models, upstream: Upstream | None
) -> AsyncIterator[str]:
    """The answer's chunks as OpenAI's server sends them. A reader that goes away stops the work."""
    loop = asyncio.get_running_loop()
    events = asyncio.Queue[Event | None]()
    tell = partial(loop.call_soon_threadsafe, events.put_nowait)
    job = models.begin(lambda job: completion.run(models, upstream, tell, job))
    job.future.add_done_callback(lambda _: tell(None))
    return _lines(job, events)


async def _lines(job: QuestionJob, events: asyncio.Queue[Event | None]) -> AsyncIterator[str]:
    try:
        yield _WAITING
        while True:
            try:
                event = await asyncio.wait_for(events.get(), 1)
            except TimeoutError:
                # A comment: only sending notices a reader who has gone away.
                yield f": {job.state['label']}\n\n"
                continue
            if event is None:
                break
            yield f"data: {json.dumps(event, allow_nan=False)}\n\n"
        job.future.result()
        yield "data: [DONE]\n\n"
    except NoiserError as error:
        yield f"data: {json.dumps(error_body(error))}\n\n"
    finally:
        job.stop()
