"""Attributions from Inseq: from its objects, or from the JSON files that it writes.

Inseq's files keep tensors as base64 of safetensors and name Python classes. They are read as plain data: no class that
a file names is looked up, and Inseq need not be installed.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution.inseq_tokens import place_tokens
from noiser.attribution.inseq_writing import written
from noiser.attribution.record import Attribution
from noiser.attribution.restore import from_dict
from noiser.errors import ParameterError, StoredFileError
from noiser.types import ModelIdentity, Span, Target

__all__ = ["Reduction", "from_inseq", "reduce_trailing"]

Reduction = Literal["l2", "sum", "mean"]


class _Sequence(NamedTuple):
    """What is needed of Inseq's attribution of one sequence.

    Attributes:
        kind: name of its class.
        tokens: names and ids, prompt and generated.
        scores: [tokens, generated, ...].
        start: how many of the tokens are the prompt.
        probabilities: of the generated tokens, where Inseq kept them.
    """

    kind: str
    tokens: list[tuple[str, int]]
    scores: Tensor
    start: int
    probabilities: list[float] | None


def from_inseq(source: Any, index: int = 0) -> Attribution:
    """One sequence of an Inseq result, as an attribution; see `Attribution.from_inseq`."""
    if isinstance(source, str | PathLike):
        sequences, info = _read(source)
    else:
        if not hasattr(source, "sequence_attributions"):
            raise ParameterError(
                f"Got a {type(source).__name__}; expected Inseq's FeatureAttributionOutput, or the path of a file that "
                "its `save` wrote."
            )
        sequences, info = [vars(item) | {"kind": type(item).__name__} for item in source], source.info
    if not -len(sequences) <= index < len(sequences):
        raise ParameterError(f"index is {index}; expected one below {len(sequences)}, the number of sequences.")
    sequence, own = _sequence(sequences[index]), info.get("noiser")
    if not isinstance(own, list) or len(own) != len(sequences):
        return _attribution(sequence, info, index)
    record = from_dict(own[index])
    if _is_written(record, sequence):
        return record
    return replace(_attribution(sequence, info, index), parameters=record.parameters, seed=record.seed)


def _is_written(record: Attribution, sequence: _Sequence) -> bool:
    """Whether the sequence is what `to_inseq` makes of the record, perhaps saved in less precision."""
    tokens, scores, start = written(record)
    if (tokens, start, scores.shape) != (sequence.tokens, sequence.start, sequence.scores.shape):
        return False
    found = sequence.scores.float()
    rounded = [scores.to(dtype).float() for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn)]
    return any(torch.allclose(found, each, rtol=0, atol=0, equal_nan=True) for each in rounded)


def reduce_trailing(
    scores: Float[Tensor, "tokens targets *rest"], kind: str, how: Reduction | None = None
) -> Float[Tensor, "tokens targets"]:
    """One number a token and target, from scores that have further dimensions.

    Args:
        scores: with embedding dimensions, layers or heads behind the first two dimensions.
        kind: name of Inseq's class, which says what Inseq itself would do.
        how: "l2", "sum" or "mean"; None: "mean" where the dimensions are layers and heads, else "l2", as Inseq does
            before it normalises.
    """
    scores = scores.float()
    if scores.ndim == 2:
        return scores
    flat = scores.flatten(2)
    how = how or ("mean" if kind.startswith("MultiDimensional") else "l2")
    return flat.norm(dim=-1) if how == "l2" else flat.sum(-1) if how == "sum" else flat.mean(-1)


def _sequence(fields: Mapping[str, Any]) -> _Sequence:
    scores = fields.get("target_attributions")
    if fields.get("source_attributions") is not None or scores is None:
        raise ParameterError(
            "The Inseq result is of an encoder-decoder model, or has no scores; expected one of a decoder-only model."
        )
    found = (fields.get("step_scores") or {}).get("probability")
    return _Sequence(
        kind=fields["kind"],
        tokens=[(token.token, token.id) for token in fields["target"]],
        scores=scores,
        start=fields["attr_pos_start"],
        probabilities=None if found is None else found.tolist(),
    )


def _attribution(sequence: _Sequence, info: Mapping[str, Any], index: int) -> Attribution:
    names = [name for name, _ in sequence.tokens]
    start, count = sequence.start, sequence.scores.shape[1]
    said = info.get("generated_texts")
    text, places = place_tokens(names, said[index] if isinstance(said, list) else None)
    pieces = [text[a:b] or name for (a, b), name in zip(places, names, strict=True)]
    method, parameters, seed = _method(info)
    known = sequence.probabilities or [math.nan] * count
    scores = reduce_trailing(sequence.scores, sequence.kind).T
    later = torch.arange(scores.shape[1])[None] >= start + torch.arange(count)[:, None]
    scores = scores.masked_fill(later, torch.nan)
    groups = _characters(places[: start + count - 1])
    return Attribution(
        text=text[: places[start + count - 2][1]],
        prompt_length=places[start - 1][1],
        scores=torch.stack([scores[:, group].sum(-1) for group in groups], -1),
        units=tuple(Span(pieces[group[0]], *places[group[0]], tuple(group)) for group in groups),
        targets=tuple(Target(pieces[start + g], sequence.tokens[start + g][1], known[g], 0) for g in range(count)),
        method=method,
        parameters=parameters,
        seed=seed,
        model=ModelIdentity(
            name=info.get("model_name") or "unknown",
            revision=None,
            dtype="unknown",
            architecture=info.get("model_class") or "unknown",
        ),
        prompt=text[: places[start - 1][1]],
        info={"inseq": {key: value for key, value in info.items() if not key.endswith("_texts") and key != "noiser"}},
    )


def _characters(places: list[tuple[int, int]]) -> list[list[int]]:
    """Tokens one by one, but pieces of one character together."""
    groups: list[list[int]] = []
    for index, (start, end) in enumerate(places):
        if groups and start < places[groups[-1][-1]][1] and start < end:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _method(info: Mapping[str, Any]) -> tuple[str, dict[str, Any], int]:
    """Our name, hyper-parameters and seed of what Inseq ran."""
    name, arguments = str(info.get("attribution_method")), dict(info.get("attribution_args") or {})
    if "@" in name:  # written by `to_inseq`
        return name, arguments, 0
    if name.startswith("noiser"):
        arguments.pop("special_tokens", None)
        return arguments.pop("noiser_method", f"{name}@1"), arguments, int(arguments.pop("seed", 0))
    explained = str(info.get("attributed_fn", "probability_fn")).removesuffix("_fn")
    return f"inseq:{name}@1", {"arguments": arguments, "attributed_fn": explained}, 0


def _read(path: str | PathLike[str]) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    """The sequences and settings in a file."""
    data = Path(path).read_bytes()
    try:
        loaded = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        attributes = _plain(loaded)
        return [_tensors(item) for item in attributes["sequence_attributions"]], attributes["info"]
    except StoredFileError:
        raise
    except Exception as error:
        raise StoredFileError(
            f"{os.fspath(path)} is no readable attribution of Inseq ({type(error).__name__}: {error}); expected a file "
            "that `save` of Inseq's FeatureAttributionOutput wrote, without use_primitives."
        ) from error


class _Token(NamedTuple):
    token: str
    id: int


def _plain(value: Any) -> Any:
    """Instances as the dicts of their attributes, with the class's name as `kind`; tokens as tokens."""
    if isinstance(value, list):
        return [_plain(item) for item in value]  # pyright: ignore
    if not isinstance(value, dict):
        return value
    if "__instance_type__" not in value:
        return {key: _plain(item) for key, item in value.items()}  # pyright: ignore
    fields = {key: _plain(item) for key, item in value["attributes"].items()}  # pyright: ignore
    kind = value["__instance_type__"][1]  # pyright: ignore
    return _Token(fields["token"], fields["id"]) if kind == "TokenWithId" else {**fields, "kind": kind}


def _tensors(fields: dict[str, Any]) -> dict[str, Any]:
    decoded = {key: _tensor(fields.get(key)) for key in ("source_attributions", "target_attributions")}
    scores = {name: _tensor(value) for name, value in (fields.get("step_scores") or {}).items()}
    return {**fields, **decoded, "step_scores": scores}


def _tensor(encoded: str | None) -> Tensor | None:
    if encoded is None:
        return None
    from safetensors.torch import load

    return load(base64.b64decode(encoded))["attribution"].float()
