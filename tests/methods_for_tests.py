"""What methods are compared with: whole sequences in one pass, without a cache, one input after the other."""

from __future__ import annotations

import itertools

from engine_for_tests import query_of


def asked(lm, att):
    """The query of an attribution of greedy tokens."""
    return query_of(lm, att.prompt, max_new_tokens=len(att.targets), unit=att.unit)


def predict(lm, query, row, removed=(), baseline=None):
    """The next-token distribution at a position, float64, with rows of the table replaced by zeros or a baseline."""
    table = lm.model.get_input_embeddings()
    with lm.running():
        rows = table(query.token_ids).clone()
        for position in removed:
            rows[position] = 0 if baseline is None else lm.abilities.embedding_scale * baseline
        return lm.model(inputs_embeds=rows[None], use_cache=False).logits[0, row].double().softmax(-1)


def all_values(lm, att, g, value):
    """The value of every set of units for one target, by the set of kept units; and the units before the target."""
    query = asked(lm, att)
    row = query.logit_positions[g]
    seen = [u for u, unit in enumerate(att.units) if unit.token_indices[-1] <= row]
    values = {}
    for size in range(len(seen) + 1):
        for kept in map(frozenset, itertools.combinations(range(len(seen)), size)):
            gone = [i for k, u in enumerate(seen) if k not in kept for i in att.units[u].token_indices]
            values[kept] = value(predict(lm, query, row, gone))
    return values, seen
