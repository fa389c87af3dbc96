"""Answerability and minimum top-k% with judges whose mind is known, and against slow references."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attribution_for_tests import make
from noiser.errors import JudgeError, ParameterError, UnitError, UnknownNameError
from noiser.judges import Judge, JudgeRequest, Verdict
from noiser.metrics.answerability import answerability
from noiser.metrics.judged import scored_words
from noiser.metrics.minimum import minimum_top_k
from noiser.types import Span, Target

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


def test_the_judge_sees_the_best_half_in_the_order_of_the_prompt():
    judge = Knowing(["sport"])
    found = answerability([att()], judge)
    assert judge.batches == [[JudgeRequest(("LeBron", "plays", "sport"), 1)]]
    row = found.rows[0]
    assert row.words == ("LeBron", "plays", "sport")
    assert row.status == "correct"
    assert row.share == pytest.approx(1.0)  # (0.5 + 0.2 + 0.3) / 1.0
    assert found.rate == found.rate_scored == 1
    assert found.score == found.score_scored == pytest.approx(1.0)
    assert found.judge == "knowing"


def test_rate_and_score_over_all_prompts_and_over_the_scored_ones():
    flat = (1.0,) * 6
    short = att((1.0, 1.0, 1.0, 1.0), pieces=PIECES[:4])  # two words are shown: the judge mumbles
    found = answerability([att(flat), att(flat, target=" tennis"), short], Knowing(["plays"], mumbles_below=3))
    assert [row.status for row in found.rows] == ["correct", "wrong", "unscored"]
    assert found.unscored == 1
    assert found.rate == pytest.approx(1 / 3)
    assert found.rate_scored == pytest.approx(1 / 2)
    assert found.score == pytest.approx(0.5 / 3)
    assert found.score_scored == pytest.approx(0.5 / 2)
    frame = found.to_dataframe()
    assert list(frame["status"]) == ["correct", "wrong", "unscored"]
    assert frame["reason"][2] == "refusal"
    assert "1 unscored" in str(found)


def test_nothing_scored_is_not_a_number():
    found = answerability([att()], Knowing([], mumbles_below=9))
    assert found.rate == found.score == 0
    assert math.isnan(found.rate_scored)
    assert math.isnan(found.score_scored)


@pytest.mark.parametrize("target", [",", ".", " -", "\n", " ("])
def test_a_target_that_is_no_word_is_unscored_and_nobody_is_asked(target):
    judge = Knowing(["plays"])
    both = [att(target=target), att((1.0,) * 6)]
    found = answerability(both, judge)
    assert [row.status for row in found.rows] == ["unscored", "correct"]
    assert found.rows[0].verdict.reason == "the target is not a word"
    assert list(map(len, judge.batches)) == [1]
    smallest = minimum_top_k(both, judge)
    assert [row.status for row in smallest.rows] == ["unscored", "correct"]
    assert (smallest.unscored, smallest.unanswerable, smallest.found) == (1, 0, 1)
    assert answerability(both[:1], judge, ["basketball"]).unscored == 0


@pytest.mark.parametrize(("top", "status"), [(1, "wrong"), (5, "correct")])
def test_among_five(top, status):
    judge = Knowing([], ("football", "tennis", "golf", "Basketball.", "chess"))
    found = answerability([att()], judge, top=top)
    assert judge.batches[0][0].count == top
    assert found.rows[0].status == status


def test_gold_answers_take_the_place_of_targets():
    antarctica = att(target=" Ant")
    judge = Knowing([], ("Antarctica",))
    assert answerability([antarctica], judge).rate == 0
    assert answerability([antarctica, antarctica], judge, [" Antarctica", None]).rate == 0.5


def test_several_targets_are_joined_and_their_scores_averaged():
    two = make(
        ("A", " b", " c"),
        ((0.0, 1.0, 3.0), (3.0, 1.0, 0.0)),
        unit="word",
        targets=(Target(" basket", 1, 0.5, 1), Target("ball", 2, 0.5, 1)),
    )
    words = scored_words(two)
    assert words.scores.tolist() == [1.5, 1.0, 1.5]
    assert words.shares.tolist() == pytest.approx([0.375, 0.25, 0.375])
    assert answerability([two], Knowing([])).rows[0].target == " basketball"


def test_tokens_are_summed_to_words():
    tokens = make(("Le", "Bron", " plays", " sport"), ((0.1, 0.3, -0.2, 0.3),))
    words = scored_words(tokens)
    assert words.words == ("LeBron", "plays", "sport")
    assert words.scores.tolist() == pytest.approx([0.4, -0.2, 0.3])


def test_continuation_special_tokens_and_units_without_a_score_are_left_out():
    nan = float("nan")
    special = (Span("", 0, 0, (0,)), Span("LeBron", 0, 6, (1,)), Span(" ", 6, 7, (2,)), Span(" is", 7, 10, (3,)))
    units = (*special, Span(" a", 10, 12, (4,)), Span(" player", 12, 19, (5,)))
    one = make(
        ("LeBron", " ", " is", " a", " player"),
        ((9.0, 1.0, 5.0, 3.0, nan, 7.0),),
        units=units,
        unit="word",
        prompt_length=12,
    )
    words = scored_words(one)
    assert words.words == ("LeBron", "is")
    assert words.shares.tolist() == [0.25, 0.75]


@pytest.mark.parametrize(("fraction", "count"), [(0.5, 15), (0.1, 3), (0.01, 1), (1, 30), (0.51, 16)])
def test_the_share_of_words_is_rounded_up(fraction, count):
    thirty = att(range(30), pieces=tuple(f" w{i}" for i in range(30)))
    judge = Knowing([])
    answerability([thirty], judge, fraction=fraction)
    assert len(judge.batches[0][0].words) == count


@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=8), st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_against_a_slow_reference(scores, fraction):
    pieces = tuple(f" w{i}" for i in range(len(scores)))
    found = answerability([att(scores, pieces)], Knowing([]), fraction=fraction, normalization="abs_sum").rows[0]
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    chosen = sorted(ranked[: math.ceil(fraction * len(scores))])
    assert found.words == tuple(f"w{i}" for i in chosen)
    total = sum(abs(score) for score in scores)
    expected = sum(abs(scores[i]) for i in chosen) / total if total else len(chosen) / len(scores)
    assert found.score == pytest.approx(expected, abs=1e-5)


def test_a_constant_factor_changes_nothing():
    plain, scaled = (
        answerability([att([factor * x for x in (3, 1, 2, 5, 4, 6)])], Knowing([])) for factor in (1, 1e-4)
    )
    assert plain.rows[0].words == scaled.rows[0].words
    assert plain.score == pytest.approx(scaled.score)


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
    paper = minimum_top_k([one], Knowing(needed)).rows[0]
    authors = minimum_top_k([one], Knowing(needed), profile="authors").rows[0]
    assert paper.share == (None if success is None else pytest.approx(success))
    assert authors.share == pytest.approx(1.0 if failure is None else failure)
    assert paper.status == ("wrong" if success is None else "correct")


def test_prompts_are_judged_in_rounds():
    easy, hard = att(), att((0.0, 0.1, 0.2, 0.3, 0.4, 0.5))
    judge = Knowing(["LeBron"])
    found = minimum_top_k([easy, hard, att(target=" golf")], judge)
    assert [len(batch) for batch in judge.batches] == [3, 2, 1, 1, 1, 1]
    assert [row.kept for row in found.rows] == [1, 6, 0]
    assert found.share == pytest.approx((1 / 6 + 1) / 2)
    assert (found.found, found.unanswerable, found.unscored) == (2, 1, 0)
    assert list(found.to_dataframe()["asked"]) == [6, 2, 1]
    assert "1 not answerable" in str(found)


@pytest.mark.parametrize("profile", ["paper", "authors"])
def test_an_unreadable_reply_ends_a_prompt_without_a_share(profile):
    found = minimum_top_k([att()], Knowing(["LeBron"], mumbles_below=4), profile=profile)
    assert found.rows[0].share is None
    assert found.rows[0].kept == 4
    assert found.unscored == 1
    assert found.unanswerable == 0
    assert math.isnan(found.share)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"atts": []}, ParameterError, "at least one"),
        ({"golds": ["a", "b"]}, ParameterError, "2 golds; expected 1"),
        ({"fraction": 0}, ParameterError, "above 0"),
        ({"fraction": float("nan")}, ParameterError, "above 0"),
        ({"normalization": "nope"}, UnknownNameError, "normalization"),
    ],
)
def test_errors(change, error, says):
    arguments = {"atts": [att()], "judge": Knowing([])} | change
    with pytest.raises(error, match=says):
        answerability(**arguments)


def test_other_tops_and_profiles(unchecked):
    with pytest.raises(ParameterError, match="expected 1 or 5"):
        answerability([att()], Knowing([]), top=3)
    with pytest.raises(UnknownNameError, match="profile"):
        minimum_top_k([att()], Knowing([]), profile="nope")


def test_units_that_are_no_words():
    with pytest.raises(UnitError, match="sentence"):
        answerability([make(unit="sentence")], Knowing([]))
    with pytest.raises(UnitError, match="No word"):
        answerability([att([float("nan")] * 6)], Knowing([]))


def test_a_judge_that_gives_too_few_verdicts(monkeypatch):
    judge = Knowing({})
    monkeypatch.setattr(judge, "judge", lambda requests: [])
    with pytest.raises(JudgeError, match="The judge knowing gave 0 verdicts for 1 requests; expected one for each"):
        answerability([att()], judge)


def test_a_judge_is_anything_that_judges():
    assert isinstance(Knowing([]), Judge)
