"""Tables of stored rows: worked by hand, in every form, with nothing dropped and nothing made up."""

from __future__ import annotations

import csv
import io
import math
import re
from functools import cache

import numpy as np
import pytest
from scipy import stats

from noiser.bench.samples import Selection
from noiser.metrics import bootstrap
from noiser.metrics.bootstrap import mean
from noiser.metrics.metric import Scale, Summary
from noiser.metrics.soft import SOFT
from noiser.report import (
    Cell,
    Column,
    Count,
    Number,
    Quoted,
    Results,
    Row,
    Table,
    csv_text,
    document,
    markdown,
    tables,
    tabular,
)
from noiser.report.formats import escaped
from noiser.report.grid import mark_best
from noiser.report.paper import bounding_of, method_of, model_of, published
from noiser.report.rows import Cost
from noiser.report.table import DASH, format_cell
from report_for_tests import full, plan, row, soft

KNOWN = Cell("gemma-3-270m", "known", "noiser", "soft_scores")
UP = Summary(mean, ("x",), Scale(0, 1, None, True, ""))


def results(rows, **changes) -> Results:
    return Results(plan=plan(**changes), stored=rows)


@cache
def everything() -> list[Table]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bootstrap, "RESAMPLES", 200)  # intervals are not what is tested with it
        return tables(full())


def two_methods() -> Results:
    """Noiser on three prompts, occlusion on two of them; the third failed."""
    noiser = [soft(0.03, 0.6), soft(0.05, 0.8), soft(0.04, 1.0)]
    occlusion = [soft(0.02, 0.5), soft(0.03, 0.3)]
    rows = [row("noiser", "soft_scores", i, values) for i, values in enumerate(noiser)]
    rows += [row("occlusion", "soft_scores", i, values) for i, values in enumerate(occlusion)]
    rows.append(row("occlusion", "soft_scores", 2, error="NumericalError: a secret of the data set"))
    return results(rows)


def table(found: list[Table], key: str) -> Table:
    return next(one for one in found if one.key == key)


def cell(found: Table, line: str, head: str, group: str = "gemma-3-270m"):
    column = next(i for i, one in enumerate(found.columns) if (one.name, one.group) == (head, group))
    return next(one for one in found.rows if one.label == line).cells[column]


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_faithfulness_worked_by_hand():
    found = table(tables(two_methods()), "faithfulness-known")
    noiser = cell(found, "Noiser", "faithfulness")
    assert noiser.value == pytest.approx(math.log(0.04 / 0.02) + math.log(0.8 / 0.4))
    assert (noiser.n, noiser.errors) == (3, 0)
    occlusion = cell(found, "Occlusion", "faithfulness")
    assert occlusion.value == pytest.approx(math.log(0.025 / 0.02) + math.log(0.4 / 0.4))
    assert (occlusion.n, occlusion.errors) == (2, 1)


def test_intervals_are_scipys():
    values = np.random.default_rng(3).gamma(2.0, 1.0, 25)
    rows = [row("noiser", "soft_scores", i, soft(0.03, float(value))) for i, value in enumerate(values)]
    found = results(rows).estimate(KNOWN, SOFT.summaries["soft_nc"])
    ours = (found.low, found.high)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, rng=np.random.default_rng(8)).confidence_interval
    assert ours == pytest.approx(theirs, abs=0.04)
    assert found.value == pytest.approx(values.mean())


def test_frame_has_every_number_of_every_row():
    rows = [row("noiser", "soft_scores", 0, soft(0.03, 0.6) | {"status": "right", "none": None})]
    rows.append(row("noiser", "soft_scores", 1, error="NumericalError: why"))
    frame = results([*rows, rows[0]]).frame
    assert list(frame["column"]) == ["soft_ns", "soft_nc", "random_soft_ns", "random_soft_nc", "none", ""]
    assert list(frame["value"][:4]) == [0.03, 0.6, 0.02, 0.4]
    assert frame["value"][4:].isna().all()
    assert list(frame["error"].dropna()) == ["NumericalError: why"]


def test_confidence_reaches_the_intervals():
    rows = [row("noiser", "soft_scores", i, soft(0.03, 0.1 * i)) for i in range(12)]
    narrow, wide = (
        Results(plan=plan(), stored=rows, confidence=share).estimate(KNOWN, SOFT.summaries["soft_nc"])
        for share in (0.5, 0.99)
    )
    assert wide.low < narrow.low < narrow.high < wide.high


def test_seconds_that_a_block_shares_have_no_interval():
    cell = KNOWN._replace(metric="attribution")
    for seconds, alone in (
        ([1.0, 2.0, 4.0, 3.0, 2.0, 3.0], True),
        ([1.5, 1.5, 3.5, 3.5, 2.5, 2.5], False),
        ([1.5, 3.5] * 3, True),
    ):
        costs = [Cost(*cell[:4], example=f"known-{i}", index=i, seconds=s, threads=1) for i, s in enumerate(seconds)]
        found = Results(plan=plan(block=2), costs=costs).seconds(cell)
        assert (found.value, found.n) == (2.5, 6)
        assert math.isfinite(found.low) == math.isfinite(found.high) == alone


def test_paired_difference_takes_the_common_prompts_alone():
    rows = [row("noiser", "soft_scores", i, soft(0.03, nc)) for i, nc in enumerate([9.0, 0.5, 0.7])]
    rows += [row("occlusion", "soft_scores", i, soft(0.03, nc)) for i, nc in ((2, 0.6), (1, 0.4), (3, 9.0))]
    found = results(rows).paired(KNOWN, KNOWN._replace(method="occlusion"), SOFT.summaries["soft_nc"])
    assert (found.value, found.n) == (pytest.approx(0.1), 2)  # 9.0 has no partner


