"""A bound on a call: what is there by then, said so; on a clock that counts passes."""

import importlib
import itertools

import pytest
import torch

import noiser
from noiser.errors import OutOfTimeError, ParameterError
from noiser.methods import surrogates
from test_contract import state_of
from tiny import chat_tokenizer, tiny, tiny_model

engine = importlib.import_module("noiser.engine.engine")
pytestmark = pytest.mark.usefixtures("unchecked_module")

PROMPT = "The quick fox sings"  # five units
OCCLUSION = noiser.Occlusion()


@pytest.fixture
def lm(monkeypatch):
    """A model that runs one sequence in a pass, and a second per pass."""
    model = noiser.wrap(tiny("llama").model, tiny("llama").tokenizer, batch_tokens=1)
    assert model.abilities.supports_packing  # tried before the clock is set
    seconds = itertools.count()
    monkeypatch.setattr(engine, "monotonic", lambda: next(seconds))
    return model


def bounded(lm, passes, method=OCCLUSION, prompt=PROMPT, **options):
    """An attribution that ends after so many passes, of which the first runs the prompt."""
    return noiser.attribute(
        lm, prompt, method=method, max_seconds=passes + 0.5, **{"unit": "token"} | options
    )


def whole(method=OCCLUSION, prompt=PROMPT, **options):
    return noiser.attribute(tiny("llama"), prompt, method=method, **{"unit": "token"} | options)


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4, equal_nan=True)


def test_occlusion_returns_the_units_that_it_reached_and_says_so(lm):
    att, full = bounded(lm, 4), whole()
    close(att.scores[0, :3], full.scores[0, :3])
    assert att.scores[0, 3:].isnan().all()
    assert (att.info["unfinished"], att.info["max_seconds"]) == (2, 4.5)
    said = "Stopped after 4.5 s, when 2 inputs were not run yet: units without a score"
    assert said in " ".join(str(att).split())
    assert said in att.to_html()
    assert said in att.to_markdown()
    assert "1 input was not run" in str(bounded(lm, 5))


@pytest.mark.parametrize("method", ["occlusion", "joint", "noiser", "lime", "input_x_gradient"])
def test_a_call_that_ends_in_time_is_as_ever(lm, method):
    att = bounded(lm, 10_000, method)
    close(att.scores, whole(method).scores)
    assert "unfinished" not in att.info
    assert "Stopped" not in str(att)


@pytest.mark.parametrize("method", ["occlusion", "joint", "noiser", "integrated_gradients"])
@pytest.mark.parametrize("passes", [0, 1])
def test_nothing_by_then_is_an_error_and_leaves_nothing_behind(lm, method, passes):
    before = state_of(lm)
    with pytest.raises(OutOfTimeError, match=r"went by before there was a result\. Allow more"):
        bounded(lm, passes, method)
    assert state_of(lm) == before


def test_a_method_that_runs_by_itself_is_stopped_between_its_passes(lm):
    with pytest.raises(OutOfTimeError, match="before there was a result"):
        bounded(lm, 5, noiser.SequentialIntegratedGradients(n_steps=20))
    assert not lm.model._forward_pre_hooks


def test_lime_is_fitted_to_the_inputs_that_were_run(lm, monkeypatch):
    method = noiser.Lime(samples=40, mask_probability=0.5)
    att = bounded(lm, 11, method, prompt="The quick brown fox jumps over the lazy dog")
    run = att.info["unfinished"]
    rng = torch.Generator().manual_seed(0)
    drawn = surrogates.draw_per_unit(40, len(att.units), rng) >= 0.5
    different = list(dict.fromkeys(map(tuple, drawn.tolist())))
    missing = set(different[10:])  # a pass for the prompt, and ten for different inputs
    assert run == len(missing)
    rows = [row for row in range(40) if tuple(drawn[row].tolist()) not in missing]
    place = "noiser.methods.surrogates.draw_per_unit"
    monkeypatch.setattr(place, lambda *_: drawn[rows].double())
    expected = whole(
        noiser.Lime(samples=40, mask_probability=0.5),
        prompt="The quick brown fox jumps over the lazy dog",
    )
    close(att.scores, expected.scores)


def test_joint_uses_the_pairs_of_which_both_inputs_were_run(lm, monkeypatch):
    prompt, method = "The quick brown fox jumps over the lazy dog", noiser.Joint(samples=60)
    units = len(whole("position", prompt=prompt).units)
    ends = 1 + 2 * units
    att = bounded(lm, 1 + ends + 7, method, prompt=prompt)
    assert att.info["unfinished"] > 0
    rng = torch.Generator().manual_seed(0)
    (draws,) = method._draw([torch.arange(units)], units, rng)
    half = draws.kept
    single = torch.eye(units, dtype=torch.bool)
    asked = torch.cat(
        [single[:1] & False, ~single, single, torch.stack([half, ~half], 1).flatten(0, 1)]
    )
    everything = (True,) * units  # is known, and not run
    different = [row for row in dict.fromkeys(map(tuple, asked.tolist())) if row != everything]
    run = {everything, *different[: ends + 7]}
    pairs = zip(half.tolist(), (~half).tolist(), strict=True)
    there = torch.tensor([{tuple(one), tuple(other)} <= run for one, other in pairs])
    assert 0 < int(there.sum()) < len(half)
    monkeypatch.setattr(noiser.Joint, "_draw", lambda *_: [draws._replace(kept=half[there])])
    expected = whole(method, prompt=prompt)
    close(att.scores, expected.scores)
    close(att.stderr, expected.stderr)
    assert [pair.units for pair in att.pairs] == [pair.units for pair in expected.pairs]
    monkeypatch.undo()


