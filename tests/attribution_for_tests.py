"""Attributions made by hand, without a model."""

import torch

from noiser.attribution import Attribution
from noiser.types import ModelIdentity, Span, Target

NAN = float("nan")


def spans_of(*pieces: str) -> tuple[Span, ...]:
    """Units that follow each other, the i-th of token i."""
    spans, start = [], 0
    for index, piece in enumerate(pieces):
        spans.append(Span(piece, start, start + len(piece), (index,)))
        start += len(piece)
    return tuple(spans)


def make(
    pieces=("Le", "Bron", " plays", " sport"), scores=((0.1, 0.3, -0.2, 0.4),), **changes
) -> Attribution:
    """An attribution whose units are `pieces`, all of them the prompt unless `prompt_length` is
    given.
    """
    scores = torch.tensor(scores, dtype=torch.float32).reshape(len(scores), -1)
    text = "".join(pieces)
    fields = {
        "text": text,
        "prompt_length": len(text),
        "prompt": text,
        "unit": "token",
        "info": {"score_units": ["nats"] * len(scores)},
        "scores": scores,
        "units": spans_of(*pieces),
        "targets": tuple(Target(f" target{row}", 100 + row, 0.5, 1) for row in range(len(scores))),
        "method": "noiser@1",
        "parameters": {"samples": 10, "bounding": "k_min"},
        "seed": 3,
        "model": ModelIdentity("gemma-3-270m", "0123456789abcdef", "float32", "Gemma3ForCausalLM"),
        "versions": {"noiser": "0.1.0", "torch": "2.13.0"},
    }
    return Attribution(**(fields | changes))


def rich_example() -> Attribution:
    """Two targets with every optional field, a word in pieces, and a continuation unit."""
    return make(
        ("Le", "Bron", " plays", " the", " sport", " of", " basket"),
        ((0.31, 0.12, -0.05, 0.001, 0.22, 0.04, NAN), (0.02, 0.3, 0.01, 0.0, -0.11, 0.07, 0.9)),
        prompt_length=len("LeBron plays the sport of"),
        prompt="LeBron plays the sport of",
        targets=(Target(" basket", 7, 0.4321, 1), Target("ball", 8, 0.9, 1)),
        thresholds=torch.tensor(
            [[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, NAN], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]]
        ),
        k_min=torch.tensor([0.1, NAN]),
        stderr=torch.tensor(
            [[0.01, 0.02, 0.003, 0.1, 0.5, 0.6, NAN], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]]
        ),
        foil=Target(" foot", 9, 0.1, 2),
        info={"delta": 0.25, "score_units": ["nats", "nats"]},
    )