def test_prompt_without_a_value_is_left_out_of_the_pair():
    rows = [row("noiser", "soft_scores", i, soft(0.03, 0.5)) for i in range(3)]
    rows += [row("occlusion", "soft_scores", i, soft(0.03, 0.4) if i else {"soft_nc": None}) for i in range(3)]
    found = results(rows).paired(KNOWN, KNOWN._replace(method="occlusion"), SOFT.summaries["soft_nc"])
    assert found.n == 2


def test_differences_between_methods_are_paired():
    found = table(tables(two_methods()), "differences-noiser-known")
    gap = cell(found, "Occlusion", "faithfulness")
    ours = math.log(0.04 / 0.02) + math.log(0.7 / 0.4)  # Noiser on the two prompts that occlusion has
    assert gap.value == pytest.approx(ours - math.log(0.025 / 0.02))
    assert gap.n == 2


# ---- marks ----------------------------------------------------------------------------------------------------------


def marks(columns: dict[str, list[float]], better: bool | None = True) -> list[str]:
    rows = [row(name, "m", i, {"x": value}) for name, values in columns.items() for i, value in enumerate(values)]
    found = results(rows)
    summary = UP._replace(scale=UP.scale._replace(higher_is_better=better))
    cells = [Cell("gemma-3-270m", "known", name, "m") for name in columns]
    numbers = [Number.of(found.estimate(cell, summary)) for cell in cells]
    return [number.mark for number in mark_best(found, cells, summary, numbers)]


def test_best_is_a_win_only_where_no_other_is_level():
    base = [0.1, 0.5, 0.3, 0.9, 0.6, 0.2]
    clearly = [value + 0.2 + 0.01 * i for i, value in enumerate(base)]  # overlapping intervals, yet always higher
    assert marks({"a": base, "b": clearly}) == ["", "best"]
    noisy = [value + shift for value, shift in zip(base, [0.3, -0.25, 0.2, -0.2, 0.3, -0.1], strict=True)]
    assert marks({"a": base, "b": noisy}) == ["level", "best"]


def test_lower_may_be_better_and_some_columns_have_no_better():
    base = [0.1, 0.5, 0.3, 0.9, 0.6, 0.2]
    higher = [value + 0.2 + 0.01 * i for i, value in enumerate(base)]
    assert marks({"a": base, "b": higher}, better=False) == ["best", ""]
    assert marks({"a": base, "b": higher}, better=None) == ["", ""]


def test_no_best_without_an_interval_or_a_difference():
    assert marks({"a": [0.1], "b": [0.9]}) == ["", ""]
    assert marks({"a": [0.0, 0.0], "b": [0.0, 0.0]}) == ["", ""]


def test_best_is_level_with_a_method_that_wins_on_the_common_prompts():
    """A high mean on prompts that the others lack is no win."""
    few = [0.9, 0.8, 0.7, 0.6, 0.9, 0.8]
    many = [0.95, 0.85, 0.75, 0.65, 0.95, 0.85, 0.0, 0.1, 0.0, 0.05]
    assert marks({"few": few, "many": many}) == ["best", "level"]


def test_a_few_prompts_make_no_winner_and_no_loser():
    many = [0.5, 0.6, 0.55, 0.52, 0.61, 0.58, 0.49]
    assert marks({"few": [0.9, 0.8], "many": many, "low": [value - 0.3 for value in many]}) == ["level", "best", ""]
    for count, expected in ((5, ["", ""]), (6, ["best", ""])):  # below six there is no interval
        assert marks({"a": many[:count], "b": [value - 0.3 - value / 9 for value in many[:count]]}) == expected


def test_marks_of_a_table_are_corrected_for_their_number():
    """Six prompts that all agree have p = 1/32, enough for one comparison and too little for two."""
    base = [0.1, 0.5, 0.3, 0.9, 0.6, 0.2]
    lower = {name: [value - gap - value / 9 for value in base] for name, gap in (("a", 0.3), ("b", 0.4))}
    for others, mark in ((("a",), ""), (("a", "b"), "level")):
        methods = [{"name": "occlusion"}, *({"name": "random", "label": name} for name in others)]
        heights = {"occlusion": base} | {name: lower[name] for name in others}
        rows = [row(name, "mass_matched", i, {"area": x}) for name, xs in heights.items() for i, x in enumerate(xs)]
        made = tables(results(rows, methods=methods, metrics=[{"name": "mass_matched"}]))
        found = table(made, "areas-known")
        assert [cell(found, name, "area").mark for name in others] == [mark] * len(others)
        p = [cell(found, name, "area").p for name in others]
        assert p == pytest.approx([2 / 64 * len(others)] * len(others))
        gaps = table(made, "differences-occlusion-known")
        assert {cell(gaps, name, "area").mark for name in others} == {"" if mark else "clear"}
        assert f"p\xa0=\xa0{p[0]:.2g}" in markdown([gaps])


