"""Numbers that the manual and the design quote, and that no plan or other script makes; one part
for each.

    python benchmarks/quoted.py size_of_noise
    python benchmarks/quoted.py precisions
    python benchmarks/quoted.py half_precision
    python benchmarks/quoted.py conservation
    python benchmarks/quoted.py long_prompts
    python benchmarks/quoted.py highlights noiser.tex
    python benchmarks/quoted.py boolean_rules
    python benchmarks/quoted.py rule_intervals

- `size_of_noise`: why `noiser` trails; from stored rows, without a model.
- `precisions`: two runs of a plan, in float32 and bfloat16; from stored rows.
- `half_precision`: scores of 100 prompts of KNOWN in both precisions.
- `conservation`: AttnLRP's relevance as a share of the logit.
- `long_prompts`: does unit="auto" find one planted sentence of 2,000 tokens?
- `highlights`: the paper's highlighted prompts; arXiv 2504.02911.
- `boolean_rules`: how often a rule is the boolean function that made a table; without a model.
- `rule_intervals`: whether the intervals of rules cover all inputs; from stored games.

`--model` and `--prompts` change what a part with a model runs. A part prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import noiser
from games import Played
from games import read as read_games
from games import subsets as every_subset
from noiser.bench import Store
from noiser.data import load
from noiser.engine import StoredGame
from noiser.explain.rule_tables import play_rules
from noiser.methods.rules import Terms, holds, weights_of
from noiser.metrics.bootstrap import difference, estimate, holm_correct, mean
from noiser.numbers import wilson
from noiser.report.cells import rows_of
from noiser.types import STAYS, Span

ROOT = Path(__file__).parent.parent


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# ---- from stored rows ----------------------------------------------------------------------------


def _median_of_first_order(rows: Sequence[dict[str, Any]], model: str, size: int) -> float:
    """The median correlation with the first order of a model's rows."""
    return statistics.median(row["first_order"][size] for row in rows if row["model"] == model)


def size_of_noise(_: argparse.Namespace) -> str:
    """What size, shape and score of the noise change, from `benchmarks/results/explanations.jsonl`.

    A way to disturb a token has a size, a shape and a score, such as "k_min, one k, prob". A part
    is changed in all four ways that differ in the other two, and a prompt counts with their mean; p
    is Holm's, for all twelve.
    """
    path = ROOT / "benchmarks/results/explanations.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    parts = [("k_min", "r = 2"), ("one k", "by norm"), ("prob", "hellinger")]
    models = list(dict.fromkeys(row["model"] for row in rows))
    gaps: dict[tuple[int, str, str], Any] = {}
    for part, model, number in product(range(3), models, ("rank_area", "lds")):
        others = [ways for place, ways in enumerate(parts) if place != part]
        sides: list[list[float]] = []
        for choice in reversed(parts[part]):  # the changed one first
            ways = [[*pair[:part], choice, *pair[part:]] for pair in product(*others)]
            of_model = [row["ways"] for row in rows if row["model"] == model]
            sides.append(
                [statistics.mean(some[", ".join(way)][number] for way in ways) for some in of_model]
            )
        gaps[part, model, number] = estimate(difference(mean), *sides, contrast=True)
    gaps = holm_correct(gaps)
    names = (
        "size: r = 2, not k_min",
        "shape: by norm, not one k",
        "score: Hellinger, not probability",
    )
    columns = list(product(models, ("rank_area", "lds")))
    cells = [
        [name, *(gaps[part, *column] for column in columns)] for part, name in enumerate(names)
    ]
    first = [
        f"{model}: {_median_of_first_order(rows, model, size):.2f}"
        for model, size in product(models, (0, 2))
    ]
    told = f"Correlation with the first order at k_min/16 and at k_min: {', '.join(first)}"
    return f"{table(['changed', *(f'{model}: {n}' for model, n in columns)], cells)}\n\n{told}"


