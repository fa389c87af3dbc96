"""What a judge's reply says, and when an answer counts as the target: pure functions."""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import chain
from typing import Any, NamedTuple, cast

_STRIPPED = " \t\n.,;:!?…'\"`*_~-–—()[]{}<>«»‹›„“”‚‘’¡¿。、，！？；：·「」『』（）【】《》〈〉،؛؟।॥"
_SPELLINGS = str.maketrans({"’": "'", "ʼ": "'", "‐": "-", "‑": "-", "−": "-"})
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def matches(answer: str, target: str) -> bool:
    """Whether a judge's answer is the target: the same text in normal form.

    The whole texts are compared. A target that is only the first token of a word (" Ant" of "Antarctica") is not
    equal to the word, and a longer answer is not equal to a target that it begins with; give the whole word as the
    target where there is one, such as the gold answer of a data set. Accents and inner punctuation count.

    >>> matches("Basketball.", " basketball"), matches("ANTARCTICA", " Ant"), matches("Ｍoscow", "moscow")
    (True, False, True)
    """
    wanted = normal_form(target)
    return bool(wanted) and normal_form(answer) == wanted


def normal_form(text: str) -> str:
    """The text in Unicode's compatibility form, case-folded, without punctuation and whitespace around it.

    >>> normal_form('  "New  York!" ')
    'new york'
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    visible = _INVISIBLE.sub("", folded).translate(_SPELLINGS)
    return _stripped(re.sub(r"\s+", " ", visible), _STRIPPED)


def _stripped(text: str, edges: str, trailing: str | None = None) -> str:
    """The text without the characters around it, but with a number's sign."""
    rest = text.lstrip(edges)
    sign = text[: len(text) - len(rest)].endswith("-") and rest[:1].isdigit()
    return "-" * sign + rest.rstrip(trailing or edges)


MAX_WORDS = 6
"""Longer answers are sentences that were not understood."""

MAX_NAME = 3
"""Words of an answer that a sentence about answers may follow; a longer text there leads to the answer."""

MAX_UNSPACED = 12
"""The same in characters, for scripts without spaces between words."""

MAX_CHARACTERS = 20_000
"""Of a reply that are read, its last ones; patterns take time that grows faster than the text."""

MAX_LINE = 1_000
"""Characters of a line in which markdown emphasis is looked for; longer lines hold no answer."""


class Reading(NamedTuple):
    """What a reply says.

    Attributes:
        answers: best first; empty when the reply cannot be read.
        problem: why it cannot be read; None if it can.
    """

    answers: tuple[str, ...]
    problem: str | None


