"""Answerability and minimum top-k% with judges whose mind is known, and against slow references."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attribution_for_tests import make
from engine_for_tests import query_of
from noiser.errors import JudgeError, UnitError
from noiser.judges import JudgeRequest, Verdict
from noiser.metrics import METRICS, Case
from noiser.metrics.answerability import JudgeStoppedError, scored_words
from noiser.types import Span, Target
from tiny import tiny

PIECES = ("LeBron", " James", " plays", " the", " sport", " of")


class Knowing:
    """Says `answers` when it sees all of `needed`, mumbles when it sees few words."""

    name = "knowing"

    def __init__(self, needed, answers=("basketball",), mumbles_below=0):
        self.needed, self.answers, self.mumbles_below = set(needed), tuple(answers), mumbles_below
        self.batches = []

    def judge(self, requests):
        self.batches.append(list(requests))
        return [self._one(request) for request in requests]

    def _one(self, request: JudgeRequest) -> Verdict:
        if len(request.words) < self.mumbles_below:
            return Verdict(status="unscored", reason="refusal", replies=("I cannot",))
        known = self.needed <= set(request.words)
        return Verdict(status="answered", answers=self.answers if known else ("football",), replies=("...",))


def att(scores=(0.5, 0.1, 0.2, -0.1, 0.3, 0.0), pieces=PIECES, target=" basketball", **changes):
    return make(pieces, (tuple(scores),), unit="word", targets=(Target(target, 7, 0.5, 1),), **changes)


@cache
def query(frozen=()):
    """A question of which only the frozen positions matter."""
    whole = query_of(tiny("llama"), "The fox")
    encoding = dataclasses.replace(whole.encoding, frozen=tuple(i in frozen for i in range(64)))
    return dataclasses.replace(whole, encoding=encoding)


def judged(name, atts, judge, golds=None, **settings):
    """What a metric measures of attributions, without its prefix."""
    golds = golds or [None] * len(atts)
    cases = [Case(query=query(), att=a, judge=judge, gold=g, **settings) for a, g in zip(atts, golds, strict=True)]
    found = METRICS.get(name).factory().measure_all(cases)
    prefixes = ("answerability_top5_", "answerability_", "minimum_")
    short = lambda column: next((column.removeprefix(p) for p in prefixes if column.startswith(p)), column)
    return [one if isinstance(one, Exception) else {short(key): v for key, v in one.items()} for one in found]


def test_the_judge_sees_the_best_half_in_the_order_of_the_prompt():
    judge = Knowing(["sport"])
    (found,) = judged("answerability", [att()], judge)
    assert judge.batches == [[JudgeRequest(("LeBron", "plays", "sport"), 1)]]
    assert (found["words"], found["status"], found["answers"]) == ("LeBron plays sport", "correct", "basketball")
    assert found["score"] == pytest.approx(1.0)  # (0.5 + 0.2 + 0.3) / 1.0
    (scaled,) = judged("answerability", [att([1e-4 * x for x in (0.5, 0.1, 0.2, -0.1, 0.3, 0.0)])], judge)
    assert scaled == pytest.approx(found)


def test_correct_wrong_and_unscored():
    flat = (1.0,) * 6
    short = att((1.0, 1.0, 1.0, 1.0), pieces=PIECES[:4])  # two words are shown: the judge mumbles
    judge = Knowing(["plays"], mumbles_below=3)
    found = judged("answerability", [att(flat), att(flat, target=" tennis"), short], judge)
    assert [one["status"] for one in found] == ["correct", "wrong", "unscored"]
    assert [one["rate"] for one in found] == [1, 0, 0]
    assert [one["score"] for one in found] == pytest.approx([0.5, 0, 0])
    assert [one["rate_scored"] for one in found] == pytest.approx([1, 0, math.nan], nan_ok=True)
    assert [one["unscored"] for one in found] == [0, 0, 1]
    assert found[2]["reason"] == "refusal"


@pytest.mark.parametrize("target", [",", ".", " -", "\n", " ("])
def test_a_target_that_is_no_word_is_unscored_and_nobody_is_asked(target):
    judge, both = Knowing(["plays"]), [att(target=target), att((1.0,) * 6)]
    for name in ("answerability", "minimum_top_k"):
        found = judged(name, both, judge)
        assert [one["status"] for one in found] == ["unscored", "correct"]
        assert len(judge.batches[-1]) == 1
    assert judged("answerability", both[:1], judge, ["basketball"])[0]["unscored"] == 0


@pytest.mark.parametrize(
    ("name", "count", "status"), [("answerability", 1, "wrong"), ("answerability_top5", 5, "correct")]
)
def test_among_five(name, count, status):
    judge = Knowing([], ("football", "tennis", "golf", "Basketball.", "chess"))
    assert judged(name, [att()], judge)[0]["status"] == status
    assert judge.batches[0][0].count == count


def test_gold_answers_take_the_place_of_targets():
    both = [att(target=" Ant")] * 2
    found = judged("answerability", both, Knowing([], ("Antarctica",)), [" Antarctica", None])
    assert [one["rate"] for one in found] == [1, 0]


def test_several_targets_are_joined_and_their_scores_averaged():
    targets = (Target(" basket", 1, 0.5, 1), Target("ball", 2, 0.5, 1))
    two = make(("A", " b", " c"), ((0.0, 1.0, 3.0), (3.0, 1.0, 0.0)), unit="word", targets=targets)
    words = scored_words(two, [False] * 9, "sum")
    assert words.scores.tolist() == [1.5, 1.0, 1.5]
    assert words.shares.tolist() == pytest.approx([0.375, 0.25, 0.375])
    assert judged("answerability", [two], Knowing([]))[0]["status"] == "correct"


def test_continuation_special_tokens_and_units_without_a_score_are_left_out():
    units = (Span("", 0, 0, (0,)), Span("LeBron", 0, 6, (1,)), Span(" ", 6, 7, (2,)), Span(" is", 7, 10, (3,)))
    units = (*units, Span(" a", 10, 12, (4,)), Span(" player", 12, 19, (5,)))
    scores = ((9.0, 1.0, 5.0, 3.0, math.nan, 7.0),)
    one = make(("LeBron", " ", " is", " a", " player"), scores, units=units, unit="word", prompt_length=12)
    words = scored_words(one, [False] * 6, "sum")
    assert words.words == ("LeBron", "is")
    assert words.shares.tolist() == [0.25, 0.75]
    assert scored_words(one, [False, True, *[False] * 4], "sum").words == ("is",)  # a template's


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=8))
def test_against_a_slow_reference(scores):
    pieces = tuple(f" w{i}" for i in range(len(scores)))
    (found,) = judged("answerability", [att(scores, pieces)], Knowing([]), normalization="abs_sum")
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen = sorted(ranked[: math.ceil(len(scores) / 2)])
    assert found["words"] == " ".join(f"w{i}" for i in chosen)
    total = sum(abs(score) for score in scores)
    expected = sum(abs(scores[i]) for i in chosen) / total if total else len(chosen) / len(scores)
    assert found["score"] == pytest.approx(expected, abs=1e-5)


def slow_minimum(scores, needed, words):
    """The definition, read out: (last success, first failure), None where there is none."""
    left = list(range(len(words)))
    success, failure = None, None
    while left:
        if set(needed) <= {words[i] for i in left}:
            success = len(left) / len(words)
        else:
            failure = len(left) / len(words)
            break
        left.remove(min(left, key=lambda i: (scores[i], -i)))
    return success, failure


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=7), st.sets(st.integers(0, 7)))
def test_minimum_top_k_against_a_slow_reference(scores, needed):
    words = [f"w{i}" for i in range(len(scores))]
    needed = {f"w{i}" for i in needed}
    one = att(scores, tuple(f" {word}" for word in words))
    success, failure = slow_minimum(scores, needed, words)
    paper, authors = (
        judged("minimum_top_k", [one], Knowing(needed), profile=profile)[0] for profile in ("paper", "authors")
    )
    assert paper["share"] == pytest.approx(math.nan if success is None else success, nan_ok=True)
    assert authors["share"] == pytest.approx(1.0 if failure is None else failure)
    assert paper["status"] == ("wrong" if success is None else "correct")
    assert paper["unanswerable"] == (success is None)


def test_prompts_are_judged_in_rounds():
    judge = Knowing(["LeBron"])
    found = judged("minimum_top_k", [att(), att((0.0, 0.1, 0.2, 0.3, 0.4, 0.5)), att(target=" golf")], judge)
    assert [len(batch) for batch in judge.batches] == [3, 2, 1, 1, 1, 1]
    assert [one["share"] for one in found] == pytest.approx([1 / 6, 1, math.nan], nan_ok=True)
    assert [(one["asked"], one["unanswerable"]) for one in found] == [(6, 0), (2, 0), (1, 1)]


@pytest.mark.parametrize("profile", ["paper", "authors"])
@pytest.mark.parametrize(("mumbles", "unanswerable"), [(4, 0), (9, math.nan)])
def test_an_unreadable_reply_ends_a_prompt_without_a_share(profile, mumbles, unanswerable):
    (found,) = judged("minimum_top_k", [att()], Knowing(["LeBron"], mumbles_below=mumbles), profile=profile)
    assert math.isnan(found["share"])
    assert (found["status"], found["unscored"]) == ("unscored", 1)
    assert found["unanswerable"] == pytest.approx(unanswerable, nan_ok=True)


def test_a_prompt_without_words_does_not_stop_the_others():
    atts = [make(unit="sentence"), att([math.nan] * 6), att()]
    first, second, third = judged("answerability", atts, Knowing(["sport"]))
    assert isinstance(first, UnitError)
    assert "'sentence'; expected tokens or words" in str(first)
    assert "No word of the prompt" in str(second)
    assert third["status"] == "correct"


def test_replies_that_are_lost_are_errors_and_a_judge_that_cannot_work_stops_everything(monkeypatch):
    judge = Knowing({})
    lost = Verdict(status="unscored", reason="budget", lost=True)
    monkeypatch.setattr(judge, "judge", lambda requests: [lost] * len(requests))
    (found,) = judged("answerability", [att()], judge)
    assert isinstance(found, JudgeError)
    assert str(found) == "The judge gave no reply: budget."
    monkeypatch.setattr(judge, "judge", lambda requests: [])
    with pytest.raises(JudgeStoppedError, match="knowing gave 0 verdicts for 1 requests; expected one for each"):
        judged("answerability", [att()], judge)
