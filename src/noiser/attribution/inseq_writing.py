"""Attributions to Inseq, whose heat maps, aggregators and files then work on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.errors import DependencyError

if TYPE_CHECKING:
    from noiser.attribution.record import Attribution

__all__ = ["to_inseq", "written"]


def to_inseq(att: Attribution) -> Any:
    """Inseq's object of the same scores; see `Attribution.to_inseq`."""
    data, token = _inseq()
    named, scores, start = written(att)
    tokens = [token(*each) for each in named]
    sequence = data.attribution.CoarseFeatureAttributionSequenceOutput(
        source=tokens[:start],
        target=tokens,
        target_attributions=scores,
        step_scores={"probability": torch.tensor([target.probability for target in att.targets])},
        sequence_scores={},
        attr_pos_start=start,
        attr_pos_end=len(tokens),
    )
    return data.FeatureAttributionOutput(sequence_attributions=[sequence], info=_info(att, start, len(tokens)))


def written(att: Attribution) -> tuple[list[tuple[str, int]], Float[Tensor, "tokens targets"], int]:
    """The tokens, as text and id, their scores, and how many of them stand before the first target."""
    entries, start = _entries(att)
    scores = torch.full((len(entries), len(att.targets)), torch.nan)
    for row, (_, _, unit) in enumerate(entries):
        if unit is not None:
            scores[row] = att.scores[:, unit] / _tokens_of(entries, unit)
    return [(text, identity) for text, identity, _ in entries], scores, start


Entry = tuple[str, int, int | None]
"""A token as Inseq shows it: text, id (-1 where it is none of the vocabulary's), and the unit that it belongs to."""


def _entries(att: Attribution) -> tuple[list[Entry], int]:
    """Prompt and continuation as tokens, and how many stand before the first target.

    A unit of the prompt is one token. Text in no unit, such as a chat template, is a token without scores. A unit of
    the continuation is as many tokens as it has targets.
    """
    several = len(att.targets) > 1
    end = att.prompt_length if several else len(att.text)
    entries: list[Entry] = []
    at = 0
    for index, unit in enumerate(att.units):
        if unit.start >= end and unit.start >= att.prompt_length and several:
            continue
        if att.text[at : unit.start]:
            entries.append((att.text[at : unit.start], -1, None))
        entries.append((unit.text, -1, index))
        at = max(at, unit.end)
    if att.text[at:end]:
        entries.append((att.text[at:end], -1, None))
    owners = _owners(att) if several else {}
    targets = [(target.text, target.token_id, owners.get(g)) for g, target in enumerate(att.targets)]
    return entries + targets, len(entries)


def _owners(att: Attribution) -> dict[int, int]:
    """The unit of each target that is itself a unit, or part of one, for the targets behind it."""
    units = [(index, unit) for index, unit in enumerate(att.units) if unit.start >= att.prompt_length]
    if not units:
        return {}
    skipped, at, first = 0, att.prompt_length, units[0][1]
    while at < first.start and skipped < len(att.targets):  # a special token stands before the first unit
        at += len(att.targets[skipped].text)
        skipped += 1
    base = first.token_indices[0] - skipped
    return {position - base: index for index, unit in units for position in unit.token_indices}


def _tokens_of(entries: list[Entry], unit: int) -> int:
    return sum(owner == unit for _, _, owner in entries)


def _info(att: Attribution, start: int, end: int) -> dict[str, Any]:
    """What Inseq keeps about a run, as far as it is known, and the whole attribution in our own form."""
    return {
        "attribution_method": att.method,
        "attribution_args": {},
        "attributed_fn": "probability_fn",
        "attributed_fn_args": {},
        "attribute_target": False,
        "attr_pos_start": start,
        "attr_pos_end": end,
        "constrained_decoding": False,
        "generate_from_target_prefix": False,
        "generated_texts": [att.text + att.targets[-1].text],
        "generation_args": {},
        "include_eos_baseline": False,
        "input_texts": [att.text[: att.prompt_length]],
        "model_class": att.model.architecture,
        "model_name": att.model.name,
        "output_step_attributions": False,
        "step_scores": ["probability"],
        "step_scores_args": {},
        "tokenizer_class": None,
        "tokenizer_name": None,
        "noiser": [att.to_dict()],
    }


def _inseq() -> tuple[Any, Any]:
    try:
        import inseq.data  # pyright: ignore
        from inseq.utils.typing import TokenWithId  # pyright: ignore
    except ImportError as error:
        raise DependencyError(
            f"Inseq could not be imported ({error}); install it with: pip install 'noiser[inseq]' (or "
            "pip install inseq)."
        ) from error
    return inseq.data, TokenWithId
