"""Answers of chat endpoints: one request to one answer, and the store that keeps each of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import openai

from noiser.errors import CacheError

WHOLE = frozenset({"stop", "eos", "end_turn", "none", "", "tool_calls", "function_call"})
"""Why a complete reply ended, in lower case."""

CUT = frozenset({"length", "max_tokens"})
"""Why a reply was cut off. One that ended for any other reason, such as a filter, is no answer."""

_TABLE = (
    "CREATE TABLE IF NOT EXISTS answers (key PRIMARY KEY, question, answer, tokens INTEGER, job)"
)


class UnansweredError(Exception):
    """No request was sent, or what came back is not a chat completion."""


class ChatAnswer(NamedTuple):
    """What a chat endpoint replied to one request.

    Attributes:
        reply: the text; of a refusal its own text.
        finish: why it ended, in the endpoint's words, or "refusal".
        model: the model that replied, as it names itself.
        usage: tokens read and written, where the endpoint says so.
        calls: (function, arguments as JSON) of each tool call.
        fingerprint: the version of the endpoint's system, or "".
        first: (token, log-probability) of the alternatives for the first token, where asked for.
        reasons: whether the model wrote more than its answer: tokens of reasoning.
    """

    reply: str
    finish: str
    model: str
    usage: tuple[int, int] | None
    calls: tuple[tuple[str, str], ...] = ()
    fingerprint: str = ""
    first: tuple[tuple[str, float], ...] = ()
    reasons: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the endpoint answered: not filtered, not refused, not empty."""
        ended = self.finish.lower() in WHOLE | CUT
        return ended and bool(self.reply.strip() or self.calls)


def complete(
    connection: openai.OpenAI, body: Mapping[str, Any], parameters: Mapping[str, Any]
) -> ChatAnswer:
    """The answer to one request of `chat.completions`.

    Raises:
        openai.OpenAIError: the request failed for good.
        UnansweredError: a web page came back, or half an answer.
    """
    response: Any = None
    try:
        response = connection.chat.completions.create(**body, extra_body=dict(parameters))
        choice = response.choices[0]
        usage = response.usage
        text = choice.message.content or ""
        refusal = choice.message.refusal or ""
        finish = "refusal" if refusal and not text else str(choice.finish_reason)
        return ChatAnswer(
            text or refusal,
            finish,
            response.model,
            (usage.prompt_tokens, usage.completion_tokens) if usage else None,
            _calls(choice.message),
            response.system_fingerprint or "",
            _first_token(choice),
            _reasons(choice.message, usage),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UnansweredError(f"not a chat completion: {str(response)[:100]}") from None


def _reasons(message: Any, usage: Any) -> bool:
    """Whether a reply has reasoning: as text (Ollama, vLLM), counted (OpenAI), or in the total
    alone (Gemini).
    """
    if getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None):
        return True
    if usage is None:
        return False
    details = usage.completion_tokens_details
    if details is not None and details.reasoning_tokens:
        return True
    return (usage.total_tokens or 0) > usage.prompt_tokens + usage.completion_tokens


def _calls(message: Any) -> tuple[tuple[str, str], ...]:
    """The functions that a message calls, with their arguments."""
    calls = message.tool_calls or ()
    return tuple((call.function.name, call.function.arguments or "{}") for call in calls)


def _first_token(choice: Any) -> tuple[tuple[str, float], ...]:
    """The alternatives for an answer's first token; none where the endpoint sends none."""
    content = choice.logprobs.content if choice.logprobs else None
    if not content:
        return ()
    alternatives = {content[0].token: content[0].logprob}
    for other in content[0].top_logprobs or ():
        alternatives[other.token] = other.logprob
    return tuple(alternatives.items())


class AnswerStore:
    """Answers in an SQLite file, each written before it is used: none is paid for twice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, key: str) -> ChatAnswer | None:
        """The stored answer of a key, or None."""
        with self._table() as table:
            row = table.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return _restored(row[0]) if row else None

    def put(self, key: str, question: str, answer: ChatAnswer, tokens: int, job: str) -> None:
        """Stores an answer, the question as JSON, and the tokens that a job paid for."""
        fields = answer._asdict()
        for name, default in ChatAnswer._field_defaults.items():
            if fields[name] == default:
                del fields[name]
        row = (key, question, json.dumps(fields), tokens, job)
        with self._table() as table:
            table.execute("REPLACE INTO answers VALUES (?, ?, ?, ?, ?)", row)

    def paid(self, job: str) -> int:
        """The tokens that a job has paid for."""
        with self._table() as table:
            query = "SELECT coalesce(sum(tokens), 0) FROM answers WHERE job = ?"
            return table.execute(query, (job,)).fetchone()[0]

    @contextmanager
    def _table(self) -> Generator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60)) as connection, connection:
                connection.execute(_TABLE)
                yield connection
        except (sqlite3.Error, OSError) as error:
            raise CacheError(
                f"Cannot use {self.path}: {error}. Make room, or choose another cache_dir."
            ) from error


def _restored(text: str) -> ChatAnswer:
    """An answer from its JSON, in which tuples are lists."""
    fields: dict[str, Any] = json.loads(text)
    for name in ("calls", "first"):
        fields[name] = tuple(tuple(each) for each in fields.get(name, ()))
    if fields["usage"]:
        fields["usage"] = tuple(fields["usage"])
    return ChatAnswer(**fields)
