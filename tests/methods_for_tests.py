"""What methods are compared with: whole sequences, one input after the other; and games that need
no model.
"""

import pytest
import torch

from engine_for_tests import query_of
from noiser.engine import StoredGame


def asked(lm, att):
    """The query of an attribution of greedy tokens."""
    return query_of(lm, att.prompt, max_new_tokens=len(att.targets), unit=att.unit)


def predict(lm, query, row, removed=(), baseline=None):
    """The next-token distribution at a position, float64, with rows of the table replaced by zeros
    or a baseline.
    """
    table = lm.model.get_input_embeddings()
    with lm.running():
        rows = table(query.token_ids).clone()
        for position in removed:
            rows[position] = 0 if baseline is None else lm.abilities.embedding_scale * baseline
        return (
            lm.model(inputs_embeds=rows[None], use_cache=False).logits[0, row].double().softmax(-1)
        )


def subsets(units):
    """[2^units, units], every set of units."""
    return (torch.arange(2**units)[:, None] >> torch.arange(units)) % 2 == 1


def stored(value, units, objective="prob"):
    """A game of one target, all of whose inputs are stored, and its values, by `value` of a set of
    kept units.
    """
    kept = subsets(units)
    values = torch.tensor(
        [float(value(set(row.nonzero().flatten().tolist()))) for row in kept]
    ).double()
    table = {
        (0, row.numpy().tobytes()): number
        for row, number in zip(kept, values.tolist(), strict=True)
    }
    return StoredGame(torch.ones(1, units, dtype=torch.bool), values[-1:], objective, table), values


def random_game(units, objective="prob", seed=0):
    numbers = iter(torch.rand(2**units, generator=torch.Generator().manual_seed(seed)).tolist())
    return stored(lambda _: next(numbers), units, objective)


def play(method, game, seed=0):
    steps = method.score_game(game, torch.Generator().manual_seed(seed))
    with pytest.raises(StopIteration) as stop:
        steps.send(None)
    return stop.value.value
