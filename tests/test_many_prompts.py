"""Many prompts in one call: the same numbers as one by one, in order, and nothing left behind by what fails."""

from __future__ import annotations

import itertools
import threading
import warnings

import pytest
import torch
from noiser.engine.strand import Stopped, Strand

import noiser
from noiser.engine import together
from noiser.errors import ModelError, ParameterError, PromptError
from test_contract import CHAT, state_of, with_chat_template
from tiny import tiny, tiny_model, tiny_tokenizer

PROMPTS = [
    "The quick fox sings in the rain",
    "A dog",
    "The teacher plays the violin when it rains in the village near the river bank",
    "Trains run late",
    "The brown fox sings in the rain, and the dog plays along.",
]
SOME = ("gemma2", "gpt2")
METHODS = {
    "noiser": noiser.Noiser(samples=3, steps=5),
    "certified": noiser.Noiser(samples=3, steps=4, search="certified"),
    "occlusion": "occlusion",
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
        for count in ("passes", "token_forwards"):
            assert found.info.get(count) == expected.info.get(count)


def one_by_one(lm, prompts, **options):
    return [noiser.attribute(lm, prompt, **options) for prompt in prompts]


@pytest.fixture
def passes(monkeypatch):
    """How many packs each merged pass had."""
    from noiser.engine import crowd as module

    counts, inner = [], module.packed_logits
    monkeypatch.setattr(module, "packed_logits", lambda lm, packs: counts.append(len(packs)) or inner(lm, packs))
    return counts


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["gemma3", "falcon", *(pytest.param(f, marks=pytest.mark.slow) for f in SOME)])
def test_same_numbers_as_one_by_one(family, method):
    lm = tiny(family)
    assert lm.packs is (family != "falcon")
    options = {"method": METHODS[method], "max_new_tokens": 2}
    assert_same(noiser.attribute(lm, PROMPTS, **options), one_by_one(lm, PROMPTS, **options))


@pytest.mark.parametrize(("batch_tokens", "most"), [(1, 64), (30, 2), (30, 64), (8192, 1), (8192, 64)])
def test_numbers_do_not_depend_on_the_passes(batch_tokens, most, monkeypatch, passes):
    monkeypatch.setattr("noiser.engine.crowd.MOST_PROMPTS", most)
    lm = noiser.wrap(tiny("gemma3").model, tiny("gemma3").tokenizer, batch_tokens=batch_tokens)
    options = {"method": noiser.Noiser(samples=2, steps=3)}
    expected = one_by_one(tiny("gemma3"), PROMPTS[:4], **options)
    found = noiser.attribute(lm, tuple(PROMPTS[:4]), **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=0)
        assert torch.equal(one.k_min, other.k_min)
    assert max(passes) <= most
    assert (max(passes) > 1) is (min(most, batch_tokens) > 1)


def test_passes_are_shared_and_stay_within_the_budget(passes):
    lm = tiny("llama")
    alone = sum(att.info["passes"] for att in one_by_one(lm, PROMPTS, method=METHODS["noiser"]))
    noiser.attribute(lm, PROMPTS, method=METHODS["noiser"])
    assert passes[0] == len(PROMPTS)  # clean sequences travel together
    assert len(passes) < alone / 2


def test_a_target_foil_and_seed_for_all_or_for_each():
    lm = tiny("llama")
    options = {"method": METHODS["noiser"]}
    targets, foils, seeds = ["rain", None, 7, " the", 9], [3, 5, 8, 11, 12], [4, 3, 2, 1, 0]
    found = noiser.attribute(lm, PROMPTS, target=targets, foil=foils, seed=seeds, **options)
    each = [
        noiser.attribute(lm, p, target=t, foil=f, seed=s, **options)
        for p, t, f, s in zip(PROMPTS, targets, foils, seeds, strict=True)
    ]
    assert_same(found, each)
    assert [att.seed for att in found] == seeds
    assert_same(noiser.attribute(lm, PROMPTS, target=7, **options), one_by_one(lm, PROMPTS, target=7, **options))
    with pytest.raises(ParameterError, match="target is a list of 2 for 5 prompts; expected one for each"):
        noiser.attribute(lm, PROMPTS, target=[1, 2])


def test_chats_and_texts():
    lm = with_chat_template("llama")
    prompts = [CHAT, "The quick fox", [{"role": "user", "content": "It rains."}]]
    assert_same(noiser.attribute(lm, prompts, method="occlusion"), one_by_one(lm, prompts, method="occlusion"))
    assert isinstance(noiser.attribute(lm, CHAT, method="occlusion"), noiser.Attribution)
    assert_same(noiser.attribute(lm, [CHAT], method="occlusion"), one_by_one(lm, [CHAT], method="occlusion"))


@pytest.mark.parametrize("budget", [{}, {"max_forwards": 300}, {"max_seconds": 10**6}])
def test_unit_auto(budget):
    lm = tiny("llama")
    prompts = [f"{p}. {q}. It rains." for p, q in itertools.pairwise(PROMPTS)]
    options = {"method": METHODS["noiser"], "unit": "auto", **budget}
    assert_same(noiser.attribute(lm, prompts, **options), one_by_one(lm, prompts, **options))


