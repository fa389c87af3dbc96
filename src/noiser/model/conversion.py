"""A GGUF file once made into a folder that transformers loads in seconds.

The head of the file is read here before anything else is: the `gguf` package's reader takes counts as they are
announced, so that a damaged or hostile file makes it run for minutes or fail in ways that name no file. The layout is
that of versions 2 and 3: magic, version, counts, key-value pairs, tensor infos, padding, data.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import mmap
import shutil
import struct
import sys
import tempfile
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noiser.errors import DependencyError, ModelError, UnsupportedModelError
from noiser.model.catalog import BuiltIn, Weights
from noiser.model.checkpoint import check_complete, quiet_transformers
from noiser.model.memory import is_out_of_memory
from noiser.model.store import build_entry, cache_errors, entry_path, file_sha256, is_disk_error, is_whole, reading
from noiser.version import version_of

_TOKENIZER_BYTES = 100_000_000
"""Room for the tokenizer and configuration files, generously: the largest seen is 34 MB."""

_READER_LOCK = threading.Lock()

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # as in ggml
_MOST_ELEMENTS = 2**22
"""Elements of all arrays together, which are read one by one; a vocabulary of 262,144 tokens has 1.3 million."""


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
            if self.weights.path is not None:
                read_head(self.weights.path)  # a damaged file is reported before anything is written
            build_entry(self.folder, self._build, rebuild=rebuild)

    def is_damaged(self) -> bool:
        """Reads everything and compares it with the manifest."""
        return not is_whole(self.folder, thorough=True)

    def _build(self, folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix=".assembled-", dir=folder) as scratch:
            path = self.weights.path
            if path is None:
                path = Path(scratch) / f"{self.name}.gguf"
                with cache_errors(needed=self.weights.size):
                    self.weights.join(path)
            head = read_head(path)
            with cache_errors(needed=4 * head.n_weights + _TOKENIZER_BYTES), _announced(self.name):
                convert(path, head, folder)
            if self.weights.path is not None and file_sha256(path) != self.sha256:
                raise ModelError(f"{path} was changed while it was converted; expected a file at rest. Load it again.")
        versions = {package: version_of(package) for package in ("transformers", "gguf")}
        return {"source": {"name": self.name, "sha256": self.sha256}, "versions": versions}


def built_in_entry(model: BuiltIn) -> Converted:
    """Where a built-in model is, or will be, in the cache. Raises DependencyError if its package is missing."""
    weights = model.weights()
    if weights.sha256 is not None:
        return Converted(model.name, weights, weights.sha256)
    assert weights.path is not None, "weights have a path or a known hash"
    return Converted(model.name, weights, file_sha256(weights.path))


def gguf_entry(path: Path) -> Converted:
    """Where the model of a GGUF file is, or will be, in the cache. Raises ModelError if the file cannot be read."""
    path = path.resolve()
    with reading(path):
        return Converted(path.stem, Weights(parts=(path,)), file_sha256(path))


def convert(path: Path, head: GgufHead, folder: Path) -> None:
    """Writes the model and tokenizer of a GGUF file into `folder`, as float32 safetensors.

    Raises:
        UnsupportedModelError: transformers does not know the architecture.
        ModelError: the file is damaged, or lacks weights.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        # The bar of the GGUF reader knows no setting; it is hidden by hiding stderr.
        with (
            quiet_transformers(),
            contextlib.redirect_stderr(io.StringIO()),
            _alone(path, folder) as source,
            _read_once(),
        ):
            tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=path.name)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # a damaged file fails anywhere
        if is_disk_error(error):
            raise
        if "not supported" in str(error) or isinstance(error, NotImplementedError):
            raise UnsupportedModelError(
                f"{path} holds a model of the architecture {head.architecture!r}, which transformers cannot read from "
                f"GGUF ({error}). Expected a decoder-only architecture that it can; or load the original checkpoint "
                "instead."
            ) from error
        if is_out_of_memory(error):
            raise ModelError(f"{path} does not fit into memory as float32: {' '.join(str(error).split())}") from error
        raise ModelError(f"{path} could not be converted: {type(error).__name__}: {str(error)[:500]}") from error
    model, report = loaded
    check_complete(str(path), report)
    _forget_quantization(model)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _alone(path: Path, folder: Path) -> Generator[str]:
    """A folder that has a link to the file and nothing else: of its neighbours, transformers would read some."""
    with tempfile.TemporaryDirectory(prefix=".linked-", dir=folder) as alone:
        link = Path(alone) / path.name
        try:
            link.symlink_to(path)
        except OSError:  # Windows allows it to few users
            shutil.copyfile(path, link)
        yield alone


