"""Scores of sources in one pass: which rule over gates to take, and how it does beside others.

    python benchmarks/one_pass.py RESULTS.jsonl run --part development --models gemma-3-270m
    python benchmarks/one_pass.py RESULTS.jsonl rules
    python benchmarks/one_pass.py RESULTS.jsonl run --part report --rounds 8 --models gemma-3-270m
    python benchmarks/one_pass.py RESULTS.jsonl flashtrace --models smollm2-135m-instruct=FOLDER
    python benchmarks/one_pass.py RESULTS.jsonl table --encoder FOLDER

`run` draws prompts of `wordings.py` until enough of each wording and kind count: what the model
says depends on the sentences as the kind promises, tested on prompts that are written again without
them. Other prompts are stored with "counts": false. A line has the slopes of the answer's log odds
at every gate, where attention from the question and the answer is gated ("sources") and where that
of the last position of the prompt alone is ("answer", which spans without sources get). If the
tokenizer puts no start token, the first position is never gated or hidden; "first gated" has the
slopes with it. `masks` are inputs that keep half of the sentences (for odd numbers both halves),
the others hidden from question and answer; `odds` are the answer's log odds there.

`rules` compares ways to make scores of the stored slopes; nothing runs again. `table` has the
chosen rule beside others. `flashtrace` needs an environment that has that package (see `peers.py`)
and the model as a folder. LDS is the rank correlation of the kept sentences' summed scores with the
log odds, ranks within each number of kept sentences, so that a constant has none.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import noiser
from measuring import mean_difference
from measuring import table as markdown
from noiser.engine import Gates, LiveGame, Query, prepare, remover, run_one
from noiser.methods.references import word_overlap
from noiser.metrics.correlation import half_masks, lds_at_equal_size
from noiser.model import LanguageModel
from noiser.types import Question
from wordings import DEVELOPMENT, REPORT, Planted, Shots, Wording, draw, kinds_of

PARTS = {"development": DEVELOPMENT, "report": REPORT}
GATES = (0.0003, 0.003, 0.03, 0.1, 1.0)
STEEPEST = (0.0003, 0.003, 0.1)
"""The gates of the rule that was replaced: of these the one whose largest slope is largest."""

KINDS = ("twice", "few-shot", "either", "parts", "once")
"""In the order in which they are drawn."""

AT_ONCE = {"twice": 2, "few-shot": 2}
"""How many prompts of a kind a round has for each wording; 1 where it is not named."""

TRIES = {"either": 2, "parts": 2}
"""How many prompts are drawn for one that counts; 4 where the kind is not named."""

MOST = 12
"""Inputs with half of the sentences hidden, if there are as many."""

Row = dict[str, Any]
Scores = Sequence[float]


# ---- what a model says, and its slopes -----------------------------------------------------------


def counts(lm: LanguageModel, planted: Planted) -> bool:
    """Whether the model's answer depends on the sentences as the kind of prompt says."""
    for gone, right in planted.checks():
        prompt = planted.prompt(without=gone)
        found = noiser.attribute(lm, prompt, method="position", max_new_tokens=1, unit="token")
        said = found.targets[0].text.strip()
        if (bool(said) and planted.answer.startswith(said)) != right:
            return False
    return True


def measured(lm: LanguageModel, planted: Planted, *, before: bool) -> Row:
    """Slopes at all gates and log odds with sentences hidden; `before`: first position gated."""
    prompt = planted.prompt()
    asked = Question(
        prompt=prompt,
        target=" " + planted.answer,
        target_unit="all",
        unit="source",
        sources=list(planted.sentences),
        continuation_units=False,
    )
    query: Query = run_one(lm, prepare(lm, asked))
    count = len(query.units)
    rng = torch.Generator().manual_seed(zlib.crc32(planted.id.encode()))
    kept = half_masks(count, MOST, rng)
    alone = ~torch.eye(count, dtype=torch.bool)
    game = LiveGame(query, "logit", remover(query, "hidden"))
    (values,) = run_one(lm, game(torch.cat([kept, alone]))).tolist()
    answer_row = query.prompt_tokens - 1
    row: Row = {
        "target": query.target_texts[0],
        "tokens": len(query.token_ids),
        "whole": rounded(game.whole.tolist())[0],
        "masks": ["".join("01"[each] for each in row) for row in kept.tolist()],
        "odds": rounded(values[: len(kept)]),
        "alone": rounded(values[len(kept) :]),
        "slopes": {
            "sources": slopes(lm, query, GATES, query.sources_stop),
            "answer": slopes(lm, query, GATES, answer_row),
        },
    }
    if before and query.sink is not None:
        query = replace(query, special_tokens="perturbed")
        for name, first_row in (("sources", query.sources_stop), ("answer", answer_row)):
            found = slopes(lm, query, STEEPEST, first_row)
            row["slopes"][f"{name}, first gated"] = found
    return row


