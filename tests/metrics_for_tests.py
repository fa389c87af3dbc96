"""Attributions with random scores on tiny models, measured without a method."""

from __future__ import annotations

import dataclasses
from functools import cache

import torch

import metrics_reference as reference
import noiser
from engine_for_tests import query_of
from noiser.engine import run_one
from noiser.metrics import METRICS, Case, measured
from tiny import tiny

PROMPT = "The quick fox sings near the river"


@cache
def attributed(family="llama", prompt=PROMPT, **options):
    """A model, and an attribution on it with normal scores."""
    lm = tiny(family)
    att = noiser.attribute(lm, prompt, method="random", **options)
    drawn = torch.randn(att.scores.shape, generator=torch.Generator().manual_seed(1))
    return lm, dataclasses.replace(att, scores=drawn.masked_fill(att.scores.isnan(), torch.nan))


def with_scores(att, scores):
    return dataclasses.replace(att, scores=torch.as_tensor(scores, dtype=torch.float32).expand_as(att.scores).clone())


def case_of(lm, att, **settings):
    """A case on a query of its own."""
    return Case(query=run_one(lm, noiser.engine.restore(lm, att)), att=att, **settings)


def run(lm, steps):
    return run_one(lm, steps)


def columns(lm, case, name):
    return run_one(lm, measured(case, METRICS.get(name).factory()))


def valid_units(att, target):
    return [unit for unit in range(len(att.units)) if not att.scores[target, unit].isnan()]


def order_of(att, target):
    return sorted(valid_units(att, target), key=lambda unit: (-float(att.scores[target, unit]), unit))


@torch.no_grad()
def probability(lm, att, target, removed, removal="zero", token=None):
    """p(target), or of another token, without some units, by the model alone."""
    ids = torch.tensor([*query_of(lm, att.prompt).token_ids.tolist(), *(t.token_id for t in att.targets)])
    row = len(ids) - len(att.targets) - 1 + target
    positions = {position for unit in removed for position in att.units[unit].token_indices}
    if removal == "delete":
        kept = [i for i in range(row + 1) if i not in positions]
        p = lm.model(input_ids=ids[kept][None]).logits[0, -1].softmax(-1)
    elif removal == "mean":
        embed = lm.model.get_input_embeddings()
        rows = embed(ids)[None].clone()
        rows[0, list(positions)] = embed(torch.arange(len(lm.tokenizer))).mean(0)
        p = lm.model(inputs_embeds=rows).logits[0, row].softmax(-1)
    else:
        p = reference.distribution(lm, ids, row, dict.fromkeys(positions, 0.0))
    return float(p[att.targets[target].token_id if token is None else token])
