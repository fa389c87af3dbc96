r"""Are rules right? Planted prompts, of which the logic is known, and inputs that no rule has seen.

    python benchmarks/rules.py RESULTS.jsonl play --models smollm2-135m-instruct --sentences 6 \
        --wordings 5 6 7 8 9
    python benchmarks/rules.py RESULTS.jsonl anchors
    python benchmarks/rules.py RESULTS.jsonl table

`play` takes prompts of which the model gives the planted answer. For each it stores the rule of
`noiser.rule`, its claims, and how often it agrees with the model on 200 further inputs (of six
sentences: on all 64, by weight). Of six sentences it also stores the pairs of `joint` and the
interactions of shapiq's KernelSHAPIQ (order 2) on the same game. "stays" has a bit for each of
these inputs, in the order of `further_inputs`, so that other methods can be added without a model.
It stops after `--seconds`, and a kind of prompt at `--most` that were played; a prompt that is in
the file is not played again.

`anchors` adds what alibi's AnchorTabular finds on the stored games of six sentences. alibi 0.9.6
wants numpy 1, so give it an environment of its own. `table` shows the measures with 95 % intervals
and of how many prompts.

"once" is "[1]", "twice" "[1], or [2]", "two" and "combined" are "[1] and [2]"; "contradiction" asks
when the answer is more probable than the other side's, "[1] unless [2]". Wordings 0 to 4 are for
development, 5 to 9 for reporting.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import noiser
from measuring import in_turn
from noiser.attribution.markdown import markdown_table
from noiser.data import Example
from noiser.data.planted import draw
from noiser.engine import StoredGame, prepare, run_one
from noiser.explain._rule import tried_rule
from noiser.explain.rule_record import Rule
from noiser.explain.rule_tables import play_rules
from noiser.explain.sameness import Sameness, still_same
from noiser.methods.rules import (
    ALL_INPUTS,
    Terms,
    draw_inputs,
    every_input,
    holds,
    weights_of,
)
from noiser.model import LanguageModel
from noiser.numbers import wilson
from noiser.types import Question
from planted_prompts import places_of

CATEGORIES = ("once", "twice", "two", "combined", "contradiction")
FURTHER = 200
PRECISION = 0.95
"""An anchor's units, kept, leave the answer as it is on this share of inputs."""
ANCHOR_INPUTS = 10_000
"""Inputs that stand for their distribution, from which alibi draws."""
TRUE_OF_MODEL = 0.9
"""The planted logic is true of a model that agrees with it on this weighted share of inputs."""

BESIDE = ("joint pairs", "KernelSHAPIQ", "anchor")
"""Other methods, on the same games."""

Row = dict[str, Any]


def planted_logic(example: Example, spans: Sequence[tuple[int, int]]) -> Terms:
    """The rule that the prompt was made with."""
    gold = sorted(spans.index(span) + 1 for span in example.spans["gold"])
    if example.category == "twice":
        return tuple((number,) for number in gold)
    if example.category == "contradiction":
        (other,) = example.spans["other_side"]
        return ((gold[0], -spans.index(other) - 1),)
    return (tuple(gold),)


# ---- play ----------------------------------------------------------------------------------------


def question_of(example: Example, spans: Sequence[tuple[int, int]]) -> Question:
    """The question when the answer stays; of a contradiction when it leads."""
    asked: Row = {"prompt": example.prompt, "target": example.target, "unit": spans}
    if example.category == "contradiction":
        start, end = example.spans["other_side"][0]
        value = example.prompt[start:end].rstrip(".").split()[-1]
        return Question(**asked, foil=f" {value}", continuation_units=False)
    return Question(**asked, target_unit="all", continuation_units=False)


