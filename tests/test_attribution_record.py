import itertools
import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import noiser
from attribution_for_tests import NAN, make, rich_example, spans_of
from noiser.attribution import Attribution
from noiser.attribution.normalize import NORMALIZATIONS, normalize
from noiser.attribution.paths import flow
from noiser.attribution.relations import path_arcs
from noiser.attribution.schema import dumps
from noiser.engine import run_one
from noiser.errors import (
    NumericalError,
    ParameterError,
    StoredFileError,
    UnitError,
    UnknownNameError,
)
from noiser.explain import restore
from noiser.types import Span, Target
from tiny import chat_tokenizer, tiny, tiny_tokenizer


def texts(att):
    return [unit.text for unit in att.units]


@pytest.mark.parametrize(("reduce", "first"), [("sum", 0.25), ("mean", 0.125), ("max", 0.5)])
def test_words_by_hand(reduce, first):
    words = make(scores=((-0.25, 0.5, -0.2, 0.4), (0.1, NAN, -0.2, 0.4))).aggregate(
        "word", reduce=reduce
    )
    assert (texts(words), words.unit) == (["LeBron", " plays", " sport"], "word")
    torch.testing.assert_close(words.scores[0], torch.tensor([first, -0.2, 0.4]))
    assert words.scores[1].isnan().tolist() == [True, False, False]
    assert words.units[0] == Span("LeBron", 0, 6, (0, 1))
    assert words.info["aggregated"] == {"from": "token", "reduce": reduce}


def test_standard_errors_and_thresholds():
    words, mean, most = (
        rich_example().aggregate("word", reduce) for reduce in ("sum", "mean", "max")
    )
    assert words.stderr[0, 0].item() == pytest.approx((0.01**2 + 0.02**2) ** 0.5)
    assert mean.stderr[0, 0].item() == pytest.approx((0.01**2 + 0.02**2) ** 0.5 / 2)
    assert words.thresholds[0, 0].item() == pytest.approx(0.1)
    assert words.k_min is not None
    assert most.stderr is None


def test_prompt_and_continuation_are_not_joined_and_pieces_of_a_character_go_together():
    joined = make(("a", " foot", "ball"), ((0.1, 0.2, 0.3),))
    apart = replace(joined, prompt_length=len("a foot"))
    assert texts(joined.aggregate("word")) == ["a", " football"]
    assert texts(apart.aggregate("word")) == ["a", " foot", "ball"]
    assert len(apart.aggregate("sentence").units) == 2
    # a chat template's is no unit: "Dr." is an abbreviation, and "]Dr." would not be one
    units = (Span("Dr.", 6, 9, (2,)), Span(" Smith", 9, 15, (3,)), Span(" plays.", 15, 22, (4,)))
    att = make(("[user]", "Dr. Smith plays."), ((1.0, 2.0, 4.0),), units=units)
    assert texts(att.aggregate("sentence")) == ["Dr. Smith plays."]
    units = (Span("é", 0, 1, (0,)), Span("é", 0, 1, (1,)), Span(" b", 1, 3, (2,)))
    att = make(("é b",), ((1.0, 2.0, 4.0),), units=units).aggregate("word")
    assert (att.units[0], att.scores.tolist()) == (Span("é", 0, 1, (0, 1)), [[3.0, 4.0]])


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("sentence", [1.0, 2.0, 4.0, 8.0]), ("line", [3.0, 4.0, 8.0]), ("paragraph", [7.0, 8.0])],
)
def test_sentences_lines_and_paragraphs(unit, expected):
    att = make(("One.", " Two", "\nThree", "\n\nFour"), ((1.0, 2.0, 4.0, 8.0),))
    for each in (att, att.aggregate("sentence")):
        assert each.aggregate(unit).scores.tolist() == [expected]


@pytest.mark.parametrize("unit", ["word", "sentence"])
def test_perturbed_special_and_template_tokens_stay_alone(unit):
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer())
    for prompt in ("It rains.</s> The fox", [{"role": "user", "content": "It rains. A fox"}]):
        options = {"method": "occlusion", "special_tokens": "perturbed", "max_new_tokens": 1}
        tokens = noiser.attribute(lm, prompt, **{"unit": "token"} | options)
        assert (
            tokens.aggregate(unit).units == noiser.attribute(lm, prompt, unit=unit, **options).units
        )
        tokens = Attribution.from_dict(tokens.to_dict())
        words = tokens.aggregate("word")
        assert words.aggregate(unit).units == tokens.aggregate(unit).units


