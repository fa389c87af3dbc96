"""The question behind a result: from an Attribution back to the tokens, targets and units it was made from."""

from __future__ import annotations

from noiser.attribution import Attribution
from noiser.errors import ParameterError
from noiser.model.language_model import LanguageModel
from noiser.model.query import Query, check_length, query_of
from noiser.text import Encoding
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
    encoding = lm.encode(att.prompt, rendered=text)
    if encoding.text != text:
        raise _mismatch(lm, att, f"the prompt reads {encoding.text!r} with it, not {text!r}")
    ids = tuple(token for target in att.targets for token in (*target.before, *target.token_ids))
    foil_ids = () if att.foil is None else att.foil.token_ids
    if outside := [token for token in (*ids, *foil_ids) if not 0 <= token < lm.vocabulary_size]:
        raise _mismatch(lm, att, f"target id {outside[0]} is outside its vocabulary of {lm.vocabulary_size} tokens")
    check_length(lm, len(encoding.token_ids) + max(len(ids), len(foil_ids)) - 1)
    whole_foil = att.target_unit == "all"
    query = query_of(
        lm,
        att.prompt,
        encoding,
        ids,
        _target_spans(att, len(encoding.token_ids)),
        target_unit=att.target_unit,
        foil_id=foil_ids[0] if foil_ids and not whole_foil else None,
        foil_ids=foil_ids if whole_foil else (),
        units=att.units,
        unit=att.unit,
    )
    texts = tuple(target.text for target in att.targets)
    if query.target_texts != texts:
        raise _mismatch(lm, att, f"the targets read {query.target_texts} with it, not {texts}")
    if query.encoding.text != att.text:
        raise _mismatch(lm, att, f"prompt and continuation read {query.encoding.text!r} with it, not {att.text!r}")
    for unit in att.units:
        _check_unit(lm, att, query.encoding, unit)
    return query


def _target_spans(att: Attribution, position: int) -> list[range]:
    """The positions of each target's tokens; the first target, or the text before it, begins at `position`."""
    spans: list[range] = []
    for target in att.targets:
        start = position + len(target.before)
        position = start + len(target.token_ids)
        spans.append(range(start, position))
    return spans


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
