"""`noiser.evaluate`: every kind of example, what is skipped, intervals, and the command."""

import dataclasses
import itertools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

import noiser
from bench_for_tests import PROMPTS
from noiser.errors import ParameterError, StoredFileError, UnknownNameError
from noiser.judges import Verdict
from noiser.metrics import METRICS, Metric, NumberInfo, estimate
from noiser.metrics.bootstrap import holm, holm_correct, mean_gap, summed_log_ratios
from noiser.metrics.metric import answers, gap_to
from tiny import chat_tokenizer, tiny
from tokenizers_for_tests import CHAT_TEMPLATE

pytestmark = pytest.mark.usefixtures("unchecked_module")

FAST = noiser.Noiser(samples=2, bounding=0.5)


def evaluated(examples=PROMPTS, metrics="soft_scores", **options):
    named = [metrics] if isinstance(metrics, str) else metrics
    read = {setting for name in named for setting in METRICS.get(name).factory().reads or ()}
    few = {
        name: value
        for name, value in {"masks": 2, "draws": 2, "rates": (0.2, 0.8)}.items()
        if name in read
    }
    return noiser.evaluate(
        tiny("llama"),
        examples,
        metrics=metrics,
        **({"unit": "token"} | {"method": FAST} | few | options),
    )


class Parrot:
    """A judge that says the first word it is shown, twice; nothing readable for a dog; or what it
    is told to say.
    """

    name = "parrot"

    def __init__(self, *answers, error=None):
        self.answers, self.error, self.asked, self.shown = answers, error, [], []

    def judge(self, requests):
        if self.error:
            raise self.error
        self.asked.append(len(requests))
        self.shown += [request.words for request in requests]
        return [
            Verdict(status="unscored", reason="barked")
            if "dog" in request.words
            else Verdict(
                status="answered", answers=self.answers or (request.words[0], "x")[: request.count]
            )
            for request in requests
        ]


def test_numbers_are_those_of_the_metrics_alone():
    lm, found = tiny("llama"), evaluated(metrics=["soft_scores", "mass_matched"])
    rows = found.rows
    for index, prompt in enumerate(PROMPTS):
        att = noiser.attribute(lm, prompt, method=FAST, seed=index, unit="token")
        alone = noiser.measure(lm, att, "soft_scores", masks=2, draws=2)
        alone |= noiser.measure(lm, att, "mass_matched", masks=2, draws=2, rates=(0.2, 0.8))
        assert {name: rows.loc[index, name] for name in alone} == pytest.approx(alone, abs=1e-5)
    columns = [
        rows[name].tolist() for name in ("soft_ns", "soft_nc", "random_soft_ns", "random_soft_nc")
    ]
    alone = estimate(summed_log_ratios, *columns, contrast=True)
    assert repr(dataclasses.replace(found["faithfulness"], p_holm=alone.p_holm)) == repr(
        alone
    )  # NaN is not NaN
    assert found["area_minus_random"].value == pytest.approx(
        (rows["area"] - rows["random_area"]).mean()
    )
    assert found["faithfulness"].n == len(PROMPTS)


def test_every_kind_of_example():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPTS[0], method="occlusion", max_new_tokens=2, unit="token")
    record = SimpleNamespace(prompt=PROMPTS[1], target=" violin", spans={"who": [(2, 9)]})
    found = evaluated([PROMPTS[0], att, record], ["soft_scores", "localisation"])
    assert found.rows["method"].tolist() == ["noiser@2", "occlusion@1", "noiser@2"]
    assert found.rows["target"].tolist()[1:] == [
        "".join(target.text for target in att.targets),
        " violin",
    ]
    assert (found["share_who"].n, 0 <= found["share_who"].value <= 1) == (1, True)
    assert found["share_who"].value + found["share_rest"].value == pytest.approx(1)
    assert [skipped.metric for skipped in found.skipped] == ["localisation@1", "localisation@1"]
    assert all(
        len(evaluated(single).records) == 1 for single in (PROMPTS[0], att, record, vars(record))
    )
    table = pd.DataFrame([vars(record), {"prompt": PROMPTS[0]}])  # NaN where there is no target
    assert evaluated(table).records == evaluated([record, PROMPTS[0]]).records
    chat = [{"role": "user", "content": "hi"}]
    assert len(evaluated(chat).records) == 1  # one chat, which this tokenizer has no template for
    assert "template" in evaluated([chat, PROMPTS[0]]).skipped[0].error
    assert evaluated({"messages": chat}).skipped[0].error == evaluated(chat).skipped[0].error
    ids = tiny("llama").tokenizer(PROMPTS[0])["input_ids"]
    assert (
        evaluated([ids]).rows["soft_nc"].tolist() == evaluated(PROMPTS[:1]).rows["soft_nc"].tolist()
    )


