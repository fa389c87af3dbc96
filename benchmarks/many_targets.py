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
from measuring import Claim, Part, Setting, length_of, main, prompt_of, run_method, say, scoring_pass
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

SearchName = Literal["exact", "certified"]

SEARCHES: tuple[SearchName, ...] = get_args(SearchName)

NOTE = (
    "{targets} targets after a prompt of {tokens} tokens. Times one token: against the first target alone. Starting "
    "over: each target alone, added up. Scoring passes: what the method runs for each target alone with its k given."
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
        for _ in range(repeats):
            begin = time.perf_counter()
            engine, scores = run_method(lm, query, method)
            found.append(cls(engine.token_forwards, time.perf_counter() - begin, scores))
        return min(found, key=lambda cost: cost.seconds)


def alone(query: Query, g: int) -> Query:
    """The question about one of several targets: no later token, and no unit that it does not see."""
    length, whole = query.rows[g] + 1, query.encoding
    parts = {name: getattr(whole, name)[:length] for name in ("token_ids", "offsets", "frozen", "tokens")}
    units = tuple(unit for unit, seen in zip(query.units, query.visible[g].tolist(), strict=True) if seen)
    one = {name: getattr(query, name)[g : g + 1] for name in ("target_ids", "target_texts", "rows")}
    encoding = dataclasses.replace(whole, **parts)
    return dataclasses.replace(query, encoding=encoding, units=units, continuation=None, **one)


def row_of(
    lm: LanguageModel, query: Query, name: str, method: Method, *, start_over: bool, repeats: int
) -> dict[str, Any]:
    """One line of the table, after a check that the targets' scores are those of each alone."""
    together = Cost.of(lm, query, method, repeats)
    every = range(len(query.rows)) if start_over else range(1)
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
    """Fails where a target's scores depend on the other targets."""
    seen = query.visible[g]
    torch.testing.assert_close(together.scores[g, seen], single.scores[0], atol=1e-4, rtol=0)
    if together.k_min is not None and single.k_min is not None:
        assert together.k_min[g] == single.k_min[0], (g, together.k_min, single.k_min)


def against_passes(lm: LanguageModel, query: Query) -> list[dict[str, Any]]:
    """Noiser with a k_min per target, against the scoring passes of its targets."""
    searches = {search: Cost.of(lm, query, noiser.Noiser(search=search)) for search in SEARCHES}
    k_min = searches["exact"].scores.k_min
    assert k_min is not None
    passes = [Cost.of(lm, alone(query, g), noiser.Noiser(bounding=float(k))) for g, k in enumerate(k_min)]
    for g, single in enumerate(passes):
        seen = query.visible[g]
        for together in searches.values():
            assert together.scores.k_min is not None
            assert torch.equal(together.scores.k_min, k_min)
            torch.testing.assert_close(together.scores.scores[g, seen], single.scores.scores[0], atol=1e-4, rtol=0)
    needed = sum(single.token_forwards for single in passes)
    assert needed == scoring_pass(query, noiser.Noiser().samples)
    clock = sum(single.seconds for single in passes)
    return [_line(lm, query, search, together, needed, clock) for search, together in searches.items()]


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
    targets, lengths = (4, (12,)) if setting.quick else (10, (20, 40))
    queries = {tokens: build_query(lm, prompt_of(lm, tokens), max_new_tokens=targets) for tokens in lengths}
    rows: list[dict[str, Any]] = []
    for tokens, query in queries.items():
        start_over = tokens == lengths[0]
        for name, method in FIXED.items():
            rows.append(say(row_of(lm, query, name, method, start_over=start_over, repeats=setting.repeats)))
        for search in SEARCHES:
            method = noiser.Noiser(scope="continuation", search=search)
            rows.append(say(row_of(lm, query, f"noiser, {search}, one k", method, start_over=False, repeats=1)))
    rows += [say(row) for row in against_passes(lm, queries[lengths[0]])]
    note = NOTE.format(targets=targets, tokens=" or ".join(map(str, lengths)))
    return Part("Many targets", note, rows, claims(rows))


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """What is promised of ten targets."""
    found: list[Claim] = []
    for row in rows:
        text = f"{row['method']}, {row['tokens']} tokens: ten targets"
        if row["method"] in FIXED:
            found.append(Claim(f"{text}, times one", row["times one, by the clock"], at_most=1.5))
        elif "scoring passes, token-forwards" in row:
            found.append(Claim(f"{text}, times their scoring passes", row["times the scoring passes"], at_most=1.2))
        else:
            found.append(Claim(f"{text}, times one", row["times one, by the clock"], at_most=2.5))
    return found


if __name__ == "__main__":
    main(run, __doc__)
