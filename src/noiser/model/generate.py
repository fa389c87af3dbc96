"""Greedy continuation, token by token."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.prefix import record_prefix

__all__ = ["greedy_continuation"]


def greedy_continuation(lm: LanguageModel, token_ids: Int[Tensor, " length"], count: int) -> tuple[int, ...]:
    """The `count` most probable next tokens, one after the other.

    It ends earlier before an end-of-sequence token, unless that is the very first one.

    Raises:
        NumericalError: the logits are not finite.
    """
    stops = _end_tokens(lm)
    out: list[int] = []
    with lm.running():
        embeddings = lm.embed(token_ids)
        prefix = None
        while len(out) < count:
            if prefix is not None and out:
                logits = lm.logits(lm.embed(torch.tensor([out[-1:]])), positions=[0], prefix=prefix)[0]
            elif lm.reuses_prefix:
                prefix, logits = record_prefix(lm, embeddings, [len(token_ids) - 1])
            else:
                whole = torch.cat([embeddings, lm.embed(torch.tensor(out, dtype=torch.long))])
                logits = lm.logits(whole[None], positions=[len(whole) - 1])[0]
            check_finite(logits.softmax(-1), lm.dtype)
            token = int(logits[0].argmax())
            if out and token in stops:
                break
            out.append(token)
            if token in stops:
                break
    return tuple(out)


def _end_tokens(lm: LanguageModel) -> set[int]:
    config = getattr(lm.model, "generation_config", None)
    declared = getattr(config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return {i for i in [*ids, lm.tokenizer.eos_token_id] if isinstance(i, int)}
