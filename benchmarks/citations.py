"""Citations: what they cost, whether they predict removal, and whether they find the source that was used.

    python benchmarks/citations.py RESULTS.jsonl cost --tokens 2000
    python benchmarks/citations.py RESULTS.jsonl cost --tokens 400 --sources 4 --answers 5 --texts 5
    python benchmarks/citations.py RESULTS.jsonl truth --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/citations.py RESULTS.jsonl memory --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/citations.py RESULTS.jsonl table

`cost` cites an answer of several sentences, each copied from one of many made-up sentences in several sources: by
`noiser.cite` as it is, with every sentence of every source hidden, and by the full computation, in which every
sentence's rows become zeros and everything after it is run again; then as where tokens cannot be hidden. LDS is the
rank correlation, over random halves of the sentences that are removed (`--removal`: their rows are zeros, or they are
hidden), of the summed scores of the kept sentences with an answer sentence's log-probability; mean over answer
sentences. *Found* counts the answer sentences whose own sentence has the largest score.

`truth` takes planted facts (`noiser.data`), with every sentence a source: prompts whose answer the model gives, and
does not give without the gold sentences. Recall@1 is the share of them on which a gold sentence has the largest score.

`memory` asks questions whose answer is known to come from the sources, or not to: invented facts, and capitals that a
source gets wrong, against capitals of which the sources say nothing. It counts a prompt if the model's own answer has
the right word. What the sentence with that word loses when all sources are removed is compared with a threshold, which
is chosen on one seed and reported on another, with other capitals.

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
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import binomtest, spearmanr

import noiser
from noiser.data.planted import draw
from noiser.engine import Effects, LocalEngine, Values, run_interleaved, without
from noiser.explain.cite import MEMORY
from noiser.model import LanguageModel, build_query
from noiser.model.clean import Passes

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
    "noiser.cite, zero rows": {"method": noiser.Occlusion(score="logprob")},
}
CATEGORIES = ("once", "twice", "conflict", "combined")


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
    probe = _Probe(lm, text, chosen.masks, seed, chosen.removal)
    for way in ways:
        options = {"answer": text.answer, "memory": -torch.inf, "contrast": False} | WAYS[way]
        begin = time.process_time()
        citations = noiser.cite(lm, QUESTION, text.sources, **options)
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


def cite_query(lm: LanguageModel, case: Case | Memory) -> dict[str, Any]:
    """Options of the query of `noiser.cite`, with every sentence of the sources a unit."""
    question = case.question if isinstance(case, Memory) else QUESTION
    message: Any = [{"role": "user", "content": question}] if lm.tokenizer.chat_template else question
    return {
        "prompt": noiser.place_sources(message, case.sources),
        "target_unit": "sentence",
        "unit": "sentence",
        "sources": case.sources,
        "continuation_units": False,
    }


class _Probe:
    """Log-probabilities of the answer's sentences without random halves of the sources' sentences."""

    def __init__(self, lm: LanguageModel, text: Case, masks: int, seed: int, removal: Any) -> None:
        query = build_query(lm, **cite_query(lm, text), target=text.answer)
        self.units = query.units
        self.kept = torch.rand(masks, len(query.units), generator=torch.Generator().manual_seed(seed)) < 0.5
        gone = [
            tuple(sorted(i for u, k in zip(query.units, row, strict=True) if not k for i in u.token_indices))
            for row in self.kept.tolist()
        ]
        removed = [without(positions, None, removal) for positions in gone]
        table = LocalEngine(lm).ask(query, Values(removed, "logprob"))
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
    "noiser_joint, zero rows": {"method": noiser.NoiserJoint()},
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
    lm: LanguageModel, category: str, sentences: int, seed: int, done: Callable[[str], bool]
) -> Iterator[dict[str, Any]]:
    """A row for each prompt of a category, length and seed that counts, and each method."""
    examples = [e for e in draw(category, sentences, seed) if e.meta["sentences"] == sentences]
    said, alone = _says(lm, [e.prompt for e in examples]), _says(lm, [str(e.without) for e in examples])
    used = [e for e, a, b in zip(examples, said, alone, strict=True) if _begins(e.target, a) > _begins(e.target, b)]
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


def _begins(answer: str, token: str) -> bool:
    return bool(token) and answer.startswith(token)


def _says(lm: LanguageModel, prompts: Sequence[str]) -> list[str]:
    """The first token that the model writes after each."""
    engine = LocalEngine(lm, many=True)
    queries = dict(outcome[:2] for outcome in run_interleaved(engine, [engine.query(prompt) for prompt in prompts]))
    return [queries[number].target_texts[0].strip() for number in range(len(prompts))]


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
REMOVALS = tuple(MEMORY)
USED: dict[str, bool | None] = {
    "invented": True,
    "contradicted": True,
    "unrelated": False,
    "related": False,
    "stated": None,
}
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


def memory_passes(engine: LocalEngine, case: Memory) -> Passes[dict[str, Any]]:
    """What the sentence with the word loses without all sources, by removal; no losses if the model does not say it."""
    stop = None if engine.lm.tokenizer.chat_template else "\n"
    query = yield from engine.query(**cite_query(engine.lm, case), max_new_tokens=20, stop=stop)
    row: dict[str, Any] = {"answer": "".join(query.target_texts), "word": case.word}
    index = next((i for i, text in enumerate(query.target_texts) if case.word in text), None)
    if index is None:
        return row
    positions = tuple(sorted(position for unit in query.units for position in unit.token_indices))
    effects = Effects([without(positions, None, removal) for removal in REMOVALS], "logprob")
    table = yield from engine.session(query).answer(effects)
    losses = table.score[:, index].tolist()
    return row | {removal: round(loss, 3) for removal, loss in zip(REMOVALS, losses, strict=True)}


def best_threshold(used: Sequence[float], remembered: Sequence[float]) -> float:
    """Where the mean of both error rates is least; of several such places the middle of the widest gap."""
    values = sorted({*used, *remembered})

    def errors(threshold: float) -> float:
        return sum(v < threshold for v in used) / len(used) + sum(v >= threshold for v in remembered) / len(remembered)

    gaps = list(itertools.pairwise(values))
    return sum(min(gaps, key=lambda gap: (errors(sum(gap) / 2), gap[0] - gap[1]))) / 2


def memory_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The threshold chosen on even seeds, and error rates of it and of the default on odd ones; then losses by kind."""
    lines = ["| removal | threshold | from sources, called memory | from memory, called sourced |", "|" + "---|" * 4]
    for removal in REMOVALS:

        def losses(odd: int, used: bool, removal: str = removal) -> list[float]:
            return [r[removal] for r in rows if r["seed"] % 2 == odd and removal in r and USED[r["kind"]] is used]

        chosen = best_threshold(losses(0, True), losses(0, False))
        for name, threshold in (
            (f"{chosen:.2f} (chosen)", chosen),
            (f"{MEMORY[removal]:g} (default)", MEMORY[removal]),
        ):
            missed = _share([loss < threshold for loss in losses(1, True)])
            wrong = _share([loss >= threshold for loss in losses(1, False)])
            lines.append(f"| {removal} | {name} | {missed} | {wrong} |")
    lines += ["", f"| model | kind | n | {' | '.join(REMOVALS)}: 5 %, median, 95 % |", "|" + "---|" * 6]
    for model, kind in itertools.product(dict.fromkeys(r["model"] for r in rows), USED):
        some = [r for r in rows if (r["model"], r["kind"]) == (model, kind) and REMOVALS[0] in r]
        cells = [_quantiles([r[removal] for r in some]) for removal in REMOVALS]
        lines.append(f"| {model} | {kind} | {len(some)} | {' | '.join(cells)} |")
    return lines


