import io
import itertools
from types import SimpleNamespace

import pytest
import torch

import noiser
from noiser import progress
from noiser.errors import ParameterError
from test_attribution_display import Terminal
from test_contract import CHAT, with_chat_template
from tiny import tiny

PROMPTS = [
    "The quick fox sings in the rain",
    "A dog",
    "The teacher plays the violin when it rains",
    "Trains run late",
]
METHODS = {
    "noiser": noiser.Noiser(samples=2, steps=3, search="bisection"),
    "certified": noiser.Noiser(samples=2, steps=3, search="certified"),
    "lime": noiser.Lime(samples=12),
    "integrated_gradients": noiser.IntegratedGradients(n_steps=3),
    "attention_rollout": "attention_rollout",
    "deeplift": "deeplift",
}


def assert_same(many, ones):
    assert len(many) == len(ones)
    for found, expected in zip(many, ones, strict=True):
        assert found.prompt == expected.prompt
        assert [t.token_id for t in found.targets] == [t.token_id for t in expected.targets]
        assert found.targets[0].probability == pytest.approx(
            expected.targets[0].probability, abs=1e-5
        )
        assert found.units == expected.units
        scale = max(1.0, float(expected.scores.nan_to_num().abs().max()))
        torch.testing.assert_close(
            found.scores, expected.scores, atol=1e-5 * scale, rtol=0, equal_nan=True
        )
        if expected.thresholds is not None:
            assert torch.equal(found.k_min, expected.k_min)
            assert torch.equal(found.thresholds.nan_to_num(-1), expected.thresholds.nan_to_num(-1))
        assert found.info.get("token_forwards") == expected.info.get("token_forwards")


def one_by_one(lm, prompts, **options):
    return [noiser.attribute(lm, prompt, **{"unit": "token"} | options) for prompt in prompts]


@pytest.fixture
def passes(monkeypatch):
    """How many prompts each pass held, and how many tokens."""
    counts, inner = [], noiser.LanguageModel.run

    def run(lm, branches, **how):
        counts.append(
            (
                len({id(b.context) for b in branches}),
                sum(b.inputs[..., 0].numel() for b in branches),
            )
        )
        return inner(lm, branches, **how)

    monkeypatch.setattr(noiser.LanguageModel, "run", run)
    return counts


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("gemma3", method) for method in METHODS),
        ("falcon", "certified"),
        ("falcon", "integrated_gradients"),
    ],
)
def test_same_numbers_as_one_by_one(family, method):
    lm = tiny(family)
    assert lm.abilities.supports_packing is (family != "falcon")
    options = {"method": METHODS[method], "max_new_tokens": 2}
    assert_same(
        noiser.attribute(lm, PROMPTS, **{"unit": "token"} | options),
        one_by_one(lm, PROMPTS, **options),
    )


@pytest.mark.parametrize(("batch_tokens", "most"), [(1, 64), (30, 2)])
def test_numbers_do_not_depend_on_the_passes(batch_tokens, most, monkeypatch, passes):
    options = {"method": noiser.Noiser(samples=2, steps=2)}
    expected = one_by_one(tiny("gemma3"), PROMPTS, **options)
    monkeypatch.setattr("noiser.engine.engine.AT_ONCE", most)
    lm = noiser.wrap(tiny("gemma3").model, tiny("gemma3").tokenizer, batch_tokens=batch_tokens)
    assert lm.abilities.supports_packing
    passes.clear()
    found = noiser.attribute(lm, tuple(PROMPTS), **{"unit": "token"} | options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=0)
        assert torch.equal(one.k_min, other.k_min)
    assert max(prompts for prompts, _ in passes) <= most
    assert (max(prompts for prompts, _ in passes) > 1) is (min(most, batch_tokens) > 1)


def test_passes_are_shared_and_stay_within_the_budget(passes):
    lm, method = tiny("llama"), METHODS["noiser"]
    alone = sum(att.info["passes"] for att in one_by_one(lm, PROMPTS, method=method))
    passes.clear()
    noiser.attribute(lm, PROMPTS, method=method, unit="token")
    assert passes[0] == (len(PROMPTS), sum(len(lm.tokenizer(p)["input_ids"]) for p in PROMPTS))
    assert max(tokens for _, tokens in passes) <= lm.batch_tokens
    assert len(passes) < alone / 2


