"""What tests ask of an engine that methods do not: whole distributions, and a session to look into."""

from __future__ import annotations

import torch

from noiser.engine import LocalEngine, Session, complete


class EveryNumber:
    """A readout that keeps the distributions."""

    def __init__(self, clean):
        self.clean = clean

    def measure(self, predicted, targets):
        return predicted.probabilities

    def table(self, numbers, targets):
        return list(numbers)


def drive(session, passes):
    """The result of a coroutine of a session."""
    return complete(LocalEngine(session.lm), passes)


def distributions(session, perturbations):
    """For each perturbation [samples, its targets, vocab]."""
    return drive(session, session._read(perturbations, EveryNumber))


def clean(lm, query):
    """[targets, vocab], the unperturbed distributions."""
    session = Session(lm, query)
    return drive(session, session.clean()).probabilities


def run_method(lm, query, method, generator=None):
    """The session that a method has run in, and its scores."""
    session = Session(lm, query)
    return session, drive(session, session.drive(method(query, generator or torch.Generator())))
