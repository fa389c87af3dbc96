"""Judges: some words of a prompt in, the completion that they suggest out."""

from __future__ import annotations

from typing import Any

from noiser.errors import ParameterError
from noiser.judges.prompts import PROMPTS, PromptTemplate, register_prompt
from noiser.judges.protocol import JUDGES, Judge, JudgeRequest, Verdict
from noiser.judges.reading import ParsedReply, matches, parse_reply
from noiser.model.language_model import LanguageModel

__all__ = [
    "JUDGES",
    "PROMPTS",
    "Judge",
    "JudgeRequest",
    "ParsedReply",
    "PromptTemplate",
    "Verdict",
    "kind_of",
    "make_judge",
    "matches",
    "parse_reply",
    "register_prompt",
]


def make_judge(judge: str | Judge, *, lm: LanguageModel | None = None, **parameters: Any) -> Judge:
    """The judge of a name, such as "local:NAME" or "openai:gpt-4.1-mini"; a judge object is
    returned unchanged.

    Args:
        judge: a registry name, with a model's name after a colon where the judge takes one.
        lm: the model of "local" without a name.
        parameters: settings of the judge, such as `base_url`, `budget_tokens` or `prompt`.

    Raises:
        UnknownNameError: no such judge. ParameterError: it lacks a model, or does not accept a
            parameter.
    """
    if not isinstance(judge, str):
        return judge
    name, _, model = judge.partition(":")
    factory = JUDGES.get(name).factory
    try:
        return factory(model=model or None, lm=lm, **parameters)
    except TypeError as error:
        raise ParameterError(
            f"Judge {name!r} does not accept {', '.join(parameters)}: {error}."
        ) from error


def kind_of(judge: str) -> str:
    """The registered name of a judge, without version and model: "openai" of
    "openai@1:gpt-4.1-mini".
    """
    return JUDGES.get(judge.partition(":")[0]).name


def _local(*, model: str | None, lm: LanguageModel | None, **parameters: Any) -> Judge:
    from noiser.judges.local import LocalJudge

    if model is not None:
        from noiser.model import load_model

        lm = load_model(model)
    if lm is None:
        raise ParameterError(
            "The local judge got no model; expected 'local:NAME', or lm=noiser.load_model(...)."
        )
    return LocalJudge(lm, **parameters)


def _openai(*, model: str | None, lm: LanguageModel | None, **parameters: Any) -> Judge:  # noqa: ARG001
    if model is None:
        raise ParameterError(
            "The openai judge got no model; expected a name such as 'openai:gpt-4.1-mini'."
        )
    from noiser.judges.openai import OpenAIJudge

    return OpenAIJudge(model, **parameters)


JUDGES.register("local", _local, summary="a model on this machine; five answers by beam search")
JUDGES.register(
    "openai", _openai, summary="any OpenAI-compatible endpoint, as openai:MODEL; answers are stored"
)