def test_robustness_worked_by_hand():
    heights = [1.0, 1.2, 0.9, 1.1, 9.0, 1.0, 5.0, 7.0]  # 9, 7 and 0.9 are farthest from their mean
    flags = {"sum_not_positive": 1.0, "clipped": 0.0}
    rows = [row("noiser", "mass_matched", i, {"area": x}) for i, x in enumerate(heights)]
    rows += [
        row("noiser", "soft_scores", i, soft(0.03, 0.5) | (flags if i < 3 else {"clipped": 1.0})) for i in range(8)
    ]
    made = tables(results(rows, metrics=[{"name": "soft_scores"}, {"name": "mass_matched"}]))
    found = table(made, "robustness-known-gemma-3-270m")
    assert cell(found, "Noiser", "area without 3", "").value == pytest.approx((1.0 + 1.2 + 1.1 + 1.0 + 5.0) / 5)
    assert cell(found, "Noiser", "area without 3", "").n == 5
    assert cell(found, "Noiser", "area", "").value == pytest.approx(sum(heights) / 8)
    assert cell(found, "Noiser", "no positive sum", "") == Count(3)
    assert cell(found, "Noiser", "clipped", "") == Count(5)
    assert cell(found, "Occlusion", "clipped", "") == Count(None)


@pytest.mark.parametrize(
    ("draws", "said"),
    [([None] * 3, "one draw"), ([10] * 3, "means of 10 draws"), ([None, 10, 20], "means of 1 to 20 draws")],
)
def test_tables_say_how_many_draws_their_references_have(draws, said):
    rows = [row("noiser", "soft_scores", i, soft(0.03, 0.5) | ({"draws": n} if n else {})) for i, n in enumerate(draws)]
    assert any(said in note for note in table(tables(results(rows)), "faithfulness-known").notes)


def test_numbers_that_earlier_rows_lack_have_no_column():
    areas = {"area": 1.1, "random_area": 1.0, "permuted_area": 1.0}
    old = [row("noiser", "mass_matched", i, areas) for i in range(3)]
    new = [row("noiser", "mass_matched", 3, areas | {"position_area": 1.05})]
    for rows, there in ((old, False), (old + new, True)):
        found = table(tables(results(rows, metrics=[{"name": "mass_matched"}])), "areas-known")
        assert ("area − position" in [head.name for head in found.columns]) is there


def test_leader_is_the_best_of_the_table_that_it_sums_up():
    wide = {"name": "noiser", "label": "wide", "args": {"bounding": "norm_l2"}}
    methods = [{"name": "noiser"}, wide, {"name": "occlusion"}]
    heights = {"noiser": 1.0, "wide": 1.5, "occlusion": 1.1}
    rows = [
        row(name, metric, i, {"area": height + 0.01 * i} if metric == "mass_matched" else soft(0.03 * height, 0.5))
        for name, height in heights.items()
        for metric in ("mass_matched", "soft_scores")
        for i in range(8)
    ]
    metrics = [{"name": "mass_matched"}, {"name": "soft_scores"}]
    found = tables(results(rows, methods=methods, metrics=metrics))
    (line,) = table(found, "glance").rows
    said = dict(zip((head.name for head in table(found, "glance").columns), line.cells, strict=True))
    assert "wide" in said["area"] or "norm_l2" in said["area"]
    assert said["faithfulness"].startswith("Occlusion")


# ---- nothing dropped, nothing made up -------------------------------------------------------------------------------


def test_missing_cell_is_a_dash_with_n_0():
    rows = [row("noiser", "soft_scores", i, soft(0.03, 0.1 * i + 0.1)) for i in range(4)]
    found = tables(results(rows))
    assert cell(table(found, "faithfulness-known"), "Occlusion", "faithfulness").n == 0
    text = markdown(found)
    assert re.search(r"\| Occlusion \| – \(n\xa0=\xa00\)", text)
    assert "Occlusion & -- {\\scriptsize (n~=~0)}" in document(found)
    lines = list(csv.DictReader(io.StringIO(csv_text(found))))
    line = next(one for one in lines if (one["table"], one["row"]) == ("faithfulness-known", "Occlusion"))
    assert (line["value"], line["low"], line["n"]) == ("", "", "0")


def test_planned_table_without_any_row_is_there():
    found = table(tables(results([])), "faithfulness-known")
    assert [number.n for line in found.rows for number in line.cells if isinstance(number, Number)] == [0, 0]


def test_metric_that_the_plan_does_not_have_for_a_method_has_no_line():
    methods = [{"name": "noiser"}, {"name": "occlusion", "metrics": ["stability"]}]
    found = tables(results([], methods=methods, metrics=[{"name": "soft_scores"}, {"name": "stability"}]))
    assert [line.label for line in table(found, "faithfulness-known").rows] == ["Noiser"]
    assert [line.label for line in table(found, "stability-known").rows] == ["Noiser", "Occlusion"]


def test_model_for_which_the_plan_has_nothing_has_no_column():
    """The second model runs on LongRA alone, and the third is measured by stability alone."""
    models = [{"name": name} for name in ("gemma-3-270m", "smollm2-135m-instruct", "qwen2.5-coder-1.5b-instruct")]
    names = [model["name"] for model in models]
    methods = [{"name": "noiser", "data": ["known"], "models": [names[0], names[2]]}]
    methods += [{"name": "noiser", "label": "elsewhere", "data": ["longra"]}]
    metrics = [{"name": "soft_scores", "models": names[:2]}, {"name": "stability", "models": names[2:]}]
    wanted = plan(models=models, data=[{"name": "known"}, {"name": "longra"}], methods=methods, metrics=metrics)
    assert [[entry.label for entry in wanted.data_for(name)] for name in names] == [
        ["known", "longra"],
        ["longra"],
        ["known", "longra"],
    ]
    found = tables(Results(plan=wanted, selections=()))
    groups = {one.key: {head.group for head in one.columns if head.group in names} for one in found}
    assert groups["faithfulness-known"] == {names[0]}
    assert groups["faithfulness-longra"] == {*names[:2]}
    assert groups["stability-known"] == {names[2]}
    assert [one.key for one in found if one.key.startswith("robustness-known")] == [f"robustness-known-{names[0]}"]


