"""Citations as HTML without scripts.

Style rules tie each sentence to the parts of sources that it was written from, and the other way
round: pointing at either colours the other.
"""

from __future__ import annotations

import math
import re
import secrets
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from typing import NamedTuple

from noiser.attribution.display import label, open_ended, shorten, visible
from noiser.attribution.markup import css, page_of_card, sentence_html, with_breaks
from noiser.explain.citations_record import (
    MEANINGS,
    VERDICTS,
    Citation,
    CitationsRecord,
    Quote,
    in_nats,
    title_length,
)
from noiser.explain.citations_summary import about_citations
from noiser.html import html_table
from noiser.numbers import NumberFormat, number_format
from noiser.tensors import float_rows
from noiser.text.chat import part_texts
from noiser.types import Source

# Up to this many sources, all are shown, also those that no sentence cites.
_AT_ONCE = 8

# Characters of a question that are shown: where the sources stand in it, it is long.
_CAUTION = "Whether the answer agrees with its sources is not checked."
_ASKED = 300

# Quotes in the table of the strongest, and characters of the sentence that one is for.
_MOST_QUOTES = 12
_QUOTED = 60

# Lines of a source that fit the height of the style, and characters of a line on a phone.
_LINES = 18
_LINE = 40


def page(citations: CitationsRecord) -> str:
    """A complete page."""
    title = f"{label(citations.answer)[:80]} – citations"
    return page_of_card(_card(citations, "noiser"), title, css("explain", "cite.css"))


def fragment(citations: CitationsRecord) -> str:
    """A piece of a page, such as a notebook's output; several can stand on one page."""
    # The identifier keeps the rules of several fragments on one page apart.
    card = _card(citations, f"noiser-{secrets.token_hex(6)}")
    return f"<style>{css()}{css('explain', 'cite.css')}</style>{card}"


def _card(citations: CitationsRecord, identifier: str) -> str:
    """The answer beside its sources; the scores in numbers, and how to read them, are folded."""
    strength = _Strength.of(citations)
    answer = ""
    position = len(citations.answer) - len(citations.answer.lstrip())
    for row, sentence in enumerate(citations.sentences):
        between = citations.answer[position : sentence.start]
        answer += with_breaks(visible(between)) + _sentence(citations, row, identifier, strength)
        position = sentence.end
    without = ""
    if citations.answer_without is not None:
        text = with_breaks(visible(open_ended(citations.answer_without.strip())))
        without = f"<h3>The answer without the sources</h3><p class=facts dir=auto>{text}</p>"
    legend = ""
    if any(sentence.citations for sentence in citations.sentences):
        legend = (
            "<p class=facts>The longer a bar, the more the answer, or its sentence, needs the "
            "source. No bar says how true it is.</p>"
        )
    footnotes = "".join(f"<p>{escape(text)}</p>" for text in citations.footnotes)
    is_cited = any(sentence.citations for sentence in citations.sentences)
    caution = f"<p class=facts>{_CAUTION}</p>" if is_cited else ""
    return (
        f"<style>{''.join(_rules(citations, identifier, strength))}</style>"
        f'<div class="noiser-att" id="{identifier}">{sentence_html(about_citations(citations))}'
        f"{caution}"
        f"<div class=noiser-cite><div>{_question(citations)}<h3>Answer</h3>"
        f"<p class=answer dir=auto>{answer}</p>{without}</div>"
        f"<div><h3>Sources</h3>{legend}{_sources(citations, identifier, strength)}</div></div>"
        f"{_numbers(citations, strength)}<details><summary>how to read this</summary>"
        f"<footer>{footnotes}</footer></details></div>"
    )


def _question(citations: CitationsRecord) -> str:
    """The beginning of the question: a text, or the last message of a chat."""
    question = citations.question
    text = question if isinstance(question, str) else " ".join(part_texts(question[-1]))
    shown = escape(shorten(label(text), _ASKED))
    return f"<h3>Question</h3><p class=facts dir=auto>{shown}</p>"


