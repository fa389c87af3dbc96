import math
from dataclasses import replace

import pytest
import torch

import noiser
from attribution_for_tests import NAN, make, rich_example
from noiser.attribution import Attribution
from noiser.attribution.scores import NORMALIZATIONS, normalize
from noiser.engine import restore, run_one
from noiser.errors import NumericalError, ParameterError, UnitError, UnknownNameError
from noiser.types import Span
from tiny import chat_tokenizer, tiny


def texts(att):
    return [unit.text for unit in att.units]


@pytest.mark.parametrize(("reduce", "first"), [("sum", 0.25), ("mean", 0.125), ("max", 0.5)])
def test_words_by_hand(reduce, first):
    words = make(scores=((-0.25, 0.5, -0.2, 0.4), (0.1, NAN, -0.2, 0.4))).aggregate("word", reduce=reduce)
    assert texts(words) == ["LeBron", " plays", " sport"]
    assert words.unit == "word"
    torch.testing.assert_close(words.scores[0], torch.tensor([first, -0.2, 0.4]))
    assert words.scores[1].isnan().tolist() == [True, False, False]
    assert words.units[0] == Span("LeBron", 0, 6, (0, 1))
    assert words.info["aggregated"] == {"from": "token", "reduce": reduce}


def test_standard_errors_and_thresholds():
    words = rich_example().aggregate("word")
    assert words.stderr[0, 0].item() == pytest.approx((0.01**2 + 0.02**2) ** 0.5)
    assert words.thresholds[0, 0].item() == pytest.approx(0.1)
    assert words.k_min is not None
    mean = rich_example().aggregate("word", "mean")
    assert mean.stderr[0, 0].item() == pytest.approx((0.01**2 + 0.02**2) ** 0.5 / 2)
    assert rich_example().aggregate("word", "max").stderr is None


def test_prompt_and_continuation_are_not_joined():
    joined = make(("a", " foot", "ball"), ((0.1, 0.2, 0.3),))
    apart = replace(joined, prompt_length=len("a foot"))
    assert texts(joined.aggregate("word")) == ["a", " football"]
    assert texts(apart.aggregate("word")) == ["a", " foot", "ball"]
    assert len(apart.aggregate("sentence").units) == 2


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("sentence", [1.0, 2.0, 4.0, 8.0]), ("line", [3.0, 4.0, 8.0]), ("paragraph", [7.0, 8.0])],
)
def test_sentences_lines_and_paragraphs(unit, expected):
    att = make(("One.", " Two", "\nThree", "\n\nFour"), ((1.0, 2.0, 4.0, 8.0),))
    assert (
        att.aggregate(unit).scores.tolist() == att.aggregate("sentence").aggregate(unit).scores.tolist() == [expected]
    )


def test_text_between_units_is_no_part_of_their_sentences():
    """As a chat template's, which is no unit: "Dr." is an abbreviation, and "]Dr." would not be one."""
    units = (Span("Dr.", 6, 9, (2,)), Span(" Smith", 9, 15, (3,)), Span(" plays.", 15, 22, (4,)))
    att = make(("[user]", "Dr. Smith plays."), ((1.0, 2.0, 4.0),), units=units, unit="token")
    assert texts(att.aggregate("sentence")) == ["Dr. Smith plays."]


@pytest.mark.parametrize("unit", ["word", "sentence"])
def test_perturbed_special_and_template_tokens_stay_alone(unit):
    lm = noiser.wrap(tiny("llama").model, chat_tokenizer())
    for prompt in ("It rains.</s> The fox", [{"role": "user", "content": "It rains. A fox"}]):
        options = {"method": "occlusion", "special_tokens": "perturbed", "max_new_tokens": 1}
        tokens = noiser.attribute(lm, prompt, **options)
        assert tokens.aggregate(unit).units == noiser.attribute(lm, prompt, unit=unit, **options).units
        tokens = Attribution.from_dict(tokens.to_dict())
        words = tokens.aggregate("word")
        assert words.aggregate(unit).units == tokens.aggregate(unit).units


def test_parts_of_adaptive_units_add_up_to_the_sentences_that_they_were_split_from():
    prompt = "The quick brown fox jumps. A dog plays near the bank."
    options = {"method": "occlusion", "max_new_tokens": 2}
    auto = noiser.attribute(tiny("llama"), prompt, unit="auto", **options)
    coarse = replace(noiser.attribute(tiny("llama"), prompt, unit="sentence", **options), unit="auto")
    assert len(auto.units) > len(coarse.units)
    sentences = auto.aggregate("sentence")
    assert texts(sentences) == texts(coarse)
    torch.testing.assert_close(sentences.scores, coarse.scores, equal_nan=True)
    assert texts(auto.aggregate("word")) == texts(noiser.attribute(tiny("llama"), prompt, unit="word", **options))
    assert run_one(tiny("llama"), restore(tiny("llama"), sentences)).units == sentences.units
    with pytest.raises(UnitError, match=r"'auto', which are not parts of words. .*unit='word'"):
        coarse.aggregate("word")
    units = (Span("It rains. The fox", 0, 17, (0, 1, 2, 3)), Span(" sings.", 17, 24, (4,)))
    with pytest.raises(UnitError, match="are not parts of sentences"):
        make(("It rains. The fox", " sings."), ((1.0, 2.0),), units=units, unit="auto").aggregate("sentence")


