"""What ten targets cost, against one: in token-forwards and in seconds.

    python benchmarks/many_targets.py --model gemma-3-270m

The continuation is found before; what is timed is the method. Each method runs for all targets of a continuation
together, for its first token alone, and for each token alone, as a method does that starts over. Together and alone
must give the same scores, or the run fails.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Literal, NamedTuple, get_args

import torch

import noiser
from measuring import PATIENCE, Claim, Part, Setting, length_of, main, prompt_of, run_method, say, scoring_pass
from noiser.methods import Method, Scores
from noiser.model import LanguageModel, Query, build_query

FIXED: dict[str, Method] = {
    "occlusion": noiser.Occlusion(),
    "lime": noiser.Lime(),
    "kernel_shap": noiser.KernelShap(samples=100),
}
"""Perturbations that no answer decides."""

SAME_ALONE = ("occlusion", "lime")
"""Methods whose scores for a later target are those of that target alone; KernelSHAP draws for the first."""

SearchName = Literal["bisection", "certified"]

SEARCHES: tuple[SearchName, ...] = get_args(SearchName)

NOTE = (
    "float32, {targets} targets. Times one: against the first target alone. Starting over: each alone, added up. "
    "Scoring passes: what the method runs for each target alone with its k given."
)


class Cost(NamedTuple):
    """What a run takes."""

    token_forwards: int
    seconds: float
    scores: Scores

    @classmethod
    def of(cls, lm: LanguageModel, query: Query, method: Method, repeats: int = 1) -> Cost:
        """The fastest of a few runs."""
        found: list[Cost] = []
        while len(found) < repeats and sum(cost.seconds for cost in found) < PATIENCE:
            begin = time.perf_counter()
            session, scores = run_method(lm, query, method)
            found.append(cls(session.counters.token_forwards, time.perf_counter() - begin, scores))
        return min(found, key=lambda cost: cost.seconds)


def alone(query: Query, g: int) -> Query:
    """The question about one of several targets: no later token, and no unit that it does not see."""
    length, whole = query.logit_positions[g] + 1, query.encoding
    parts = {name: getattr(whole, name)[:length] for name in ("token_ids", "offsets", "frozen", "tokens")}
    units = tuple(unit for unit, seen in zip(query.units, query.causal_mask[g].tolist(), strict=True) if seen)
    one = {name: getattr(query, name)[g : g + 1] for name in ("target_ids", "target_texts", "logit_positions")}
    one["target_spans"] = ((0,),)
    encoding = dataclasses.replace(whole, **parts)
    return dataclasses.replace(query, encoding=encoding, units=units, continuation=None, **one)


def row_of(
    lm: LanguageModel, query: Query, name: str, method: Method, *, start_over: bool, repeats: int
) -> dict[str, Any]:
    """One line of the table, after a check that the targets' scores are those of each alone."""
    together = Cost.of(lm, query, method, repeats)
    every = range(len(query.logit_positions)) if start_over else range(1)
    singles = [Cost.of(lm, alone(query, g), method, repeats if g == 0 else 1) for g in every]
    for g, single in enumerate(singles):
        if g == 0 or name in SAME_ALONE:
            check(query, g, together.scores, single.scores)
    row: dict[str, Any] = {
        "method": name,
        "tokens": length_of(alone(query, 0)),
        "one, token-forwards": singles[0].token_forwards,
        "all, token-forwards": together.token_forwards,
        "times one": together.token_forwards / singles[0].token_forwards,
        "one, s": singles[0].seconds,
        "all, s": together.seconds,
        "times one, by the clock": together.seconds / singles[0].seconds,
    }
    if start_over:
        row["starting over, times one"] = sum(single.token_forwards for single in singles) / singles[0].token_forwards
        row["by the clock"] = sum(single.seconds for single in singles) / singles[0].seconds
    return row


def check(query: Query, g: int, together: Scores, single: Scores) -> None:
    """Fails where a target's scores depend on the other targets; with one k for all, they may where k is another."""
    if together.k_min is not None and single.k_min is not None and together.k_min[g] != single.k_min[0]:
        return
    seen = query.causal_mask[g]
    torch.testing.assert_close(together.scores[g, seen], single.scores[0], atol=1e-4, rtol=0)


