"""Loading a checkpoint, from a folder or the hub, with errors that say what to do."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from noiser.errors import DependencyError, ModelError, ModelNotFoundError, ParameterError, UnsupportedModelError
from noiser.model.memory import is_out_of_memory

__all__ = ["Options", "check_complete", "load_checkpoint", "quiet_transformers"]

Dtype = Literal["auto", "float32", "bfloat16", "float16"] | torch.dtype
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a checkpoint is loaded; see `load_model`. Raises ParameterError for values that cannot be."""

    dtype: Dtype = "auto"
    device: str = "auto"
    device_map: Any = None
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str) and self.dtype not in {"auto", *_DTYPES}:
            raise ParameterError(f"dtype: got {self.dtype!r}, expected one of auto, {', '.join(_DTYPES)}.")
        if self.device_map is not None and self.device != "auto":
            raise ParameterError(
                f"device and device_map: got {self.device!r} and {self.device_map!r}, expected one of the two. "
                "Leave out device to spread the model by device_map."
            )

    def torch_device(self) -> torch.device | None:
        """Where the model goes; None when `device_map` says it."""
        if self.device_map is not None:
            return None
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, ValueError) as error:
            raise ParameterError(f"device: got {self.device!r}, expected such as 'cpu', 'cuda', 'cuda:1'.") from error
        _check_available(device)
        return device

    def torch_dtype(self) -> torch.dtype | Literal["auto"]:
        """The type of the weights; "auto" for the checkpoint's own."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        if self.dtype != "auto":
            return _DTYPES[self.dtype]
        device = self.torch_device()
        return torch.float32 if device is not None and device.type == "cpu" else "auto"


def load_checkpoint(source: str, options: Options, *, local_only: bool = False) -> tuple[Any, Any]:
    """The model, in evaluation mode, and the tokenizer of a folder or hub id.

    Raises:
        UnsupportedModelError: not a decoder-only language model.
        ModelNotFoundError: the hub has no such model, or will not give it.
        ModelError: the checkpoint is damaged or lacks weights, or the device cannot hold it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    device, dtype = options.torch_device(), options.torch_dtype()
    common: dict[str, Any] = {
        "revision": options.revision or "main",
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": local_only,
    }
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(source, **common)
            _check_decoder_only(source, config)
            tokenizer = AutoTokenizer.from_pretrained(source, **common)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                device_map=options.device_map,
                attn_implementation=options.attn_implementation,
                output_loading_info=True,
                **common,
            )
            model, report = loaded
            check_complete(source, report)
            if device is not None:
                model.to(device)
    except (UnsupportedModelError, ModelError):
        raise
    except Exception as error:  # transformers, the hub, safetensors and torch have no root in common
        raise _explained(source, error) from error
    return model.eval(), tokenizer


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hides transformers' own progress bars and warnings, and puts both settings back.

    The hub's download bars stay: they are on stderr, shown only on a terminal, and worth seeing. A verbosity that
    the user chose (anything but the default) stays too.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    bars, hub_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    verbosity = transformers_logging.get_verbosity()
    if verbosity == logging.WARNING:
        transformers_logging.set_verbosity(logging.ERROR)
    if bars:
        transformers_logging.disable_progress_bar()
        if hub_bars:  # the call above switches the hub's off as well
            enable_progress_bars()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _check_decoder_only(source: str, config: Any) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kind, names = type(config).__name__, list(getattr(config, "architectures", None) or [])
    if getattr(config, "is_encoder_decoder", False):
        found = "an encoder-decoder"
    elif any(name.endswith("ForMaskedLM") for name in names) and not getattr(config, "is_decoder", False):
        found = "a masked language model"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        found = "no causal language model"
    else:
        return
    raise UnsupportedModelError(
        f"{source!r} is {found} ({kind}, {', '.join(names) or 'no architecture named'}). "
        "Expected a decoder-only language model, such as those that AutoModelForCausalLM loads."
    )


def check_complete(source: str, report: dict[str, Any]) -> None:
    """Raises ModelError when weights were made up, as transformers tells with `output_loading_info`."""
    lacking = sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))
    if lacking:
        raise ModelError(
            f"The checkpoint of {source!r} lacks {len(lacking)} weights of the model, such as {lacking[0]!r}: "
            "they would be random, and so would every score. Expected a complete causal language model; "
            "if the random weights are wanted, load it yourself and pass it to noiser.wrap(model, tokenizer)."
        )


def _explained(source: str, error: Exception) -> Exception:
    kinds = {type(link).__name__ for link in _chain(error)}
    where = f"The model {source!r}"
    if "GatedRepoError" in kinds:
        return ModelNotFoundError(
            f"{where} is gated: the hub wants its licence accepted and you logged in. Accept it on the model's page, "
            "then run: hf auth login"
        )
    if "RevisionNotFoundError" in kinds:
        return ModelNotFoundError(f"{where} has no such revision on the hub. Expected a branch, tag or commit of it.")
    if "RepositoryNotFoundError" in kinds:
        return ModelNotFoundError(
            f"{where} is not on the hub, or is private. Check the spelling; for a private one run: hf auth login"
        )
    if "trust_remote_code" in str(error):
        return ModelError(
            f"{where} comes with Python code of its own, which is not run unless you ask for it. "
            "If you trust its authors, pass trust_remote_code=True (--trust-remote-code)."
        )
    if isinstance(error, ImportError):
        return DependencyError(f"{where} needs a package that is not installed: {error}")
    if is_out_of_memory(error):
        return ModelError(
            f"{where} does not fit into memory: {' '.join(str(error).split())}. Load it in a smaller dtype, on another "
            "device, or with device_map='auto' on several."
        )
    what = "is damaged or incomplete" if Path(source).is_dir() else "could not be loaded"
    said = " ".join(str(error).split()).removesuffix(".")
    return ModelError(
        f"{where} {what}: {type(error).__name__}: {said}. Expected config.json, the tokenizer's files and the weights "
        "of a causal language model, as save_pretrained writes them."
    )


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def _check_available(device: torch.device) -> None:
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(_has_mps())}.get(device.type)
    if there is not None and (device.index or 0) >= there:
        names = [f"{kind}:{i}" for kind, n in (("cuda", torch.cuda.device_count()),) for i in range(n)]
        raise ParameterError(
            f"device: got {str(device)!r}, but this machine offers {', '.join(['cpu', *names])}. Choose one of these."
        )
