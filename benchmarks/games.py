"""Development games: every input that the units of a prompt make, run once, to try estimators
without a model.

    export NOISER_DATA=FOLDER
    python benchmarks/games.py GAMES.jsonl play --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/games.py GAMES.jsonl table
    python benchmarks/games.py GAMES.jsonl pairs
    python benchmarks/games.py REPORT.jsonl play --part report
    python benchmarks/games.py REPORT.jsonl differences
    python benchmarks/games.py REPORT.jsonl frontier

With n units there are 2^n inputs, each with the rows of some units zero. `play` stores what is
predicted of each: of the development prompts of KNOWN (those that benchmarks/plans/fair.toml leaves
out), tokens being units, and of planted facts of another seed than the data set's, with their six
sentences as units. A prompt counts if the model gives its answer (and not without the gold
sentences) and it has at most 11 units. `table` runs methods on the stored values, with several
seeds. `pairs` asks for the pair of gold sentences: whether `joint` names it rightly, and whether it
has the most extreme interaction, with the right sign, by estimators of shapiq; intervals are
Wilson's over prompts.

*rank*: the area of mass-matched curves by rank minus that of random ranks, with whole units kept or
removed, exactly. *LDS*: rank correlation, over all inputs that keep half of the units, of the
summed scores of the kept units with the log odds. *Erasure*: the probability after removing the
least important units, minus that after removing the most important ones; mean over the number of
removed units. *Gold*: whether the gold sentences are first.

These numbers are for choosing, and say nothing of other prompts: design/estimator.md. `--part
report` plays other prompts, 60 of each set and model: of KNOWN those that no choice was made on,
and planted facts in the wordings that are kept for reporting. `differences` has their means and the
differences from `joint`, with 95 % intervals over prompts. `frontier` has the LDS of methods at
several budgets.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import tomllib
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float64
from scipy.stats import rankdata
from torch import Tensor

import noiser
from measuring import in_turn, mean_difference, share
from measuring import table as markdown
from noiser.data import Example, load
from noiser.data.planted import draw
from noiser.data.wordings import REPORTING
from noiser.engine import StoredGame
from noiser.metrics import SETTINGS, keep_rates
from noiser.metrics.correlation import lds_at_equal_size
from planted_prompts import places_of

MOST_UNITS = 11
SENTENCES = 6
SEEDS = {"once": (31,), "twice": (31, 32), "combined": (31, 32, 33, 34, 35, 36)}
"""Seeds of the planted facts by category; few prompts of facts in two parts count."""
PERMUTATIONS = 200
"""Random orders whose mean area by rank is subtracted."""

REPORT_UNITS = 9
"""A prompt of a report has at most so many units, since all inputs of 60 prompts are run."""

REPORT_PROMPTS = 60
"""Prompts of each set and model that count in a report."""

REPORT_SETS = {"once": (51, 52, 53), "twice": (51, 52, 53), "two": (51, 52, 53, 54, 55, 56)}
"""Seeds of the planted facts of a report, by category; all wordings that are kept for reporting."""

STORED = ("position", "length", "overlap", "attn_lrp")
"""Methods that do not play the game of kept units: a report stores their scores."""

METHODS: dict[str, Any] = {
    "joint": noiser.Joint(),
    "leave one out, p": noiser.Occlusion(),
    "leave one out, log p": noiser.Occlusion(objective="logprob"),
    "ContextCite, 64": noiser.ContextCite(samples=64),
    "LIME of log p, 50": noiser.Lime(objective="logprob"),
    "KernelSHAP of log odds, 50": noiser.KernelShap(objective="logit"),
}


def subsets(units: int) -> Bool[Tensor, "inputs units"]:
    """All sets of units: input i keeps unit u if bit u of i is set."""
    return (torch.arange(2**units)[:, None] >> torch.arange(units)) % 2 == 1


# ---- playing -------------------------------------------------------------------------------------


def known() -> list[Example]:
    """The prompts of KNOWN that methods may be chosen on."""
    plan = tomllib.loads(
        (Path(__file__).parent / "plans" / "fair.toml").read_text(encoding="utf-8")
    )
    ids = set(plan["data"][0]["without_ids"])
    return [
        example
        for example in load("known", data_dir=os.environ.get("NOISER_DATA"))
        if example.id in ids
    ]


def report_known() -> list[Example]:
    """The prompts of KNOWN that no method was chosen on, in a fixed random order."""
    development = {example.id for example in known()}
    examples = [
        example
        for example in load("known", data_dir=os.environ.get("NOISER_DATA"))
        if example.id not in development
    ]
    random.Random(60).shuffle(examples)
    return examples


def report_planted(category: str) -> list[Example]:
    """Planted facts in the wordings that are kept for reporting, of each draw in turn."""
    draws = [
        draw(category, SENTENCES, seed, wording)
        for seed in REPORT_SETS[category]
        for wording in REPORTING
    ]
    return in_turn(draws)


def play(
    lm: noiser.LanguageModel, example: Example, stored_methods: Sequence[str] = ()
) -> dict[str, Any] | None:
    """The predictions of every input; None if the prompt does not count."""

    def says(game: noiser.Game) -> bool:
        said = game.targets[0].strip()
        return bool(said) and str(example.target).strip().startswith(said)

    gold = example.spans.get("gold", ())
    most_units = REPORT_UNITS if stored_methods else MOST_UNITS
    if not gold and len(lm.tokenizer(example.prompt)["input_ids"]) > most_units + 1:
        return None
    if not says(noiser.Game(lm, example.prompt)):
        return None
    spans = places_of(example) if gold else []
    unit: Any = spans or "token"
    games = {
        name: noiser.Game(lm, example.prompt, unit=unit, objective=name)
        for name in (("prob",) if stored_methods else ("prob", "hellinger"))
    }
    units = len(games["prob"].units)
    if units > most_units:
        return None
    if any(says(noiser.Game(lm, other, unit="token")) for other in example.without):
        return None
    values = {name: game(subsets(units))[0].abs() for name, game in games.items()}
    line: dict[str, Any] = {}
    if stored_methods:
        found = {
            name: noiser.attribute(lm, example.prompt, method=name, unit=unit).scores[0]
            for name in stored_methods
        }
        # A unit that is only the position which is never removed has no score, and is no player.
        players = found["position"].isfinite()
        kept = (subsets(units) | players).all(1)
        values = {name: numbers[kept] for name, numbers in values.items()}
        line["scores"] = {name: scores[players].tolist() for name, scores in found.items()}
        spans = [span for span, plays in zip(spans, players.tolist(), strict=False) if plays]
        units = int(players.sum())
    stored = {
        name: [float(f"{number:.6g}") for number in numbers.tolist()]
        for name, numbers in values.items()
    }
    gold_units = [i for i, span in enumerate(spans) if span in gold]
    return {"units": units, "gold": gold_units} | stored | line


# ---- replaying -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Played:
    """All inputs of one prompt, in the order of `subsets`: p(answer), and the distance to the clean
    distribution.
    """

    units: int
    gold: tuple[int, ...]
    prob: Float64[Tensor, " inputs"]
    hellinger: Float64[Tensor, " inputs"]

    def play(self, method: Any, seed: int) -> Any:
        """What a method that removes units returns."""
        name = "logit" if method.objective == "root" else method.objective
        values = {"prob": self.prob, "logprob": self.prob.log(), "logit": self.prob.logit()}[name]
        keys = [(0, row.tobytes()) for row in subsets(self.units).numpy()]
        table = dict(zip(keys, values.tolist(), strict=True))
        game = StoredGame(torch.ones(1, self.units, dtype=torch.bool), values[-1:], name, table)
        steps = method.score_game(game, torch.Generator().manual_seed(seed))
        try:
            raise AssertionError(f"{steps.send(None)} is not stored")
        except StopIteration as stop:
            return stop.value

    def measures(self, scores: Float64[Tensor, " units"]) -> dict[str, float]:
        """The columns of the table."""
        sums = (subsets(self.units).double() @ scores).numpy().round(9)
        order = scores.argsort(descending=True, stable=True).tolist()
        # Equal scores are taken in both orders, so that a constant does not have that of the text.
        backwards = scores.flip(0).argsort(descending=True, stable=True)
        other_order = (self.units - 1 - backwards).tolist()
        erasure = (self._erasure(order) + self._erasure(other_order)) / 2
        found = {"LDS": self._lds(sums), "erasure": erasure}
        if self.hellinger.numel():
            by_rank = _kept_by_rank(torch.tensor(rankdata(scores)))
            found["rank"] = float(self._areas(by_rank)) - self._random_area
        if self.gold:
            found["gold"] = self._gold(scores, order)
        return found

    def _erasure(self, order: list[int]) -> float:
        bits, full = [1 << u for u in order], 2**self.units - 1
        most = self.prob[[full - gone for gone in itertools.accumulate(bits)][:-1]]
        least = self.prob[[full - gone for gone in itertools.accumulate(bits[::-1])][:-1]]
        return float((least - most).mean())

    def _gold(self, scores: Float64[Tensor, " units"], order: list[int]) -> float:
        """Whether the gold sentences come first; of a constant, the chance of it."""
        if bool((scores == scores[0]).all()):
            return 1 / math.comb(self.units, len(self.gold))
        return float(set(order[: len(self.gold)]) == set(self.gold))

    def _lds(self, sums: Float64[np.ndarray, " inputs"]) -> float:
        """Over the inputs that keep half of the units; NaN for scores that do not vary."""
        sizes = subsets(self.units).sum(1)
        half = (sizes == self.units // 2) | (sizes == self.units - self.units // 2)
        rows = torch.from_numpy(sums)[half][None]
        return float(lds_at_equal_size(rows, self.prob.logit()[half], sizes[half])[0])

    @cached_property
    def _random_area(self) -> float:
        chance = torch.Generator().manual_seed(0)
        orders = torch.stack(
            [torch.randperm(self.units, generator=chance) for _ in range(PERMUTATIONS)]
        )
        return float(
            self._areas(_kept_by_rank(torch.arange(self.units).double() + 1)[orders]).mean()
        )

    def _areas(self, keep: Float64[Tensor, "*batch units rates"]) -> Float64[Tensor, "*batch"]:
        """Mean height of Soft-NS and Soft-NC, both together, over all masks."""
        kept, removed = (
            _expected(self.hellinger, rates.mT) / self.hellinger[0] for rates in (keep, 1 - keep)
        )
        rates = torch.tensor(SETTINGS["rates"], dtype=torch.float64)
        return torch.trapezoid((1 - kept).clamp(min=0) + removed, rates) / (rates[-1] - rates[0])


def _kept_by_rank(ranks: Float64[Tensor, " units"]) -> Float64[Tensor, "units rates"]:
    return torch.stack([keep_rates(ranks, rate) for rate in SETTINGS["rates"]], 1)


def _expected(
    values: Float64[Tensor, " inputs"], keep: Float64[Tensor, "*batch units"]
) -> Float64[Tensor, "*batch"]:
    """Mean of the values if each unit is kept with its own probability, a unit at a time from the
    last.
    """
    means = values.expand(*keep.shape[:-1], -1)
    for chance in keep.flip(-1).unbind(-1):
        removed, kept = means.unflatten(-1, (2, -1)).unbind(-2)
        means = torch.lerp(removed, kept, chance[..., None])
    return means.squeeze(-1)


def read(path: Path) -> Iterator[tuple[dict[str, Any], Played]]:
    """Each line that counts: its names, and its game."""
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if "units" in row:
            numbers = {
                name: torch.tensor(row.pop(name, ()), dtype=torch.float64)
                for name in ("prob", "hellinger")
            }
            yield row, Played(row["units"], tuple(row["gold"]), **numbers)


def table(path: Path, methods: Mapping[str, Any], seeds: int) -> str:
    """Markdown with a row per method, a constant and random scores: means over prompts and
    seeds.
    """
    columns: dict[str, list[tuple[dict[str, Any], Played]]] = defaultdict(list)
    for row, game in read(path):
        columns[f"{row['set']}, {row['model']}"].append((row, game))
    lines: list[dict[str, str]] = []
    for way in (*methods, "constant", "random"):
        line = {"": way}
        for column, games in columns.items():
            found = [_of_prompt(way, row, game, seeds, methods) for row, game in games]
            texts: list[str] = []
            for name in ("rank", "LDS", "erasure", "gold"):
                if name in found[0]:
                    texts.append(_mean([each[name] for each in found], 2 if name == "gold" else 3))
            line[f"{column} ({len(games)})"] = " · ".join(texts)
        lines.append(line)
    return markdown(lines)


# ---- a report ------------------------------------------------------------------------------------


def differences(path: Path, seeds: int) -> str:
    """Markdown with a row per set, model and way: means, and LDS minus that of `joint` with its
    interval.

    Equal scores have no LDS, since all inputs keep equally many units: such prompts are left out of
    its mean, and a constant's says "none".
    """
    lines: list[dict[str, Any]] = []
    for (dataset, model), some in _by_set(path).items():
        values = {way: [_of_prompt(way, row, game, seeds) for row, game in some] for way in WAYS}
        for way, of_prompts in values.items():
            line: dict[str, Any] = {"set": f"{dataset}, {model} ({len(some)})", "": way}
            for name in ("LDS", "erasure", "gold"):
                numbers = [prompt[name] for prompt in of_prompts if name in prompt]
                line[name] = _mean(numbers)
                ours = [prompt[name] for prompt in values["joint"] if name in prompt]
                if way != "joint" and name == "LDS" and line[name] != "none":
                    lead = np.subtract(numbers, ours)
                    line[f"{name} − joint"] = mean_difference(lead[~np.isnan(lead)])
            lines.append(line)
    return markdown(lines)


BUDGETS = (16, 24, 32, 64, 128)
"""Inputs of a prompt that a method may run, at most."""


def _at_budget(inputs: int) -> dict[str, Any]:
    """Methods that run about so many inputs of a prompt."""
    return {
        "joint": noiser.Joint(samples=inputs, pairs=None),
        "ContextCite": noiser.ContextCite(samples=inputs),
        "LIME of log p": noiser.Lime(objective="logprob", samples=inputs),
        "KernelSHAP of log odds": noiser.KernelShap(objective="logit", samples=inputs),
    }


def frontier(path: Path, seeds: int) -> str:
    """Markdown with a row per method: the mean LDS of each set and model at several budgets."""
    lines: dict[str, dict[str, str]] = {}
    for (dataset, model), some in _by_set(path).items():
        column = f"{dataset}, {model} ({len(some)})"
        cells: dict[str, list[str]] = defaultdict(list)
        for inputs in BUDGETS:
            methods = _at_budget(inputs)
            for way in methods:
                found = [_of_prompt(way, row, game, seeds, methods)["LDS"] for row, game in some]
                cells[way].append(_mean(found, 2))
        single = "leave one out, log p"
        found = [_of_prompt(single, row, game, 1)["LDS"] for row, game in some]
        cells[single].append(_mean(found, 2))
        for way, numbers in cells.items():
            lines.setdefault(way, {"": way})[column] = " · ".join(numbers)
    return markdown(list(lines.values()))


WAYS = (*METHODS, *STORED, "constant", "random")


def _by_set(path: Path) -> dict[tuple[str, str], list[tuple[dict[str, Any], Played]]]:
    games: dict[tuple[str, str], list[tuple[dict[str, Any], Played]]] = defaultdict(list)
    for row, game in read(path):
        games[row["set"], row["model"]].append((row, game))
    return games


def _of_prompt(
    way: str,
    row: dict[str, Any],
    game: Played,
    seeds: int,
    methods: Mapping[str, Any] = METHODS,
) -> dict[str, float]:
    """The measures of one way on one prompt: of methods that draw, the mean over seeds."""
    if way in methods:
        scores = [game.play(methods[way], seed).scores[0].double() for seed in range(seeds)]
    elif way == "constant":
        scores = [torch.ones(game.units, dtype=torch.float64)]
    elif way == "random":
        chance = torch.Generator().manual_seed(zlib.crc32(row["id"].encode()))
        scores = list(torch.randn(seeds, game.units, generator=chance, dtype=torch.float64))
    else:
        scores = [torch.tensor(row["scores"][way], dtype=torch.float64)]
    measures = [game.measures(each) for each in scores]
    return {name: statistics.mean(each[name] for each in measures) for name in measures[0]}


def _mean(numbers: Sequence[float], digits: int = 3) -> str:
    if not numbers:
        return ""
    known = [number for number in numbers if not math.isnan(number)]
    return f"{statistics.mean(known):.{digits}f}" if known else "none"


# ---- pairs ---------------------------------------------------------------------------------------

KINDS = {"twice": "either", "combined": "together"}
PAIRS: dict[str, Any] = {"joint, 8 n": noiser.Joint(), "joint, 8 n + 10": noiser.Joint(pairs=10)}
PEERS = {
    "KernelSHAPIQ": "k-SII",
    "SHAPIQ": "SII",
    "PermutationSamplingSII": "SII",
    "SPEX": "FBII",
    "ProxySPEX": "FBII",
}
"""Estimators of shapiq and the index that each estimates, of p^¼; of log odds, fewer pairs were
found.
"""


def found_by(way: str, budget: int, kind: str, game: Played, seed: int) -> tuple[bool, int]:
    """Whether the gold pair is named rightly, or has the most extreme interaction; how many others
    are named.
    """
    gold, bits = tuple(sorted(game.gold)), 1 << np.arange(game.units)
    if way in PAIRS:
        named = [(pair.units, pair.kind) for pair in game.play(PAIRS[way], seed).pairs]
        return (gold, kind) in named, len(named) - ((gold, kind) in named)
    from shapiq import approximator

    made = getattr(approximator, way)(
        n=game.units, max_order=2, index=PEERS[way], random_state=seed
    )
    values = made.approximate(
        budget, lambda kept: (game.prob**0.25).numpy()[np.atleast_2d(kept) @ bits]
    )
    every = {
        pair: values[pair] * (1 if kind == "together" else -1)
        for pair in itertools.combinations(range(game.units), 2)
    }
    return max(every, key=every.__getitem__) == gold and every[gold] > 0, 0


def _cell(way: str, budget: int, some: list[tuple[str, Played]], seeds: int) -> str:
    """Share of prompts whose gold pair is found, with its interval; by `joint`, other pairs per
    prompt.
    """
    kind, ours = some[0][0], way in PAIRS
    if not kind and not ours:
        return ""
    try:
        hits = [
            found_by(way, budget, kind, game, seed) for _, game in some for seed in range(seeds)
        ]
    except (ImportError, ValueError) as error:
        return type(error).__name__
    found, others = zip(*hits, strict=True)
    parts = [share(found, len(some))] * bool(kind) + [
        f"{sum(others) / len(hits):.2f} others"
    ] * ours
    return ", ".join(parts)


def pairs_table(path: Path, seeds: int) -> str:
    """Markdown with a row per way. Of facts in two parts those count of which leaving out either
    halves p.
    """
    games: dict[str, list[tuple[str, Played]]] = defaultdict(list)
    for row, game in read(path):
        halved = [
            2 * game.prob[2**game.units - 1 - (1 << unit)] <= game.prob[-1] for unit in game.gold
        ]
        if row["set"] in ("once", "twice") or (row["set"] == "combined" and all(halved)):
            games[f"{row['set']}, {row['model']}"].append((KINDS.get(row["set"], ""), game))
    lines: list[dict[str, str]] = []
    for way, budget in [*((way, 0) for way in PAIRS), *itertools.product(PEERS, (50, 60))]:
        cells = {
            f"{name} ({len(some)})": _cell(way, budget, some, seeds) for name, some in games.items()
        }
        lines.append({"": f"{way}{f', {budget} inputs' * bool(budget)}"} | cells)
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("games", type=Path)
    parser.add_argument("command", choices=("play", "table", "pairs", "differences", "frontier"))
    parser.add_argument("--part", choices=("development", "report"), default="development")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    parser.add_argument("--seeds", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.command == "play":
        play_all(chosen)
    elif chosen.command == "pairs":
        print(pairs_table(chosen.games, chosen.seeds))
    elif chosen.command == "frontier":
        print(frontier(chosen.games, chosen.seeds))
    elif chosen.command == "differences":
        print(differences(chosen.games, chosen.seeds))
    else:
        print(table(chosen.games, METHODS, chosen.seeds))


def play_all(chosen: argparse.Namespace) -> None:
    """Adds a line for each prompt that the file lacks; in a report, until enough prompts of a set
    count.
    """
    lines = chosen.games.read_text(encoding="utf-8").splitlines() if chosen.games.exists() else []
    done = {(row["model"], row["id"]) for row in map(json.loads, lines)}
    counts = Counter((row["model"], row["set"]) for row in map(json.loads, lines) if "units" in row)
    report = chosen.part == "report"
    if report:
        sets = {name: report_planted(name) for name in REPORT_SETS} | {"known": report_known()}
    else:
        sets = {"known": known()} | {
            category: [example for seed in seeds for example in draw(category, SENTENCES, seed)]
            for category, seeds in SEEDS.items()
        }
    for model in chosen.models:
        name = Path(model).stem
        lm = noiser.load_model(model, dtype="float32", device="cpu")
        for dataset, example in _in_turn(sets):
            if report and counts[name, dataset] >= REPORT_PROMPTS:
                continue
            if (name, example.id) in done:
                continue
            played = play(lm, example, STORED if report else ())
            counts[name, dataset] += played is not None
            line = {"model": name, "set": dataset, "id": example.id} | (played or {})
            with chosen.games.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _in_turn(sets: Mapping[str, Sequence[Example]]) -> Iterator[tuple[str, Example]]:
    """The first prompt of each set, then the second of each, so that any beginning has all sets."""
    for examples in itertools.zip_longest(*sets.values()):
        for dataset, example in zip(sets, examples, strict=True):
            if example is not None:
                yield dataset, example


if __name__ == "__main__":
    main()