def test_parts_of_adaptive_units_add_up_to_the_sentences_that_they_were_split_from():
    prompt = "The quick brown fox jumps. A dog plays near the bank."
    options = {"method": "occlusion", "max_new_tokens": 2}
    auto = noiser.attribute(tiny("llama"), prompt, unit="auto", **options)
    coarse = replace(
        noiser.attribute(tiny("llama"), prompt, unit="sentence", **options), unit="auto"
    )
    assert len(auto.units) > len(coarse.units)
    sentences = auto.aggregate("sentence")
    assert texts(sentences) == texts(coarse)
    torch.testing.assert_close(sentences.scores, coarse.scores, equal_nan=True)
    assert texts(auto.aggregate("word")) == texts(
        noiser.attribute(tiny("llama"), prompt, unit="word", **options)
    )
    assert run_one(tiny("llama"), restore(tiny("llama"), sentences)).units == sentences.units
    with pytest.raises(UnitError, match=r"'auto', which are not parts of words. .*unit='word'"):
        coarse.aggregate("word")
    units = (Span("It rains. The fox", 0, 17, (0, 1, 2, 3)), Span(" sings.", 17, 24, (4,)))
    with pytest.raises(UnitError, match="are not parts of sentences"):
        make(("It rains. The fox", " sings."), ((1.0, 2.0),), units=units, unit="auto").aggregate(
            "sentence"
        )


def test_own_spans_leave_the_rest_out_and_a_unit_goes_to_the_span_that_has_most_of_it():
    """A token such as '."' ends a source and goes on after it."""
    pieces = ("It", " rains", '."', " So", '?"')
    sources = [{"title": "", "start": 0, "end": 9}, {"title": "", "start": 10, "end": 14}]
    own = make().aggregate([(13, 18), (0, 6)])
    assert (own.unit, texts(own)) == ("spans", [" sport", "LeBron"])
    att = make(pieces, ((1.0, 2.0, 4.0, 8.0, 16.0),), info={"sources": sources})
    assert att.aggregate("source").scores.tolist() == [[7.0, 24.0]]
    assert att.aggregate([(0, 9)]).scores.tolist() == [[7.0]]


@pytest.mark.parametrize(
    ("att", "asked", "error", "message"),
    [
        (make(), {"unit": [(0, 99)]}, UnitError, "leaves the text; expected .*<= 18"),
        (make(), {"unit": [(6, 7)]}, UnitError, "holds no token"),
        (make(), {"unit": "word", "reduce": "meen"}, UnknownNameError, "Did you mean 'mean'"),
        (
            make(prompt_length=6),
            {"unit": [(0, 12)]},
            UnitError,
            "joins the prompt and its continuation, .* at 6",
        ),
        (make(unit="sentence"), {"unit": "word"}, UnitError, "unit='word'"),
        (make(unit="word"), {"unit": "token"}, UnitError, "unit='token'"),
        (make(unit="turn"), {"unit": "word"}, UnitError, "unit='word'"),
    ],
)
def test_what_cannot_be_aggregated(att, asked, error, message, unchecked):
    with pytest.raises(error, match=message):
        att.aggregate(**asked)


def test_top_is_in_order_and_leaves_nan_out():
    att = make(("a", " b", "\n", " d"), ((0.1, 0.3, NAN, 0.3),))
    assert [(unit.text, unit.index) for unit in att.top()] == [("b", 1), ("d", 3), ("a", 0)]
    for wrong in (0, 2.5, "2"):
        with pytest.raises(ParameterError, match="expected an integer of at least 1"):
            att.top(wrong)
    assert att.top(1)[0].span == att.units[1]
    assert make(("\n",), ((1.0,),)).top()[0].text == "\n"
    assert rich_example().top(1, target=-1)[0].text == "basket"
    for arguments in ({"target": 1}, {"target": -2}):
        with pytest.raises(ParameterError):
            att.top(**arguments)


