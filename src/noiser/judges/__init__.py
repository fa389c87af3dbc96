"""Judges: some words of a prompt in, the completion that they suggest out."""

from noiser.judges.make import make_judge
from noiser.judges.matching import matches
from noiser.judges.parsing import Reading, parse_reply
from noiser.judges.prompts import PROMPTS, PromptTemplate
from noiser.judges.protocol import JUDGES, Judge, JudgeRequest, Usage, Verdict

__all__ = [
    "JUDGES",
    "PROMPTS",
    "Judge",
    "JudgeRequest",
    "PromptTemplate",
    "Reading",
    "Usage",
    "Verdict",
    "make_judge",
    "matches",
    "parse_reply",
]