def _quantiles(values: Sequence[float]) -> str:
    if not values:
        return ""
    quantiles = torch.tensor(values).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    return ", ".join(f"{value:.1f}" for value in quantiles)


# ---- rows and tables -------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: costs by size and way, then recall by method, model and category."""
    head = "| model | tokens | texts | halves | way | processor seconds | token-forwards | LDS | found |"
    lines = [head, "|" + "---|" * 9]
    costs = [row for row in rows if row["part"] == "cost"]
    for key in dict.fromkeys(map(_cost_key, costs)):
        some = [r for r in costs if _cost_key(r) == key]
        middle = {
            name: statistics.mean(r[name] for r in some) for name in ("seconds", "token_forwards", "lds", "found")
        }
        lines.append(
            f"| {key[0]} | {key[1]:,} | {len(some)} | {key[2]} | {key[3]} | {middle['seconds']:.1f} "
            f"| {middle['token_forwards']:,.0f} | {middle['lds']:.3f} | {middle['found']:.2f} |"
        )
    truths = [row for row in rows if row["part"] == "truth"]
    columns = [(*key, "first") for key in dict.fromkeys((r["model"], r["category"]) for r in truths)]
    columns += [(*column[:2], "all_first") for column in columns if column[1] in ("twice", "combined")]
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
    if memories := [row for row in rows if row["part"] == "memory"]:
        lines += ["", *memory_table(memories)]
    return "\n".join(lines)


