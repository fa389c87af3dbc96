import copy
import itertools
import math

import pytest
import torch

import noiser
from methods_for_tests import asked, predict
from noiser.errors import ParameterError
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings in the rain"


def with_special_tokens(family, **tokens):
    """The tiny tokenizer with names for tokens that it has, such as pad_token="</s>"."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    for name, token in tokens.items():
        setattr(tokenizer, name, token)
    return noiser.wrap(tiny(family).model, tokenizer)


def drop(clean, changed, target, score, foil=None):
    if score == "hellinger":
        return math.sqrt(max(0.0, 1 - float((clean * changed).sqrt().sum())))
    value = (lambda p: math.log(p)) if score == "logprob" else float
    found = value(clean[target]) - value(changed[target])
    return found if foil is None else found - value(clean[foil]) + value(changed[foil])


def assert_whole_sequences_say_so(lm, att, score="prob", foil=None, baseline=None):
    query = asked(lm, att)
    for g, target in enumerate(att.targets):
        row = query.logit_positions[g]
        clean = predict(lm, query, row)
        for u, unit in enumerate(att.units):
            if unit.token_indices[-1] > row:
                assert att.scores[g, u].isnan()
                continue
            changed = predict(lm, query, row, unit.token_indices, baseline)
            expected = drop(clean, changed, target.token_id, score, foil)
            assert float(att.scores[g, u]) == pytest.approx(expected, abs=3e-4 if score == "hellinger" else 2e-5)


@pytest.mark.parametrize(
    ("family", "score"), [*zip(FAMILIES, itertools.cycle(["prob", "logprob", "hellinger"]), strict=False)]
)
def test_equals_whole_sequences_in_every_family(family, score):
    att = noiser.attribute(tiny(family), PROMPT, method=noiser.Occlusion(score=score), max_new_tokens=2)
    assert_whole_sequences_say_so(tiny(family), att, score)


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_a_foil_is_contrasted(score):
    att = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Occlusion(score=score), foil=77)
    assert_whole_sequences_say_so(tiny("llama"), att, score, foil=77)
    assert (att.scores < 0).any()
    assert (att.scores > 0).any()


def test_all_tokens_of_a_unit_are_replaced_together():
    att = noiser.attribute(tiny("qwen2"), PROMPT, method="occlusion", unit="word")
    assert max(len(unit.token_indices) for unit in att.units) > 1
    assert_whole_sequences_say_so(tiny("qwen2"), att)


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "granite"])
def test_baselines_are_rows_of_the_table(family):
    lm = with_special_tokens(family, pad_token="</s>", unk_token="a")
    table = lm.model.get_input_embeddings().weight.detach()
    expected = {
        "zero": torch.zeros(table.shape[1]),
        "pad": table[lm.tokenizer.pad_token_id],
        "unk": table[lm.tokenizer.unk_token_id],
        "mean": table[: len(lm.tokenizer)].mean(0),
    }
    for name, row in expected.items():
        torch.testing.assert_close(lm.baseline_row(name), row, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["pad", "unk", "mean"])
def test_occlusion_puts_the_baseline_where_the_unit_was(name):
    lm = with_special_tokens("gemma3", pad_token="</s>", unk_token="a")
    att = noiser.attribute(lm, PROMPT, method=noiser.Occlusion(baseline=name))
    assert_whole_sequences_say_so(lm, att, baseline=lm.baseline_row(name))


def test_the_mean_leaves_out_rows_that_belong_to_no_token():
    model = tiny_model("llama").eval()
    model.resize_token_embeddings(400, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[len(tiny_tokenizer()) :] = 1e6
    assert noiser.wrap(model, tiny_tokenizer()).baseline_row("mean").abs().max() < 1


def test_a_baseline_that_the_tokenizer_lacks():
    message = "baseline='pad' asks for the tokenizer's pad_token, which it does not have. Use baseline='zero'"
    with pytest.raises(ParameterError, match=message):
        noiser.attribute(tiny("llama"), PROMPT, method=noiser.Occlusion(baseline="pad"))
    beyond = with_special_tokens("llama", unk_token="<unk>")
    beyond.tokenizer.add_tokens([f"<extra{i}>" for i in range(400 - len(beyond.tokenizer))] + ["<late>"])
    beyond.tokenizer.unk_token = "<late>"
    with pytest.raises(ParameterError, match=r"unk_token, whose id 4\d\d the embedding table does not have"):
        beyond.baseline_row("unk")


def test_random_scores_are_the_softmax_of_uniform_numbers():
    att = noiser.attribute(tiny("llama"), PROMPT, method="random", max_new_tokens=3, seed=4)
    numbers = torch.Generator().manual_seed(4)
    for row in att.scores:
        seen = row[~row.isnan()]
        torch.testing.assert_close(seen, torch.rand(len(seen), generator=numbers).softmax(0))