def played(lm: LanguageModel, example: Example, seed: int) -> Row | None:
    """What is stored of a prompt; None where the model does not give the planted answer."""
    spans = places_of(example)
    query = run_one(lm, prepare(lm, question_of(example, spans)))
    sameness = Sameness(lm, query, "foil" if query.foil else "tokens")
    if query.foil is None and not sameness.is_models_own:
        return None
    game = sameness.game(query.before)
    begin = time.perf_counter()
    (table,) = run_one(lm, play_rules(game, [0], 40, seed, allows_empty=[True]))
    rule = run_one(lm, tried_rule(sameness, table, seed))
    seconds = time.perf_counter() - begin
    forwards = query.spent.token_forwards
    kept, weights = further_inputs(len(spans), seed)
    values = run_one(lm, game.values([torch.from_numpy(kept)]))[0]
    stays = still_same(game, 0, values).numpy()
    logic = planted_logic(example, spans)
    row: Row = {
        "logic": logic,
        "rule": replace(rule, model=None).to_dict(),
        "stays": to_hex(stays),
        "seconds": round(seconds, 2),
        "forwards": forwards,
    }
    rules = {"planted": logic, "rule": rule.best}
    rates = {"constant": max(rate(np.full(len(kept), each), stays, weights) for each in (0, 1))}
    named: dict[str, bool] = {}
    if len(spans) <= ALL_INPUTS:  # of longer prompts these need many inputs of their own
        rules["joint pairs"] = row["joint pairs"] = pairs_of(lm, game, seed)
        interactions = predicted_by_shapiq(lm, game, rule.inputs, kept, seed)
        rates["KernelSHAPIQ"] = rate(interactions, stays, weights)
        named["KernelSHAPIQ"] = bool((interactions == holds(logic, kept)).all())
    rates |= {name: rate(holds(each, kept), stays, weights) for name, each in rules.items()}
    named |= {name: each == logic for name, each in rules.items()}
    return row | {"named": named, "rates": rates}


def to_hex(stays: np.ndarray) -> str:
    """A bit for each input, from the first on, four to a digit."""
    return np.packbits(stays).tobytes().hex()


def from_hex(digits: str, inputs: int) -> np.ndarray:
    """Whether the answer stays on each input."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(digits), dtype=np.uint8))
    return bits[:inputs].astype(bool)


def further_inputs(units: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """All inputs of few units with their weights, or inputs that are drawn anew."""
    if units <= 6:
        kept = every_input(units).numpy()
        return kept, weights_of(kept)
    rng = torch.Generator().manual_seed(seed + 1_000_003)
    return draw_inputs(FURTHER, units, rng).numpy(), np.ones(FURTHER)


def rate(predicted: np.ndarray, stays: np.ndarray, weights: np.ndarray) -> float:
    """The weighted share of inputs on which a rule is right."""
    return float(weights[predicted == stays].sum() / weights.sum())


def pairs_of(lm: LanguageModel, game: StoredGame, seed: int) -> Terms:
    """The pairs of `joint` as a rule; without any, its strongest unit."""
    found = run_one(
        lm, noiser.Joint(pairs=10).score_game(game, torch.Generator().manual_seed(seed))
    )
    terms: set[tuple[int, ...]] = set()
    for pair in found.pairs:
        numbers = tuple(sorted(unit + 1 for unit in pair.units))
        terms.update([numbers] if pair.kind == "together" else [(n,) for n in numbers])
    if not terms:
        terms = {(int(found.scores[0].argmax()) + 1,)}
    return tuple(sorted(terms))


def predicted_by_shapiq(
    lm: LanguageModel, game: StoredGame, budget: int, kept: np.ndarray, seed: int
) -> np.ndarray:
    """Whether the answer stays by interactions up to order 2 (k-SII), which add up: above ½."""
    import shapiq

    units = game.mask.shape[1]

    def value(masks: np.ndarray) -> np.ndarray:
        values = run_one(lm, game.values([torch.from_numpy(np.asarray(masks, dtype=bool))]))[0]
        return still_same(game, 0, values).numpy().astype(float)

    method = shapiq.KernelSHAPIQ(n=units, max_order=2, index="k-SII", random_state=seed)
    found = method.approximate(min(budget, 2**units), value)
    total = np.full(len(kept), float(found.baseline_value))
    for members, index in found.interaction_lookup.items():
        if members:
            total += found.values[index] * kept[:, list(members)].all(1)
    return total > 0.5


def play(path: Path, options: argparse.Namespace) -> None:
    """Plays prompts of all cells in turn, until the time is over."""
    begin = time.monotonic()
    rows = rows_of(path)
    stored = {(row["model"], row["id"]) for row in rows}
    for model in options.models:
        name = Path(model).stem
        lm = noiser.load_model(model, dtype=options.dtype, device="cpu")
        cells = [
            draw(category, sentences, seed, wording)
            for seed in options.seeds
            for wording in options.wordings
            for category in options.categories
            for sentences in options.sentences
            if category != "combined" or wording == 0
        ]
        played_of = Counter(
            (row["category"], row["sentences"])
            for row in rows
            if row["model"] == name and "rule" in row
        )
        for number, example in enumerate(in_turn(cells)):
            cell = example.category, example.meta["sentences"]
            if (name, example.id) in stored or played_of[cell] >= options.most:
                continue
            if time.monotonic() - begin > options.seconds:
                return
            row = {"model": name, "id": example.id, "category": example.category}
            row |= {"sentences": example.meta["sentences"], "wording": example.meta["wording"]}
            if options.dtype != "float32":
                row["dtype"] = options.dtype
            found = played(lm, example, number)
            played_of[cell] += found is not None
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | (found or {})) + "\n")


def rows_of(path: Path) -> list[Row]:
    """The stored rows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- anchors -------------------------------------------------------------------------------------


