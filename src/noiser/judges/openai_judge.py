"""A judge behind any OpenAI-compatible endpoint: many requests at once, each paid for once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from noiser.errors import DependencyError, JudgeError, ParameterError
from noiser.judges.ledger import Bill, Ledger, Prices
from noiser.judges.parsing import parse_reply
from noiser.judges.prompts import PAPER_V1, TOP5_V1, PromptTemplate, render
from noiser.judges.protocol import JudgeRequest, Usage, Verdict
from noiser.judges.stored import AnswerStore, StoredAnswer, key_of
from noiser.model.store import cache_root

try:
    import openai

    from noiser.judges.endpoint import Retries, UnreadableResponseError, ask, explain, is_fatal
except ImportError as error:
    raise DependencyError(
        f"The openai judge needs a package that is not installed: {error}. Install it: pip install 'noiser[openai]'."
    ) from error

__all__ = ["BUDGET", "OpenAIJudge"]

BUDGET = "budget"
"""The `reason` of a verdict that the budget did not allow."""

_OFFICIAL = "https://api.openai.com/v1"
_CHAT_FORMAT_TOKENS = 64  # more than any chat format puts around one message


class _Question(NamedTuple):
    """A request as it is sent."""

    request: JudgeRequest
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
    started again asks only what it has no answer to.

    Args:
        model: name of the model, as the endpoint knows it.
        base_url: address of the endpoint, up to and including "/v1". None: `OPENAI_BASE_URL`, or OpenAI's own.
        api_key: None: `OPENAI_API_KEY`. May be absent where `base_url` is not OpenAI's own.
        concurrency: how many requests are under way at once.
        max_retries: how often a request is tried again.
        timeout: seconds of silence after which a request counts as lost.
        backoff: seconds before the first new try; doubles from then on.
        max_wait: the longest wait between two tries, in seconds; an endpoint that asks for more is not waited for.
        patience: how many requests in a row may fail for good before the endpoint is given up.
        prices: dollars a million tokens, (prompt, completion), from the provider's price list.
        budget_usd: the most that the answers of this judge may cost together, stored ones included; needs `prices`.
        budget_tokens: the most tokens that they may take together. A request that could exceed a budget is not sent:
            it and all that follow are unscored, with reason "budget".
        parameters: fields of the request body. None: temperature 0 and at most 128 tokens. Reasoning models may
            want `{"max_completion_tokens": 4096}`.
        cache_dir: where answers are stored. None: `judges` in the cache folder.
        progress: called with (done, expected) requests while `judge` runs.

    Attributes:
        name: "openai:" and the model.
        bill: what was counted so far, see `Bill`; `print(judge.bill)` shows it.

    Raises:
        DependencyError: the packages of the extra `openai` are not installed.
        JudgeError: OpenAI's own endpoint without a key.
        ParameterError: a parameter outside its domain.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        max_retries: int = 5,
        timeout: float = 60.0,
        backoff: float = 1.0,
        max_wait: float = 60.0,
        patience: int = 10,
        prices: tuple[float, float] | None = None,
        budget_usd: float | None = None,
        budget_tokens: int | None = None,
        parameters: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        for what, value, least in (
            ("concurrency", concurrency, 1),
            ("max_retries", max_retries, 0),
            ("patience", patience, 1),
        ):
            if value < least:
                raise ParameterError(f"{what} is {value!r}; expected an integer of at least {least}.")
        for what, seconds in (("timeout", timeout), ("backoff", backoff), ("max_wait", max_wait)):
            if not seconds > 0:
                raise ParameterError(f"{what} is {seconds!r}; expected seconds, more than 0.")
        self.model = model
        self.base_url = (base_url or os.environ.get("OPENAI_BASE_URL") or _OFFICIAL).rstrip("/")
        self._api_key = _key_for(self.base_url, api_key)
        self.concurrency, self.max_retries, self.patience = concurrency, max_retries, patience
        self.timeout, self.backoff, self.max_wait = timeout, backoff, max_wait
        self.parameters = dict({"temperature": 0, "max_tokens": 128} if parameters is None else parameters)
        self.progress = progress
        self._store = AnswerStore(Path(cache_dir) if cache_dir is not None else cache_root() / "judges")
        self._ledger = Ledger(Prices(*prices) if prices else None, budget_usd, budget_tokens)
        self._longest_answer = _longest_answer(self.parameters, self._ledger)
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        return f"OpenAIJudge({self.model!r}, base_url={_without_secrets(self.base_url)!r})"

    @property
    def name(self) -> str:
        """What stands in results."""
        return f"openai:{self.model}"

    @property
    def bill(self) -> Bill:
        """What was counted so far."""
        return self._ledger.bill

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict a request, in order; equal requests are asked once. Calls from several threads take turns.

        Raises:
            JudgeError: the endpoint refuses key, model or address, or `patience` requests in a row failed. What was
                answered until then is stored.
            CacheError: an answer could not be stored.
        """
        with self._turn:
            questions = [self._question(request) for request in requests]
            known: dict[str, StoredAnswer | str] = {}
            fresh: dict[str, _Question] = {}
            for question in questions:
                if question.key in known or question.key in fresh:
                    continue
                if (answer := self._store.get(question.body)) is not None:
                    self._ledger.found(question.key, answer.usage, question.most)
                    known[question.key] = answer
                else:
                    fresh[question.key] = question
            stored = set(known)
            known |= self._ask_all(list(fresh.values()), len(stored)) if fresh else {}
            return [_verdict(question, known[question.key], question.key in stored) for question in questions]

    def _question(self, request: JudgeRequest) -> _Question:
        template = TOP5_V1 if request.count > 1 else PAPER_V1
        prompt = render(template, request.words)
        body = {
            "base_url": _without_secrets(self.base_url),
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "parameters": self.parameters,
        }
        most = Usage(len(prompt.encode()) + _CHAT_FORMAT_TOKENS, self._longest_answer)
        return _Question(request, template, prompt, body, key_of(body), most)

    def _ask_all(self, questions: Sequence[_Question], done: int) -> dict[str, StoredAnswer | str]:
        """The answer to each question, or why there is none."""
        outcomes: dict[str, StoredAnswer | str] = {}
        with (
            openai.OpenAI(base_url=self.base_url, api_key=self._api_key, max_retries=0) as client,
            ThreadPoolExecutor(min(self.concurrency, len(questions)), "noiser-judge") as pool,
        ):
            run = _Run(self, client, self._ledger, self._store)
            futures = {pool.submit(run.outcome, question): question.key for question in questions}
            try:
                for count, future in enumerate(as_completed(futures), 1):
                    outcomes[futures[future]] = future.result()
                    if self.progress is not None:
                        self.progress(done + count, done + len(questions))
            except BaseException:
                run.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return outcomes