@contextlib.contextmanager
def _read_once() -> Generator[None]:
    """Makes one reader serve the configuration, the tokenizer and the weights.

    transformers opens three, and each parses every token and merge in Python: half of the time of a conversion.
    """
    import gguf

    with _READER_LOCK:
        reader: Any = gguf.GGUFReader
        gguf.GGUFReader = functools.cache(reader)
        try:
            yield
        finally:
            gguf.GGUFReader = reader


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


@dataclass(frozen=True)
class GgufHead:
    """What the head of a GGUF file says: its architecture and the number of weights."""

    architecture: str
    n_weights: int


def read_head(path: Path) -> GgufHead:
    """The head of a GGUF file that holds all the data that it announces.

    Raises:
        ModelError: when the file is not a GGUF file, damaged, cut short, or one of several.
        DependencyError: when the `gguf` package is missing.
    """
    size = path.stat().st_size
    if size < 24:
        raise _damaged(path, f"only {size} bytes")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise _damaged(path, f"a file that begins with {data[:4]!r}", "one that begins with b'GGUF'")
        try:
            return _Reader(data, path).head()
        except (IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
            raise _damaged(path, f"a head that cannot be read ({error})") from error


class _Reader:
    """A cursor over the bytes of a file. Reading past the end raises IndexError."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.elements = data, path, 4, 0

    def head(self) -> GgufHead:
        version = self.scalar("I")
        if version not in (2, 3):
            raise _damaged(self.path, f"version {version}", "version 2 or 3, little-endian")
        n_tensors, n_pairs = self.scalar("Q"), self.scalar("Q")
        facts: dict[str, object] = {}
        for _ in range(n_pairs):
            key = self.string()
            facts[key] = self.value(self.scalar("I"))
        tensors = [self.tensor() for _ in range(n_tensors)]
        alignment = facts.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _damaged(self.path, f"an alignment of {alignment}")
        start = -(-self.at // alignment) * alignment
        end = start + max((offset + n_bytes for _, n_bytes, offset in tensors), default=0)
        if not tensors or end > len(self.data):
            raise _damaged(self.path, f"{len(self.data):,} bytes and {n_tensors} tensors", f"{end:,} bytes")
        parts = facts.get("split.count", 1)
        if isinstance(parts, int) and parts > 1:
            raise ModelError(
                f"{self.path} is one of the {parts} files of a model; expected a file that holds a whole one. Merge "
                "them with llama.cpp's `llama-gguf-split --merge`, given the first file and a new one."
            )
        architecture = str(facts.get("general.architecture", "unknown"))
        layers = facts.get(f"{architecture}.block_count", 0)
        if not isinstance(layers, int) or layers > n_tensors:
            raise _damaged(self.path, f"{layers!r} layers and {n_tensors} tensors", "tensors for each layer")
        return GgufHead(architecture, sum(n_weights for n_weights, _, _ in tensors))

    def tensor(self) -> tuple[int, int, int]:
        """One tensor info: number of weights, of bytes, and the offset in the data."""
        block_sizes = _block_sizes()
        self.string()
        dimensions = self.scalar("I")
        if dimensions > _MOST_DIMENSIONS:
            raise _damaged(self.path, f"a tensor of {dimensions} dimensions", f"{_MOST_DIMENSIONS} at most")
        n_weights = math.prod(self.scalar("Q") for _ in range(dimensions))
        block, n_bytes = block_sizes[self.scalar("I")]
        return n_weights, n_weights // block * n_bytes, self.scalar("Q")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, length = self.scalar("I"), self.scalar("Q")
        if inner == _ARRAY:
            raise _damaged(self.path, "an array of arrays", "arrays of numbers or texts")
        self.elements += length
        if self.elements > _MOST_ELEMENTS:
            raise _damaged(self.path, f"arrays of {self.elements:,} elements", f"{_MOST_ELEMENTS:,} at most")
        if inner == _STRING:
            for _ in range(length):
                self.string()
        else:
            self.skip(length * struct.calcsize("<" + _SCALARS[inner]))
        return None  # no array matters here

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self.data, self.skip(size))[0]

    def skip(self, n_bytes: int) -> int:
        """Moves over `n_bytes` and returns where they begin."""
        start, self.at = self.at, self.at + n_bytes
        if self.at > len(self.data):
            raise IndexError(f"it wants {n_bytes:,} bytes at {start:,} of {len(self.data):,}")
        return start


def _block_sizes() -> dict[int, tuple[int, int]]:
    """Weights and bytes in a block of each tensor type."""
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise DependencyError(
            "Reading a .gguf file needs the package gguf, which is not installed. Install it with: "
            'pip install "noiser[gguf]"'
        ) from error
    return {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}


def _damaged(path: Path, got: str, expected: str = "a whole GGUF file") -> ModelError:
    return ModelError(
        f"{path} cannot be read as a GGUF model: got {got}, expected {expected}. "
        "The file is damaged, cut short, or of another format; fetch it again."
    )
