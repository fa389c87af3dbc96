import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attribution_for_tests import NAN, make, rich_example
from noiser.attribution import Attribution
from noiser.attribution.store import dumps
from noiser.errors import StoredFileError


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
        assert_same(att, Attribution.load(path))
        assert_same(att, Attribution.load(str(path)))
    path.write_text(dumps(make()), encoding="utf-8-sig")  # an editor's byte-order mark
    assert_same(make(), Attribution.load(path))


def test_missing_numbers_of_info_come_back():
    info = again(replace(make(), info={"k": [[0.5, NAN], [NAN, 2.0]], "title": None})).info
    assert repr(info) == "{'k': [[0.5, nan], [nan, 2.0]], 'title': None}"


def test_the_file_is_plain_json_that_a_person_can_read(tmp_path):
    rich_example().save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["schema"] == 1
    assert data["scores"][0] == [0.31, 0.12, -0.05, 0.001, 0.22, 0.04, None]
    assert "    [0.31, 0.12, -0.05, 0.001, 0.22, 0.04, null],\n" in text
    assert data == rich_example().to_dict()


def test_every_key_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "schema.md").read_text(encoding="utf-8")
    data = rich_example().to_dict()
    for key in [*data, *data["model"], *data["units"][0], *data["targets"][0]]:
        assert f"`{key}`" in text, key


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
    tools = ({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"n": 3}}]},)
    assert again(make(prompt=tools)).prompt == tools
    assert again(make(("a\ud83d",), ((1.0,),))).text == "a\ud83d"
    assert again(make((), ((),), text="a")).scores.shape == (1, 0)


def test_parameters_of_any_kind():
    parameters = {
        "noise": torch.tensor([[0.1, 2.0]]), "spans": ((0, 1),), "r": float("inf"), "dtype": torch.float32,
        "n": torch.tensor(3), "half": torch.tensor(0.5, dtype=torch.bfloat16), "flag": True, "nothing": None,
    }  # fmt: skip
    assert again(make(parameters=parameters)).parameters == {
        "noise": [[0.1, 2.0]], "spans": [[0, 1]], "r": "Infinity", "dtype": "torch.float32", "n": 3, "half": 0.5,
        "flag": True, "nothing": None,
    }  # fmt: skip


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
        (changed(pairs=[{"target": 0, "units": [0, 7], "score": 1, "stderr": 0, "kind": "either"}]), "of no target"),
        (changed(units=[{"text": "a", "start": 0, "end": 1}]), "units.0.token_indices: Field required"),
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
