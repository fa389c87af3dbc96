"""Many prompts in one call: the same numbers as one by one, in order, and nothing left behind by what fails."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import noiser
from noiser.engine import LocalEngine, complete, run_interleaved
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
    "noiser": noiser.Noiser(samples=3, steps=5, search="bisection"),
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
    from noiser.model import language_model as module

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
    monkeypatch.setattr("noiser.engine.local.MOST_PROMPTS", most)
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
    passes.clear()
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
@pytest.mark.slow
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


def test_memory_that_runs_out_makes_passes_smaller(monkeypatch, passes):
    from noiser.model import language_model as module

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


# ---- the scheduler -------------------------------------------------------------------------------------------------


class Doubling:
    """A runner whose passes are numbers; as many as `at_once` run together."""

    def __init__(self, at_once=2, room=3):
        self.at_once, self.room, self.batches = at_once, room, []

    def has_room(self, waiting):
        return len(waiting) < self.room

    def choose(self, waiting):
        return list(range(len(waiting)))[: self.at_once]

    def run(self, passes):
        self.batches.append(list(passes))
        return [ValueError(f"pass {one}") if one < 0 else 2 * one for one in passes]


def asking(*numbers, closed=None):
    answers = []
    try:
        for number in numbers:
            answers.append((yield number))
        return answers
    finally:
        if closed is not None:
            closed.append(numbers)


def test_passes_of_coroutines_are_merged_and_answered():
    runner = Doubling()
    outcomes = list(run_interleaved(runner, [asking(1, 2), asking(), asking(3), asking(4, 5)]))
    assert {outcome.number: outcome.result for outcome in outcomes} == {0: [2, 4], 1: [], 2: [6], 3: [8, 10]}
    assert outcomes[0].number == 1  # done before anything ran
    assert all(len(batch) <= 2 for batch in runner.batches)
    assert len(runner.batches) == 3
    assert complete(runner, asking(7)) == [14]


def test_an_error_ends_one_coroutine_and_is_raised_where_it_waits():
    def careful():
        try:
            yield -1
        except ValueError as error:
            return f"saw {error}"

    outcomes = {o.number: o for o in run_interleaved(Doubling(), [asking(-1), careful(), asking(1)])}
    assert str(outcomes[0].error) == "pass -1"
    assert outcomes[1].result == "saw pass -1"
    assert outcomes[2].result == [2]
    with pytest.raises(ValueError, match="pass -1"):
        complete(Doubling(), asking(-1))


def test_coroutines_that_are_given_up_are_closed():
    closed = []
    running = run_interleaved(Doubling(room=2), [asking(closed=closed), asking(1, 2, closed=closed), asking(3, 4)])
    assert next(running).number == 0
    running.close()
    assert closed == [()]  # the second had not begun
    running = run_interleaved(Doubling(at_once=1), [asking(1, 2, closed=closed), asking(3, closed=closed)])
    for outcome in running:
        assert outcome.number == 1 or closed[1:] == [(3,)]
        running.close()
    assert sorted(closed) == [(), (1, 2), (3,)]


def test_an_interrupt_closes_every_coroutine():
    class Interrupted(Doubling):
        def run(self, passes):
            raise KeyboardInterrupt

    closed = []
    with pytest.raises(KeyboardInterrupt):
        list(run_interleaved(Interrupted(), [asking(1, closed=closed), asking(2, closed=closed)]))
    assert sorted(closed) == [(1,), (2,)]


def test_one_prompt_at_a_time_where_the_model_cannot_pack():
    engine = LocalEngine(tiny("falcon"), many=True)
    assert not engine.share
