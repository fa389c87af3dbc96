"""The question behind a result: from an Attribution back to the tokens, targets and units it was made from."""

from __future__ import annotations

from noiser.attribution import Attribution
from noiser.engine.query import Prefill, Query, Steps, check_length, query_of
from noiser.errors import ParameterError
from noiser.model.language_model import LanguageModel


def restore(lm: LanguageModel, att: Attribution) -> Steps[Query]:
    """The query that an attribution answers, to be asked again.

    The model need not be the one that made the attribution, but its tokenizer must cut the text into the same tokens.

    Args:
        lm: the model to ask.
        att: a result, also one that was loaded from a file or aggregated.

    Raises:
        ParameterError: the model's tokenizer reads the prompt, a unit or a target otherwise, or the attribution
            explains a number of the caller's own.
        PromptError: the text exceeds the model's context.
    """
    if "of" in att.info:
        raise ParameterError(
            f"The attribution explains a number of your own, {att.info['of']}, which its file does not hold. Attribute "
            "again without `of`."
        )
    text = att.text[: att.prompt_length]
    encoding = lm.encode(att.prompt, rendered=text)
    if encoding.text != text:
        raise _mismatch(lm, att, f"the prompt reads {encoding.text!r} with it, not {text!r}")
    begin = position = len(encoding.token_ids)
    spans, ids = list[range](), list[int]()
    for target in att.targets:
        start = position + len(target.before)
        position = start + len(target.token_ids)
        spans.append(range(start, position))
        ids += [*target.before, *target.token_ids]
    foil = None if att.foil is None else att.foil.token_id
    if outside := [token for token in (*ids, foil or 0) if not 0 <= token < lm.vocabulary_size]:
        raise _mismatch(lm, att, f"target id {outside[0]} is outside its vocabulary of {lm.vocabulary_size} tokens")
    check_length(lm, begin + len(ids) - 1)
    context = lm.context((*encoding.token_ids, *ids[:-1]))
    exact = [(token,) if foil is None else (token, foil) for token in ids]
    logits = yield Prefill(context, range(begin - 1, begin + len(ids) - 1), exact)
    query = query_of(
        lm,
        att.prompt,
        encoding,
        tuple(ids),
        spans,
        context=context,
        logits=logits,
        target_unit=att.target_unit,
        foil_id=foil,
        units=att.units,
        unit=att.unit,
    )
    texts = tuple(target.text for target in att.targets)
    for what, found, right in (
        ("the targets read", query.target_texts, texts),
        ("prompt and continuation read", query.encoding.text, att.text),
    ):
        if found != right:
            raise _mismatch(lm, att, f"{what} {found!r} with it, not {right!r}")
    # spans that the caller chose, and sources, need only touch the characters that their tokens cover
    offsets = query.encoding.offsets
    loose = {att.unit, att.info.get("aggregated", {}).get("from")} & {"spans", "source", "auto"}
    for unit in att.units:
        cover = [offsets[i] for i in unit.token_indices if 0 <= i < len(offsets)]
        start, end = min((start for start, _ in cover), default=0), max((end for _, end in cover), default=0)
        touches = loose and start < unit.end and unit.start < end
        if len(cover) < len(unit.token_indices) or not (touches or (start, end) == (unit.start, unit.end)):
            place = f"{unit.start} to {unit.end} are at {start} to {end}"
            raise _mismatch(lm, att, f"the tokens of {unit.text!r} at {place}")
    return query


def _mismatch(lm: LanguageModel, att: Attribution, what: str) -> ParameterError:
    return ParameterError(
        f"{lm.identity.name} does not cut this text into the tokens that the attribution, made with {att.model.name}, "
        f"is about: {what}; expected the same tokens. Use the model that made it, or attribute again with this one."
    )
