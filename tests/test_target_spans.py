"""Targets of several tokens, against plain runs of the model: one pass per changed sequence, sums in float64."""

from __future__ import annotations

import copy

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.engine import SCORES, Ask, ask, replace
from noiser.errors import UnitError, UnknownNameError
from noiser.methods import METHODS
from test_contract import MAY_REFUSE, run
from tiny import tiny

PROMPT, ANSWER = "The quick fox sings", " near the river. Trains run late"
SPANS = [(0, 9), (16, 23)]  # " near the", and " Trains" after a gap


def spans_of(lm, **options):
    return query_of(lm, PROMPT, **({"target": ANSWER, "target_unit": SPANS} | options))


class Plain:
    """The model in float64, read at the tokens of the answer."""

    def __init__(self, lm, query):
        self.model = copy.deepcopy(lm.model).double()
        prompt = lm.tokenizer(PROMPT)["input_ids"]
        answer = lm.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
        self.first = len(prompt)
        self.ids = torch.tensor(prompt + answer)
        self.spans = [[position + 1 for position in rows] for rows in query.target_rows]
        with torch.no_grad():
            self.rows = self.model.get_input_embeddings()(self.ids)

    def log_probabilities(self, rows):
        return self.model(inputs_embeds=rows[None]).logits[0].log_softmax(-1)

    def of_span(self, rows, g):
        """log p of a span's tokens."""
        span = self.spans[g]
        return self.log_probabilities(rows)[[p - 1 for p in span], self.ids[span]]

    def without(self, positions):
        rows = self.rows.clone()
        rows[list(positions)] = 0
        return rows

    def distance(self, rows, g):
        before = [p - 1 for p in self.spans[g]]
        p, q = (self.log_probabilities(each)[before].exp() for each in (self.rows, rows))
        return ((p.sqrt() - q.sqrt()).square().sum(-1) / 2).mean().sqrt()


FUNCTIONS = {
    "prob": lambda plain, rows, g: plain.of_span(rows, g).mean().exp(),
    "logprob": lambda plain, rows, g: plain.of_span(rows, g).sum(),
    "hellinger": lambda plain, rows, g: -plain.distance(rows, g),
}


# ---- which tokens ----------------------------------------------------------------------------------------------------


def test_words_sentences_and_spans_group_the_tokens_of_the_target():
    lm = tiny("llama")
    texts = {unit: spans_of(lm, target_unit=unit).target_texts for unit in ("token", "word", "sentence", "all")}
    assert texts["word"] == (" near", " the", " river", ".", " Trains", " run", " late")
    assert texts["sentence"] == (" near the river.", " Trains run late")
    assert texts["all"] == (ANSWER,)
    assert {"".join(parts) for parts in texts.values()} == {ANSWER}
    assert spans_of(lm).target_texts == (" near the", " Trains")


def test_a_unit_counts_for_a_span_if_it_stands_before_all_of_it():
    lm = tiny("llama")
    query = spans_of(lm, target_unit="sentence", unit="word")
    seen = {unit.text: column for unit, column in zip(query.units, query.causal_mask.T.tolist(), strict=True)}
    assert seen[" sings"] == [True, True]
    assert seen[" near"] == seen["."] == [False, True]
    assert " Trains" not in seen  # before no target
    att = noiser.attribute(lm, PROMPT, target=ANSWER, method="occlusion", target_unit="all")
    assert "".join(unit.text for unit in att.units) == PROMPT


@torch.no_grad()
def test_the_record_says_what_a_span_is():
    lm = tiny("llama")
    att = noiser.attribute(lm, PROMPT, target=ANSWER, method="occlusion", target_unit=SPANS)
    plain = Plain(lm, spans_of(lm))
    assert [target.text for target in att.targets] == [" near the", " Trains"]
    continuation = [token for target in att.targets for token in (*target.before, *target.token_ids)]
    assert continuation == plain.ids[plain.first : plain.spans[-1][-1] + 1].tolist()
    for g, target in enumerate(att.targets):
        assert target.probability == pytest.approx(float(plain.of_span(plain.rows, g).mean().exp()), rel=1e-4)
        p = plain.log_probabilities(plain.rows)[[i - 1 for i in plain.spans[g]]]
        ranks = 1 + (p > p.gather(1, plain.ids[plain.spans[g], None])).sum(-1)
        assert target.rank == int(ranks.max())


