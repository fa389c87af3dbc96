"""A GGUF file once made into a folder that transformers loads in seconds."""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

from noiser.errors import ModelError, UnsupportedModelError
from noiser.model.catalog import BuiltIn, Weights
from noiser.model.checkpoint import check_complete
from noiser.model.gguf import GgufHead, read_head
from noiser.model.quiet import quiet_transformers
from noiser.model.store import build_entry, cache_errors, entry_path, file_sha256, is_whole
from noiser.version import version_of

__all__ = ["Converted", "built_in_entry", "convert_built_in", "convert_file"]

_TOKENIZER_BYTES = 100_000_000
"""Room for the tokenizer and configuration files, generously: the largest seen is 34 MB."""


class Converted:
    """A converted model in the cache.

    Attributes:
        folder: loadable by transformers.
        sha256: of the GGUF file.
    """

    def __init__(self, name: str, weights: Weights, sha256: str) -> None:
        self.name, self.weights, self.sha256 = name, weights, sha256
        self.folder = entry_path(name, sha256)

    def ensure(self, *, rebuild: bool = False) -> None:
        """Converts unless that was done. See `build_entry` for `rebuild` and errors."""
        if rebuild or not is_whole(self.folder):
            build_entry(self.folder, self._build, rebuild=rebuild)

    def is_damaged(self) -> bool:
        """Reads everything and compares it with the manifest."""
        return not is_whole(self.folder, thorough=True)

    def _build(self, folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix=".assembled-", dir=folder) as scratch:
            path = self.weights.path
            if path is None:
                path = Path(scratch) / f"{self.name}.gguf"
                assert self.weights.join is not None, "weights without a path are in parts"
                with cache_errors(needed=self.weights.size):
                    self.weights.join(path)
            head = read_head(path)
            with cache_errors(needed=4 * head.n_weights + _TOKENIZER_BYTES), _announced(self.name):
                convert(path, head, folder)
        versions = {package: version_of(package) for package in ("transformers", "gguf")}
        return {"source": {"name": self.name, "sha256": self.sha256}, "versions": versions}


def built_in_entry(model: BuiltIn) -> Converted:
    """Where a built-in model is, or will be, in the cache. Raises DependencyError if its package is missing."""
    weights = model.weights()
    if weights.sha256 is not None:
        return Converted(model.name, weights, weights.sha256)
    assert weights.path is not None, "weights have a path or a known hash"
    return Converted(model.name, weights, file_sha256(weights.path))


def convert_built_in(model: BuiltIn) -> Converted:
    """The converted weights of a built-in model."""
    converted = built_in_entry(model)
    converted.ensure()
    return converted


def convert_file(path: Path) -> Converted:
    """The converted weights of a GGUF file. Raises ModelError if the file is damaged, CacheError if no room."""
    converted = Converted(path.stem, Weights(path=path), file_sha256(path))
    if not is_whole(converted.folder):
        read_head(path)  # a damaged file is reported before anything is written
    converted.ensure()
    return converted


def convert(path: Path, head: GgufHead, folder: Path) -> None:
    """Writes the model and tokenizer of a GGUF file into `folder`, as float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        # The bar of the GGUF reader knows no setting; it is hidden by hiding stderr.
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
            )
    except (ValueError, NotImplementedError) as error:
        if "not supported" not in str(error) and not isinstance(error, NotImplementedError):
            raise ModelError(f"{path} could not be converted: {error}") from error
        raise UnsupportedModelError(
            f"{path} holds a model of the architecture {head.architecture!r}, which transformers cannot read from GGUF "
            f"({error}). Expected a decoder-only architecture that it can; or load the original checkpoint instead."
        ) from error
    model, report = loaded
    check_complete(str(path), report)
    _forget_quantization(model)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _forget_quantization(model: Any) -> None:
    """The weights were expanded to float32, but the model still says that it is quantised, and refuses to be saved."""
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None


@contextlib.contextmanager
def _announced(name: str) -> Generator[None]:
    """Says on stderr that a conversion runs: a spinner on a terminal, else a line."""
    message = f"Converting {name} (once, about a minute)"
    if not sys.stderr.isatty():
        print(f"noiser: {message}", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(message):
        yield
