"""Chat models that are known by their text alone: OpenAI, Claude, Gemini, Ollama, LM Studio.

The probability of an answer is the rate at which the endpoint gives it again. Such a model is run
like any other: an input is messages without some of their text, and its logits are those of the
answers that are explained and of "another answer".
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_count, check_positive, random_state_kept
from noiser.errors import (
    DependencyError,
    ModelError,
    OutOfTimeError,
    ParameterError,
    PromptError,
)
from noiser.files import cache_root
from noiser.model.abilities import Abilities
from noiser.model.language_model import LanguageModel
from noiser.model.packing import Branch, Context
from noiser.model.same import SameAnswer, contains, first_probability, same_of
from noiser.notices import warn
from noiser.text import Encoding, check_messages, encode_messages, messages_without
from noiser.types import ModelIdentity

try:
    import openai

    from noiser.answers import AnswerStore, ChatAnswer, UnansweredError, complete
    from noiser.endpoint import Endpoint, choose, client, is_fatal, problem, reason_of
except ImportError as error:
    raise DependencyError("A chat model needs the package openai.", "openai") from error

REPEATS = 5
"""Requests for each input where an endpoint does not give the same answer twice."""

MAX_CALLS = 100
"""The most requests of a question."""

TINY = 1e-6
"""A rate of 0 or 1 counts as this far from it, since a logarithm is taken."""

ALTERNATIVES = 20
"""Alternatives for the first token, the most that OpenAI sends."""

LONGER = 128
"""An answer to a part of a chat has at most so many tokens more than twice those of the answer to
all of it: a longer one is another answer."""

_LIMITS = ("max_tokens", "max_completion_tokens")
_MOST_UNANSWERED = 0.1
_FEWEST_TO_JUDGE = 10  # requests, before their share of unanswered ones counts

Messages = Sequence[Mapping[str, Any]]


@dataclass(eq=False)
class Calls:
    """The requests of one question.

    Attributes:
        most: the most that may be made.
        made: how many have been made.
        cached: answers that were stored before.
        read, written: tokens of the requests that were made.
        unanswered: filtered, refused and empty replies, which count as another answer.
        models, fingerprints: the names and versions that the endpoint reported.
    """

    most: int
    made: int = 0
    cached: int = 0
    read: int = 0
    written: int = 0
    unanswered: int = 0
    models: set[str] = field(default_factory=set[str])
    fingerprints: set[str] = field(default_factory=set[str])

    def note(self, answer: ChatAnswer) -> None:
        """Counts an answer, be it stored or new."""
        self.unanswered += not answer.is_whole
        if answer.model:
            self.models.add(answer.model)
        if answer.fingerprint:
            self.fingerprints.add(answer.fingerprint)


class Explained(NamedTuple):
    """A target: the answer, or a part of it, and how another answer is compared with it."""

    answer: ChatAnswer
    same: SameAnswer


@dataclass(eq=False, kw_only=True)
class ChatContext(Context):
    """A chat as it is asked, and the answers that are explained.

    Attributes:
        messages: the chat.
        encoding: its text, of which inputs keep some characters.
        calls: the requests so far.
        parameters: of each request.
        repeats: requests for each input; None until it is known.
        same: the name of how answers are compared.
        answers: the answers to the whole chat.
        explained: the targets.
        foil: the first token of a foil, or "".
    """

    messages: Messages
    encoding: Encoding
    calls: Calls
    parameters: Mapping[str, Any]
    repeats: int | None = None
    same: str = "text"
    answers: Sequence[ChatAnswer] = ()
    explained: tuple[Explained, ...] = ()
    foil: str = ""

    @property
    def samples(self) -> int:
        """Requests for each value."""
        return self.repeats or 1

    @property
    def left(self) -> int | None:
        """The requests that may still be made."""
        return self.calls.most - self.calls.made

    @property
    def facts(self) -> dict[str, Any]:
        """What the requests cost, and who answered them."""
        calls = self.calls
        return {
            "calls": calls.made,
            "cached": calls.cached,
            "tokens_read": calls.read,
            "tokens_written": calls.written,
            "unanswered": calls.unanswered,
            "repeats": self.repeats,
            "same": self.same,
            "max_calls": calls.most,
            "endpoint_model": ", ".join(sorted(calls.models)),
            "fingerprint": ", ".join(sorted(calls.fingerprints)),
            "token_forwards": 0,
            "passes": 0,
        }

    def parameters_of(self, messages: Messages) -> Mapping[str, Any]:
        """The parameters of the request for some messages, with a limit for a part of the chat.

        Without its question, a small model may write until its context is full. There is no limit
        of ours beside the user's, or where tokens of reasoning would count.
        """
        is_part = self.answers and messages != self.messages
        has_limit = any(name in self.parameters for name in _LIMITS)
        if not is_part or has_limit or any(answer.reasons for answer in self.answers):
            return self.parameters
        longest = max(_tokens_of(answer) for answer in self.answers)
        return {**self.parameters, "max_tokens": 2 * longest + LONGER}

    def logits(
        self, answers: Sequence[ChatAnswer], tokens: Sequence[int]
    ) -> Float[Tensor, " vocabulary"]:
        """Log-probabilities of some targets, and of another answer, whose id is the last one."""
        row = torch.full((len(self.explained) + 2,), -torch.inf)
        left = 1.0
        for token in tokens:
            rate = min(1 - TINY, max(TINY, self._rate(answers, token)))
            row[token] = torch.tensor(rate, dtype=torch.float64).log()
            left -= rate
        row[-1] = torch.tensor(max(TINY, left), dtype=torch.float64).log()
        return row

    def _rate(self, answers: Sequence[ChatAnswer], token: int) -> float:
        """The share of answers that are the same as a target; or the foil's probability."""
        total = 0.0
        for answer in answers:
            if not answer.is_whole:
                continue
            if token < len(self.explained):
                target = self.explained[token]
                total += target.same(target.answer, answer)
            else:
                total += first_probability(answer, self.foil)
        return total / len(answers)


