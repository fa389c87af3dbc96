"""Does unit="auto" find the sentence that an answer comes from, and at what cost, as prompts grow?

    python benchmarks/long_prompts.py RESULTS.jsonl --tokens 2000 --prompts 5 --methods noiser noiser_relative occlusion
    python benchmarks/long_prompts.py RESULTS.jsonl --tokens 200 --prompts 20 --methods noiser --full
    python benchmarks/long_prompts.py RESULTS.jsonl --table

A prompt is a document of made-up sentences, one of which states a code word, and a question about that word at its end.
Prompts that the model does not answer with the word are counted and left out. The sentence is *found* when it has the
largest score of all sentences of the document; where the budget was spent before a run of sentences was split, that
run counts as one sentence, which is not the planted one. `--full` scores every token too (unit="token"), sums its
scores over the same sentences, and compares. Each line of the file is one prompt and method; those that are there are
not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr

import noiser
from measuring import watch_memory
from noiser.methods import make_method
from noiser.model import LanguageModel, build_query
from noiser.types import Span

FILLER = {
    "who": "The baker|A young clerk|The old gardener|My neighbour|The ferryman|A retired teacher|The night porter|"
    "The carpenter|A travelling cook|The librarian|The beekeeper|A quiet engineer|The glazier|A tall surveyor",
    "did": "repaired|painted|carried|borrowed|forgot|described|sold|cleaned|measured|hid|admired|copied|wrapped|drew",
    "what": "a wooden chair|two copper kettles|the torn map|a box of candles|the blue bicycle|an iron gate|"
    "three old letters|a basket of pears|the broken clock|a roll of canvas|the garden wall|a pair of boots",
    "where": "behind the mill|near the harbour|in the empty hall|by the river|at the edge of the village|"
    "under the bridge|beside the orchard|on the market square|in the attic|across the valley",
    "when": "before breakfast|on a rainy Tuesday|late in the autumn|after the concert|during the long winter|at noon|"
    "while the others slept|without telling anyone|for the second time|to pass the afternoon",
}
SHAPES = (
    "{who} {did} {what} {where}.",
    "{who} {did} {what} {when}.",
    "{who} {did} {what} {where} {when}.",
    "It was said that {who} {did} {what} {where}.",
    "Nobody noticed when {who} {did} {what} {when}.",
)
PLACES = "northern|southern|coastal|mountain|desert|island|forest|river"
KINDS = ("model", "dtype", "tokens", "method", "samples", "search", "max_seconds")
HEADS = (
    "model|precision|tokens|method|samples|search|budget, s"
    "|prompts|not answered|found|seconds|CPU seconds|token-forwards|GiB"
    "|full resolution: found|same top|rank correlation|CPU seconds"
)
WORDS = "silver|garden|window|orange|dragon|planet|castle|summer|copper|winter|shadow|engine|button|rocket|violin|lemon"


class Document(NamedTuple):
    """A document with a question: its sentences' places in the prompt, which of them is the planted one, the answer."""

    prompt: str
    sentences: tuple[tuple[int, int], ...]
    planted: int
    answer: str


def document(lm: LanguageModel, tokens: int, seed: int) -> Document:
    """About this many tokens of made-up sentences, special tokens and question included; the fact is anywhere."""
    chance = random.Random(seed)
    place, answer = chance.choice(PLACES.split("|")), chance.choice(WORDS.split("|"))
    fact = f"The code word of the {place} station is {answer}."
    question = (
        f"\n\nQuestion: What is the code word of the {place} station?\nAnswer: The code word of the {place} station is"
    )
    lines = [fact]
    left = tokens - len(lm.tokenizer(" ".join([fact, question]))["input_ids"])
    while left > 0:
        words = {name: chance.choice(choices.split("|")) for name, choices in FILLER.items()}
        shape = chance.choice(SHAPES)
        words["who"] = words["who"] if shape.startswith("{who}") else words["who"][0].lower() + words["who"][1:]
        lines.append(shape.format(**words))
        left -= len(lm.tokenizer(" " + lines[-1], add_special_tokens=False)["input_ids"])
    planted = chance.randrange(len(lines))
    lines[0], lines[planted] = lines[planted], lines[0]
    text, spans = "", []
    for line in lines:
        begin = len(text)
        text += " " * bool(text) + line
        spans.append((begin, len(text)))
    return Document(text + question, tuple(spans), planted, answer)


class Found(NamedTuple):
    """Scores summed over the sentences of a document; neighbours that are one unit have the unit's score, once."""

    best: tuple[int, ...]
    sums: list[float]
    groups: list[tuple[int, ...]]


