"""Models whose head is smaller than their table, or that rescale their own weights."""

import copy

import pytest
import torch
import transformers
from torch import nn

import noiser
from noiser.engine import run_one
from noiser.errors import ModelError, ParameterError, TargetError
from noiser.explain import restore
from noiser.model.writing import write
from noiser.text import token_texts
from tiny import SIZES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox"


def with_small_head():
    model = tiny_model("llama").eval()
    weight = model.lm_head.weight.detach().clone()
    model.lm_head = nn.Linear(32, 300, bias=False)
    model.lm_head.weight = nn.Parameter(weight[:300])
    return model


@pytest.mark.parametrize("method", ["occlusion", "input_x_gradient", "noiser", "random"])
def test_a_target_that_the_head_cannot_predict(method):
    lm = noiser.wrap(with_small_head(), tiny_tokenizer())
    for question in ({"target": 350}, {"foil": 350}):
        with pytest.raises(
            TargetError, match=r"id 350, which .* reads and cannot predict: .* 300 of"
        ):
            noiser.attribute(lm, PROMPT, method=method, **{"unit": "token"} | question)
    assert (
        noiser.attribute(lm, PROMPT, method=method, target=299, unit="token").targets[0].token_id
        == 299
    )


def test_a_prompt_may_have_tokens_that_the_head_cannot_predict():
    model = with_small_head()
    prompt = next(
        text
        for text in ("The quick river bank", "children sing along", "museums, markets")
        if max(tiny_tokenizer()(text)["input_ids"]) >= 300
    )
    att = noiser.attribute(
        noiser.wrap(model, tiny_tokenizer()), prompt, method="occlusion", unit="token"
    )
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    with torch.no_grad():
        expected = model(ids).logits[0, -1].softmax(-1).max()
    assert att.targets[0].probability == pytest.approx(float(expected), rel=1e-5)


def test_a_token_that_is_predicted_and_cannot_be_read():
    """A table with fewer rows than the head has logits."""
    model = tiny_model("llama").eval()
    model.lm_head = nn.Linear(32, 400, bias=False)
    with torch.no_grad():
        model.lm_head.weight.fill_(0)
        model.lm_head.bias = nn.Parameter(torch.eye(400)[390])
    lm = noiser.wrap(model, tiny_tokenizer())
    with pytest.raises(ModelError, match="predicts token id 390, which it cannot read: its table"):
        noiser.attribute(lm, PROMPT, max_new_tokens=2, unit="token")
    with pytest.raises(ModelError, match="gives no continuation of this prompt"):
        write(lm, lm.encode(PROMPT).token_ids, lambda *_: True, max_new_tokens=2, temperature=0)
    assert noiser.attribute(lm, PROMPT, target=5, method="occlusion").targets[0].token_id == 5


def test_a_result_of_a_model_with_a_larger_head():
    att = noiser.attribute(tiny("llama"), PROMPT, target=350, method="random", unit="token")
    with pytest.raises(ParameterError, match="cannot predict the target id 350"):
        run_one(noiser.wrap(with_small_head(), tiny_tokenizer()), restore(tiny("llama"), att))


def test_the_text_of_a_padded_row_beside_half_a_character():
    tokenizer = tiny_tokenizer()
    half = tokenizer("🦊", add_special_tokens=False)["input_ids"][:1]
    padded = len(tokenizer) + 3
    assert token_texts(tokenizer, [padded, *half]) == ["", "\\xf0"]
    assert token_texts(tokenizer, [*half, padded]) == ["\\xf0", ""]
    model = tiny_model("llama").eval()
    model.resize_token_embeddings(len(tokenizer) + 16)
    lm = noiser.wrap(model, tokenizer)
    with torch.no_grad():  # a padded row is the most probable token
        model.lm_head.weight[padded] = 3 * model.lm_head.weight[:padded].abs().max()
    for target in (None, padded, half[0]):
        noiser.attribute(
            lm, PROMPT + " 🦊", method="random", max_new_tokens=4, target=target, unit="token"
        )


def rwkv():
    sizes = {"attention_hidden_size": 32, "context_length": 64, "num_hidden_layers": 4}
    config = transformers.RwkvConfig(**(SIZES | sizes), rescale_every=2)
    torch.manual_seed(0)
    model = transformers.RwkvForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
    return model


@pytest.mark.parametrize("state", ["training", "evaluation", "has run"])
@pytest.mark.parametrize("method", ["occlusion", "input_x_gradient"])
def test_a_model_that_rescales_its_weights_gets_them_back(state, method):
    model = rwkv().train(state == "training")
    if state == "has run":
        model(torch.tensor([[0, 5]]))
    before = copy.deepcopy(model)
    lm = noiser.wrap(model, tiny_tokenizer())
    att = noiser.attribute(lm, PROMPT, method=method, unit="token")
    read = lm.encode(PROMPT).token_ids
    write(lm, read, lambda *_: True, max_new_tokens=3, temperature=0)
    assert (model.training, model.rwkv.layers_are_rescaled) == (
        before.training,
        before.rwkv.layers_are_rescaled,
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before.state_dict()[name]), name
    with torch.no_grad():
        logits = before.eval()(torch.tensor([read])).logits[0, -1]
    assert att.targets[0].probability == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)
