"""Why Noiser at `k_min` trails by rank: its size of noise, one size for all tokens, its score, or the draw.

    NOISER_DATA=FOLDER python benchmarks/explanations.py RESULTS.jsonl run --model gemma-3-270m --prompts 24
    python benchmarks/explanations.py RESULTS.jsonl table

A random sample of KNOWN whose answers the model gives, float32; lines that the file has are not computed again.

*Ways to disturb a token.* Noise has a size, a shape and a score. Size: `k_min`, which Noiser's search finds, or what
`noiser_relative` takes, r = 2. Shape: the same k for every token, or k in proportion to the norm of the token's
embedding; the mean k over a prompt's tokens is the same in both, so where all embeddings have one norm they are one.
Score: the drop of the probability, or the Hellinger distance. Beside the eight, occlusion with both scores, and the
norm boundings, which are fixed k. Each is measured by the area by rank and by LDS, as in docs/metrics.md.

*What small noise says.* With g_u the gradient of p(target) at token u and n̄ the mean of the noise vectors, the score of
u is -k⟨g_u, n̄⟩ to first order: a projection of the gradient on a random direction, the same for all tokens. For each k
the Pearson correlation of the scores with that, and of the scores under two draws of the noise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import noiser
from noiser.data import Example, load
from noiser.engine import expected_norm
from noiser.methods import Method
from noiser.metrics import METRICS, Case
from noiser.metrics.bootstrap import Estimate, corrected, difference, estimate, mean
from noiser.model import LanguageModel, Query, build_query

NUMBERS = {"rank_area": "mass_matched_rank", "lds": "lds"}
"""What is measured of every way, and the metric that it is a column of."""

SAMPLES = 10
TIMES = (1 / 16, 1 / 4, 1.0, 4.0)
"""Sizes of noise, in parts of `k_min`."""


def examples(lm: LanguageModel, count: int) -> Iterator[tuple[Example, Query]]:
    """The first of a random sample whose answer is the model's own next token, or begins with it."""
    sample = load("known", data_dir=os.environ.get("NOISER_DATA"), limit=1000, seed=7)
    queries = ((example, build_query(lm, example.prompt)) for example in sample)
    right = (
        (example, query)
        for example, query in queries
        if (said := query.target_texts[0].strip()) and str(example.target).strip().startswith(said)
    )
    return islice(right, count)


def ways(k: float, norms: Tensor, dim: int) -> dict[str, Method]:
    """Every way to disturb a token, by "size shape score"; `norms` are those of the units' embeddings."""
    unit = float(norms.mean()) / expected_norm("l2", dim)  # the mean k of relative noise with r = 1
    methods: dict[str, Method] = {}
    for score in ("prob", "hellinger"):
        for size, bound in (("k_min", k), ("r = 2", 2 * unit)):
            methods[f"{size}, one k, {score}"] = noiser.Noiser(bounding=bound, score=score)
            methods[f"{size}, by norm, {score}"] = noiser.Noiser(bounding="relative", r=bound / unit, score=score)
        methods[f"occlusion, {score}"] = noiser.Occlusion(score=score)
    return methods | {name: noiser.Noiser(bounding=name) for name in ("norm_l1", "norm_l2", "norm_linf")}


def token_rows(lm: LanguageModel, query: Query) -> Tensor:
    """What the embedding table holds for each token [length, dim], without the factor that some models put on it."""
    return lm.embed(query.token_ids).float().detach() / lm.embedding_scale


def gradient(lm: LanguageModel, query: Query) -> Tensor:
    """∂ p(target) / ∂ row of each unit's token [units, dim], by autograd alone."""
    rows = token_rows(lm, query).requires_grad_()
    with lm.running(gradients=True):
        logits = lm.model(inputs_embeds=(rows * lm.embedding_scale)[None]).logits[0, query.logit_positions[0]]
    logits.softmax(-1)[query.target_ids[0]].backward()
    lm.model.zero_grad()
    return rows.grad[[unit.token_indices[0] for unit in query.units]]


def small_noise(lm: LanguageModel, query: Query, prompt: str, k: float) -> dict[str, list[float]]:
    """For each size, how the scores correlate with their first order, and with those of another draw."""
    draws = torch.randn(2, SAMPLES, lm.embedding_dim, generator=torch.Generator().manual_seed(0))
    direction = gradient(lm, query) @ draws[0].mean(0)
    rows: dict[str, list[float]] = {"first_order": [], "other_draw": []}
    for times in TIMES:
        one, other = (
            noiser.attribute(lm, prompt, method=noiser.Noiser(bounding=times * k, noise=noise)).scores[0].double()
            for noise in draws
        )
        rows["first_order"].append(float(torch.corrcoef(torch.stack([one, -direction.double()]))[0, 1]))
        rows["other_draw"].append(float(torch.corrcoef(torch.stack([one, other]))[0, 1]))
    return rows


