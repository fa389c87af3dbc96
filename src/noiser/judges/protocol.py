"""What a judge is: words in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from noiser.judges.matching import matches
from noiser.registry import Registry

__all__ = ["JUDGES", "Judge", "JudgeRequest", "Usage", "Verdict"]


@dataclass(frozen=True)
class JudgeRequest:
    """One question: which word completes the prompt that these words were taken from?

    Attributes:
        words: the words, in the order of the prompt, without the whitespace around them.
        count: how many answers are wanted, best first.
    """

    words: tuple[str, ...]
    count: Literal[1, 5] = 1


class Usage(NamedTuple):
    """Tokens that a judge read and wrote."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: Usage) -> Usage:
        """The sum of two."""
        return Usage(self.prompt_tokens + other.prompt_tokens, self.completion_tokens + other.completion_tokens)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a judge said to one request, and everything needed to check how it was read.

    Attributes:
        status: "answered", or "unscored" when there is no reply or none that can be read. An unscored verdict is
            neither right nor wrong.
        answers: the words that were read out of the reply, best first; empty when unscored.
        reason: why it is unscored; None when answered.
        prompt: what the judge was asked, as text.
        prompt_version: name of the prompt, such as "paper-v1".
        replies: what the judge wrote, as it stands: one text, or one a beam; empty when there was no reply.
        model: the model that replied, as it names itself.
        usage: tokens of this reply, also when it came from the cache; None when there was no reply or it is not known.
        cached: whether the reply was stored by an earlier call.
        lost: whether there was no reply that could have been read, and there may be one if it is asked again: the
            endpoint failed, or a budget was spent.
    """

    status: Literal["answered", "unscored"]
    answers: tuple[str, ...] = ()
    reason: str | None = None
    prompt: str = ""
    prompt_version: str = ""
    replies: tuple[str, ...] = ()
    model: str = ""
    usage: Usage | None = None
    cached: bool = False
    lost: bool = False

    def __post_init__(self) -> None:
        answered = self.status == "answered"
        assert answered == bool(self.answers), "answered verdicts have answers, unscored ones have none"
        assert answered == (self.reason is None), "unscored verdicts say why"

    def says(self, target: str, top: int = 1) -> bool | None:
        """Whether the target is among the first `top` answers, see `matches`; None when unscored."""
        if self.status == "unscored":
            return None
        return any(matches(answer, target) for answer in self.answers[:top])


@runtime_checkable
class Judge(Protocol):
    """Anything that completes a prompt of which it sees some words."""

    @property
    def name(self) -> str:
        """What to call it in results, such as "openai:gpt-4.1-mini"."""
        ...

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict a request, in order. Requests are independent of each other; a judge may work on many at once.

        What goes wrong with one request makes its verdict unscored.

        Raises:
            JudgeError: nothing can be judged at all.
        """
        ...


JUDGES: Registry[Judge] = Registry("judge", "noiser.judges")
"""Judges by name. A factory is called with the keywords `model` (what stands behind the colon in "openai:MODEL", or
None), `lm` (a `LanguageModel` or None) and whatever else was given to `make_judge`. Packages add theirs through the
entry point `noiser.judges`."""