def precisions(_: argparse.Namespace) -> str:
    """The largest move of any mean by rank and by LDS, and Noiser's paper score, float32 to
    bfloat16.
    """
    frames = []
    for folder in ("three_models", "bfloat16"):
        frame = rows_of(Store(ROOT / "docs/reproduction" / folder / "rows"))
        frames.append(
            frame[frame["error"].isna()].set_index(["model", "data", "method", "example"])
        )
    lines: list[list[Any]] = []
    for number in ("rank_area", "lds"):
        pair = [frame[number].dropna() for frame in frames]
        shared = pair[0].index.intersection(pair[1].index)
        groups = [one.loc[shared].groupby(["model", "data", "method"]).mean() for one in pair]
        moves = (groups[1] - groups[0]).abs()
        model, data, method = moves.idxmax()
        lines.append([number, f"{moves.max():.3f}", f"{method} on {model}, {data}", len(shared)])
    return table(["number", "largest move of a mean", "of", "prompts × methods"], lines)


# ---- with a model --------------------------------------------------------------------------------


def right_prompts(lm: noiser.LanguageModel, count: int) -> list[str]:
    """Prompts of KNOWN, a random sample, whose answer the model gives."""
    prompts: list[str] = []
    for example in load("known", None, 1000):
        said = (
            noiser.attribute(lm, example.prompt, method="position", unit="token")
            .targets[0]
            .text.strip()
        )
        if said and str(example.target).strip().startswith(said):
            prompts.append(example.prompt)
        if len(prompts) == count:
            break
    return prompts


def half_precision(chosen: argparse.Namespace) -> str:
    """Rank correlation of scores in bfloat16 with those in float32, and how much faster they
    are.
    """
    pair = [noiser.load_model(chosen.model, dtype=dtype) for dtype in ("float32", "bfloat16")]
    prompts = right_prompts(pair[0], chosen.prompts or 100)
    lines: list[list[Any]] = []
    for method in ("noiser", "occlusion", "input_x_gradient"):
        rhos: list[float] = []
        seconds = [0.0, 0.0]
        same = 0
        for prompt in prompts:
            atts: list[noiser.Attribution] = []
            target = (
                noiser.attribute(pair[0], prompt, method="position", unit="token")
                .targets[0]
                .token_id
            )
            for index, lm in enumerate(pair):
                begin = time.perf_counter()
                with warnings.catch_warnings(action="ignore"):
                    atts.append(
                        noiser.attribute(lm, prompt, method=method, target=target, unit="token")
                    )
                seconds[index] += time.perf_counter() - begin
            rhos.append(float(spearmanr(*(att.scores[0].numpy() for att in atts)).statistic))
            same += all(att.k_min is not None and att.k_min.equal(atts[0].k_min) for att in atts)
        numbers = [f"{f(rhos):.3f}" for f in (statistics.mean, statistics.median, min)]
        k_min = f"{same / len(prompts):.0%}" if method == "noiser" else ""
        lines.append([method, f"{seconds[0] / seconds[1]:.2f}", *numbers, k_min])
    head = ["method", "times faster", "rank correlation, mean", "median", "smallest", "same k_min"]
    return f"{len(prompts)} prompts\n\n{table(head, lines)}"


PROMPTS = (
    "LeBron James professionally plays the sport of",
    "The capital of France is",
    "The mother tongue of Danielle Darrieux is",
    "The Space Needle is located in the city of",
    "Water boils at a temperature of one hundred degrees",
    "When it rains in the mountains, the trains to the coast run",
    "The official language of Brazil is",
    "She opened the old wooden door, stepped into the dark room and turned on the",
    "Apple was founded by Steve",
    "The opposite of hot is",
)


def conservation(chosen: argparse.Namespace) -> str:
    """The sum of all relevance of AttnLRP as a share of the logit: median, least and most over ten
    prompts.
    """
    lm = noiser.load_model(chosen.model, dtype="float32")
    lines: list[list[Any]] = []
    for softmax in ("taylor", "constant"):
        shares = [
            noiser.attribute(lm, prompt, method=noiser.AttnLrp(softmax=softmax), unit="token").info[
                "conservation"
            ][0]
            for prompt in PROMPTS[: chosen.prompts]
        ]
        lines.append([softmax, *(f"{f(shares):.4f}" for f in (statistics.median, min, max))])
    return table(["softmax", "relevance / logit, median", "least", "most"], lines)


