"""Greedy continuation, token by token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.model.clean import Passes, run_clean
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.prefix import Prefix

__all__ = ["Continuation", "greedy_continuation"]


class Continuation(NamedTuple):
    """A greedy continuation, and what the run that made it can be reused for.

    Attributes:
        model: the model that ran.
        token_ids: its tokens.
        logits: [tokens, vocab], float32, of which they are the most probable.
        prefix: keys and values of the prompt and all tokens but the last at least; None where the model's cache
            cannot be reused.
        left_out: as in `noiser.model.packing.Packed`.
    """

    model: object
    token_ids: tuple[int, ...]
    logits: Float[Tensor, "tokens vocab"]
    prefix: Prefix | None
    left_out: float = 0.0


def greedy_continuation(
    lm: LanguageModel, token_ids: Int[Tensor, " length"], count: int, *, stop: str | None = None, share: bool = False
) -> Passes[Continuation]:
    """The `count` most probable next tokens, one after the other; fewer if the model ends.

    An end-of-sequence token is left out, unless it is the very first one; so is the token that completes the text
    `stop`, such as an empty line, with which the continuation ends. `share` is that of `run_clean`.

    Raises:
        NumericalError: the logits are not finite.
    """
    stops = _end_tokens(lm)
    out: list[int] = []
    rows: list[Float[Tensor, "one vocab"]] = []
    prefix, left_out = None, 0.0
    with lm.running():
        embeddings = lm.embed(token_ids)
    while True:
        logits, prefix, lost = yield from run_clean(lm, embeddings, [len(embeddings) - 1], prefix, share=share)
        check_finite(logits.softmax(-1), lm.dtype)
        token = int(logits[0].argmax())
        if out and token in stops:
            break
        if stop and out and stop in lm.tokenizer.decode([*out[1:][-len(stop) :], token]):
            break
        out.append(token)
        rows.append(logits)
        left_out = max(left_out, lost)
        if token in stops or len(out) == count:
            break
        with lm.running():
            embeddings = torch.cat([embeddings, lm.embed(torch.tensor([token]))])
    return Continuation(lm.model, tuple(out), torch.cat(rows), prefix, left_out)


def _end_tokens(lm: LanguageModel) -> set[int]:
    config = getattr(lm.model, "generation_config", None)
    declared = getattr(config, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return {i for i in [*ids, lm.tokenizer.eos_token_id] if isinstance(i, int)}