def test_an_example_may_name_its_sources_spans_and_a_foil():
    lm, sources = (
        tiny("llama"),
        ["The fox sings. A dog plays.", ("Weather", "It rains."), "The trains run late."],
    )
    prompt = noiser.place_sources("Who sings?", sources)
    examples = [SimpleNamespace(prompt=prompt, sources=each) for each in (sources, ["a cat"])]
    found = evaluated(examples, ["erasure", "stability"], unit="source").records
    att = noiser.attribute(lm, prompt, method=FAST, unit="source", sources=sources)
    alone = evaluated(att, "erasure").records[0]["comprehensiveness"]
    assert found[0]["units"] == len(att.units)
    assert found[0]["comprehensiveness"] == pytest.approx(alone, abs=1e-6)
    assert "Source 1, 'a cat', is not in the prompt" in found[1]["error"]
    example = SimpleNamespace(prompt=PROMPTS[0], spans={"gold": [(4, 9)], "other": [(0, 3)]})
    found = evaluated([example, PROMPTS[1]], "localisation", method="occlusion", unit="spans")
    assert found.rows["units"].dropna().tolist() == [2]
    assert "unit is 'spans' and the example names none" in found.skipped[0].error
    asked = {"target": " rain", "foil": " dog"}
    (found,) = evaluated({"prompt": PROMPTS[0], **asked}, "top_k", method="occlusion").records
    att = noiser.attribute(lm, PROMPTS[0], method="occlusion", **{"unit": "token"} | asked)
    assert found["drop"] == pytest.approx(
        noiser.measure(lm, att, "top_k", draws=2)["drop"], abs=1e-6
    )


def test_nothing_is_left_out_silently():
    found = evaluated([PROMPTS[0], "", PROMPTS[1], "x" * 2000], ["soft_scores", "stability"])
    assert [(skipped.example, skipped.metric) for skipped in found.skipped] == [
        (1, None),
        (3, None),
    ]
    assert "PromptError" in found.skipped[0].error
    assert found.rows["error"].astype(bool).tolist() == [False, True, False, True]
    assert math.isnan(found.rows.loc[1, "soft_ns"])
    assert found["soft_nc"].n == 2
    assert "2 of 4 prompts have no value" in found["soft_nc"].reason
    assert all(
        said in str(found) for said in ("2 of 4 prompts measured in full", "Skipped: prompt 1")
    )
    assert -1 <= found["spearman"].value < 1
    att = noiser.attribute(tiny("llama"), PROMPTS[0], method=FAST, unit="token")
    assert "cannot be made again" in evaluated([att], "stability").skipped[0].error