def against_passes(lm: LanguageModel, query: Query) -> list[dict[str, Any]]:
    """Noiser with a k_min per target, against the scoring passes of its targets."""
    searches = {search: Cost.of(lm, query, noiser.Noiser(search=search)) for search in SEARCHES}
    k_min = _k_of(searches["bisection"])
    passes = [Cost.of(lm, alone(query, g), noiser.Noiser(bounding=float(k))) for g, k in enumerate(k_min)]
    for g, single in enumerate(passes):
        seen = query.causal_mask[g]
        for together in searches.values():
            if _k_of(together)[g] == k_min[g]:
                torch.testing.assert_close(together.scores.scores[g, seen], single.scores.scores[0], atol=1e-4, rtol=0)
    needed = sum(single.token_forwards for single in passes)
    assert needed == scoring_pass(query, noiser.Noiser().samples)
    clock = sum(single.seconds for single in passes)
    others = {search: int((_k_of(together) != k_min).sum()) for search, together in searches.items()}
    return [
        _line(lm, query, search, together, needed, clock) | {"targets with another k": others[search]}
        for search, together in searches.items()
    ]


def _k_of(cost: Cost) -> torch.Tensor:
    assert cost.scores.k_min is not None
    return cost.scores.k_min


def _line(
    lm: LanguageModel, query: Query, search: SearchName, together: Cost, needed: int, clock: float
) -> dict[str, Any]:
    first = Cost.of(lm, alone(query, 0), noiser.Noiser(search=search))
    return {
        "method": f"noiser, {search}, a k_min per target",
        "tokens": length_of(alone(query, 0)),
        "one, token-forwards": first.token_forwards,
        "all, token-forwards": together.token_forwards,
        "times one": together.token_forwards / first.token_forwards,
        "one, s": first.seconds,
        "all, s": together.seconds,
        "times one, by the clock": together.seconds / first.seconds,
        "scoring passes, token-forwards": needed,
        "times the scoring passes": together.token_forwards / needed,
        "times the scoring passes, by the clock": together.seconds / clock,
    }


def run(setting: Setting) -> Part:
    """Everything, in float32."""
    lm = setting.load("float32")
    targets, short, middle, long = (4, 12, 12, 16) if setting.quick else (10, 20, 40, 80)

    def query(tokens: int) -> Query:
        return build_query(lm, prompt_of(lm, tokens), max_new_tokens=targets)

    rows: list[dict[str, Any]] = []
    for tokens in (short, long):
        for name, method in FIXED.items():
            repeats = setting.repeats if tokens == short else 1
            rows.append(say(row_of(lm, query(tokens), name, method, start_over=tokens == short, repeats=repeats)))
    rows += [say(row) for row in against_passes(lm, query(short))]
    for search in SEARCHES:
        method = noiser.Noiser(scope="continuation", search=search)
        rows.append(say(row_of(lm, query(middle), f"noiser, {search}, one k", method, start_over=False, repeats=1)))
    return Part("Many targets", NOTE.format(targets=targets), rows, claims(rows, long))


def claims(rows: list[dict[str, Any]], long: int) -> list[Claim]:
    """What is promised of ten targets; of fixed perturbations, after a long prompt."""
    found: list[Claim] = []
    for row in rows:
        text = f"{row['method']}, {row['tokens']} tokens: all targets"
        if "scoring passes, token-forwards" in row:
            found.append(Claim(f"{text}, times their scoring passes", row["times the scoring passes"], at_most=1.2))
        elif row["method"] not in FIXED or row["tokens"] >= long - 5:
            most = 1.5 if row["method"] in FIXED else 2.5
            found.append(Claim(f"{text}, times the token-forwards of one", row["times one"], at_most=most))
            found.append(Claim(f"{text}, times the seconds of one", row["times one, by the clock"], at_most=most))
    return found


if __name__ == "__main__":
    main(run, __doc__)