def test_a_target_foil_and_seed_for_all_or_for_each_and_progress_of_prompts():
    lm, told, method = tiny("llama"), [], METHODS["lime"]
    targets, foils, seeds = ["rain", None, 7, " the"], [3, 5, 8, 11], [4, 3, 2, 1]
    progress = lambda *counts: told.append(counts)
    found = noiser.attribute(
        lm,
        PROMPTS,
        target=targets,
        foil=foils,
        seed=seeds,
        method=method,
        progress=progress,
        unit="token",
    )
    asked = zip(PROMPTS, targets, foils, seeds, strict=True)
    assert_same(
        found,
        [
            noiser.attribute(lm, p, target=t, foil=f, seed=s, method=method, unit="token")
            for p, t, f, s in asked
        ],
    )
    assert [att.seed for att in found] == seeds
    assert told == [(done, len(PROMPTS)) for done in range(1, len(PROMPTS) + 1)]
    options = {"target": 7, "method": method}
    assert_same(
        noiser.attribute(lm, PROMPTS, **{"unit": "token"} | options),
        one_by_one(lm, PROMPTS, **options),
    )


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        (
            [CHAT, "The quick fox", [{"role": "user", "content": "It rains."}]],
            {"max_new_tokens": 2},
        ),
        ([CHAT], {"max_new_tokens": 2}),
        ([f"{p}. {q}. It rains." for p, q in itertools.pairwise(PROMPTS)], {"unit": "auto"}),
    ],
)
def test_chats_texts_and_several_sizes_of_units(prompts, options):
    lm, options = with_chat_template("llama"), {"method": "occlusion", **options}
    assert_same(
        noiser.attribute(lm, prompts, **{"unit": "token"} | options),
        one_by_one(lm, prompts, **options),
    )
    assert isinstance(noiser.attribute(lm, CHAT, **{"unit": "token"} | options), noiser.Attribution)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (["A dog", "dog " * 300], {}, r"^Prompt 1: .*can read 256"),
        (
            PROMPTS,
            {"target": [1, 2, 99999, 4]},
            r"^Prompt 2: The target is token id 99999; expected",
        ),
        (PROMPTS, {"seed": [1, 2]}, "seed is a list of 2 for 4 prompts"),
        (PROMPTS, {"target": [1, 2]}, "target is a list of 2 for 4 prompts; expected one for each"),
        (PROMPTS, {"method": "occlsion"}, "Unknown method"),
    ],
)
def test_what_cannot_be_read_or_asked_is_named(prompts, options, message, passes):
    lm = tiny("llama")
    assert lm.abilities.supports_packing
    passes.clear()
    with pytest.raises(noiser.NoiserError, match=message):
        noiser.attribute(lm, prompts, **{"unit": "token"} | {"method": "occlusion"} | options)
    assert not passes or "99999" in message  # all prompts are read before anything runs


FOX = "The quick fox sings"


def test_methods_side_by_side_are_those_of_attribute(tmp_path):
    lm, methods = (
        tiny("llama"),
        ["joint", "occlusion:objective=logprob:removal=mean", noiser.Occlusion()],
    )
    found = noiser.compare(lm, FOX, methods, seed=2, unit="word")
    alone = [
        noiser.Joint(),
        noiser.Occlusion(objective="logprob", removal="mean"),
        noiser.Occlusion(),
    ]
    for att, method in zip(found, alone, strict=True):
        assert att == noiser.attribute(lm, FOX, method=method, seed=2, unit="word")
        att.save(tmp_path / "a.json")
        assert noiser.Attribution.load(tmp_path / "a.json") == att
        assert att not in ("att", noiser.attribute(lm, FOX, method=method, seed=3, unit="word"))
    text = str(found)
    assert text.count("seed 2") == 1
    assert "exact" not in text  # scores of joint for three units have no error, and no remark
    table = found.to_dataframe()
    assert {"joint", "occlusion removal=mean objective=logprob"} < {*table["method"]}
    assert table["score"].tolist() == torch.cat([att.scores[0] for att in found]).tolist()
    assert found.to_html(tmp_path / "a.html") == (tmp_path / "a.html").read_text(encoding="utf-8")
    for wrong in ((FOX, "joint"), ([FOX, "The lazy dog"], ["joint"])):
        with pytest.raises(ParameterError, match="expected one prompt and a list of methods"):
            noiser.compare(lm, *wrong, unit="token")


def test_a_chat_model_that_ends_at_once_is_hinted_at(monkeypatch):
    lm, first = (
        with_chat_template("llama"),
        noiser.attribute(tiny("llama"), FOX, method="random", unit="token").targets[0],
    )
    monkeypatch.setattr(type(lm), "end_tokens", frozenset({first.token_id}))
    with pytest.warns(
        UserWarning, match="is a chat model, and says nothing after this text. Pass a chat"
    ):
        noiser.attribute(lm, FOX, method="random", unit="token")
    noiser.attribute(
        lm, FOX, method="random", target=" fox", unit="token"
    )  # warnings are errors here
    noiser.attribute(tiny("llama"), FOX, method="random", unit="token")


def test_a_bar_and_advice_are_shown_to_who_waits_on_a_terminal(monkeypatch):
    clock, screen = [0.0], Terminal()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("sys.stderr", screen)
    ways = ["larger units", "the method occlusion"]
    with progress.progress_of(None, "Attributing", ways) as told:
        clock[0] = 30.0  # a model that is measured and compiled first
        told(1, 1000)
        assert "left" not in screen.getvalue()
        clock[0] = 32.0
        told(2, 1000)
        told(3, 1000)
    announced = "About 33 min 16 s left. Quicker: larger units, or the method occlusion."
    assert " ".join(screen.getvalue().split()).count(announced) == 1
    assert "Attributing" in screen.getvalue()
    monkeypatch.setattr("sys.stderr", io.StringIO())  # a pipe
    for given, expected in ((None, None), (False, None), (print, print)):
        with progress.progress_of(given, "") as told:
            assert told is expected


def test_a_method_that_cannot_answer_leaves_the_others_answers(tmp_path):
    methods, done = ["joint", "occlusion:objective=hellinger"], []
    found = noiser.compare(
        tiny("llama"),
        FOX,
        methods,
        foil=" dog",
        progress=lambda *each: done.append(each),
        unit="token",
    )
    assert [att.method for att in found] == ["joint@2"]
    (failure,) = found.failures
    assert failure.startswith("occlusion:objective=hellinger: ")
    assert "has no foil" in failure
    assert failure in str(found)
    assert "has no foil" in found._repr_html_()
    assert done[0][0] == 0 < done[1][0] <= 1 < done[-1][0] <= 2
    assert done == sorted(done)
    with pytest.raises(ParameterError, match="has no foil"):
        noiser.compare(tiny("llama"), FOX, methods[1:], foil=" dog", unit="token")
    with pytest.raises(noiser.NoiserError, match="oclusion"):
        noiser.compare(tiny("llama"), FOX, ["joint", "oclusion"], unit="token")