def test_dataframe_is_tidy():
    frame = rich_example().to_dataframe()
    columns = "target_index target unit_index unit start end score stderr threshold k_min"
    assert list(frame.columns) == columns.split()
    assert len(frame) == 14
    row = frame.iloc[8]
    assert (row.target_index, row.target, row.unit_index, row.unit, row.start, row.end) == (
        1,
        "ball",
        1,
        "Bron",
        2,
        6,
    )
    assert row.score == pytest.approx(0.3)
    assert row.threshold == pytest.approx(0.2)
    assert frame.score.isna().sum() == 1
    assert frame.k_min.isna().sum() == 7
    assert make().to_dataframe()[["stderr", "threshold", "k_min"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [
        ("sum", [3.0, -1.0], [1.5, -0.5]),  # negative scores push the positive part above 1
        ("sum", [-1.0, -3.0], [0.25, 0.75]),  # a negative sum turns the order round
        (
            "sum",
            [0.1, 0.2, -0.3],
            [1 / 3, 1 / 3, 1 / 3],
        ),  # float32 sums of these differ from 0 by rounding only
        ("sum", [0.0, 0.0, NAN], [0.5, 0.5, NAN]),
        ("sum", [1e30, -1e30, 1e-20, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ("sum", [1.0, -1023 / 1024], [1024.0, -1023.0]),  # small, but not for rounding
        ("positive", [3.0, -1.0, 1.0], [0.75, 0.0, 0.25]),
        ("positive", [-3.0, -1.0, NAN, 0.0], [1 / 3, 1 / 3, NAN, 1 / 3]),
        ("abs_sum", [3.0, -1.0], [0.75, 0.25]),
        ("minmax", [-1.0, 3.0, 1.0, NAN], [0.0, 1.0, 0.5, NAN]),
        ("minmax", [2.0, 2.0, NAN], [0.5, 0.5, NAN]),
        ("softmax", [0.0, 1.0, NAN], [1 / (1 + math.e), math.e / (1 + math.e), NAN]),
        ("none", [3.0, -1.0, NAN], [3.0, -1.0, NAN]),
    ],
)
def test_normalised_by_hand(kind, scores, expected):
    torch.testing.assert_close(
        normalize(torch.tensor(scores), kind), torch.tensor(expected), equal_nan=True
    )


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_rows_do_not_touch_each_other_nor_the_input(kind):
    rows = torch.tensor([[1.0, -2.0, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN], [5.0, 1.0, 0.5]])
    before = rows.clone()
    result = normalize(rows, kind)
    torch.testing.assert_close(
        torch.stack([normalize(row, kind) for row in rows]), result, equal_nan=True
    )
    result.zero_()
    torch.testing.assert_close(rows, before, equal_nan=True)
    assert normalize(torch.zeros(2, 0), kind).shape == (2, 0)


def test_of_a_result():
    att = make(("a", "b"), ((1.0, 3.0),))
    torch.testing.assert_close(att.normalized(), torch.tensor([[0.25, 0.75]]))
    assert att.scores.tolist() == [[1.0, 3.0]]
    with pytest.raises(NumericalError, match="1 of 2 scores are infinite"):
        normalize(torch.tensor([1.0, math.inf]), "none")
    with pytest.raises(UnknownNameError, match="Did you mean 'softmax'"):
        att.normalized("softmx")


def assert_same(one, other):
    for field in fields(Attribution):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, torch.Tensor):
            assert b.dtype == torch.float32
            assert torch.equal(a.view(torch.int32)[~a.isnan()], b.view(torch.int32)[~b.isnan()])
            assert torch.equal(a.isnan(), b.isnan())
        else:
            assert a == b, field.name


def again(att):
    return Attribution.from_dict(json.loads(dumps(att)))


def test_every_field_comes_back(tmp_path):
    path = tmp_path / "a file"
    for att in (rich_example(), make()):
        att.save(path)
        for each in (path, str(path)):
            assert_same(att, Attribution.load(each))
    path.write_text(dumps(make()), encoding="utf-8-sig")  # an editor's byte-order mark
    assert_same(make(), Attribution.load(path))


def test_the_file_is_plain_json_that_a_person_can_read_and_whose_keys_are_documented(tmp_path):
    rich_example().save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["schema"] == 1
    assert data["scores"][0] == [0.31, 0.12, -0.05, 0.001, 0.22, 0.04, None]
    assert "    [0.31, 0.12, -0.05, 0.001, 0.22, 0.04, null],\n" in text
    assert data == rich_example().to_dict()
    documented = (Path(__file__).parents[1] / "docs" / "schema.md").read_text(encoding="utf-8")
    keys = [*data, *data["model"], *data["units"][0], *data["targets"][0]]
    assert not [key for key in keys if f"`{key}`" not in documented]


@given(st.lists(st.floats(width=32, allow_infinity=True, allow_nan=True), min_size=1, max_size=8))
def test_float32_scores_come_back_bit_by_bit(values):
    att = make(tuple("abcdefgh"[: len(values)]), (tuple(values),))
    assert_same(att, again(att))


@given(st.text(st.characters(codec=None), min_size=1))
def test_any_text_comes_back(text):
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    att = make((joined,), ((1.0,),), prompt=({"role": "user", "content": joined},))
    written = dumps(att)
    written.encode("utf-8")
    assert not any(character in written for character in "\x1b\x7f\x9b\u2028")
    assert_same(att, again(att))


def test_unusual_records_come_back():
    tools = (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"n": 3}}]},
    )
    assert again(make(prompt=tools)).prompt == tools
    assert again(make(("a\ud83d",), ((1.0,),))).text == "a\ud83d"
    assert again(make((), ((),), text="a")).scores.shape == (1, 0)
    info = again(make(info={"k": [[0.5, NAN], [NAN, 2.0]], "title": None})).info
    assert repr(info) == "{'k': [[0.5, nan], [nan, 2.0]], 'title': None}"