def test_undefined_number_says_why():
    rows = [row("noiser", "soft_scores", i, soft(0.0, 0.5)) for i in range(3)]
    found = table(tables(results(rows)), "faithfulness-known")
    number = cell(found, "Noiser", "faithfulness")
    assert math.isnan(number.value)
    assert number.n == 3
    assert any("takes the logarithm of a mean that is zero" in note for note in found.notes)


def test_failures_are_counted_by_type_without_their_message():
    found = tables(two_methods())
    failures = table(found, "failures")
    assert [line.label for line in failures.rows] == ["gemma-3-270m, KNOWN, Occlusion, soft_scores"]
    assert failures.rows[0].cells == (Count(3), Count(1), "NumericalError × 1")
    for text in (markdown(found), document(found), csv_text(found)):
        assert "NumericalError" in text
        assert "secret" not in text


def test_failed_attribution_counts_for_every_metric_planned():
    rows = [row("noiser", "attribution", 0, error="PromptError: too long")]
    rows += [row("noiser", "soft_scores", i, soft(0.03, 0.5)) for i in (1, 2)]
    found = results(rows)
    assert found.errors(KNOWN).total() == 1
    assert found.errors(KNOWN._replace(metric="stability")).total() == 0


def test_failures_of_other_categories_are_not_those_of_a_category():
    rows = [row("noiser", "soft_scores", i, soft(0.03, 0.5), category="a") for i in range(3)]
    rows += [row("noiser", "attribution", i, error="PromptError: too long", category="b") for i in (3, 4)]
    rows += [row("noiser", "soft_scores", 5, error="NumericalError: tie", category="b")]
    found = results(rows)
    totals = {name: found.errors(KNOWN._replace(category=name)).total() for name in (None, "a", "b")}
    assert totals == {None: 3, "a": 0, "b": 3}


def test_marks_say_which_p_they_ask_for():
    rows = [
        row(name, "soft_scores", i, soft(0.03 + i / 100, 0.5)) for name in ("noiser", "occlusion") for i in range(6)
    ]
    for confidence, said, other in ((0.95, "below 0.05", "below 0.2"), (0.8, "below 0.2", "below 0.05")):
        text = markdown(tables(Results(plan=plan(), stored=rows, confidence=confidence)))
        assert said in text
        assert other not in text


def test_texts_of_rows_are_never_format_cell():
    """Words of a closed set, such as a status, are in rows; no text of theirs is in a report."""
    rows = [
        row("noiser", "soft_scores", i, soft(0.03, 0.5 + i) | {"status": "Tokyo", "words": "a secret"}) for i in (0, 1)
    ]
    found = tables(results(rows))
    assert not any(word in text for text in (markdown(found), csv_text(found)) for word in ("Tokyo", "secret"))


def test_metric_without_a_table_of_its_own_gets_one():
    found = table(everything(), "stability-known")
    assert [head.name for head in found.columns[:2]] == ["spearman", "kendall"]


def test_every_number_has_its_n():
    cells = [
        part for line in markdown(everything()).splitlines() if line.startswith("| ") for part in line.split(" | ")
    ]
    numbers = [part for part in cells if re.search(r"\[−?\d", part)]
    assert len(numbers) > 400
    assert all(re.search(r"\(n\xa0=\xa0\d+", part) for part in numbers)


def test_slow_method_has_fewer_prompts_and_says_so():
    found = table(everything(), "faithfulness-known")
    assert (cell(found, "LIME", "faithfulness").n, cell(found, "Noiser", "faithfulness").n) == (6, 12)


# ---- the paper ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen/Qwen2-0.5B", "Qwen2-0.5B"),
        ("meta-llama/Llama-3.2-1B", "Llama3.2-1B"),
        ("google/gemma-2-2b", "gemma-2-2B"),
        ("/models/Meta-Llama-3-8B/", "Llama3-8B"),
        ("Qwen/Qwen2-0.5B-Instruct", None),
        ("Qwen/Qwen2.5-0.5B", None),
        ("gemma-3-270m", None),
    ],
)
def test_models_of_the_paper(name, expected):
    assert model_of(name) == expected


def test_method_is_the_papers_only_with_its_parameters():
    assert method_of("inseq:occlusion", {}) == "occlusion"
    assert method_of("inseq:occlusion", {"reduce": "sum"}) is None
    assert method_of("occlusion", {}) is None  # the paper's is Inseq's, which takes absolute values
    assert method_of("last_attention", {}) is None
    assert method_of("noiser", {"bounding": "k_min", "search": "certified"}) == "noiser"
    assert method_of("noiser", {"bounding": "k_max"}) is None
    assert method_of("noiser_relative", {}) is None
    assert method_of("noiser", {}, "word") is None
    assert bounding_of("noiser", {"bounding": "k_max"}) == "k_max"
    assert bounding_of("noiser", {"bounding": "k_max", "score": "hellinger"}) is None
    assert bounding_of("noiser", {"bounding": "k_max"}, "word") is None


def test_numbers_of_the_paper():
    assert published("faithfulness", ["known", "noiser"], "Qwen2-0.5B") == 2.1854
    assert published("faithfulness", ["known", "noiser"], None) == 1.8103
    assert published("faithfulness", ["known", "random"], None) is None
    assert published("bounding_known", ["k_max_per_unit"], None) == 1.171
    assert published("correct_predictions", ["longra"], "Llama3-8B") == 165
    # where the paper prints no mean, it is of the six models
    six = [0.6785, 0.2248, -0.0264, 0.1805, -0.0233, 0.8043]
    assert published("soft_ns_nc", ["known", "noiser"], None, "soft_ns") == pytest.approx(sum(six) / 6)


