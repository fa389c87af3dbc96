"""Citations: what they cost, whether they predict removal, and whether they find the source that was used.

    python benchmarks/citations.py RESULTS.jsonl cost --tokens 400 --sources 4 --answers 5 --texts 5
    python benchmarks/citations.py RESULTS.jsonl truth --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/citations.py RESULTS.jsonl memory --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/citations.py RESULTS.jsonl table

`cost` cites an answer of several sentences, each copied from one of many made-up sentences in several sources: by
`noiser.cite` as it is, with every sentence of every source hidden, and by the full computation, in which every
sentence's rows become zeros; then as where tokens cannot be hidden. LDS is the rank correlation, over random halves of
the sentences that are removed (`--removal`), of the summed scores of the kept sentences with an answer sentence's
log-probability; mean over answer sentences. *Found* is the share of the answer's sentences whose own sentence has the
largest score.

`truth` takes planted facts (`noiser.data`), with every sentence a source: prompts whose answer the model gives, and
does not give without the gold sentences. Recall@1 is the share of them on which a gold sentence has the largest score.

`memory` asks questions whose answer is known to come from the sources, or not to: invented facts, and capitals that a
source gets wrong, against capitals of which the sources say nothing. A prompt counts if the model's own answer has the
right word. The loss of the sentence with that word, when all sources are removed, is compared with a threshold, which
is chosen on one seed and reported on another, with other capitals.

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
from scipy.stats import binomtest, spearmanr

import noiser
from noiser.data.planted import draw
from noiser.engine import Ask, Steps, prepare, remover, run_all, run_one
from noiser.engine import Game as LiveGame
from noiser.explain.cite import MEMORY
from noiser.model import LanguageModel
from noiser.question import Question

_WORDS = (
    "Anna Boris Clara David Elena Frank Grace Henry Irene Jacob Karen Louis Maria Nadia Oscar Paula Quinn Robert Sarah "
    "Thomas Ursula Victor Wendy Zachary",
    "guitar hammer lantern blanket bicycle mirror camera basket ladder kettle violin helmet compass umbrella suitcase "
    "telescope trumpet carpet bottle candle drum",
    "attic garage kitchen cellar garden office library bedroom hallway barn",
)
PEOPLE, THINGS, ROOMS = (words.split() for words in _WORDS)
TAILS = ("", " before breakfast", " during the long winter", " next to the window", " under a grey cloth")
QUESTION = "Where do these people keep their things?"
CATEGORIES = ("once", "twice", "conflict", "combined")

WAYS: dict[str, dict[str, Any]] = {
    "noiser.cite": {},
    "every sentence hidden": {"unit": "sentence"},
    "full: every sentence zero": {"unit": "sentence", "method": noiser.Occlusion(score="logprob")},
    "noiser.cite, zero rows": {"method": noiser.Occlusion(score="logprob")},
}


def cite_question(lm: LanguageModel, question: str, sources: list[str], **more: Any) -> Question:
    """The question of `noiser.cite`, with every sentence of the sources a unit."""
    message: Any = [{"role": "user", "content": question}] if lm.tokenizer.chat_template else question
    prompt = noiser.place_sources(message, sources)
    units: dict[str, Any] = {"target_unit": "sentence", "unit": "sentence", "continuation_units": False}
    return Question(prompt=prompt, sources=sources, **units, **more)


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


def cost_rows(
    lm: LanguageModel, chosen: argparse.Namespace, seed: int, ways: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each way."""
    text = case(lm, chosen.tokens, chosen.sources, chosen.answers, seed)
    query = run_one(lm, prepare(lm, cite_question(lm, QUESTION, text.sources, target=text.answer)))
    kept = torch.rand(chosen.masks, len(query.units), generator=torch.Generator().manual_seed(seed)) < 0.5
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


def lds(att: noiser.Attribution, units: Sequence[noiser.Span], kept: torch.Tensor, values: torch.Tensor) -> float:
    """Mean over the answer's sentences; of a source that was not split, the kept part of its tokens counts."""
    marks = torch.zeros(len(kept), 1 + max(unit.token_indices[-1] for unit in units), dtype=torch.float64)
    for unit, column in zip(units, kept.T, strict=True):
        marks[:, list(unit.token_indices)] = column[:, None].double()
    shares = torch.stack([marks[:, list(unit.token_indices)].mean(1) for unit in att.units], 1)
    pairs = zip(att.scores.double() @ shares.T, values, strict=True)
    return statistics.mean(float(spearmanr(sums, row).statistic) for sums, row in pairs)


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
    "noiser_joint, zero rows": {"method": noiser.NoiserJoint()},
    "ARC-JSD": {"method": noiser.Occlusion(baseline="delete"), "of": jensen_shannon},
    "last attention": {"method": "last_attention"},
}


