"""How fast Noiser is: against a straightforward implementation, its own lower bound, and the
machine's peak.

    python benchmarks/noiser_speed.py --model gemma-3-270m

Everything is measured in one run, side by side, with the same noise and the same prompts. The
reference does what the published script does: for each token, each of the `steps` + 1 probes is one
forward pass of the whole sequence, with the noise samples as its batch and logits at every
position. In float32 results must agree, or the run fails; the certified search may find another k
where a unit flips at some k and not at a larger one, which the table then says.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

import noiser
import reference
from measuring import (
    PATIENCE,
    ForwardClock,
    Part,
    Setting,
    main,
    matrix_peak,
    operations,
    prompt_of,
    run_method,
    say,
    scoring_pass,
)
from noiser.engine import Query, prepare, run_one
from noiser.methods import Scores
from noiser.model import LanguageModel
from noiser.types import Question

NOTE = (
    "Times faster: than the reference in float32. Lower bound: the token-forwards of one scoring "
    "pass. Share of peak: "
    "floating-point operations of the model's weights, by the clock, against a product of two "
    "matrices of 2048 × 2048 "
    "in the same precision ({peaks}); of the whole call, and of the time inside the model's "
    "forward passes. "
    "The shortest of up to {repeats} calls; the reference once."
)


class Slow(NamedTuple):
    """The seconds and the results of the reference."""

    seconds: float
    thresholds: list[float]
    scores: list[float]


class Timed(NamedTuple):
    """The fastest of our calls: its seconds, the clock of the model's passes, its work, and its
    results.
    """

    seconds: float
    clock: ForwardClock
    query: Query
    scores: Scores


def question(lm: LanguageModel, prompt: str, target: int | None = None) -> Query:
    """The query about the next token."""
    return run_one(lm, prepare(lm, Question(prompt=prompt, target=target, unit="token")))


def run_reference(lm: LanguageModel, query: Query, method: noiser.Noiser) -> Slow:
    """The straightforward implementation, with the same noise, and PyTorch's own matrix
    products.
    """
    noise = torch.randn(
        method.samples, lm.embedding_dim, generator=torch.Generator().manual_seed(0)
    )[:, None]
    begin = time.perf_counter()
    found = reference.noiser(
        lm.model,
        query.token_ids,
        [unit.token_indices for unit in query.units],
        query.logit_positions[0],
        query.target_ids[0],
        noise,
        scale=lm.abilities.embedding_scale,
        steps=method.steps,
    )
    return Slow(time.perf_counter() - begin, *found)


def run_ours(lm: LanguageModel, query: Query, method: noiser.Noiser, repeats: int) -> Timed:
    """Our implementation, after a call that warms up."""
    run_method(lm, query, noiser.Occlusion())
    found: list[Timed] = []
    while len(found) < repeats and sum(timed.seconds for timed in found) < PATIENCE:
        with ForwardClock(lm) as clock:
            begin = time.perf_counter()
            asked, scores = run_method(lm, query, method)
            found.append(Timed(time.perf_counter() - begin, clock, asked, scores))
    return min(found, key=lambda timed: timed.seconds)


def check(slow: Slow, scores: Scores, search: str = "bisection") -> None:
    """Fails where bisection's smallest threshold is another, or a score at the same k differs by
    more than rounding.
    """
    assert scores.k_min is not None
    same = float(scores.k_min[0]) == min(slow.thresholds)
    assert same or search == "certified", (scores.k_min, slow.thresholds)
    if same:
        torch.testing.assert_close(scores.scores[0], torch.tensor(slow.scores), atol=1e-4, rtol=0)


def row_of(
    lm: LanguageModel, dtype: str, method: noiser.Noiser, ours: Timed, slow: Slow
) -> dict[str, Any]:
    """One line of the table."""
    query, k_min = ours.query, ours.scores.k_min
    assert k_min is not None
    share = 100 * operations(lm, ours.clock.tokens, ours.clock.rows) / matrix_peak(dtype)
    return {
        "precision": dtype,
        "tokens": len(query.token_ids),
        "search": method.search,
        "ours, s": ours.seconds,
        "reference, s": slow.seconds,
        "times faster": slow.seconds / ours.seconds,
        "token-forwards": query.spent.token_forwards,
        "to lower bound": query.spent.token_forwards / scoring_pass(query, method.samples),
        "passes": ours.clock.passes,
        "k, parts of the reference's": float(k_min[0]) / min(slow.thresholds),
        "share of peak, %": share / ours.seconds,
        "while the model runs, %": share / ours.clock.seconds,
    }


def run(setting: Setting) -> Part:
    """Both searches, in float32 and bfloat16, on a short and a longer prompt."""
    rows: list[dict[str, Any]] = []
    models = {dtype: setting.load(dtype) for dtype in ("float32", "bfloat16")}
    peaks = ", ".join(f"{dtype} {matrix_peak(dtype) / 1e9:.0f} GFLOP/s" for dtype in models)
    for tokens in (6,) if setting.quick else (10, 20):
        text = prompt_of(models["float32"], tokens)
        asked = question(models["float32"], text)
        slow = run_reference(models["float32"], asked, noiser.Noiser())
        for dtype, lm in models.items():
            query = question(lm, text, asked.target_ids[0])
            for method in (noiser.Noiser(search="bisection"), noiser.Noiser(search="certified")):
                ours = run_ours(lm, query, method, setting.repeats)
                if dtype == "float32":
                    check(slow, ours.scores, method.search)
                rows.append(say(row_of(lm, dtype, method, ours, slow)))
    note = NOTE.format(peaks=peaks, repeats=setting.repeats)
    return Part("Noiser against a straightforward implementation", note, rows)


if __name__ == "__main__":
    main(run, __doc__)
