import math

import pytest
import torch

import noiser
from engine_for_tests import query_of
from methods_for_tests import predict
from noiser.errors import ParameterError
from noiser.methods import METHODS
from noiser.objectives import divergence, entropy, name_of
from test_contract import run, units_of
from tiny import tiny

PROMPT, ANSWER = "The quick fox sings", " near the river. Trains run late"
SPANS = [(0, 9), (16, 23)]  # " near the", and " Trains" after a gap


def spans_of(lm, **options):
    return query_of(lm, PROMPT, **({"target": ANSWER, "target_unit": SPANS} | options))


def read(kind, log_p, clean, ids):
    """A score by name, or a caller's number, from log-probabilities [tokens, vocab] under a change
    and without one.
    """
    if callable(kind):
        return kind(log_p[None], clean)[0]
    own = log_p.gather(1, ids[:, None])[:, 0]
    distance = ((log_p / 2).exp() - (clean / 2).exp()).square().sum(-1).mean()
    return {"prob": own.mean().exp(), "logprob": own.sum(), "hellinger": -(distance / 2).sqrt()}[
        kind
    ]


def log_p_of_5(log_p, clean):
    return log_p[:, 0, 5]


NUMBERS = ["prob", "logprob", "hellinger", entropy, divergence, log_p_of_5]
"""What is explained: scores by name, and the caller's own numbers."""
"""What is explained: scores by name, and the caller's own numbers."""


def log_p(lm, query, g, removed=()):
    """Log-probabilities [tokens, vocab] at a span's tokens, by the model alone, with some
    embeddings at zero.
    """
    positions = query.target_positions[g]
    return torch.stack([predict(lm, query, position, removed) for position in positions]).log()


def value(lm, query, kind, g, removed=()):
    at = dict(zip(query.logit_positions, query.target_ids, strict=True))
    ids = torch.tensor([at[row] for row in query.target_positions[g]])
    return float(read(kind, log_p(lm, query, g, removed), log_p(lm, query, g), ids))


def test_words_sentences_and_spans_group_the_tokens_of_the_target():
    lm = tiny("llama")
    texts = {
        unit: spans_of(lm, target_unit=unit).target_texts
        for unit in ("token", "word", "sentence", "all")
    }
    assert texts["word"] == (" near", " the", " river.", " Trains", " run", " late")
    assert texts["sentence"] == (" near the river.", " Trains run late")
    assert texts["all"] == (ANSWER,)
    assert {"".join(parts) for parts in texts.values()} == {ANSWER}
    assert spans_of(lm).target_texts == (" near the", " Trains")


def test_a_unit_counts_for_a_span_if_it_stands_before_all_of_it():
    lm = tiny("llama")
    query = spans_of(lm, target_unit="sentence", unit="word")
    seen = {
        unit.text: column
        for unit, column in zip(query.units, query.causal_mask.T.tolist(), strict=True)
    }
    assert seen[" sings"] == [True, True]
    assert seen[" near"] == seen[" river."] == [False, True]
    assert " Trains" not in seen  # before no target
    att = noiser.attribute(
        lm, PROMPT, target=ANSWER, method="occlusion", target_unit="all", unit="token"
    )
    assert "".join(unit.text for unit in att.units) == PROMPT


def test_the_record_says_what_a_span_is():
    lm = tiny("llama")
    query, answer = spans_of(lm), lm.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]
    att = noiser.attribute(
        lm, PROMPT, target=ANSWER, method="occlusion", target_unit=SPANS, unit="token"
    )
    assert [target.text for target in att.targets] == [" near the", " Trains"]
    continuation = [
        token for target in att.targets for token in (*target.before, *target.token_ids)
    ]
    assert continuation == answer[: len(continuation)]
    for g, target in enumerate(att.targets):
        p, ids = log_p(lm, query, g), torch.tensor(target.token_ids)
        assert target.probability == pytest.approx(float(read("prob", p, p, ids)), rel=1e-4)
        assert target.rank == int((1 + (p > p.gather(1, ids[:, None])).sum(-1)).max())


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in NUMBERS), ("gemma3", "prob"), ("mamba", "logprob")],
)
def test_occlusion(family, kind):
    lm = tiny(family)
    query, own = spans_of(lm), callable(kind)
    asked = (
        {"of": kind, "method": "occlusion"} if own else {"method": noiser.Occlusion(objective=kind)}
    )
    att = noiser.attribute(
        lm, PROMPT, target=ANSWER, target_unit=SPANS, **{"unit": "token"} | asked
    )
    assert att.info.get("of") == (name_of(kind) if own else None)
    for g, row in enumerate(att.scores):
        rest = value(lm, query, kind, g)
        for unit, found in zip(att.units, row, strict=True):
            if unit.token_indices[-1] > query.target_positions[g][0]:
                assert found.isnan()
            else:
                expected = rest - value(lm, query, kind, g, unit.token_indices)
                assert float(found) == pytest.approx(expected, rel=1e-3, abs=5e-5)


def test_a_span_flips_when_any_of_its_tokens_does():
    lm, ks = tiny("llama"), [0.01, 0.03, 0.1, 0.2, 0.5, 1.0]
    asked = {"method": "random", "max_new_tokens": 3, "continuation_units": False}
    tokens, span = (
        noiser.attribute(lm, PROMPT, target_unit=unit, **{"unit": "token"} | asked)
        for unit in ("token", "all")
    )
    each, whole = (
        torch.stack([noiser.tolerance(lm, a, u, ks).flips for u in range(5)])
        for a in (tokens, span)
    )
    assert torch.equal(whole[:, 0], each.any(1))
    assert (whole[:, 0] != each[:, 0]).any()