def similarities(lm: LanguageModel, sources: Sequence[str], said: str) -> dict[str, list[float]]:
    """Similarity of each source to question and answer, by TF-IDF and by the mean of the model's input embeddings."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectors: Any = TfidfVectorizer().fit_transform([*sources, said])
    ids = [lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*sources, said)]
    means = torch.stack([lm.embed(torch.tensor(tokens)).detach().float().mean(0) for tokens in ids])
    means = torch.nn.functional.normalize(means, dim=-1)
    return {
        "similarity, TF-IDF": (vectors[:-1] @ vectors[-1].T).toarray()[:, 0].tolist(),
        "similarity, mean embedding": (means[:-1] @ means[-1]).tolist(),
    }


def truth_rows(lm: LanguageModel, category: str, sentences: int, seed: int, methods: Sequence[str]) -> Iterator[Any]:
    """Rows of each method, one for each prompt that counts."""
    examples = [example for example in draw(category, sentences, seed) if example.meta["sentences"] == sentences]
    said = noiser.attribute(lm, [example.prompt for example in examples], method="position")
    alone = noiser.attribute(lm, [str(example.without) for example in examples], method="position")
    right, known = (
        [_answers(att, example.target) for att, example in zip(atts, examples, strict=True)] for atts in (said, alone)
    )
    used = [example for example, a, b in zip(examples, right, known, strict=True) if a and not b]
    if not used:
        return
    spans = [sorted(span for places in example.spans.values() for span in places) for example in used]
    sources = [[example.prompt[a:b] for a, b in places] for example, places in zip(used, spans, strict=True)]

    def row(way: str, number: int, scores: Sequence[float], forwards: float) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda i: -scores[i])
        gold = {i for i, span in enumerate(spans[number]) if span in used[number].spans["gold"]}
        hits = {"first": order[0] in gold, "all_first": set(order[: len(gold)]) == gold}
        return {"way": way, "example": used[number].id, **hits, "token_forwards": forwards, "of": len(examples)}

    shared: dict[str, Any] = {"unit": "source", "target_unit": "all", "continuation_units": False}
    shared |= {"sources": sources, "target": [example.target for example in used]}
    for way in methods:
        atts = noiser.attribute(lm, [example.prompt for example in used], **shared, **METHODS[way])
        yield [row(way, i, att.scores[0].tolist(), att.info["token_forwards"]) for i, att in enumerate(atts)]
    found: dict[str, list[Any]] = {}
    for i, example in enumerate(used):
        asked = f"{example.prompt[spans[i][-1][1] :]} {example.target}"
        for way, scores in similarities(lm, sources[i], asked).items():
            found.setdefault(way, []).append(row(way, i, scores, 0))
    yield from found.values()


def _answers(att: noiser.Attribution, target: Any) -> bool:
    said = att.targets[0].text.strip()
    return bool(said) and str(target).startswith(said)


# ---- written from the sources, or from memory ------------------------------------------------------------------------

_PAIRS = (
    "France:Paris Italy:Rome Germany:Berlin Spain:Madrid Japan:Tokyo Russia:Moscow China:Beijing Egypt:Cairo "
    "England:London Greece:Athens Austria:Vienna Poland:Warsaw Portugal:Lisbon Ireland:Dublin Norway:Oslo "
    "Sweden:Stockholm Denmark:Copenhagen Finland:Helsinki Hungary:Budapest Cuba:Havana Peru:Lima Chile:Santiago "
    "Kenya:Nairobi Iran:Tehran Iraq:Baghdad Turkey:Ankara Canada:Ottawa Australia:Canberra Thailand:Bangkok "
    "Vietnam:Hanoi Indonesia:Jakarta Belgium:Brussels Netherlands:Amsterdam Switzerland:Bern Romania:Bucharest "
    "Bulgaria:Sofia Ukraine:Kyiv Syria:Damascus Lebanon:Beirut Libya:Tripoli Ghana:Accra Uganda:Kampala "
    "Ethiopia:Addis Colombia:Bogotá Venezuela:Caracas Nepal:Kathmandu Pakistan:Islamabad Bangladesh:Dhaka"
)
CAPITALS = dict(pair.split(":") for pair in _PAIRS.split())
USED = {"invented": True, "contradicted": True, "unrelated": False, "related": False, "stated": None}
"""Whether the answer comes from the sources; None where it may come from either."""

INVENTED = 3
"""Times as many questions about invented facts, of which small models get fewer right."""


class Memory(NamedTuple):
    """A question, six sources of one sentence, and the word of the answer that counts."""

    question: str
    sources: list[str]
    word: str


def memory_case(kind: str, number: int, seed: int) -> Memory:
    """An invented fact among others; or a capital that the sources get wrong, say nothing of, or state."""
    chance = random.Random(f"memory/{kind}/{number}/{seed}")
    facts = chance.sample([(person, thing) for person in PEOPLE for thing in THINGS], 6)
    sources = [f"{person} keeps the {thing} in the {chance.choice(ROOMS)}." for person, thing in facts]
    if kind == "invented":
        (person, thing), source = facts[0], sources[0]
        chance.shuffle(sources)
        return Memory(f"Where does {person} keep the {thing}?", sources, source.removesuffix(".").split()[-1])
    countries = random.Random("capitals").sample(list(CAPITALS), len(CAPITALS))[seed % 2 :: 2]
    country = countries[number % len(countries)]
    others = chance.sample([other for other in CAPITALS if other != country], 6)
    word = CAPITALS[others[0] if kind == "contradicted" else country]
    if kind != "unrelated":
        sources = [f"The capital of {other} is {CAPITALS[other]}." for other in others]
    if kind in ("contradicted", "stated"):
        sources[0] = f"The capital of {country} is {word}."
    chance.shuffle(sources)
    return Memory(f"What is the capital of {country}?", sources, word)


def memory_row(lm: LanguageModel, case: Memory) -> Steps[dict[str, Any]]:
    """The losses of the sentence with the word without all sources, by removal; none if the model does not say it."""
    stop = None if lm.tokenizer.chat_template else "\n"
    query = yield from prepare(lm, cite_question(lm, case.question, case.sources, max_new_tokens=20, stop=stop))
    row: dict[str, Any] = {"answer": "".join(query.target_texts), "word": case.word}
    index = next((i for i, text in enumerate(query.target_texts) if case.word in text), None)
    if index is None:
        return row
    positions = [position for unit in query.units for position in unit.token_indices]
    read, removals = query.score("logprob"), list(MEMORY)
    values = yield Ask(query, [remover(query, removal)(positions, [index]) for removal in removals], read)
    clean = float(query.read_clean(read)[index])
    return row | {removal: round(clean - float(value), 3) for removal, value in zip(removals, values, strict=True)}


def best_threshold(used: Sequence[float], remembered: Sequence[float]) -> float:
    """Where the mean of both error rates is least; of several such places the middle of the widest gap."""

    def errors(gap: tuple[float, float]) -> float:
        threshold = sum(gap) / 2
        return sum(v < threshold for v in used) / len(used) + sum(v >= threshold for v in remembered) / len(remembered)

    gaps = itertools.pairwise(sorted({*used, *remembered}))
    return sum(min(gaps, key=lambda gap: (errors(gap), gap[0] - gap[1]))) / 2


def memory_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The threshold chosen on even seeds, and error rates of it and of the default on odd ones; then losses by kind."""

    def losses(removal: str, odd: int, used: bool) -> list[float]:
        return [row[removal] for row in rows if row["seed"] % 2 == odd and removal in row and USED[row["kind"]] is used]

    lines = ["| removal | threshold | from sources, called memory | from memory, called sourced |", "|" + "---|" * 4]
    for removal, default in MEMORY.items():
        chosen = best_threshold(losses(removal, 0, True), losses(removal, 0, False))
        for threshold, name in ((chosen, "chosen"), (default, "default")):
            missed = _share([loss < threshold for loss in losses(removal, 1, True)])
            wrong = _share([loss >= threshold for loss in losses(removal, 1, False)])
            lines.append(f"| {removal} | {threshold:.2f} ({name}) | {missed} | {wrong} |")
    lines += ["", f"| model | kind | n | {' | '.join(MEMORY)}: 5 %, median, 95 % |", "|" + "---|" * 6]
    for model, kind in itertools.product(dict.fromkeys(row["model"] for row in rows), USED):
        some = [row for row in rows if (row["model"], row["kind"]) == (model, kind) and "hidden" in row]
        columns = [torch.tensor([row[removal] for row in some]) for removal in MEMORY] if some else []
        quantiles = [column.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist() for column in columns]
        cells = [", ".join(f"{value:.1f}" for value in values) for values in quantiles]
        lines.append(f"| {model} | {kind} | {len(some)} | {' | '.join(cells)} |")
    return lines