def test_only_what_was_measured_alike_is_compared():
    metrics, one_prompt = ["soft_scores", "mass_matched"], PROMPTS[:1]
    one = evaluated(one_prompt, metrics, method="occlusion")
    of_words, of_tokens = (
        evaluated(
            noiser.attribute(
                tiny("llama"), PROMPTS[0], method="occlusion", unit=unit, target_unit=target_unit
            )
        )
        for unit, target_unit in (("word", "all"), ("token", "token"))
    )
    targets = [evaluated([SimpleNamespace(prompt=PROMPTS[0], target=target)]) for target in (3, 4)]
    judged = [evaluated(one_prompt, "answerability", judge=Parrot()) for _ in range(2)]
    assert judged[0].minus(judged[1])
    judged[1].settings["judge"] = "magpie"
    other = {
        "rates": (0.7, 0.9),
        "draws": 1,
        "profile": "authors",
        "normalization": "positive",
        "masks": 1,
    }
    pairs = [
        (one, evaluated(one_prompt, metrics, method="occlusion", **{name: value}), f"{name} is")
        for name, value in (other | {"unit": "word", "max_new_tokens": 2}).items()
    ]
    pairs += [
        (of_words, of_tokens, "unit is 'word' and 'token'"),
        (*targets, "target of prompt 0 is"),
        (one, evaluated(PROMPTS[1:2], metrics), "prompts is"),
        (*judged, "judge is 'parrot' and 'magpie'"),
    ]
    for first, second, said in pairs:
        with pytest.raises(ParameterError, match=f"differ: {said}"):
            first.minus(second)
    assert (of_words.settings["unit"], of_words.settings["target_unit"]) == ("word", "all")
    assert "max_new_tokens" not in of_words.settings
    assert of_tokens.minus(evaluated(one_prompt, method="occlusion"))["soft_nc"].value == 0
    assert judged[0].minus(evaluated(one_prompt, masks=None, draws=10)) == {}


def test_evaluations_of_two_models_with_other_greedy_targets_are_compared():
    found = [
        noiser.evaluate(tiny(family), PROMPTS, "random", ["soft_scores"], unit="token")
        for family in ("llama", "gpt2")
    ]
    assert list(found[0].rows["target"]) != list(found[1].rows["target"])
    gaps = found[0].minus(found[1])
    assert {gap.n for gap in gaps.values()} == {len(PROMPTS)}


def test_a_comparison_says_whether_one_is_better_and_how_many_prompts_that_takes():
    prompts = PROMPTS[:3]
    found = noiser.evaluation.Evaluations(
        {name: evaluated(prompts, method=name) for name in ("occlusion", "random")}
    )
    assert found.answers == [
        "Is occlusion better than random? by faithfulness, no significant difference with "
        f"n = {len(prompts)}, at least 6 prompts are needed."
    ]
    for text in (found.to_text(), found.to_markdown().replace("\\", ""), found.to_html()):
        assert found.answers[0] in text


def test_a_difference_that_several_numbers_share_is_shown_once():
    prompts = PROMPTS[:2]
    metrics = ["mass_matched_rank"]
    found = noiser.evaluation.Evaluations(
        {
            name: noiser.evaluate(tiny("llama"), prompts, name, metrics)
            for name in ("occlusion", "random")
        }
    )
    gaps = found.differences.set_index("number")["value"]
    assert gaps["rank_area_minus_random"] == pytest.approx(gaps["rank_area"], rel=1e-9)
    for text in (found.to_text(), found.to_latex()):
        _, of_differences = text.split("minus each other method")
        table = of_differences.split("The same difference")[0]
        assert "area" in table
        assert "minus" not in table
    note = "The same difference as rank_area: rank_area_minus_random, rank_area_minus_position."
    for text in (found.to_text(), found.to_markdown().replace("\\", ""), found.to_html()):
        assert text.count(note) == 1


def failing_metric():
    def measure(case):
        return 1 / 0

    return Metric(measure=measure)


def test_an_error_of_a_metric_of_ones_own_names_its_line(own_metrics):
    METRICS.register("failing", failing_metric, summary="fails")
    found = noiser.evaluate(tiny("llama"), PROMPTS[:1], "random", "failing")
    line = failing_metric.__code__.co_firstlineno + 2
    expected = f"ZeroDivisionError: division by zero (test_evaluate.py, line {line})"
    assert found.skipped[0].error == expected


