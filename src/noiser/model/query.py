"""What one attribution asks of a model: tokens, targets, foil and units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from noiser.errors import ParameterError, PromptError, TargetError
from noiser.model.clean import Passes, run_clean, without_sharing
from noiser.model.generate import Continuation, greedy_continuation
from noiser.model.language_model import LanguageModel, check_finite
from noiser.model.sources import find_sources
from noiser.model.text import Encoding, encode, encode_target, extend, token_texts
from noiser.model.units import make_units
from noiser.types import AutoUnit, ModelIdentity, Prompt, Source, Sources, Span, Unit

__all__ = ["Query", "build_query", "check_length", "query_passes"]

SpecialTokens = Literal["frozen", "perturbed"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Query:
    """One attribution's question, in tokens.

    Attributes:
        prompt: the prompt as it was given.
        encoding: the prompt and the continuation that stands before the last target.
        prompt_tokens: how many of its tokens are the prompt.
        prompt_length: how many characters of its text are the prompt.
        target_ids: token ids whose probabilities are explained, in order.
        logit_positions: for each target, the position whose logits predict it.
        foil_id: token id that the (only) target is contrasted with, or None.
        units: what gets a score.
        unit: name of the segmentation: "token", "word", "sentence", "turn", "source", "auto" or "spans".
        target_texts: the targets as text.
        model: the model that is asked.
        embedding_dim: length of a row of its embedding table.
        dtype: of the embeddings that the model reads.
        device: where they are.
        sources: documents in the prompt.
        continuation: the run that found the targets, if they are the greedy continuation; the engine goes on from it.
    """

    prompt: Prompt
    encoding: Encoding
    prompt_tokens: int
    prompt_length: int
    target_ids: tuple[int, ...]
    logit_positions: tuple[int, ...]
    foil_id: int | None
    units: tuple[Span, ...]
    unit: str
    target_texts: tuple[str, ...]
    model: ModelIdentity
    embedding_dim: int
    dtype: torch.dtype
    device: torch.device
    sources: tuple[Source, ...] = ()
    continuation: Continuation | None = field(default=None, repr=False)

    @property
    def token_ids(self) -> Int[Tensor, " length"]:
        """Everything that the model reads, on the CPU."""
        return torch.tensor(self.encoding.token_ids)

    @property
    def causal_mask(self) -> Bool[Tensor, "targets units"]:
        """Whether all of a unit stands before a target, so that it can have a score for it."""
        last = torch.tensor([max(unit.token_indices) for unit in self.units])
        return last[None, :] <= torch.tensor(self.logit_positions)[:, None]

    @property
    def targets_per_unit(self) -> list[tuple[int, ...]]:
        """For each unit, the indices of the targets that it stands before."""
        return [tuple(g for g, seen in enumerate(column) if seen) for column in self.causal_mask.T.tolist()]

    def with_units(self, units: Sequence[Span]) -> Query:
        """The same question with other units."""
        return replace(self, units=tuple(units))


def build_query(lm: LanguageModel, prompt: Prompt, **options: Any) -> Query:
    """The query of `query_passes`, for one prompt by itself; see there for the options."""
    return without_sharing(query_passes(lm, prompt, **options))


def query_passes(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    target: str | int | None = None,
    foil: str | int | None = None,
    max_new_tokens: int = 1,
    unit: Unit | AutoUnit = "token",
    sources: Sources | None = None,
    continuation_units: bool = True,
    special_tokens: SpecialTokens = "frozen",
    share: bool = False,
) -> Passes[Query]:
    """Tokenises the prompt, settles the targets and cuts the input into units.

    A target or foil given as text is what follows the prompt. Where a prompt ends in a word and the text begins
    with one, both readings are possible (`" football"` and `"football"`): the one whose first token the model finds
    more probable is taken. A text that begins with whitespace is taken as it is. `share` is that of `run_clean`.

    Raises:
        PromptError: the prompt is empty, holds only special tokens, or exceeds the model's context or vocabulary.
        TargetError: the target or foil has no token, is outside the vocabulary, or one begins with the other.
        UnitError: spans that overlap, are empty or leave the prompt; sources that are not in it, empty or overlap.
        UnsupportedModelError: the model does not predict from embeddings what it predicts from their tokens.
    """
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ParameterError(f"max_new_tokens is {max_new_tokens!r}; expected an integer of at least 1.")
    lm.check_embeddings()
    encoding = encode(lm.tokenizer, prompt, context_length=lm.context_length)
    check_length(lm, len(encoding.token_ids))
    if max(encoding.token_ids, default=0) >= lm.vocabulary_size:
        raise PromptError(_unknown_token(lm, "The prompt", encoding.token_ids))
    documents = () if sources is None else find_sources(encoding, sources)
    if target is None:
        check_length(lm, len(encoding.token_ids) + max_new_tokens - 1)
        continuation = yield from greedy_continuation(lm, torch.tensor(encoding.token_ids), max_new_tokens, share=share)
        ids = continuation.token_ids
    else:
        continuation = None
        ids = yield from _token_ids_of(lm, encoding, target, "target", share)
    ids, first, foil_id = yield from _contrast(lm, encoding, ids, foil, share)
    check_length(lm, len(encoding.token_ids) + len(ids) - 1)

    prompt_tokens = len(encoding.token_ids)
    whole = extend(lm.tokenizer, encoding, ids[:-1]) if len(ids) > 1 else encoding
    units = make_units(whole, unit, special_tokens=special_tokens, prompt_tokens=prompt_tokens, sources=documents)
    if not continuation_units:
        units = tuple(u for u in units if u.token_indices[0] < prompt_tokens)
    texts = token_texts(lm.tokenizer, ids)
    return Query(
        prompt=prompt,
        encoding=whole,
        prompt_tokens=prompt_tokens,
        prompt_length=len(encoding.text),
        target_ids=ids[first:],
        logit_positions=tuple(prompt_tokens - 1 + i for i in range(first, len(ids))),
        foil_id=foil_id,
        units=units,
        unit=unit if isinstance(unit, str) else "spans",
        target_texts=tuple(texts[first:]),
        model=lm.identity,
        embedding_dim=lm.embedding_dim,
        dtype=lm.dtype,
        device=lm.device,
        sources=documents,
        continuation=continuation if foil is None else None,
    )


def check_length(lm: LanguageModel, length: int) -> None:
    """Raises PromptError when the model cannot read that many tokens."""
    limit = lm.context_length
    if limit is not None and length > limit:
        raise PromptError(
            f"The prompt and its continuation have {length} tokens; {lm.identity.name} can read {limit}. "
            "Shorten the prompt or ask for fewer targets."
        )


def _token_ids_of(
    lm: LanguageModel, encoding: Encoding, wanted: str | int, role: str, share: bool
) -> Passes[tuple[int, ...]]:
    if isinstance(wanted, bool) or not isinstance(wanted, str | int):
        raise TargetError(f"The {role} is a {type(wanted).__name__}; expected a text or a token id.")
    if isinstance(wanted, int):
        size = lm.vocabulary_size
        if not 0 <= wanted < size:
            raise TargetError(f"The {role} is token id {wanted}; expected 0 to {size - 1}, the model's vocabulary.")
        return (wanted,)
    if not wanted or not encode_target(lm.tokenizer, encoding, wanted, context_length=lm.context_length):
        raise TargetError(f"The {role} {wanted!r} has no tokens; expected a text that follows the prompt.")
    readings = [encode_target(lm.tokenizer, encoding, wanted, context_length=lm.context_length)]
    if max(readings[0]) >= lm.vocabulary_size:
        raise TargetError(_unknown_token(lm, f"The {role}", readings[0]))
    if not wanted[0].isspace() and not encoding.text[-1:].isspace():
        readings.append(encode_target(lm.tokenizer, encoding, " " + wanted, context_length=lm.context_length))
    return (yield from _most_probable(lm, encoding, readings, share))


def _unknown_token(lm: LanguageModel, what: str, token_ids: Sequence[int]) -> str:
    token = next(token for token in token_ids if token >= lm.vocabulary_size)
    (text,) = token_texts(lm.tokenizer, (token,))
    return (
        f"{what} has the token {text!r}, id {token}; expected ids below {lm.vocabulary_size}, the rows of the model's "
        "embedding table. The tokenizer is another model's, or tokens were added to it without resizing the model."
    )


def _most_probable(
    lm: LanguageModel, encoding: Encoding, readings: Sequence[tuple[int, ...]], share: bool
) -> Passes[tuple[int, ...]]:
    if len({reading[0] for reading in readings}) == 1:
        return readings[0]
    with lm.running():
        embeddings = lm.embed(torch.tensor(encoding.token_ids))
    run = yield from run_clean(lm, embeddings, [len(embeddings) - 1], share=share)
    probabilities = run.logits[0].softmax(-1)
    check_finite(probabilities, lm.dtype)
    return max(readings, key=lambda reading: float(probabilities[reading[0]]))


def _contrast(
    lm: LanguageModel, encoding: Encoding, ids: tuple[int, ...], foil: str | int | None, share: bool
) -> Passes[tuple[tuple[int, ...], int, int | None]]:
    """Target ids, the index of the first one to explain, and the foil's token.

    With a foil the question is about one place: the first token in which target and foil differ. Tokens that they
    share stand before it.
    """
    if foil is None:
        return ids, 0, None
    other = yield from _token_ids_of(lm, encoding, foil, "foil", share)
    shared = next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), None)
    if shared is None and len(ids) != len(other):
        longer, shorter = ("foil", "target") if len(other) > len(ids) else ("target", "foil")
        raise TargetError(
            f"The {longer} begins with the {shorter}, {token_texts(lm.tokenizer, min(ids, other, key=len))}; expected "
            f"two that part somewhere. Give a longer {shorter}, or with target=None a larger max_new_tokens."
        )
    if shared is None:
        raise TargetError(
            f"Target and foil are the same tokens, {token_texts(lm.tokenizer, ids)} and "
            f"{token_texts(lm.tokenizer, other)}; expected a foil that differs. Choose another foil or target."
        )
    return ids[: shared + 1], shared, other[shared]