def run(chosen: argparse.Namespace) -> None:
    """Adds a line for each prompt."""
    torch.set_num_threads(1)
    lm = noiser.load_model(chosen.model, dtype="float32", device="cpu")
    lines = chosen.results.read_text(encoding="utf-8").splitlines() if chosen.results.exists() else []
    done = {row["prompt"] for row in map(json.loads, lines) if row["model"] == chosen.model}
    for seed, (example, query) in enumerate(examples(lm, chosen.prompts)):
        if example.id in done:
            continue
        searched = noiser.attribute(lm, example.prompt, seed=seed)
        k = float(searched.k_min[0])
        norms = token_rows(lm, query)[[unit.token_indices[0] for unit in query.units]].norm(dim=-1)
        row: dict[str, Any] = {"model": chosen.model, "prompt": example.id, "k_min": k}
        row |= {"norms": [float(f"{norm:.4g}") for norm in norms], "ways": {}}
        cache: dict[Any, Any] = {}  # the references, which do not depend on the scores
        for name, method in ways(k, norms, lm.embedding_dim).items():
            att = noiser.attribute(lm, example.prompt, method=method, seed=seed)
            case = Case(lm=lm, att=att, seed=seed, cache=cache)
            row["ways"][name] = {
                number: round(case.run(METRICS.get(metric).factory().measure(case))[number], 4)
                for number, metric in NUMBERS.items()
            }
        row |= {name: [round(r, 3) for r in rs] for name, rs in small_noise(lm, query, example.prompt, k).items()}
        with chosen.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def tables(rows: list[dict[str, Any]]) -> str:
    """Markdown: every way by model, what each part changes, and what small noise says."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    some = {model: [row for row in rows if row["model"] == model] for model in models}
    names = [f"{model}, n = {len(some[model])}" for model in models]

    def values(model: str, way: str, number: str) -> list[float]:
        return [row["ways"][way][number] for row in some[model]]

    def line(head: str, cells: list[str]) -> str:
        return f"| {head} | {' | '.join(cells)} |"

    heads = [f"{name}: {number}" for name in names for number in ("area by rank", "LDS")]
    lines = [line("noise", heads), "|" + "---|" * (len(heads) + 1)]
    for way in rows[0]["ways"]:
        means = [statistics.mean(values(m, way, number)) for m in models for number in NUMBERS]
        lines.append(line(way, [f"{one:.3f}" for one in means]))
    gaps: dict[tuple[str, str, str], Estimate] = {}
    parts = {"size: r = 2, not k_min": 0, "shape: by norm, not one k": 1, "score: Hellinger, not probability": 2}
    options = (("k_min", "r = 2"), ("one k", "by norm"), ("prob", "hellinger"))
    for part, place in parts.items():
        others = [[a, b] for a in options[(place + 1) % 3] for b in options[(place + 2) % 3]]
        for model in models:
            for number in NUMBERS:
                sides = [[], []]
                for choice, side in zip(options[place], sides, strict=True):
                    for a, b in others:
                        triple = {place: choice, (place + 1) % 3: a, (place + 2) % 3: b}
                        side.append(values(model, ", ".join(triple[i] for i in range(3)), number))
                before, after = ([statistics.mean(of) for of in zip(*side, strict=True)] for side in sides)
                gaps[part, model, number] = estimate(difference(mean), after, before, contrast=True)
    gaps = corrected(gaps)
    lines += ["", line("what it changes", heads), "|" + "---|" * (len(heads) + 1)]
    for part in parts:
        cells = [gaps[part, model, number] for model in models for number in NUMBERS]
        lines.append(line(part, [f"{c.value:+.3f} [{c.low:.3f}, {c.high:.3f}], p = {c.p_holm:.2g}" for c in cells]))
    lines += [
        "",
        line(
            "noise, in parts of k_min",
            [f"{name}: {what}" for name in names for what in ("first order", "another draw")],
        ),
        "|" + "---|" * (len(heads) + 1),
    ]
    for place, times in enumerate(TIMES):
        cells = [
            statistics.median(row[what][place] for row in some[model] if not math.isnan(row[what][place]))
            for model in models
            for what in ("first_order", "other_draw")
        ]
        lines.append(line(f"{times:g}", [f"{cell:.2f}" for cell in cells]))
    return "\n".join(lines)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="a JSONL file, which is added to")
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--prompts", type=int, default=24)
    chosen = parser.parse_args()
    if chosen.action == "run":
        run(chosen)
    else:
        print(tables([json.loads(line) for line in chosen.results.read_text(encoding="utf-8").splitlines()]))


if __name__ == "__main__":
    main()