def test_gives_the_same_twice():
    lm = tiny("gemma3")
    first, again = (noiser.attribute(lm, PROMPTS, method=METHODS["noiser"]) for _ in range(2))
    assert all(torch.equal(a.scores, b.scores) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("family", ["llama", "falcon"])
@pytest.mark.parametrize("method", ["occlusion", "integrated_gradients"])
def test_progress_counts_prompts(family, method):
    told, threads = [], set()

    def progress(done, expected):
        told.append(done)
        threads.add(threading.current_thread())
        assert expected == len(PROMPTS)

    lm = noiser.wrap(tiny(family).model, tiny(family).tokenizer, batch_tokens=30)
    noiser.attribute(lm, PROMPTS, method=METHODS[method], progress=progress)
    assert told == sorted(told)
    assert told[-1] == len(PROMPTS)
    assert any(done % 1 for done in told)
    assert threads == {threading.current_thread()}


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def no_strand_is_left():
    return not [thread for thread in threading.enumerate() if thread.name == "noiser-strand"]


def test_a_prompt_that_cannot_be_read_is_named_before_anything_runs(passes):
    with pytest.raises(PromptError, match=r"^Prompt 2: The prompt"):
        noiser.attribute(tiny("llama"), ["A dog", "It rains", "", "The fox"])
    assert not passes
    with pytest.raises(PromptError, match=r"^Prompt 1: .*can read 256"):
        noiser.attribute(tiny("llama"), ["A dog", "dog " * 300])


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_a_question_that_cannot_be_asked_is_named(family):
    lm = tiny(family)
    with pytest.raises(noiser.NoiserError, match=r"^Prompt 3: The target is token id 99999; expected"):
        noiser.attribute(lm, PROMPTS, target=[1, 2, 3, 99999, 4], method="occlusion")
    assert no_strand_is_left()
    with pytest.raises(ParameterError, match="seed is a list of 2 for 5 prompts"):
        noiser.attribute(lm, PROMPTS, seed=[1, 2], method="occlusion")
    with pytest.raises(noiser.NoiserError, match="Unknown method"):
        noiser.attribute(lm, PROMPTS, method="occlsion")


class HookError(Exception):
    """What the caller's own code raises inside the model."""


@pytest.mark.parametrize("error", [HookError, KeyboardInterrupt])
@pytest.mark.parametrize("method", METHODS)
def test_leaves_everything_as_it_was_after_an_error_or_interrupt(method, error):
    lm = noiser.wrap(tiny_model("gemma3"), tiny_tokenizer())
    calls, at = [], [None]

    def hook(*_):
        calls.append(1)
        if len(calls) == at[0]:
            raise error

    lm.model.get_output_embeddings().register_forward_hook(hook)
    options = {"method": METHODS[method]}
    expected = noiser.attribute(lm, PROMPTS[:3], **options)
    calls.clear()
    noiser.attribute(lm, PROMPTS[:3], **options)
    passes, before = len(calls), state_of(lm)
    for at[0] in sorted({1, passes // 2, passes}):
        calls.clear()
        with pytest.raises(error) as caught:
            noiser.attribute(lm, PROMPTS[:3], **options)
        assert state_of(lm) == before
        assert no_strand_is_left()
        if error is HookError:
            assert any("Prompt " in note for note in caught.value.__notes__)
    at[0] = None
    assert_same(noiser.attribute(lm, PROMPTS[:3], **options), expected)


def test_an_interrupt_between_passes_ends_all():
    def interrupted(done, expected):
        if done > 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        noiser.attribute(tiny("llama"), PROMPTS, method=METHODS["noiser"], progress=interrupted)
    assert no_strand_is_left()


def test_memory_that_runs_out_makes_passes_smaller(monkeypatch, passes):
    from noiser.engine import crowd as module

    lm, inner, failed = tiny("llama"), module.packed_logits, []
    expected = one_by_one(lm, PROMPTS, method="occlusion")

    def scarce(lm, packs):
        if sum(pack.tokens for pack in packs) > 40:
            failed.append(len(packs))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(lm, packs)

    monkeypatch.setattr(module, "packed_logits", scarce)
    found = noiser.attribute(lm, PROMPTS, method="occlusion")
    assert 1 in failed
    assert max(failed) > 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, other.scores, atol=1e-5, rtol=0)
    monkeypatch.setattr(module, "packed_logits", lambda lm, packs: scarce(lm, [*packs] * 99))
    with pytest.raises(ModelError, match="Prompt 0: Not enough memory"):
        noiser.attribute(lm, PROMPTS[:1] * 2, method="occlusion", target=3)


def test_warnings_come_through():
    lm = tiny("llama")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = list(together(lm, [lambda shared, i=i: warnings.warn(str(i), stacklevel=1) or i for i in range(3)]))
    assert sorted(str(warning.message) for warning in caught) == ["0", "1", "2"]
    assert [outcome.found for outcome in found] == [0, 1, 2]


# ---- strands -------------------------------------------------------------------------------------------------------


def test_a_strand_asks_and_is_answered():
    strand = Strand(lambda ask: [ask("one"), ask("two")])
    strand.advance()
    assert strand.request == "one"
    strand.advance(1)
    assert strand.request == "two"
    strand.advance(2)
    assert strand.done
    assert strand.found == [1, 2]


def test_a_strand_that_is_stopped_leaves_through_its_own_doors():
    left = []

    def call(ask):
        try:
            ask("one")
        finally:
            left.append(True)

    strand = Strand(call)
    strand.advance()
    strand.stop()
    assert strand.done
    assert isinstance(strand.error, Stopped)
    assert left == [True]
    never = Strand(call)
    never.stop()
    assert never.done


def test_a_strand_whose_starter_was_interrupted_stops_where_it_is():
    entered = threading.Event()

    def call(ask):
        entered.set()
        while True:
            pass

    strand = Strand(call)
    strand._set_off()
    entered.wait()
    strand.stop()
    assert strand.done
    assert isinstance(strand.error, Stopped)
