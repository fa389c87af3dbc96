"""A model's identity: enough to tell whether it is the same model as before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

_SAMPLES = 64
"""Numbers of each weight tensor that its hash is made of."""

_FILES = ("*config.json", "*token*", "vocab*", "merges.txt", "*.model", "*.py", "*.jinja", "*_templates/*.jinja")
"""Files of a folder that decide what its model computes: configuration, tokenizer, code, and chat templates."""


def sample_weights(model: Any) -> str:
    """The sha256 of samples of every weight tensor of a torch module, with names, shapes and types."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if not weight.is_meta and weight.numel():
            flat = weight.detach().flatten()
            positions = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
            digest.update(flat[positions.to(flat.device)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def fingerprint(folder: Path, model: Any) -> str:
    """The sha256 of a folder's configuration, tokenizer, code and chat templates, and of sampled weights."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}):
        digest.update(
            f"{path.relative_to(folder).as_posix()!r} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode()
        )
    return hashlib.sha256(f"{digest.hexdigest()} {sample_weights(model)}".encode()).hexdigest()
