"""The question behind a result: from an Attribution back to the tokens, targets and units it was made from."""

from __future__ import annotations

from noiser.attribution import Attribution
from noiser.errors import ParameterError, TargetError
from noiser.model.language_model import LanguageModel
from noiser.model.query import Query, check_length, group_consecutive, target_texts, with_foil
from noiser.model.text import Encoding, encode, encode_target, extend
from noiser.types import Span


def rebuild_query(lm: LanguageModel, att: Attribution) -> Query:
    """The query that an attribution answers, to be asked again.

    The model need not be the one that made the attribution, but its tokenizer must cut the text into the same tokens.

    Args:
        lm: the model to ask.
        att: a result, also one that was loaded from a file or aggregated.

    Raises:
        ParameterError: the model's tokenizer reads the prompt, a unit or a target otherwise.
        PromptError: the text exceeds the model's context.
    """
    text = att.text[: att.prompt_length]
    encoding = encode(lm.tokenizer, att.prompt, context_length=lm.context_length, rendered=text)
    if encoding.text != text:
        raise _mismatch(lm, att, f"the prompt reads {encoding.text!r} with it, not {text!r}")
    prompt_tokens = len(encoding.token_ids)
    whole, ids, spans = _with_continuation(lm, att, encoding)
    check_length(lm, len(whole.token_ids))
    positions = [position for span in spans for position in span]
    for unit in att.units:
        _check_unit(lm, att, whole, unit)
    whole_foil = att.foil is not None and att.target_unit == "all"
    query = Query(
        prompt=att.prompt,
        encoding=whole,
        prompt_tokens=prompt_tokens,
        prompt_length=att.prompt_length,
        target_ids=tuple(ids[position - prompt_tokens] for position in positions),
        logit_positions=tuple(position - 1 for position in positions),
        target_spans=group_consecutive(map(len, spans)),
        target_unit=att.target_unit,
        foil_id=None if att.foil is None or whole_foil else att.foil.token_id,
        units=att.units,
        unit=att.unit,
        target_texts=tuple(target.text for target in att.targets),
        model=lm.identity,
        embedding_dim=lm.embedding_dim,
        dtype=lm.dtype,
        device=lm.device,
    )
    return with_foil(lm, query, encoding, att.foil.token_ids) if att.foil is not None and whole_foil else query


def _with_continuation(
    lm: LanguageModel, att: Attribution, encoding: Encoding
) -> tuple[Encoding, tuple[int, ...], list[range]]:
    """Prompt and continuation without its last token, the continuation's tokens, and each target's positions."""
    size = lm.vocabulary_size
    ids = [token for target in att.targets for token in (*target.before, *target.token_ids)]
    if outside := [token for token in ids if not 0 <= token < size]:
        raise _mismatch(lm, att, f"target id {outside[0]} is outside its vocabulary of {size} tokens")
    known = att.foil is None or att.target_unit == "all" or att.targets[0].before
    for before in [()] if known else _shared(lm, att, encoding):
        continuation = (*before, *ids)
        complete = extend(lm.tokenizer, encoding, continuation)
        spans = _target_spans(att, len(encoding.token_ids) + len(before))
        texts = target_texts(lm, complete, len(encoding.token_ids), spans)
        if texts != tuple(target.text for target in att.targets):
            raise _mismatch(lm, att, f"the targets read {texts} with it, not {tuple(t.text for t in att.targets)}")
        whole = extend(lm.tokenizer, encoding, continuation[:-1])
        if whole.text == att.text:
            return whole, continuation, spans
    raise _mismatch(lm, att, f"no tokens of the continuation read {att.text[att.prompt_length :]!r}")


def _target_spans(att: Attribution, position: int) -> list[range]:
    """The positions of each target's tokens; the first target, or the text before it, begins at `position`."""
    spans: list[range] = []
    for target in att.targets:
        start = position + len(target.before)
        position = start + len(target.token_ids)
        spans.append(range(start, position))
    return spans


def _shared(lm: LanguageModel, att: Attribution, encoding: Encoding) -> list[tuple[int, ...]]:
    """Tokenisations of the text between the prompt and a target with a foil, of files that do not have its tokens."""
    text, (target,) = att.text[att.prompt_length :], att.targets
    if not text:
        return [()]
    readings: list[tuple[int, ...]] = []
    for follower in (target.text, ""):  # with the target after it, or alone
        try:
            ids = encode_target(lm.tokenizer, encoding, text + follower)
        except TargetError:
            continue
        readings += [ids[:-1]] if follower and ids[-1] == target.token_id else [] if follower else [ids]
    return readings


def _check_unit(lm: LanguageModel, att: Attribution, whole: Encoding, unit: Span) -> None:
    """The unit's tokens must cover its characters; spans that the caller chose, and sources, need only touch them."""
    if outside := [index for index in unit.token_indices if not 0 <= index < len(whole.token_ids)]:
        raise _mismatch(lm, att, f"the text has {len(whole.token_ids)} tokens, none at {outside[0]}")
    if not unit.token_indices:
        raise _mismatch(lm, att, f"{unit.text!r} at {unit.start} to {unit.end} has no tokens")
    offsets = [whole.offsets[index] for index in unit.token_indices]
    start, end = min(a for a, _ in offsets), max(b for _, b in offsets)
    kinds = {att.unit, att.info.get("aggregated", {}).get("from")}
    touches = kinds & {"spans", "source", "auto"} and start < unit.end and unit.start < end
    agrees = touches or (start, end) == (unit.start, unit.end)
    if not agrees:
        raise _mismatch(lm, att, f"the tokens of {unit.text!r} at {unit.start} to {unit.end} are at {start} to {end}")


def _mismatch(lm: LanguageModel, att: Attribution, what: str) -> ParameterError:
    return ParameterError(
        f"{lm.identity.name} does not cut this text into the tokens that the attribution, made with {att.model.name}, "
        f"is about: {what}; expected the same tokens. Use the model that made it, or attribute again with this one."
    )
