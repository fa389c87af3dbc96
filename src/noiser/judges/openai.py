"""A judge at any OpenAI-compatible endpoint: requests side by side, each paid for once."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from noiser.checks import check_count, check_positive, random_state_kept
from noiser.errors import DependencyError, JudgeError
from noiser.files import cache_root
from noiser.judges.prompts import PAPER_V1, PROMPTS, TOP5_V1, PromptTemplate, prompt_of
from noiser.judges.protocol import JudgeRequest, Verdict
from noiser.judges.reading import parse_reply

try:
    import openai

    from noiser.answers import CUT, WHOLE, AnswerStore, ChatAnswer, UnansweredError, complete
    from noiser.endpoint import choose, client, is_fatal, problem
except ImportError as error:
    raise DependencyError(
        f"The openai judge needs a package that is not installed: {error}.", "openai"
    ) from error

_CHAT_FORMAT_TOKENS = 64  # more than any chat format puts around one message


class OpenAIJudge:
    """Asks an OpenAI-compatible endpoint through the official client.

    The client retries passing failures. Every answer is stored before it is used. A request that
    fails for good is unscored.

    Args:
        model: the model's name at the endpoint.
        base_url: the endpoint's address, up to and including "/v1". None: `OPENAI_BASE_URL`, or
            OpenAI's own.
        api_key: the key. None: `OPENAI_API_KEY` where `base_url` is None or the same address, else
            none.
        api_key_env: the environment variable that holds the key of `base_url`, in place of
            `api_key`.
        concurrency: the number of requests under way at once.
        max_retries, timeout: see `noiser.endpoint.client`.
        budget_tokens: the most tokens, read and written, that the job may pay for; a request that
            could exceed it is unscored. Stored answers cost nothing.
        job: judges of one `job` and `cache_dir`, in any process, share a budget. None: this judge
            alone.
        parameters: of the request, such as `{"max_completion_tokens": 4096}`. None: temperature 0,
            at most 128 tokens.
        cache_dir: the folder of the stored answers, in `judges.sqlite`. None: the cache folder.
        prompt: a template in place of "paper-v1" and "top5-v1": its registered name, its text, its
            fields, or a `PromptTemplate`.

    Raises:
        JudgeError: no key for OpenAI's own endpoint, or none in `api_key_env`.
        ParameterError: a parameter outside its domain, or an address that must not get the key.
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
        budget_tokens: int | None = None,
        job: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        prompt: str | Mapping[str, Any] | PromptTemplate | None = None,
    ) -> None:
        self.prompt = None if prompt is None else prompt_of(prompt)
        check_positive("timeout", timeout)
        check_count("max_retries", max_retries, least=0)
        self.model = model
        self.name = f"openai:{model}"
        self.concurrency = check_count("concurrency", concurrency)
        if parameters is None:
            parameters = {"temperature": 0, "max_tokens": 128}
        self.parameters = dict(parameters)
        self._longest = self.parameters.get(
            "max_completion_tokens", self.parameters.get("max_tokens")
        )
        if budget_tokens is not None:
            check_count("budget_tokens", budget_tokens, least=0)
            check_count("max_tokens of the parameters, needed for a budget,", self._longest)
        self.budget_tokens = budget_tokens
        self.job = job or uuid.uuid4().hex
        self.endpoint = choose(base_url, api_key, api_key_env, "The openai judge", JudgeError)
        self._connect = partial(client, self.endpoint, timeout=timeout, max_retries=max_retries)
        self._store = AnswerStore(Path(cache_dir or cache_root()) / "judges.sqlite")
        self._under_way = 0  # the most tokens that the requests under way can take
        self._changed = threading.Condition()

    @property
    def paid(self) -> int:
        """The tokens, read and written, that the judge's job has paid for."""
        return self._store.paid(self.job)

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict per request, in order; equal requests are asked once.

        Raises:
            JudgeError: the endpoint refuses key, model or address, or cannot be reached.
            CacheError: an answer could not be stored.
        """
        distinct = [*dict.fromkeys(requests)]
        with (
            random_state_kept(),  # the client's waits are random
            self._connect() as connection,
            ThreadPoolExecutor(self.concurrency, "noiser-judge") as pool,
        ):
            judged = pool.map(partial(self._verdict, connection), distinct)
            verdicts = dict(zip(distinct, judged, strict=True))
        return [verdicts[request] for request in requests]

    def _verdict(self, connection: openai.OpenAI, request: JudgeRequest) -> Verdict:
        template = self.prompt or PROMPTS[TOP5_V1 if request.count > 1 else PAPER_V1]
        asked: dict[str, Any] = {
            "prompt": template.shown(request),
            "prompt_version": template.name,
        }
        body = {"model": self.model, "messages": template.messages(request)}
        question = json.dumps(
            {"base_url": self.endpoint.address, **body, **self.parameters}, sort_keys=True
        )
        key = hashlib.sha256(question.encode()).hexdigest()
        stored = self._store.get(key)
        try:
            answer = stored or self._ask(connection, body, key, question)
        except (openai.OpenAIError, UnansweredError) as error:
            reason = problem(error, self.endpoint)
            if is_fatal(error):
                raise JudgeError(
                    f"The judge {self.name} at {self.endpoint.address} cannot work: {reason}. "
                    "Check the model's name, base_url (most end in /v1), the key and the account."
                ) from None
            return Verdict(status="unscored", reason=reason, model=self.model, lost=True, **asked)
        finish = answer.finish.lower()
        count = template.answers or request.count
        answers, misread = parse_reply(answer.reply, count, cut=finish in CUT)
        reason = misread if finish in CUT | WHOLE else answer.finish
        return Verdict(
            status="unscored" if reason else "answered",
            answers=() if reason else answers,
            reason=reason,
            replies=(answer.reply,),
            model=answer.model,
            cached=stored is not None,
            **asked,
        )

    def _ask(
        self, connection: openai.OpenAI, body: Mapping[str, Any], key: str, question: str
    ) -> ChatAnswer:
        # A token has at least one byte.
        most = len(question.encode()) + _CHAT_FORMAT_TOKENS + (self._longest or 0)
        with self._reserved(most):
            answer = complete(connection, body, self.parameters)
            tokens = sum(answer.usage) if answer.usage else most
            self._store.put(key, question, answer, tokens, self.job)
        return answer

    @contextmanager
    def _reserved(self, most: int) -> Generator[None]:
        """Sets aside the most tokens that a request can take while it is under way."""
        budget = self.budget_tokens
        with self._changed:
            while budget is not None and self.paid + self._under_way + most > budget:
                if not self._under_way:
                    raise UnansweredError("budget")
                self._changed.wait()
            self._under_way += most
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= most
                self._changed.notify_all()