@pytest.mark.parametrize(
    ("unit", "error", "message"),
    [
        ([(0, 3)], UnitError, r"\(0, 3\), ' ne', cuts the token .*expected whole tokens"),
        ([(0, 5), (3, 9)], UnitError, "overlap"),
        ([(3, 3)], UnitError, "is empty"),
        ([(0, 99)], UnitError, "leaves the continuation"),
        ([], UnitError, r"target_unit is \[\]; expected"),
        ("sentences", UnknownNameError, "Did you mean 'sentence'"),
    ],
)
def test_bad_target_units(unit, error, message, unchecked):
    with pytest.raises(error, match=message):
        spans_of(tiny("llama"), target_unit=unit)


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", FUNCTIONS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_occlusion(family, score):
    lm = tiny(family)
    query = spans_of(lm)
    plain = Plain(lm, query)
    att = noiser.attribute(lm, PROMPT, target=ANSWER, method=noiser.Occlusion(score=score), target_unit=SPANS)
    with torch.no_grad():
        for g, row in enumerate(att.scores.double()):
            rest = FUNCTIONS[score](plain, plain.rows, g)
            for unit, found in zip(att.units, row, strict=True):
                if unit.token_indices[-1] >= plain.spans[g][0]:
                    assert found.isnan()
                else:
                    expected = rest - FUNCTIONS[score](plain, plain.without(unit.token_indices), g)
                    assert float(found) == pytest.approx(float(expected), rel=1e-3, abs=2e-5)


@pytest.mark.parametrize("value", ["prob", "logprob", "logit", "hellinger", "squared"])
def test_values_under_a_perturbation(value):
    lm = tiny("gpt2")
    query = spans_of(lm)
    plain = Plain(lm, query)
    positions = (2, 3)
    zeros = torch.zeros(query.embedding_dim)
    found = ask(lm, Ask(query, [replace(positions, zeros), replace(positions, zeros, (1,))], SCORES[value]))
    rows = plain.without(positions)
    for g in range(2):
        with torch.no_grad():
            logp = plain.of_span(rows, g)
            expected = {
                "prob": logp.mean().exp(),
                "logprob": logp.sum(),
                "logit": logp.sum() - torch.log1p(-logp.sum().exp()),
                "hellinger": -plain.distance(rows, g),
                "squared": -(plain.distance(rows, g) ** 2) * 2**0.5,
            }[value]
        assert float(found[0][g]) == pytest.approx(float(expected), rel=1e-4)
    torch.testing.assert_close(found[1][0], found[0][1])


@pytest.mark.parametrize("score", FUNCTIONS)
def test_noise_and_its_standard_errors(score):
    """By the delta method: each sample's part in the derivative of the score by the samples' weights."""
    lm = tiny("llama")
    query = spans_of(lm)
    plain = Plain(lm, query)
    noise = torch.randn(4, query.embedding_dim, generator=torch.Generator().manual_seed(1))
    method = noiser.Noiser(noise=noise, bounding=0.2, score=score)
    att = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit=SPANS)
    unit = next(i for i, unit in enumerate(att.units) if len(unit.token_indices) == 1)
    position = att.units[unit].token_indices[0]
    samples = []
    for vector in noise.double():
        rows = plain.rows.clone()
        rows[position] += 0.2 * vector
        with torch.no_grad():
            samples.append(plain.log_probabilities(rows).exp())
    weights = torch.full((4,), 0.25, dtype=torch.float64, requires_grad=True)
    for g in range(2):
        before = [p - 1 for p in plain.spans[g]]
        mean = torch.einsum("s,spv->pv", weights, torch.stack(samples))[before]
        logs = mean.gather(1, plain.ids[plain.spans[g], None]).log()
        with torch.no_grad():
            p = plain.log_probabilities(plain.rows)[before].exp()
        distance = ((p.sqrt() - mean.sqrt()).square().sum(-1) / 2).mean().sqrt()
        value = {"prob": logs.mean().exp(), "logprob": logs.sum(), "hellinger": -distance}[score]
        rest = FUNCTIONS[score](plain, plain.rows, g) if score != "hellinger" else 0
        assert float(att.scores[g, unit]) == pytest.approx(float((rest - value).detach()), rel=1e-3, abs=1e-5)
        (influence,) = torch.autograd.grad(value, weights)
        assert float(att.stderr[g, unit]) == pytest.approx(float(influence.std() / 2), rel=1e-3)