def sign_flip(differences):
    """The share of all sign changes whose mean is at least as far from 0."""
    flipped = [
        np.mean(signs * np.array(differences))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    return np.mean(np.abs(flipped) >= abs(np.mean(differences)) - 1e-12)


def test_differences_are_those_of_minus_corrected_together():
    prompts = [*PROMPTS, *(f"{prompt} and" for prompt in PROMPTS)][:6]
    some = {
        name: evaluated(prompts, "erasure", method=name)
        for name in ("occlusion", "random", "position")
    }
    found = noiser.evaluation.differences(some)
    assert list(found["other"].unique()) == ["random", "position"]
    gaps = {(name, number): gap for name in ("random", "position")
            for number, gap in some["occlusion"].minus(some[name]).items()}  # fmt: skip
    raw = [gaps[line.other, line.number] for line in found.itertuples()]
    assert found["value"].tolist() == [gap.value for gap in raw]
    for line in found.itertuples():
        pairs = some["occlusion"].rows[line.number] - some[line.other].rows[line.number]
        assert (line.value, line.p) == pytest.approx((pairs.mean(), sign_flip(pairs)))
    primary = (
        found["number"] == "comprehensiveness"
    ).tolist()  # one number per metric is corrected first
    first = iter(holm([gap.p for gap, is_first in zip(raw, primary, strict=True) if is_first]))
    every = holm([gap.p for gap in raw])
    assert found["p_holm"].tolist() == [
        next(first) if one else p for one, p in zip(primary, every, strict=True)
    ]
    assert (
        found["clear"] == ((found["low"] > 0) | (found["high"] < 0)) & (found["p_holm"] < 0.05)
    ).all()


def test_authors_profile_scores_special_tokens_and_draws_one_mask():
    found = evaluated(PROMPTS[:2], method="noiser", profile="authors", masks=None)
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPTS[0], method=noiser.Noiser(profile="authors"), unit="token")
    assert found.rows.loc[0, "units"] == len(att.units)
    alone = noiser.measure(lm, att, "soft_scores", profile="authors", draws=2)
    assert found.rows.loc[0, "soft_nc"] == pytest.approx(alone["soft_nc"], abs=1e-5)
    assert "profile authors" in str(found)


@pytest.mark.parametrize(
    "prompt", ["The quick</s> brown fox", [{"role": "user", "content": "The quick brown fox"}]]
)
@pytest.mark.parametrize("unit", ["token", "word"])
def test_a_judge_is_shown_neither_special_tokens_nor_template_text(prompt, unit):
    lm, judge = noiser.wrap(tiny("llama").model, chat_tokenizer(CHAT_TEMPLATE)), Parrot()
    options = {"method": "occlusion", "unit": unit, "judge": judge, "profile": "authors"}
    found = noiser.evaluate(
        lm, [prompt], metrics=["answerability", "minimum_top_k"], **{"unit": "token"} | options
    )
    assert not found.skipped
    assert len(found.rows.loc[0, "answerability_words"].split()) == 2
    assert {word for words in judge.shown for word in words} == {"The", "quick", "brown", "fox"}


def same(one, other):
    """Whether two results have the same numbers; NaN is NaN."""
    return repr(one) == repr(other)


def test_a_saved_evaluation_comes_back_with_its_numbers(tmp_path):
    chat = [{"role": "user", "content": None}]
    found = evaluated([*PROMPTS, "", chat], ["soft_scores", "lds"], method="occlusion")
    found.save(tmp_path / "e.json")
    loaded = noiser.Evaluation.load(tmp_path / "e.json")
    assert same(loaded.estimates, found.estimates)
    assert same(loaded.skipped, found.skipped)
    assert str(loaded) == str(found)
    pd.testing.assert_frame_equal(loaded.rows, found.rows)
    other = evaluated([*PROMPTS, "", chat], ["soft_scores", "lds"], method="random")
    assert same(loaded.minus(other), found.minus(other))
    assert loaded.to_dict() == found.to_dict()


