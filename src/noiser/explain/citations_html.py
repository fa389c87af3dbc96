"""Citations as HTML without scripts: style rules tie each sentence to what it was written from, and back."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator
from html import escape

from noiser.attribution.display import label, visible
from noiser.attribution.markup import css, page_of_card
from noiser.explain.citations_record import CitationsRecord, Sentence, title_length
from noiser.html import html_table
from noiser.types import Source

_AT_ONCE = 8  # sources that are all shown
_LINES, _LINE = (
    18,
    40,
)  # lines of a source that fit the height of the style, and characters of a line on a phone


def page(citations: CitationsRecord) -> str:
    """A complete page."""
    title = f"{label(citations.answer)[:80]} – citations"
    return page_of_card(_card(citations, "noiser"), title, css("explain", "cite.css"))


def fragment(citations: CitationsRecord) -> str:
    """A piece of a page, such as a notebook's output; several can stand on one page."""
    return f"<style>{css()}{css('explain', 'cite.css')}</style>{_card(citations, f'noiser-{secrets.token_hex(6)}')}"


def _card(citations: CitationsRecord, identifier: str) -> str:
    answer = "".join(
        _sentence(sentence, row, identifier) for row, sentence in enumerate(citations.sentences)
    ).strip()
    without = ""
    if citations.answer_without is not None:
        text = escape(visible(citations.answer_without.strip()))
        without = f"<h3>The answer without the sources</h3><p class=facts dir=auto>{text}</p>"
    feet = "".join(f"<p>{escape(text)}</p>" for text in citations.footnotes)
    return (
        f"<style>{''.join(_rules(citations, identifier))}</style>"
        f'<div class="noiser-att" id="{identifier}"><div class=noiser-cite><div><h3>Answer</h3>'
        f"<p class=answer dir=auto>{answer}</p>{without}</div>"
        f"<div><h3>Sources</h3>{_sources(citations, identifier)}</div></div>"
        f"{_numbers(citations)}<footer>{feet}</footer></div>"
    )


def _sentence(sentence: Sentence, row: int, identifier: str) -> str:
    text = visible(sentence.text)
    body = text.lstrip()

    def linked(mark: str) -> str:
        """The mark, each number a link to its source."""
        return re.sub(r"\[(\d+)\]", rf'<a href="#{identifier}-\1">[\1]</a>', mark)

    links = linked(sentence.mark)
    mark = (
        links
        if sentence.citations
        else f"<span class=memory tabindex=0>{escape(sentence.mark.strip('()'))}</span>"
    )
    if sentence.against:
        others = linked("".join(f"[{other.number}]" for other in sentence.against))
        mark += f" <span class=memory>against it: {others}</span>"
    space = escape(text[: len(text) - len(body)])
    return f'{space}<span class="s s{row}" title="{escape(sentence.numbers)}">{escape(body)} {mark}</span>'


def _sources(citations: CitationsRecord, identifier: str) -> str:
    """All sources; of a long list, those that no sentence names are folded."""
    cited = {citation.number for sentence in citations.sentences for citation in sentence.citations}
    against = {other.number for sentence in citations.sentences for other in sentence.against}
    named = cited | against
    cards: dict[bool, str] = {True: "", False: ""}
    for number, source in enumerate(citations.sources, 1):
        lines = sum(1 + len(line) // _LINE for line in source.text.split("\n"))
        long = " tabindex=0" if lines > _LINES else ""  # it scrolls, with the keyboard too
        used = " used" if number in cited else ""
        title = (
            f"<b>[{number}] {escape(label(source.title)) if source.title else ''}<i>{used}</i></b>"
        )
        text = _text(citations, source)
        shown = number in named or len(citations.sources) <= _AT_ONCE
        cards[shown] += (
            f'<div class="source{used}" id="{identifier}-{number}" dir=auto{long}>{title}{text}</div>'
        )
    rest = len(citations.sources) - len(named)
    folded = f"<details><summary>{rest} source{'s'[: rest > 1]} not cited</summary>{cards[False]}</details>"
    return cards[True] + folded * bool(cards[False])


def _text(citations: CitationsRecord, source: Source) -> str:
    """A source's text without its title, each unit of the attribution by itself."""
    text, position, shown = citations.attribution.text, source.start + title_length(source), ""
    for column, unit in enumerate(citations.attribution.units):
        begin, end = max(unit.start, position), min(unit.end, source.end)
        if begin < end:
            before, inside = escape(visible(text[position:begin])), escape(visible(text[begin:end]))
            shown += f'{before}<span class="q q{column}">{inside}</span>'
            position = end
    return shown + escape(visible(text[position : source.end]))


def _rules(citations: CitationsRecord, identifier: str) -> Iterator[str]:
    """The colour of each unit that a sentence was written from, and the two rules that tie it to the sentence."""
    starts = {
        (unit.start, unit.end): column for column, unit in enumerate(citations.attribution.units)
    }
    for row, sentence in enumerate(citations.sentences):
        quotes = [quote for citation in sentence.citations for quote in citation.quotes]
        largest = max((quote.score for quote in quotes), default=1.0)
        for quote in quotes:
            column = starts[quote.start, quote.end]
            colour = f"{{background:rgb(var(--pos)/{0.15 + 0.6 * quote.score / largest:.2f})}}"
            yield f"#{identifier} .q{column}{{background:rgb(var(--pos)/.2)}}"
            yield f"#{identifier}:has(.s{row}:is(:hover,:focus-within)) .q{column}{colour}"
            yield f"#{identifier}:has(.q{column}:hover) .s{row}{colour}"


def _numbers(citations: CitationsRecord) -> str:
    head = [
        "sentence",
        "all sources",
        *(f"[{number}]" for number in range(1, len(citations.sources) + 1)),
    ]
    rows: list[list[str]] = []
    for sentence, scores in zip(citations.sentences, citations.scores.tolist(), strict=True):
        values = ("" if math.isnan(value) else f"{value:.2f}" for value in (sentence.loss, *scores))
        rows.append([escape(label(sentence.text)), *values])
    return f"<details><summary>scores in numbers</summary>{html_table(head, rows)}</details>"
