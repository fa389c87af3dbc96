"""Cells and tables of stored rows: worked by hand, with nothing dropped and nothing made up."""

import csv
import io
import math
import re
from functools import cache

import numpy as np
import pytest

from noiser.bench.plan import MethodEntry
from noiser.bench.resolve import Selection
from noiser.errors import ParameterError, PlanError
from noiser.files import csv_text
from noiser.metrics import bootstrap
from noiser.report import cells, join, latex, markdown, tables, verdict
from noiser.report.paper import method_of, model_of, published
from noiser.report.tables import glance, methods, selections
from report_for_tests import Run, full, near, plan, rows, soft


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch):
    """Intervals are tested once, with all resamples."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 200)


def run(kept=(), *, chosen=(), path="memory", **changes):
    return Run(plan(**changes), kept, chosen, path)


@cache
def everything():
    """The whole run, its cells and its tables."""
    store = full()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "_interval", near)
        found = cells(store)
    return store, found, tables(store, found)


def cell(found, method, number, **labels):
    for name, label in {"method": method, "number": number, **labels}.items():
        found = found[found[name] == label]
    (line,) = found.itertuples()
    return line


def test_faithfulness_worked_by_hand_and_failures_counted_by_type():
    store = run([
        *rows("noiser", "soft_scores", [soft(0.03, 0.6), soft(0.05, 0.8), soft(0.04, 1.0)]),
        *rows("occlusion", "soft_scores", [soft(0.02, 0.5), soft(0.03, 0.3), "NumericalError"]),
    ])  # fmt: skip
    found = cells(store)
    for method, ns, nc, n, failed in (("noiser", 0.04, 0.8, 3, 0), ("occlusion", 0.025, 0.4, 2, 1)):
        line = cell(found, method, "faithfulness")
        assert line.value == pytest.approx(math.log(ns / 0.02) + math.log(nc / 0.4))
        assert (line.n, line.failed) == (n, failed)
    made = {table.title: table.frame for table in tables(store, found)}
    (line,) = made["What failed"].to_numpy().tolist()
    assert line == ["gemma-3-270m", "known", "occlusion", "soft_scores", "NumericalError", "1"]
    assert made["soft_scores on known"]["n"].tolist() == ["3", "2, 1 failed"]


def test_intervals_are_of_the_confidence_that_is_asked_for():
    values = [0.3, 0.9, 0.4, 1.2, 0.8, 0.5, 2.1, 0.7]
    store = run(rows("noiser", "soft_scores", [soft(0.03, value) for value in values]))
    found = cell(cells(store, 0.5), "noiser", "soft_nc")
    expected = bootstrap.estimate(bootstrap.mean, values, confidence=0.5)
    assert (found.value, found.low, found.high) == (expected.value, expected.low, expected.high)


@pytest.mark.parametrize(
    ("seconds", "alone"),
    [
        ([1.0, 2.0, 4.0, 3.0, 2.0, 3.0], True),
        ([1.5, 1.5, 3.5, 3.5, 2.5, 2.5], False),
        ([1.5, 3.5] * 3, True),
    ],
)
def test_seconds_that_a_block_shares_have_no_interval(seconds, alone):
    store = run(
        rows("noiser", "attribution", [{"token_forwards": 7}] * 6, seconds=seconds), block=2
    )
    found = cell(cells(store), "noiser", "seconds")
    assert (found.value, found.n) == (2.5, 6)
    assert math.isfinite(found.low) == math.isfinite(found.high) == alone


def test_scores_that_need_no_model_cost_nothing_and_failures_have_no_seconds():
    costs = [{"token_forwards": 10, "passes": 1, "rank": 1}] * 6 + ["NumericalError"] * 6
    kept = rows("noiser", "attribution", costs, seconds=[1.0] * 6 + [0.001] * 6)
    found = cells(
        run(kept + rows("random", "attribution", [{"rank": 1}] * 6), methods="noiser random")
    )
    assert cell(found, "random", "token_forwards").value == 0
    seconds = cell(found, "noiser", "seconds")
    assert (seconds.value, seconds.n, seconds.failed) == (1.0, 6, 6)


def test_localisation_worked_by_hand():
    names = ("share_antecedent", "share_last_content_word", "share_distractor",
             "uniform_antecedent", "uniform_last_content_word", "uniform_distractor")  # fmt: skip
    shares = [(0.2, 0.3, 0.1, 0.05, 0.05, 0.4), (0.4, 0.1, 0.3, 0.05, 0.05, 0.4)]
    values = [dict(zip(names, each, strict=True)) for each in shares]
    kept = rows("noiser", "localisation", values, data="longra", category="capital-world")
    other = {
        "share_antecedent": 0.9,
        "uniform_antecedent": 0.1,
        "share_distractor": 0.0,
        "uniform_distractor": 0.5,
    }
    kept += rows("noiser", "localisation", [other], first=9, data="longra", category="family")
    found = cells(run(kept, data="longra", metrics="localisation"))
    expected = {
        "critical": (0.5, 2),
        "critical_of_units": (0.1, 2),
        "critical_minus_units": (0.4, 2),
        "main_part": (0.8, 2),
        "main_part_of_units": (0.6, 2),
        "share_antecedent": (0.5, 3),
        "antecedent_minus_units": (1.3 / 3, 3),
    }
    for number, (value, n) in expected.items():
        line = cell(found, "noiser", number)
        assert (line.value, line.n) == (pytest.approx(value), n), number


BASE = [0.1, 0.5, 0.3, 0.9, 0.6, 0.2]
CLEARLY = [
    value + 0.2 + 0.01 * i for i, value in enumerate(BASE)
]  # overlapping intervals, yet always higher
NOISY = [
    value + shift for value, shift in zip(BASE, [0.3, -0.25, 0.2, -0.2, 0.3, -0.1], strict=True)
]
MANY = [0.5, 0.6, 0.55, 0.52, 0.61, 0.58, 0.49]
LOW = [value - 0.3 - value / 9 for value in MANY]
FEW = [0.9, 0.8, 0.7, 0.6, 0.9, 0.8]


def of_metric(metric, number, values, **changes):
    kept = [
        row
        for name, each in values.items()
        for row in rows(name, metric, [{number: value} for value in each])
    ]
    methods = [{"name": "noiser", "label": name} for name in values]
    return run(kept, **{"methods": methods, "metrics": metric} | changes)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([BASE, CLEARLY], ["", "best"]),
        ([BASE, NOISY], ["level", "best"]),
        ([[0.1], [0.9]], ["", ""]),  # no interval
        ([[0.0, 0.0], [0.0, 0.0]], ["", ""]),
        ([[0.9, 0.8], MANY, LOW], ["level", "best", ""]),  # two prompts make no winner and no loser
        ([FEW, [0.1, 0.2, 0.15] * 4 + [0.3]], ["level", "best"]),  # nor do fewer than half
        ([MANY[:5], LOW[:5]], ["", ""]),
        ([MANY[:6], LOW[:6]], ["best", ""]),
        (
            [FEW, [*(value + 0.05 for value in FEW), 0.0, 0.1, 0.0, 0.05]],
            ["best", "level"],
        ),  # of what both have
    ],
)
def test_best_and_level(values, expected):
    """Areas: higher is better. Deletion areas: lower is. A share of units has no better."""
    named = {f"m{i}": xs for i, xs in enumerate(values)}
    for metric, number, sign, marks in (
        ("mass_matched", "area", 1, expected),
        ("erasure_curves", "deletion_area", -1, expected),
        ("localisation", "uniform_x", 1, [""] * len(values)),
    ):
        signed = {name: [sign * value for value in xs] for name, xs in named.items()}
        found = cells(of_metric(metric, number, signed))
        assert [cell(found, name, number).mark for name in named] == marks, metric


def test_p_is_corrected_for_all_comparisons_of_a_table():
    """Six prompts that all agree have p = 1/32, enough for one comparison and too little for
    two.
    """
    lower = {
        name: [value - gap - value / 9 for value in BASE] for name, gap in (("a", 0.3), ("b", 0.4))
    }
    for others, mark in ((("a",), ""), (("a", "b"), "level")):
        values = {"top": BASE} | {name: lower[name] for name in others}
        found = cells(of_metric("mass_matched", "area", values))
        for name in others:
            line = cell(found, name, "area")
            assert (line.mark, line.p) == (mark, pytest.approx(2 / 64 * len(others)))
            assert line.gap == pytest.approx(np.mean(BASE) - np.mean(lower[name]))


def test_profiles_are_not_compared():
    values = {"noiser": BASE, "script": CLEARLY, "other": NOISY}
    profiles = {"script": "authors"}
    methods = [
        {"name": "noiser", "label": name, "profile": profiles.get(name, "paper")} for name in values
    ]
    found = cells(of_metric("mass_matched", "area", values, methods=methods))
    assert [cell(found, name, "area").mark for name in values] == ["level", "", "best"]


HIGHER = [value + 0.5 + value / 9 for value in CLEARLY]
SOMEWHERE = {"model": "gemma-3-270m", "data": "known"}


@pytest.mark.parametrize(
    ("values", "standings"),
    [
        ({"a": BASE, "b": CLEARLY}, {"a": "behind", "b": "first"}),
        ({"a": BASE, "b": NOISY}, {"a": "level with the first", "b": "level with the first"}),
        # Six prompts cannot tell two methods from the highest: p is corrected for both comparisons.
        (
            {"a": BASE, "b": NOISY, "c": HIGHER},
            {"a": "level with the first", "b": "level with the first", "c": "level with the first"},
        ),
        ({"a": BASE[:5], "b": CLEARLY[:5]}, {"a": "not compared", "b": "not compared"}),
    ],
)
def test_a_method_is_first_only_where_nothing_is_level(values, standings):
    for metric, number, sign in (
        ("mass_matched", "area", 1),
        ("erasure_curves", "deletion_area", -1),  # lower is better
    ):
        signed = {name: [sign * value for value in xs] for name, xs in values.items()}
        found = cells(of_metric(metric, number, signed))
        given = {name: verdict(found, name, number, **SOMEWHERE).standing for name in values}
        assert given == standings


def test_a_verdict_names_the_highest_with_the_difference():
    found = cells(of_metric("mass_matched", "area", {"a": BASE, "b": CLEARLY}))
    behind = verdict(found, "a", "area", **SOMEWHERE)
    assert (behind.highest, behind.level, behind.n) == ("b", (), 6)
    assert behind.gap == pytest.approx(np.mean(CLEARLY) - np.mean(BASE))
    assert str(behind) == "behind b, which differs by 0.225 (p = 0.031)"
    assert str(verdict(found, "b", "area", **SOMEWHERE)) == "first with 0.658 (n = 6)"
    level = cells(of_metric("mass_matched", "area", {"a": BASE, "b": NOISY}))
    assert str(verdict(level, "b", "area", **SOMEWHERE)) == (
        "level with the first: the highest value, a not significantly lower"
    )
    few = cells(of_metric("mass_matched", "area", {"a": BASE[:3]}))
    assert str(verdict(few, "a", "area", **SOMEWHERE)) == "not compared (n = 3)"


def test_a_control_that_is_level_leaves_no_method_first():
    found = cells(of_metric("mass_matched", "area", {"a": CLEARLY, "position": BASE}, methods=[
        {"name": "noiser", "label": "a"}, {"name": "position"},
    ]))  # fmt: skip
    assert verdict(found, "a", "area", **SOMEWHERE).standing == "first"
    found = cells(of_metric("mass_matched", "area", {"a": BASE, "position": NOISY}, methods=[
        {"name": "noiser", "label": "a"}, {"name": "position"},
    ]))  # fmt: skip
    assert verdict(found, "a", "area", **SOMEWHERE).standing == "level with the first"


def test_profiles_have_verdicts_of_their_own():
    values = {"noiser": BASE, "script": CLEARLY, "other": BASE[:4] + NOISY[4:]}
    methods = [
        {"name": "noiser", "label": name, "profile": "authors" if name == "script" else "paper"}
        for name in values
    ]
    found = cells(of_metric("mass_matched", "area", values, methods=methods))
    assert verdict(found, "script", "area", **SOMEWHERE).standing == "not compared"
    assert verdict(found, "noiser", "area", **SOMEWHERE).highest == "other"


def test_a_verdict_needs_labels_of_one_cell():
    found = cells(of_metric("mass_matched", "area", {"a": BASE}))
    with pytest.raises(ParameterError, match="0 cells have the labels"):
        verdict(found, "b", "area", **SOMEWHERE)
    with pytest.raises(ParameterError, match="Metrics that have this number: none"):
        verdict(found, "a", "lds", **SOMEWHERE)


def test_standings_of_all_models_stand_in_one_cell():
    eight, clearly, noisy = [*BASE, 0.4, 0.7], [*CLEARLY, 0.7, 0.95], [*NOISY, 0.3, 0.75]
    kept = [
        row
        for model, values in (("m1", {"a": eight, "b": clearly}), ("m2", {"a": eight, "b": noisy}))
        for name, each in values.items()
        for row in rows(name, "mass_matched", [{"area": value} for value in each], model=model)
    ]
    methods = [{"name": "noiser", "label": name} for name in "abc"]
    metrics = [{"name": "mass_matched"}]
    store = run(kept, models="m1 m2", methods=methods, metrics=metrics)
    table = {one.title: one for one in tables(store, cells(store))}["Standings"]
    lines = table.frame.set_index("method")
    assert lines["area"].to_dict() == {"a": "behind · level", "b": "first · level"}
    assert "in this order: m1, m2." in table.notes[0]


def joined_runs(**second):
    """Two benchmarks of the same prompts: methods a and b, and method c with a metric less."""
    metrics = [{"name": "mass_matched"}, {"name": "mass_matched_rank"}]
    first = of_metric("mass_matched", "area", {"a": BASE, "b": CLEARLY}, metrics=metrics)
    other = of_metric("mass_matched", "area", {"c": HIGHER}, **{"path": "other"} | second)
    return first, other


def test_folders_of_the_same_prompts_are_compared_in_one_report():
    store = join(joined_runs())
    found = cells(store)
    assert verdict(found, "a", "area", **SOMEWHERE).highest == "c"
    assert cell(found, "a", "area").p == pytest.approx(2 * 2 / 64)  # two comparisons, not one
    # The second folder's plan has no such metric, so its method has no cell of it.
    assert set(found.loc[found["metric"] == "mass_matched_rank", "method"]) <= {"a", "b"}
    assert join(joined_runs()[:1]).plan.labels("methods") == ["a", "b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "has seed 1 and memory has 0"),
        ({"methods": [{"name": "noiser", "label": "a"}]}, "has the method 'a', and so has another"),
        (
            {"metrics": [{"name": "mass_matched", "masks": 3}]},
            "means .* in other and .* in another",
        ),
    ],
)
def test_folders_that_do_not_fit_are_not_joined(changes, message):
    with pytest.raises(PlanError, match=message):
        join(joined_runs(**changes))


def test_planned_cells_without_rows_are_there():
    for kept in (rows("noiser", "soft_scores", [soft(0.03, 0.1 * i + 0.1) for i in range(4)]), []):
        store = run(kept)
        found = cells(store)
        line = cell(found, "occlusion", "faithfulness")
        assert (math.isnan(line.value), line.n) == (True, 0)
        made = tables(store, found)
        assert re.search(r"\| gemma-3-270m \| occlusion \| 0 \|( – \|){3}", markdown(made))
        assert re.search(r"gemma-3-270m & occlusion & 0 & -- &", latex(made))
        lines = csv.DictReader(io.StringIO(csv_text(found)))
        assert {(one["value"], one["n"]) for one in lines if one["method"] == "occlusion"} == {
            ("", "0")
        }


def test_only_what_the_plan_asks_for_is_there():
    """The second model runs on LongRA alone; occlusion has one metric; rows of a larger plan are
    left out.
    """
    methods = [
        {"name": "noiser", "data": ["known"], "models": ["gemma-3-270m"], "limit": 2},
        {"name": "occlusion", "metrics": ["stability"]},
    ]
    metrics = [{"name": "soft_scores"}, {"name": "stability", "data": ["longra"]}]
    kept, models = (
        rows("noiser", "soft_scores", [soft(0.03, 0.5)] * 6),
        "gemma-3-270m smollm2-135m-instruct",
    )
    found = cells(run(kept, models=models, data="known longra", methods=methods, metrics=metrics))
    measured = found[found["metric"] != "attribution"]
    kinds = {(one.model[:5], one.data, one.method, one.metric) for one in measured.itertuples()}
    assert kinds == {
        ("gemma", "known", "noiser", "soft_scores"),
        ("gemma", "longra", "occlusion", "stability"),
        ("smoll", "longra", "occlusion", "stability"),
    }
    assert cell(found, "noiser", "soft_nc").n == 2


def test_numbers_that_rows_lack_have_no_cell_and_undefined_ones_say_why():
    areas = {"area": 1.1, "random_area": 1.0}
    for last, there in (({}, False), ({"position_area": 1.05}, True)):
        found = cells(
            run(
                rows("noiser", "mass_matched", [areas] * 3 + [areas | last]), metrics="mass_matched"
            )
        )
        assert ("area_minus_position" in set(found["number"])) is there
    line = cell(
        cells(run(rows("noiser", "soft_scores", [soft(0.0, 0.5)] * 3))), "noiser", "faithfulness"
    )
    assert (math.isnan(line.value), line.n) == (True, 3)
    assert "takes the logarithm of a mean that is zero" in line.reason


def test_failed_attribution_counts_for_every_metric_that_the_plan_has_for_it():
    kept = [
        row
        for first in (0, 3)
        for row in rows("noiser", "attribution", ["PromptError"], first=first)
    ]
    kept += rows("noiser", "soft_scores", [soft(0.03, 0.5)] * 2, first=1)
    metrics = [{"name": "soft_scores", "limit": 3}, {"name": "stability", "methods": ["occlusion"]}]
    found = cells(run(kept, metrics=metrics))
    assert cell(found, "noiser", "soft_nc").failed == 1
    assert "noiser" not in set(found.loc[found["metric"] == "stability", "method"])


def test_there_is_one_table_per_data_set_and_metric():
    store, found, made = everything()
    titles = [table.title for table in made]
    assert titles[:4] == ["At a glance", "Standings", "Methods", "Correct predictions"]
    assert titles[-2:] == ["What failed", "Numbers"]
    assert len(titles) == len(set(titles)) == 6 + len(found.groupby(["data", "metric"]))
    table = made[titles.index("stability on known")]
    assert list(table.frame)[:4] == ["model", "method", "n", "spearman"]
    assert len(table.frame) == len([method for method in store.plan.methods if not method.metrics])
    assert made[-1].frame.set_index("number").loc["soft_ns", "meaning"]


def test_n_stands_beside_a_number_where_it_differs():
    values = [soft(0.03, 0.5 + i / 10 if i else None) for i in range(8)]
    store = run(rows("noiser", "soft_scores", values), methods="noiser")
    (line,) = next(
        t for t in tables(store, cells(store)) if t.title == "soft_scores on known"
    ).frame.to_dict("records")
    assert (line["n"], line["soft_ns"]) == ("8", "0.030 [0.030, 0.030]")
    assert re.fullmatch(r"0\.900 \[0\.\d{3}, 1\.\d{3}\] \(n = 7\)", line["soft_nc"])


def test_glance_names_the_best_and_those_that_are_level_but_never_a_control():
    named = {"a": BASE, "b": NOISY, "c": [value - 0.9 - value / 9 for value in BASE]}
    controlled = {"methods": "noiser position"}
    for values, changes, said in (
        (named, {}, f"b {np.mean(NOISY):.3f} (n = 6); level: a"),
        (
            {"noiser": BASE, "position": CLEARLY},
            controlled,
            "no method is significantly better (n = 6)",
        ),
        ({"noiser": BASE[:2], "position": BASE[:2]}, controlled, "– (n = 2)"),
    ):
        store = of_metric("mass_matched", "area", values, **changes)
        found = cells(store, confidence=0.9)
        (line,) = glance(store.plan, found).to_dict("records")
        assert line == {"model": "gemma-3-270m", "data": "known", "area": said}
        assert "best" not in set(found.loc[found["method"] == "position", "mark"])


def test_methods_are_named_with_what_the_plan_sets():
    named = plan(
        methods=[
            {"name": "occlusion", "label": "o", "unit": "word", "args": {"objective": "logprob"}}
        ]
    )
    assert methods(named).to_numpy().tolist() == [
        ["o", "occlusion", "word", "paper", "objective = logprob"]
    ]


def test_methods_models_and_numbers_of_the_paper():
    for method, expected in (
        ({"name": "inseq:occlusion"}, "occlusion"),
        ({"name": "inseq:occlusion", "args": {"reduce": "sum"}}, None),
        ({"name": "occlusion"}, None),  # the paper's is Inseq's, which takes absolute values
        ({"name": "noiser@1", "args": {"bounding": "k_min", "search": "certified"}}, "noiser"),
        ({"name": "noiser", "args": {"bounding": "k_max"}}, "k_max"),
        ({"name": "noiser", "args": {"bounding": "k_max", "objective": "hellinger"}}, None),
        ({"name": "noiser", "unit": "word"}, None),
    ):
        entry = MethodEntry.model_validate({"unit": "token"} | method)
        assert method_of(entry) == expected, method
    assert [model_of(name) for name in ("Qwen/Qwen2-0.5B", "/models/Meta-Llama-3-8B/")] == [
        "Qwen2-0.5B",
        "Llama3-8B",
    ]
    assert [model_of(name) for name in ("Qwen/Qwen2-0.5B-Instruct", "gemma-3-270m")] == [None, None]
    assert published("faithfulness", ["known", "random"], None) is None
    assert published("correct_predictions", ["longra"], "Llama3-8B") == 165
    six = [0.6785, 0.2248, -0.0264, 0.1805, -0.0233, 0.8043]  # the paper prints no mean here
    assert published("soft_ns_nc", ["known", "noiser"], None, "soft_ns") == pytest.approx(
        sum(six) / 6
    )


def test_the_paper_stands_beside_the_same_model_and_its_mean_beside_others():
    methods = [
        {"name": "noiser"},
        {"name": "noiser", "label": "wide", "args": {"bounding": "norm_l2"}},
    ]
    metrics = [
        {"name": "soft_scores"},
        {"name": "soft_scores", "label": "positive", "normalization": "positive"},
        {"name": "answerability", "judge": "local"},
    ]
    named = {"models": "Qwen/Qwen2-0.5B gemma-3-270m", "data": "known@1 wikitext wikibio"}
    store = run(**named, methods=[*methods, {"name": "occlusion"}], metrics=metrics)
    found = cells(store)
    for model, data, method, number, metric, value in (
        ("Qwen2-0.5B", "known@1", "noiser", "faithfulness", "soft_scores", 2.1854),
        ("gemma-3-270m", "known@1", "noiser", "faithfulness", "soft_scores", 1.8103),
        ("gemma-3-270m", "known@1", "noiser", "faithfulness", "positive", math.nan),
        ("gemma-3-270m", "known@1", "wide", "faithfulness", "soft_scores", 1.7185),
        ("gemma-3-270m", "known@1", "occlusion", "faithfulness", "soft_scores", math.nan),
        ("gemma-3-270m", "known@1", "noiser", "answerability_rate", "answerability", 0.45),
        (
            "gemma-3-270m",
            "wikitext",
            "noiser",
            "faithfulness",
            "soft_scores",
            5.5833,
        ),  # the paper calls it WikiBio
        ("gemma-3-270m", "wikitext", "wide", "faithfulness", "soft_scores", math.nan),
        ("gemma-3-270m", "wikibio", "noiser", "faithfulness", "soft_scores", math.nan),
    ):
        line = cell(found, method, number, model=model, data=data, metric=metric)
        assert line.paper == pytest.approx(value, nan_ok=True), (
            model,
            data,
            method,
            number,
            metric,
        )
    made = {table.title: table for table in tables(store, found)}
    assert made["soft_scores on known@1"].frame.loc[0, "faithfulness, paper"] == "2.185"
    assert "faithfulness, paper" not in made["positive on known@1"].frame
    assert "Judge: local." in made["answerability on known@1"].notes


def test_selections_beside_the_papers():
    part = {"name": "longra", "label": "capitals", "category": "capital-world"}
    data = [{"name": "known", "limit": 1}, part, {"name": "wikibio"}]
    same = {"model": "Qwen2-0.5B", "total": 1208, "chosen": ("a", "b"), "failed": {}, "notes": ()}
    chosen = [
        Selection(data="known", checked=10, right=4, **same),
        Selection(data="capitals", checked=10, right=0, **same),
        Selection(data="wikibio", checked=None, right=None, **same),
    ]
    frame = selections(run(chosen=chosen, models="Qwen/Qwen2-0.5B", data=data))
    assert frame.iloc[:, 1:].to_numpy().tolist() == [
        [
            "known",
            "1,208",
            "10",
            "4",
            "1",
            "661",
            "1,208",
        ],  # of a larger plan before, fewer are attributed
        ["capitals", "1,208", "10", "0", "2", "–", "–"],  # the paper counts the whole data set
        ["wikibio", "1,208", "–", "–", "2", "–", "–"],
    ]


def test_markdown_and_latex_tables_are_whole():
    _, found, made = everything()
    for line in (text := markdown(made)).splitlines():
        assert not line.startswith("|") or line.endswith("|")
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    for block in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block}) == 1
    assert text.count("**") == 2 * sum(int(table.bold.to_numpy().sum()) for table in made)
    assert (
        text.index("## At a glance")
        < text.index("## How to read the tables")
        < text.index("## Correct predictions")
    )
    source = latex(made)
    opened, closed = (
        sorted(re.findall(rf"\\{word}\{{(\w+)\}}", source)) for word in ("begin", "end")
    )
    assert opened == closed
    assert opened.count("longtable") > len(made)
    bare = re.sub(r"\\[{}]", "", source)
    assert bare.count("{") == bare.count("}")
    assert {character for character in source if ord(character) > 127} == set()
    assert not re.search(r"(?<!\\)_", source)
    assert found["mark"].eq("best").sum() == source.count(r"\textbf{")