def by_sentence(units: Sequence[Span], scores: torch.Tensor, document: Document) -> Found:
    """Sums what each sentence's units carry; a unit of several sentences keeps them together."""
    groups = [(i,) for i in range(len(document.sentences))]
    sums = [0.0] * len(groups)
    for unit, score in zip(units, scores.tolist(), strict=True):
        inside = tuple(
            i for i, (a, b) in enumerate(document.sentences) if min(b, unit.end) - max(a, unit.start) > (b - a) / 2
        )
        if len(inside) > 1:
            for i in inside:
                groups[i], sums[i] = inside, score
        else:
            home = [i for i, (a, b) in enumerate(document.sentences) if a <= (unit.start + unit.end) / 2 < b]
            for i in home:
                sums[i] += score
    best = max(range(len(sums)), key=sums.__getitem__)
    return Found(groups[best], sums, groups)


def measured(
    lm: LanguageModel, document: Document, method: str, parameters: dict[str, Any], **options: Any
) -> tuple[Found, dict[str, Any]]:
    """One attribution, and what it cost: seconds, token-forwards, GiB above what was held before."""
    peak, begin, used = watch_memory(), time.perf_counter(), time.process_time()
    att = noiser.attribute(lm, document.prompt, method=make_method(method, **parameters), **options)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - used
    found = by_sentence(att.units, att.scores[0], document)
    cost = {
        "answered": True,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "token_forwards": att.info["token_forwards"],
        "gib": round(peak(), 3),
        "units": len(att.units),
        "left": att.info.get("left"),
        "found": found.best == (document.planted,),
        "near": document.planted in found.best,
    }
    return found, cost


def run_one(lm: LanguageModel, tokens: int, seed: int, method: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """The line of one prompt and method."""
    asked = document(lm, tokens, seed)
    query = build_query(lm, asked.prompt)
    row = {"sentences": len(asked.sentences), "planted": asked.planted, "length": len(query.token_ids)}
    if not asked.answer.startswith(query.target_texts[0].strip()):
        return row | {"answered": False}
    parameters = {"samples": chosen.samples} if chosen.samples and method.startswith("noiser") else {}
    parameters |= {"search": chosen.search} if method == "noiser" else {}
    found, cost = measured(lm, asked, method, parameters, unit="auto", max_seconds=chosen.max_seconds)
    row |= cost
    if chosen.full:
        whole, cost = measured(lm, asked, method, parameters, unit="token")
        groups = dict.fromkeys(found.groups)
        pairs = [(found.sums[group[0]], sum(whole.sums[i] for i in group)) for group in groups]
        row["full"] = cost | {
            "same_best": whole.best[0] in found.best,
            "rank_correlation": round(float(spearmanr(*zip(*pairs, strict=True)).statistic), 3),
        }
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each model, length, method and number of samples."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(row[name] for name in KINDS), []).append(row)
    lines = ["| " + HEADS.replace("|", " | ") + " |", "|" + "---|" * len(HEADS.split("|"))]
    for kind, all_rows in sorted(kinds.items(), key=str):
        ran = [row for row in all_rows if row["answered"]]
        full = [row["full"] for row in ran if "full" in row]

        def middle(key: str, of: Sequence[dict[str, Any]]) -> str:
            return f"{statistics.median(row[key] for row in of):,.4g}" if of else ""

        def count(key: str, of: Sequence[dict[str, Any]]) -> str:
            return f"{sum(row[key] for row in of)} of {len(of)}" if of else ""

        cells = [
            *("" if each is None else str(each) for each in kind),
            str(len(all_rows)),
            str(len(all_rows) - len(ran)),
        ]
        cells += [count("found", ran), *(middle(k, ran) for k in ("seconds", "cpu_seconds", "token_forwards", "gib"))]
        cells += [
            count("found", full),
            count("same_best", full),
            middle("rank_correlation", full),
            middle("cpu_seconds", full),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2000])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=["noiser", "noiser_relative", "occlusion"])
    parser.add_argument("--samples", type=int, help="noise samples; the method's own number if left out")
    parser.add_argument("--max-seconds", type=float, help="the budget of unit='auto'")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--search", default="certified", choices=["bisection", "certified"], help="Noiser's search of k_min"
    )
    parser.add_argument("--full", action="store_true", help="also score every token, and compare")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only print what the file holds")
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.results.read_text().splitlines()] if chosen.results.exists() else []
    keys = (*KINDS, "seed")
    done = {tuple(row[key] for key in keys) for row in rows if not chosen.full or "full" in row or not row["answered"]}
    if not chosen.table:
        torch.set_num_threads(chosen.threads)
        lm = noiser.load_model(chosen.model, dtype=chosen.dtype, device="cpu")
        lm.packs  # noqa: B018 - measured once, and not here
        for tokens, seed, method in itertools.product(chosen.tokens, range(chosen.prompts), chosen.methods):
            samples = chosen.samples if method.startswith("noiser") else None
            search = chosen.search if method == "noiser" else None
            key = (lm.identity.name, chosen.dtype, tokens, method, samples, search, chosen.max_seconds, seed)
            if key not in done:
                rows.append(dict(zip(keys, key, strict=True)) | run_one(lm, tokens, seed, method, chosen))
                with chosen.results.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
    print(table(list({tuple(row[key] for key in keys): row for row in rows}.values())))


if __name__ == "__main__":
    main()