SENTENCE = (
    "The baker|A young clerk|The old gardener|My neighbour|The ferryman|A retired teacher|The "
    "carpenter",
    "repaired|painted|carried|borrowed|forgot|described|sold|cleaned|measured|hid|admired|copied",
    "a wooden chair|two copper kettles|the torn map|a box of candles|the blue bicycle|an iron gate",
    "behind the mill|near the harbour|in the empty hall|by the river|under the bridge|in the attic",
)
PLACES = "northern|southern|coastal|mountain|desert|island|forest|river"
CODES = (
    "silver|garden|window|orange|dragon|planet|castle|summer|copper|winter|shadow|engine|button|"
    "rocket"
)


def document(lm: noiser.LanguageModel, tokens: int, seed: int) -> tuple[str, str, str]:
    """About so many tokens of made-up sentences and a question about one of them: prompt, that
    sentence, answer.
    """
    chance = random.Random(seed)
    place, code = (chance.choice(words.split("|")) for words in (PLACES, CODES))
    fact = f"The code word of the {place} station is {code}."
    question = (
        f"\n\nQuestion: What is the code word?\nAnswer: The code word of the {place} station is"
    )
    lines: list[str] = []
    while len(lm.tokenizer(" ".join([fact, *lines, question]))["input_ids"]) < tokens:
        lines.append(" ".join(chance.choice(words.split("|")) for words in SENTENCE) + ".")
    lines.insert(chance.randrange(len(lines) + 1), fact)
    return " ".join(lines) + question, fact, code


def long_prompts(chosen: argparse.Namespace) -> str:
    """How often unit="auto" gives the planted sentence the largest score, on prompts that the model
    answers.
    """
    lm = noiser.load_model(chosen.model, dtype="bfloat16")
    found, seconds, seed = 0, list[float](), 0
    while len(seconds) < (chosen.prompts or 20):
        prompt, fact, code = document(lm, chosen.tokens, seed)
        seed += 1
        said = noiser.attribute(lm, prompt, method="position", unit="line").targets[0].text.strip()
        if not said or not code.startswith(said):
            continue
        begin = time.perf_counter()
        method = noiser.Occlusion(objective="logprob")
        att = noiser.attribute(lm, prompt, method=method, unit="auto")
        seconds.append(time.perf_counter() - begin)
        sums = att.aggregate("sentence")
        found += sums.units[int(sums.scores[0].nan_to_num().argmax())].text.strip() == fact
        print(f"{found} of {len(seconds)}, {seconds[-1]:.0f} s", flush=True)
    middle = f"median {statistics.median(seconds):.0f} s"
    return (
        f"found on {found} of {len(seconds)} prompts of {chosen.tokens} tokens, {middle}; {seed} "
        f"prompts tried"
    )


