"""Reading the head of a GGUF file: enough to know that the file is whole, and what it will become.

The layout is the one of version 2 and 3 of the format's specification: magic, version, counts, key-value pairs, tensor
infos, padding, data. Every length is checked against the file's size, so a damaged file is found out at once.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noiser.errors import DependencyError, ModelError

__all__ = ["GgufHead", "read_head"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufHead:
    """What the head of a GGUF file says: its architecture and the number of weights."""

    architecture: str
    n_weights: int


def read_head(path: Path) -> GgufHead:
    """Reads and checks the head of `path`, and that the file holds all the data that the head announces.

    Raises:
        ModelError: when the file is not a GGUF file, damaged, or cut short.
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
        self.data, self.path, self.at = data, path, 4

    def head(self) -> GgufHead:
        version = self.count("I")
        if version not in (2, 3):
            raise _damaged(self.path, f"version {version}", "version 2 or 3, little-endian")
        n_tensors, n_pairs = self.count("Q"), self.count("Q")
        facts: dict[str, object] = {}
        for _ in range(n_pairs):
            key = self.string()
            facts[key] = self.value(self.count("I"))
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
        return GgufHead(architecture, sum(n_weights for n_weights, _, _ in tensors))

    def tensor(self) -> tuple[int, int, int]:
        """One tensor info: number of weights, of bytes, and the offset in the data."""
        block_sizes = _block_sizes()
        self.string()
        n_weights = 1
        for _ in range(self.count("I")):
            n_weights *= self.count("Q")
        block, n_bytes = block_sizes[self.count("I")]
        return n_weights, n_weights // block * n_bytes, self.count("Q")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        inner, length = self.count("I"), self.count("Q")
        if inner in (_STRING, _ARRAY):
            for _ in range(length):
                self.value(inner)
        else:
            self.skip(length * struct.calcsize("<" + _SCALARS[inner]))
        return None  # no array matters here

    def string(self) -> str:
        length = self.count("Q")
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", errors="replace")

    def count(self, code: Literal["I", "Q"]) -> int:
        return struct.unpack_from("<" + code, self.data, self.skip(4 if code == "I" else 8))[0]

    def scalar(self, code: str) -> int | float | bool:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize("<" + code)))[0]

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