def _cost_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["tokens"], row["removal"], row["way"]


def _is_in(row: dict[str, Any], column: tuple[str, str, str]) -> bool:
    return (row["model"], row["category"]) == column[:2]


def _share(hits: Sequence[bool], expected: int | None = None) -> str:
    """A share with Wilson's 95 % interval over prompts; how many there are, where it is not as many as expected."""
    if not hits:
        return ""
    low, high = binomtest(sum(hits), len(hits)).proportion_ci(method="wilson")
    missing = "" if len(hits) == expected else f" (n = {len(hits)})"
    return f"{statistics.mean(map(float, hits)):.2f} [{low:.2f}, {high:.2f}]{missing}"


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
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    stored = chosen.results.read_text() if chosen.results.exists() else ""
    if not stored.endswith("\n"):  # killed while it wrote
        stored = stored[: stored.rfind("\n") + 1]
        chosen.results.write_text(stored)
    rows = [json.loads(line) for line in stored.splitlines()]
    torch.set_num_threads(chosen.threads)

    def keep(key: dict[str, Any], *more: dict[str, Any]) -> None:
        """Stores rows that are only worth something together."""
        rows.extend(key | row for row in more)
        with chosen.results.open("a") as file:
            file.write("".join(json.dumps(key | row) + "\n" for row in more))
        print(*(key | row for row in more), sep="\n", flush=True)

    for name in chosen.models if chosen.part != "table" else ():
        lm = noiser.load_model(name, dtype="bfloat16", device="cpu")
        lm.packs  # noqa: B018 - measured once, and not here
        if chosen.part == "truth":
            for category, sentences, seed in itertools.product(CATEGORIES, chosen.sentences, chosen.seeds):
                key = {"part": "truth", "model": name, "category": category, "sentences": sentences, "seed": seed}
                done = {row["way"] for row in rows if key.items() <= row.items()}
                done |= METHODS.keys() - set(chosen.methods)
                made = truth_rows(lm, category, sentences, seed, done.__contains__)
                for _, group in itertools.groupby(made, itemgetter("way")):
                    keep(key, *group)
            continue
        if chosen.part == "memory":
            engine = LocalEngine(lm, many=True)
            for seed, kind in itertools.product((0, 1), USED):
                key = {"part": "memory", "model": name, "seed": seed, "kind": kind}
                done = {row["example"] for row in rows if key.items() <= row.items()}
                count = chosen.repeats * (INVENTED if kind == "invented" else 1)
                numbers = [number for number in range(count) if number not in done]
                cases = (memory_passes(engine, memory_case(kind, number, seed)) for number in numbers)
                for index, row, error in run_interleaved(engine, cases):
                    if error:
                        raise error
                    keep(key, {"example": numbers[index], **row})
            continue
        for seed in range(chosen.texts):
            key = {"part": "cost", "model": name, "tokens": chosen.tokens, "removal": chosen.removal, "seed": seed}
            done = {row["way"] for row in rows if key.items() <= row.items()}
            ways = [way for way in chosen.ways if way not in done]
            for row in cost_rows(lm, chosen, seed, ways) if ways else ():
                keep(key, row)
    print(table(rows))


if __name__ == "__main__":
    main()