# ---- rows and tables -------------------------------------------------------------------------------------------------


def _groups(rows: Sequence[dict[str, Any]], *names: str) -> Mapping[tuple[Any, ...], list[dict[str, Any]]]:
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: costs by size and way, then recall by method, model and category, then thresholds of memory."""
    costs, truths, memories = ([row for row in rows if row["part"] == part] for part in ("cost", "truth", "memory"))
    head = "| model | tokens | texts | halves | way | processor seconds | token-forwards | LDS | found |"
    lines = [head, "|" + "---|" * 9]
    for (model, tokens, removal, way), some in _groups(costs, "model", "tokens", "removal", "way").items():
        seconds, forwards, rank, found = (
            statistics.mean(row[name] for row in some) for name in ("seconds", "token_forwards", "lds", "found")
        )
        lines.append(
            f"| {model} | {tokens:,} | {len(some)} | {removal} | {way} | {seconds:.1f} | {forwards:,.0f} "
            f"| {rank:.3f} | {found:.2f} |"
        )
    sets = _groups(truths, "model", "category")
    columns = [(*key, "first") for key in sets]
    columns += [(*key, "all_first") for key in sets if key[1] in ("twice", "combined")]
    counts = {key: len({row["example"] for row in some}) for key, some in sets.items()}
    heads = [
        f"{model}: {category}{', both first' if name == 'all_first' else ''} (n = {counts[model, category]})"
        for model, category, name in columns
    ]
    lines += ["", f"| method | {' | '.join(heads)} | token-forwards |", "|" + "---|" * (len(columns) + 2)]
    for (way,), some in _groups(truths, "way").items():
        own = _groups(some, "model", "category")
        cells = [_share([row[name] for row in own.get((m, c), [])], counts[m, c]) for m, c, name in columns]
        forwards = statistics.mean(row["token_forwards"] for row in some)
        lines.append(f"| {way} | {' | '.join(cells)} | {forwards:,.0f} |")
    return "\n".join(lines + (["", *memory_table(memories)] if memories else []))


def _share(hits: Sequence[bool], expected: int | None = None) -> str:
    """A share with Wilson's 95 % interval over prompts, and the number of prompts where it is not as expected."""
    if not hits:
        return ""
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    missing = "" if len(hits) == expected else f" (n = {len(hits)})"
    return f"{statistics.mean(map(float, hits)):.2f} [{low:.2f}, {high:.2f}]{missing}"


