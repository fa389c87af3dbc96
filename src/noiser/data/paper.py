"""The paper's data sets, from the files that their authors published: KNOWN, LongRA, WikiText and WikiBio."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from noiser.data.dataset import DATA_SETS, Example, Reading, Recipe, Source, Spans, UpstreamFile
from noiser.text import sentence_spans

HOLES = {
    "currency": 6,
    "family": 4,
    "gram2-opposite": 4,
    "gram3-comparative": 4,
    "gram8-plural": 6,
    "gram9-plural-verbs": 3,
}
"""LongRA's categories with malformed records: how many words of the prompt precede the deleted antecedent."""

SENTENCES = 2
"""How many sentences of a biography make a prompt of WikiBio."""


def read_known(paths: Mapping[str, Path]) -> Reading:
    """KNOWN with every prompt once, as the paper counts it (1208).

    An example's category is its relation; its span "subject" is what the fact is about.
    """
    examples = [_known_example(record) for record in _records(paths)]
    first: dict[str, Example] = {}
    repeats = {e.id: first[e.prompt].id for e in examples if first.setdefault(e.prompt, e) is not e}
    removed = "; ".join(
        f"{again} repeats the prompt of {before}" for again, before in repeats.items()
    )
    return Reading(
        list(first.values()), (f"Removed {len(repeats)} of {len(examples)} records: {removed}.",)
    )


def _records(paths: Mapping[str, Path]) -> list[dict[str, Any]]:
    (path,) = paths.values()
    return json.loads(path.read_bytes())


def _known_example(record: Mapping[str, Any]) -> Example:
    start = record["prompt"].index(record["subject"])
    return Example(
        id=f"known-{record['known_id']}",
        prompt=record["prompt"],
        target=record["attribute"],
        dataset="known",
        category=record["relation_id"],
        spans={"subject": ((start, start + len(record["subject"])),)},
        meta={name: record[name] for name in ("subject", "template", "prediction")},
    )


def read_longra(paths: Mapping[str, Path]) -> Reading:
    """LongRA's 573 records, each with its antecedent.

    A record asks for one word of a pair; the other word, the antecedent, stands early in the prompt, before a sentence
    in brackets. In six of the 14 categories the published file has the pair the wrong way round: 186 records have lost
    the antecedent, end in the word that is asked for, and name the antecedent as the answer. They are repaired.

    The spans of an example are "antecedent", "distractor" and, in the categories whose prompts end in the noun that
    names the answer's kind ("capital" in capital-world), "last_content_word".
    """
    examples = [_longra_example(record) for record in _records(paths)]
    repaired = sum(bool(example.meta["repaired"]) for example in examples)
    return Reading(
        examples,
        (f"Repaired {repaired} of {len(examples)} records, malformed in {', '.join(paths)}.",),
    )


def _longra_example(record: Mapping[str, Any]) -> Example:
    prompt, target, relative = record["prompt"], record["target"], record["relative"]
    if repaired := prompt.endswith(f" {relative}"):
        prompt, target, relative = (
            _repaired(prompt, target, HOLES[record["type"]]),
            relative,
            target,
        )
    return Example(
        id=f"longra-{record['id']}",
        prompt=prompt,
        target=target,
        dataset="longra",
        category=record["type"],
        spans=_longra_spans(prompt, relative),
        meta={"relative": relative, "repaired": repaired},
    )


def _repaired(prompt: str, antecedent: str, hole: int) -> str:
    """The prompt without its last word, which is the answer, and with the antecedent after so many words."""
    prompt = prompt.rpartition(" ")[0]
    before = [*re.finditer(r"\S+", prompt)][hole - 1]
    end = before.start() + len(before[0].rstrip(",."))  # its punctuation was not deleted
    return f"{prompt[:end]} {antecedent}{prompt[end:]}"


def _longra_spans(prompt: str, antecedent: str) -> Spans:
    parts = {
        "antecedent": re.search(rf"\b({re.escape(antecedent)})\b", prompt),
        "distractor": re.search(r"(\([^()]*\)\.?)", prompt),
        "last_content_word": re.search(r"(\w+),$", prompt),
    }
    return {name: (found.span(1),) for name, found in parts.items() if found}


