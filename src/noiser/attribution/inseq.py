"""Attributions to Inseq, and back from its objects or from the JSON files that it writes.

Inseq's files keep tensors as base64 of safetensors and name Python classes. They are read as plain data: no class that
a file names is looked up, and Inseq need not be installed. Inseq keeps the vocabulary's names of tokens, such as
"Ġsport" or "▁sport"; `place_tokens` finds them in a text.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.attribution.record import AttributionRecord
from noiser.attribution.store import from_dict, to_dict
from noiser.errors import DependencyError, ParameterError, StoredFileError
from noiser.text import byte_level_bytes, join_overlapping
from noiser.types import ModelIdentity, Span, Target

Reduction = Literal["l2", "sum", "mean"]

LARGEST = 2**28
"""Bytes of JSON that a compressed file may hold: a small one could fill the memory."""

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def to_inseq(att: AttributionRecord) -> Any:
    """Inseq's object of the same scores; see `Attribution.to_inseq`."""
    if any(target.rest for target in att.targets):
        raise ParameterError(
            f"The targets are spans ({att.target_unit}); expected tokens, which are the steps of Inseq's records. "
            "Attribute again with target_unit='token'."
        )
    try:
        import inseq.data  # pyright: ignore
        from inseq.utils.typing import TokenWithId  # pyright: ignore
    except ImportError as error:
        raise DependencyError(
            f"Inseq could not be imported ({error}); install it with: pip install 'noiser[inseq]' (or "
            "pip install inseq)."
        ) from error
    written, scores, start = _tokens(att)
    tokens = [TokenWithId(*token) for token in written]
    sequence = inseq.data.attribution.CoarseFeatureAttributionSequenceOutput(
        source=tokens[:start],
        target=tokens,
        target_attributions=scores,
        step_scores={"probability": torch.tensor([target.probability for target in att.targets], device="cpu")},
        sequence_scores={},
        attr_pos_start=start,
        attr_pos_end=len(tokens),
    )
    info: dict[str, Any] = {  # what Inseq keeps about a run, as far as it is known, and the whole attribution
        **{name: {} for name in ("attribution_args", "attributed_fn_args", "generation_args", "step_scores_args")},
        **dict.fromkeys(("attribute_target", "constrained_decoding", "generate_from_target_prefix"), False),
        **dict.fromkeys(("include_eos_baseline", "output_step_attributions"), False),
        **dict.fromkeys(("tokenizer_class", "tokenizer_name")),
        "attribution_method": att.method,
        "attributed_fn": "probability_fn",
        "attr_pos_start": start,
        "attr_pos_end": len(tokens),
        "generated_texts": [att.text + att.targets[-1].text],
        "input_texts": [att.text[: att.prompt_length]],
        "model_class": att.model.architecture,
        "model_name": att.model.name,
        "step_scores": ["probability"],
        "noiser": [to_dict(att)],
    }
    return inseq.data.FeatureAttributionOutput(sequence_attributions=[sequence], info=info)


def _tokens(att: AttributionRecord) -> tuple[list[tuple[str, int]], Float[Tensor, "tokens targets"], int]:
    """Text and id of each token, their scores, and how many tokens stand before the first target.

    A unit of the prompt is one token. Text in no unit, such as a chat template, is a token without scores. A unit of
    the continuation is as many tokens as it has targets, and each has an equal share of its score. The id is -1 where
    a token is not one of the vocabulary's.
    """
    several = len(att.targets) > 1
    end = att.prompt_length if several else len(att.text)
    tokens: list[tuple[str, int, int | None]] = []  # text, id, unit
    position = 0
    for index, unit in enumerate(att.units):
        if unit.start >= end and unit.start >= att.prompt_length and several:
            continue
        gap = att.text[position : unit.start]
        tokens += [(gap, -1, None)] if gap else []
        tokens.append((unit.text, -1, index))
        position = max(position, unit.end)
    if att.text[position:end]:
        tokens.append((att.text[position:end], -1, None))
    start, unit_of = len(tokens), _units_of_targets(att) if several else {}
    tokens += [(target.text, target.token_id, unit_of.get(row)) for row, target in enumerate(att.targets)]
    units = [unit for _, _, unit in tokens]
    scores = att.scores.new_full((len(tokens), len(att.targets)), torch.nan)
    for index, unit in enumerate(units):
        if unit is not None:
            scores[index] = att.scores[:, unit] / units.count(unit)
    return [(text, token_id) for text, token_id, _ in tokens], scores, start


