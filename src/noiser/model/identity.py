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


def fingerprint(folder: Path, model: Any) -> str:
    """The sha256 of a folder's configuration, tokenizer, code and chat templates, and of sampled weights.

    Samples are of every tensor in the `state_dict` of the torch module `model`, with its name, shape and type.
    """
    files, weights = hashlib.sha256(), hashlib.sha256()
    for path in sorted({path for pattern in _FILES for path in folder.glob(pattern) if path.is_file()}):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        files.update(f"{path.relative_to(folder).as_posix()!r} {content}".encode())
    for name, weight in sorted(model.state_dict().items()):
        weights.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if not weight.is_meta and weight.numel():
            flat = weight.detach().flatten()
            positions = torch.linspace(0, flat.numel() - 1, min(_SAMPLES, flat.numel()), dtype=torch.float64).long()
            weights.update(flat[positions.to(flat.device)].float().cpu().numpy().tobytes())
    return hashlib.sha256(f"{files.hexdigest()} {weights.hexdigest()}".encode()).hexdigest()


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit of a hub's model in the local cache, which a loaded model does not name; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    files = (try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", "adapter_config.json"))
    return next((Path(file).parent.name for file in files if isinstance(file, str)), None)
