"""Development games: every input that units can make, run once, so that any estimator can be tried without a model.

    NOISER_DATA=FOLDER python benchmarks/games.py GAMES.jsonl play --models smollm2-135m-instruct gemma-3-270m
    python benchmarks/games.py GAMES.jsonl table
    python benchmarks/games.py GAMES.jsonl exact

With n units there are 2^n inputs, each with the rows of some units zero. `play` stores for each what is predicted: of
the development prompts of KNOWN (those that benchmarks/plans/fair.toml leaves out), tokens being units, and of planted
facts of another seed than the data set's, with their six sentences for units. Prompts count whose answer the model
gives (and does not give without the gold sentences), with at most 11 units. `table` runs methods as they are, with
their own noise over several seeds; each request is answered from the stored numbers. `exact` asks which scores are
best if nothing has to be drawn: those of one kind, and those that have the order of one kind and the sizes of another.

*rank*: the area of mass-matched curves by rank minus that of random ranks, with whole units kept or removed, exactly.
*LDS*: rank correlation over all inputs of the summed scores of what is kept with the log odds. *Erasure*: what removing
the least important units first leaves of the probability, minus what removing the most important first leaves; mean
over how many are removed. *Gold*: whether the gold sentences are first.

These numbers are for choosing, and say nothing of other prompts: docs/estimator.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool, Float64
from scipy.optimize import isotonic_regression
from scipy.stats import rankdata
from torch import Tensor

import noiser
from noiser.data import Example, load
from noiser.data.planted import draw
from noiser.engine import Effects, LocalEngine, Perturbation, Values, without
from noiser.methods import Method
from noiser.metrics.mass_matched import keep_rates
from noiser.metrics.metric import RATES
from noiser.model import LanguageModel, Query, build_query
from noiser.text import Encoding
from noiser.types import ModelIdentity, Span

MOST_UNITS = 11
SENTENCES = 6
SEEDS = {"once": (31,), "twice": (31, 32), "combined": (31, 32, 33, 34, 35, 36)}
"""Of the planted facts; few prompts of facts in two parts count."""
PERMUTATIONS = 200
"""Random orders that the area by rank is compared with."""

METHODS: dict[str, Method] = {
    "noiser_joint": noiser.NoiserJoint(),
    "leave one out, p": noiser.Occlusion(),
    "leave one out, log p": noiser.Occlusion(score="logprob"),
    "ContextCite, 64": noiser.ContextCite(samples=64),
    "LIME of log p, 50": noiser.Lime(score="logprob"),
    "KernelSHAP of log odds, 50": noiser.KernelShap(score="logit"),
}


# ---- playing ---------------------------------------------------------------------------------------------------------


def subsets(units: int) -> Bool[Tensor, "inputs units"]:
    """All sets of units: input i keeps unit u if bit u of i is set."""
    return (torch.arange(2**units)[:, None] >> torch.arange(units)) % 2 == 1


def known() -> list[Example]:
    """The prompts of KNOWN that were there to choose with."""
    plan = tomllib.loads((Path(__file__).parent / "plans" / "fair.toml").read_text(encoding="utf-8"))
    ids = set(plan["data"][0]["without_ids"])
    return [example for example in load("known", data_dir=os.environ.get("NOISER_DATA")) if example.id in ids]


def play(lm: LanguageModel, example: Example) -> dict[str, Any] | None:
    """What is predicted of every input; None if the prompt does not count."""
    gold = example.spans.get("gold", ())
    spans = sorted(span for places in example.spans.values() for span in places) if gold else []
    query = build_query(lm, example.prompt, unit=spans or "token")
    if not _says(query, example) or len(query.units) > MOST_UNITS:
        return None
    if example.without and _says(build_query(lm, example.without), example):
        return None
    removed: list[Perturbation] = []
    for kept in subsets(len(query.units))[:-1].tolist():
        gone = [unit for unit, is_kept in zip(query.units, kept, strict=True) if not is_kept]
        removed.append(without(tuple(i for unit in gone for i in unit.token_indices), None, "zero"))
    engine = LocalEngine(lm)
    probabilities, distances = (engine.ask(query, Values(removed, value)) for value in ("prob", "hellinger"))
    return {
        "units": len(query.units),
        "gold": [i for i, span in enumerate(spans) if span in gold],
        "prob": _stored([*torch.cat(probabilities.values)[:, 0].tolist(), float(probabilities.clean[0])]),
        "hellinger": _stored([*torch.cat(distances.values)[:, 0].tolist(), 0.0]),
    }


def _says(query: Query, example: Example) -> bool:
    said = query.target_texts[0].strip()
    return bool(said) and str(example.target).strip().startswith(said)


def _stored(numbers: Sequence[float]) -> list[float]:
    return [float(f"{number:.6g}") for number in numbers]


# ---- replaying -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Game:
    """All inputs of one prompt, in the order of `subsets`.

    Attributes:
        units: how many there are.
        gold: those that decide, if it is known.
        prob: of the answer.
        hellinger: distance to the clean distribution.
    """

    units: int
    gold: tuple[int, ...]
    prob: Float64[Tensor, " inputs"]
    hellinger: Float64[Tensor, " inputs"]

    @cached_property
    def inputs(self) -> Bool[Tensor, "inputs units"]:
        """All sets of units."""
        return subsets(self.units)

    @cached_property
    def scales(self) -> Mapping[str, Float64[Tensor, " inputs"]]:
        """What `noiser.engine.Values` may ask for."""
        return {
            "prob": self.prob,
            "logprob": self.prob.log(),
            "logit": self.prob.logit(),
            "hellinger": self.hellinger,
        }

    def scores(self, method: Method, seed: int) -> Float64[Tensor, " units"]:
        """Of a method that asks for nothing but removed rows."""
        query = _query(self.units)
        steps = method(query, torch.Generator().manual_seed(seed))
        answer: Any = None
        while True:
            try:
                request = steps.send(answer)
            except StopIteration as stop:
                return stop.value.scores[0].double()
            answer = self._answer(request)

    def _answer(self, request: Any) -> Any:
        full = 2**self.units - 1
        values = self.scales[request.score if isinstance(request, Effects) else request.value]
        read = values[[full - sum(1 << u for u in removed.positions) for removed in request.perturbations]]
        if isinstance(request, Effects):
            score = read if request.score == "hellinger" else values[full] - read
            return SimpleNamespace(score=score[:, None])
        return SimpleNamespace(values=tuple(read[:, None, None]), clean=values[full:])

    def rank_area(self, scores: Float64[Tensor, " units"]) -> float:
        """Mean height of Soft-NS and Soft-NC by rank, both together, over all masks."""
        return float(self._areas(_kept_by_rank(torch.tensor(rankdata(scores)))))

    @cached_property
    def random_area(self) -> float:
        """Mean of random orders."""
        chance = torch.Generator().manual_seed(0)
        orders = torch.stack([torch.randperm(self.units, generator=chance) for _ in range(PERMUTATIONS)])
        return float(self._areas(_kept_by_rank(torch.arange(self.units).double() + 1)[orders]).mean())

    def _areas(self, keep: Float64[Tensor, "*batch units rates"]) -> Float64[Tensor, "*batch"]:
        kept, removed = (_expected(self.hellinger, rates.mT) / self.hellinger[0] for rates in (keep, 1 - keep))
        rates = torch.tensor(RATES, dtype=torch.float64)
        return torch.trapezoid((1 - kept).clamp(min=0) + removed, rates) / (rates[-1] - rates[0])

    @cached_property
    def _value_ranks(self) -> Float64[Tensor, " inputs"]:
        return torch.tensor(rankdata(self.scales["logit"]))

    def measures(self, scores: Float64[Tensor, " units"]) -> dict[str, float]:
        """The columns of the table."""
        sums = torch.tensor(rankdata((self.inputs.double() @ scores).numpy().round(9)))
        order = scores.argsort(descending=True).tolist()
        bits, full = [1 << u for u in order], 2**self.units - 1
        most = self.prob[[full - gone for gone in itertools.accumulate(bits)][:-1]]
        least = self.prob[[full - gone for gone in itertools.accumulate(bits[::-1])][:-1]]
        found = {
            "rank": self.rank_area(scores) - self.random_area,
            "LDS": float(torch.corrcoef(torch.stack([sums, self._value_ranks]))[0, 1]),
            "erasure": float((least - most).mean()),
        }
        return found | ({"gold": float(set(order[: len(self.gold)]) == set(self.gold))} if self.gold else {})


def _kept_by_rank(ranks: Float64[Tensor, " units"]) -> Float64[Tensor, "units rates"]:
    return torch.stack([keep_rates(ranks, rate) for rate in RATES], 1)


def _expected(values: Float64[Tensor, " inputs"], keep: Float64[Tensor, "*batch units"]) -> Float64[Tensor, "*batch"]:
    """Mean of the values if each unit is kept with its own probability, a unit at a time from the last."""
    means = values.expand(*keep.shape[:-1], -1)
    for chance in keep.flip(-1).unbind(-1):
        removed, kept = means.unflatten(-1, (2, -1)).unbind(-2)
        means = torch.lerp(removed, kept, chance[..., None])
    return means.squeeze(-1)


def exact(game: Game) -> dict[str, Float64[Tensor, " units"]]:
    """Scores that take every input: of one kind, or with the order of one and the sizes of another."""
    every, log_odds = 2**game.units - 1, game.scales["logit"]
    larger = game.inputs.sum(1).tolist()[1:]
    shapley = [1 / (game.units * math.comb(game.units - 1, size - 1)) for size in larger]
    banzhaf = [2.0 ** (1 - game.units)] * every
    single = [float(size in (1, game.units)) for size in larger]
    ends = _semivalue(game, game.prob**0.25, single)
    middle = _semivalue(game, log_odds, banzhaf)
    distances = _semivalue(game, -game.hellinger, shapley)
    orders = {
        "mean of both": ends + middle,
        "mean of both and ½ Shapley of distances": ends + middle + distances / 2,
        "mean of both and Shapley of distances": ends + middle + distances,
    }
    return {
        "ends, p^¼": ends,
        "middle, log odds": middle,
        "Shapley of distances": distances,
        "mean of ends and middle": ends + middle,
        **{f"sizes: middle; order: {name}": in_order(middle, order) for name, order in orders.items()},
    }


def _semivalue(game: Game, values: Float64[Tensor, " inputs"], weights: Sequence[float]) -> Float64[Tensor, " units"]:
    """Steps of each unit by the weights of their larger inputs, of which the empty one is none; Σ|·| is 1."""
    of_larger = torch.tensor([0.0, *weights], dtype=torch.float64)
    found = torch.stack([(of_larger[kept] * (values[kept] - values[~kept])).sum() for kept in game.inputs.T])
    return found / found.abs().sum().clamp_min(1e-12)


def in_order(values: Float64[Tensor, " units"], order: Float64[Tensor, " units"]) -> Float64[Tensor, " units"]:
    """The nearest numbers to `values` in the order of others, of which a little tells equal ones apart."""
    places = order.argsort()
    return torch.tensor(isotonic_regression(values[places].numpy()).x)[places.argsort()] + 1e-3 * order


Scorer = Callable[[Game], Mapping[str, Sequence[Tensor]]]
"""By their name, scores of the units of a game, one or several times."""


def _query(units: int) -> Query:
    """One target after so many units of one token each, and nothing that can be run."""
    places = tuple((i, i + 1) for i in range(units))
    return Query(
        prompt="x" * units,
        encoding=Encoding(
            text="x" * units,
            token_ids=(0,) * units,
            offsets=places,
            frozen=(False,) * units,
            regions=((0, units),),
        ),
        prompt_tokens=units,
        prompt_length=units,
        target_ids=(0,),
        logit_positions=(units - 1,),
        target_spans=((0,),),
        target_unit="token",
        foil_id=None,
        units=tuple(Span("x", start, end, (start,)) for start, end in places),
        unit="token",
        target_texts=("x",),
        model=ModelIdentity("a game", None, "float64", ""),
        embedding_dim=1,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )


def read(path: Path) -> Iterator[tuple[dict[str, Any], Game]]:
    """Each line that counts: what it says of itself, and its game."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "units" in row:
            numbers = {name: torch.tensor(row.pop(name), dtype=torch.float64) for name in ("prob", "hellinger")}
            yield row, Game(row["units"], tuple(row["gold"]), **numbers)