def _tokens_of(answer: ChatAnswer) -> int:
    """The tokens of an answer; where the endpoint does not say, at most as many as its bytes."""
    if answer.usage is not None:
        return answer.usage[1]
    texts = [answer.reply, *(text for call in answer.calls for text in call)]
    return len("".join(texts).encode())


class _Job(NamedTuple):
    """One input, and the numbers of the samples that are wanted of it."""

    context: ChatContext
    messages: Messages
    samples: range


class ChatModel(LanguageModel):
    """A model behind an endpoint of `chat.completions`, of which the text alone is known.

    `load_chat` has the arguments.
    """

    needs_internals = False
    accepts_embeddings = False
    is_text_only = True

    def __init__(
        self,
        model: str,
        endpoint: Endpoint,
        *,
        temperature: float,
        parameters: Mapping[str, Any],
        repeats: int | None,
        same: str | Callable[[str, str], Any],
        max_calls: int,
        concurrency: int,
        max_retries: int,
        timeout: float,
        store: AnswerStore,
        announce: bool,
    ) -> None:
        # Nothing of a network is there, so the base class is not initialised.
        self.model: Any = torch.nn.Identity()
        self.tokenizer: Any = None
        self.identity = ModelIdentity(f"chat:{model}", None, "text", "chat endpoint")
        self.name = model
        self.endpoint = endpoint
        self.temperature = temperature
        self.parameters = dict(parameters)
        self.repeats = repeats
        self.same_name = same if isinstance(same, str) else getattr(same, "__name__", "function")
        self.same: SameAnswer = same_of(same)
        self.max_calls = max_calls
        self.concurrency = concurrency
        self.store = store
        self.announces = announce
        self.context_length = None
        self.vocabulary_size = self.embedding_dim = 1
        self.batch_tokens = 2**40  # characters cost nothing here
        self.logit_rows = 4 * concurrency  # values in a pass: the time is looked at between passes
        self.chat_template_kwargs: Mapping[str, Any] = {}
        self.known = {}
        self.abilities = Abilities(embedding_scale=1.0, supports_packing=False)
        self.end_tokens = frozenset()
        self._client = client(endpoint, timeout=timeout, max_retries=max_retries)
        weakref.finalize(self, self._client.close)
        # Names of parameters that the endpoint refuses, and the names that it takes for them.
        self._renamed: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def answers_to(self, context: ChatContext, kept: Sequence[int]) -> list[ChatAnswer] | None:
        """The answers to a chat with some of its characters; None where no request is left.

        Those that were asked before are stored.
        """
        messages = messages_without(context.messages, context.encoding, kept)
        job = _Job(context, messages, range(context.samples))
        (answers,) = self._ask_all([job])
        return None if answers is None else [*answers]

    def most_usual(self, answers: Sequence[ChatAnswer]) -> ChatAnswer:
        """The answer that is the same as most of the others; of equally usual ones the first.

        A model with a temperature gives a rare answer first now and then: explained, every unit
        would seem not to matter, as no input leads to it again.
        """
        agreement = [sum(self.same(answer, other) for other in answers) for answer in answers]
        return answers[agreement.index(max(agreement))]

    def asking(self, repeats: int) -> ChatModel:
        """The same model, which asks each input so many times."""
        other = copy(self)
        other.repeats = repeats
        return other

    @property
    def device(self) -> torch.device:
        """Values are on the CPU."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Rates are float32."""
        return torch.float32

    @property
    def chats(self) -> bool:
        """It reads nothing but chats."""
        return True

    @property
    def reads_tools(self) -> bool:
        """The endpoint takes tools and their calls."""
        return True

    @property
    def where(self) -> str:
        """The model, as the subject of a sentence."""
        return f"{self.name} at {self.endpoint.address}"

    def encode(
        self,
        prompt: Any,
        *,
        rendered: str | None = None,  # noqa: ARG002 - the text of a chat is always the same
        documents: bool = False,  # noqa: ARG002
        pictures: bool = False,  # noqa: ARG002 - an endpoint's pictures are not explained
    ) -> Encoding:
        """Chat messages as text; see `noiser.text.encode_messages`.

        Raises PromptError for a text: an endpoint reads messages.
        """
        if isinstance(prompt, Mapping):
            prompt = prompt.get("messages", prompt)
        if isinstance(prompt, str):
            raise PromptError(
                "A chat endpoint reads messages: pass [{'role': 'user', 'content': ...}], or "
                "--chat on the command line."
            )
        return encode_messages(check_messages(prompt))

    def chat_context(
        self, messages: Messages, encoding: Encoding, max_tokens: int | None, max_calls: int | None
    ) -> ChatContext:
        """A chat that has yet to be asked."""
        parameters: dict[str, Any] = {"temperature": self.temperature}
        if max_tokens is not None:
            parameters["max_tokens"] = max_tokens
        if self.same_name == "first":
            parameters |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
        tools = self.chat_template_kwargs.get("tools")
        if tools:
            parameters["tools"] = tools
        repeats = self.repeats
        if repeats is None and self.same_name == "first":
            repeats = 1
        if repeats is None and parameters["temperature"] != 0:
            repeats = REPEATS
        positions = torch.arange(len(encoding.token_ids), dtype=torch.float32)
        return ChatContext(
            positions[:, None],
            1.0,
            messages=[dict(message) for message in messages],
            encoding=encoding,
            calls=Calls(max_calls or self.max_calls),
            parameters={**parameters, **self.parameters},
            repeats=repeats,
            same=self.same_name,
        )

    def run(
        self, branches: Sequence[Branch], **_: Any
    ) -> list[Float[Tensor, "one wanted vocabulary"]]:
        """The log-probabilities of each branch.

        A branch without tokens is a whole chat, whose answers are kept in its context.

        Raises OutOfTimeError where `max_calls` leave no request for a branch. Its `found` has the
        log-probabilities of the others, and None.
        """
        jobs: list[_Job] = []
        for branch in branches:
            context = self._context_of(branch)
            kept = [int(position) for position in branch.inputs.flatten().tolist()]
            is_clean = not any(branch.tokens)
            messages = context.messages
            if not is_clean:
                messages = messages_without(context.messages, context.encoding, kept)
            jobs.append(_Job(context, messages, range(self._samples(context))))
        answers = self._ask_all(jobs)
        answers = self._settle_repeats(jobs, answers)
        self._check_unanswered(jobs)

        rows: list[Tensor | None] = []
        for branch, job, found in zip(branches, jobs, answers, strict=True):
            if found is None:
                rows.append(None)
            elif not any(branch.tokens):
                job.context.answers = found
                rows.append(torch.zeros(1, len(branch.wanted), 1))
            else:
                logits = [job.context.logits(found, tokens) for tokens in branch.tokens]
                rows.append(torch.stack(logits)[None])
        whole = [row for row in rows if row is not None]
        if len(whole) == len(rows):
            return whole
        most = min(
            job.context.calls.most for job, row in zip(jobs, rows, strict=True) if row is None
        )
        raise OutOfTimeError(
            f"max_calls={most} requests were used up before there was a result. Allow more, or "
            "take larger units, such as unit='sentence', or the method 'search'.",
            rows,
        )

    def _context_of(self, branch: Branch) -> ChatContext:
        assert isinstance(branch.context, ChatContext), "made by chat_context"
        return branch.context

    def _samples(self, context: ChatContext) -> int:
        """Requests for an input: two of a whole chat show whether answers repeat."""
        return 2 if context.repeats is None else context.repeats

    def _settle_repeats(
        self, jobs: Sequence[_Job], answers: Sequence[Sequence[ChatAnswer] | None]
    ) -> list[Sequence[ChatAnswer] | None]:
        """Decides how often each input of a chat is asked, by its two first answers."""
        settled = [*answers]
        differ: list[int] = []
        for index, (job, found) in enumerate(zip(jobs, answers, strict=True)):
            context = job.context
            if found is None or context.repeats is not None:
                continue
            refuses_temperature = "temperature" in self._renamed
            if not refuses_temperature and self.same(found[0], found[1]) >= 1 - TINY:
                context.repeats = 1
                settled[index] = found[:1]
            else:
                context.repeats = REPEATS
                differ.append(index)
        if differ:
            warn(
                f"{self.where} does not give the same answer twice, so each input is asked "
                f"{REPEATS} times. Set repeats= to change that.",
            )
            again = [jobs[index]._replace(samples=range(REPEATS)) for index in differ]
            for index, found in zip(differ, self._ask_all(again, seen=2), strict=True):
                settled[index] = found
        return settled

    def _ask_all(self, jobs: Sequence[_Job], seen: int = 0) -> list[Sequence[ChatAnswer] | None]:
        """The answers to each job, with `concurrency` requests under way.

        What is left out where `max_calls` are reached depends on the order alone. The first `seen`
        samples of each job have been counted before.
        """
        futures: dict[str, Future[ChatAnswer]] = {}
        keys_of: list[list[str] | None] = []
        pool = ThreadPoolExecutor(self.concurrency, "noiser-chat")
        try:
            with random_state_kept():  # the client's waits are random
                for job in jobs:
                    keys_of.append(self._submit(pool, job, futures, seen))
                answers: list[Sequence[ChatAnswer] | None] = []
                for keys in keys_of:
                    found = None if keys is None else [futures[key].result() for key in keys]
                    answers.append(found)
            return answers
        finally:  # also when the user interrupts: what has not begun is not sent
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, job: _Job, futures: dict[str, Future[ChatAnswer]], seen: int
    ) -> list[str] | None:
        """Sends the requests of a job that no stored answer has; None where too few are left."""
        calls = job.context.calls
        keys: list[str] = []
        missing: dict[str, str] = {}
        for sample in job.samples:
            question, key = self._question(job, sample)
            keys.append(key)
            if key in futures:
                continue
            stored = self.store.get(key)
            if stored is None:
                missing[key] = question
            else:
                futures[key] = Future()
                futures[key].set_result(stored)
                if sample >= seen:
                    calls.cached += 1
                    calls.note(stored)
        if calls.made + len(missing) > calls.most:
            return None
        calls.made += len(missing)
        for key, question in missing.items():
            futures[key] = pool.submit(self._ask, job, key, question)
        return keys

    def _question(self, job: _Job, sample: int) -> tuple[str, str]:
        """What is asked, as JSON, and its key in the store."""
        asked = {
            "base_url": self.endpoint.address,
            "model": self.name,
            "messages": job.messages,
            "sample": sample,
            **job.context.parameters_of(job.messages),
        }
        question = json.dumps(asked, sort_keys=True)
        return question, hashlib.sha256(question.encode()).hexdigest()

    def _ask(self, job: _Job, key: str, question: str) -> ChatAnswer:
        """The answer to one request, stored.

        Raises ModelError where there is none: a lost answer says nothing about the input.
        """
        body = {"model": self.name, "messages": job.messages}
        try:
            answer = self._complete(body, job.context.parameters_of(job.messages))
        except openai.BadRequestError as error:
            # A filter's refusal, or an input that the endpoint does not read, such as empty text.
            if not job.context.answers:
                raise self._failed(error) from None
            answer = ChatAnswer("", "refusal", "", None)
        except (openai.OpenAIError, UnansweredError) as error:
            raise self._failed(error) from None
        tokens = sum(answer.usage or (0, 0))
        self.store.put(key, question, answer, tokens, "chat")
        calls = job.context.calls
        with self._lock:
            calls.read += answer.usage[0] if answer.usage else 0
            calls.written += answer.usage[1] if answer.usage else 0
            calls.note(answer)
        return answer

    def _complete(self, body: Mapping[str, Any], parameters: Mapping[str, Any]) -> ChatAnswer:
        """The answer to a request; parameters that the endpoint refuses are renamed or left out."""
        while True:
            sent = self._fitting(parameters)
            try:
                return complete(self._client, body, sent)
            except openai.BadRequestError as error:
                # Reasoning models of OpenAI take another limit, and no temperature.
                names = {"temperature": None, "max_tokens": "max_completion_tokens"}
                name = error.param or ""
                is_unsupported = str(error.code or "").startswith("unsupported")
                if name not in names or name not in sent or not is_unsupported:
                    raise
                self._renamed[name] = names[name]

    def _fitting(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters under the names that the endpoint takes."""
        fitting: dict[str, Any] = {}
        for name, value in parameters.items():
            taken = self._renamed.get(name, name)
            if taken is not None:
                fitting[taken] = value
        return fitting

    def _failed(self, error: Exception) -> ModelError:
        """The error for a request without an answer."""
        advice = "Ask again: the answers so far are stored and cost nothing."
        if isinstance(error, openai.APITimeoutError):
            advice += " Or give it longer than timeout= seconds, or ask less at once: concurrency=."
        if is_fatal(error) or isinstance(error, openai.BadRequestError):
            advice = "Check the model's name, base_url (most end in /v1), the key and the account."
        if getattr(error, "code", None) == "content_filter":
            advice = "Its filter refused the whole prompt: rephrase it."
        if self.same_name == "first" and "logprob" in reason_of(error):
            advice = "It sends no log-probabilities, which same='first' reads; take same='text'."
        return ModelError(f"{self.where} did not answer: {problem(error, self.endpoint)}. {advice}")

    def _check_unanswered(self, jobs: Sequence[_Job]) -> None:
        """Raises ModelError where more than a tenth of a question's replies are no answers."""
        for job in jobs:
            calls = job.context.calls
            asked = calls.made + calls.cached
            if asked >= _FEWEST_TO_JUDGE and calls.unanswered > _MOST_UNANSWERED * asked:
                raise ModelError(
                    f"{calls.unanswered} of {asked} replies of {self.where} were filtered, refused "
                    "or empty, so the answers to parts of the prompt say little. Rephrase the "
                    "prompt, or allow longer answers with max_new_tokens=."
                )


def load_chat(
    model: str,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    api_key_env: str | None = None,
    temperature: float = 0.0,
    parameters: Mapping[str, Any] | None = None,
    repeats: int | None = None,
    same: str | Callable[[str, str], Any] = "text",
    max_calls: int = MAX_CALLS,
    concurrency: int = 8,
    max_retries: int = 5,
    timeout: float = 300.0,
    cache_dir: str | None = None,
    announce: bool = True,
) -> ChatModel:
    """A chat model by its text alone.

    Args:
        model: the model's name at the endpoint.
        base_url: the address, up to and including "/v1": "http://localhost:11434/v1" is Ollama's.
            None: `OPENAI_BASE_URL`, or OpenAI's own.
        api_key: the key. None: `OPENAI_API_KEY` where `base_url` is None or the same address.
        api_key_env: the variable that holds the key of `base_url`, in place of `api_key`.
        temperature: of each request.
        parameters: further parameters of each request, such as `{"seed": 0}`.
        repeats: requests for each input. None: 1 where the temperature is 0 and the whole prompt
            gets the same answer twice, else 5.
        same: whether two answers are the same: "text", "contains", "tool", "first", "judge:NAME",
            or a function of two texts; see `noiser.model.same.SAMES`.
        max_calls: the most requests of a question; stored answers do not count.
        concurrency: requests under way at once.
        max_retries: repeats of a request that failed in passing; see `noiser.endpoint.client`.
        timeout: seconds after which a request counts as lost.
        cache_dir: the folder of the stored answers, in `answers.sqlite`. None: the cache folder.
        announce: whether the number of requests is written to stderr before the first.

    Raises:
        ParameterError: an argument outside its domain, or an address that must not get the key.
        ModelError: no key for OpenAI's own endpoint, or none in `api_key_env`.
    """
    if not model:
        raise ParameterError("The chat model has no name; expected one such as 'chat:gpt-5-mini'.")
    check_positive("timeout", timeout)
    check_count("max_retries", max_retries, least=0)
    if not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
        raise ParameterError(f"temperature is {temperature!r}; expected a number from 0 to 2.")
    if repeats is not None:
        check_count("repeats", repeats)
    return ChatModel(
        model,
        choose(base_url, api_key, api_key_env, f"chat:{model}", ModelError),
        temperature=temperature,
        parameters=parameters or {},
        repeats=repeats,
        same=same,
        max_calls=check_count("max_calls", max_calls),
        concurrency=check_count("concurrency", concurrency),
        max_retries=max_retries,
        timeout=timeout,
        store=AnswerStore(Path(cache_dir or cache_root()) / "answers.sqlite"),
        announce=announce,
    )


def part_is_said(explained: ChatAnswer, answer: ChatAnswer) -> float:
    """Whether a part of an answer, such as a sentence, stands in another one."""
    return float(contains(explained.reply, answer.reply))
