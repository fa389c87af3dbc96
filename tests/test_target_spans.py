import copy
import math

import pytest
import torch

import noiser
from engine_for_tests import query_of
from noiser.errors import ParameterError
from noiser.methods import METHODS
from noiser.objectives import divergence, entropy, name_of
from test_contract import run
from tiny import tiny

PROMPT, ANSWER = "The quick fox sings", " near the river. Trains run late"
SPANS = [(0, 9), (16, 23)]  # " near the", and " Trains" after a gap


def spans_of(lm, **options):
    return query_of(lm, PROMPT, **({"target": ANSWER, "target_unit": SPANS} | options))


def read(kind, log_p, clean, ids):
    """A score by name, or a caller's number, from log-probabilities [tokens, vocab] under a change and without one."""
    if callable(kind):
        return kind(log_p[None], clean)[0]
    own = log_p.gather(1, ids[:, None])[:, 0]
    distance = ((log_p / 2).exp() - (clean / 2).exp()).square().sum(-1).mean()
    return {"prob": own.mean().exp(), "logprob": own.sum(), "hellinger": -(distance / 2).sqrt()}[kind]


def log_p_of_5(log_p, clean):
    return log_p[:, 0, 5]


NUMBERS = ["prob", "logprob", "hellinger", entropy, divergence, log_p_of_5]
"""What is explained: scores by name, and the caller's own numbers."""


def asked(kind, method):
    question = {"target": ANSWER, "target_unit": SPANS}
    return question | ({"of": kind, "method": method()} if callable(kind) else {"method": method(score=kind)})


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
            self.clean = [self.log_p(self.rows, g) for g in range(len(self.spans))]

    def log_p(self, rows, g):
        """Log-probabilities [tokens, vocab] at a span's tokens."""
        return self.model(inputs_embeds=rows[None]).logits[0].log_softmax(-1)[[p - 1 for p in self.spans[g]]]

    def value(self, kind, rows, g):
        return read(kind, self.log_p(rows, g), self.clean[g], self.ids[self.spans[g]])

    def without(self, positions):
        rows = self.rows.clone()
        rows[list(positions)] = 0
        return rows


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
        p, ids = plain.clean[g], plain.ids[plain.spans[g]]
        assert target.probability == pytest.approx(float(read("prob", p, p, ids)), rel=1e-4)
        assert target.rank == int((1 + (p > p.gather(1, ids[:, None])).sum(-1)).max())


@pytest.mark.parametrize(
    ("family", "kind"), [*(("llama", kind) for kind in NUMBERS), ("gemma3", "prob"), ("mamba", "logprob")]
)
@torch.no_grad()
def test_occlusion(family, kind):
    lm = tiny(family)
    plain = Plain(lm, spans_of(lm))
    att = noiser.attribute(lm, PROMPT, **asked(kind, noiser.Occlusion))
    assert att.info.get("of") == (name_of(kind) if callable(kind) else None)
    for g, row in enumerate(att.scores):
        rest = plain.value(kind, plain.rows, g)
        for unit, found in zip(att.units, row, strict=True):
            if unit.token_indices[-1] >= plain.spans[g][0]:
                assert found.isnan()
            else:
                expected = rest - plain.value(kind, plain.without(unit.token_indices), g)
                assert float(found) == pytest.approx(float(expected), rel=1e-3, abs=5e-5)


def test_a_span_flips_when_any_of_its_tokens_does():
    lm, ks = tiny("llama"), [0.01, 0.03, 0.1, 0.2, 0.5, 1.0]
    tokens, span = (
        noiser.attribute(lm, PROMPT, method="random", max_new_tokens=3, target_unit=unit, continuation_units=False)
        for unit in ("token", "all")
    )
    each, whole = (torch.stack([noiser.tolerance(lm, a, u, ks).flips for u in range(5)]) for a in (tokens, span))
    assert torch.equal(whole[:, 0], each.any(1))
    assert (whole[:, 0] != each[:, 0]).any()