def _units_of_targets(att: AttributionRecord) -> dict[int, int]:
    """The unit of each target that is itself a unit, or part of one, for the targets after it."""
    units = [(index, unit) for index, unit in enumerate(att.units) if unit.start >= att.prompt_length]
    if not units:
        return {}
    skipped, position, first = 0, att.prompt_length, units[0][1]
    while position < first.start and skipped < len(att.targets):  # a special token stands before the first unit
        position += len(att.targets[skipped].text)
        skipped += 1
    base = first.token_indices[0] - skipped
    return {token - base: index for index, unit in units for token in unit.token_indices}


def from_inseq(source: Any, index: int) -> dict[str, Any]:
    """The fields of a record for one sequence of an Inseq result; see `Attribution.from_inseq`."""
    if hasattr(source, "sequence_attributions"):
        return _record([vars(item) | {"kind": type(item).__name__} for item in source], source.info, index)
    if not isinstance(source, str | PathLike):
        raise ParameterError(
            f"Got a {type(source).__name__}; expected Inseq's FeatureAttributionOutput, or the path of a file that "
            "its `save` wrote."
        )
    content = Path(source).read_bytes()
    try:
        fields = _record(*_read(content), index)
        from_dict(to_dict(AttributionRecord(**fields)))  # a check: what is read from a file can be saved
        return fields
    except ParameterError:
        raise
    except Exception as error:
        raise StoredFileError(
            f"{os.fspath(source)} is not a readable attribution of Inseq ({type(error).__name__}: {error}); expected a "
            "file that `save` of Inseq's FeatureAttributionOutput wrote, without use_primitives."
        ) from error


def _record(sequences: Sequence[Mapping[str, Any]], info: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not -len(sequences) <= index < len(sequences):
        raise ParameterError(f"index is {index}; expected one below {len(sequences)}, the number of sequences.")
    sequence, written = sequences[index], info.get("noiser")
    if sequence.get("source_attributions") is not None or sequence.get("target_attributions") is None:
        raise ParameterError(
            "The Inseq result is of an encoder-decoder model, or has no scores; expected one of a decoder-only model."
        )
    if not isinstance(written, list) or len(written) != len(sequences):
        return _fields(sequence, info, index)
    fields = from_dict(written[index])
    if _is_unchanged(AttributionRecord(**fields), sequence):
        return fields
    return _fields(sequence, info, index) | {name: fields[name] for name in ("parameters", "seed")}


def _is_unchanged(record: AttributionRecord, sequence: Mapping[str, Any]) -> bool:
    """Whether the sequence is what `to_inseq` makes of the record, perhaps saved in less precision."""
    tokens, scores, start = _tokens(record)
    saved: Tensor = sequence["target_attributions"]
    same = tokens == [(token.token, token.id) for token in sequence["target"]] and start == sequence["attr_pos_start"]
    if not same or scores.shape != saved.shape:
        return False
    rounded = [scores.to(dtype).float() for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn)]
    return any(torch.allclose(saved.float(), values, rtol=0, atol=0, equal_nan=True) for values in rounded)


def reduce_trailing(
    scores: Float[Tensor, "tokens targets *rest"], kind: str, how: Reduction | None = None
) -> Float[Tensor, "tokens targets"]:
    """One number per token and target, from scores that have further dimensions.

    Args:
        scores: with embedding dimensions, layers or heads after the first two dimensions.
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


def _fields(sequence: Mapping[str, Any], info: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The fields of a record, from what Inseq keeps."""
    start, names = sequence["attr_pos_start"], [token.token for token in sequence["target"]]
    scores = reduce_trailing(sequence["target_attributions"], sequence["kind"]).T
    count = len(scores)
    if not 0 < start <= len(names) - count:
        raise StoredFileError(f"attr_pos_start is {start}; expected 1 to {len(names) - count}.")
    later = torch.ones_like(scores, dtype=torch.bool).triu(start)  # row i has no score at start + i and after it
    scores = scores.masked_fill(later, torch.nan)
    texts = info.get("generated_texts")
    text, places = place_tokens(names, texts[index] if isinstance(texts, list) else None)
    pieces = [text[begin:end] or name for (begin, end), name in zip(places, names, strict=True)]
    groups = join_overlapping(places[: start + count - 1])
    saved = (sequence.get("step_scores") or {}).get("probability")
    probabilities = [math.nan] * count if saved is None else saved.tolist()
    method, parameters, seed = _method(info)
    prompt = text[: places[start - 1][1]]
    return {
        "text": text[: places[start + count - 2][1]],
        "prompt_length": len(prompt),
        "prompt": prompt,
        "scores": torch.stack([scores[:, group].sum(-1) for group in groups], -1),
        "units": tuple(Span(pieces[group[0]], *places[group[0]], tuple(group)) for group in groups),
        "targets": tuple(
            Target(pieces[row], sequence["target"][row].id, probability, 0)
            for row, probability in enumerate(probabilities, start)
        ),
        "method": method,
        "parameters": parameters,
        "seed": seed,
        "model": ModelIdentity(
            info.get("model_name") or "unknown", None, "unknown", info.get("model_class") or "unknown"
        ),
        "info": {"inseq": {key: info[key] for key in info if not key.endswith("_texts") and key != "noiser"}},
    }


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


