"""Citations: what they cost, whether they predict removal, and whether they find the source that
was used.

    python benchmarks/citations.py RESULTS.jsonl cost --tokens 400 --sources 4 --answers 5 --texts 5
    python benchmarks/citations.py RESULTS.jsonl truth --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/citations.py RESULTS.jsonl table

`cost` cites an answer of several sentences, each copied from one of many made-up sentences in
several sources: by `noiser.cite` as it is, with every sentence of every source hidden, and by the
full computation, in which every sentence's rows become zeros; then as where tokens cannot be
hidden. LDS is the rank correlation, over random halves of the sentences that are removed
(`--removal`), of the summed scores of the kept sentences with an answer sentence's log-probability;
mean over answer sentences. *Found* is the share of the answer's sentences whose own sentence has
the largest score.

`truth` takes planted facts (`noiser.data`), with every sentence a source: prompts whose answer the
model gives, and does not give without the gold sentences. Recall@1 is the share of them on which a
gold sentence has the largest score.

Each line of the file is one text and way, and is not run again. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr

import noiser
from measuring import share
from measuring import table as markdown
from noiser.data.planted import PEOPLE, ROOMS, THINGS, draw
from noiser.engine import LiveGame, prepare, remover, run_one
from noiser.model import LanguageModel
from noiser.types import Question
from planted_prompts import places_of, sources_of

TAILS = (
    "",
    " before breakfast",
    " during the long winter",
    " next to the window",
    " under a grey cloth",
)
QUESTION = "Where do these people keep their things?"
CATEGORIES = ("once", "twice", "conflict", "combined")

WAYS: dict[str, dict[str, Any]] = {
    "noiser.cite": {},
    "every sentence hidden": {"unit": "sentence"},
    "full: every sentence zero": {
        "unit": "sentence",
        "method": noiser.Occlusion(objective="logprob"),
    },
    "noiser.cite, zero rows": {"method": noiser.Occlusion(objective="logprob")},
}


# ---- what it costs -------------------------------------------------------------------------------


class Case(NamedTuple):
    """Sources, an answer, and for each of its sentences the sentence of a source that it copies."""

    sources: list[str]
    answer: str
    gold: list[str]


def case(lm: LanguageModel, tokens: int, sources: int, answers: int, seed: int) -> Case:
    """About this many tokens of sources; each sentence of the answer copies one of a source, all
    sources in turn.
    """
    chance = random.Random(seed)
    facts = [(person, thing) for person in PEOPLE for thing in THINGS]
    pairs = iter(chance.sample(facts, len(facts)))
    texts: list[list[str]] = []
    for _ in range(sources):
        lines: list[str] = []
        while (
            len(lm.tokenizer(" ".join(lines), add_special_tokens=False)["input_ids"])
            < tokens / sources
        ):
            person, thing = next(pairs)
            lines.append(
                f"{person} keeps the {thing} in the {chance.choice(ROOMS)}{chance.choice(TAILS)}."
            )
        texts.append(lines)
    gold = [chance.choice(texts[number % sources]) for number in range(answers)]
    chance.shuffle(gold)
    return Case([" ".join(lines) for lines in texts], " " + " ".join(gold), gold)


def cost_rows(
    lm: LanguageModel, chosen: argparse.Namespace, seed: int, ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    text = case(lm, chosen.tokens, chosen.sources, chosen.answers, seed)
    message: Any = [{"role": "user", "content": QUESTION}] if lm.chats else QUESTION
    asked = Question(
        prompt=noiser.place_sources(message, text.sources),
        target=text.answer,
        target_unit="sentence",
        unit="sentence",
        sources=text.sources,
        continuation_units=False,
    )
    query = run_one(lm, prepare(lm, asked))
    kept = (
        torch.rand(chosen.masks, len(query.units), generator=torch.Generator().manual_seed(seed))
        < 0.5
    )
    values = run_one(lm, LiveGame(query, "logprob", remover(query, chosen.removal))(kept))
    for way in ways:
        options = {"answer": text.answer, "memory": -torch.inf, "contrast": False} | WAYS[way]
        begin = time.process_time()
        att = noiser.cite(lm, QUESTION, text.sources, **options).attribution
        seconds = time.process_time() - begin
        best = [att.units[int(row.argmax())].text.strip() for row in att.scores]
        yield {
            "way": way,
            "seconds": round(seconds, 1),
            "token_forwards": att.info["token_forwards"],
            "lds": round(lds(att, query.units, kept, values), 4),
            "found": sum(a == b for a, b in zip(best, text.gold, strict=True)) / len(text.gold),
            "units": len(att.units),
        }


def lds(
    att: noiser.Attribution, units: Sequence[noiser.Span], kept: torch.Tensor, values: torch.Tensor
) -> float:
    """Mean over the answer's sentences; of a source that was not split, the kept part of its tokens
    counts.
    """
    marks = torch.zeros(
        len(kept), 1 + max(unit.token_indices[-1] for unit in units), dtype=torch.float64
    )
    for unit, column in zip(units, kept.T, strict=True):
        marks[:, list(unit.token_indices)] = column[:, None].double()
    shares = torch.stack([marks[:, list(unit.token_indices)].mean(1) for unit in att.units], 1)
    pairs = zip(att.scores.double() @ shares.T, values, strict=True)
    return statistics.mean(float(spearmanr(sums, row).statistic) for sums, row in pairs)


# ---- whether the source is found -----------------------------------------------------------------


def jensen_shannon(log_p: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """-JSD(changed, clean) in nats, summed over tokens: with occlusion by deletion, ARC-JSD (arXiv
    2505.16415).
    """
    middle = torch.logaddexp(log_p, clean) - torch.log(torch.tensor(2.0))
    return (
        -((log_p.exp() * (log_p - middle)).sum(-1) + (clean.exp() * (clean - middle)).sum(-1)).sum(
            -1
        )
        / 2
    )


METHODS: dict[str, dict[str, Any]] = {
    "noiser.cite (hidden)": {"method": noiser.Occlusion(objective="logprob", removal="hidden")},
    "occlusion, zero rows": {"method": noiser.Occlusion(objective="logprob")},
    "ContextCite, 32 deletions": {"method": noiser.ContextCite(samples=32, removal="delete")},
    "ContextCite, 32 hidden": {"method": noiser.ContextCite(samples=32, removal="hidden")},
    "joint, zero rows": {"method": noiser.Joint()},
    "ARC-JSD": {"method": noiser.Occlusion(removal="delete"), "of": jensen_shannon},
    **{name: {"method": name} for name in ("last_attention", "attn_lrp", "attention_gradient")},
}


def without_attribution(
    lm: LanguageModel, sources: Sequence[str], said: str
) -> dict[str, list[float]]:
    """Scores of sources from question and answer: similarity by TF-IDF and by the mean of the
    model's input embeddings, and the probability of each source's number where the model is asked
    to cite one.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors: Any = TfidfVectorizer().fit_transform([*sources, said])
    ids = [lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*sources, said)]
    means = torch.stack([lm.embed(torch.tensor(tokens)).detach().float().mean(0) for tokens in ids])
    means = torch.nn.functional.normalize(means, dim=-1)
    numbered = "\n".join(f"[{i}] {text}" for i, text in enumerate(sources, 1))
    asked = f"{numbered}\n\n{said}\nThe answer is taken from the sentence with the number ["
    numbers = [f"{i}]" for i in range(1, len(sources) + 1)]
    cited = noiser.attribute(
        lm,
        [asked] * len(numbers),
        target=numbers,
        target_unit="all",
        method="position",
        unit="token",
    )
    return {
        "asked to cite": [att.targets[0].probability for att in cited],
        "similarity, TF-IDF": (vectors[:-1] @ vectors[-1].T).toarray()[:, 0].tolist(),
        "similarity, mean embedding": (means[:-1] @ means[-1]).tolist(),
    }