def test_own_spans_leave_the_rest_out_and_a_unit_goes_to_the_span_that_has_most_of_it():
    """A token such as '."' ends a source and goes on after it."""
    pieces = ("It", " rains", '."', " So", '?"')
    sources = [{"title": "", "start": 0, "end": 9}, {"title": "", "start": 10, "end": 14}]
    own = make().aggregate([(13, 18), (0, 6)])
    assert (own.unit, texts(own)) == ("spans", [" sport", "LeBron"])
    att = make(pieces, ((1.0, 2.0, 4.0, 8.0, 16.0),), info={"sources": sources})
    assert att.aggregate("source").scores.tolist() == [[7.0, 24.0]]
    assert att.aggregate([(0, 9)]).scores.tolist() == [[7.0]]


def test_pieces_of_one_character_go_together():
    units = (Span("é", 0, 1, (0,)), Span("é", 0, 1, (1,)), Span(" b", 1, 3, (2,)))
    att = make(("é b",), ((1.0, 2.0, 4.0),), units=units).aggregate("word")
    assert att.units[0] == Span("é", 0, 1, (0, 1))
    assert att.scores.tolist() == [[3.0, 4.0]]


def test_what_cannot_be_aggregated(unchecked):
    for span, message in (((0, 99), "leaves the text; expected .*<= 18"), ((6, 7), "holds no token")):
        with pytest.raises(UnitError, match=message):
            make().aggregate([span])
    with pytest.raises(UnknownNameError, match="Did you mean 'mean'"):
        make().aggregate("word", reduce="meen")
    with pytest.raises(UnitError, match="joins the prompt and its continuation, which begins at 6"):
        make(prompt_length=6).aggregate([(0, 12)])


@pytest.mark.parametrize(("unit", "finer"), [("sentence", "word"), ("word", "token"), ("turn", "word")])
def test_finer_units_cannot_be_made(unit, finer):
    with pytest.raises(UnitError, match=f"unit={finer!r}"):
        replace(make(), unit=unit).aggregate(finer)


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
    assert (row.target_index, row.target, row.unit_index, row.unit, row.start, row.end) == (1, "ball", 1, "Bron", 2, 6)
    assert row.score == pytest.approx(0.3)
    assert row.threshold == pytest.approx(0.2)
    assert frame.score.isna().sum() == 1
    assert frame.k_min.isna().sum() == 7
    assert make().to_dataframe()[["stderr", "threshold", "k_min"]].isna().all(axis=None)


E = math.e


@pytest.mark.parametrize(
    ("kind", "scores", "expected"),
    [
        ("sum", [3.0, -1.0], [1.5, -0.5]),  # negative scores push the positive part above 1
        ("sum", [-1.0, -3.0], [0.25, 0.75]),  # a negative sum turns the order round
        ("sum", [0.1, 0.2, -0.3], [1 / 3, 1 / 3, 1 / 3]),  # float32 sums of these differ from 0 by rounding only
        ("sum", [0.0, 0.0, NAN], [0.5, 0.5, NAN]),
        ("sum", [1e30, -1e30, 1e-20, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ("sum", [1.0, -1023 / 1024], [1024.0, -1023.0]),  # small, but not for rounding
        ("positive", [3.0, -1.0, 1.0], [0.75, 0.0, 0.25]),
        ("positive", [-3.0, -1.0, NAN, 0.0], [1 / 3, 1 / 3, NAN, 1 / 3]),
        ("abs_sum", [3.0, -1.0], [0.75, 0.25]),
        ("minmax", [-1.0, 3.0, 1.0, NAN], [0.0, 1.0, 0.5, NAN]),
        ("minmax", [2.0, 2.0, NAN], [0.5, 0.5, NAN]),
        ("softmax", [0.0, 1.0, NAN], [1 / (1 + E), E / (1 + E), NAN]),
        ("none", [3.0, -1.0, NAN], [3.0, -1.0, NAN]),
    ],
)
def test_normalised_by_hand(kind, scores, expected):
    torch.testing.assert_close(normalize(torch.tensor(scores), kind), torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("kind", NORMALIZATIONS)
def test_rows_do_not_touch_each_other_nor_the_input(kind):
    rows = torch.tensor([[1.0, -2.0, NAN], [0.0, 0.0, 0.0], [NAN, NAN, NAN], [5.0, 1.0, 0.5]])
    before = rows.clone()
    result = normalize(rows, kind)
    for row, alone in zip(rows, result, strict=True):
        torch.testing.assert_close(normalize(row, kind), alone, equal_nan=True)
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