class _Token(NamedTuple):
    token: str
    id: int


def _read(content: bytes) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The sequences and settings in a file."""
    text = _decompressed(content) if content[:2] == b"\x1f\x8b" else content
    result = json.loads(text, object_hook=_decoded)
    for sequence in result["sequence_attributions"]:
        scores = sequence.get("step_scores") or {}
        sequence["step_scores"] = {name: _tensor(encoded) for name, encoded in scores.items()}
        for name in ("source_attributions", "target_attributions"):
            sequence[name] = _tensor(sequence.get(name))
    return result["sequence_attributions"], result["info"]


def _decompressed(content: bytes) -> bytes:
    """What a gzip file holds, up to `LARGEST` bytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it holds more than {LARGEST >> 20} MB; decompress it yourself if you trust it")
    return text


def _decoded(value: dict[str, Any]) -> Any:
    """Instances as the dicts of their attributes, with the class's name as `kind`; tokens as tokens."""
    if "__instance_type__" not in value:
        return value
    fields, kind = value["attributes"], value["__instance_type__"][1]
    return _Token(fields["token"], fields["id"]) if kind == "TokenWithId" else {**fields, "kind": kind}


def _tensor(encoded: str | None) -> Tensor | None:
    from safetensors.torch import load

    return None if encoded is None else load(base64.b64decode(encoded))["attribution"].float()


def place_tokens(tokens: Sequence[str], text: str | None) -> tuple[str, list[tuple[int, int]]]:
    """The text that the tokens stand for, and each token's (start, end) in it.

    A token that the text does not hold at its place, such as an added BOS, is empty. Byte-level pieces of one character
    overlap in it.

    Args:
        tokens: names of tokens, in order.
        text: what they stand for or begin; None where it is not known, so that it is made up of the names.
    """
    joined = "".join(tokens)
    readers = [_bytes_of_piece, _bytes_of_byte_level]  # the likelier first
    readings = [[read(token) for token in tokens] for read in (readers[::-1] if re.search("[ĠĊ]", joined) else readers)]
    if text is None:
        whole = b"".join(readings[0])
        return whole.decode(errors="replace"), _spans(whole, readings[0])
    whole = text.encode()
    return text, _spans(
        whole, max(readings, key=lambda pieces: sum(end - start for start, end in _walk(whole, pieces)))
    )


def _bytes_of_piece(token: str) -> bytes:
    match = _BYTE.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


def _bytes_of_byte_level(token: str) -> bytes:
    found = byte_level_bytes(token)
    return token.encode() if found is None else found


def _walk(whole: bytes, pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """(start, end) of each piece in bytes; empty where the bytes do not go on with it."""
    places: list[tuple[int, int]] = []
    position = 0
    for piece in pieces:
        if position == 0 and not whole.startswith(piece):
            piece = piece.removeprefix(b" ")  # the space that a tokenizer puts before a text
        length = len(piece) if whole.startswith(piece, position) else 0
        places.append((position, position + length))
        position += length
    return places


def _spans(whole: bytes, pieces: Sequence[bytes]) -> list[tuple[int, int]]:
    """The same in characters: a piece of a character has all of it."""
    characters = [0]  # how many begin before each byte
    for byte in whole:
        characters.append(characters[-1] + (byte & 0xC0 != 0x80))
    return [
        (characters[start + 1] - 1, characters[end]) if end > start else (first := characters[start], first)
        for start, end in _walk(whole, pieces)
    ]
