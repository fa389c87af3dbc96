import itertools

import pytest
import torch

import noiser
from noiser.errors import ParameterError, PromptError
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
        assert found.targets[0].probability == pytest.approx(expected.targets[0].probability, abs=1e-5)
        assert found.units == expected.units
        scale = max(1.0, float(expected.scores.nan_to_num().abs().max()))
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-5 * scale, rtol=0, equal_nan=True)
        if expected.thresholds is not None:
            assert torch.equal(found.k_min, expected.k_min)
            assert torch.equal(found.thresholds.nan_to_num(-1), expected.thresholds.nan_to_num(-1))
        assert found.info.get("token_forwards") == expected.info.get("token_forwards")


def one_by_one(lm, prompts, **options):
    return [noiser.attribute(lm, prompt, **options) for prompt in prompts]


@pytest.fixture
def passes(monkeypatch):
    """How many prompts each pass held, and how many tokens."""
    counts, inner = [], noiser.LanguageModel.run

    def run(lm, branches, **how):
        counts.append((len({id(b.context) for b in branches}), sum(b.inputs[..., 0].numel() for b in branches)))
        return inner(lm, branches, **how)

    monkeypatch.setattr(noiser.LanguageModel, "run", run)
    return counts


@pytest.mark.parametrize(
    ("family", "method"),
    [*(("gemma3", method) for method in METHODS), ("falcon", "certified"), ("falcon", "integrated_gradients")],
)
def test_same_numbers_as_one_by_one(family, method):
    lm = tiny(family)
    assert lm.abilities.packs is (family != "falcon")
    options = {"method": METHODS[method], "max_new_tokens": 2}
    assert_same(noiser.attribute(lm, PROMPTS, **options), one_by_one(lm, PROMPTS, **options))


@pytest.mark.parametrize(("batch_tokens", "most"), [(1, 64), (30, 2)])
def test_numbers_do_not_depend_on_the_passes(batch_tokens, most, monkeypatch, passes):
    options = {"method": noiser.Noiser(samples=2, steps=2)}
    expected = one_by_one(tiny("gemma3"), PROMPTS, **options)
    monkeypatch.setattr("noiser.engine.engine.AT_ONCE", most)
    lm = noiser.wrap(tiny("gemma3").model, tiny("gemma3").tokenizer, batch_tokens=batch_tokens)
    assert lm.abilities.packs
    passes.clear()
    found = noiser.attribute(lm, tuple(PROMPTS), **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=0)
        assert torch.equal(one.k_min, other.k_min)
    assert max(prompts for prompts, _ in passes) <= most
    assert (max(prompts for prompts, _ in passes) > 1) is (min(most, batch_tokens) > 1)


def test_passes_are_shared_and_stay_within_the_budget(passes):
    lm = tiny("llama")
    alone = sum(att.info["passes"] for att in one_by_one(lm, PROMPTS, method=METHODS["noiser"]))
    passes.clear()
    noiser.attribute(lm, PROMPTS, method=METHODS["noiser"])
    assert passes[0] == (len(PROMPTS), sum(len(lm.tokenizer(p)["input_ids"]) for p in PROMPTS))
    assert max(tokens for _, tokens in passes) <= lm.batch_tokens
    assert len(passes) < alone / 2


def test_a_target_foil_and_seed_for_all_or_for_each():
    lm = tiny("llama")
    options = {"method": METHODS["lime"]}
    targets, foils, seeds = ["rain", None, 7, " the"], [3, 5, 8, 11], [4, 3, 2, 1]
    found = noiser.attribute(lm, PROMPTS, target=targets, foil=foils, seed=seeds, **options)
    each = [
        noiser.attribute(lm, p, target=t, foil=f, seed=s, **options)
        for p, t, f, s in zip(PROMPTS, targets, foils, seeds, strict=True)
    ]
    assert_same(found, each)
    assert [att.seed for att in found] == seeds
    assert_same(noiser.attribute(lm, PROMPTS, target=7, **options), one_by_one(lm, PROMPTS, target=7, **options))
    with pytest.raises(ParameterError, match="target is a list of 2 for 4 prompts; expected one for each"):
        noiser.attribute(lm, PROMPTS, target=[1, 2])


@pytest.mark.parametrize(
    ("prompts", "options"),
    [
        ([CHAT, "The quick fox", [{"role": "user", "content": "It rains."}]], {"max_new_tokens": 2}),
        ([CHAT], {"max_new_tokens": 2}),
        ([f"{p}. {q}. It rains." for p, q in itertools.pairwise(PROMPTS)], {"unit": "auto"}),
    ],
)
def test_chats_texts_and_several_sizes_of_units(prompts, options):
    lm, options = with_chat_template("llama"), {"method": "occlusion", **options}
    assert_same(noiser.attribute(lm, prompts, **options), one_by_one(lm, prompts, **options))
    assert isinstance(noiser.attribute(lm, CHAT, **options), noiser.Attribution)


def test_progress_counts_prompts():
    told = []
    noiser.attribute(tiny("llama"), PROMPTS, method="occlusion", progress=lambda *counts: told.append(counts))
    assert told == [(done, len(PROMPTS)) for done in range(1, len(PROMPTS) + 1)]


def test_what_cannot_be_read_or_asked_is_named(passes):
    lm = tiny("llama")
    assert lm.abilities.packs
    passes.clear()
    with pytest.raises(PromptError, match=r"^Prompt 1: .*can read 256"):
        noiser.attribute(lm, ["A dog", "dog " * 300])
    assert not passes  # all prompts are read before anything runs
    with pytest.raises(noiser.NoiserError, match=r"^Prompt 2: The target is token id 99999; expected"):
        noiser.attribute(lm, PROMPTS, target=[1, 2, 99999, 4], method="occlusion")
    with pytest.raises(ParameterError, match="seed is a list of 2 for 4 prompts"):
        noiser.attribute(lm, PROMPTS, seed=[1, 2], method="occlusion")
    with pytest.raises(noiser.NoiserError, match="Unknown method"):
        noiser.attribute(lm, PROMPTS, method="occlsion")