def test_paper_stands_beside_the_same_model_and_its_mean_beside_others():
    models = [{"name": "Qwen/Qwen2-0.5B"}, {"name": "gemma-3-270m"}]
    found = table(tables(results([], models=models)), "faithfulness-known")
    heads = [(head.group, head.name) for head in found.columns]
    reference = ("paper, mean of its 6 models", "faithfulness")
    assert heads == [
        ("Qwen2-0.5B", "faithfulness"),
        ("Qwen2-0.5B", "faithfulness, paper"),
        ("gemma-3-270m", "faithfulness"),
        reference,
    ]
    assert cell(found, "Noiser", "faithfulness, paper", "Qwen2-0.5B") == Quoted(2.1854)
    assert cell(found, "Noiser", *reversed(reference)) == Quoted(1.8103)
    only = table(tables(results([], models=models[:1])), "faithfulness-known")
    assert all("mean of" not in head.group for head in only.columns)


def test_paper_stands_beside_tokens_and_its_own_normalization_alone():
    methods = [{"name": "noiser"}, {"name": "noiser", "label": "words", "unit": "word"}]
    methods.append({"name": "noiser", "label": "wide", "args": {"bounding": "norm_l2"}})
    reference = "paper, mean of its 6 models"
    for normalization, there in ((None, True), ("sum", True), ("positive", False)):
        metrics = [{"name": "soft_scores"}, {"name": "answerability", "judge": "local"}]
        metrics = [metric | ({"normalization": normalization} if normalization else {}) for metric in metrics]
        found = tables(results([], methods=methods, metrics=metrics))
        for key in ("faithfulness-known", "soft-known", "bounding-known", "answerability-known"):
            groups = [head.group for head in table(found, key).columns]
            assert (reference in groups) == there, (key, normalization)
        if there:
            found = table(found, "faithfulness-known")
            assert cell(found, "Noiser", "faithfulness", reference) == Quoted(1.8103)
            assert cell(found, "words", "faithfulness", reference) == Quoted(None)


def test_versions_of_data_sets_have_the_papers_numbers_too():
    metrics = [{"name": "soft_scores"}, {"name": "answerability", "judge": "local"}]
    data = [{"name": "known@1"}, {"name": "wikitext@1"}]
    methods = [{"name": "noiser"}, {"name": "noiser", "label": "wide", "args": {"bounding": "norm_l2"}}]
    found = tables(results([], data=data, methods=methods, metrics=metrics))
    for key, value in (
        ("faithfulness-known@1", Quoted(1.8103)),
        ("bounding-known@1", Quoted(1.8103)),
        ("answerability-known@1", Quoted(0.45, "percent")),
        ("faithfulness-wikitext@1", Quoted(5.5833)),
    ):
        assert value in table(found, key).rows[0].cells, key
    assert any("calls these 22 sentences WikiBio" in note for note in table(found, "faithfulness-wikitext@1").notes)


def test_sentences_stand_beside_the_papers_wikibio_and_wikibio_beside_nothing():
    found = tables(results([], data=[{"name": "wikitext"}, {"name": "wikibio"}]))
    sentences = table(found, "faithfulness-wikitext")
    assert Quoted(5.5833) in sentences.rows[0].cells
    assert any("calls these 22 sentences WikiBio" in note for note in sentences.notes)
    assert len(table(found, "faithfulness-wikibio").columns) == 1


def test_boundings_have_the_papers_table():
    methods = [{"name": "noiser"}, {"name": "noiser", "label": "wide", "args": {"bounding": "norm_l2"}}]
    found = table(tables(results([], methods=methods)), "bounding-known")
    assert [(line.label, line.cells[-1]) for line in found.rows] == [
        ("k_min", Quoted(1.8103)),
        ("norm_l2", Quoted(1.7185)),
    ]


def test_boundings_are_compared_on_the_prompts_that_all_have():
    labels = ("noiser", "wide", "few")
    boundings = ("k_min", "norm_l2", "k_max")
    methods = [
        {"name": "noiser", "label": label, "args": {"bounding": bounding}}
        for label, bounding in zip(labels, boundings, strict=True)
    ]
    counts = dict(zip(labels, (12, 6, 3), strict=True))  # a row of three, which has no interval, takes none from others
    values = [soft(0.03 + 0.01 * i * i, 0.5) for i in range(12)]
    rows = [row(label, "soft_scores", i, values[i]) for label, count in counts.items() for i in range(count)]
    found = tables(results(rows, methods=methods))
    first, wide, few = (cell(table(found, "bounding-known"), bounding, "faithfulness") for bounding in boundings)
    assert (first.n, wide.n, few.n) == (6, 6, 3)
    assert first.value == wide.value
    assert cell(table(found, "faithfulness-known"), "Noiser", "faithfulness").n == 12


def test_tables_of_one_model_have_the_methods_that_the_plan_has_for_it():
    bisection = {"name": "noiser@1", "label": "paper"}
    wide = {"name": "noiser", "label": "wide", "args": {"bounding": "norm_l2"}, "models": ["gemma-3-270m"]}
    models = [{"name": "smollm2-135m-instruct"}, {"name": "gemma-3-270m"}]
    metrics = [{"name": name} for name in ("soft_scores", "mass_matched", "mass_matched_rank")]
    found = tables(results([], models=models, methods=[bisection, {"name": "noiser"}, wide], metrics=metrics))
    for key in ("areas-known", "robustness-known"):
        methods = [[line.label for line in table(found, f"{key}-{model['name']}").rows] for model in models]
        assert methods == [["paper", "Noiser"], ["paper", "Noiser", "wide"]], key
    boundings = [one for one in found if one.key.startswith("bounding")]
    assert [(one.key, [line.label for line in one.rows]) for one in boundings] == [
        ("bounding-known-gemma-3-270m", ["k_min", "norm_l2"])  # two searches for one bounding, and no table of one row
    ]


