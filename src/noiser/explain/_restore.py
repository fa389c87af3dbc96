"""From a result back to the query that it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from noiser.attribution import Attribution
from noiser.attribution.regions import pictures_of
from noiser.attribution.store import to_jsonable
from noiser.checks import plain
from noiser.engine._prepare import check_length, foil_run, query_of
from noiser.engine.query import Prefill, Query
from noiser.errors import ParameterError
from noiser.model.language_model import LanguageModel, check_probabilities
from noiser.text import Encoding, as_prompt
from noiser.text.pictures import Region, has_pictures, sha256_of_pixels, without_data
from noiser.types import Prompt, Question, Span


async def restore(lm: LanguageModel, att: Attribution, prompt: Prompt | None = None) -> Query:
    """The query that an attribution answers, also one that was loaded or aggregated.

    The model need not be the one that made the attribution, but its tokenizer must cut the text
    into the same tokens. A result keeps previews of pictures: with some in the prompt, `prompt` is
    the chat that was explained, with its pictures.

    Raises:
        ParameterError: the model's tokenizer reads the prompt, a unit or a target otherwise, the
            attribution explains a number of the caller's own, or `prompt` is missing or another
            one.
        PromptError: the text exceeds the model's context.
    """
    check_probabilities(lm, "a measure of an attribution")
    if "of" in att.info:
        raise ParameterError(
            f"The attribution explains a number of your own, {att.info['of']}, which its file does "
            "not hold. Attribute again without `of`."
        )
    asked = _asked(lm, att, prompt)
    encoding = lm.encode(
        asked,
        rendered=att.text[: att.prompt_length],
        documents=bool(att.info.get("sources")),
        pictures="images" in att.info,
    )
    _check_pictures(encoding, att)
    begin = len(encoding.token_ids)
    position = begin
    spans: list[range] = []
    ids: list[int] = []
    for target in att.targets:
        start = position + len(target.before)
        position = start + len(target.token_ids)
        spans.append(range(start, position))
        ids += [*target.before, *target.token_ids]
    foil_ids = att.foil.token_ids if att.foil else ()
    shared = len(att.targets[0].before)
    check_length(lm, begin + max(len(ids), shared + len(foil_ids)) - 1)
    outside = [token for token in (*ids, *foil_ids) if not 0 <= token < lm.vocabulary_size]
    query = None
    if outside:
        problem = f"target id {outside[0]} is outside its vocabulary of {lm.vocabulary_size} tokens"
    else:
        scene = lm.scene(encoding)
        context = lm.context((*encoding.token_ids, *ids[:-1]), scene=scene)
        exact = [(token, *foil_ids[:1]) for token in ids]
        logits = await Prefill(context, range(begin - 1, begin + len(ids) - 1), exact)
        too_large = [token for token in (*ids, *foil_ids) if token >= logits.shape[-1]]
        if too_large:
            raise ParameterError(
                f"{lm.identity.name} cannot predict the target id {too_large[0]} of this "
                f"attribution, made with {att.model.name}: it has {logits.shape[-1]} logits. "
                "Use the model that made it."
            )
        disturbed = att.info.get("first_token") == "disturbed"
        question = Question(
            prompt=asked,
            unit=att.unit,  # pyright: ignore[reportArgumentType]
            target_unit=att.target_unit,  # pyright: ignore[reportArgumentType]
            special_tokens="perturbed" if disturbed else "frozen",
        )
        foil = None
        if foil_ids:
            foil = await foil_run(
                lm, encoding, context, logits, tuple(ids), shared, foil_ids, scene
            )
        query = query_of(
            lm, question, encoding, tuple(ids), spans, att.units, context, logits, foil
        )
        if scene is not None:
            removal = att.info["images"]["removal"]
            query = replace(query, scene=scene, regions=_regions(att), image_removal=removal)
        problem = _difference(query, att)
    if problem or query is None:
        raise ParameterError(
            f"{lm.identity.name} does not cut this text into the tokens that the attribution, made "
            f"with {att.model.name}, is about: {problem}; expected the same tokens. "
            "Use the model that made it, or attribute again with this one."
        )
    return query


def _asked(lm: LanguageModel, att: Attribution, prompt: Prompt | None) -> Prompt:
    """The prompt with its pictures. Raises ParameterError where they are missing, or others."""
    if prompt is None:
        if "images" in att.info:
            raise ParameterError(
                "The result keeps previews of the pictures in its prompt, and not the pictures. "
                "Give noiser.without the chat with its pictures as `prompt`, or ask "
                "noiser.attribute or noiser.rule; tolerance and metrics read text alone."
            )
        return att.prompt
    asked: Any = as_prompt(lm.tokenizer, plain(prompt))
    without_pictures = without_data(asked) if has_pictures(asked) else asked
    if to_jsonable(without_pictures) != to_jsonable(att.prompt):
        raise ParameterError(
            "The prompt is not the one that the attribution is about; expected the same messages."
        )
    return asked


def _check_pictures(encoding: Encoding, att: Attribution) -> None:
    """Raises ParameterError unless the pictures are those that were explained."""
    images = () if encoding.pictures is None else encoding.pictures.images
    explained = [picture.get("sha256") for picture in pictures_of(att)]
    given = [sha256_of_pixels(image) for image in images]
    if given != explained:
        raise ParameterError(
            "The pictures are not those that the attribution is about: they have other pixels. "
            "Give the files that were explained."
        )


def _regions(att: Attribution) -> dict[Span, Region]:
    """The units that are regions of pictures."""
    regions: dict[Span, Region] = {}
    for unit, box in zip(att.units, att.info["images"]["boxes"], strict=True):
        if box is not None:
            picture, *corners = box
            regions[unit] = Region(picture, tuple(corners))
    return regions


def _difference(query: Query, att: Attribution) -> str | None:
    """The first difference between a restored query and the attribution; None if there is none."""
    texts = tuple(target.text for target in att.targets)
    for subject, got, expected in (
        ("the targets read", query.target_texts, texts),
        ("prompt and continuation read", query.encoding.text, att.text),
        ("the foil reads", query.foil and query.foil.text, att.foil and att.foil.text),
    ):
        if got != expected:
            return f"{subject} {got!r} with it, not {expected!r}"
    # Spans that the caller chose, and sources, need only touch the characters of their tokens.
    aggregated: Mapping[str, Any] = att.info.get("aggregated") or {}
    unit_names = {att.unit, aggregated.get("from")}
    may_touch = not unit_names.isdisjoint({"spans", "source", "auto"})
    for unit in att.units:
        problem = _misplaced(unit, query.encoding.offsets, may_touch=may_touch)
        if problem:
            return problem
    return None


def _misplaced(unit: Span, offsets: Sequence[tuple[int, int]], *, may_touch: bool) -> str | None:
    """The difference between a unit's characters and its tokens' characters; None if they fit."""
    places = [offsets[index] for index in unit.token_indices if 0 <= index < len(offsets)]
    start = min((start for start, _ in places), default=0)
    end = max((end for _, end in places), default=0)
    is_complete = len(places) == len(unit.token_indices)
    touches = unit.overlaps(start, end)
    is_same = (start, end) == (unit.start, unit.end)
    if is_complete and (is_same or (may_touch and touches)):
        return None
    return f"the tokens of {unit.text!r} at {unit.start} to {unit.end} are at {start} to {end}"
