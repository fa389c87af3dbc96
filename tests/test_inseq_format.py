"""Inseq's names of tokens and its files, read without Inseq."""

from __future__ import annotations

import base64
import gzip
import json

import pytest
import torch
from safetensors.torch import save

import noiser
from noiser.attribution.inseq import place_tokens, reduce_trailing
from noiser.errors import ParameterError, StoredFileError

NAN = float("nan")


# ---- where tokens stand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "text", "pieces"),
    [
        (["The", "Ġfox", "Ċ", "s"], "The fox\ns", ["The", " fox", "\n", "s"]),  # byte level
        (["<bos>", "The", "▁fox"], "The fox", ["", "The", " fox"]),  # an added token is empty
        (["<bos>", "The", "▁fox"], "<bos>The fox", ["<bos>", "The", " fox"]),  # a typed one is not
        (["▁The", "▁fox"], "The fox", ["The", " fox"]),  # the space before a text is the tokenizer's
        (["▁a", "<0xC3>", "<0xAF>"], "a ï".replace(" ", ""), ["a", "ï", "ï"]),  # byte tokens of SentencePiece
        (["naÃ", "¯", "ve"], "naïve", ["naï", "ï", "ve"]),  # half a character has all of it
        (["ðŁĳ", "ĭ", "Ġhi"], "👋 hi", ["👋", "👋", " hi"]),
        (["The", "Ġfox"], "The fox jumps", ["The", " fox"]),  # the text may go on
        (["我们", "▁去"], "我们 去", ["我们", " 去"]),
    ],
)
def test_tokens_find_their_place(tokens, text, pieces):
    whole, places = place_tokens(tokens, text)
    assert whole == text
    assert [text[start:end] for start, end in places] == pieces


def test_without_a_text_it_is_made_of_the_names():
    assert place_tokens(["<s>", "The", "Ġfox"], None) == ("<s>The fox", [(0, 3), (3, 6), (6, 10)])
    assert place_tokens(["▁The", "▁fox"], None)[0] == " The fox"


# ---- files ----------------------------------------------------------------------------------------------------------


def instance(kind, **attributes):
    return {"__instance_type__": ["inseq.somewhere", kind], "attributes": attributes}


def encoded(rows, dtype=torch.float32):
    return base64.b64encode(save({"attribution": torch.tensor(rows, dtype=dtype)})).decode()


def content(scores, kind="CoarseFeatureAttributionSequenceOutput", dtype=torch.float32, **changes):
    tokens = [("<s>", 0), ("The", 5), ("Ġfox", 6), ("Ġru", 7), ("ns", 8)]
    fields = {
        "source": [],
        "target": [instance("TokenWithId", token=token, id=i) for token, i in tokens],
        "source_attributions": None,
        "target_attributions": encoded(scores, dtype),
        "step_scores": {"probability": encoded([0.25, 0.5])},
        "attr_pos_start": 3,
        "attr_pos_end": 5,
    }
    info = {
        "attribution_method": "saliency",
        "attribution_args": {"abs": False},
        "attributed_fn": "probability_fn",
        "generated_texts": ["The fox runs"],
        "input_texts": ["The fox"],
        "model_name": "gpt2",
        "model_class": "GPT2LMHeadModel",
    }
    sequence = instance(kind, **(fields | changes))
    return instance("FeatureAttributionOutput", info=info, sequence_attributions=[sequence], step_attributions=None)


SCORES = [[0.5, 0.25], [1.0, 2.0], [3.0, 4.0], [NAN, 8.0], [NAN, NAN]]


def write(path, data, compress=False):
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text) if compress else text)
    return path


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_file(tmp_path, compress, dtype):
    att = noiser.Attribution.from_inseq(write(tmp_path / "a.json", content(SCORES, dtype=dtype), compress))
    torch.testing.assert_close(att.scores, torch.tensor(SCORES[:4]).T, equal_nan=True)
    assert [unit.text for unit in att.units] == ["<s>", "The", " fox", " ru"]
    assert [(unit.start, unit.end) for unit in att.units] == [(0, 0), (0, 3), (3, 7), (7, 10)]
    assert (att.text, att.prompt, att.prompt_length) == ("The fox ru", "The fox", 7)
    assert [target[:3] for target in att.targets] == [(" ru", 7, 0.25), ("ns", 8, 0.5)]
    assert (att.method, att.model.name) == ("inseq:saliency@1", "gpt2")
    assert att.parameters == {"arguments": {"abs": False}, "attributed_fn": "probability"}
    att.save(tmp_path / "b.json")
    assert "fox" in att.to_html()


def test_a_small_file_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("noiser.attribution.inseq.LARGEST", 1000)
    path = write(tmp_path / "a.json", content(SCORES) | {"more": "a" * 1000}, compress=True)
    with pytest.raises(StoredFileError, match="holds more than"):
        noiser.Attribution.from_inseq(path)


def test_no_class_is_looked_up(tmp_path):
    data = content(SCORES)
    data["__instance_type__"] = ["os", "system"]
    assert noiser.Attribution.from_inseq(write(tmp_path / "a.json", data)).scores.shape == (2, 4)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: [],
        lambda data: {"format": "noiser.attribution"},
        lambda data: instance("FeatureAttributionOutput", info={}),
        lambda data: content(SCORES, target_attributions="AAAA"),
        lambda data: content(SCORES, attr_pos_start=99),
        lambda data: content(SCORES, attr_pos_start="3"),
        lambda data: content(SCORES, attr_pos_start=-2),
    ],
)
def test_damaged_files(tmp_path, damage):
    with pytest.raises(StoredFileError, match="not a readable attribution of Inseq"):
        noiser.Attribution.from_inseq(write(tmp_path / "a.json", damage(content(SCORES))))


def test_file_that_is_cut_short(tmp_path):
    (tmp_path / "a.json").write_text('{"__instance')
    with pytest.raises(StoredFileError, match=r"a\.json is not a readable attribution of Inseq"):
        noiser.Attribution.from_inseq(tmp_path / "a.json")


def test_what_cannot_be_taken(tmp_path):
    path = write(tmp_path / "a.json", content(SCORES))
    with pytest.raises(ParameterError, match="index is 1; expected one below 1"):
        noiser.Attribution.from_inseq(path, 1)
    with pytest.raises(ParameterError, match="Got a int; expected Inseq's"):
        noiser.Attribution.from_inseq(3)
    translated = content(SCORES, source_attributions=encoded(SCORES))
    with pytest.raises(ParameterError, match="encoder-decoder"):
        noiser.Attribution.from_inseq(write(path, translated))


@pytest.mark.parametrize(
    ("kind", "how", "expected"),
    [("Granular", None, 5.0), ("MultiDimensional", None, 3.5), ("Granular", "sum", 7.0), ("Granular", "mean", 3.5)],
)
def test_further_dimensions(kind, how, expected):
    scores = torch.tensor([3.0, 4.0]).expand(2, 1, 2)
    torch.testing.assert_close(reduce_trailing(scores, f"{kind}FeatureAttributionSequenceOutput", how),
                               torch.full((2, 1), expected))  # fmt: skip


def test_scores_of_later_tokens_are_none(tmp_path):
    """A saved zero at a token behind the target is padding."""
    rows = [[0.0 if value != value else value for value in row] for row in SCORES]
    att = noiser.Attribution.from_inseq(write(tmp_path / "a.json", content(rows)))
    assert att.scores[0, 3].isnan()
    assert att.scores[1].isfinite().all()