def test_authors_profile_has_a_table_of_its_own():
    methods = [{"name": "noiser"}, {"name": "noiser", "label": "script", "profile": "authors"}]
    found = tables(results([], methods=methods))
    assert [line.label for line in table(found, "authors-known").rows] == ["script"]
    assert [line.label for line in table(found, "faithfulness-known").rows] == ["Noiser"]


def test_judge_is_named():
    wanted = {"metrics": [{"name": "answerability", "judge": "local:small"}]}
    found = table(tables(results([], **wanted)), "answerability-known")
    assert any(note.startswith("Judge: local:small. The paper asked Llama-3.3-70B") for note in found.notes)
    assert cell(found, "Noiser", "rate", "paper, mean of its 6 models") == Quoted(0.45, "percent")


# ---- LongRA ---------------------------------------------------------------------------------------------------------


def test_localisation_worked_by_hand():
    shares = [(0.2, 0.3, 0.1), (0.4, 0.1, 0.3)]
    rows = [
        row(
            "noiser", "localisation", i, data="longra", category="capital-world",
            values={"share_antecedent": a, "share_last_content_word": last, "share_distractor": d,
                    "uniform_antecedent": 0.05, "uniform_last_content_word": 0.05, "uniform_distractor": 0.4},
        )
        for i, (a, last, d) in enumerate(shares)
    ]  # fmt: skip
    other = {"share_antecedent": 0.9, "uniform_antecedent": 0.1, "share_distractor": 0.0, "uniform_distractor": 0.5}
    rows.append(row("noiser", "localisation", 9, other, data="longra", category="family"))
    found = tables(results(rows, data=[{"name": "longra"}], metrics=[{"name": "localisation"}]))
    capital = table(found, "localisation-capital-world-longra")
    expected = {
        "critical": 0.5,
        "critical, of units": 0.1,
        "critical − units": 0.4,
        "main part": 0.8,
        "distractor": 0.2,
    }
    for name, value in expected.items():
        assert cell(capital, "Noiser", name).value == pytest.approx(value), name
        assert cell(capital, "Noiser", name).n == 2
    everywhere = table(found, "localisation-all-longra")
    assert cell(everywhere, "Noiser", "antecedent").value == pytest.approx(0.5)
    assert cell(everywhere, "Noiser", "antecedent").n == 3


# ---- forms ----------------------------------------------------------------------------------------------------------


def test_format_cell():
    assert format_cell(Number(value=-0.1234, low=-0.5, high=0.25, n=7, errors=2))[:3] == (
        "−0.123", "[−0.500, 0.250]", "n\xa0=\xa07, 2 failed",
    )  # fmt: skip
    assert format_cell(Number(value=0.375, low=0.2, high=0.5, n=8, form="percent"))[:2] == ("37.5", "[20.0, 50.0]")
    assert format_cell(Number(value=12345.6, n=3, form="quantity")).value == "12\xa0346"
    assert format_cell(Number(value=0.01234, n=3, form="quantity")).value == "0.0123"
    assert format_cell(Number(value=-0.0001, n=1)).value == "0.000"
    assert format_cell(Number(value=math.nan)) == (DASH, "", "n\xa0=\xa00", "", "")
    assert format_cell(Quoted(None)).value == DASH
    assert format_cell(Quoted(2.1854)).value == "2.1854"
    assert format_cell(Quoted(0.14, "percent"))[0::4] == ("14", "%")


def tricky() -> Table:
    best = Number(value=0.5, low=0.4, high=0.6, n=3, mark="best", form="percent")
    return Table(
        key="a_b",
        title="50% of {x} & |y| _z_ \\ #1 $2 ~ ^",
        stub_header="method",
        columns=(Column("up", "A_1", "higher"), Column("n | m", "A_1"), Column("words", "B")),
        rows=(Row("k_max*", (best, Quoted(-1.5), "a | b & c_d × 3")),),
        notes=("Note_1: <50%>",),
    )


def test_latex_is_balanced_and_escaped():
    text = tabular(tricky())
    assert re.findall(r"\\begin\{(\w+)\}", text) == ["table", "tabular"]
    assert re.findall(r"\\end\{(\w+)\}", text) == ["tabular", "table"]
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.split(r"(?<!\\)&", line)) for line in rows[1:]] == [4, 4]
    assert rows[0] == r" & \multicolumn{2}{c}{A\_1} & \multicolumn{1}{c}{B} \\"
    assert r"\cmidrule(lr){2-3} \cmidrule(lr){4-4}" in text
    assert text.index(r"\toprule") < text.index(r"\midrule") < text.index(r"\bottomrule")
    assert r"\textbf{50.0\%} {\scriptsize [40.0, 60.0] (n~=~3)}" in text
    assert r"k\_max*" in text
    assert r"$-$1.5000" in text
    assert r"\label{tab:a-b}" in text
    assert not re.search(r"(?<!\\)[%#](?!\n)", text)


def test_wide_latex_tables_lie_on_their_side():
    number = Number(value=0.5, low=0.4, high=0.6, n=30)

    def environment(columns: int) -> str:
        heads, cells = tuple(Column(f"column {i}") for i in range(columns)), (number,) * columns
        found = tabular(Table(key="a", title="A", stub_header="method", columns=heads, rows=(Row("noiser", cells),)))
        assert found.count(r"\begin{sidewaystable}") == found.count(r"\end{sidewaystable}")
        return found.split("\n")[0]

    assert environment(3) == r"\begin{table}[t]"
    assert environment(8) == r"\begin{sidewaystable}"