def truth_rows(
    lm: LanguageModel, category: str, sentences: int, seed: int, methods: Sequence[str]
) -> Iterator[Any]:
    """Rows of each method, one for each prompt that counts."""
    examples = [
        example
        for example in draw(category, sentences, seed)
        if example.meta["sentences"] == sentences
    ]
    said = noiser.attribute(
        lm, [example.prompt for example in examples], method="position", unit="token"
    )
    alone = noiser.attribute(
        lm, [example.without[0] for example in examples], method="position", unit="token"
    )
    right, known = (
        [_answers(att, example.target) for att, example in zip(atts, examples, strict=True)]
        for atts in (said, alone)
    )
    used = [example for example, a, b in zip(examples, right, known, strict=True) if a and not b]
    if not used:
        return
    spans = [places_of(example) for example in used]
    sources = [sources_of(example) for example in used]

    def row(way: str, number: int, scores: Sequence[float], forwards: float) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        gold = {i for i, span in enumerate(spans[number]) if span in used[number].spans["gold"]}
        hits = {"first": order[0] in gold, "all_first": set(order[: len(gold)]) == gold}
        return {
            "way": way,
            "example": used[number].id,
            **hits,
            "token_forwards": forwards,
            "of": len(examples),
        }

    shared: dict[str, Any] = {"unit": "source", "target_unit": "all", "continuation_units": False}
    shared |= {"sources": sources, "target": [example.target for example in used]}
    for way in methods:
        atts = noiser.attribute(lm, [example.prompt for example in used], **shared, **METHODS[way])
        yield [
            row(way, i, att.scores[0].tolist(), att.info["token_forwards"])
            for i, att in enumerate(atts)
        ]
    found: dict[str, list[Any]] = {}
    for i, example in enumerate(used):
        asked = f"{example.prompt[spans[i][-1][1] :]} {example.target}"
        for way, scores in without_attribution(lm, sources[i], asked).items():
            found.setdefault(way, []).append(row(way, i, scores, 0))
    yield from found.values()