def highlights(chosen: argparse.Namespace) -> str:
    """Spearman's correlation of scores with the printed colours, and how many of the three highest
    agree.

    The table "tab:highlights" of the paper's source has three prompts, a colour in percent for each
    word, and the word that its model said next; it does not say which model. A token has the mean
    colour of its words.
    """
    lm = noiser.load_model(chosen.model)
    lines: list[list[str]] = []
    rows = re.findall(
        r"(\w+)\s*&\s*((?:\\hlc\{teal!.*?)+)&\s*(\w+)\s*\\\\", chosen.source.read_text()
    )
    for data, words, answer in rows:
        prompt, colours = "", list[tuple[int, int, float]]()
        for colour, marked in re.findall(r"\\hlc\{teal!([\d.]+)\}\{([^}]*)\}", words):
            word = marked.replace("\\", "").replace("’", "'")
            closed = not prompt or prompt.endswith(("(", "'")) or word[:1] in ".,)'?!"
            start, prompt = len(prompt), prompt + ("" if closed else " ") + word
            colours.append((start, len(prompt), float(colour)))
        cells: list[str] = []
        for method in ("noiser@1", "occlusion", "position"):
            target = {"target": f" {answer}", "target_unit": "all"}
            att = noiser.attribute(lm, prompt, method=method, **{"unit": "token"} | target)
            ours: list[float] = []
            theirs: list[float] = []
            for unit, score in zip(att.units, att.scores[0].tolist(), strict=True):
                if not math.isnan(score):  # the first token of some models has no score
                    ours.append(score)
                    theirs.append(colour_of(unit, colours))
            agree = len(highest(ours) & highest(theirs))
            cells.append(f"{spearmanr(ours, theirs).statistic:+.2f}, {agree} of 3")
        lines.append([data, *cells])
    return table(["prompt", "noiser@1", "occlusion", "position"], lines)


def colour_of(unit: Span, colours: Sequence[tuple[int, int, float]]) -> float:
    """The mean colour of the words that a token is part of."""
    return statistics.mean(c for start, end, c in colours if start < unit.end and unit.start < end)


def highest(values: Sequence[float]) -> set[int]:
    """The places of the three largest."""
    return set(sorted(range(len(values)), key=lambda i: -values[i])[:3])


# ---- rules of boolean functions ------------------------------------------------------------------

FUNCTIONS: dict[str, tuple[Callable[[bytes], Any], Terms]] = {
    "one": (lambda kept: kept[1], ((2,),)),
    "and": (lambda kept: kept[1] and kept[4], ((2, 5),)),
    "or": (lambda kept: kept[1] or kept[4], ((2,), (5,))),
    "unless": (lambda kept: kept[1] and not kept[4], ((2, -5),)),
    "and, or unless": (
        lambda kept: (kept[0] and kept[3]) or (kept[5] and not kept[2]),
        ((1, 4), (6, -3)),
    ),
    "or, or unless": (lambda kept: kept[4] or not kept[1], ((5,), (-2,))),
    "two of three": (lambda kept: kept[0] + kept[2] + kept[5] > 1, ((1, 3), (1, 6), (3, 6))),
    "exactly one of two": (lambda kept: kept[0] != kept[1], ()),
    "always": (lambda _: True, ()),
}
"""Functions of kept units, and the rules that they are; `()` where no rule may be named."""


def boolean_rules(chosen: argparse.Namespace) -> str:
    """How often the rule is the function: of 6, 12 and 24 units, with none and 5 % of the answers
    flipped, 40 fresh inputs.

    "Fitted" is the rule that fits best, "named" the one that also beats the constant. Where no rule
    may be named, the number is how often none is.
    """
    draws = chosen.prompts or 60
    rows: list[list[Any]] = []
    coins = (("always", FUNCTIONS["always"]), 0.5)  # half flipped: the answers say nothing
    for (name, (function, expected)), flipped in [*product(FUNCTIONS.items(), (0.0, 0.05)), coins]:
        row: list[Any] = [name, f"{flipped:.0%}"]
        for units in (6, 12, 24):
            found = [_findings(function, units, flipped, seed) for seed in range(draws)]
            named = sum(each["terms"] == expected for each in found) / draws
            fitted = sum(each["best"] == expected for each in found) / draws
            row.append(f"{named:.2f} ({fitted:.2f})" if expected else f"{named:.2f}")
        rows.append(row)
    head = ["function", "flipped", *(f"{units} units" for units in (6, 12, 24))]
    return f"named (fitted), {draws} draws each\n\n{table(head, rows)}"


def _findings(
    function: Callable[[bytes], Any], units: int, flipped: float, seed: int
) -> dict[str, Any]:
    """The rule of a table whose answers are a function of the kept units, some of them flipped."""

    def value(kept: bytes) -> float:
        is_false = random.Random(f"{seed}/{kept.hex()}").random() < flipped and not all(kept)
        return float(bool(function(kept)) != is_false)

    return _rule_of(value, units, None, seed)[0]


