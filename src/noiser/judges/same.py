"""Whether two answers are the same, as a judge says."""

from __future__ import annotations

from collections.abc import Callable

from noiser.answers import ChatAnswer
from noiser.errors import JudgeError
from noiser.judges.prompts import PromptTemplate
from noiser.judges.protocol import Judge, JudgeRequest

PROMPT = PromptTemplate(
    text=(
        "Here are two answers to one question, as a JSON list. Do they say the same? Differences "
        "of wording do not count. Reply with one word, yes or no.\n\n{words}"
    ),
)
"""The question that a judge gets."""


def same_by_judge(judge: str) -> Callable[[], Callable[[ChatAnswer, ChatAnswer], float]]:
    """The factory of a comparison by a judge, such as "openai:gpt-4.1-mini"."""

    def factory() -> Callable[[ChatAnswer, ChatAnswer], float]:
        from noiser.judges import make_judge

        return compared_by(make_judge(judge, prompt=PROMPT))

    return factory


def compared_by(judge: Judge) -> Callable[[ChatAnswer, ChatAnswer], float]:
    """A comparison by a judge. Raises JudgeError where its reply cannot be read."""

    def compare(explained: ChatAnswer, answer: ChatAnswer) -> float:
        if explained.calls != answer.calls:
            return 0.0
        if explained.reply.strip() == answer.reply.strip():
            return 1.0
        (verdict,) = judge.judge([JudgeRequest((explained.reply, answer.reply))])
        said = verdict.answers[0].strip().casefold() if verdict.answers else ""
        if said not in ("yes", "no"):
            raise JudgeError(
                f"The judge {judge.name} replied neither yes nor no to whether two answers are the "
                f"same: {verdict.reason or said:.80}. Take another judge, or same='contains'."
            )
        return float(said == "yes")

    return compare