def slopes(
    lm: LanguageModel, query: Query, gates: tuple[float, ...], first: int
) -> list[list[float]]:
    """The slopes of the answer's log odds, [gates, sentences]."""
    positions = tuple(sorted(itertools.chain.from_iterable(query.positions)))

    async def steps() -> torch.Tensor:
        return await Gates(query, positions, first, gates, query.objective("logit"))

    found = run_one(lm, steps())
    return [
        rounded([float(row[list(inside)].sum()) for inside in query.positions])
        for row in found[:, 0]
    ]


def rounded(values: Sequence[float]) -> list[float]:
    """Five significant digits."""
    return [float(f"{value:.5g}") for value in values]


def run(chosen: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Adds a line for each prompt that is drawn."""
    done = {(row["model"], row["prompt"]): row["counts"] for row in rows if "counts" in row}
    for model in chosen.models:
        lm = noiser.load_model(model, device="cpu", dtype="float32")
        name = Path(model).stem
        for wording, kind, planted in drawn(chosen, name, done):
            row: Row = {
                "part": chosen.part,
                "model": name,
                "prompt": planted.id,
                "wording": wording.name,
                "kind": kind,
                "sentences": len(planted.sentences),
                "gold": planted.gold,
                "counts": counts(lm, planted),
            }
            if row["counts"]:
                row |= measured(lm, planted, before=chosen.part == "report")
            done[name, planted.id] = row["counts"]
            add(chosen.results, row)


def drawn(
    chosen: argparse.Namespace, model: str, done: dict[tuple[str, str], bool]
) -> Iterator[tuple[Wording | Shots, str, Planted]]:
    """Prompts that are not stored, of each wording and kind in turn, until enough count."""
    cells = [
        (wording, kind)
        for kind in KINDS
        for wording in PARTS[chosen.part]
        if kind in kinds_of(wording)
    ]
    for number in range(1, chosen.rounds + 1):
        for wording, kind in cells:
            wanted = number * AT_ONCE.get(kind, 1)
            tries = list(draw(wording, kind, wanted * TRIES.get(kind, 4)))
            for planted in tries:
                if sum(done.get((model, each.id), False) for each in tries) >= wanted:
                    break
                if (model, planted.id) not in done:
                    yield wording, kind, planted


def add(path: Path, row: Row) -> None:
    """Adds a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


# ---- rules: from slopes to scores ----------------------------------------------------------------


def shares(slopes: Sequence[Scores]) -> np.ndarray:
    """Each gate's slopes over the sum of their absolute values."""
    values = np.array(slopes)
    total = np.abs(values).sum(-1, keepdims=True)
    return values / np.where(total > 0, total, 1)


def at(row: Row, place: str, gates: Sequence[float]) -> np.ndarray:
    """The stored slopes at some gates."""
    stored = row["slopes"][place]
    known = GATES if len(stored) == len(GATES) else STEEPEST
    return np.array([stored[known.index(gate)] for gate in gates])


def steepest(row: Row, *, place: str, gates: Sequence[float] = STEEPEST) -> Scores:
    """The slopes at the gate where the largest one is largest."""
    values = at(row, place, gates)
    return values[values.max(-1).argmax()].tolist()


def largest_share(row: Row, *, place: str, gates: Sequence[float]) -> Scores:
    """The largest share of each sentence over gates."""
    return shares(at(row, place, gates)).max(0).tolist()


def mean_share(row: Row, *, place: str, gates: Sequence[float]) -> Scores:
    """The mean share of each sentence over gates."""
    return shares(at(row, place, gates)).mean(0).tolist()


SETS = (
    (0.1, 1.0),
    (0.03, 1.0),
    (0.03, 0.1),
    (0.03, 0.1, 1.0),
    (0.003, 0.03, 0.1, 1.0),
    (0.0003, 0.003, 0.1, 1.0),
)
"""Gates whose shares are combined."""

RULES: dict[str, Callable[..., Scores]] = {"steepest (before)": steepest}
for _gate in GATES:
    RULES[f"one gate, {_gate:g}"] = partial(largest_share, gates=(_gate,))
for _gates in SETS:
    _name = " ".join(f"{gate:g}" for gate in _gates)
    RULES[f"largest share, {_name}"] = partial(largest_share, gates=_gates)
    RULES[f"mean share, {_name}"] = partial(mean_share, gates=_gates)


# ---- measures ------------------------------------------------------------------------------------


def first(row: Row, scores: Scores) -> float:
    """Whether gold comes first: both sentences of a "twice" prompt, any of another.

    Of a constant, the chance of it.
    """
    if len(set(scores)) == 1:
        n, gold = row["sentences"], len(row["gold"])
        return 2 / (n * (n - 1)) if row["kind"] == "twice" else gold / n
    order = np.argsort(-np.array(scores), kind="stable").tolist()
    gold = set(row["gold"])
    return float(set(order[:2]) == gold if row["kind"] == "twice" else order[0] in gold)


def lds(row: Row, scores: Scores) -> float:
    """The rank correlation among inputs that keep as many sentences; NaN of a constant."""
    kept = torch.tensor([[each == "1" for each in mask] for mask in row["masks"]])
    sums = (kept.double() @ torch.tensor(scores, dtype=torch.float64)).round(decimals=9)
    return float(lds_at_equal_size(sums[None], torch.tensor(row["odds"]), kept.sum(1)))


def hidden_alone(row: Row) -> Scores:
    """The loss of log-probability, -log(1 + exp(-odds)), with each sentence hidden."""
    whole = -np.logaddexp(0, -row["whole"])
    return (whole + np.logaddexp(0, -np.array(row["alone"]))).tolist()


def counted(rows: Sequence[Row], part: str) -> dict[str, list[Row]]:
    """The prompts of a part that count, by model."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("counts") and row["part"] == part:
            found.setdefault(row["model"], []).append(row)
    return found


def summary(rows: Sequence[Row], way: Callable[[Row], Scores]) -> Row:
    """Shares and means over prompts."""
    told = [(row, way(row)) for row in rows]
    cell: Row = {}
    for head, kinds in (
        ("twice, both", ("twice",)),
        ("gold", ("once", "either", "parts", "few-shot")),
        *((kind, (kind,)) for kind in ("once", "either", "parts", "few-shot")),
    ):
        hits = [first(row, scores) for row, scores in told if row["kind"] in kinds]
        cell[head] = f"{sum(hits):.3g}/{len(hits)}"
    values = [lds(row, scores) for row, scores in told]
    known = [value for value in values if value == value]
    cell["LDS"] = round(statistics.mean(known), 3) if known else "–"
    return cell


def rules(rows: Sequence[Row]) -> str:
    """Every rule on the development prompts, as sources and as spans."""
    lines: list[Row] = []
    for model, some in counted(rows, "development").items():
        for place in ("sources", "answer"):
            for name, way in RULES.items():
                head = {"model": model, "gated": place, "rule": name}
                lines.append(head | summary(some, partial(way, place=place)))
    return markdown(lines)


# ---- other methods, and the table ----------------------------------------------------------------

CHOSEN = (0.1, 1.0)
"""The gates that were chosen on the development prompts, with the largest share."""


def position(row: Row) -> Scores:
    """Later sentences first."""
    return list(range(row["sentences"]))


def constant(row: Row) -> Scores:
    """The same score everywhere."""
    return [1.0] * row["sentences"]


@cache
def planted_by_id() -> dict[str, Planted]:
    """All prompts of the report."""
    return {each.id: each for each in every(REPORT)}


def overlap(row: Row) -> Scores:
    """Word overlap with question and answer, which asks no model."""
    planted = planted_by_id()[row["prompt"]]
    return word_overlap(planted.sentences, f"{planted.question} {planted.answer}").tolist()


def meaning(row: Row, *, folder: str) -> Scores:
    """The cosine of a sentence's embedding with that of question and answer."""
    from encoder import embed

    planted = planted_by_id()[row["prompt"]]
    vectors = embed(folder, [*planted.sentences, f"{planted.question} {planted.answer}"])
    return (vectors[:-1] @ vectors[-1]).tolist()


def before(row: Row, *, place: str) -> Scores:
    """The rule that was replaced: the first position is gated as well."""
    gated = f"{place}, first gated"
    return steepest(row, place=gated if gated in row["slopes"] else place)


WAYS: dict[str, Callable[[Row], Scores]] = {
    "attention_gradient, sources": partial(largest_share, place="sources", gates=CHOSEN),
    "before, sources": partial(before, place="sources"),
    "before, sources, first open": partial(steepest, place="sources"),
    "attention_gradient, spans": partial(largest_share, place="answer", gates=CHOSEN),
    "before, spans": partial(before, place="answer"),
    "each hidden": hidden_alone,
    "FlashTrace": lambda row: row["flashtrace"],
    "overlap": overlap,
    "position": position,
    "constant": constant,
}


def beside(rows: Sequence[Row], way: Callable[[Row], Scores]) -> Row:
    """The LDS of a way minus that of the chosen rule, over prompts where both have one."""
    chosen = WAYS["attention_gradient, sources"]
    values = np.array([lds(row, way(row)) - lds(row, chosen(row)) for row in rows])
    values = values[~np.isnan(values)]
    if way is chosen or not len(values):
        return {"LDS − chosen": ""}
    return {"LDS − chosen": mean_difference(values)}


def table(rows: Sequence[Row], encoder: str | None) -> str:
    """The chosen rule beside others on the prompts of the report."""
    ways = WAYS | ({"encoder": partial(meaning, folder=encoder)} if encoder else {})
    traced = {
        (row["model"], row["prompt"]): row["flashtrace"] for row in rows if "flashtrace" in row
    }
    lines: list[Row] = []
    for model, some in counted(rows, "report").items():
        with_trace: list[Row] = []
        for row in some:
            key = model, row["prompt"]
            if key in traced:
                with_trace.append(row | {"flashtrace": traced[key]})
        for name, way in ways.items():
            asked = with_trace if name == "FlashTrace" else some
            if asked:
                head = {"model": model, "way": name, "prompts": len(asked)}
                lines.append(head | summary(asked, way) | beside(asked, way))
    drawn = [row for row in rows if row.get("part") == "report"]
    shares = [
        f"{model}: {sum(row['counts'] for row in drawn if row['model'] == model)} of "
        f"{sum(row['model'] == model for row in drawn)} prompts count"
        for model in dict.fromkeys(row["model"] for row in drawn)
    ]
    return "\n".join([markdown(lines), "", *shares])


def flashtrace(chosen: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Adds FlashTrace's own scores of the prompts of the report; `--models` is NAME=FOLDER."""
    from peers import Loaded
    from peers import Question as Asked
    from peers import flashtrace as scorer

    done = {(row["model"], row["prompt"]) for row in rows if "flashtrace" in row}
    for model in chosen.models:
        name, folder = model.split("=", 1)
        score = scorer(Loaded(folder, attn_implementation="eager"))
        for row in counted(rows, "report").get(name, []):
            if (name, row["prompt"]) in done:
                continue
            planted = planted_by_id()[row["prompt"]]
            asked = Asked(
                planted.prompt(), [list(span) for span in planted.spans], row["target"], 0
            )
            found = rounded([float(each) for each in score(asked, "FlashTrace")])
            add(chosen.results, {"model": name, "prompt": row["prompt"], "flashtrace": found})


def every(wordings: Sequence[Wording | Shots]) -> Iterator[Planted]:
    """All prompts that a run can draw."""
    for wording in wordings:
        for kind in kinds_of(wording):
            yield from draw(wording, kind, 100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a JSONL file, which is added to")
    parser.add_argument("action", choices=("run", "rules", "flashtrace", "table"))
    parser.add_argument("--part", choices=[*PARTS], default="development")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma-3-270m"])
    parser.add_argument("--rounds", type=int, default=2, help="over wordings and kinds")
    parser.add_argument("--encoder", help="the encoder's folder, for the table; see encoder.py")
    chosen = parser.parse_args()
    stored = chosen.results.read_text(encoding="utf-8") if chosen.results.exists() else ""
    rows = [json.loads(line) for line in stored.splitlines()]
    if chosen.action == "run":
        run(chosen, rows)
    elif chosen.action == "flashtrace":
        flashtrace(chosen, rows)
    elif chosen.action == "rules":
        print(rules(rows))
    else:
        print(table(rows, chosen.encoder))


if __name__ == "__main__":
    main()
