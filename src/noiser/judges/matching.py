"""When an answer counts as the target."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["matches", "normal_form"]

_STRIPPED = " \t\n.,;:!?…'\"`*_~-–—()[]{}<>«»‹›„“”‚‘’¡¿。、，！？；：·「」『』（）【】《》〈〉،؛؟।॥"
_SPELLINGS = str.maketrans({"’": "'", "ʼ": "'", "‐": "-", "‑": "-"})
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")


def matches(answer: str, target: str) -> bool:
    """Whether a judge's answer is the target: the same text in normal form.

    The whole texts are compared. A target that is only the first token of a word (" Ant" of "Antarctica") is not
    equal to the word, and a longer answer is not equal to the target that it begins with; give the whole word as the
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
    return re.sub(r"\s+", " ", visible).strip(_STRIPPED)
