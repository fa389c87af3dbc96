"""Saving and loading."""

from __future__ import annotations

import json
import math
import os
import random
import stat
import threading
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attribution_for_tests import NAN, make, rich_example, spoiled
from noiser.attribution import Attribution
from noiser.attribution.store import dumps, from_dict, to_dict
from noiser.errors import StoredFileError
from noiser.files import write_bytes

TENSORS = ("scores", "thresholds", "stderr", "k_min")


def assert_same(one, other):
    for field in fields(Attribution):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name in TENSORS and a is not None:
            assert b.dtype == torch.float32
            assert torch.equal(a.view(torch.int32)[~a.isnan()], b.view(torch.int32)[~b.isnan()])
            assert torch.equal(a.isnan(), b.isnan())
        else:
            assert a == b, field.name


def test_missing_numbers_of_info_come_back():
    att = replace(make(), info={"k": [[0.5, math.nan], [math.nan, 2.0]], "title": None})
    info = from_dict(to_dict(att))["info"]
    assert info["k"][0][0] == 0.5
    assert math.isnan(info["k"][0][1])
    assert math.isnan(info["k"][1][0])
    assert info["title"] is None


def test_every_field_comes_back(tmp_path):
    path = tmp_path / "a file"
    rich_example().save(path)
    assert_same(rich_example(), Attribution.load(path))
    assert_same(rich_example(), Attribution.load(str(path)))
    make().save(path)
    assert_same(make(), Attribution.load(path))


def test_a_file_with_a_byte_order_mark(tmp_path):
    (tmp_path / "a.json").write_text(dumps(make()), encoding="utf-8-sig")
    assert_same(make(), Attribution.load(tmp_path / "a.json"))


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
    assert_same(att, Attribution.from_dict(json.loads(dumps(att))))


@given(st.text(st.characters(codec=None), min_size=1))
def test_any_text_comes_back(text):
    joined = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    att = make((joined,), ((1.0,),), prompt=({"role": "user", "content": joined},))
    written = dumps(att)
    written.encode("utf-8")
    assert not any(character in written for character in "\x1b\x7f\x9b\u2028")
    assert_same(att, Attribution.from_dict(json.loads(written)))


def test_messages_keep_what_else_a_template_reads():
    prompt = ({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"n": 3}}]},)
    assert Attribution.from_dict(json.loads(dumps(make(prompt=prompt)))).prompt == prompt


def test_a_lone_surrogate_is_written():
    att = make(("a\ud83d",), ((1.0,),))
    assert Attribution.from_dict(json.loads(dumps(att).encode())).text == "a\ud83d"


def test_no_units_and_no_targets():
    att = make((), ((),), text="a")
    assert Attribution.from_dict(att.to_dict()).scores.shape == (1, 0)
    att = replace(make(("a",), ((1.0,),)), targets=(), scores=torch.zeros(0, 1))
    assert Attribution.from_dict(att.to_dict()).scores.shape == (0, 1)


def test_parameters_of_any_kind():
    noise = torch.tensor([[0.1, 2.0]])
    parameters = {
        "noise": noise,
        "spans": ((0, 1),),
        "r": float("inf"),
        "dtype": torch.float32,
        "n": torch.tensor(3),
        "double": torch.tensor(0.1, dtype=torch.float64),
        "flag": True,
        "nothing": None,
    }
    back = Attribution.from_dict(json.loads(dumps(make(parameters=parameters)))).parameters
    assert back == {
        "noise": [[0.1, 2.0]],
        "spans": [[0, 1]],
        "r": "Infinity",
        "dtype": "torch.float32",
        "n": 3,
        "double": 0.1,
        "flag": True,
        "nothing": None,
    }
    assert torch.equal(torch.tensor(back["noise"]), noise)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.json"
    make().save(path)
    before = path.read_bytes()

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, no_space)
    monkeypatch.setattr("pathlib.Path.replace", no_space)
    with pytest.raises(OSError, match="No space"):
        rich_example().save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(json, "dumps", lambda *a, **k: (_ for _ in ()).throw(MemoryError))
    with pytest.raises(MemoryError):
        make().save(tmp_path / "a.json")
    assert list(tmp_path.iterdir()) == []


