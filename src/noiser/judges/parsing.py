"""Replies to answers: pure functions, because judges decorate what they were asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

from noiser.judges.matching import normal_form

__all__ = ["Reading", "parse_reply"]

MAX_WORDS = 6
"""An answer of more words than this is a sentence that was not understood."""

MAX_UNSPACED = 12
"""The same for characters of scripts without spaces between words."""


class Reading(NamedTuple):
    """What a reply says.

    Attributes:
        answers: best first; empty when the reply cannot be read.
        problem: why it cannot be read; None if it can.
    """

    answers: tuple[str, ...]
    problem: str | None


def parse_reply(text: str, count: int = 1, *, cut: bool = False) -> Reading:
    r"""Reads the answers out of a judge's reply.

    Understood are a bare word, quotes, numbering, bullets, JSON lists, markdown emphasis and code fences,
    "Answer: x" and "The most probable word is x", lists with commas or one to a line, glosses behind a dash or in
    brackets, and what a reasoning model puts between <think> tags. Not readable are: nothing, a refusal, a sentence
    from which no answer stands out.

    Args:
        text: the reply.
        count: how many answers were asked for; more are left out.
        cut: the reply ended because it was too long, so its last piece may be half a word and is left out.

    >>> parse_reply('1. **Basketball**\n2. "Football"', 5).answers
    ('Basketball', 'Football')
    >>> parse_reply("I cannot tell from these words.").problem
    'refusal'
    """
    said = _without_thinking(text)
    if said is None:
        return Reading((), "cut off while thinking")
    if not said:
        return Reading((), "empty")
    items = _from_json(said)
    if items is None:
        if _REFUSAL.search(_plain(said.splitlines()[0])):
            return Reading((), "refusal")
        items = _from_text(said, count)
    complete = items[:-1] if cut else items
    if not complete:
        return Reading((), "cut off" if cut and items else "no word in it")
    answers = [_tidy(item) for item in complete[:count]]
    readable = tuple(answer for answer in answers if answer and not _is_prose(answer))
    if readable:
        return Reading(readable, None)
    return Reading((), "a sentence, not a word" if any(answers) else "no word in it")


_QUOTES = "\"'`“”„‟‘’‚«»‹›「」『』《》〈〉"
_CLOSING = dict(zip("\"'`“„‘‚«‹「『《〈", "\"'`””’’»›」』》〉", strict=True)) | {"„": "“”", "‚": "‘’", "»": "«"}
_EDGES = " \t\n.,;:!?…。、，！？；：·،؛؟।॥*_~#>-–—=()[]{}（）【】" + _QUOTES
_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?</\1>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_EMPHASIS = re.compile(r"(\*\*\*|\*\*|\*|__|`+)(?=\S)(.+?)(?<=\S)\1")
_BULLET = re.compile(
    r"^\s*(?:[-*•‣◦–—]\s+|#+\s+|>\s+|\(?\d{1,2}[.)）]\s*(?=[^\d\s])|\(?[a-eA-E](?:\.\s+|[)）]\s*)(?=[^\d\s])|\d{1,2}:\s+|\d、)"
)
_INLINE_NUMBER = re.compile(r"(?:^|\s)\(?\d{1,2}[.)]\s+")
_SEPARATOR = re.compile(r"[;；、،؛|，]|,(?!\d)|\s[/·•]\s")
_GLOSS = re.compile(r"(?<=\w)(?:\s+[-–—=]+>?\s+|\s*[(（]|:\s|\s+because\b|\s+since\b).*", re.DOTALL)
_LEAD = re.compile(
    r"^(?:(?:sure|certainly|of course|okay|ok|great)\s*[!,.:]\s+|(?:probably|likely|perhaps|maybe)\s*,?\s+"
    r"|i(?:\s+would|'d)?\s+(?:think|believe|guess|say|predict)(?:\s+(?:it\s+is|it's|that))?\s*:?\s+"
    r"|it(?:\s+is|'s)(?:\s+(?:probably|likely))?\s+|(?:and|or)\s+)",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"^(?:sure|certainly|of course|okay)\W*[!,.]$"
    r"|^(?:sure|certainly|of course|okay|here(?:'s| is| are)|based on|given)\b.*\s",
    re.IGNORECASE,
)
_NOUN = r"(?:answers?|completions?|words?|predictions?|responses?|outputs?|guess(?:es)?)"
_LABEL = re.compile(
    rf"(?:^|\n)\W{{0,4}}(?:[a-z]+[ -]){{0,5}}{_NOUN}\s*[:：=]\s*"
    rf"|\b{_NOUN}(?:\s+(?:for|to|of|given)\s[^.\n]{{1,60}}?)?\s+(?:is|are|would be|could be|might be)\s*:?\s+"
    r"|(?:^|\n)\W{0,4}(?:respuesta|réponse|antwort|ответ|risposta|resposta|الإجابة|उत्तर)\s*[:：]\s*"
    r"|(?:答案|回答|答え|正解|정답|답)\s*(?:[:：]|是\s*[:：]?|は[、:：]?|은|는)\s*",
    re.IGNORECASE,
)
_REFUSAL = re.compile(
    r"^(?:(?:i'm|i am|we're)\s+(?:very\s+|so\s+|really\s+)?(?:sorry|unable|not (?:able|sure)|afraid)"
    r"|sorry\b|apologies|i apologi[sz]e|unfortunately\b|as an? (?:ai|language)|n/a\W*$"
    r"|i (?:cannot|can't|can not|could not|couldn't|won't|will not|do not|don't|am unable|need|must decline)\b"
    r"|(?:there (?:is|are|isn't|aren't) (?:not|no|insufficient)|not enough|insufficient)\b"
    r"|please (?:provide|give|share)|(?:could|can|would) you\b"
    r"|it(?:'s| is) (?:not possible|impossible|unclear|difficult|hard)"
    r"|(?:lo siento|désolé|je suis désolé|je ne (?:peux|suis)|es tut mir leid|ich kann (?:nicht|das)|entschuldigung"
    r"|mi dispiace|desculpe|извините|к сожалению|я не могу|抱歉|对不起|對不起"
    r"|很抱歉|我无法|无法|申し訳|すみません|죄송)"
    r")|\b(?:cannot|can't|unable to|not able to|impossible to|difficult to)\s+(?:be\s+)?(?:accurately\s+)?"
    r"(?:determined?|provided?|predict(?:ed)?|completed?|answer|assist|help|fulfill|comply|infer|guess|identify|generate|tell)",
    re.IGNORECASE,
)
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


def _without_thinking(text: str) -> str | None:
    """The reply without its reasoning; None when it ends inside of it."""
    said = _THINKING.sub("", text)
    said = re.split(r"</(?:think|thinking|reasoning)>", said, flags=re.IGNORECASE)[-1]
    if re.match(r"\s*<(?:think|thinking|reasoning)>", said, re.IGNORECASE):
        return None
    fenced = _FENCE.findall(said)
    return (fenced[-1] if fenced and fenced[-1].strip() else said).strip()


def _from_json(said: str) -> list[str] | None:
    """The strings of a reply that is JSON, or that ends in a JSON list; None if it is neither."""
    whole = _decoded(said)
    if whole is None:
        lists = re.findall(r"\[[^\[\]]*\]", said)
        labels = list(_LABEL.finditer(said))
        if not lists or (labels and said.rfind(lists[-1]) < labels[-1].start()):
            return None
        whole = _decoded(lists[-1])
    strings = _strings(whole) if isinstance(whole, list | dict | str) else []
    return strings or None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _strings(value: Any) -> list[str]:
    """All texts and numbers in nested lists and dicts, in order."""
    if isinstance(value, dict):
        value = list(cast("dict[Any, Any]", value).values())
    if isinstance(value, list | tuple):
        return [text for item in cast("Iterable[Any]", value) for text in _strings(item)]
    return [str(value)] if isinstance(value, str | int | float) and not isinstance(value, bool) else []


def _from_text(said: str, count: int) -> list[str]:
    labels = list(_LABEL.finditer(said))
    if labels and said[labels[-1].end() :].strip(_EDGES):
        said = said[labels[-1].end() :]
    lines = [line.strip() for line in said.splitlines() if line.strip(_EDGES)]
    lines = [line for line in lines if not (len(lines) > 1 and _is_preamble(line))] or lines
    if count == 1 and len(lines) == 1 and len(_words(lines[0])) > MAX_WORDS:
        bold = [match[2] for match in _EMPHASIS.finditer(lines[0]) if match[1].startswith(("**", "__"))]
        lines = bold if len(bold) == 1 else lines
    items = [item for line in lines for item in _items(_plain(line))]
    if count > 1 and len(items) == 1 and len(words := _words(items[0])) == count:
        return words
    return items


def _is_preamble(line: str) -> bool:
    plain = _plain(line)
    return plain.endswith((":", "：")) or _PREAMBLE.match(plain) is not None


def _plain(text: str) -> str:
    """Without markdown emphasis, with straight apostrophes, without what stands before the point."""
    text = _EMPHASIS.sub(r"\2", text.replace("’", "'")).strip()
    return _LEAD.sub("", text, count=1) if not _REFUSAL.match(text) else text


def _items(line: str) -> list[str]:
    """The entries of a line: one, or several with numbers or commas between them."""
    if len(numbers := _INLINE_NUMBER.findall(line)) > 1 and numbers:
        return [piece for piece in _INLINE_NUMBER.split(line) if piece.strip(_EDGES)]
    return [piece for piece in _SEPARATOR.split(_BULLET.sub("", line)) if piece.strip(_EDGES)]


def _tidy(item: str) -> str:
    """One answer without number, quotes, gloss and the punctuation around it."""
    item = _LEAD.sub("", _BULLET.sub("", _plain(item))).strip()
    if item[:1] in _CLOSING:
        end = min((at for mark in _CLOSING[item[0]] if (at := item.find(mark, 1)) > 0), default=0)
        item = item[1:end] if end and not item[end + 1 : end + 2].isalnum() else item
    return " ".join(_GLOSS.sub("", item).strip(_EDGES).split())


def _words(text: str) -> list[str]:
    return [word for word in text.split() if normal_form(word)]


def _is_prose(answer: str) -> bool:
    words = len(answer.split())
    refusal = words > 1 and _REFUSAL.search(answer) is not None
    return refusal or words > MAX_WORDS or len(_UNSPACED.findall(answer)) > MAX_UNSPACED
