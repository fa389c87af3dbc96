"""The clean sequence: run once, in whichever way the model can go on from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from noiser.model.language_model import LanguageModel
from noiser.model.packing import Branches, Group
from noiser.model.prefix import Prefix, empty_prefix, record_prefix

__all__ = ["CleanRun", "run_clean"]


class CleanRun(NamedTuple):
    """What a clean sequence gives.

    Attributes:
        logits: [positions, vocab], float32.
        prefix: its keys and values; None where the model's cache cannot be reused.
    """

    logits: Float[Tensor, "positions vocab"]
    prefix: Prefix | None


def run_clean(
    lm: LanguageModel, embeddings: Float[Tensor, "length dim"], positions: Sequence[int], prefix: Prefix | None = None
) -> CleanRun:
    """Runs a clean sequence, together with other prompts' where passes are shared.

    Args:
        lm: the model.
        embeddings: [length, dim], of the whole sequence.
        positions: indices into `length` whose logits are wanted.
        prefix: of a run of its beginning, to go on from, and not to be used any more; the positions are behind it.
    """
    if prefix and not lm.reuses_prefix(len(embeddings)):
        prefix = None
    done = prefix.length if prefix else 0
    rest = embeddings[done:][None]
    if lm.shares_passes:
        found = lm.packed(Branches(prefix or empty_prefix(lm), [Group(done, rest, positions)], clean=True))
        return CleanRun(found.logits[0][0].clone(), found.prefix)  # the other prompts' logits are let go
    with lm.running():
        if prefix:
            logits = lm.logits(rest, positions=[position - done for position in positions], prefix=prefix)[0]
            prefix.length = len(embeddings)
        elif lm.reuses_prefix(len(embeddings)):
            prefix, logits = record_prefix(lm, embeddings, list(positions))
        else:
            logits = lm.logits(rest, positions=positions)[0]
    return CleanRun(logits, prefix)