def parse_reply(text: str, count: int = 1, *, cut: bool = False) -> Reading:
    r"""The answers in a judge's reply.

    Understood are a bare word, quotes, numbering, bullets, JSON lists, markdown emphasis and code fences, "Answer:
    x", "The most probable word is x", <answer>x</answer> and \boxed{x}, lists with commas or one per line, glosses
    after a dash or in brackets, an explanation after the answer, and what a reasoning model puts between <think> tags.
    Not readable are an empty reply, a refusal, and a sentence in which no answer is marked.

    Args:
        text: the reply.
        count: how many answers were asked for; more are left out.
        cut: the reply ended because it was too long, so its last item may be half a word and is left out.

    >>> parse_reply('1. **Basketball**\n2. "Football"', 5).answers
    ('Basketball', 'Football')
    >>> parse_reply("I cannot tell from these words.").problem
    'refusal'
    """
    never_ends = _OPENING.match(text) and not _END.search(text)
    reply = None if never_ends else _without_thinking(text[-MAX_CHARACTERS:])
    if reply is None:
        return Reading((), "cut off while thinking")
    if not reply:
        return Reading((), "cut off" if cut else "empty")
    items = _from_json(reply, count)
    if items is None:
        if _REFUSAL.search(_plain(reply.splitlines()[0])):
            return Reading((), "refusal")
        items = _from_text(reply, count)
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
_TRAILING = "".join(character for character in _EDGES if character not in "#>=")  # C#
_TAGS = "think|thinking|reasoning"
_OPENING = re.compile(rf"\s*<(?:{_TAGS})>", re.IGNORECASE)
_END = re.compile(rf"</(?:{_TAGS})>", re.IGNORECASE)
_THINKING = re.compile(rf"<({_TAGS})>.*?</\1>", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_ANSWER = re.compile(r"<answer>([^<]*)</answer>", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{(?:\\text(?:bf)?\{)?([^{}]*)\}")
_STOPS = re.compile(r"(?:</s>|<\|\w+\|>|<end_of_turn>|\s)+$")  # what a server leaves of the model's own format
_TAIL = 200
_EMPHASIS = re.compile(r"(\*\*\*|\*\*|\*|__|(?<!`)`{1,3}(?!`))(?=\S)(.+?)(?<=\S)\1")
_BULLET = re.compile(
    r"^\s*(?:[-*•‣◦–—]\s+|#+\s+|>\s+|[(\[]?\d{1,2}[.)）\]]\s*(?=[^\d\s])|\(?(?:[a-e]\.\s+|[a-eA-E][)）]\s*)(?=[^\d\s])|\d{1,2}:\s+|\d、)"
)
_LETTER = re.compile(r"^\s*([A-E])\.\s+(?=[^\d\s])")  # a bullet in a list of several; alone, as in "E. coli", none
_INLINE_NUMBER = re.compile(r"(?:^|\s)\(?\d{1,2}[.)]\s+")
_SEPARATOR = re.compile(r"[;；、،؛|，]|,(?!\d)|\s[/·•]\s")
_GLOSS = re.compile(r"(?<=\w)(?:\s+[-–—=]+>?\s+|\s*[(（]|:\s|,?\s+because\b|,?\s+since\b).*", re.DOTALL)
_LEAD = re.compile(
    r"^(?:(?:sure|certainly|of course|okay|ok|great)\s*[!,.:]\s+|(?:probably|likely|perhaps|maybe)\s*,?\s+"
    r"|i(?:\s+would|'d)?\s+(?:think|believe|guess|say|predict)(?:\s+(?:it\s+is|it's|that))?\s*:?\s+"
    r"|it(?:\s+is|'s)(?:\s+(?:probably|likely))?\s+|(?:and|or)\s+)",
    re.IGNORECASE,
)
_PREAMBLE = re.compile(
    r"^(?:sure|certainly|of course|okay)\W*[!,.]$"
    r"|^(?:sure|certainly|of course|okay|here(?:'s| is| are)|let(?:'s| me)|based on|given)\b.*\s",
    re.IGNORECASE,
)
_SINGULAR = r"(?:answer|completion|word|prediction|response|output|guess)"
_NOUN = rf"{_SINGULAR}(?:e?s)?"
_OF = r"(?:\s+(?:for|to|of|given)\s[^.\n]{1,60}?)?\s+"
_LABEL = re.compile(
    rf"(?:^|\n)\W{{0,4}}(?:[a-z]+[ -]){{0,5}}{_NOUN}\s*[:：=]\s*"
    r"|(?:^|\n)\W{0,4}(?:respuesta|réponse|antwort|ответ|risposta|resposta|الإجابة|उत्तर)\s*[:：]\s*"
    r"|(?:答案|回答|答え|正解|정답|답)\s*(?:[:：]|是\s*[:：]?|は[、:：]?|은|는)\s*",
    re.IGNORECASE,
)
_PHRASE = re.compile(rf"\b{_NOUN}{_OF}(?:is|are|would be|could be|might be)\s*:?\s+", re.IGNORECASE)
_ANSWER_IS = re.compile(rf"^.*\b{_SINGULAR}{_OF}(?:is|would be|could be|might be)\s*:?\s+", re.IGNORECASE)
_CLAUSE = re.compile(r"[\n.!?(（]|\s[-–—]\s")  # what a clause begins after
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
    """The reply without its reasoning, or the last part marked as the answer; None when it ends in the reasoning."""
    reply = _END.split(_THINKING.sub("", text))[-1].rstrip()
    reply = reply[:-_TAIL] + _STOPS.sub("", reply[-_TAIL:])
    if _OPENING.match(reply):
        return None
    for marked in (_FENCE, _ANSWER, _BOXED):
        found = marked.findall(reply)
        reply = found[-1] if found and found[-1].strip() else reply
    return reply.strip()


def _from_json(reply: str, count: int) -> list[str] | None:
    """The strings of a reply that is JSON, or whose answer is its last JSON list; None if neither is so."""
    value = _decoded(reply)
    if value is None:
        lists = re.findall(r"\[[^\[\]]*\]", reply)
        value = _decoded(lists[-1]) if lists else None
        texts = [item for item in cast("list[Any]", value) if isinstance(item, str)] if isinstance(value, list) else []
        if not texts:
            return None  # "[1]" before an answer
        after = reply[reply.rfind(lists[-1]) :]
        if (_LABEL.search(after) or _PHRASE.search(after)) and not len(texts) == count > 1:
            return None  # perhaps the words of the question
    if isinstance(value, dict):
        value = _answer_in(cast("dict[str, Any]", value))
    return _strings(value) if isinstance(value, list | dict | str) else None


def _answer_in(value: dict[str, Any]) -> Any:
    """What a JSON object gives under the name of an answer, beside its reasons; else the object."""
    for noun in ("answers?", _NOUN):
        named = [item for key, item in value.items() if re.search(rf"(?<![a-z]){noun}(?![a-z])", key, re.IGNORECASE)]
        if named:
            return named
    return value


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _strings(value: Any) -> list[str]:
    """All texts and numbers in nested lists and dicts, in order."""
    strings: list[str] = []
    left: list[Any] = [value]
    while left:  # not recursive: a reply may be nested more deeply than Python's stack
        item = left.pop()
        if isinstance(item, dict | list):
            items = item.values() if isinstance(item, dict) else item
            left.extend(reversed([*items]))
        elif isinstance(item, str | int | float) and not isinstance(item, bool):
            strings.append(str(item))
    return strings


def _from_text(reply: str, count: int) -> list[str]:
    reply, is_marked = _after_label(reply, count)
    lines = _lines(reply)
    lines = [line for line in lines if not (len(lines) > 1 and _is_preamble(line))] or lines
    if count == 1 and len(lines) == 1 and len(_words(lines[0])) > MAX_WORDS:
        bold = [match[2] for match in _EMPHASIS.finditer(lines[0][:MAX_LINE]) if match[1].startswith(("**", "__"))]
        lines = bold if len(bold) == 1 else lines
    if count == 1 and not is_marked and lines and _is_sentence(lines[0]):
        return lines
    letters = [match[1] if (match := _LETTER.match(line)) else "" for line in lines]
    if len(lines) > 1 and "".join(letters) == "ABCDE"[: len(lines)]:
        lines = [_LETTER.sub("", line) for line in lines]
    items = [item for line in lines for item in _items(_plain(line))]
    if count > 1 and len(items) == 1 and len(words := _words(items[0])) == count:
        return words
    return items


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip(_EDGES)]


def _after_label(reply: str, count: int) -> tuple[str, bool]:
    """What follows the last label, such as "Answer:" at a line's start or "the answer is", and whether there is one.

    A phrase such as "the answer is" after an answer explains it, and is left out.
    """
    labels = [match.end() for match in _LABEL.finditer(reply) if reply[match.end() :].strip(_EDGES)]
    text = reply[labels[-1] :] if labels else reply
    for phrase in reversed([*_PHRASE.finditer(text)]):
        clauses = [match.end() for match in _CLAUSE.finditer(text, 0, phrase.start())]
        before = text[: clauses[-1]] if clauses else ""
        if _is_answer(before[:MAX_LINE], count):
            text = before
        elif text[phrase.end() :].strip(_EDGES):
            return text[phrase.end() :], True
    return text, bool(labels)


def _is_answer(text: str, count: int) -> bool:
    """Whether the text begins with an answer or, where several are wanted, a list, which else is the question's."""
    lines = [_items(_plain(_ANSWER_IS.sub("", line))) for line in _lines(text) if not _is_preamble(line)]
    return bool(lines) and all(map(_is_short, lines[0])) and (count > 1 or sum(map(_is_short, chain(*lines))) == 1)


def _is_short(item: str) -> bool:
    return len(_words(_tidy(item))) <= MAX_NAME


def _is_sentence(line: str) -> bool:
    """Whether a line is a sentence, whose commas separate no answers."""
    return _is_prose(_tidy(line)) and not all(map(_is_short, _items(_plain(line))))


def _is_preamble(line: str) -> bool:
    plain = _plain(line)
    return plain.endswith((":", "：")) or _PREAMBLE.match(plain) is not None


def _plain(text: str) -> str:
    """The text without markdown emphasis and lead-ins such as "I think", with straight apostrophes."""
    text = text.replace("’", "'")
    text = (_EMPHASIS.sub(r"\2", text) if len(text) <= MAX_LINE else text).strip()
    return _LEAD.sub("", text, count=1) if not _REFUSAL.match(text) else text


def _items(line: str) -> list[str]:
    """The items of a line: one, or several with numbers or commas between them."""
    if len(_INLINE_NUMBER.findall(line)) > 1:
        return [piece for piece in _INLINE_NUMBER.split(line) if piece.strip(_EDGES)]
    return [piece for piece in _SEPARATOR.split(_BULLET.sub("", line)) if piece.strip(_EDGES)]


def _tidy(item: str) -> str:
    """One answer without number, quotes, gloss and the punctuation around it."""
    item = _LEAD.sub("", _BULLET.sub("", _plain(item))).strip()
    if item[:1] in _CLOSING:
        end = min((at for mark in _CLOSING[item[0]] if (at := item.find(mark, 1)) > 0), default=0)
        item = item[1:end] if end and not item[end + 1 : end + 2].isalnum() else item
    return " ".join(_stripped(_GLOSS.sub("", item), _EDGES, _TRAILING).split())


def _words(text: str) -> list[str]:
    return [word for word in text.split() if normal_form(word)]


def _is_prose(answer: str) -> bool:
    words = len(answer.split())
    refusal = words > 1 and _REFUSAL.search(answer) is not None
    return refusal or words > MAX_WORDS or len(_UNSPACED.findall(answer)) > MAX_UNSPACED
