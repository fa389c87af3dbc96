"""What tests ask of an engine that methods do not: whole distributions, and the query of a
question.
"""

import torch

from noiser.engine import Predict, ask, prepare, run_one
from noiser.types import Question


def query_of(lm, prompt, **question):
    """The query of a question, a row per token unless another unit is named."""
    return run_one(
        lm,
        prepare(
            lm, Question(prompt=prompt, **{"unit": "token", "target_unit": "token"} | question)
        ),
    )


def clean(query):
    """[tokens, vocab], the unperturbed distributions."""
    return query.clean.exp()


def distributions(lm, query, changes):
    """For each change [samples, its targets, vocab]; each target a token."""
    found = ask(
        lm,
        Predict(query, changes, lambda logits, clean, ids: logits.float().softmax(-1)[..., 0, :]),
    )
    return [each.transpose(0, 1).float() for each in found]


def run_method(lm, query, method, generator=None):
    return run_one(lm, method(query, generator or torch.Generator()))
