"""WikiBio as the paper's text describes it: the first two sentences of a Wikipedia biography."""

from __future__ import annotations

import re
from collections.abc import Iterable
from io import StringIO
from pathlib import Path
from typing import Any, cast

from noiser.data.dataset import DATA_SETS, Example, Reading, Recipe, Source, UpstreamFile
from noiser.data.files import read_json, read_text
from noiser.errors import DataError
from noiser.text import sentence_spans

FILE = "dataset-generated.json"

WIKIBIO = Source(
    files=(
        UpstreamFile(
            name=FILE,
            url="https://raw.githubusercontent.com/KAIST-CS584-HCI/selfcheckgpt-replication/f9e1f073c6c891fef4ed8b13f31d25e7b21c4f9b/data/dataset-generated.json",
            size=1_609_743,
            sha256="0fdda426bf1d4bd273f14cdca24aef8d853820a79ada6c4ec42a7638e23f6367",
        ),
    ),
    licence="text from Wikipedia, CC BY-SA 3.0; repository MIT",
    citation=(
        'Lebret, Grangier and Auli (2016), "Neural Text Generation from Structured Data"; selection: '
        'Manakul, Liusie and Gales (2023), "SelfCheckGPT"'
    ),
)

SENTENCES = 2
"""How many sentences of a biography make the prompt."""


def wikibio() -> Recipe:
    """The recipe of the first 119 biographies of SelfCheckGPT's selection; they have no target."""
    return Recipe(source=WIKIBIO, read=lambda paths: read_biographies(paths[FILE]))


def read_biographies(path: Path) -> Reading:
    """The first two sentences of every biography in a file; biographies with fewer are left out, and counted.

    Args:
        path: one of
            JSON, a list of objects with `wiki_bio_text` and perhaps `wiki_bio_test_idx` (SelfCheckGPT's selection);
            JSON, an object of lists of sentences, tokenised (a part of Lebret's set);
            `NAME.sent`, one tokenised sentence per line, with the number of sentences of each biography in `NAME.nb`
            beside it (Lebret's set itself). Tokenised text is joined again; its case is lost.

    Raises:
        DataError: the file cannot be read, or has another form.
    """
    biographies = _read_lines(path) if path.suffix == ".sent" else _read_records(path)
    examples = [
        Example(id=f"wikibio-{identity}", prompt=" ".join(sentences[:SENTENCES]), target=None, dataset="wikibio")
        for identity, sentences in biographies.items()
        if len(sentences) >= SENTENCES
    ]
    left_out = len(biographies) - len(examples)
    note = f"Left out {left_out} of {len(biographies)} biographies, which have fewer than {SENTENCES} sentences."
    return Reading(examples, (note,) * bool(left_out))


def first_sentences(text: str) -> list[str]:
    """The sentences of a text as `sentence_spans` has them, except that none ends in brackets ("(c. 1771 - 1848)")."""
    sentences: list[str] = []
    depth = 0
    for start, end in sentence_spans(text):
        piece = text[start:end]
        if depth > 0:
            sentences[-1] += piece
        else:
            sentences.append(piece)
        depth += piece.count("(") - piece.count(")")
    if depth > 0:  # a bracket that never closes says nothing about sentences
        sentences = [text[start:end] for start, end in sentence_spans(text)]
    return [sentence.strip() for sentence in sentences if sentence.strip()]


def _read_records(path: Path) -> dict[str, list[str]]:
    records: object = read_json(path)
    if isinstance(records, list) and all(_has_text(record) for record in cast("list[object]", records)):
        biographies = cast("list[dict[str, Any]]", records)
        return {
            str(record.get("wiki_bio_test_idx", number)): first_sentences(record["wiki_bio_text"])
            for number, record in enumerate(biographies)
        }
    if isinstance(records, dict) and all(_is_texts(item) for item in cast("dict[str, object]", records).values()):
        return {key: _clean(lines) for key, lines in cast("dict[str, list[str]]", records).items()}
    raise DataError(
        f"{path} holds no biographies; expected a JSON list of objects with wiki_bio_text, or a JSON object of lists "
        "of sentences, or a .sent file with its .nb file."
    )


def _has_text(record: object) -> bool:
    return isinstance(record, dict) and isinstance(cast("dict[str, object]", record).get("wiki_bio_text"), str)


def _is_texts(item: object) -> bool:
    return isinstance(item, list) and all(isinstance(line, str) for line in cast("list[object]", item))


def _read_lines(path: Path) -> dict[str, list[str]]:
    lines = [*StringIO(read_text(path))]  # cut at "\n" alone: U+0085 and its like stand inside of sentences
    counts_path = path.with_suffix(".nb")
    try:
        counts = [int(count) for count in read_text(counts_path).split()]
    except ValueError as error:
        raise DataError(f"{counts_path}: {error}; expected one number of sentences per line.") from error
    if sum(counts) != len(lines):
        raise DataError(
            f"{path} has {len(lines)} lines and {counts_path.name} counts {sum(counts)}; expected the same. Take both "
            "from one part of the data set."
        )
    rest = iter(lines)
    return {str(number): _clean([next(rest) for _ in range(count)]) for number, count in enumerate(counts)}


def _clean(lines: Iterable[str]) -> list[str]:
    return [text for line in lines if (text := detokenize(line))]


_SYMBOLS = {
    "-lrb-": "(", "-rrb-": ")", "-lsb-": "[", "-rsb-": "]", "-lcb-": "{", "-rcb-": "}", "--": "–",
}  # fmt: skip
_CLITIC = re.compile(r" ('(?:s|m|d|re|ve|ll)|n't)(?!\S)", re.IGNORECASE)
_OPENING = re.compile(r"(?<!\S)([(\[{$£€]) ")
_CLOSING = re.compile(r" ([)\]},.;:!?%])(?=[\s)\]},.;:!?\"]|$)")


def detokenize(line: str) -> str:
    r"""A line of Penn Treebank tokens as text: brackets, quotation marks, dashes, punctuation and clitics as printed.

    >>> detokenize("ann -lrb- born 4 may 1945 -rrb- is a poet 's daughter , and `` does n't '' write .")
    'ann (born 4 may 1945) is a poet\'s daughter, and "doesn\'t" write.'
    """
    text = " ".join(_SYMBOLS.get(token.lower(), token) for token in line.split())
    text = _CLITIC.sub(r"\1", text)
    text = re.sub(r"(?<!\S)`` ?", '"', text)
    text = re.sub(r" ?''(?!\S)", '"', text)
    text = _OPENING.sub(r"\1", text)
    return _CLOSING.sub(r"\1", text)


DATA_SETS.register("wikibio", wikibio, summary="119 biographies, the first two sentences of each")