def test_saving_keeps_permissions_and_links(tmp_path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "a.json", tmp_path / "link.json"
    make().save(real)
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(real.stat().st_mode) == 0o666 & ~umask
    real.chmod(0o640)
    link.symlink_to(real)
    rich_example().save(link)
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert len(Attribution.load(real).targets) == 2


def changed(**changes):
    return rich_example().to_dict() | changes


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(schema=2), "schema 2; this version of noiser reads schema 1. Upgrade"),
        (changed(schema="x"), "schema 'x'"),
        (changed(schema=True), "schema True"),
        (changed(format="other"), "got format 'other', expected"),
        ([1], "got list, expected a JSON object"),
        ({}, "got format None"),
        ({k: v for k, v in changed().items() if k != "scores"}, "key 'scores' is missing"),
        (changed(model={"name": "x"}), "key 'model.revision' is missing"),
        (changed(text=3), "'text' is 3, expected string"),
        (changed(seed=True), "'seed' is True, expected integer"),
        (changed(seed=2**64), "'seed' is 18446744073709551616, expected .* less than 18446744073709551616"),
        (changed(info={"sources": 3}), "'info.sources' is 3, expected list"),
        (changed(info={"aggregated": {"from": [1]}}), r"'info.aggregated.from' is \[1\], expected string"),
        (changed(info={"sources": [{"start": 0, "end": "x"}]}), "'info.sources.0.end' is 'x', expected integer"),
        (changed(scores=[[1.0]]), r"'scores' has shape \[1, 1\], expected \[2, 7\]"),
        (changed(scores=[[1.0], [1.0, 2.0]]), r"'scores' has shape \[2, 1 or 2\], expected \[2, 7\]"),
        (changed(scores=[["x"]]), "'scores.0.0' is 'x', expected number"),
        (changed(scores=[[True]]), "'scores.0.0' is True, expected number"),
        (changed(scores=[[NAN]]), "not readable JSON .the number NaN is not finite"),
        (changed(scores=[[1e39]]), r"'scores.0.0' is 1e\+39, expected a finite number of float32"),
        (changed(stderr=[[10**400]]), "'stderr.0.0' is 1000.*, expected a finite number of float32"),
        (changed(stderr={"a": 1}), "'stderr' is {'a': 1}, expected list"),
        (changed(k_min=[1.0]), r"'k_min' has shape \[1\], expected \[2\]"),
        (changed(prompt_length=99), "'prompt_length' is 99, expected 0 to 32"),
        (changed(units=[{"text": "a", "start": 5, "end": 99, "token_indices": []}]), "from 5 to 99"),
        (changed(units=[3]), "'units.0' is 3, expected an object"),
        (changed(units=[{"text": "a", "start": 0, "end": 1}]), "key 'units.0.token_indices' is missing"),
        (changed(foil="x"), "'foil' is 'x', expected an object"),
        (changed(prompt=[{"role": 3}]), "neither a text nor a list of chat messages"),
        (changed(prompt=[{"role": "user", "content": 3}]), "neither a text nor a list of chat messages"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, data, message):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(data))
    with pytest.raises(StoredFileError, match=message) as caught:
        Attribution.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"not json", b"[NaN]", b"[1e999]"])
def test_what_is_not_json(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(StoredFileError, match="not readable JSON"):
        Attribution.load(path)


@pytest.mark.parametrize("key", ["scores", "info", "prompt", "parameters"])
@pytest.mark.parametrize("depth", [5000, 200_000])
def test_a_deeply_nested_file_is_damaged(tmp_path, key, depth):
    path = tmp_path / "a.json"
    nested = "[" * depth + "]" * depth
    path.write_text(json.dumps(changed() | {key: 0}).replace(f'"{key}": 0', f'"{key}": {{"a": {nested}}}'))
    with pytest.raises(StoredFileError, match="nested too deeply"):
        Attribution.load(path)


def test_a_file_with_a_wrong_value_is_refused_or_can_be_shown(tmp_path):
    """Any one value of a file may be anything: load says so, or everything that is loaded can be shown and saved."""
    path, draw = tmp_path / "a.json", random.Random(0)
    for _ in range(200):
        path.write_text(json.dumps(spoiled(rich_example().to_dict(), draw)))
        try:
            att = Attribution.load(path)
        except StoredFileError:
            continue
        assert "\x1b" not in str(att) + repr(att) + att.to_html()
        att.save(path)
        assert_same(att, Attribution.load(path))


def test_every_cut_of_a_file_is_noticed(tmp_path):
    make().save(tmp_path / "a.json")
    whole = (tmp_path / "a.json").read_bytes().rstrip()
    for length in range(0, len(whole), 37):
        (tmp_path / "a.json").write_bytes(whole[:length])
        with pytest.raises(StoredFileError):
            Attribution.load(tmp_path / "a.json")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Attribution.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        make().save(tmp_path / "none" / "a.json")


def test_a_pipe_is_written_to_and_stays(tmp_path):
    """As /dev/null must: nothing takes its place."""
    place, read = tmp_path / "pipe", []
    os.mkfifo(place)
    reader = threading.Thread(target=lambda: read.append(place.read_bytes()), daemon=True)
    reader.start()
    write_bytes(place, b"noise")
    reader.join(10)
    assert read == [b"noise"]
    assert stat.S_ISFIFO(place.stat().st_mode)
    assert list(tmp_path.iterdir()) == [place]