def test_a_number_that_no_summary_names_comes_back(tmp_path):
    every = Metric(measure=lambda case: {"size": float(len(case.att.units)), "word": "x"})
    METRICS.register("size", lambda: every, summary="the number of units")
    try:
        found = evaluated(metrics="size")
        found.save(tmp_path / "e.json")
        loaded = noiser.Evaluation.load(tmp_path / "e.json")
        assert same(loaded.estimates, found.estimates)
    finally:
        del METRICS._own["size@1"]
    with pytest.raises(UnknownNameError, match="size@1"):
        noiser.Evaluation.load(tmp_path / "e.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "noiser.attribution"}, "format"),
        ({"schema": 2}, "schema"),
        ({"confidence": 1.5}, "confidence"),
        ({"rows": [{"index": 0}]}, r"rows\.0"),
        ({"summary": [{"number": "soft"}]}, "the number 'soft' is of none of soft_scores@1"),
    ],
)
def test_a_damaged_evaluation_is_refused(tmp_path, change, message):
    data = json.loads(json.dumps(evaluated().to_dict())) | change
    (tmp_path / "e.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(StoredFileError, match=message):
        noiser.Evaluation.load(tmp_path / "e.json")


def test_numbers_of_rows_are_numbers_and_a_csv_has_no_settings(tmp_path):
    found = evaluated()
    data = json.loads(json.dumps(found.to_dict()))
    data["rows"][0]["soft_nc"] = "a text"
    with pytest.raises(StoredFileError, match="soft_nc is 'a text'; expected a number"):
        noiser.Evaluation.from_dict(data)
    found.save(tmp_path / "rows.csv")
    with pytest.raises(StoredFileError, match="has rows alone"):
        noiser.Evaluation.load(tmp_path / "rows.csv")


def test_saved_and_shown(tmp_path):
    found = evaluated(["<script>alert(1)</script> The\rfox; =1+1", ""])
    found.save(tmp_path / "e.json")
    data = json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))
    assert (data["format"], data["skipped"][0]["example"]) == ("noiser.evaluation", 1)
    assert data["rows"][0]["soft_nc"] == found.records[0]["soft_nc"]
    assert {line["number"] for line in data["summary"]} == set(found.estimates)
    assert (data["settings"]["masks"], data["settings"]["max_new_tokens"]) == (2, 1)
    assert noiser.methods.make_method(data["method"], **data["settings"]["parameters"]) == FAST
    found.save(tmp_path / "rows.csv")
    rows = pd.read_csv(tmp_path / "rows.csv")
    assert (rows["soft_nc"][0], rows["prompt"][0]) == (
        found.records[0]["soft_nc"],
        found.records[0]["prompt"],
    )
    assert "<script>" not in found.to_html()
    assert "faithfulness" in evaluated([SimpleNamespace(prompt="")] * 2)._repr_html_()
    assert evaluated([""]).settings["parameters"] == {}


def test_the_question_is_answered_in_a_sentence():
    area = {"area": NumberInfo(0, 1, None, True, "area")}
    summaries = {
        name: each
        for one in ("random", "position")
        for name, each in gap_to(one, one, area).items()
    }

    def told(random, position, n=8):
        gaps = zip(summaries, (random, position), strict=True)
        estimates = {
            name: estimate(mean_gap, [gap + i / 99 for i in range(n)], [0] * n, contrast=True)
            for name, gap in gaps
        }
        (line,) = answers(["area"], summaries, holm_correct(estimates), 0.95)
        return line.removeprefix("By area, better than random scores: ").split(
            "; than 1 to n along the text: "
        )

    assert told(0.3, -0.3) == ["yes", "no, worse."]
    assert told(0.3, -0.03) == ["yes", "no significant difference with n = 8."]
    # 2 tests: 2 · 2 / 2⁷ < 0.05
    few = "no significant difference with n = 2, at least 7 prompts are needed"
    assert told(0.3, 0.3, n=2) == [few, f"{few}."]
    assert told(0.3, 0.3, n=6)[0] == few.replace("n = 2", "n = 6")
    assert told(0.3, 0.3, n=7) == ["yes", "yes."]


