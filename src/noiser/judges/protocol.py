"""The form of a judge: requests in, verdicts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from noiser.judges.reading import matches
from noiser.registry import Registry


@dataclass(frozen=True)
class JudgeRequest:
    """One question: which word completes the prompt that these words were taken from?"""

    words: tuple[str, ...]  # in the order of the prompt, without the whitespace around them
    count: Literal[1, 5] = 1  # how many answers are wanted, best first


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer to one request, and all that is needed to check how it was read."""

    status: Literal["answered", "unscored"]  # "unscored" without a readable reply
    answers: tuple[
        str, ...
    ] = ()  # the words that were read from the reply, best first; empty when unscored
    reason: str | None = None  # why it is unscored; None when answered
    prompt: str = ""  # what the judge was asked, as text
    prompt_version: str = ""  # name of the prompt, such as "paper-v1"
    replies: tuple[str, ...] = ()  # what the judge wrote, unchanged: one text, or one per beam
    model: str = ""  # the model that replied, as it names itself
    cached: bool = False  # whether the reply was stored by an earlier call
    lost: bool = (
        False  # whether there was no reply, and there may be one if the judge is asked again
    )

    def __post_init__(self) -> None:
        answered = self.status == "answered"
        assert answered == bool(self.answers) == (self.reason is None), (
            "answers, or the reason why there are none"
        )

    def says(self, target: str, top: int = 1) -> bool | None:
        """Whether the target is among the first `top` answers, see `matches`; None when
        unscored.
        """
        if self.status == "unscored":
            return None
        return any(matches(answer, target) for answer in self.answers[:top])


@runtime_checkable
class Judge(Protocol):
    """Anything that completes a prompt of which it sees some words."""

    @property
    def name(self) -> str:
        """The judge's name in results, such as "openai:gpt-4.1-mini"."""
        ...

    def judge(self, requests: Sequence[JudgeRequest]) -> list[Verdict]:
        """One verdict per request, in order; unscored where one request fails. Requests are
        independent.

        Raises:
            JudgeError: nothing can be judged at all.
        """
        ...


JUDGES: Registry[Judge] = Registry("judge", "noiser.judges")
"""Judges by name. A factory is called with the keywords `model` (what follows the colon in
"openai:MODEL", or None), `lm` (a `LanguageModel` or None) and whatever else was given to
`make_judge`."""
