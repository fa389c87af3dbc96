"""Flow against a slow computation that makes every moved vector of every head, layer and pair of positions."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import noiser
from engine_for_tests import query_of
from noiser.errors import ParameterError, UnsupportedModelError
from noiser.methods import AttentionGradient, Flow
from noiser.methods.flow import hopped, through_layers
from tiny import FAMILIES, tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings by the river"
SOURCES = ["The quick fox sings by the river.", "A dog sleeps near the old bank."]

PARTS = {  # the layers, attention and its projection, the norm after it, and the factor on what it adds
    "gpt2": ("transformer.h", "attn", "c_proj", None, 1.0),
    "opt": ("model.decoder.layers", "self_attn", "out_proj", None, 1.0),
    "gemma2": ("model.layers", "self_attn", "o_proj", "post_attention_layernorm", 1.0),
    "gemma3": ("model.layers", "self_attn", "o_proj", "post_attention_layernorm", 1.0),
    "olmo2": ("model.layers", "self_attn", "o_proj", "post_attention_layernorm", 1.0),
    "granite": ("model.layers", "self_attn", "o_proj", None, 0.22),
}
USUAL = ("model.layers", "self_attn", "o_proj", None, 1.0)
FOLLOWED = [family for family in FAMILIES if family not in ("mamba", "falcon")]


def model_of(family):
    model = tiny_model(family)
    if family == "granite":
        model.config.residual_multiplier = 0.22
        for layer in model.model.layers:
            layer.residual_multiplier = 0.22
    return model.eval()


def edges(model, family, ids):
    """[layers, length, length] from a float64 model with eager attention, vector by vector."""
    names = PARTS.get(family, USUAL)
    with torch.random.fork_rng():
        own = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    own.load_state_dict(model.state_dict())
    own = own.double().eval()
    cache = transformers.DynamicCache()  # keeps what is outside of a window
    with torch.no_grad():
        out = own(input_ids=ids[None], past_key_values=cache, output_attentions=True, output_hidden_states=True)
        found = []
        for layer, weights, x, kept in zip(
            own.get_submodule(names[0]), out.attentions, out.hidden_states, cache.layers, strict=False
        ):
            project = layer.get_submodule(names[1]).get_submodule(names[2])
            heads, length = weights.shape[1:3]
            values = kept.values[0].repeat_interleave(heads // kept.values.shape[1], 0)
            size = values.shape[-1]
            mixed = torch.einsum("hij,hje->ihe", weights[0], values).flatten(1)
            attended = project(mixed)
            gain = torch.ones_like(attended)
            if names[3]:
                gain = layer.get_submodule(names[3])(attended) / attended
            matrix = project(torch.eye(heads * size, dtype=torch.float64)) - project(
                torch.zeros(1, heads * size).double()
            )
            table = torch.zeros(length, length, dtype=torch.float64)
            for i in range(length):
                y = x[0, i] + names[4] * gain[i] * attended[i]
                for j in range(i + 1):
                    for h in range(heads):
                        vector = weights[0, h, i, j] * values[h, j] @ matrix[h * size : (h + 1) * size]
                        table[i, j] += max(0, float(names[4] * gain[i] * vector @ y / (y @ y)))
                table[i, i] += max(0, float(x[0, i] @ y / (y @ y)))
            found.append(table / table.sum(-1, keepdim=True))
    return torch.stack(found)


def by_hand(tables, row, first):
    """The weight of all paths from a row, one step after the other; a path ends before `first`."""
    at = {row: 1.0}
    for table in reversed(tables):
        after = {}
        for i, weight in at.items():
            steps = {i: 1.0} if i < first else {j: float(share) for j, share in enumerate(table[i])}
            for j, share in steps.items():
                after[j] = after.get(j, 0.0) + weight * share
        at = after
    return torch.tensor([at.get(j, 0.0) for j in range(tables.shape[-1])], dtype=torch.float64)


@pytest.mark.parametrize("family", FOLLOWED)
def test_equals_the_slow_computation(family):
    model = model_of(family)
    lm = noiser.wrap(model, tiny_tokenizer())
    query = query_of(lm, PROMPT, max_new_tokens=3)
    tables = edges(model, family, query.token_ids)
    first = query.prompt_tokens - 1
    att = noiser.attribute(lm, PROMPT, method=Flow(hops=0), max_new_tokens=3)
    for g, row in enumerate(query.logit_positions):
        expected = by_hand(tables, row, first)
        for u, unit in enumerate(query.units):
            if query.causal_mask[g, u]:
                torch.testing.assert_close(
                    float(att.scores[g, u]), float(expected[list(unit.token_indices)].sum()), atol=1e-5, rtol=1e-3
                )
    assert att.info["token_forwards"] == (len(query.token_ids) - first if lm.abilities.packs else len(query.token_ids))


@pytest.mark.parametrize("family", ["mamba", "falcon"])
def test_models_whose_attention_is_their_own_say_so(family):
    with pytest.raises(UnsupportedModelError, match=r"ForCausalLM has no attention that runs through.*'occlusion'"):
        noiser.attribute(tiny(family), PROMPT, method="flow")


def test_a_foil_is_refused():
    with pytest.raises(ParameterError, match="leave out the foil"):
        noiser.attribute(tiny("llama"), PROMPT, method="flow", foil=" dog")


def test_paths_of_two_layers_by_hand():
    lower = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.25, 0.5]])  # of rows 1 and 2; row 0 is not followed
    upper = torch.tensor([[0.2, 0.8, 0.0], [0.1, 0.6, 0.3]])
    # row 2: .1 ends at 0; .6 goes to row 1, then halves; .3 goes to row 2, then by quarters and a half
    expected = torch.tensor([[0.2 + 0.4, 0.4, 0.0], [0.1 + 0.3 + 0.075, 0.3 + 0.075, 0.15]])
    torch.testing.assert_close(through_layers([lower, upper], 1), expected)


def test_a_hop_passes_on_what_arrives_at_the_answers_own_tokens():
    paths = torch.tensor([[0.7, 0.3, 0.0, 0.0], [0.2, 0.2, 0.6, 0.0], [0.1, 0.1, 0.5, 0.3]])  # of rows 1 to 3
    # a prompt of two tokens: what arrives at token 2 was written from row 1, what arrives at token 3 from row 2
    one = paths[2, :2] + 0.5 * paths[0, :2] + 0.3 * paths[1, :2]
    two = one + 0.3 * 0.6 * paths[0, :2]
    torch.testing.assert_close(hopped(paths, 1, 2, 0), paths)
    torch.testing.assert_close(hopped(paths, 1, 2, 1)[2], torch.cat([one, torch.tensor([0.3 * 0.6, 0.0])]))
    torch.testing.assert_close(hopped(paths, 1, 2, 5)[2], torch.cat([two, torch.zeros(2)]))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_only_question_and_answer_run_and_question_tokens_are_followed(family):
    model = model_of(family)
    lm = noiser.wrap(model, tiny_tokenizer())
    asked = {
        "prompt": " ".join(
            [*SOURCES, "Who sings? The"],
        ),
        "unit": "source",
        "sources": SOURCES,
        "max_new_tokens": 4,
        "target_unit": "all",
        "continuation_units": False,
    }
    query = query_of(lm, **asked)
    tables = edges(model, family, query.token_ids)
    assert 0 < query.sources_stop < query.prompt_tokens - 1
    rows = torch.stack([by_hand(tables, row, query.sources_stop) for row in query.logit_positions])
    expected = rows.mean(0)
    att = noiser.attribute(lm, method=Flow(hops=0), **asked)
    for u, unit in enumerate(query.units):
        torch.testing.assert_close(
            float(att.scores[0, u]), float(expected[list(unit.token_indices)].sum()), atol=1e-5, rtol=1e-3
        )
    assert att.info["token_forwards"] == len(query.token_ids) - query.sources_stop
    many = asked | {"prompt": [PROMPT, asked["prompt"]], "sources": [[PROMPT], SOURCES]}
    torch.testing.assert_close(noiser.attribute(lm, method=Flow(hops=0), **many)[1].scores, att.scores)


def opened(model, query, first, gates):
    """Log-probability of the target, with what rows from `first` on see of each earlier token times its gate."""
    length = len(query.token_ids)
    rows, keys = torch.arange(length)[:, None], torch.arange(length)
    mask = torch.zeros(length, length, dtype=torch.float64).masked_fill(keys > rows, -1e30)
    mask = mask + torch.where((rows >= first) & (keys < rows), gates.log(), 0.0)
    with torch.no_grad():
        logits = model(input_ids=query.token_ids[None], attention_mask=mask[None, None], use_cache=False).logits[0]
    log_p = logits[list(query.logit_positions)].log_softmax(-1)
    return float(log_p[range(len(log_p)), list(query.target_ids)].sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("gate", [0.1, 1.0])
def test_attention_gradient_equals_differences_of_whole_runs(family, gate):
    model = tiny_model(family, spread=0.1).eval()  # of sharper models float32 loses a hundredth of the slopes
    lm = noiser.wrap(model, tiny_tokenizer())
    asked = {"prompt": " ".join([*SOURCES, "Who sings? The"]), "unit": "source", "sources": SOURCES}
    asked |= {"max_new_tokens": 3, "target_unit": "all", "continuation_units": False}
    att = noiser.attribute(lm, method=AttentionGradient(gate=gate), **asked)
    query = query_of(lm, **asked)
    with torch.random.fork_rng():
        own = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    own.load_state_dict(model.state_dict())
    own = own.double().eval()
    inside = [i for unit in query.units for i in unit.token_indices]
    for u, unit in enumerate(query.units):
        values = []
        for step in (gate / 100, -gate / 100):  # smaller ones are lost in norms, which compute in float32
            gates = torch.ones(len(query.token_ids), dtype=torch.float64)
            gates[inside] = gate
            gates[list(unit.token_indices)] += step
            values.append(opened(own, query, query.sources_stop, gates))
        slope = (values[0] - values[1]) / (gate / 50)
        assert float(att.scores[0, u]) == pytest.approx(slope, rel=1e-3, abs=1e-4)
    assert att.info["token_forwards"] == 2 * (len(query.token_ids) - query.sources_stop)
