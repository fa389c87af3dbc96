"""The question behind a result: from an Attribution back to the tokens, targets and units it was made from."""

from __future__ import annotations

from noiser.attribution import Attribution
from noiser.errors import ParameterError, TargetError
from noiser.model.language_model import LanguageModel
from noiser.model.query import Query, check_length
from noiser.model.text import Encoding, encode, encode_target, extend, token_texts
from noiser.types import Span

__all__ = ["rebuild_query"]


def rebuild_query(lm: LanguageModel, att: Attribution) -> Query:
    """The query that an attribution answers, to be asked once more.

    The model need not be the one that made the attribution, but its tokenizer must cut the text into the same tokens.

    Args:
        lm: the model to ask.
        att: a result, also one that was loaded from a file or aggregated.

    Raises:
        ParameterError: the model's tokenizer reads the prompt, a unit or a target otherwise.
        PromptError: the text exceeds the model's context.
    """
    encoding = encode(lm.tokenizer, att.prompt, context_length=lm.context_length)
    if encoding.text != att.text[: att.prompt_length]:
        raise _mismatch(lm, att, f"the prompt reads {encoding.text!r} with it, not {att.text[: att.prompt_length]!r}")
    prompt_tokens = len(encoding.token_ids)
    targets = tuple(target.token_id for target in att.targets)
    whole, before = _with_continuation(lm, att, encoding, targets)
    check_length(lm, len(whole.token_ids))
    first = len(before) - len(targets) + 1
    for unit in att.units:
        _check_unit(lm, att, whole, unit)
    return Query(
        prompt=att.prompt,
        encoding=whole,
        prompt_tokens=prompt_tokens,
        prompt_length=att.prompt_length,
        target_ids=targets,
        logit_positions=tuple(prompt_tokens - 1 + first + i for i in range(len(targets))),
        foil_id=None if att.foil is None else att.foil.token_id,
        units=att.units,
        unit=att.unit,
        target_texts=tuple(target.text for target in att.targets),
        model=lm.identity,
        embedding_dim=lm.embedding_dim,
        dtype=lm.dtype,
        device=lm.device,
    )


def _with_continuation(
    lm: LanguageModel, att: Attribution, encoding: Encoding, targets: tuple[int, ...]
) -> tuple[Encoding, tuple[int, ...]]:
    """Prompt and continuation, and the continuation's tokens; with a foil, target and foil share those of its text."""
    size = lm.vocabulary_size
    outside = [token for token in targets if not 0 <= token < size]
    if outside:
        raise _mismatch(lm, att, f"target id {outside[0]} is outside its vocabulary of {size} tokens")
    texts = tuple(token_texts(lm.tokenizer, targets))
    if texts != tuple(target.text for target in att.targets):
        raise _mismatch(lm, att, f"the targets read {texts} with it, not {tuple(t.text for t in att.targets)}")
    for before in [targets[:-1]] if att.foil is None else _shared(lm, att, encoding, targets[0]):
        whole = extend(lm.tokenizer, encoding, before)
        if whole.text == att.text:
            return whole, before
    raise _mismatch(lm, att, f"no tokens of the continuation read {att.text[att.prompt_length :]!r}")


def _shared(lm: LanguageModel, att: Attribution, encoding: Encoding, target: int) -> list[tuple[int, ...]]:
    """Tokenisations of the text between the prompt and a target with a foil: with the target behind it, or alone."""
    text = att.text[att.prompt_length :]
    if not text:
        return [()]
    readings: list[tuple[int, ...]] = []
    for follower in (att.targets[0].text, ""):
        try:
            ids = encode_target(lm.tokenizer, encoding, text + follower)
        except TargetError:
            continue
        readings += [ids[:-1]] if follower and ids[-1] == target else [] if follower else [ids]
    return readings


def _check_unit(lm: LanguageModel, att: Attribution, whole: Encoding, unit: Span) -> None:
    """The unit's tokens must cover its characters; spans that the caller chose, and sources, need only touch them."""
    if max(unit.token_indices) >= len(whole.token_ids):
        raise _mismatch(lm, att, f"the text has {len(whole.token_ids)} tokens, none at {max(unit.token_indices)}")
    offsets = [whole.offsets[index] for index in unit.token_indices]
    start, end = min(a for a, _ in offsets), max(b for _, b in offsets)
    touches = att.unit in ("spans", "source", "auto") and start < unit.end and unit.start < end
    agrees = touches or (start, end) == (unit.start, unit.end)
    if not agrees:
        raise _mismatch(lm, att, f"the tokens of {unit.text!r} at {unit.start} to {unit.end} are at {start} to {end}")


def _mismatch(lm: LanguageModel, att: Attribution, what: str) -> ParameterError:
    return ParameterError(
        f"{lm.identity.name} does not cut this text into the tokens that the attribution, made with {att.model.name}, "
        f"is about: {what}; expected the same tokens. Use the model that made it, or attribute again with this one."
    )