def _answers(att: noiser.Attribution, target: Any) -> bool:
    said = att.targets[0].text.strip()
    return bool(said) and str(target).startswith(said)


# ---- rows and tables -----------------------------------------------------------------------------


def _groups(
    rows: Sequence[dict[str, Any]], *names: str
) -> Mapping[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: costs by size and way, then recall by method, model and category."""
    costs, truths = ([row for row in rows if row["part"] == part] for part in ("cost", "truth"))
    spent: list[dict[str, Any]] = []
    for (model, tokens, removal, way), some in _groups(
        costs, "model", "tokens", "removal", "way"
    ).items():
        means = {
            name: statistics.mean(row[name] for row in some)
            for name in ("seconds", "token_forwards", "lds", "found")
        }
        spent.append(
            {"model": model, "tokens": tokens, "texts": len(some), "halves": removal, "way": way}
            | means
        )
    sets = _groups(truths, "model", "category")
    columns = [(*key, "first") for key in sets]
    columns += [(*key, "all_first") for key in sets if key[1] in ("twice", "combined")]
    counts = {key: len({row["example"] for row in some}) for key, some in sets.items()}
    recalled: list[dict[str, Any]] = []
    for (way,), some in _groups(truths, "way").items():
        own = _groups(some, "model", "category")
        recalled.append({"method": way})
        for model, category, name in columns:
            count, hits = (
                counts[model, category],
                [row[name] for row in own.get((model, category), [])],
            )
            head = (
                f"{model}: {category}{', both first' if name == 'all_first' else ''} (n = {count})"
            )
            missing = "" if len(hits) == count else f" (n = {len(hits)})"
            recalled[-1][head] = share(hits) + missing if hits else ""
        recalled[-1]["token-forwards"] = statistics.mean(row["token_forwards"] for row in some)
    return f"{markdown(spent)}\n\n{markdown(recalled)}"


def made(
    lm: LanguageModel, name: str, chosen: argparse.Namespace, rows: Sequence[dict[str, Any]]
) -> Iterator[Any]:
    """The key that rows share, and the rows that `rows` lacks, as they come."""

    def ways(key: dict[str, Any], wanted: Sequence[str]) -> list[str]:
        done = {row["way"] for row in rows if key.items() <= row.items()}
        return [way for way in wanted if way not in done]

    common = {"part": chosen.part, "model": name}
    if chosen.part == "cost":
        for seed in range(chosen.texts):
            key = common | {"tokens": chosen.tokens, "removal": chosen.removal, "seed": seed}
            if left := ways(key, chosen.ways):
                yield from ((key, [row]) for row in cost_rows(lm, chosen, seed, left))
        return
    for category, sentences, seed in itertools.product(CATEGORIES, chosen.sentences, chosen.seeds):
        key = common | {"category": category, "sentences": sentences, "seed": seed}
        if left := ways(key, chosen.methods):
            for some in truth_rows(lm, category, sentences, seed, left):
                yield key, [row for row in some if ways(key, [row["way"]])]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("part", choices=["cost", "truth", "table"])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--tokens", type=int, default=2000, help="of all sources together")
    parser.add_argument("--sources", type=int, default=12)
    parser.add_argument("--answers", type=int, default=10, help="sentences of the answer")
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--masks", type=int, default=24, help="random halves for LDS")
    parser.add_argument(
        "--removal", choices=["zero", "hidden"], default="zero", help="of these halves"
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--sentences", nargs="+", type=int, default=[3, 6, 12], help="of planted prompts"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of planted prompts")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    stored = chosen.results.read_text(encoding="utf-8") if chosen.results.exists() else ""
    rows = [json.loads(line) for line in stored.replace("noiser_joint", "joint").splitlines()]
    for name in chosen.models if chosen.part != "table" else ():
        lm = noiser.load_model(name, dtype="bfloat16", device="cpu")
        for key, some in made(lm, name, chosen, tuple(rows)):
            rows += [key | row for row in some]
            with chosen.results.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(key | row) + "\n" for row in some))
    print(table(rows))


if __name__ == "__main__":
    main()