def test_an_evaluation_begins_with_its_answer_and_names_unit_and_hyper_parameters():
    found = evaluated(
        PROMPTS[:2],
        ["mass_matched_rank"],
        method=noiser.Occlusion(objective="logprob"),
        unit="word",
    )
    first, title = str(found).split("\n\n")[:2]
    assert first.startswith(
        "By rank_area, better than random scores: no significant difference with n = 2, at least 7"
    )
    assert "unit word, removal=zero, objective=logprob" in title
    assert first in found.to_html()
    examples = [SimpleNamespace(prompt=prompt, spans={"gold": [(4, 9)]}) for prompt in PROMPTS * 2]
    one, other = (
        evaluated(examples, "gold_spans", method=method) for method in ("occlusion", "random")
    )
    gap = one.minus(other)
    assert math.isnan(gap["gold_share"].p)  # of the data: neither side is better
    assert gap["auprc"].p_holm == gap["auprc"].p < 1


def test_a_judge_that_answers_nothing_with_all_words_is_none_and_one_that_breaks_is_in_the_result():
    found = evaluated(
        PROMPTS[:3], ["answerability", "minimum_top_k"], judge=Parrot("zzz"), unit="word"
    )
    assert [line.split(": ")[1] for line in found.answer] == [
        "this judge answers 0 of 3 prompts with all words; it is not a judge of this data."
    ] * 2
    right = [SimpleNamespace(prompt="The quick fox", target=" The")]
    assert not evaluated(right, "answerability", judge=Parrot(), unit="word").answer
    broken = Parrot(error=ConnectionError("no network"))
    found = evaluated(PROMPTS[:2], ["answerability", "soft_scores"], judge=broken)
    assert [skipped.error for skipped in found.skipped] == [
        "ConnectionError: no network (test_evaluate.py, line 57)"
    ] * 2
    assert found["soft_nc"].n == 2


def test_texts_of_others_cannot_reach_a_terminal_raw():
    evil = "\x1b]0;evil\x07\x9b2J"
    spotted = SimpleNamespace(prompt=PROMPTS[0], spans={f"gold{evil}": [(0, 3)]})
    found = evaluated([evil, spotted], "localisation")
    found = dataclasses.replace(
        found, method=evil, skipped=(found.skipped[0]._replace(metric=evil, error=evil),)
    )
    for text in (str(found), found.to_html(), found.to_markdown()):
        assert "U+001B" in text.replace("\\", "")
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)


def test_prompts_are_attributed_side_by_side_and_told_of_in_their_order():
    """Short prompts are done first; the long ones, and one that fails, keep their places."""
    prompts = [" ".join(PROMPTS), "x " * 300, *PROMPTS]
    seen = []
    together = evaluated(prompts, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(step / 2, 8) for step in range(1, 17)]  # parts of prompts
    lm = noiser.wrap(tiny("llama").model, tiny("llama").tokenizer)
    lm.abilities.supports_packing = False
    alone = noiser.evaluate(lm, prompts, FAST, ["soft_scores"], masks=2, draws=2, unit="token")
    assert [record["index"] for record in together.records] == list(range(len(prompts)))
    assert [(each.example, each.metric) for each in together.skipped] == [(1, None)]
    for one, other in zip(together.records, alone.records, strict=True):
        assert one == {
            name: pytest.approx(v, abs=1e-5) if isinstance(v, float) else v
            for name, v in other.items()
        }


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metrics": "faithfullness"}, "Did you mean 'faithfulness'"),
        ({"metrics": []}, "metrics is empty"),
        ({"metrics": [Metric()]}, "pass its name"),
        ({"profile": "author"}, "Did you mean 'authors'"),
        ({"unit": "words"}, "Did you mean 'word'"),
        ({"seed": -1}, "seed is -1"),
        ({"confidence": 95}, "confidence is 95"),
        ({"k": 2}, "k would change nothing; expected draws or masks or normalization for"),
        (
            {"metrics": "top_k", "judge": "local"},
            "judge would change nothing; expected draws or k or removal for",
        ),
        ({"metrics": "answerability"}, "answerability@1 needs a judge"),
        ({"examples": []}, "There is no example"),
        ({"examples": [3]}, "Example 0 is a int"),
        ({"examples": {"role": "user", "content": "The dog"}}, "expected texts, chats"),
    ],
    ids=str,
)
def test_what_every_prompt_would_fail_at_is_an_error_at_once(wrong, said):
    with pytest.raises(noiser.NoiserError, match=said):
        evaluated(**({"examples": PROMPTS[:1]} | wrong))