def test_joint_needs_a_pair(lm):
    with pytest.raises(OutOfTimeError, match=r"0 of .* random inputs were run"):
        bounded(lm, 8, noiser.Joint(samples=60))


def test_shapley_values_of_the_orders_that_were_walked(lm, monkeypatch):
    method = noiser.ShapleySampling(permutations=20)
    att = bounded(lm, 14, method)
    assert att.info["unfinished"] > 0
    assert att.scores.isfinite().all()
    total = float(whole(method).scores.sum())  # the sum is exact for any orders
    assert float(att.scores.sum()) == pytest.approx(total, abs=1e-5)
    by_regression = bounded(lm, 20, noiser.KernelShap(samples=30))
    assert by_regression.info["unfinished"] > 0
    assert float(by_regression.scores.sum()) == pytest.approx(total, abs=1e-5)
    with pytest.raises(OutOfTimeError, match="random inputs were run"):
        bounded(lm, 4, method)


def test_noiser_scores_the_units_that_it_reached_once_the_search_is_over(lm):
    method = noiser.Noiser(samples=2, bounding=0.3)
    att = bounded(lm, 1 + 2 * 3, method)  # a pass for each sample
    full = whole(method)
    close(att.scores[0, :3], full.scores[0, :3])
    assert att.scores[0, 3:].isnan().all()
    with pytest.raises(OutOfTimeError):
        bounded(lm, 6, noiser.Noiser(samples=2))


def test_auto_keeps_the_coarse_units(lm):
    prompt = "The quick fox sings. It rains. The lazy dog sleeps in the village"
    coarse = whole(prompt=prompt, unit="sentence")
    att = bounded(lm, 1 + len(coarse.units) + 2, prompt=prompt, unit="auto")
    close(att.scores, coarse.scores)
    assert att.units == coarse.units
    assert att.info["unfinished"] > 0


def test_a_check_that_is_not_reached_is_left_out(lm):
    att = bounded(lm, 7, check=16)
    close(att.scores, whole().scores)
    assert "check" not in att.info
    assert att.info["unfinished"] > 0
    assert "Stopped after" in str(att)


def test_prompts_without_a_result_are_left_out_with_a_warning(lm):
    prompts = [PROMPT, "A dog", "It rains"]
    with pytest.warns(UserWarning, match="2 of 3 prompts have no result and are left out: 1, 2,"):
        found = bounded(lm, 5, prompt=prompts)
    assert [att.prompt for att in found] == prompts[:1]
    assert isinstance(found, noiser.Attributions)
    with pytest.raises(OutOfTimeError, match=r"^Prompt 0: "):
        bounded(lm, 1, prompt=prompts)


def test_citations(lm):
    sources = ["The trains run late.", "The lazy dog sleeps.", "It rains in the village."]
    asked = {"answer": " It rains.", "unit": "source", "contrast": True}
    found = noiser.cite(lm, "Where?", sources, max_seconds=3.5, **asked)
    full = noiser.cite(tiny("llama"), "Where?", sources, **asked)
    assert int(found.scores.isnan().sum()) == found.attribution.info["unfinished"] > 0
    reached = ~found.scores.isnan()
    close(found.scores[reached], full.scores[reached])
    assert found.answer_without is None
    assert "Stopped after 3.5 s" in str(found)
    assert "Stopped after 3.5 s" in found.to_html()
    loaded = noiser.Citations.from_dict(found.to_dict())
    assert str(loaded) == str(found)
    with pytest.raises(OutOfTimeError):
        noiser.cite(lm, "Where?", sources, max_seconds=1.5, **asked)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), "2"])
def test_a_bound_is_a_positive_number(seconds):
    with pytest.raises(ParameterError, match=r"max_seconds is .* expected a positive number"):
        noiser.attribute(tiny("llama"), PROMPT, max_seconds=seconds, unit="token")


def test_a_saved_result_still_says_it(lm, tmp_path):
    bounded(lm, 4).save(tmp_path / "a.json")
    assert "Stopped after 4.5 s" in str(noiser.Attribution.load(tmp_path / "a.json"))


def test_the_chat_of_a_page_has_a_bound_too():
    lm = noiser.wrap(tiny_model("llama").eval(), chat_tokenizer())
    found = noiser.compare(lm, PROMPT, ["occlusion"], max_seconds=1000.0, unit="token")
    assert "unfinished" not in found.attributions[0].info
