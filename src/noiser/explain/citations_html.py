"""Citations as HTML without scripts.

Style rules tie each sentence to the parts of sources that it was written from, and the other way
round: pointing at either colours the other.
"""

from __future__ import annotations

import math
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterator
from html import escape

from noiser.attribution.display import label, visible
from noiser.attribution.markup import css, page_of_card
from noiser.explain.citations_record import CitationsRecord, Quote, Sentence, title_length
from noiser.html import html_table
from noiser.types import Source

# Up to this many sources, all are shown, also those that no sentence cites.
_AT_ONCE = 8

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
    """The answer beside its sources, the scores in numbers, and how to read them."""
    answer = ""
    position = len(citations.answer) - len(citations.answer.lstrip())
    for row, sentence in enumerate(citations.sentences):
        between = citations.answer[position : sentence.start]
        answer += escape(visible(between)) + _sentence(sentence, row, identifier)
        position = sentence.end
    without = ""
    if citations.answer_without is not None:
        text = escape(visible(citations.answer_without.strip()))
        without = f"<h3>The answer without the sources</h3><p class=facts dir=auto>{text}</p>"
    footnotes = "".join(f"<p>{escape(text)}</p>" for text in citations.footnotes)
    return (
        f"<style>{''.join(_rules(citations, identifier))}</style>"
        f'<div class="noiser-att" id="{identifier}"><div class=noiser-cite><div><h3>Answer</h3>'
        f"<p class=answer dir=auto>{answer}</p>{without}</div>"
        f"<div><h3>Sources</h3>{_sources(citations, identifier)}</div></div>"
        f"{_numbers(citations)}<footer>{footnotes}</footer></div>"
    )


def _sentence(sentence: Sentence, row: int, identifier: str) -> str:
    """A sentence of the answer with its mark, whose numbers are links to the sources."""
    if sentence.citations:
        mark = _linked(sentence.mark, identifier)
    else:
        mark = f"<span class=memory tabindex=0>{escape(sentence.mark.strip('()'))}</span>"
    if sentence.against:
        numbers = "".join(f"[{opponent.number}]" for opponent in sentence.against)
        links = _linked(numbers, identifier)
        mark += f" <span class=memory>against it: {links}</span>"
    return (
        f'<span class="s s{row}" title="{escape(sentence.numbers)}">'
        f"{escape(visible(sentence.text))} {mark}</span>"
    )


def _linked(mark: str, identifier: str) -> str:
    """A mark such as "[1][3]", each number a link to its source."""
    return re.sub(r"\[(\d+)\]", rf'<a href="#{identifier}-\1">[\1]</a>', mark)


def _sources(citations: CitationsRecord, identifier: str) -> str:
    """All sources; in a long list, the sources that no sentence names are folded."""
    cited: set[int] = set()
    against: set[int] = set()
    for sentence in citations.sentences:
        cited.update(citation.number for citation in sentence.citations)
        against.update(opponent.number for opponent in sentence.against)
    mentioned = cited | against
    shown = ""
    folded = ""
    for number, source in enumerate(citations.sources, 1):
        card = _source(citations, source, number, identifier, is_cited=number in cited)
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
    citations: CitationsRecord, source: Source, number: int, identifier: str, *, is_cited: bool
) -> str:
    """A source: its number, its title if it has one, and its text."""
    lines = sum(1 + len(line) // _LINE for line in source.text.split("\n"))
    # A long source scrolls, and with a tabindex it does so with the keyboard too.
    focus = " tabindex=0" if lines > _LINES else ""
    used = " used" if is_cited else ""
    title = escape(label(source.title)) if source.title else ""
    return (
        f'<div class="source{used}" id="{identifier}-{number}" dir=auto{focus}>'
        f"<b>[{number}] {title}<i>{used}</i></b>{_text(citations, source)}</div>"
    )


def _text(citations: CitationsRecord, source: Source) -> str:
    """A source's text without its title, with an element for each unit of the attribution."""
    text = citations.attribution.text
    position = source.start + title_length(source)
    body = ""
    for column, unit in enumerate(citations.attribution.units):
        begin = max(unit.start, position)
        end = min(unit.end, source.end)
        if begin < end:
            before = escape(visible(text[position:begin]))
            inside = escape(visible(text[begin:end]))
            body += f'{before}<span class="q q{column}">{inside}</span>'
            position = end
    return body + escape(visible(text[position : source.end]))


def _rules(citations: CitationsRecord, identifier: str) -> Iterator[str]:
    """The colour of each cited unit, and two rules that tie it to the sentence that cites it."""
    starts = [unit.start for unit in citations.attribution.units]
    for row, sentence in enumerate(citations.sentences):
        quotes: list[Quote] = []
        for citation in sentence.citations:
            quotes += citation.quotes
        largest = max((quote.score for quote in quotes), default=1.0)
        for quote in quotes:
            column = bisect_right(starts, quote.start) - 1
            # Between 0.15 and 0.75, in proportion to the score.
            opacity = 0.15 + 0.6 * quote.score / largest
            colour = f"{{background:rgb(var(--pos)/{opacity:.2f})}}"
            yield f"#{identifier} .q{column}{{background:rgb(var(--pos)/.2)}}"
            yield f"#{identifier}:has(.s{row}:is(:hover,:focus-within)) .q{column}{colour}"
            yield f"#{identifier}:has(.q{column}:hover) .s{row}{colour}"


def _numbers(citations: CitationsRecord) -> str:
    """The scores as a folded table: a row for each sentence, a column for each source."""
    numbers = [f"[{number}]" for number in range(1, len(citations.sources) + 1)]
    head = ["sentence", "all sources", *numbers]
    rows: list[list[str]] = []
    for sentence, scores in zip(citations.sentences, citations.scores.tolist(), strict=True):
        row = [escape(label(sentence.text))]
        for value in (sentence.loss, *scores):
            row.append("" if math.isnan(value) else f"{value:.2f}")
        rows.append(row)
    return f"<details><summary>scores in numbers</summary>{html_table(head, rows)}</details>"
