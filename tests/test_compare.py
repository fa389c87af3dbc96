import importlib
import io
from types import SimpleNamespace

import pytest
import torch

import noiser
from noiser.errors import ParameterError
from test_attribution_display import Terminal
from test_contract import with_chat_template
from tiny import tiny

attributing = importlib.import_module("noiser.explain.attribute")  # the function has the same name
PROMPT = "The quick fox sings"


def test_methods_side_by_side_are_those_of_attribute(tmp_path):
    lm = tiny("llama")
    methods = ["joint", "occlusion:score=logprob:baseline=mean", noiser.Occlusion()]
    found = noiser.compare(lm, PROMPT, methods, seed=2, unit="word")
    alone = [noiser.Joint(), noiser.Occlusion(score="logprob", baseline="mean"), noiser.Occlusion()]
    for att, method in zip(found, alone, strict=True):
        assert att == noiser.attribute(lm, PROMPT, method=method, seed=2, unit="word")
    text = str(found)
    assert text.count("seed 2") == 1
    assert "(exact)" in text  # of joint, for three units
    table = found.to_dataframe()
    assert {"joint", "occlusion baseline=mean score=logprob"} < {*table["method"]}
    assert table["score"].tolist() == torch.cat([att.scores[0] for att in found]).tolist()
    assert found.to_html(tmp_path / "a.html") == (tmp_path / "a.html").read_text(encoding="utf-8")
    for wrong in ((PROMPT, "joint"), ([PROMPT, "The lazy dog"], ["joint"])):
        with pytest.raises(ParameterError, match="expected one prompt and a list of methods"):
            noiser.compare(lm, *wrong)


def test_a_loaded_result_equals_the_first(tmp_path):
    att = noiser.attribute(tiny("llama"), PROMPT, foil=" dog", seed=1)
    att.save(tmp_path / "a.json")
    assert noiser.Attribution.load(tmp_path / "a.json") == att
    assert att != noiser.attribute(tiny("llama"), PROMPT, foil=" cat", seed=1)
    assert att != "att"


def test_a_chat_model_that_ends_at_once_is_hinted_at(monkeypatch):
    lm, first = with_chat_template("llama"), noiser.attribute(tiny("llama"), PROMPT, method="random").targets[0]
    monkeypatch.setattr(type(lm), "end_tokens", frozenset({first.token_id}))
    with pytest.warns(UserWarning, match="is a chat model, and says nothing after this text. Pass a chat"):
        noiser.attribute(lm, PROMPT, method="random")
    noiser.attribute(lm, PROMPT, method="random", target=" fox")  # warnings are errors here
    noiser.attribute(tiny("llama"), PROMPT, method="random")


def test_a_bar_and_advice_are_shown_to_who_waits_on_a_terminal(monkeypatch):
    clock, screen = [0.0], Terminal()
    monkeypatch.setattr(attributing, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("sys.stderr", screen)
    with attributing.shown(None, "Attributing") as told:
        clock[0] = 30.0  # a model that is measured and compiled first
        told(1, 1000)
        assert "left" not in screen.getvalue()
        clock[0] = 32.0
        told(2, 1000)
        told(3, 1000)
    assert screen.getvalue().count("About 33 min 16 s left") == 1
    assert "Attributing" in screen.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())  # a pipe
    for given, expected in ((None, None), (False, None), (print, print)):
        with attributing.shown(given, "") as told:
            assert told is expected


def test_a_method_that_cannot_answer_leaves_the_others_answers(tmp_path):
    methods, done = ["joint", "occlusion:score=hellinger"], []
    found = noiser.compare(tiny("llama"), PROMPT, methods, foil=" dog", progress=lambda *each: done.append(each))
    assert [att.method for att in found] == ["joint@1"]
    (failure,) = found.failures
    assert failure.startswith("occlusion:score=hellinger: ")
    assert "has no foil" in failure
    assert failure in str(found)
    assert "has no foil" in found._repr_html_()
    assert done[0][0] == 0 < done[1][0] <= 1 < done[-1][0] <= 2
    assert done == sorted(done)
    with pytest.raises(ParameterError, match="has no foil"):
        noiser.compare(tiny("llama"), PROMPT, methods[1:], foil=" dog")
    with pytest.raises(noiser.NoiserError, match="oclusion"):
        noiser.compare(tiny("llama"), PROMPT, ["joint", "oclusion"])
