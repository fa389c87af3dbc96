"""Where the tokenizer puts no start token, the first position is never hidden, zeroed or
disturbed.
"""

import functools
import math

import pytest
import torch

import noiser
from engine_for_tests import query_of
from golden.cases import SMALL
from methods_for_tests import predict
from metrics_for_tests import case_of, columns, with_scores
from noiser.engine import LiveGame, Predict, hide, remover, run_one
from noiser.errors import UnitError
from noiser.methods import METHODS, make_method
from tiny import tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"
FAMILIES = ["llama", "gemma3", "gpt2"]
REMOVING = [
    "joint",
    "occlusion",
    "added",
    "lime",
    "kernel_shap",
    "shapley_sampling",
    "context_cite",
]


@functools.cache
def without_start_token(family):
    return noiser.wrap(tiny_model(family), tiny_tokenizer(bos=False))


def attribute(family, prompt=PROMPT, method="occlusion", **options):
    return noiser.attribute(
        without_start_token(family), prompt, method=method, **{"unit": "token"} | options
    )


def probability(family, prompt, target, removed=(), skip=0):
    """p of a target with rows set to zero, and so many tokens left out at the beginning."""
    lm = without_start_token(family)
    query = query_of(lm, prompt)
    ids = query.token_ids[skip:]
    with lm.running():
        rows = lm.model.get_input_embeddings()(ids).clone()
        for position in removed:
            rows[position] = 0
        logits = lm.model(inputs_embeds=rows[None], use_cache=False).logits[0, -1]
    return float(logits.double().softmax(-1)[target])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_word_is_scored_by_its_other_tokens(family):
    prompt = "foxes sing now"
    att = attribute(family, prompt, unit="word", target_unit="token")
    first = att.units[0].token_indices
    assert first[0] == 0
    assert len(first) > 1
    target = att.targets[0].token_id
    whole = probability(family, prompt, target)
    others = probability(family, prompt, target, first[1:])
    assert float(att.scores[0, 0]) == pytest.approx(whole - others, abs=1e-5)
    assert att.info["first_token"] == "kept"
    assert "is the first token" not in str(att)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_unit_that_is_only_the_first_token_is_scored_by_deleting_it(family):
    att = attribute(family, unit="token")
    assert att.units[0].token_indices == (0,)
    target = att.targets[0].token_id
    expected = probability(family, PROMPT, target) - probability(family, PROMPT, target, skip=1)
    assert float(att.scores[0, 0]) == pytest.approx(expected, abs=1e-5)
    assert att.info["first_token"] == "deleted"
    assert "its own score is the effect of deleting it" in str(att).replace("\n  ", " ")


@pytest.mark.parametrize("method", ["occlusion", "joint"])
def test_the_deletion_of_the_first_token_runs_beside_the_other_inputs(method):
    """One pass reads the prompt, and one all inputs, as for a model with a start token."""
    passes = []
    for lm in (without_start_token("llama"), noiser.wrap(tiny_model("llama"), tiny_tokenizer())):
        noiser.attribute(lm, PROMPT, method=method, unit="token")  # settles what the model can do
        count = []
        handle = lm.model.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        noiser.attribute(lm, PROMPT, method=method, unit="token")
        handle.remove()
        passes.append(len(count))
    assert passes[0] == passes[1]


# Attention to single tokens of a prompt is not scored.
TOKEN_METHODS = [name for name in METHODS.names() if name != "attention_gradient"]


@pytest.mark.parametrize("name", TOKEN_METHODS)
def test_every_method_deletes_a_lone_first_token_or_gives_it_no_score(name):
    method = make_method(name, **SMALL.get(name, {}))
    att = attribute("llama", method=method, unit="token")
    if getattr(method, "needs_internals", False) or name.startswith("noiser"):
        assert att.scores[0, 0].isnan()
        assert "is the first token of the input" in att.to_markdown()
    assert not att.scores[0, 1:].isnan().any()
    aggregated = att.aggregate([(0, len(att.text[: att.prompt_length]))])
    assert not aggregated.scores.isnan().any()  # the rest of a word is its score
    if name in REMOVING:
        assert not att.scores[0, 0].isnan()
        again = attribute("llama", method=method, special_tokens="perturbed", unit="token")
        assert again.info["first_token"] == "disturbed"


def test_what_the_first_token_holds_reaches_no_other_score():
    """The rows that are not the first token's are moved; the first one's own row never is."""
    lm = without_start_token("llama")
    query = query_of(lm, PROMPT)
    moved = set()
    for removal in ("zero", "noise", "hidden", "delete"):
        way = remover(query, removal, torch.Generator())
        game = LiveGame(query, "logprob", way)
        changed = set().union(*(set(positions) for positions in way.positions(query)))
        assert (0 in changed) == (removal == "delete")
        assert bool(game.mask[0, 0]) == (removal == "delete")
        moved |= changed
    assert moved == set(range(len(query.token_ids)))
    game = LiveGame(query, "logprob", remover(query, "zero"))
    nothing = torch.zeros(1, len(query.units), dtype=torch.bool)
    found = float(run_one(lm, game(nothing)))
    rest = range(1, len(query.token_ids))
    expected = math.log(float(predict(lm, query, len(query.token_ids) - 1, rest)[query.target_ids]))
    assert found == pytest.approx(expected, abs=1e-4)


def test_hidden_sources_keep_the_first_token_in_sight():
    lm = without_start_token("llama")
    sources = ["The quick fox sings.", "A dog sleeps now."]
    prompt = noiser.place_sources("Who sings? The", sources)
    asked = {"sources": sources, "unit": "source", "continuation_units": False}
    method = noiser.Occlusion(objective="logprob", removal="hidden")
    att = noiser.attribute(lm, prompt, method=method, **{"unit": "token"} | asked)
    query = query_of(lm, prompt, **asked)
    read = query.objective("logprob")
    positions = att.units[0].token_indices
    assert positions[0] == 0
    (value,) = run_one(lm, answered(Predict(query, [hide(positions[1:])], read)))
    expected = float(query.read_clean(read)[0] - value[0, 0])
    assert float(att.scores[0, 0]) == pytest.approx(expected, abs=1e-5)


async def answered(request):
    return await request


def test_metrics_neither_remove_nor_mask_the_first_token():
    """A metric has the same numbers whatever score the first token is given."""
    lm = without_start_token("llama")
    att = attribute("llama", "The quick fox sings now", unit="token")
    for name in ("lds", "erasure", "erasure_curves", "top_k", "mass_matched", "soft_scores"):
        found = []
        for first in (-5.0, 5.0):
            scores = att.scores.clone()
            scores[0, 0] = first
            other = with_scores(att, scores)
            found.append(columns(lm, case_of(lm, other, masks=8, draws=2), name))
        assert found[0] == found[1], name


def test_a_saved_attribution_is_measured_in_the_way_that_it_was_made(tmp_path):
    lm = without_start_token("llama")
    for special in ("frozen", "perturbed"):
        att = attribute("llama", special_tokens=special, unit="token")
        path = tmp_path / f"{special}.json"
        att.save(path)
        query = run_one(lm, noiser.explain.restore(lm, noiser.Attribution.load(path)))
        assert query.sink == (0 if special == "frozen" else None)


def test_a_prompt_of_one_token_is_refused():
    with pytest.raises(UnitError, match=r"'a', the first token of the input, is the only unit"):
        attribute("llama", "a", unit="token")
    assert (
        not attribute("llama", "a", special_tokens="perturbed", unit="token").scores.isnan().any()
    )
