"""Where a checkpoint lies, and which it is."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from noiser import errors
from noiser.errors import DependencyError, ModelError, NoiserError
from noiser.files import sha256_of
from noiser.model.gguf import BUILT_IN, converted
from noiser.model.memory import is_out_of_memory


class CheckpointPlace(NamedTuple):
    """The folder or hub id of a checkpoint, its name, and the sha256 of a GGUF file."""

    name: str
    source: str
    revision: str | None = None
    is_folder: bool = True


def find(name: str) -> CheckpointPlace:
    """The place of the checkpoint of that name; a GGUF file is converted. See `load_model` for the
    errors.
    """
    path, built_in = os.path.expanduser(name), BUILT_IN.get(name)  # noqa: PTH111 - Path's own raises for unknown users
    if built_in or os.path.isfile(path):  # noqa: PTH113 - Path's own raises for names that are too long
        with explain_errors(name):
            if built_in:
                return CheckpointPlace(name, *converted(name, built_in.files(), built_in.sha256))
            file = Path(path).resolve()
            return CheckpointPlace(str(file), *converted(file.stem, [file]))
    if os.path.isdir(path) and name.strip():  # noqa: PTH112
        return CheckpointPlace(os.path.realpath(path), os.path.realpath(path))
    return CheckpointPlace(name, name, is_folder=False)


def revision_of(place: CheckpointPlace, model: Any, origin: dict[str, Any]) -> str | None:
    """The hash of a GGUF file, a folder's fingerprint, or the commit of a hub's model in the local
    cache.
    """
    from huggingface_hub import try_to_load_from_cache

    if place.revision or place.is_folder:
        return place.revision or fingerprint(Path(place.source), model)
    names = ("config.json", "adapter_config.json")
    files = (
        try_to_load_from_cache(place.source, name, revision=origin["revision"]) for name in names
    )
    return next((Path(file).parent.name for file in files if isinstance(file, str)), None)


def fingerprint(folder: Path, model: Any) -> str:
    """The sha256 of a folder's configuration, tokenizer, code and chat templates, and of samples of
    every weight.
    """
    files = hashlib.sha256()
    weights = hashlib.sha256()
    names = (
        "*config.json",
        "*token*",
        "vocab*",
        "merges.txt",
        "*.model",
        "*.py",
        "*.jinja",
        "*_templates/*.jinja",
        "chat_template.json",
    )
    for path in sorted(
        {path for pattern in names for path in folder.glob(pattern) if path.is_file()}
    ):
        files.update(f"{path.relative_to(folder).as_posix()!r} {sha256_of(path)}".encode())
    for name, weight in sorted(model.state_dict().items()):
        weights.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        if not weight.is_meta and weight.numel():
            quantised = (
                type(weight).dequantize is not torch.Tensor.dequantize
            )  # such weights may not flatten
            flat = (weight.dequantize() if quantised else weight).detach().flatten()
            positions = torch.linspace(
                0, flat.numel() - 1, min(64, flat.numel()), dtype=torch.float64
            ).long()
            weights.update(flat[positions.to(flat.device)].float().cpu().numpy().tobytes())
    return hashlib.sha256(f"{files.hexdigest()} {weights.hexdigest()}".encode()).hexdigest()


@contextmanager
def explain_errors(name: str) -> Generator[None]:
    """Turns what libraries raise into errors that say what to do; the hub shows bars, transformers
    none for weights.
    """
    from transformers.utils import logging

    bars: Any = logging
    shown, bars._tqdm_active = bars._tqdm_active, False  # the public switch is the hub's as well
    try:
        yield
    except NoiserError:
        raise
    except Exception as error:  # they have no root in common
        raise _explain(name if len(name) <= 200 else f"{name[:200]}...", error) from error
    finally:
        bars._tqdm_active = shown


def _explain(name: str, error: Exception) -> NoiserError:
    said = " ".join(str(error).split())[:300].rstrip(".")
    model = f"The model {name!r}"
    if isinstance(error, ImportError):
        return DependencyError(
            f"{model} needs a package that is not installed: {said}. Install it."
        )
    if is_out_of_memory(error):
        return ModelError(
            f"{model} does not fit into memory: {said}. Load it in a smaller dtype or "
            f"device_map='auto'."
        )
    if "trust_remote_code" in str(error):
        trust = "If you trust it, pass trust_remote_code=True (--trust-remote-code)."
        return ModelError(f"{model} comes with code of its own. {trust}")
    if "not supported" in said:
        text = f"{model} is not a causal language model that transformers can load: {said[:150]}."
        return errors.UnsupportedModelError(f"{text} Take a decoder-only model.")
    if os.path.exists(os.path.expanduser(name)) or name in BUILT_IN:  # noqa: PTH110, PTH111
        return ModelError(
            f"{model} is damaged or incomplete: {type(error).__name__}: {said}. Fetch or save it "
            f"again."
        )
    expected = (
        f"a built-in name ({', '.join(BUILT_IN)}), a local folder, a .gguf file, or the id of a "
        f"model on the hub"
    )
    return errors.ModelNotFoundError(
        f"Cannot find the model {name!r}: {said}. Expected {expected}."
    )
