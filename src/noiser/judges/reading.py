"""Words and answers read from a judge's reply."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, NamedTuple, cast

MAX_WORDS, MAX_UNSPACED = 6, 12
"""Words of the longest answer, and characters where a script has no spaces; longer texts are sentences."""


_EDGES = " \t\n.,;:!?…。、，！？；：·،؛؟।॥*_~`>–—=()[]{}（）【】\"'“”„‘’‚«»‹›「」『』《》〈〉"


_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.S | re.I)


_MARKED = re.compile(
    r"<answer>([^<]*)</answer>|\\boxed\{(?:\\text\{)?([^{}]*)|```\w*\n(.*?)```", re.DOTALL
)


_LABEL = re.compile(
    r"^\W{0,4}(?:final |my )?(?:answer|completion|word|prediction|答案|ответ|الإجابة)s?\W{0,3}[:：=]\W*"
    r"|\b(?:answer|completion|word|prediction)s?\b[^\n.:]{0,60}?\s(?:is|are|would be)\b:?\s*|答案是",
    re.I | re.M,
)


_LEAD = re.compile(
    r"^(?:(?:sure|certainly|okay)\W+|(?:i (?:would )?(?:think|say)|it(?:'s| is))\b:?\s*|and )", re.I
)


_REFUSAL = re.compile(
    r"\b(?:cannot|can't|unable|sorry|unfortunately|as an ai|not enough|impossible|please (?:provide|give)|could you|"
    r"n/a|lo siento|désolé|es tut mir leid)\b|抱歉|извините",
    re.I,
)


_BULLET = re.compile(r"^\s*(?:[-*•#]\s+|[(\[]?\d{1,2}[.):\]]\s*(?=\D)|\(?[a-e][.)]\s+)")


_GLOSS = re.compile(
    r"(?:\s+[-–—]\s|\s*[(（]|:\s|,?\s+because\b|,\s+as\b|(?<=\w{3})\.\s+(?=[A-Z])).*", re.DOTALL
)


_UNSPACED = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


ESCAPED = re.compile("[<>\\[\\]\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Reading(NamedTuple):
    """The answers in a reply, best first; or the reason why it cannot be read."""

    answers: tuple[str, ...]
    problem: str | None


def parse_reply(text: str, count: int = 1, *, cut: bool = False) -> Reading:
    """The answers in a judge's reply: JSON, a list, a labelled answer or the first short line.

    Args:
        text: the reply.
        count: the number of answers that were asked for; more are left out.
        cut: whether the reply reached its longest length, so that its last item may be half a word and is left out.

    >>> parse_reply("The most probable word is **basketball**.").answers
    ('basketball',)
    >>> parse_reply("I cannot tell from these words.").problem
    'refusal'
    """
    reply = _THINKING.sub("", text).rpartition("</think>")[2].strip().replace("’", "'")
    if marked := _MARKED.findall(reply):
        reply = next(filter(None, marked[-1]), "").strip() or reply
    if not reply:
        return Reading((), "cut off" if cut else "empty")
    if "given a set of words extracted from a prompt" in reply.lower():
        return Reading((), "the question again")
    if _REFUSAL.search(reply.splitlines()[0]):
        return Reading((), "refusal")
    items = _from_json(reply)
    items = _from_text(reply, count) if items is None else items
    answers = [answer for answer in map(_tidy, items[:-1] if cut else items) if answer][:count]
    short = tuple(answer for answer in answers if not _is_sentence(answer))
    why = "a sentence, not a word" if answers else "cut off" if cut and items else "no word in it"
    return Reading(short, None if short else why)


def _from_json(reply: str) -> list[str] | None:
    """The texts of a reply that is JSON, or of its last list; None for a reply of words."""
    text = re.sub(r"^json:?\s*", "", reply, flags=re.I) or reply
    lists = re.findall(r"\[[^\[\]]*\]", text)
    try:
        value: Any = json.loads(lists[-1] if lists and text[0] not in '{"' else text)
    except (ValueError, RecursionError):
        if text[0] == "{":
            return []
        return re.findall(r'"([^"]*)"?', text) if text.startswith('["') else None
    if isinstance(value, dict):
        named = cast("dict[str, Any]", value)
        value = next(
            (named[key] for key in named if re.search("answer|completion", key, re.I)),
            [*named.values()],
        )
    values = cast("list[Any]", value if isinstance(value, list) else [value])
    values = [
        next(iter(cast("dict[str, Any]", v).values()), "") if isinstance(v, dict) else v
        for v in values
    ]
    texts = [v for v in values if isinstance(v, str)]
    return texts if texts or (text[0] in "{[" and not re.match(r"\[\d", text)) else None


def _from_text(reply: str, count: int) -> list[str]:
    """The lines of a reply, from its label on; or for several answers the items of the lines."""
    lines = [
        line
        for line in reply.splitlines()
        if line.strip(_EDGES) and not line.rstrip(" *").endswith((":", "："))
    ]
    labels = [match.end() for match in _LABEL.finditer(reply) if reply[match.end() :].strip(_EDGES)]
    first = _tidy(lines[0]) if lines else ""
    if labels and (
        not first or _LABEL.match(lines[0]) or _LABEL.search(first) or _is_sentence(first)
    ):
        lines = reply[labels[0] :].splitlines()
    if count == 1:
        return lines
    items = [
        item
        for line in lines
        for item in re.split(r"[;、]\s*|,\s+|\s(?=\d\.\s)", line)
        if item.strip(_EDGES)
    ]
    words = " ".join(items).split()
    return words if len(items) == 1 and len(words) == count else items


def _tidy(item: str) -> str:
    """An answer without bullet, emphasis, gloss and the punctuation around it."""
    item = re.sub(r"(\*\*|__|`)(.+?)\1", r"\2", _LEAD.sub("", _BULLET.sub("", item))).strip()
    return " ".join((_GLOSS.sub("", item).strip(_EDGES) or item.strip(_EDGES)).split())


def _is_sentence(answer: str) -> bool:
    return len(answer.split()) > MAX_WORDS or len(_UNSPACED.findall(answer)) > MAX_UNSPACED


def normal_form(text: str) -> str:
    """The text in Unicode's compatibility form, case-folded, without the punctuation and whitespace around it."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    plain = folded.translate({0x2019: "'", 0x2010: "-", 0x2212: "-", 0x200F: None})
    plain = re.sub(r"\s+", " ", plain).strip(_EDGES)
    return plain if plain.strip("-") else ""


def matches(answer: str, target: str) -> bool:
    """Whether a judge's answer is the target: the same whole text in normal form.

    >>> matches("Basketball.", " basketball"), matches("ANTARCTICA", " Ant")
    (True, False)
    """
    return bool(normal_form(target)) and normal_form(answer) == normal_form(target)
