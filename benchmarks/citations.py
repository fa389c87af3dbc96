"""Citations: what they cost, whether they predict removal, and whether they find the source that was used.

    python benchmarks/citations.py RESULTS.jsonl cost --tokens 2000
    python benchmarks/citations.py RESULTS.jsonl cost --tokens 400 --sources 4 --answers 5 --texts 5
    python benchmarks/citations.py RESULTS.jsonl truth --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/citations.py RESULTS.jsonl table

`cost` cites an answer of several sentences, each copied from one of many made-up sentences in several sources: by
`noiser.cite` as it is, with every sentence of every source hidden, and by the full computation, in which every
sentence's rows become zeros and everything after it is run again. LDS is the rank correlation, over random halves of
the sentences whose rows are zeros, of the summed scores of the kept sentences with an answer sentence's
log-probability; mean over answer sentences. *Found* counts the answer sentences whose own sentence has the largest
score.

`truth` takes planted facts (`noiser.data`), with every sentence a source: prompts whose answer the model gives, and
does not give without the gold sentences. Recall@1 is the share of them on which a gold sentence has the largest score.
Each line of the file is one text and way; those that are there are not run again. Seconds are of the processor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import binomtest, spearmanr

import noiser
from noiser.data import load
from noiser.engine import LocalEngine, Replace, Values
from noiser.model import LanguageModel, build_query

PEOPLE = (
    *("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Grace", "Henry", "Irene", "Jacob", "Karen", "Louis"),
    *("Maria", "Nadia", "Oscar", "Paula", "Quinn", "Robert", "Sarah", "Thomas", "Ursula", "Victor", "Wendy", "Zachary"),
)
THINGS = (
    *("guitar", "hammer", "lantern", "blanket", "bicycle", "mirror", "camera", "basket", "ladder", "kettle", "violin"),
    *("helmet", "compass", "umbrella", "suitcase", "telescope", "trumpet", "carpet", "bottle", "candle", "drum"),
)
ROOMS = ["attic", "garage", "kitchen", "cellar", "garden", "office", "library", "bedroom", "hallway", "barn"]
TAILS = ("", " before breakfast", " during the long winter", " next to the window", " under a grey cloth")
QUESTION = "Where do these people keep their things?"

WAYS: dict[str, dict[str, Any]] = {
    "noiser.cite": {},
    "every sentence hidden": {"unit": "sentence"},
    "full: every sentence zero": {"unit": "sentence", "method": noiser.Occlusion(score="logprob")},
}
CATEGORIES = ("once", "twice", "conflict")


# ---- what it costs ---------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Sources, an answer, and for each of its sentences the sentence of a source that it copies."""

    sources: list[str]
    answer: str
    gold: list[str]


def case(lm: LanguageModel, tokens: int, sources: int, answers: int, seed: int) -> Case:
    """About this many tokens of sources; each sentence of the answer copies one of a source, all sources in turn."""
    chance = random.Random(seed)
    facts = [(person, thing) for person in PEOPLE for thing in THINGS]
    pairs = iter(chance.sample(facts, len(facts)))
    texts: list[list[str]] = []
    for _ in range(sources):
        lines: list[str] = []
        while len(lm.tokenizer(" ".join(lines), add_special_tokens=False)["input_ids"]) < tokens / sources:
            person, thing = next(pairs)
            lines.append(f"{person} keeps the {thing} in the {chance.choice(ROOMS)}{chance.choice(TAILS)}.")
        texts.append(lines)
    gold = [chance.choice(texts[number % sources]) for number in range(answers)]
    chance.shuffle(gold)
    return Case([" ".join(lines) for lines in texts], " " + " ".join(gold), gold)