def test_parameters_of_any_kind():
    parameters = {
        "noise": torch.tensor([[0.1, 2.0]]),
        "spans": ((0, 1),),
        "r": float("inf"),
        "dtype": torch.float32,
        "n": torch.tensor(3),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "flag": True,
        "nothing": None,
    }
    assert again(make(parameters=parameters)).parameters == {
        "noise": [[0.1, 2.0]],
        "spans": [[0, 1]],
        "r": "Infinity",
        "dtype": "torch.float32",
        "n": 3,
        "half": 0.5,
        "flag": True,
        "nothing": None,
    }


def changed(**changes):
    return json.dumps(rich_example().to_dict() | changes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(schema=2), "schema: Input should be 1, got 2. .* newer version"),
        (changed(format="other"), "format: Input should be 'noiser.attribution', got 'other'"),
        ("[1]", r"the file: Input should be .*, got \[1\]"),
        ("{}", "format: Field required"),
        (changed(model={"name": "x"}), "model.revision: Field required"),
        (changed(scores=[[1.0]]), r"scores has shape \[1, 1\]; expected \[2, 7\]"),
        (changed(scores=[["x"]]), "scores.0.0: Input should be a valid number.*, got 'x'"),
        (changed(scores=[[NAN]]), "not readable JSON .the number NaN is not finite"),
        (
            changed(
                pairs=[{"target": 0, "units": [0, 7], "score": 1, "stderr": 0, "kind": "either"}]
            ),
            "of no target",
        ),
        (
            changed(units=[{"text": "a", "start": 0, "end": 1}]),
            "units.0.token_indices: Field required",
        ),
        (changed(prompt=[3]), "prompt.*, got "),
        (changed(info={"a": "@"}).replace('"@"', "[" * 490 + "]" * 490), "damaged: it is nested"),
        ("", "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
        ("\udcff", "not readable JSON"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, content, message, unchecked):
    path = tmp_path / "a.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoredFileError, match=message) as caught:
        Attribution.load(path)
    assert str(path) in str(caught.value)


PROMPT, STEPS = ("A fox.", " A dog."), (" First.", " Then.", " So.", " End.")


def reasoning(scores):
    """Four generated sentences, each a target, and all but the last a unit."""
    pieces = (*PROMPT, *STEPS[:-1])
    length = sum(map(len, PROMPT))
    targets = tuple(Target(text, row, 0.5, 1) for row, text in enumerate(STEPS))
    text = "".join((*PROMPT, *STEPS))[:-1]
    own = {"prompt_length": length, "text": text, "units": spans_of(*pieces), "targets": targets}
    return make(pieces, scores, target_unit="sentence", **own)


def random_scores(seed):
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    for row in range(4):
        scores[row, 2 + row :] = NAN
    return scores


def by_enumeration(scores):
    """For each target and prompt unit, the sum over all paths of the product of their edges'
    weights.
    """
    weights = scores.double().nan_to_num(0.0).clamp_min(0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(1e-300)
    totals = torch.zeros(4, 2, dtype=torch.float64)
    for target, unit in itertools.product(range(4), range(2)):
        for count in range(target + 1):
            for between in itertools.combinations(range(target), count):
                stops, product = (
                    [*between, target],
                    weights[between[0] if between else target, unit],
                )
                for first, second in itertools.pairwise(stops):
                    product = product * weights[second, 2 + first]
                totals[target, unit] += product
    return totals


@pytest.mark.parametrize("seed", range(2))
def test_sum_over_all_paths(seed):
    scores = random_scores(seed)
    found = reasoning(scores.tolist()).through()
    torch.testing.assert_close(found.scores, by_enumeration(scores).float(), atol=1e-6, rtol=1e-5)
    for target, expected in enumerate(
        by_enumeration(scores)
    ):  # what flows out of the prompt's two units
        torch.testing.assert_close(flow(found, target).sum(0)[:2], expected, atol=1e-6, rtol=1e-5)
    assert [unit.text for unit in found.units] == list(PROMPT)


def by_hand():
    """The last sentence: a quarter from the fox, a quarter from the dog, half from the first, which
    is the fox's.
    """
    return reasoning(
        (
            (4.0, 0, NAN, NAN, NAN),
            (0, 1, 1, NAN, NAN),
            (-1, -1, 0, -1, NAN),
            (0.25, 0.25, 0.5, 0, 0),
        )
    )


def test_by_hand():
    found = by_hand().through()
    torch.testing.assert_close(
        found.scores, torch.tensor([[1.0, 0], [0.5, 0.5], [0, 0], [0.75, 0.25]])
    )
    assert found.info["through"][3] == [0.5, 0, 0, 0]
    assert found.top(1, target=3)[0].text == "A fox."
    edges = [
        [0.5, 0, 0, 0, 0, 0],
        [0] * 6,
        [0] * 6,
        [0.25, 0.25, 0.5, 0, 0, 0],
    ]  # from the prompt's two, then the four
    assert flow(found, 3).tolist() == edges
    # units may be parts of a target: two words of one sentence carry what the sentence carries
    pieces = ("A fox.", " A dog.", " It", " sings.")
    targets = (Target(" It sings.", 1, 0.5, 1, rest=(3,)), Target(" End.", 2, 0.5, 1))
    own = {
        "prompt_length": 13,
        "text": "A fox. A dog. It sings. End",
        "units": spans_of(*pieces),
        "targets": targets,
    }
    att = make(pieces, ((3.0, 1.0, NAN, NAN), (0.0, 1.0, 0.5, 0.5)), **own)
    torch.testing.assert_close(att.through().scores, torch.tensor([[0.75, 0.25], [0.375, 0.625]]))


@pytest.mark.parametrize("answer", [" fox 🦊 x y", " 🦊 x 🦊", " a é x", " fox fox"])
def test_a_character_of_several_tokens_is_shared_by_their_targets(answer):
    """Every piece of it reads as the whole character, so that targets cannot be found by their
    texts.
    """
    prompt = "The quick fox. It jumps."
    att = noiser.attribute(
        tiny("llama"),
        prompt,
        target=answer,
        method=noiser.Occlusion(objective="logprob"),
        unit="token",
    )
    first = len(tiny_tokenizer()(prompt)["input_ids"])
    weights = att.scores.double().nan_to_num(0.0).clamp_min(0)
    weights /= weights.sum(1, keepdim=True)
    expected = torch.zeros(len(att.targets), len(att.targets), dtype=torch.float64)
    for column, unit in enumerate(att.units):
        for token in unit.token_indices:
            if token >= first:
                expected[:, token - first] += weights[:, column] / len(unit.token_indices)
    torch.testing.assert_close(
        torch.tensor(att.through().info["through"], dtype=torch.float64), expected
    )


def test_of_a_model_every_row_of_positive_scores_sums_to_one(tmp_path):
    asked = {
        "target": " It rains. The trains run late. The fox sings.",
        "unit": "sentence",
        "target_unit": "sentence",
    }
    asked |= {
        "prompt": "The fox sings. A dog plays.",
        "method": noiser.Occlusion(objective="hellinger"),
    }
    found = noiser.attribute(tiny("llama"), **{"unit": "token"} | asked).through()
    torch.testing.assert_close(found.scores.sum(1), torch.ones(3))
    assert found.scores.shape == (3, 2)
    found.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json").info["through"] == found.info["through"]
    for change, message in (
        ({"continuation_units": False}, "The continuation has no units"),
        ({"target_unit": "token"}, "is not inside one target"),
    ):
        with pytest.raises(ParameterError, match=message):
            noiser.attribute(tiny("llama"), **{"unit": "token"} | asked | change).through()


def test_drawing_has_a_line_for_each_sentence_and_an_arc_for_each_edge(tmp_path):
    found = by_hand().through()
    lines, arcs = path_arcs(found, 3)
    assert lines == list(
        zip(
            ("75%", "25%", "50%", "0%", "0%", ""),
            [t.strip() for t in (*PROMPT, *STEPS)],
            strict=True,
        )
    )
    assert sorted((arc.start, arc.end, arc.weight, arc.style) for arc in arcs) == [
        (0, 2, 0.5, "p"), (0, 5, 0.25, "p"), (1, 5, 0.25, "p"), (2, 5, 0.5, "n")
    ]  # fmt: skip
    assert len(path_arcs(found, 0)[0]) == 3
    found.save(tmp_path / "a.json")
    page = noiser.Attribution.load(tmp_path / "a.json").to_html(targets=[3])
    assert (page.count("<path "), page.count("<li>")) == (4, 6)
    assert "the target was written from it" in page
    assert "<svg" not in by_hand().to_html()
    assert "noiser@1 through the continuation" in str(found)