def made(lm: LanguageModel, name: str, chosen: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Iterator[Any]:
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
    elif chosen.part == "truth":
        for category, sentences, seed in itertools.product(CATEGORIES, chosen.sentences, chosen.seeds):
            key = common | {"category": category, "sentences": sentences, "seed": seed}
            if left := ways(key, chosen.methods):
                for some in truth_rows(lm, category, sentences, seed, left):
                    yield key, [row for row in some if ways(key, [row["way"]])]
    else:
        for seed, kind in itertools.product((0, 1), USED):
            key = common | {"seed": seed, "kind": kind}
            done = {row["example"] for row in rows if key.items() <= row.items()}
            count = chosen.repeats * (INVENTED if kind == "invented" else 1)
            numbers = [number for number in range(count) if number not in done]
            found = run_all(lm, (memory_row(lm, memory_case(kind, number, seed)) for number in numbers))
            yield key, [{"example": number, **row} for number, row in zip(numbers, found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("part", choices=["cost", "truth", "memory", "table"])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--tokens", type=int, default=2000, help="of all sources together")
    parser.add_argument("--sources", type=int, default=12)
    parser.add_argument("--answers", type=int, default=10, help="sentences of the answer")
    parser.add_argument("--texts", type=int, default=1)
    parser.add_argument("--masks", type=int, default=24, help="random halves for LDS")
    parser.add_argument("--removal", choices=["zero", "hidden"], default="zero", help="of these halves")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--sentences", nargs="+", type=int, default=[3, 6, 12], help="of planted prompts")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of planted prompts")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=24, help="of each kind of question about memory")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    lines = chosen.results.read_text(encoding="utf-8").splitlines() if chosen.results.exists() else []
    rows = [json.loads(line) for line in lines]
    for name in chosen.models if chosen.part != "table" else ():
        lm = noiser.load_model(name, dtype="bfloat16", device="cpu")
        for key, some in made(lm, name, chosen, tuple(rows)):
            rows += [key | row for row in some]
            with chosen.results.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(key | row) + "\n" for row in some))
    print(table(rows))


if __name__ == "__main__":
    main()
