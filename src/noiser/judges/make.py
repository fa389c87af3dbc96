"""`make_judge`: a judge by name. What a judge needs is imported when it is made."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

from noiser.errors import DependencyError, ParameterError
from noiser.judges.protocol import JUDGES, Judge
from noiser.model.language_model import LanguageModel

__all__ = ["check_judge", "make_judge"]


def make_judge(judge: str | Judge, *, lm: LanguageModel | None = None, **parameters: Any) -> Judge:
    """A judge by name, such as "local" or "openai:gpt-4.1-mini"; a judge object is returned as it is.

    Args:
        judge: a registry name, with a model's name behind a colon where the judge takes one.
        lm: the model behind "local".
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
    entry = JUDGES.get(name)
    try:
        return entry.factory(model=model or None, lm=lm, **parameters)
    except TypeError as error:
        raise _refusal(name, parameters, error) from error


def check_judge(judge: str, **parameters: Any) -> None:
    """What can be told of a judge's name and parameters without its model, its key or its packages.

    Raises:
        UnknownNameError: no such judge. ParameterError: it lacks a model's name, or refuses a parameter.
    """
    name, _, model = judge.partition(":")
    factory = JUDGES.get(name).factory
    try:
        if factory is _local:
            from noiser.judges.local import check_settings

            check_settings(**parameters)
        elif factory is _openai:
            with contextlib.suppress(DependencyError):  # the package may be there where the work is done
                _openai(model=model or None, lm=None, api_key="none", **parameters)
        else:
            inspect.signature(factory).bind(model=model or None, lm=None, **parameters)
    except TypeError as error:
        raise _refusal(name, parameters, error) from error


def _refusal(name: str, parameters: dict[str, Any], error: TypeError) -> ParameterError:
    return ParameterError(f"Judge {name!r} does not accept {parameters}: {error}.")


def _local(*, model: str | None, lm: LanguageModel | None, **parameters: Any) -> Judge:
    from noiser.judges.local import LocalJudge

    if lm is None or model is not None:
        got = f"'local:{model}'" if model else "no lm"
        raise ParameterError(f"The local judge got {got}; expected make_judge('local', lm=noiser.load_model(...)).")
    return LocalJudge(lm, **parameters)


def _openai(*, model: str | None, lm: LanguageModel | None, **parameters: Any) -> Judge:  # noqa: ARG001
    if model is None:
        raise ParameterError("The openai judge got no model; expected a name such as 'openai:gpt-4.1-mini'.")
    from noiser.judges.openai_judge import OpenAIJudge

    return OpenAIJudge(model, **parameters)


JUDGES.register("local", _local, summary="a model on this machine; five answers by beam search")
JUDGES.register("openai", _openai, summary="any OpenAI-compatible endpoint, as openai:MODEL; answers are stored")
