"""A sceptic's questions to our own yardsticks: what do scores get that say nothing?

    python benchmarks/sceptic.py games
    python benchmarks/sceptic.py metrics
    python benchmarks/sceptic.py documents

`games` plays `benchmarks/results/games.jsonl`, in which every input of a prompt has its prediction,
so that exact values are known. `metrics` and `documents` run prompts of this file. The slow tests
run the same functions with bounds (tests/test_sceptic.py).
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

import noiser
from measuring import table as markdown
from noiser.engine import StoredGame
from noiser.evaluation import sample_of
from noiser.evaluation.measuring import asked_of, measure_block, read_examples
from noiser.explain.check import LEVEL, correlation_of_halves
from noiser.methods import Scores, make_method
from noiser.metrics import Settings, estimates, metrics_of
from noiser.metrics.correlation import half_masks_in_pairs

GAMES = Path(__file__).parent / "results" / "games.jsonl"

PROMPTS = (
    "The capital city of the country France is",
    "The opposite of the word hot is the word",
    "After Monday and Tuesday comes the day called",
    "The largest ocean on the planet Earth is the",
    "In winter, water in the lake freezes and becomes",
    "The first president of the United States was George",
    "Bees fly from flower to flower and make",
    "The Eiffel Tower stands in the city of",
    "A triangle has three sides and a square has",
    "The river Thames flows through the city of",
    "The play Romeo and Juliet was written by William",
    "Cows eat grass and give us fresh",
    "The sun rises in the east and sets in the",
    "Berlin is the capital of the country called",
    "To see the stars you need a clear night",
    "The doctor told the patient to take the",
    "She opened the door with her old",
    "One plus one is two, and two plus two is",
    "The painting Mona Lisa was painted by Leonardo da",
    "The chemical symbol for water is H two",
)
"""Short prompts, of which a model knows the end without anything else."""

DOCUMENTS = (
    (
        "The barn was painted in June.",
        "Tickets cost four dollars.",
        "The island has one school.",
        "Repairs take two days.",
    ),
    (
        "The ferry leaves at nine.",
        "A red kite landed on the roof.",
        "The soup was cold.",
        "My uncle sells boats.",
    ),
    (
        "Cats sleep a lot.",
        "The shop opens at ten.",
        "Snow fell on Friday.",
        "The bridge was closed.",
    ),
)
"""Documents that have nothing to do with any of the prompts."""

KNOWING_NOTHING = ("constant", "position", "length", "overlap", "random")
KNOWING = ("occlusion:objective=logprob", "joint")

METRICS: Mapping[str, str] = {
    "lds": "lds",
    "lds_bernoulli": "lds_bernoulli",
    "mass_matched_rank": "rank_area",
    "mass_matched": "area",
    "soft_scores": "faithfulness",
    "erasure": "comprehensiveness",
    "erasure_curves": "aopc",
    "top_k": "drop",
    "normalised_aopc": "naopc",
}
"""Metrics that ask the model, and the number of each that is looked at."""


# ---- stored games: checks, errors, null units ----------------------------------------------------


class FullGame(NamedTuple):
    """A prompt's name, the set and model that it is of, and log odds and probability under every
    input.
    """

    model: str
    kind: str
    id: str
    units: int
    odds: Float64[Tensor, " inputs"]
    kept: Tensor  # [inputs, units]


def full_games(least: int = 5) -> Iterator[FullGame]:
    """The stored games of at least so many units; bit u of an input's number is unit u."""
    for line in GAMES.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "prob" not in row or row["units"] < least:
            continue
        p = torch.tensor(row["prob"], dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
        count = row["units"]
        kept = (torch.arange(2**count)[:, None] >> torch.arange(count)) % 2 == 1
        yield FullGame(row["model"], row["set"], row["id"], count, p.logit(), kept)


def banzhaf(game: FullGame) -> Float64[Tensor, " units"]:
    """Each unit's mean effect on the log odds over all inputs of the others."""
    signs = 2 * game.kept.double() - 1
    return 2 * signs.T @ game.odds / len(game.odds)


def leave_one_out(game: FullGame) -> Float64[Tensor, " units"]:
    """What the log odds lose without each unit."""
    every = 2**game.units - 1
    return torch.stack([game.odds[every] - game.odds[every ^ (1 << u)] for u in range(game.units)])


def chance_of(
    scores: Float64[Tensor, " units"], game: FullGame, masks: int, rng: torch.Generator
) -> float:
    """The p of a check with so many inputs, by the code of `check=`."""
    halves = half_masks_in_pairs(game.units, masks, rng)
    numbers = 2 ** torch.arange(game.units)
    values = game.odds[(halves.long() * numbers).sum(1)]
    others = game.odds[(~halves).long().mul(numbers).sum(1)]
    keys = torch.rand(400, game.units, generator=rng, dtype=torch.float64)
    keys = torch.cat([torch.arange(game.units, dtype=torch.float64)[None], keys])
    found = correlation_of_halves(scores[keys.argsort(1)], halves, values - others)
    return float((found >= found[0] - 1e-9).double().mean())


def pass_rates(masks: int, seed: int = 0) -> dict[str, float]:
    """How often scores of each kind pass a check with so many inputs."""
    rng = torch.Generator().manual_seed(seed)
    passed: dict[str, list[bool]] = defaultdict(list)
    for game in full_games():
        kinds = {
            "random": torch.randn(game.units, generator=rng, dtype=torch.float64),
            "constant": torch.ones(game.units, dtype=torch.float64),
            "exact": banzhaf(game),
            "leave one out": leave_one_out(game),
        }
        for name, scores in kinds.items():
            passed[name].append(chance_of(scores, game, masks, rng) <= LEVEL)
    return {name: sum(each) / len(each) for name, each in passed.items()}


class Rates(NamedTuple):
    """Of `joint`'s errors: exact scores outside the 95 % interval, null units shown, large units
    shown.
    """

    outside: float
    null_shown: float
    shown: float


def with_null_unit(game: FullGame) -> FullGame:
    """The game with one more unit, last, that changes nothing."""
    count = game.units + 1
    kept = (torch.arange(2**count)[:, None] >> torch.arange(count)) % 2 == 1
    return game._replace(units=count, odds=game.odds.repeat(2), kept=kept)


def play(game: FullGame, method: Any, seed: int) -> Scores:
    """A method that removes units on all stored values."""
    table = {
        (0, row.numpy().tobytes()): value
        for row, value in zip(game.kept, game.odds.tolist(), strict=True)
    }
    stored = StoredGame(torch.ones(1, game.units, dtype=torch.bool), game.odds[-1:], "logit", table)
    steps = method.score_game(stored, torch.Generator().manual_seed(seed))
    try:
        steps.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a stored game asks nothing")


def error_rates(every: int = 1, draws: int = 2) -> Rates:
    """The rates over every so many of the stored games; units of a tenth of the largest are
    large.
    """
    outside: list[bool] = []
    null_shown: list[bool] = []
    shown: list[bool] = []
    for number, game in enumerate(full_games(6)):
        if number % every:
            continue
        exact = play(game, noiser.Joint(samples=2**game.units, pairs=None), 0).scores[0]
        large = exact.abs() >= exact.abs().max() / 10
        padded = with_null_unit(game)
        for seed in range(draws):
            found = play(game, noiser.Joint(pairs=None), seed)
            assert found.stderr is not None
            off = (found.scores[0] - exact).abs() > 1.96 * found.stderr[0]
            outside += off.tolist()
            signal = found.scores[0].abs() > 2 * found.stderr[0]
            shown += signal[large].tolist()
            null = play(padded, noiser.Joint(pairs=None), seed)
            assert null.stderr is not None
            null_shown.append(bool(null.scores[0, -1].abs() > 2 * null.stderr[0, -1]))
    return Rates(_share(outside), _share(null_shown), _share(shown))


def _share(each: Sequence[bool]) -> float:
    return sum(each) / max(len(each), 1)


# ---- metrics: vectors that know nothing of the model ---------------------------------------------


def numbers_of_metrics(
    lm: noiser.LanguageModel,
    methods: Sequence[str] = (*KNOWING_NOTHING, *KNOWING),
    metrics: Sequence[str] = tuple(METRICS),
    prompts: Sequence[str] = PROMPTS,
) -> dict[str, dict[str, float]]:
    """For each metric, by method, the mean over the prompts, whose units are words."""
    # Mass-matched curves take many masks; a few are enough for means over prompts.
    few, all_masks = Settings(masks=4, draws=2), Settings()
    chosen = {
        name: (metric, few if name.startswith("mass_matched") else all_masks)
        for name, metric in zip(metrics, metrics_of(metrics, {}).values(), strict=True)
    }
    # What does not depend on the method, such as predictions of masked inputs, runs once.
    items = read_examples(list(prompts))
    found: dict[str, dict[str, float]] = {name: {} for name in metrics}
    for method in methods:
        made, question = asked_of(make_method(method), "paper", unit="word")
        measurements = measure_block(lm, made, question, items, chosen, seed=0)
        for name, (metric, _) in chosen.items():
            table = pd.DataFrame([measurement.numbers[name] for measurement in measurements])
            (number,) = estimates([sample_of(table, metric.summaries[METRICS[name]])])
            found[name][method] = float(number.value)
    return found


def share_without_information(numbers: Mapping[str, float]) -> float:
    """What the best vector without information gets, of what the best method gets, beyond random
    scores.
    """
    chance = 0.0 if math.isnan(numbers["random"]) else numbers["random"]
    known = [
        value
        for name, value in numbers.items()
        if name in KNOWING_NOTHING and not math.isnan(value)
    ]
    best = max(value for name, value in numbers.items() if name in KNOWING)
    return (max(known) - chance) / (best - chance) if best > chance else math.nan


# ---- documents -----------------------------------------------------------------------------------


class Effect(NamedTuple):
    """What an answer loses without each of four unrelated documents, in nats, and how sure it
    is.
    """

    prompt: str
    probability: float
    effects: list[float]
    pairs: int


def effects_of_unrelated_documents(
    lm: noiser.LanguageModel,
    removal: str,
    prompts: Sequence[str] = PROMPTS[:8],
    *,
    pairs: bool = False,
) -> list[Effect]:
    """Nats lost without each document, and how many pairs `joint` names where that is asked."""
    found: list[Effect] = []
    for number, question in enumerate(prompts):
        documents = list(DOCUMENTS[number % len(DOCUMENTS)])
        asked: dict[str, Any] = {"sources": documents, "unit": "source"}
        prompt = "\n".join([*documents, question])
        method = noiser.Occlusion(objective="logprob", removal=removal)  # pyright: ignore
        att = noiser.attribute(lm, prompt, method=method, **{"unit": "token"} | asked)
        named = 0
        if pairs:
            joint = noiser.Joint(removal=removal, pairs=10)  # pyright: ignore
            named = len(
                noiser.attribute(lm, prompt, method=joint, **{"unit": "token"} | asked).pairs
            )
        found.append(Effect(question, att.targets[0].probability, att.scores[0].tolist(), named))
    return found


# ---- the command ---------------------------------------------------------------------------------


def print_games() -> None:
    """Pass rates of checks, and the rates of joint's errors."""
    print(
        markdown(
            [
                {"inputs": str(masks)}
                | {name: f"{rate:.2f}" for name, rate in pass_rates(masks).items()}
                for masks in (8, 16, 32)
            ]
        )
    )
    rates = error_rates()
    print(
        f"\nexact outside the 95 % interval {rates.outside:.3f}, null unit shown "
        f"{rates.null_shown:.3f}, units of a tenth shown {rates.shown:.3f}"
    )


def print_metrics(model: str) -> None:
    """A row for each metric, a column for each method."""
    lm = noiser.load_model(model, dtype="float32")
    rows: list[dict[str, Any]] = []
    for name, numbers in numbers_of_metrics(lm).items():
        row: dict[str, Any] = {"number": f"`{METRICS[name]}`"}
        for method, value in numbers.items():
            row[method.partition(":")[0]] = "–" if math.isnan(value) else f"{value:.2f}"
        row["without information"] = f"{100 * share_without_information(numbers):.0f}%"
        rows.append(row)
    print(f"{model}, {len(PROMPTS)} prompts\n\n{markdown(rows)}")


def print_documents(model: str) -> None:
    """A row for each removal and prompt."""
    lm = noiser.load_model(model, dtype="float32")
    rows: list[dict[str, Any]] = []
    for removal in ("hidden", "zero"):
        for effect in effects_of_unrelated_documents(lm, removal, PROMPTS, pairs=True):
            row = {"removal": removal, "prompt": effect.prompt, "p": f"{effect.probability:.2f}"}
            for number, nats in enumerate(effect.effects, 1):
                row[f"without {number}"] = f"{nats:.2f}"
            rows.append(row | {"pairs": str(effect.pairs)})
    print(f"{model}\n\n{markdown(rows)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=["games", "metrics", "documents"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    if arguments.part == "games":
        print_games()
    elif arguments.part == "metrics":
        print_metrics(arguments.model)
    else:
        print_documents(arguments.model)
