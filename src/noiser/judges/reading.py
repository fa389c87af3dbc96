"""Words and answers read from a judge's reply."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, NamedTuple, cast

MAX_WORDS = 6
"""Words of the longest answer; longer texts are sentences."""

MAX_UNSPACED = 12
"""Characters of the longest answer in scripts without spaces."""

# Punctuation and whitespace around an answer.
_EDGES = " \t\n.,;:!?…。、，！？；：·،؛؟।॥*_~`>–—=()[]{}（）【】\"'“”„‘’‚«»‹›「」『』《》〈〉"

# A reasoning model's thought, which may lack its end.
_THINKING = re.compile(r"<(think|thinking|reasoning)>.*?(?:</\1>|\Z)", re.S | re.I)

# An answer in a form of its own: a tag, LaTeX, or a block of code.
_MARKED = re.compile(
    r"<answer>([^<]*)</answer>|\\boxed\{(?:\\text\{)?([^{}]*)|```\w*\n(.*?)```", re.DOTALL
)

# What leads to an answer, such as "Final answer:" or "the most probable word is".
_LABEL = re.compile(
    r"^\W{0,4}(?:final |my )?"
    r"(?:answer|completion|word|prediction|答案|ответ|الإجابة)s?\W{0,3}[:：=]\W*"
    r"|\b(?:answer|completion|word|prediction)s?\b[^\n.:]{0,60}?\s(?:is|are|would be)\b:?\s*"
    r"|答案是",
    re.I | re.M,
)

# Words before an answer on its line, such as "Sure, " or "I think ".
_LEAD = re.compile(
    r"^(?:(?:sure|certainly|okay)\W+|(?:i (?:would )?(?:think|say)|it(?:'s| is))\b:?\s*|and )", re.I
)

# Words of a reply that gives no answer.
_REFUSAL = re.compile(
    r"\b(?:cannot|can't|unable|sorry|unfortunately|as an ai|not enough|impossible"
    r"|please (?:provide|give)|could you|n/a|lo siento|désolé|es tut mir leid)\b|抱歉|извините",
    re.I,
)

# The mark of an item in a list: "- ", "1. ", "(b) ".
_BULLET = re.compile(r"^\s*(?:[-*•#]\s+|[(\[]?\d{1,2}[.):\]]\s*(?=\D)|\(?[a-e][.)]\s+)")

# An explanation after an answer: " - since ...", " (a sport)", " because ...".
_GLOSS = re.compile(
    r"(?:\s+[-–—]\s|\s*[(（]|:\s|,?\s+because\b|,\s+as\b|(?<=\w{3})\.\s+(?=[A-Z])).*", re.DOTALL
)

# Characters of Thai, Lao, Japanese and Chinese, which have no spaces between words.
_UNSPACED = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")

# Characters that a chat format may consist of, and controls that hide or reorder text.
ESCAPED = re.compile("[<>\\[\\]\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class ParsedReply(NamedTuple):
    """The answers in a reply, best first; or the reason why it cannot be read."""

    answers: tuple[str, ...]
    problem: str | None


def parse_reply(text: str, count: int = 1, *, cut: bool = False) -> ParsedReply:
    """The answers in a judge's reply: JSON, a list, a labelled answer or the first short line.

    Args:
        text: the reply.
        count: the number of answers that were asked for; more are left out.
        cut: whether the reply reached its longest length, so that its last item may be half a word
            and is left out.

    >>> parse_reply("The most probable word is **basketball**.").answers
    ('basketball',)
    >>> parse_reply("I cannot tell from these words.").problem
    'refusal'
    """
    reply = _THINKING.sub("", text).rpartition("</think>")[2].strip().replace("’", "'")
    marked = _MARKED.findall(reply)
    if marked:
        last = next(filter(None, marked[-1]), "")  # of the groups, the one that matched
        reply = last.strip() or reply
    if not reply:
        return ParsedReply((), "cut off" if cut else "empty")
    if "given a set of words extracted from a prompt" in reply.lower():
        return ParsedReply((), "the question again")
    if _REFUSAL.search(reply.splitlines()[0]):
        return ParsedReply((), "refusal")
    items = _from_json(reply)
    if items is None:
        items = _from_text(reply, count)
    complete = items[:-1] if cut else items
    answers = [answer for answer in map(_tidy, complete) if answer][:count]
    short = tuple(answer for answer in answers if not _is_sentence(answer))
    if short:
        return ParsedReply(short, None)
    if answers:
        return ParsedReply((), "a sentence, not a word")
    return ParsedReply((), "cut off" if cut and items else "no word in it")


def _from_json(reply: str) -> list[str] | None:
    """The texts of a reply that is JSON, or of its last list; None for a reply of words."""
    text = re.sub(r"^json:?\s*", "", reply, flags=re.I) or reply
    lists = re.findall(r"\[[^\[\]]*\]", text)
    is_json_itself = text[0] in '{"'
    try:
        value: Any = json.loads(lists[-1] if lists and not is_json_itself else text)
    except (ValueError, RecursionError):
        if text[0] == "{":
            return []
        if text.startswith('["'):  # a list that is cut off
            return re.findall(r'"([^"]*)"?', text)
        return None
    texts = _texts_of(value)
    if texts:
        return texts
    # Without texts, an object or a list is an empty answer; "[1] word" is a reply of words.
    is_list_or_object = text[0] in "{[" and not re.match(r"\[\d", text)
    return [] if is_list_or_object else None


def _texts_of(value: Any) -> list[str]:
    """The texts in a value of JSON.

    An object's answer is under a key such as "answer", else in all of its values. An item that is
    an object counts by its first value.
    """
    if isinstance(value, dict):
        value = _answer_in(cast("dict[str, Any]", value))
    values = cast("list[Any]", value if isinstance(value, list) else [value])
    texts: list[str] = []
    for item in values:
        if isinstance(item, dict):
            item = next(iter(cast("dict[str, Any]", item).values()), "")
        if isinstance(item, str):
            texts.append(item)
    return texts


def _answer_in(fields: dict[str, Any]) -> Any:
    for key, value in fields.items():
        if re.search("answer|completion", key, re.I):
            return value
    return [*fields.values()]


def _from_text(reply: str, count: int) -> list[str]:
    """The lines of a reply, from its label on; or for several answers the items of the lines."""
    lines = _answer_lines(reply)
    if count == 1:
        return lines
    items: list[str] = []
    for line in lines:
        for item in re.split(r"[;、]\s*|,\s+|\s(?=\d\.\s)", line):
            if item.strip(_EDGES):
                items.append(item)
    words = " ".join(items).split()
    if len(items) == 1 and len(words) == count:  # the answers with spaces between them
        return words
    return items


def _answer_lines(reply: str) -> list[str]:
    """The lines of a reply that may hold an answer.

    They begin after the first label, such as "The answer is", unless the first line is an answer.
    """
    lines: list[str] = []
    for line in reply.splitlines():
        is_heading = line.rstrip(" *").endswith((":", "："))
        if line.strip(_EDGES) and not is_heading:
            lines.append(line)
    first = _tidy(lines[0]) if lines else ""
    is_answer = first and not (
        _LABEL.match(lines[0]) or _LABEL.search(first) or _is_sentence(first)
    )
    if is_answer:
        return lines
    for label in _LABEL.finditer(reply):
        if reply[label.end() :].strip(_EDGES):
            return reply[label.end() :].splitlines()
    return lines


def _tidy(item: str) -> str:
    """An answer without bullet, emphasis, gloss and the punctuation around it."""
    item = _LEAD.sub("", _BULLET.sub("", item))
    item = re.sub(r"(\*\*|__|`)(.+?)\1", r"\2", item).strip()
    without_gloss = _GLOSS.sub("", item).strip(_EDGES)
    return " ".join((without_gloss or item.strip(_EDGES)).split())


def _is_sentence(answer: str) -> bool:
    return len(answer.split()) > MAX_WORDS or len(_UNSPACED.findall(answer)) > MAX_UNSPACED


def normal_form(text: str) -> str:
    """The text in Unicode's compatibility form, case-folded.

    The punctuation and whitespace around it is removed.
    """
    compatible = unicodedata.normalize("NFKC", text)
    folded = unicodedata.normalize("NFKC", compatible.casefold())
    plain = folded.translate({0x2019: "'", 0x2010: "-", 0x2212: "-", 0x200F: None})
    plain = re.sub(r"\s+", " ", plain).strip(_EDGES)
    return plain if plain.strip("-") else ""


def matches(answer: str, target: str) -> bool:
    """Whether a judge's answer is the target: the same whole text in normal form.

    >>> matches("Basketball.", " basketball"), matches("ANTARCTICA", " Ant")
    (True, False)
    """
    return bool(normal_form(target)) and normal_form(answer) == normal_form(target)
