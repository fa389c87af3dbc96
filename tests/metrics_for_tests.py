"""Attributions with random scores on tiny models, measured without a method."""

import dataclasses
import math
from functools import cache

import torch

import noiser
from methods_for_tests import predict
from noiser.engine import run_one
from noiser.metrics import METRICS, Case, run_metric
from tiny import tiny

PROMPT = "The quick fox sings near the river"


@torch.no_grad()
def distribution(lm, ids, row, keep=None):
    """Next-token distribution at `row`; `keep` maps positions to a factor for each dimension of the
    embedding.
    """
    embeddings = lm.model.get_input_embeddings()(ids)[None].clone()
    for position, factors in (keep or {}).items():
        embeddings[0, position] *= factors
    training = lm.model.training
    lm.model.eval()
    logits = lm.model(inputs_embeds=embeddings, use_cache=False).logits[0, row]
    lm.model.train(training)
    return logits.float().softmax(-1)


def hellinger(p, q):
    return math.sqrt(
        0.5
        * sum(
            (math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p.tolist(), q.tolist(), strict=True)
        )
    )


def squared(p, q):
    """As the published script: no root, and divided by the root of two."""
    return sum(
        (math.sqrt(a) - math.sqrt(b)) ** 2 for a, b in zip(p.tolist(), q.tolist(), strict=True)
    ) / math.sqrt(2)


def soft(lm, query, target, positions, kept, removed, distance=hellinger):
    """Soft-NS and Soft-NC for one target.

    Args:
        positions: all token positions that masks act on.
        kept, removed: for each mask sample, position -> 0/1 factors of the retaining and the
            removing mask.
    """
    of = lambda keep=None: distribution(lm, query.token_ids, query.logit_positions[target], keep)
    clean, zero = of(), distance(of(), of(dict.fromkeys(positions, 0.0)))
    ns = [max(0.0, zero - distance(clean, of(keep))) / zero for keep in kept]
    return ns, [distance(clean, of(keep)) / zero for keep in removed]


@cache
def attributed(family="llama", prompt=PROMPT, **options):
    """A model, and an attribution on it with normal scores."""
    lm = tiny(family)
    defaults = (
        {"unit": "token"} if "target" in options else {"unit": "token", "target_unit": "token"}
    )
    att = noiser.attribute(lm, prompt, method="random", **defaults | options)
    drawn = torch.randn(att.scores.shape, generator=torch.Generator().manual_seed(1))
    return lm, dataclasses.replace(att, scores=drawn.masked_fill(att.scores.isnan(), torch.nan))


def with_scores(att, scores):
    return dataclasses.replace(
        att, scores=torch.as_tensor(scores, dtype=torch.float32).expand_as(att.scores).clone()
    )


def case_of(lm, att, **settings):
    return Case(query=run_one(lm, noiser.explain.restore(lm, att)), att=att, **settings)


def columns(lm, case, name):
    return run_one(lm, run_metric(case, METRICS.get(name).factory()))


def valid_units(att, target):
    return [unit for unit in range(len(att.units)) if not att.scores[target, unit].isnan()]


def order_of(att, target):
    return sorted(
        valid_units(att, target), key=lambda unit: (-float(att.scores[target, unit]), unit)
    )


@torch.no_grad()
def probability(lm, att, target, removed, removal="zero", token=None):
    """p(target), or of another token, without some units, by the model alone."""
    query = case_of(lm, att).query
    row, table = query.logit_positions[target], lm.model.get_input_embeddings().weight
    positions = {position for unit in removed for position in att.units[unit].token_indices}
    if removal == "delete":
        kept = [i for i in range(row + 1) if i not in positions]
        p = lm.model(input_ids=query.token_ids[kept][None]).logits[0, -1].softmax(-1)
    else:
        p = predict(
            lm,
            query,
            row,
            positions,
            table[: len(lm.tokenizer)].mean(0) if removal == "mean" else None,
        )
    return float(p[att.targets[target].token_id if token is None else token])