@pytest.mark.parametrize(
    ("method", "passes"),
    [(noiser.IntegratedGradients(n_steps=3, score="logprob"), 4), (noiser.DeepLift(score="logprob"), 6)],
)
@torch.no_grad()
def test_paths_move_what_stands_before_a_span_and_leave_its_own_tokens(method, passes):
    """In passes that do not grow with its tokens."""
    lm = tiny("llama")
    plain = Plain(lm, spans_of(lm))
    att = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit=SPANS)
    assert att.info["passes"] == passes
    for g, span in enumerate(plain.spans):
        moved = plain.without([i for i in range(1, len(plain.ids)) if i not in span])
        difference = plain.value("logprob", plain.rows, g) - plain.value("logprob", moved, g)
        assert att.info["difference"][g] == pytest.approx(float(difference), rel=1e-3)
        assert float(att.scores[g].nansum()) + att.info["delta"][g] == pytest.approx(float(difference), rel=1e-3)


@pytest.mark.parametrize("method", ["last_attention", "attention_rollout", "attn_lrp"])
def test_attention_of_a_span_is_the_mean_over_its_tokens_and_relevance_the_sum(method):
    lm = tiny("llama")
    tokens = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit="token", continuation_units=False)
    span = noiser.attribute(lm, PROMPT, target=ANSWER, method=method, target_unit="all")
    expected = tokens.scores.sum(0) if method == "attn_lrp" else tokens.scores.mean(0)
    torch.testing.assert_close(span.scores[0], expected, rtol=1e-3, atol=1e-3 if method == "attn_lrp" else 1e-6)
    assert len(tokens.targets) > 5


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_scores_spans_each_as_if_it_were_alone(name):
    lm = tiny("gemma3")
    both = run(lm, name, target=ANSWER, target_unit=SPANS, unit="word")
    first = run(lm, name, target=ANSWER, target_unit=SPANS[:1], unit="word")
    assert both.scores.shape == (2, len(both.units))
    assert torch.equal(both.scores.isfinite(), spans_of(lm, unit="word").causal_mask)
    units = len(first.units)
    torch.testing.assert_close(both.scores[0, :units], first.scores[0], rtol=2e-3, atol=2e-5)


READS_NO_PREDICTION = {"last_attention", "attention_rollout"}


def log(*rows):
    return torch.tensor(rows).log()


def test_hand_worked_numbers():
    changed = log([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]])  # one sample, two tokens, three words
    clean = log([0.25, 0.5, 0.25], [1 / 3, 1 / 3, 1 / 3])
    assert entropy(changed, clean).item() == pytest.approx((1.5 * math.log(2) + math.log(3)) / 2)
    assert divergence(changed, clean).item() == pytest.approx(-0.25 * math.log(0.5) - 0.5 * math.log(2))


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_answers_or_refuses(name):
    """The log-probability of the target, as a function, gives what the method's own score of that name gives."""
    lm = tiny("llama")
    if name in READS_NO_PREDICTION:
        with pytest.raises(ParameterError, match="Attention weights are the same whatever is explained"):
            run(lm, name, target=5, of=log_p_of_5)
        return
    own = run(lm, name, target=5, of=log_p_of_5)
    assert own.scores.isfinite().all()
    if "score" in own.parameters:
        method = noiser.methods.make_method(own.method, **(dict(own.parameters) | {"score": "logprob"}))
        named = noiser.attribute(lm, PROMPT, method=method, target=5)
        torch.testing.assert_close(own.scores, named.scores, rtol=1e-3, atol=1e-4)
        if named.stderr is not None:
            torch.testing.assert_close(own.stderr, named.stderr, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    ("of", "options", "message"),
    [
        (lambda log_p, clean: log_p.sum(), {}, r"returned shape \[\]; expected a tensor of shape \[1\]"),
        (lambda log_p, clean: [0.0], {}, "returned list; expected a tensor"),
        (lambda log_p, clean: log_p[:, 0, 0] * math.inf, {}, "returned NaN or an infinite number"),
        (lambda log_p, clean: log_p[:, 0].argmax(-1) / 1, {"method": "input_x_gradient"}, "cannot be differentiated"),
    ],
)
def test_functions_that_cannot_be(of, options, message, unchecked):
    with pytest.raises(ParameterError, match=message):
        noiser.attribute(tiny("llama"), PROMPT, **({"target": 5, "method": "occlusion", "of": of} | options))


def test_what_cannot_be_differentiated_has_scores_without_errors():
    def most_probable(log_p, clean):
        return log_p[:, 0].argmax(-1).float()

    att = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Noiser(samples=3, bounding=0.5), of=most_probable)
    assert att.scores.isfinite().all()
    assert att.stderr.isnan().all()
