"""Judges: some words of a prompt in, the completion that they suggest out."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator
from typing import Any

from noiser.errors import DependencyError, JudgeError, NoiserError, ParameterError
from noiser.judges.protocol import JUDGES, PROMPTS, Judge, JudgeRequest, PromptTemplate, Usage, Verdict
from noiser.judges.replies import Reading, matches, parse_reply
from noiser.model.language_model import LanguageModel

__all__ = [
    "JUDGES",
    "PROMPTS",
    "Judge",
    "JudgeRequest",
    "PromptTemplate",
    "Reading",
    "Usage",
    "Verdict",
    "check_judge",
    "kind_of",
    "make_judge",
    "matches",
    "parse_reply",
]


def make_judge(judge: str | Judge, *, lm: LanguageModel | None = None, **parameters: Any) -> Judge:
    """A judge by name, such as "local:NAME" or "openai:gpt-4.1-mini"; a judge object is returned unchanged.

    Args:
        judge: a registry name, with a model's name after a colon where the judge takes one.
        lm: the model of "local" without a name.
        parameters: passed on to the judge, such as `base_url`, `budget_usd` or `concurrency`.

    Raises:
        UnknownNameError: no such judge. ParameterError: it lacks a model, or refuses a parameter.
    """
    given: object = judge
    if not isinstance(given, str):
        if not isinstance(given, Judge) or isinstance(given, type):
            raise ParameterError(
                f"judge is {given!r}; expected a name such as 'local' or 'openai:MODEL', or an object with a `name` "
                "and a method `judge(requests)`."
            )
        return given
    name, _, model = given.partition(":")
    factory = JUDGES.get(name).factory
    with _refused_parameters(name, parameters):
        return factory(model=model or None, lm=lm, **parameters)


def kind_of(judge: str) -> str:
    """The registered name of a judge, without its version and its model: "openai" of "openai@1:gpt-4.1-mini".

    Raises:
        UnknownNameError: no such judge.
    """
    return JUDGES.get(judge.partition(":")[0]).name


def check_judge(judge: str, **parameters: Any) -> None:
    """Checks what is known of a judge's name and parameters without its model, its key or its packages.

    Raises:
        UnknownNameError: no such judge. ParameterError: it lacks a model's name, or refuses a parameter.
    """
    name, _, model = judge.partition(":")
    factory = JUDGES.get(name).factory
    with _refused_parameters(name, parameters):
        if factory is _local:
            from noiser.judges.local import check_settings

            check_settings(**parameters)
        elif factory is _openai:
            with contextlib.suppress(DependencyError, JudgeError):  # package and key may be on the worker
                _openai(model=model or None, lm=None, **parameters)
        else:
            inspect.signature(factory).bind(model=model or None, lm=None, **parameters)


_HARMLESS = frozenset(
    ("style", "max_new_tokens", "concurrency", "max_retries", "timeout", "backoff", "max_wait", "patience", "prices",
     "budget_usd", "budget_tokens")
)  # fmt: skip
"""Settings whose values an error may show: a key may be under any other name."""


@contextlib.contextmanager
def _refused_parameters(name: str, parameters: dict[str, Any]) -> Generator[None]:
    try:
        yield
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, NoiserError):
            raise
        shown = {key: value if key in _HARMLESS else "..." for key, value in parameters.items()}
        raise ParameterError(f"Judge {name!r} does not accept {shown}: {error}.") from error


def _local(*, model: str | None, lm: LanguageModel | None, **parameters: Any) -> Judge:
    from noiser.judges.local import LocalJudge

    if model is not None:
        from noiser.model import load_model

        lm = load_model(model)
    if lm is None:
        raise ParameterError("The local judge got no model; expected 'local:NAME', or lm=noiser.load_model(...).")
    return LocalJudge(lm, **parameters)


def _openai(*, model: str | None, lm: LanguageModel | None, **parameters: Any) -> Judge:  # noqa: ARG001
    if model is None:
        raise ParameterError("The openai judge got no model; expected a name such as 'openai:gpt-4.1-mini'.")
    from noiser.judges.openai_judge import OpenAIJudge

    return OpenAIJudge(model, **parameters)


JUDGES.register("local", _local, summary="a model on this machine; five answers by beam search")
JUDGES.register("openai", _openai, summary="any OpenAI-compatible endpoint, as openai:MODEL; answers are stored")