def _rule_of(
    value: Callable[[bytes], float], units: int, objective: str | None, seed: int
) -> tuple[dict[str, Any], set[bytes]]:
    """What is found from a table, and the inputs that the rule was fitted to."""
    asked: list[set[bytes]] = []

    async def play(keys: Any) -> dict[Any, float]:
        asked.append({kept for _, kept in keys})
        return {(target, kept): value(kept) for target, kept in keys}

    whole = torch.tensor([value(b"\1" * units)], dtype=torch.float64)
    game = StoredGame(torch.ones(1, units, dtype=torch.bool), whole, objective, evaluate=play)
    steps = play_rules(game, [0], 40, seed, allows_empty=[True])
    try:
        steps.send(None)
    except StopIteration as stop:
        # The fresh inputs come last.
        return stop.value[0].findings(), {b"\1" * units}.union(*asked[:-1])
    raise AssertionError("a table asks no model")


def rule_intervals(_: argparse.Namespace) -> str:
    """Rules of stored games of 7 to 11 tokens, five seeds each: the answer stays while it loses
    less than 3 nats.

    "All" are all inputs, "unseen" those that the rule was not fitted to, by their chance to be
    drawn.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for names, played in read_games(ROOT / "benchmarks/results/games.jsonl"):
        if names["set"] == "known" and played.units >= 7:
            rows = found.setdefault(names["model"], [])
            rows += [_agreement(played, seed) for seed in range(5)]
    lines = [
        [name, *(f"{statistics.mean(row[name] for row in some):.2f}" for some in found.values())]
        for name in next(iter(found.values()))[0]
    ]
    head = ["", *(f"{name}, {len(some) // 5} prompts" for name, some in found.items())]
    return table(head, lines)


def _agreement(played: Played, seed: int) -> dict[str, float]:
    """How often the rule of a stored game is right, and whether its interval says so."""
    kept = every_subset(played.units).numpy()
    log_p = played.prob.log()
    stays = (log_p > log_p[-1] - STAYS).numpy()
    by_input = dict(zip((row.tobytes() for row in kept), log_p.tolist(), strict=True))
    rule, fitted = _rule_of(by_input.__getitem__, played.units, "logprob", seed)
    is_right = holds(rule["best"], kept) == stays
    weights = weights_of(kept)
    unseen = weights * [row.tobytes() not in fitted for row in kept]
    share_of_all = float(weights[is_right].sum() / weights.sum())
    share_of_unseen = float(unseen[is_right].sum() / unseen.sum())
    stayed = float(weights[stays].sum() / weights.sum())
    low, high = wilson(rule["hits"], rule["tries"])
    is_named = bool(rule["terms"])
    return {
        "agreement on fresh inputs": rule["hits"] / rule["tries"],
        "agreement on all": share_of_all,
        "constant on all": max(stayed, 1 - stayed),
        "interval covers the unseen": low <= share_of_unseen <= high,
        "interval covers all": low <= share_of_all <= high,
        "named": is_named,
        "named, no better than the constant": is_named and share_of_all <= max(stayed, 1 - stayed),
    }


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {
    part.__name__: part
    for part in (
        size_of_noise,
        precisions,
        half_precision,
        conservation,
        long_prompts,
        highlights,
        boolean_rules,
        rule_intervals,
    )
}


def main() -> None:
    """Prints one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("source", nargs="?", type=Path, help="the paper's LaTeX, for highlights")
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--prompts", type=int, help="fewer prompts; of boolean rules, draws")
    parser.add_argument("--tokens", type=int, default=2000, help="of long prompts")
    chosen = parser.parse_args()
    if chosen.part == "highlights" and not chosen.source:
        parser.error("highlights needs the paper's LaTeX source")
    torch.manual_seed(0)
    print(PARTS[chosen.part](chosen))


if __name__ == "__main__":
    main()