def cost_rows(lm: LanguageModel, chosen: argparse.Namespace, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    text = case(lm, chosen.tokens, chosen.sources, chosen.answers, seed)
    probe = _Probe(lm, text, chosen.masks, seed)
    for way, options in WAYS.items():
        begin = time.process_time()
        citations = noiser.cite(
            lm, QUESTION, text.sources, answer=text.answer, memory=-torch.inf, contrast=False, **options
        )
        seconds = time.process_time() - begin
        att = citations.attribution
        best = [att.units[int(row.argmax())].text.strip() for row in att.scores]
        yield {
            "way": way,
            "seconds": round(seconds, 1),
            "token_forwards": att.info["token_forwards"],
            "lds": round(probe.lds(att), 4),
            "found": sum(a == b for a, b in zip(best, text.gold, strict=True)) / len(text.gold),
            "units": len(att.units),
        }


class _Probe:
    """Log-probabilities of the answer's sentences with random halves of the sources' sentences at zero."""

    def __init__(self, lm: LanguageModel, text: Case, masks: int, seed: int) -> None:
        chat = bool(lm.tokenizer.chat_template)
        question: Any = [{"role": "user", "content": QUESTION}] if chat else QUESTION
        query = build_query(
            lm,
            noiser.place_sources(question, text.sources),
            target=text.answer,
            target_unit="sentence",
            unit="sentence",
            sources=text.sources,
            continuation_units=False,
        )
        self.units = query.units
        self.kept = torch.rand(masks, len(query.units), generator=torch.Generator().manual_seed(seed)) < 0.5
        gone = [
            tuple(sorted(i for u, k in zip(query.units, row, strict=True) if not k for i in u.token_indices))
            for row in self.kept.tolist()
        ]
        table = LocalEngine(lm).ask(query, Values([Replace(positions) for positions in gone], "logprob"))
        self.values = torch.cat(table.values)

    def lds(self, att: noiser.Attribution) -> float:
        """Mean over the answer's sentences; of a source that was not split counts what part of its tokens is kept."""
        tokens = [torch.tensor(unit.token_indices) for unit in self.units]
        marks = torch.zeros(len(self.kept), max(int(t.max()) for t in tokens) + 1, dtype=torch.float64)
        for column, positions in enumerate(tokens):
            marks[:, positions] = self.kept[:, column, None].double()
        shares = torch.stack([marks[:, list(unit.token_indices)].mean(1) for unit in att.units], 1)
        sums = shares @ att.scores.double().T
        pairs = zip(sums.T.tolist(), self.values.T.tolist(), strict=True)
        return statistics.mean(float(spearmanr(a, b).statistic) for a, b in pairs)


# ---- whether the source is found -------------------------------------------------------------------------------------


def jensen_shannon(log_p: torch.Tensor, clean: torch.Tensor) -> torch.Tensor:
    """-JSD(changed, clean) in nats, summed over tokens: with occlusion by deletion, ARC-JSD (arXiv 2505.16415)."""
    middle = torch.logaddexp(log_p, clean) - torch.log(torch.tensor(2.0))
    return -((log_p.exp() * (log_p - middle)).sum(-1) + (clean.exp() * (clean - middle)).sum(-1)).sum(-1) / 2


METHODS: dict[str, dict[str, Any]] = {
    "noiser.cite (hidden)": {"method": noiser.Occlusion(score="logprob", baseline="hidden")},
    "occlusion, zero rows": {"method": noiser.Occlusion(score="logprob")},
    "ContextCite, 32 deletions": {"method": noiser.ContextCite(samples=32, baseline="delete")},
    "ContextCite, 32 hidden": {"method": noiser.ContextCite(samples=32, baseline="hidden")},
    "noiser_joint, zero rows": {"method": noiser.NoiserJoint(score="logprob")},
    "ARC-JSD": {"method": noiser.Occlusion(baseline="delete"), "of": jensen_shannon},
    "last attention": {"method": "last_attention"},
}


def similarities(lm: LanguageModel, sources: Sequence[str], said: str) -> dict[str, list[float]]:
    """Similarity of each source to question and answer, by TF-IDF and by the mean of the model's input embeddings."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors: Any = TfidfVectorizer().fit_transform([*sources, said])
    means = torch.stack(
        [
            lm.embed(torch.tensor(lm.tokenizer(text, add_special_tokens=False)["input_ids"])).detach().float().mean(0)
            for text in (*sources, said)
        ]
    )
    means = torch.nn.functional.normalize(means, dim=-1)
    return {
        "similarity, TF-IDF": (vectors[:-1] @ vectors[-1].T).toarray()[:, 0].tolist(),
        "similarity, mean embedding": (means[:-1] @ means[-1]).tolist(),
    }


def truth_rows(
    lm: LanguageModel, category: str, sentences: int, done: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    """A row for each prompt of a category and length that counts, and each method."""
    examples = [e for e in load("planted").examples if e.category == category and e.meta["sentences"] == sentences]
    used = [e for e in examples if _says(lm, e.prompt, e.target) and not _says(lm, str(e.without), e.target)]
    spans = [sorted(span for places in e.spans.values() for span in places) for e in used]
    sources = [[e.prompt[a:b] for a, b in places] for e, places in zip(used, spans, strict=True)]
    gold = [
        [i for i, span in enumerate(places) if span in e.spans["gold"]] for e, places in zip(used, spans, strict=True)
    ]

    def row(way: str, number: int, scores: Sequence[float], forwards: float) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        best = gold[number]
        return {
            "way": way,
            "example": used[number].id,
            "first": order[0] in best,
            "all_first": set(order[: len(best)]) == set(best),
            "token_forwards": forwards,
            "of": len(examples),
        }

    for way, options in METHODS.items():
        if done(way) or not used:
            continue
        atts = noiser.attribute(
            lm,
            [e.prompt for e in used],
            sources=sources,
            unit="source",
            target=[e.target for e in used],
            target_unit="all",
            continuation_units=False,
            **options,
        )
        for number, att in enumerate(atts):
            yield row(way, number, att.scores[0].tolist(), att.info["token_forwards"])
    for number, example in enumerate(used):
        said = f"{example.prompt[spans[number][-1][1] :]} {example.target}"
        for way, scores in similarities(lm, sources[number], said).items():
            if not done(way):
                yield row(way, number, scores, 0)


def _says(lm: LanguageModel, prompt: str, answer: str) -> bool:
    """Whether the first token of the model's answer begins the word."""
    (said,) = build_query(lm, prompt).target_texts
    return bool(said.strip()) and answer.startswith(said.strip())


# ---- rows and tables -------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: costs by size and way, then recall by method, model and category."""
    lines = ["| model | tokens | texts | way | processor seconds | token-forwards | LDS | found |", "|" + "---|" * 8]
    costs = [row for row in rows if row["part"] == "cost"]
    for key in dict.fromkeys((r["model"], r["tokens"], r["way"]) for r in costs):
        some = [r for r in costs if (r["model"], r["tokens"], r["way"]) == key]
        middle = {
            name: statistics.mean(r[name] for r in some) for name in ("seconds", "token_forwards", "lds", "found")
        }
        lines.append(
            f"| {key[0]} | {key[1]} | {len(some)} | {key[2]} | {middle['seconds']:.1f} "
            f"| {middle['token_forwards']:,.0f} | {middle['lds']:.3f} | {middle['found']:.2f} |"
        )
    truths = [row for row in rows if row["part"] == "truth"]
    columns = [(*key, "first") for key in dict.fromkeys((r["model"], r["category"]) for r in truths)]
    columns += [(model, category, "all_first") for model, category, _ in columns if category == "twice"]
    counts = {column: len({r["example"] for r in truths if _is_in(r, column)}) for column in columns}
    heads = [
        f"{model}: {category}{', both first' if name == 'all_first' else ''} (n = {counts[model, category, name]})"
        for model, category, name in columns
    ]
    lines += ["", f"| method | {' | '.join(heads)} | token-forwards |", "|" + "---|" * (len(columns) + 2)]
    for way in dict.fromkeys(r["way"] for r in truths):
        some = [r for r in truths if r["way"] == way]
        cells = [_share([r[column[2]] for r in some if _is_in(r, column)], counts[column]) for column in columns]
        forwards = statistics.mean(r["token_forwards"] for r in some)
        lines.append(f"| {way} | {' | '.join(cells)} | {forwards:,.0f} |")
    return "\n".join(lines)


def _is_in(row: dict[str, Any], column: tuple[str, str, str]) -> bool:
    return (row["model"], row["category"]) == column[:2]


def _share(hits: Sequence[bool], expected: int) -> str:
    """A share with Wilson's 95 % interval over prompts; how many there are, where some have not been run."""
    if not hits:
        return ""
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    missing = "" if len(hits) == expected else f" (n = {len(hits)})"
    return f"{statistics.mean(map(float, hits)):.2f} [{low:.2f}, {high:.2f}]{missing}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("part", choices=["cost", "truth", "table"])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--tokens", type=int, default=2000, help="of all sources together")
    parser.add_argument("--sources", type=int, default=12)
    parser.add_argument("--answers", type=int, default=10, help="sentences of the answer")
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--masks", type=int, default=24, help="random halves for LDS")
    parser.add_argument("--sentences", nargs="+", type=int, default=[3, 6, 12], help="of planted prompts")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    rows = [json.loads(line) for line in chosen.results.read_text().splitlines()] if chosen.results.exists() else []
    torch.set_num_threads(chosen.threads)

    def keep(**row: Any) -> None:
        rows.append(row)
        with chosen.results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    for name in chosen.models if chosen.part != "table" else ():
        lm = noiser.load_model(name, dtype="bfloat16", device="cpu")
        lm.packs  # noqa: B018 - measured once, and not here
        if chosen.part == "truth":
            for category, sentences in itertools.product(CATEGORIES, chosen.sentences):
                key = {"part": "truth", "model": name, "category": category, "sentences": sentences}
                done = {row["way"] for row in rows if key.items() <= row.items()}
                for row in truth_rows(lm, category, sentences, done.__contains__):
                    keep(**key, **row)
            continue
        for seed in range(chosen.texts):
            key = {"part": "cost", "model": name, "tokens": chosen.tokens, "seed": seed}
            if not any(key.items() <= row.items() for row in rows):
                for row in cost_rows(lm, chosen, seed):
                    keep(**key, **row)
    print(table(rows))


if __name__ == "__main__":
    main()