class _Strength(NamedTuple):
    """How strong citations look, in proportion to the largest score of the whole answer.

    A quote of 6 nats does not look like one of 1, whichever sentence cites it.

    Attributes:
        largest: of the scores of cited sources.
        show: the format of scores.
        unit: of scores, with a space before it; empty where it has no name.
    """

    largest: float
    show: NumberFormat
    unit: str

    @classmethod
    def of(cls, citations: CitationsRecord) -> _Strength:
        scores: list[float] = []
        for sentence in citations.sentences:
            scores += [citation.score for citation in sentence.citations]
        unit = " nats" if in_nats(citations.attribution) else ""
        return cls(max(scores, default=0.0) or 1.0, number_format(scores), unit)

    def share(self, score: float) -> float:
        """The strength of a score, 0 to 1."""
        return max(0.0, min(1.0, score / self.largest))

    def tint(self, score: float) -> str:
        """A colour and a bar below a text, as a style."""
        return f"--a:{self.share(score):.2f}"

    def bar(self, score: float, stderr: float, title: str = "") -> str:
        """A small bar, with its number where the pointer rests on it."""
        words = f"{title}{self.text(score, stderr)}"
        return (
            f'<i class=strength title="{escape(words)}" role=img aria-label="{escape(words)}">'
            f"<i style={self.tint(score)}></i></i>"
        )

    def text(self, score: float, stderr: float = math.nan) -> str:
        """A score with its unit."""
        return f"{self.show.with_error(score, stderr)}{self.unit}"


def _sentence(citations: CitationsRecord, row: int, identifier: str, strength: _Strength) -> str:
    """A sentence of the answer with its mark, whose numbers are links to the sources."""
    sentence = citations.sentences[row]
    if sentence.citations:
        best = sentence.citations[0]
        titles = [
            f"[{cited.number}] {strength.text(cited.score, cited.stderr)} ({cited.share:.0%})"
            for cited in sentence.citations
        ]
        bar = strength.bar(best.score, best.stderr, f"[{best.number}] ")
        mark = f"<span class=by>{_linked(sentence.mark, identifier)}{bar}</span>"
        style = f' style="{strength.tint(best.score)}"'
        kind = " cited"
    else:
        words = VERDICTS[sentence.verdict]
        name = words.replace(" ", "-")
        mark = f'<span class="memory {name}" tabindex=0>{words}</span>'
        titles = [MEANINGS[sentence.verdict]]
        style = ""
        kind = ""
    for alternative in sentence.alternatives:
        link = _linked(f"[{alternative.number}]", identifier)
        says = escape(label(alternative.says))
        mark += f" <span class=memory>without these: “{says}” {link}</span>"
    title = escape("\n".join([*titles, citations.numbers_of(sentence)]))
    return (
        f'<span class="s s{row}{kind}"{style} title="{title}">'
        f"{with_breaks(visible(sentence.text))} {mark}</span>"
    )


def _linked(mark: str, identifier: str) -> str:
    """A mark such as "[1][3]", each number a link to its source."""
    return re.sub(r"\[(\d+)\]", rf'<a href="#{identifier}-\1">[\1]</a>', mark)


def _sources(citations: CitationsRecord, identifier: str, strength: _Strength) -> str:
    """All sources; in a long list, the sources that no sentence names are folded."""
    cited: set[int] = set()
    alternatives: set[int] = set()
    for sentence in citations.sentences:
        cited.update(citation.number for citation in sentence.citations)
        alternatives.update(each.number for each in sentence.alternatives)
    mentioned = cited | alternatives
    titles = _titles(citations, strength)
    shown = ""
    folded = ""
    for number, source in enumerate(citations.sources, 1):
        card = _source(
            citations, source, number, identifier, strength, titles, is_cited=number in cited
        )
        if number in mentioned or len(citations.sources) <= _AT_ONCE:
            shown += card
        else:
            folded += card
    if not folded:
        return shown
    count = len(citations.sources) - len(mentioned)
    plural = "s" if count > 1 else ""
    summary = f"<summary>{count} source{plural} not cited</summary>"
    return f"{shown}<details>{summary}{folded}</details>"


def _source(
    citations: CitationsRecord,
    source: Source,
    number: int,
    identifier: str,
    strength: _Strength,
    titles: Mapping[int, str],
    *,
    is_cited: bool,
) -> str:
    """A source: its number, its title if it has one, how strongly it is cited, and its text."""
    lines = 0
    for line in source.text.split("\n"):
        lines += 1 + len(line) // _LINE
    # A long source scrolls, and with a tabindex it does so with the keyboard too.
    focus = " tabindex=0" if lines > _LINES else ""
    used = " used" if is_cited else ""
    bar = ""
    if is_cited:
        best = _best_citation(citations, number)
        bar = strength.bar(best.score, best.stderr)
    title = escape(label(source.title)) if source.title else ""
    return (
        f'<div class="source{used}" id="{identifier}-{number}" dir=auto{focus}>'
        f"<b>[{number}] {title}<i>{used}</i>{bar}</b>{_text(citations, source, titles)}</div>"
    )


