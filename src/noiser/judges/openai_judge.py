"""A judge at any OpenAI-compatible endpoint: many requests at once, each paid for once."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from noiser.checks import check_count
from noiser.errors import DependencyError, JudgeError, ParameterError
from noiser.files import cache_root
from noiser.judges.answers import AnswerStore, Bill, Exchange, Ledger, StoredAnswer, key_of
from noiser.judges.protocol import PAPER_V1, TOP5_V1, JudgeRequest, PromptTemplate, Usage, Verdict, render
from noiser.judges.replies import parse_reply

try:
    import openai

    from noiser.endpoint import Endpoint, EndpointError, Retries, UnreadableResponseError
except ImportError as error:
    raise DependencyError(
        f"The openai judge needs a package that is not installed: {error}. Install it: pip install 'noiser[openai]'."
    ) from error


BUDGET = "budget"
"""The `reason` of a verdict that the budget did not allow."""

CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
"""Why a reply ended, in lower case, where it ended too early; other endpoints than OpenAI's have words of their own."""

WHOLE = frozenset({"stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "completed", "none", ""})
"""The same of a reply that is whole; any other reason, such as a filter's, is why its prompt is unscored."""

_CHAT_FORMAT_TOKENS = 64  # more than any chat format puts around one message
_MOST_TOKENS = 10**9  # larger counts are mistakes


class _Question(NamedTuple):
    """The body of a request."""

    answers: int
    template: PromptTemplate
    prompt: str
    body: Mapping[str, Any]
    key: str
    most: Usage  # what its answer can take: no tokenizer makes more tokens than there are bytes


class OpenAIJudge:
    """Asks an OpenAI-compatible endpoint, through the official client.

    Requests go out side by side. What may pass is tried again (see `Retries`); a request that fails for good is
    unscored, with the reason; an error that every request would meet raises `JudgeError`. Every answer is stored on
    disk before it is used, under a hash of endpoint, model, prompt and parameters, so that a job that is stopped and
    started again asks only what it has no answer to. Keys are stored nowhere and taken out of all that is.

    Args:
        model: name of the model, as the endpoint knows it.
        base_url: address of the endpoint, up to and including "/v1". None: `OPENAI_BASE_URL`, or OpenAI's own.
        api_key: None: `OPENAI_API_KEY` where `base_url` is None or names the same address, else none.
        api_key_env: the environment variable that holds the key of `base_url`, in place of `api_key`.
        concurrency: how many requests are under way at once.
        max_retries: how often a request is tried again.
        timeout: seconds of silence after which a request counts as lost.
        backoff: seconds before the first new try; doubles from then on.
        max_wait: the longest wait between two tries, in seconds; an endpoint that asks for more is not waited for.
        patience: how many requests in a row, of all calls, may fail for good before the endpoint is given up.
        prices: dollars per million tokens, (prompt, completion), from the provider's price list.
        budget_usd: the most that the answers of this judge may cost together, stored ones included; needs `prices`.
        budget_tokens: the most tokens that they may take together. A request that could exceed a budget is not sent:
            it and all that follow are unscored, with reason "budget".
        spent: what earlier runs of the same job counted, their `judge.spent`, so that a budget is the job's.
        parameters: fields of the request body. None: temperature 0 and at most 128 tokens. Reasoning models may
            want `{"max_completion_tokens": 4096}`.
        cache_dir: where answers are stored. None: `judges` in the cache folder.
        progress: called with (done, expected) requests while `judge` runs.

    Raises:
        DependencyError: the packages of the extra `openai` are not installed.
        JudgeError: no key for OpenAI's own endpoint, or none in `api_key_env`.
        ParameterError: a parameter outside its domain; an address that must not be stored or get the key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api_key_env: str | None = None,
        concurrency: int = 8,
        max_retries: int = 5,
        timeout: float = 60.0,
        backoff: float = 1.0,
        max_wait: float = 60.0,
        patience: int = 10,
        prices: Sequence[float] | None = None,
        budget_usd: float | None = None,
        budget_tokens: int | None = None,
        spent: Mapping[str, Sequence[int]] | None = None,
        parameters: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_count("concurrency", concurrency)
        check_count("max_retries", max_retries, least=0)
        check_count("patience", patience)
        for name, seconds in (("timeout", timeout), ("backoff", backoff), ("max_wait", max_wait)):
            if not 0 < seconds < math.inf:
                raise ParameterError(f"{name} is {seconds!r}; expected seconds, more than 0.")
        self.model, self.name, self.progress = model, f"openai:{model}", progress
        self.concurrency, self.patience, self.timeout = concurrency, patience, timeout
        if progress is not None and not callable(progress):
            raise ParameterError(f"progress is {progress!r}; expected a function of (done, expected), or None.")
        self.parameters = dict({"temperature": 0, "max_tokens": 128} if parameters is None else parameters)
        try:
            key_of({"parameters": self.parameters})
        except (TypeError, ValueError) as error:
            raise ParameterError(
                f"parameters cannot be sent as JSON: {error}. Expected texts, finite numbers, lists and mappings."
            ) from error
        limits = [
            _at_least_one(name, self.parameters[name])
            for name in ("max_completion_tokens", "max_tokens")
            if name in self.parameters
        ]
        if not limits and (budget_usd, budget_tokens) != (None, None):
            raise ParameterError(
                f"A budget is given, but parameters are {self.parameters}; expected 'max_tokens' or "
                "'max_completion_tokens' among them, because an answer without a limit could exceed any budget."
            )
        self._longest_answer = limits[0] * _at_least_one("n", self.parameters.get("n", 1)) if limits else 0
        self._failed_in_a_row = 0
        self._retries = Retries(max_retries, backoff, max_wait)
        self._store = AnswerStore(Path(cache_dir) if cache_dir is not None else cache_root() / "judges")
        self._ledger = Ledger(prices, budget_usd, budget_tokens, spent)
        self._endpoint = Endpoint.choose(base_url, api_key, api_key_env, user="The openai judge", error=JudgeError)
        self.base_url = self._endpoint.address
        self._one_call = threading.Lock()

    def __repr__(self) -> str:
        return f"OpenAIJudge({self.model!r}, base_url={self.base_url!r})"

    @property
    def bill(self) -> Bill:
        """What was counted so far; `print(judge.bill)` shows it."""
        return self._ledger.bill

    @property
    def spent(self) -> dict[str, Usage]:
        """All that counts against the budget, earlier runs included: (prompt, completion) tokens by question."""
        return self._ledger.spent

    def share(self, exchange: Exchange) -> None:
        """Makes the budget one with that of other judges, in other processes, that got the same `spent`."""
        self._ledger.share(exchange)

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict per request, in order; equal requests are asked once. Calls from several threads run one by one.

        Raises:
            JudgeError: the endpoint refuses key, model or address, or `patience` requests in a row failed. What was
                answered until then is stored.
            CacheError: an answer could not be stored.
        """
        with self._one_call:
            questions = [self._question(request) for request in requests]
            by_key = {question.key: question for question in questions}
            stored = {key: answer for key, q in by_key.items() if (answer := self._store.get(q.body)) is not None}
            for key, answer in stored.items():
                self._ledger.count_stored(key, answer.usage, by_key[key].most)
            fresh = [question for key, question in by_key.items() if key not in stored]
            outcomes = stored | (self._ask_all(fresh, len(stored)) if fresh else {})
            return [_verdict(question, outcomes[question.key], question.key in stored) for question in questions]

    def _question(self, request: JudgeRequest) -> _Question:
        template = TOP5_V1 if request.count > 1 else PAPER_V1
        prompt = render(template, request.words)
        messages = [{"role": "user", "content": prompt}]
        body = {"base_url": self.base_url, "model": self.model, "messages": messages, "parameters": self.parameters}
        most = Usage(len(prompt.encode()) + _CHAT_FORMAT_TOKENS, self._longest_answer)
        return _Question(request.count, template, prompt, body, key_of(body), most)

    def _ask_all(self, questions: Sequence[_Question], done: int) -> dict[str, StoredAnswer | str]:
        """The answer to each question, or why there is none."""
        stop, out_of_budget = threading.Event(), threading.Event()

        def settle(question: _Question) -> StoredAnswer | EndpointError | str:
            outcome: EndpointError | str = "stopped"
            for _ in range(2):  # once more where a reply cannot be read and was billed all the same
                if out_of_budget.is_set() or not self._ledger.reserve(question.key, question.most):
                    out_of_budget.set()
                    return BUDGET
                try:
                    if stop.is_set():
                        return outcome
                    answer = ask(self._endpoint, client, question.body, self.timeout, self._retries, stop)
                    try:
                        self._store.put(question.body, answer)
                    finally:
                        self._ledger.settle(question.key, answer.usage)
                    return answer
                except EndpointError as error:
                    if error.billed is None:
                        return error
                    outcome = error
                    self._ledger.settle(question.key, Usage(*error.billed))
                finally:
                    self._ledger.release(question.key)
            return outcome

        outcomes: dict[str, StoredAnswer | str] = {}
        with (
            self._endpoint.client() as client,
            ThreadPoolExecutor(min(self.concurrency, len(questions)), "noiser-judge") as pool,
        ):
            futures = {pool.submit(settle, question): question.key for question in questions}
            try:
                for count, future in enumerate(as_completed(futures), 1):
                    outcome = future.result()
                    if isinstance(outcome, EndpointError):
                        self._failed_in_a_row += 1
                        self._check_patience(outcome)
                    elif outcome != BUDGET:
                        self._failed_in_a_row = 0
                    outcomes[futures[future]] = str(outcome) if isinstance(outcome, EndpointError) else outcome
                    if self.progress is not None:
                        self.progress(done + count, done + len(questions))
            except BaseException:  # answers under way are still waited for and stored: they are paid for
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return outcomes

    def _check_patience(self, error: EndpointError) -> None:
        if error.fatal:
            raise JudgeError(
                f"The judge {self.name} at {self.base_url} refuses to work: {error}. Check the model's name, base_url "
                "(most end in /v1), the key (OPENAI_API_KEY, or api_key_env) and the account."
            )
        if self._failed_in_a_row >= self.patience:
            self._failed_in_a_row = 0
            raise JudgeError(
                f"The judge {self.name} at {self.base_url} failed {self.patience} times in a row; the last time: "
                f"{error}. Answers until here are stored: start again when the endpoint works, and only the rest is "
                "asked."
            )


def _at_least_one(name: str, value: Any) -> int:
    if int(value) < 1:
        raise ParameterError(f"{name} is {value!r} in parameters; expected a number of at least 1.")
    return int(value)


def _verdict(question: _Question, outcome: StoredAnswer | str, cached: bool) -> Verdict:
    asked: dict[str, Any] = {"prompt": question.prompt, "prompt_version": question.template.name}
    if isinstance(outcome, str):
        return Verdict(status="unscored", reason=outcome, model=question.body["model"], lost=True, **asked)
    finish = outcome.finish.lower()
    reading = parse_reply(outcome.reply, question.answers, cut=finish in CUT)
    problem = reading.problem if finish in CUT | WHOLE else outcome.finish
    return Verdict(
        status="unscored" if problem else "answered",
        answers=() if problem else reading.answers,
        reason=problem,
        replies=(outcome.reply,),
        model=outcome.model or question.body["model"],
        usage=outcome.usage,
        cached=cached,
        **asked,
    )


# ---- a chat completion: one question, and the answer in a response --------------------------------------------------


def ask(
    endpoint: Endpoint,
    client: openai.OpenAI,
    question: Mapping[str, Any],
    timeout: float,
    retries: Retries,
    stop: threading.Event,
) -> StoredAnswer:
    """The answer to a question, without the key; waiting and trying end when `stop` is set.

    Raises:
        EndpointError: there is none.
    """

    def send() -> StoredAnswer:
        raw = client.chat.completions.with_raw_response.create(
            model=question["model"],
            messages=question["messages"],
            extra_body=dict(question["parameters"]),
            timeout=timeout,
        )
        kind = raw.http_response.headers.get("content-type", "no content type")
        return read_completion(raw.http_response.text, kind)

    reply, finish, model, usage = endpoint.call(send, retries, stop)
    return StoredAnswer(endpoint.redact(reply), endpoint.redact(finish), endpoint.redact(model), usage)


def read_completion(body: str, kind: str = "application/json") -> StoredAnswer:
    """The answer in the body of a response. Raises UnreadableResponseError when there is none."""
    try:
        data = json.loads(body.removeprefix("\ufeff"), parse_int=float)  # Python refuses integers of many digits
    except (ValueError, RecursionError) as error:
        raise UnreadableResponseError(f"not valid JSON ({kind}): {body}") from error
    try:
        choice = data["choices"][0]
        message = choice["message"]
        content, refusal = message.get("content"), message.get("refusal")
    except (LookupError, TypeError, AttributeError) as error:
        raise UnreadableResponseError(f"no choices in it: {body}", _usage(data)) from error
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise UnreadableResponseError(f"a content that is not text: {body}", _usage(data))
    finish = "refusal" if refusal and not content else str(choice.get("finish_reason"))
    if finish.lower() == "error":
        raise UnreadableResponseError(f"ended by an error: {body}", _usage(data))
    model = data.get("model")
    reply = content or (refusal if isinstance(refusal, str) else "")
    return StoredAnswer(reply, finish, model if isinstance(model, str) else "", _usage(data))


def _usage(data: Any) -> Usage | None:
    try:
        counts = [float(data["usage"][name]) for name in Usage._fields]
    except (LookupError, TypeError, ValueError):
        return None
    return Usage(*map(int, counts)) if all(0 <= count <= _MOST_TOKENS for count in counts) else None