def test_whole_latex_document_is_balanced_and_ascii_but_for_names():
    text = document(everything(), [("machine", "A & B_1")], "Report")
    opened, closed = (sorted(re.findall(rf"\\{word}\{{(\w+)\}}", text)) for word in ("begin", "end"))
    assert opened == closed
    assert opened.count("tabular") > 20
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert {character for character in text if ord(character) > 127} == set()
    assert all(len(re.split(r"(?<!\\)&", line)) > 1 for line in text.splitlines() if line.endswith(r" \\"))


def test_escaped_leaves_nothing_that_latex_obeys():
    assert escaped("a_b & 5% {x} #1 $y$ ~ ^ \\") == (
        r"a\_b \& 5\% \{x\} \#1 \$y\$ \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )


def test_markdown_cells_stay_in_their_columns():
    lines = markdown([tricky()]).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert [len(re.split(r"(?<!\\)\|", line)) for line in rows] == [6, 6, 6]
    assert rows[1] == "| --- | ---: | ---: | --- |"
    assert "A\\_1: up ↑" in rows[0]
    assert "| **50.0%** [40.0, 60.0] (n\xa0=\xa03) | −1.5000 | a \\| b & c\\_d × 3 |" in rows[2]


def test_csv_has_every_cell_with_every_digit():
    found = everything()
    lines = list(csv.DictReader(io.StringIO(csv_text(found))))
    assert len(lines) == sum(len(one.columns) * len(one.rows) for one in found)
    number = cell(table(found, "faithfulness-known"), "Noiser", "faithfulness")
    line = next(one for one in lines if one["table"] == "faithfulness-known")
    assert (line["row"], line["group"], line["column"], line["source"]) == (
        "Noiser", "gemma-3-270m", "faithfulness", "run",
    )  # fmt: skip
    assert float(line["value"]) == number.value
    assert (float(line["low"]), float(line["high"]), int(line["n"])) == (number.low, number.high, 12)
    assert {one["source"] for one in lines} == {"run", "paper"}


def test_tables_have_keys_of_their_own():
    keys = [one.key for one in everything()]
    assert len(set(keys)) == len(keys)


def test_renamed_metric_keeps_its_numbers_apart():
    metrics = [{"name": "soft_scores"}, {"name": "soft_scores", "label": "positive", "normalization": "positive"}]
    found = tables(results([], metrics=metrics))
    keys = [one.key for one in found]
    assert "faithfulness-known" in keys
    assert "faithfulness-known-positive" in keys
    assert table(found, "faithfulness-known-positive").title == "Faithfulness on KNOWN (positive)"


def test_reports_repeat():
    assert csv_text(tables(two_methods())) == csv_text(tables(two_methods()))


def test_numbers_of_several_metrics_stand_side_by_side():
    """A plan that has the scores, the areas and the areas by rank as metrics of their own gets the same tables."""
    names = ("soft_scores", "mass_matched", "mass_matched_rank")
    methods = [
        {"name": "noiser"},
        {"name": "occlusion"},
        {"name": "noiser", "label": "k", "args": {"bounding": "k_max"}},
    ]
    methods[2]["metrics"] = ["soft_scores"]
    found = tables(results([], metrics=[{"name": name} for name in names], methods=methods))
    keys = [one.key for one in found]
    assert len(set(keys)) == len(keys)
    areas = table(found, "areas-known")
    assert [head.name for head in areas.columns] == [
        "area", "area − random", "area − permuted", "area − position",
        "area by rank", "area by rank − random", "area by rank − position",
    ]  # fmt: skip
    assert [line.label for line in areas.rows] == ["Noiser", "Occlusion"]
    differences = table(found, "differences-noiser-known")
    assert [head.name for head in differences.columns] == ["faithfulness", "area", "area by rank"]
    assert [head.name for head in table(found, "bounding-known").columns] == ["faithfulness", "faithfulness"]
    methods[2]["metrics"] = ["soft_scores", "mass_matched_rank"]
    again = tables(results([], metrics=[{"name": name} for name in names], methods=methods))
    assert [head.name for head in table(again, "bounding-known").columns] == [
        "faithfulness", "area by rank", "area by rank − random", "faithfulness",
    ]  # fmt: skip
    assert [line.label for line in table(found, "faithfulness-known").rows] == ["Noiser", "Occlusion"]


def test_metrics_of_the_field_stand_side_by_side_and_have_all_their_numbers():
    rows = [
        row(method, metric, i, {name: value + gain + 0.01 * i for name, value in values.items()})
        for method, gain in (("noiser", 0.0), ("occlusion", 0.2))
        for metric, values in {
            "lds": {"lds": 0.3},
            "top_k": {"drop": 1.0, "hold": 2.0, "drop@2": 1.0, "hold@2": 2.0},
            "gold_spans": {"auprc": 0.4, "mrr": 0.5, "gold_share": 0.1, "recall@1": 0.3},
        }.items()
        for i in range(8)
    ]
    metrics = [{"name": "lds", "removal": "delete"}, {"name": "top_k", "k": [2]}, {"name": "gold_spans"}]
    found = tables(results(rows, metrics=metrics))
    field = table(found, "field-known")
    assert [head.name for head in field.columns] == ["LDS", "top-k drop", "top-k hold", "AUPRC", "MRR"]
    assert cell(field, "Occlusion", "LDS").value == pytest.approx(0.3 + 0.2 + 0.035)
    assert [cell(field, name, "top-k hold").mark for name in ("Noiser", "Occlusion")] == ["best", ""]
    assert field.notes[-1] == "Removal, by metric: lds: delete; top_k: zero."
    assert table(found, "top-k-known").notes[-1] == "Removal: zero."
    assert [head.name for head in table(found, "top-k-known").columns] == ["drop", "hold", "drop@2", "hold@2"]
    assert cell(table(found, "gold-spans-known"), "Noiser", "recall@1").value == pytest.approx(0.335)
    assert "LDS" in [head.name for head in table(found, "glance").columns]
    assert "lds-known" not in [one.key for one in found]  # there is no more than what stands side by side


def test_part_of_a_data_set_says_so():
    data = [{"name": "longra", "label": "capitals", "category": "capital-world"}]
    found = table(tables(results([], data=data)), "faithfulness-capitals")
    assert found.title == "Faithfulness on LongRA (capitals)"
    assert any("for all of the data set, ours for a part of it" in note for note in found.notes)
    data = [{"name": "known", "max_characters": 45, "max_new_tokens": 5, "target_unit": "all"}]
    (note,) = [n for n in table(tables(results([], data=data)), "faithfulness-known").notes if "The paper's" in n]
    assert note.endswith("ours for a part of it. The paper's numbers are for the next token alone.")
    selection = Selection(
        model="gemma-3-270m", data="known", total=9, checked=9, right=3, chosen=("a",), failed={}, notes=()
    )
    found = table(tables(Results(plan=plan(data=data), selections=[selection])), "selections")
    assert all(value.value is None for value in found.rows[0].cells[5:])


def test_notes_say_what_the_plan_sets():
    located = {"share_antecedent": 0.4, "uniform_antecedent": 0.1}
    rows = [row("noiser", "localisation", i, located) for i in range(6)]
    metrics = [{"name": "localisation", "normalization": "softmax"}]
    (note,) = table(tables(results(rows, metrics=metrics)), "localisation-all-known").notes
    assert note.startswith("Share of the scores, normalised by softmax, on a part")
    methods = [{"name": "noiser", "label": "noiser_authors", "profile": "authors"}]
    metrics = [{"name": "soft_scores", "masks": 3, "normalization": "positive"}]
    rows = [row("noiser_authors", "soft_scores", i, soft(0.1, 0.5)) for i in range(6)]
    note = table(tables(results(rows, methods=methods, metrics=metrics)), "authors-known").notes[0]
    assert "3 mask samples (the script has one), scores normalised by positive" in note


def test_scores_that_need_no_model_cost_nothing_and_failures_are_left_out_of_seconds():
    rows = [row("noiser", "attribution", i, {"token_forwards": 10, "passes": 1, "rank": 1}) for i in range(6)]
    rows += [row("noiser", "attribution", i, error="NumericalError: no") for i in range(6, 12)]
    rows += [row("random", "attribution", i, {"rank": 1}) for i in range(6)]
    labels = ("gemma-3-270m", "known", "noiser", "attribution")
    costs = [
        Cost(*labels, example=f"known-{i}", index=4 * i, seconds=1.0 if i < 6 else 0.001, threads=1) for i in range(12)
    ]
    wanted = plan(methods=[{"name": "noiser"}, {"name": "random"}])
    found = table(tables(Results(plan=wanted, stored=rows, costs=costs)), "cost-known")
    assert (cell(found, "Random", "token-forwards").value, cell(found, "Random", "token-forwards").n) == (0, 6)
    seconds = cell(found, "Noiser", "seconds")
    assert (seconds.value, seconds.n, seconds.errors) == (1.0, 6, 6)
    lost = [cost for cost in costs if cost.index]  # damaged files of costs leave none, failed rows or not
    without = Results(plan=wanted, stored=rows, costs=[cost._replace(method="random") for cost in lost])
    assert math.isnan(cell(table(tables(without), "cost-known"), "Noiser", "seconds").value)


def test_selections_beside_the_papers():
    part = {"name": "longra", "label": "capitals", "category": "capital-world"}
    data = [{"name": "known"}, part, {"name": "wikibio"}]
    same = {"model": "Qwen2-0.5B", "total": 1208, "chosen": ("a", "b"), "failed": {}, "notes": ()}
    chosen = [
        Selection(data="known", checked=10, right=4, **same),
        Selection(data="capitals", checked=10, right=0, **same),
        Selection(data="wikibio", checked=None, right=None, **same),
    ]
    wanted = plan(models=[{"name": "Qwen/Qwen2-0.5B"}], data=data)
    found = table(tables(Results(plan=wanted, selections=chosen)), "selections")
    known, capitals, wikibio = (line.cells for line in found.rows)
    assert known[:3] == (Count(1208), Count(10), Count(4))
    assert (known[3].value, known[3].n, known[4]) == (0.4, 10, Count(2))
    assert known[5:] == (Quoted(661, "quantity"), Quoted(661 / 1208, "percent"), Quoted(None))
    assert capitals[3].value == 0  # measured, and none was right
    assert capitals[5] == Quoted(None, "quantity")  # the paper counts the whole data set
    assert wikibio[1:3] == (Count(None), Count(None))
    assert format_cell(wikibio[3])[0::2] == (DASH, "n\xa0=\xa00", "")
    fewer = plan(models=[{"name": "Qwen/Qwen2-0.5B"}], data=[{"name": "known", "limit": 1}])
    (line,) = table(tables(Results(plan=fewer, selections=chosen)), "selections").rows
    assert line.cells[4] == Count(1)  # those of a larger plan before are attributed no more
