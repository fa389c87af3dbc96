"""An objective: minus the rank of the target's first token."""

from noiser.engine import OBJECTIVES, ObjectiveEntry


def minus_rank(logits, clean, ids):
    """How many tokens are more probable than the target."""
    of_target = logits[..., 0, :].gather(-1, ids[:1].expand(*logits.shape[:-2], 1))
    return -(logits[..., 0, :] > of_target).sum(-1).float()


OBJECTIVES.register(
    "minus_rank",
    lambda: ObjectiveEntry(value=minus_rank, unit="ranks"),
    summary="minus the number of tokens that are more probable",
)