def _best_citation(citations: CitationsRecord, number: int) -> Citation:
    """The strongest citation of a source among all sentences."""
    found: list[Citation] = []
    for sentence in citations.sentences:
        found += [citation for citation in sentence.citations if citation.number == number]
    return max(found, key=lambda citation: citation.score)


def _text(citations: CitationsRecord, source: Source, titles: Mapping[int, str]) -> str:
    """A source's text without its title, with an element for each unit of the attribution."""
    text = citations.attribution.text
    position = source.start + title_length(source)
    body = ""
    for column, unit in enumerate(citations.attribution.units):
        begin = max(unit.start, position)
        end = min(unit.end, source.end)
        if begin < end:
            # White space before a part belongs to no part, and has no colour.
            begin = end - len(text[begin:end].lstrip())
            before = with_breaks(visible(text[position:begin]))
            inside = with_breaks(visible(text[begin:end]))
            title = f' title="{escape(titles[column])}"' if column in titles else ""
            body += f'{before}<span class="q q{column}"{title}>{inside}</span>'
            position = end
    return body + with_breaks(visible(text[position : source.end]))


def _quotes(citations: CitationsRecord) -> Iterator[tuple[int, int, Quote]]:
    """The row of a sentence, the column of a unit and the quote, for all quotes of citations."""
    starts = [unit.start for unit in citations.attribution.units]
    for row, sentence in enumerate(citations.sentences):
        for citation in sentence.citations:
            for quote in citation.quotes:
                yield row, bisect_right(starts, quote.start) - 1, quote


def _titles(citations: CitationsRecord, strength: _Strength) -> dict[int, str]:
    """For each cited unit its score, for each sentence that cites it."""
    lines: defaultdict[int, list[str]] = defaultdict(list)
    for row, column, quote in _quotes(citations):
        words = shorten(label(citations.sentences[row].text), _QUOTED)
        lines[column].append(f"{strength.text(quote.score)} for “{words}”")
    return {column: "\n".join(texts) for column, texts in lines.items()}


def _rules(citations: CitationsRecord, identifier: str, strength: _Strength) -> Iterator[str]:
    """The strength of each cited unit, and two rules that tie it to the sentence that cites it."""
    largest: dict[int, float] = {}
    outline = "{outline:2px solid var(--focus);outline-offset:1px}"
    for row, column, quote in _quotes(citations):
        largest[column] = max(quote.score, largest.get(column, 0.0))
        yield f"#{identifier}:has(.s{row}:is(:hover,:focus-within)) .q{column}{outline}"
        yield f"#{identifier}:has(.q{column}:hover) .s{row}{outline}"
    for column, score in largest.items():
        yield f"#{identifier} .q{column}{{{strength.tint(score)}}}"


def _numbers(citations: CitationsRecord, strength: _Strength) -> str:
    """The scores, folded: the strongest quotes, then a row for each sentence with a column for each
    source.
    """
    numbers = [f"[{number}]" for number in range(1, len(citations.sources) + 1)]
    head = ["sentence", "all sources", *numbers]
    rows: list[list[str]] = []
    for sentence, scores in zip(citations.sentences, float_rows(citations.scores), strict=True):
        row = [escape(label(sentence.text))]
        for value in (sentence.loss, *scores):
            row.append("" if math.isnan(value) else f"{value:.2f}")
        rows.append(row)
    tables = _ranked_quotes(citations, strength) + html_table(head, rows)
    return f"<details><summary>scores in numbers</summary>{tables}</details>"


def _ranked_quotes(citations: CitationsRecord, strength: _Strength) -> str:
    """A table of the quotes, the strongest first: without a pointer, the place of their scores."""
    quotes: list[tuple[float, list[str]]] = []
    for sentence in citations.sentences:
        for citation in sentence.citations:
            for quote in citation.quotes:
                texts = (label(quote.text), f"[{citation.number}]", strength.text(quote.score))
                words = escape(shorten(label(sentence.text), _QUOTED))
                row = [*map(escape, texts), f"<div class=words>{words}</div>"]
                quotes.append((quote.score, row))
    if not quotes:
        return ""
    quotes.sort(key=lambda each: -each[0])
    return html_table(
        ["quote", "source", "score", "for"], [row for _, row in quotes[:_MOST_QUOTES]]
    )