class _Run:
    """What the threads of one call share."""

    def __init__(self, judge: OpenAIJudge, client: openai.OpenAI, ledger: Ledger, store: AnswerStore) -> None:
        self.judge, self.client, self.ledger, self.store = judge, client, ledger, store
        self.stopped, self.out_of_budget = threading.Event(), threading.Event()
        self.retries = Retries(judge.max_retries, judge.backoff, judge.max_wait, self.stopped)
        self._failed_in_a_row, self._lock = 0, threading.Lock()

    def outcome(self, question: _Question) -> StoredAnswer | str:
        """The answer, stored and counted; or the reason why there is none."""
        if self.out_of_budget.is_set() or not self.ledger.reserve(question.key, question.most):
            self.out_of_budget.set()
            return BUDGET
        try:
            if self.stopped.is_set():
                return "stopped"
            answer = self.retries(lambda: ask(self.client, question.body, self.judge.timeout))
            self.ledger.settle(question.key, answer.usage)
            self.store.put(question.body, answer)
        except (openai.OpenAIError, UnreadableResponseError) as error:
            self._count_failure(error)
            return explain(error)
        finally:
            self.ledger.release(question.key)
        self._failed_in_a_row = 0
        return answer

    def _count_failure(self, error: Exception) -> None:
        judge = self.judge
        where = f"The judge {judge.name} at {_without_secrets(judge.base_url)}"
        if is_fatal(error):
            raise JudgeError(
                f"{where} refuses to work: {explain(error)}. Check the model's name, base_url (most end in /v1), the "
                "key (OPENAI_API_KEY) and the account."
            ) from error
        with self._lock:
            self._failed_in_a_row += 1
            exhausted = self._failed_in_a_row >= judge.patience
        if exhausted and not self.stopped.is_set():
            raise JudgeError(
                f"{where} failed {judge.patience} times in a row; the last time: {explain(error)}. Answers until here "
                "are stored: start again when the endpoint works, and only the rest is asked."
            ) from error


def _verdict(question: _Question, outcome: StoredAnswer | str, cached: bool) -> Verdict:
    asked: dict[str, Any] = {"prompt": question.prompt, "prompt_version": question.template.name}
    if isinstance(outcome, str):
        return Verdict(status="unscored", reason=outcome, model=question.body["model"], lost=True, **asked)
    reading = parse_reply(outcome.reply, question.request.count, cut=outcome.finish == "length")
    problem = outcome.finish if outcome.finish in ("refusal", "content_filter") else reading.problem
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


def _longest_answer(parameters: Mapping[str, Any], ledger: Ledger) -> int:
    limits = [parameters[name] for name in ("max_completion_tokens", "max_tokens") if name in parameters]
    if not limits and (ledger.budget_usd is not None or ledger.budget_tokens is not None):
        raise ParameterError(
            f"A budget is given, but parameters are {dict(parameters)}; expected 'max_tokens' or "
            "'max_completion_tokens' among them, because an answer without a limit could exceed any budget."
        )
    return int(limits[0]) if limits else 0


def _key_for(base_url: str, api_key: str | None) -> str:
    key = api_key or os.environ.get("OPENAI_API_KEY")
    if not key and base_url == _OFFICIAL:
        raise JudgeError(
            "The openai judge has no key; expected one in the environment variable OPENAI_API_KEY, or as api_key. "
            "An endpoint of your own needs none: give its base_url."
        )
    return key or "none"


def _without_secrets(url: str) -> str:
    """The address without a user name, password and query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