def anchors(path: Path) -> None:
    """Adds the anchor to each row of six sentences that has a game and no anchor."""
    rows = rows_of(path)
    for row in rows:
        if "stays" not in row or "anchor" in row or row["sentences"] > ALL_INPUTS:
            continue
        kept, weights = further_inputs(row["sentences"], 0)
        stays = from_hex(row["stays"], len(kept))
        anchor, samples = anchor_of(stays)
        # An anchor is about what the model does with the whole prompt: the last input.
        predicted = holds((anchor,), kept) == stays[-1]
        row["anchor"] = anchor
        row["anchor's samples"] = samples
        row["named"]["anchor"] = [[*anchor]] == row["logic"] and bool(stays[-1])
        row["rates"]["anchor"] = rate(predicted, stays, weights)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def anchor_of(stays: np.ndarray) -> tuple[tuple[int, ...], int]:
    """The anchor of the whole prompt by alibi, on a table of all inputs, and its samples.

    The anchor's units are kept; the others come and go as in the inputs of a rule.
    """
    from alibi.explainers import AnchorTabular

    units = len(stays).bit_length() - 1
    places = 2 ** np.arange(units - 1, -1, -1)
    samples = 0

    def answer_stays(kept: np.ndarray) -> np.ndarray:
        nonlocal samples
        samples += len(kept)
        return stays[np.asarray(kept, dtype=int) @ places].astype(int)

    rng = torch.Generator().manual_seed(0)
    drawn = draw_inputs(ANCHOR_INPUTS, units, rng).numpy().astype(int)
    states = {unit: ["gone", "kept"] for unit in range(units)}
    method = AnchorTabular(answer_stays, [*map(str, range(units))], states, seed=0)
    method.fit(drawn)
    found = method.explain(np.ones(units, dtype=int), threshold=PRECISION)
    anchor = tuple(sorted(int(unit) + 1 for unit in found.raw["feature"]))
    return anchor, samples


# ---- table ---------------------------------------------------------------------------------------


def share(values: Sequence[bool]) -> str:
    """A share with its interval, and of how many."""
    if not values:
        return "–"
    low, high = wilson(sum(values), len(values))
    return f"{sum(values) / len(values):.2f} [{low:.2f}, {high:.2f}], {len(values)}"


def mean(values: Sequence[float]) -> str:
    """A mean, and of how many."""
    return f"{np.mean(values):.2f}, {len(values)}" if len(values) else "–"