def test_answerability_asks_the_judge_for_all_prompts_at_once():
    lm, judge = tiny("llama"), Parrot()
    best = (
        noiser.attribute(lm, "The quick fox sings", method=FAST, unit="token")
        .aggregate("word")
        .top(2)
    )
    examples = [
        SimpleNamespace(prompt=PROMPTS[0], target=" fox"),
        SimpleNamespace(
            prompt="The quick fox sings", target=min(best, key=lambda unit: unit.index).text
        ),
        "",
        SimpleNamespace(prompt="dog", target=" dog"),
        noiser.attribute(lm, PROMPTS[1], method=FAST, unit="sentence"),
    ]
    found = evaluated(
        examples, ["answerability", "minimum_top_k"], judge=judge, normalization="positive"
    )
    assert judge.asked[0] == 3  # not the empty one, not the one that has no words
    assert [(skipped.example, skipped.metric) for skipped in found.skipped] == [
        (2, None), (4, "answerability@1"), (4, "minimum_top_k@1"),
    ]  # fmt: skip
    rows = found.rows
    assert rows.loc[3, "answerability_status"] == "unscored"
    assert found["answerability_unscored"].value == pytest.approx(1 / 3)
    assert (found["answerability_rate"].n, found["answerability_rate_scored"].n) == (3, 2)
    assert found["answerability_rate"].value == pytest.approx(
        (rows["answerability_status"] == "correct").sum() / 3
    )
    assert found.to_dict()["settings"]["judge"] == "parrot"
    assert (
        len(
            evaluated(PROMPTS[:1], "answerability_top5", judge=judge).records[0][
                "answerability_top5_answers"
            ]
        )
        > 3
    )


def count_units(case):
    return len(case.att.units)


async def count_targets(case):
    return len(case.att.targets)


@pytest.fixture
def own_metrics():
    """Metrics that a test registers are forgotten after it."""
    before = dict(METRICS._own)
    yield
    for name in METRICS._own.keys() - before.keys():
        del METRICS._own[name]


@pytest.mark.parametrize("measure", [count_units, count_targets])
def test_a_metric_may_return_a_number(measure, own_metrics):
    METRICS.register("counted", lambda: Metric(measure=measure), summary="how many")
    att = noiser.attribute(tiny("llama"), PROMPTS[0], method="random", unit="token")
    expected = len(att.units) if measure is count_units else 1
    assert noiser.measure(tiny("llama"), att, "counted") == {"counted": expected}
    found = evaluated([att], "counted")
    assert found["counted"].value == expected
    assert "counted" in str(found)


def test_a_metric_that_returns_neither_number_nor_columns_is_refused(own_metrics):
    METRICS.register("text", lambda: Metric(measure=lambda case: "much"), summary="a text")
    att = noiser.attribute(tiny("llama"), PROMPTS[0], method="random", unit="token")
    with pytest.raises(ParameterError, match="metric text returned a str; expected a number"):
        noiser.measure(tiny("llama"), att, "text")


def test_an_evaluation_as_latex():
    text = evaluated(PROMPTS[:2]).to_latex()
    assert text.startswith("% \\usepackage{booktabs}\n\\begin{table}")
    assert "\\toprule\nnumber & value & interval & p\\_holm & n \\\\\n\\midrule\n" in text
    assert "soft\\_ns" in text
    assert text.count("\\\\") == text.count(" & ") // 4
    assert not re.search(r"(?<!\\)[%#_](?! \\usepackage)", text)