def test_a_span_flips_when_any_of_its_tokens_does():
    lm, ks = tiny("llama"), [0.01, 0.03, 0.1, 0.2, 0.5, 1.0]
    tokens, span = (
        noiser.attribute(lm, PROMPT, method="random", max_new_tokens=3, target_unit=unit, continuation_units=False)
        for unit in ("token", "all")
    )
    each, whole = (torch.stack([noiser.tolerance(lm, a, u, ks).flips for u in range(5)]) for a in (tokens, span))
    assert torch.equal(whole[:, 0], each.any(1))
    assert (whole[:, 0] != each[:, 0]).any()


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_gradients_take_one_backward_pass_per_span(score):
    lm = tiny("llama")
    plain = Plain(lm, spans_of(lm))
    method = noiser.InputXGradient(reduce="sum", score=score)
    att = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit=SPANS)
    assert att.info["passes"] == 1 + len(SPANS)
    for g, row in enumerate(att.scores):
        rows = plain.rows.clone().requires_grad_()
        FUNCTIONS[score](plain, rows, g).backward()
        products = (rows * rows.grad).sum(-1).detach()
        for unit, found in zip(att.units, row, strict=True):
            if not found.isnan():
                expected = float(products[list(unit.token_indices)].sum())
                assert float(found) == pytest.approx(expected, rel=2e-3, abs=1e-5)


def test_paths_move_what_stands_before_a_span_and_leave_its_own_tokens():
    lm = tiny("llama")
    plain = Plain(lm, spans_of(lm))
    ours = noiser.IntegratedGradients(n_steps=3, score="logprob")
    nodes, weights = noiser.methods.gradients.gauss_legendre(3)
    results = {
        name: noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit=SPANS)
        for name, method in (("ig", ours), ("deeplift", noiser.DeepLift(score="logprob")))
    }
    for g, span in enumerate(plain.spans):
        moved = [i for i in range(1, len(plain.ids)) if i not in span]
        start = plain.without(moved)
        with torch.no_grad():
            ends = [FUNCTIONS["logprob"](plain, rows, g) for rows in (plain.rows, start)]
        total = torch.zeros(len(plain.ids), dtype=torch.float64)
        for alpha, weight in zip(nodes, weights, strict=True):
            rows = (start + alpha * (plain.rows - start)).requires_grad_()
            FUNCTIONS["logprob"](plain, rows, g).backward()
            total += weight * ((plain.rows - start) * rows.grad).sum(-1)
        for unit, found in zip(results["ig"].units, results["ig"].scores[g], strict=True):
            if not found.isnan():
                expected = float(total[list(unit.token_indices)].sum())
                assert float(found) == pytest.approx(expected, rel=5e-3, abs=1e-4)
        for att in results.values():
            assert att.info["difference"][g] == pytest.approx(float(ends[0] - ends[1]), rel=1e-3)


def test_relevance_of_a_span_is_that_of_its_tokens_together():
    lm = tiny("llama")
    asked = {"method": "attn_lrp", "continuation_units": False}
    tokens = noiser.attribute(lm, PROMPT, target=ANSWER, target_unit="token", **asked)
    span = noiser.attribute(lm, PROMPT, target=ANSWER, method="attn_lrp", target_unit="all")
    torch.testing.assert_close(span.scores[0], tokens.scores.sum(0), rtol=1e-3, atol=1e-3)
    assert span.info["passes"] == 2
    assert len(tokens.targets) > 5


@pytest.mark.parametrize("method", ["last_attention", "attention_rollout"])
def test_attention_of_a_span_is_the_mean_over_its_tokens(method):
    lm = tiny("llama")
    tokens = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit="token", continuation_units=False)
    span = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit="all")
    torch.testing.assert_close(span.scores[0], tokens.scores.mean(0))


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_scores_spans_each_as_if_it_were_alone(name):
    lm = tiny("gemma3")
    both = run(lm, name, target=ANSWER, target_unit=SPANS, unit="word")
    first = run(lm, name, target=ANSWER, target_unit=SPANS[:1], unit="word")
    assert both.scores.shape == (2, len(both.units))
    assert torch.equal(both.scores.isfinite(), spans_of(lm, unit="word").causal_mask)
    units = len(first.units)
    torch.testing.assert_close(both.scores[0, :units], first.scores[0], rtol=2e-3, atol=2e-5)
    token = run(lm, name, target=5)
    alone = run(lm, name, target=5, target_unit="all")
    assert torch.equal(alone.scores, token.scores)
    if (name, "mamba") not in MAY_REFUSE:
        assert run(tiny("mamba"), name, target=ANSWER, target_unit="sentence").scores[0, 0].isfinite()
