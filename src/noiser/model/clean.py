"""The clean sequence, run once in whichever way the model can go on from; and its greedy continuation."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.packing import Branches, Group, Packed
from noiser.model.prefix import Prefix, empty_prefix

T = TypeVar("T")

Passes = Generator[Branches, Packed, T]
"""A coroutine that yields packed passes, which may be merged with those of other prompts, and is sent their logits."""


class CleanPass(NamedTuple):
    """What a clean sequence gives.

    Attributes:
        logits: [positions, vocab], float32.
        prefix: its keys and values; None where the model's cache cannot be reused.
        left_out: as in `Packed`.
    """

    logits: Float[Tensor, "positions vocab"]
    prefix: Prefix | None
    left_out: float = 0.0


def run_clean(
    lm: LanguageModel,
    embeddings: Float[Tensor, "length dim"],
    positions: Sequence[int],
    prefix: Prefix | None = None,
    *,
    share: bool = False,
    tokens: Sequence[tuple[int, ...]] = (),
) -> Passes[CleanPass]:
    """Runs a clean sequence.

    Args:
        lm: the model.
        embeddings: [length, dim], of the whole sequence.
        positions: indices into `length` whose logits are wanted.
        prefix: of a run of its beginning, to go on from, and not to be used any more; the positions are after it.
        share: yield the pass, to be merged with those of other prompts; the model must be able to pack.
        tokens: as in `Group`.
    """
    prefix = (prefix or empty_prefix(lm)) if lm.reuses_prefix(len(embeddings)) else None
    done = prefix.length if prefix else 0
    rest = embeddings[done:][None]
    if share or not lm.looks_inside:
        branches = Branches(prefix or empty_prefix(lm), [Group(done, rest, positions, tokens)], clean=True)
        packed = (yield branches) if share else lm.run_packed([branches])[0]
        # a copy: the other prompts' logits are let go
        return CleanPass(packed.logits[0][0].to(torch.float32, copy=True), packed.prefix, packed.left_out)
    with lm.running():
        logits = lm.logits(rest, positions=[position - done for position in positions], prefix=prefix)[0]
    if prefix:
        prefix.length = len(embeddings)
    return CleanPass(logits, prefix)


def without_sharing(passes: Passes[T]) -> T:
    """The result of a coroutine that was told not to share its passes, and so yields none."""
    try:
        next(passes)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a pass was yielded that nobody runs")


class Continuation(NamedTuple):
    """A greedy continuation, and what the run that made it can be reused for.

    Attributes:
        model: the model that ran.
        token_ids: its tokens.
        logits: [tokens, vocab], float32, of which they are the most probable.
        prefix: keys and values of the prompt and all tokens but the last at least; None where the model's cache
            cannot be reused.
        left_out: as in `Packed`.
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
    stops = lm.end_tokens
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
