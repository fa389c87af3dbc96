"""The study of why Noiser at `k_min` trails, and the tables of it in docs/reproduction/index.md."""

import json

import pytest
import torch

import explanations
import noiser
from noiser.model import build_query
from pages import ROOT
from tiny import tiny_model, tiny_tokenizer

PROMPT = "the quick brown fox jumps over the"


@pytest.fixture
def lm():
    return noiser.wrap(tiny_model("llama"), tiny_tokenizer())


def test_small_noise_is_its_first_order(lm):
    query = build_query(lm, PROMPT)
    rows = explanations.small_noise(lm, query, PROMPT, k=1e-3)
    assert rows["first_order"][0] > 0.999
    assert min(rows["first_order"][:2]) > rows["first_order"][-1] - 1e-3


def test_the_gradient_is_that_of_finite_differences(lm):
    query = build_query(lm, PROMPT)
    rows, index = explanations.token_rows(lm, query), query.units[2].token_indices[0]
    gradient = explanations.gradient(lm, query)[2]
    direction = gradient / gradient.norm()  # the steepest

    def probability(step):
        moved = rows.clone()
        moved[index] += step * direction
        with torch.no_grad():
            logits = lm.logits((moved * lm.embedding_scale)[None], positions=query.logit_positions)
        return float(logits[0, 0].double().softmax(-1)[query.target_ids[0]])

    slope = (probability(2e-3) - probability(-2e-3)) / 4e-3
    assert float(gradient.norm()) == pytest.approx(slope, rel=1e-2)
    across = torch.randn(lm.embedding_dim, generator=torch.Generator().manual_seed(0))
    direction = across - (across @ direction) * direction
    assert abs(probability(2e-3) - probability(-2e-3)) / 4e-3 < 0.05 * slope * float(direction.norm())


def test_one_k_and_noise_by_norm_are_one_where_all_norms_are_equal(lm):
    with torch.no_grad():
        table = lm.model.get_input_embeddings().weight
        table /= table.norm(dim=-1, keepdim=True)
    query = build_query(lm, PROMPT)
    norms = explanations.token_rows(lm, query)[[unit.token_indices[0] for unit in query.units]].norm(dim=-1)
    ways = explanations.ways(0.1, norms, lm.embedding_dim)
    for size in ("k_min", "r = 2"):
        one, by_norm = (
            noiser.attribute(lm, PROMPT, method=ways[f"{size}, {shape}, prob"]).scores for shape in ("one k", "by norm")
        )
        assert torch.allclose(one, by_norm, atol=1e-6)


def test_the_tables_are_those_of_the_rows():
    lines = (ROOT / "benchmarks/results/explanations.jsonl").read_text(encoding="utf-8").splitlines()
    page = (ROOT / "docs/reproduction/index.md").read_text(encoding="utf-8")
    assert explanations.tables([json.loads(line) for line in lines]) in page