@pytest.mark.parametrize(
    ("method", "passes"),
    [
        (noiser.IntegratedGradients(n_steps=3, objective="logprob"), 3),
        (noiser.DeepLift(objective="logprob"), 6),
    ],
)
def test_paths_move_what_stands_before_a_span_and_leave_its_own_tokens(method, passes):
    """In passes that do not grow with its tokens."""
    lm = tiny("llama")
    query = spans_of(lm)
    att = noiser.attribute(
        lm, PROMPT, target=ANSWER, method=method, target_unit=SPANS, unit="token"
    )
    assert att.info["passes"] == passes
    for g, rows in enumerate(query.target_positions):
        moved = [i for i in range(1, len(query.token_ids)) if i - 1 not in rows]
        difference = value(lm, query, "logprob", g) - value(lm, query, "logprob", g, moved)
        assert att.info["difference"][g] == pytest.approx(difference, rel=1e-3)
        assert float(att.scores[g].nansum()) + att.info["delta"][g] == pytest.approx(
            difference, rel=1e-3
        )


@pytest.mark.parametrize("method", ["last_attention", "attention_rollout", "attn_lrp"])
def test_attention_of_a_span_is_the_mean_over_its_tokens_and_relevance_the_sum(method):
    lm = tiny("llama")
    tokens = noiser.attribute(
        lm,
        PROMPT,
        target=ANSWER,
        method=method,
        target_unit="token",
        continuation_units=False,
        unit="token",
    )
    span = noiser.attribute(
        lm, PROMPT, target=ANSWER, method=method, target_unit="all", unit="token"
    )
    expected = tokens.scores.sum(0) if method == "attn_lrp" else tokens.scores.mean(0)
    torch.testing.assert_close(
        span.scores[0], expected, rtol=1e-3, atol=1e-3 if method == "attn_lrp" else 1e-6
    )
    assert len(tokens.targets) > 5


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_scores_spans_each_as_if_it_were_alone(name):
    lm = tiny("gemma3")
    units = {"unit": "word"} | units_of(name)
    both = run(lm, name, target=ANSWER, target_unit=SPANS, **units)
    first = run(lm, name, target=ANSWER, target_unit=SPANS[:1], **units)
    assert both.scores.shape == (2, len(both.units))
    assert torch.equal(both.scores.isfinite(), spans_of(lm, **units).causal_mask)
    count = len(first.units)
    torch.testing.assert_close(both.scores[0, :count], first.scores[0], rtol=2e-3, atol=2e-5)


def test_hand_worked_numbers():
    third = [1 / 3] * 3  # one sample, two tokens, three words
    changed, clean = (
        torch.tensor([one, third]).log() for one in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25])
    )
    assert entropy(changed[None], clean).item() == pytest.approx(
        (1.5 * math.log(2) + math.log(3)) / 2
    )
    assert divergence(changed[None], clean).item() == pytest.approx(
        -0.25 * math.log(0.5) - 0.5 * math.log(2)
    )


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_answers_or_refuses(name):
    """The log-probability of the target, as a function, gives what the method's own score of that
    name gives.
    """
    lm = tiny("llama")
    if name in ("last_attention", "attention_rollout"):
        with pytest.raises(
            ParameterError, match="Attention weights are the same whatever is explained"
        ):
            run(lm, name, target=5, of=log_p_of_5)
        return
    if name == "search":
        with pytest.raises(ParameterError, match="a number of your own does not say"):
            run(lm, name, target=5, of=log_p_of_5)
        return
    own = run(lm, name, target=5, of=log_p_of_5)
    assert own.scores.isfinite().all()
    if "objective" in own.parameters:
        method = noiser.methods.make_method(
            own.method, **(dict(own.parameters) | {"objective": "logprob"})
        )
        named = noiser.attribute(
            lm, PROMPT, method=method, target=5, **{"unit": "token"} | units_of(name)
        )
        torch.testing.assert_close(own.scores, named.scores, rtol=1e-3, atol=1e-4)
        if named.stderr is not None:
            torch.testing.assert_close(
                own.stderr, named.stderr, rtol=1e-3, atol=1e-4, equal_nan=True
            )


@pytest.mark.parametrize(
    ("of", "options", "message"),
    [
        (
            lambda log_p, clean: log_p.sum(),
            {},
            r"returned shape \[\]; expected a tensor of shape \[1\]",
        ),
        (lambda log_p, clean: [0.0], {}, "returned list; expected a tensor"),
        (lambda log_p, clean: log_p[:, 0, 0] * math.inf, {}, "returned NaN or an infinite number"),
        (
            lambda log_p, clean: log_p[:, 0].argmax(-1) / 1,
            {"method": "input_x_gradient"},
            "cannot be differentiated",
        ),
    ],
)
def test_functions_that_cannot_be(of, options, message, unchecked):
    asked = {"target": 5, "method": "occlusion", "of": of}
    with pytest.raises(ParameterError, match=message):
        noiser.attribute(tiny("llama"), PROMPT, **{"unit": "token"} | asked | options)
    if options:  # what cannot be differentiated has scores without errors
        att = noiser.attribute(
            tiny("llama"),
            PROMPT,
            **{"unit": "token"} | asked | {"method": noiser.Noiser(samples=3, bounding=0.5)},
        )
        assert att.scores.isfinite().all()
        assert att.stderr.isnan().all()