def by_methods(methods: Mapping[str, Method], seeds: int) -> Scorer:
    """The scores of methods, with so many draws each."""
    return lambda game: {name: [game.scores(method, seed) for seed in range(seeds)] for name, method in methods.items()}


def table(path: Path, scorer: Scorer) -> str:
    """Markdown: a row for each kind of scores, means over prompts and draws."""
    found: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    counts: dict[str, int] = defaultdict(int)
    for row, game in read(path):
        of = f"{row['set']}, {row['model']}"
        counts[of] += 1
        for name, drawn in scorer(game).items():
            found[name][of] += [game.measures(scores) for scores in drawn]
    lines: list[list[str]] = [["", *(f"{of} ({count})" for of, count in counts.items())], ["---"] * (1 + len(counts))]
    for name, by_set in found.items():
        cells = [name]
        for measures in by_set.values():
            means = {column: statistics.mean(one[column] for one in measures) for column in measures[0]}
            cells.append(" · ".join(f"{mean:.3f}" if c != "gold" else f"{mean:.2f}" for c, mean in means.items()))
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", type=Path)
    commands = parser.add_subparsers(dest="command", required=True)
    playing = commands.add_parser("play")
    playing.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    commands.add_parser("table").add_argument("--seeds", type=int, default=5)
    commands.add_parser("exact")
    chosen = parser.parse_args()
    if chosen.command == "table":
        print(table(chosen.games, by_methods(METHODS, chosen.seeds)))
        return
    if chosen.command == "exact":
        print(table(chosen.games, lambda game: {name: [scores] for name, scores in exact(game).items()}))
        return
    lines = chosen.games.read_text(encoding="utf-8").splitlines() if chosen.games.exists() else []
    done = {(row["model"], row["id"]) for row in map(json.loads, lines)}
    sets = {"known": known()} | {
        category: [example for seed in seeds for example in draw(category, SENTENCES, seed)]
        for category, seeds in SEEDS.items()
    }
    for model in chosen.models:
        lm = noiser.load_model(model, dtype="float32")
        for name, examples in sets.items():
            for example in examples:
                if (model, example.id) not in done:
                    line = {"model": model, "set": name, "id": example.id} | (play(lm, example) or {})
                    with chosen.games.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