def read_wikitext(paths: Mapping[str, Path]) -> Reading:
    """Every line without the whitespace around it, as the paper's authors use them; no target."""
    (path,) = paths.values()
    lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    changed = sum(line != line.strip() for line in lines)
    examples = [
        Example(id=f"wikitext-{number}", prompt=line.strip(), target=None, dataset="wikitext")
        for number, line in enumerate(lines)
    ]
    return Reading(
        examples, (f"Removed the whitespace at the ends of {changed} of {len(lines)} lines.",)
    )


def read_biographies(paths: Mapping[str, Path]) -> Reading:
    """The first two sentences of the first 119 biographies of SelfCheckGPT's selection; no target."""
    biographies = {
        record["wiki_bio_test_idx"]: record["wiki_bio_text"] for record in _records(paths)
    }
    prompts = {
        f"wikibio-{i}": " ".join(first_sentences(text)[:SENTENCES])
        for i, text in biographies.items()
    }
    return Reading(
        [
            Example(id=i, prompt=prompt, target=None, dataset="wikibio")
            for i, prompt in prompts.items()
        ]
    )


def first_sentences(text: str) -> list[str]:
    """The sentences of a text as `sentence_spans` has them, except that none ends in brackets ("(c. 1771 - 1848)")."""
    joined, depth = list[str](), 0
    for start, end in sentence_spans(text):
        piece = text[start:end]
        joined.append(joined.pop() + piece if depth > 0 else piece)
        depth += piece.count("(") - piece.count(")")
    return [sentence.strip() for sentence in joined if sentence.strip()]


for _name, _summary, _read, _licence, _citation, _file, _url, _size, _sha256 in (
    (
        "known",
        "1208 facts to complete with one word, by relation",
        read_known,
        "none stated for the file; its authors' repository kmeng01/rome is MIT",
        'Meng, Bau, Andonian and Belinkov (2022), "Locating and Editing Factual Associations in GPT"',
        "known_1000.json",
        "https://rome.baulab.info/data/dsets/known_1000.json",
        343_229,
        "61daca55318bb5260c1e62e133debef9102c7b278bbc7b19dd2ac655543f333a",
    ),
    (
        "longra",
        "573 word pairs, to be completed across a distracting sentence",
        read_longra,
        "none stated for the file; its word pairs are from tmikolov/word2vec (Apache-2.0), its templates from "
        "keyonvafa/sequential-rationales (MIT)",
        'Vafa, Deng, Blei and Rush (2021), "Rationales for Sequential Predictions"',
        "LongRA.json",
        "https://raw.githubusercontent.com/qasemii/Noiser/edc80e6b6885bd4ad10321aa7916b3b0ca0b4edb/data/LongRA.json",
        160_429,
        "81ef4fbf6d4d523eaad026eadf0ad9839caa22f18aee1127952f1e60de0fecb1",
    ),
    (
        "wikitext",
        '22 beginnings of Wikipedia sentences: "WikiBio" in the paper\'s runs',
        read_wikitext,
        "text from Wikipedia, CC BY-SA; repository MIT",
        'Zhao and Shan (2024), "ReAGent: A Model-agnostic Feature Attribution Method for Generative Language Models"',
        "wikitext.txt",
        "https://raw.githubusercontent.com/casszhao/ReAGent/780977384e4cd9eb53c1093e04643aa0f89d7f81/data/benchmark/wikitext.txt",
        1_895,
        "b2034a1c76ad2c445d95287d551d8045100f1a56b655fbaf31b9f1d494980939",
    ),
    (
        "wikibio",
        "119 biographies, the first two sentences of each",
        read_biographies,
        "text from Wikipedia, CC BY-SA 3.0; repository MIT",
        'Lebret, Grangier and Auli (2016), "Neural Text Generation from Structured Data"; selection: '
        'Manakul, Liusie and Gales (2023), "SelfCheckGPT"',
        "dataset-generated.json",
        "https://raw.githubusercontent.com/KAIST-CS584-HCI/selfcheckgpt-replication/f9e1f073c6c891fef4ed8b13f31d25e7b21c4f9b/data/dataset-generated.json",
        1_609_743,
        "0fdda426bf1d4bd273f14cdca24aef8d853820a79ada6c4ec42a7638e23f6367",
    ),
):
    _source = Source(
        files=(UpstreamFile(_file, _url, _size, _sha256),), licence=_licence, citation=_citation
    )
    DATA_SETS.register(_name, partial(Recipe, source=_source, read=_read), summary=_summary)
