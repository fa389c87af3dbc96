"""Whether the weights are the same as before, and how fast they run here."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from noiser.errors import StoredFileError
from noiser.model import LanguageModel

__all__ = ["check_identity", "identity_of", "tokens_per_second"]

_SAMPLES = 64
"""Numbers of each weight tensor that its hash is made of."""


def identity_of(lm: LanguageModel) -> dict[str, Any]:
    """Name, revision, dtype, architecture, and the sha256 of a sample of every weight tensor."""
    return {**lm.identity._asdict(), "weights": _hash_of_weights(lm)}


def _hash_of_weights(lm: LanguageModel) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(lm.model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if not weight.is_meta and weight.numel():
            flat = weight.detach().flatten()
            places = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
            digest.update(flat[places.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def check_identity(label: str, found: Mapping[str, Any], stored: Mapping[str, Any] | None) -> None:
    """Raises StoredFileError where the model is not the one that rows are stored of."""
    if stored is None:
        return
    differing = [key for key in ("weights", "dtype", "architecture") if found[key] != stored.get(key)]
    if differing:
        changes = "; ".join(f"{key} was {stored.get(key)!r} and is {found[key]!r}" for key in differing)
        raise StoredFileError(
            f"The model {label!r} is not the one that the stored rows are about: {changes}. Load the same weights, or "
            "start another folder. Nothing stored was changed."
        )


def tokens_per_second(lm: LanguageModel) -> float:
    """The speed of a plain forward pass, measured on one batch."""
    length = 16
    rows = max(1, min(lm.batch_tokens, 1024) // length)
    ids = torch.linspace(0, lm.vocabulary_size - 1, rows * length).long().reshape(rows, length)
    with lm.running():
        inputs = lm.embed(ids)
        lm.logits(inputs[:1], positions=[length - 1])  # what is done once
        started = time.perf_counter()
        lm.logits(inputs, positions=[length - 1]).sum().item()
        return rows * length / (time.perf_counter() - started)