def is_named(rule: Rule) -> bool:
    """Whether a rule is named today, also of rows that an older limit has decided."""
    if rule.fresh:
        return bool(rule.terms)
    return 2 * (rule.tries - rule.hits) < rule.tries - rule.base


def opponents_of(terms: Iterable[Iterable[int]]) -> set[int]:
    """The negative numbers of a rule: units that stand after "unless"."""
    return {number for term in terms for number in term if number < 0}


def measures(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Name and value of each measure."""
    is_true = [row for row in rows if row["rates"]["planted"] >= TRUE_OF_MODEL]
    rules = [Rule.from_dict(row["rule"]) for row in rows]
    yield "logic is true of the model", share([row in is_true for row in rows])
    for name in ("rule", *BESIDE):
        have = [row for row in rows if name in row["rates"]]
        where_true = [row["named"][name] for row in have if row in is_true]
        yield f"logic is named where it is true: {name}", share(where_true)
        yield f"logic is named on all: {name}", share([row["named"][name] for row in have])
    opposed = [(rule, opponents_of(row["logic"])) for row, rule in zip(rows, rules, strict=True)]
    yield (
        "the other side stands after unless",
        share([opponents <= opponents_of(rule.terms) for rule, opponents in opposed if opponents]),
    )
    for name in ("rule", "planted", *BESIDE, "constant"):
        of_rows = [row["rates"][name] for row in rows if name in row["rates"]]
        yield f"agreement on further inputs: {name}", mean(of_rows)
    tried = [rule for rule in rules if rule.fresh]
    yield "agreement on fresh inputs", mean([rule.hits / rule.tries for rule in tried])
    yield "a rule is named", share([is_named(rule) for rule in rules])
    covered: list[bool] = []
    for row, rule in zip(rows, rules, strict=True):
        if rule.fresh:
            low, high = rule.interval
            covered.append(low <= row["rates"]["rule"] <= high)
    yield "interval covers further inputs", share(covered)
    enough = [stays for rule in rules for stays in rule.enough.values()]
    yield "enough, as text", share(enough)
    trials = [(rule, trial) for rule in rules for trial in rule.trials if trial.claim == "changes"]
    yield "changes, as text", share([rule.changes is not None for rule, _ in trials])
    yield "inputs", mean([rule.inputs for rule in rules])
    yield "token-forwards", mean([row["forwards"] for row in rows])


def table(path: Path) -> None:
    """For each model and for all, and each length, a table of measures.

    It has a column for each category, one for the facts (all but contradictions) and one for all.
    """
    cells: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows_of(path):
        of_all = ["all"] if row["category"] == "contradiction" else ["facts", "all"]
        for model in (row["model"], "all models"):
            columns = cells.setdefault((model, row["sentences"]), {})
            for column in (row["category"], *of_all):
                columns.setdefault(column, []).append(row)
    for (model, sentences), columns in cells.items():
        names = sorted(columns, key=[*CATEGORIES, "facts", "all"].index)
        answered = [[row for row in columns[name] if "rule" in row] for name in names]
        lines = [["prompts asked", *(str(len(columns[name])) for name in names)]]
        for of_columns in zip(*map(measures, answered), strict=True):
            lines.append([of_columns[0][0], *(value for _, value in of_columns)])
        heading = [f"{model}, {sentences} sentences", *names]
        print(markdown_table([heading, *lines]), end="\n\n")


def main() -> None:
    """Runs a step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("step", choices=["play", "anchors", "table"])
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--categories", nargs="+", default=CATEGORIES, choices=CATEGORIES)
    parser.add_argument("--sentences", nargs="+", type=int, default=[6])
    parser.add_argument("--wordings", nargs="+", type=int, default=[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[9001])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--most", type=int, default=60, help="prompts of a model, kind and length")
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    if options.step == "play":
        play(options.results, options)
    elif options.step == "anchors":
        anchors(options.results)
    else:
        table(options.results)


if __name__ == "__main__":
    main()
