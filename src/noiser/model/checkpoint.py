"""Loading a checkpoint, from a folder or the hub, with errors that say what to do."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from noiser.errors import DependencyError, ModelError, ModelNotFoundError, ParameterError, UnsupportedModelError
from noiser.files import parse_json
from noiser.model.memory import is_out_of_memory

Dtype = Literal["auto", "float32", "bfloat16", "float16"] | torch.dtype
_quiet = threading.RLock()

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a checkpoint is loaded; see `load_model`. Without a device, `device_map` or nothing says where it goes."""

    dtype: torch.dtype | Literal["auto"] = "auto"
    device: torch.device | None = None
    device_map: Any = None
    revision: str | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None


_SPREADS = ("auto", "balanced", "balanced_low_0", "sequential")


def choose_device(device: str, device_map: Any) -> torch.device | None:
    """The device of that name; None where `device_map` decides. Raises ParameterError where there is none."""
    if device_map is not None:
        if device != "auto":
            raise ParameterError(
                f"device and device_map: got {device!r} and {device_map!r}, expected one of the two. "
                "Leave out device to spread the model by device_map."
            )
        if isinstance(device_map, str) and device_map not in _SPREADS:
            try:
                torch.device(device_map)
            except RuntimeError as error:
                raise ParameterError(
                    f"device_map: got {device_map!r}, expected {', '.join(_SPREADS)}, a device, or a map of devices."
                ) from error
        return None
    mps = torch.backends.mps.is_available()
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if mps else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, ValueError) as error:
        raise ParameterError(f"device: got {device!r}, expected such as 'cpu', 'cuda', 'cuda:1'.") from error
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(mps)}.get(chosen.type)
    if count is not None and (chosen.index or 0) >= count:
        names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ParameterError(
            f"device: got {str(chosen)!r}, but this machine offers {', '.join(names)}. Choose one of these."
        )
    return chosen


def choose_dtype(dtype: Dtype, device: torch.device | None) -> torch.dtype | Literal["auto"]:
    """The type of the weights; "auto", which is float32 on a CPU, for the checkpoint's own."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device is not None and device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise ParameterError(f"dtype: got {dtype!r}, expected one of auto, {', '.join(_DTYPES)}.")
    return _DTYPES[dtype]


def adapter_base(source: str, revision: str | None = None, *, local_only: bool = True) -> str | None:
    """The folder or hub id of the model that an adapter is put on; None where the source holds all of its model.

    A folder with a configuration and an adapter holds both the model and the adapter.

    Raises:
        DependencyError: there is an adapter, and PEFT is not installed; transformers would leave the adapter out.
        ModelError: the adapter does not say what it is put on.
    """
    from transformers.utils.import_utils import is_peft_available
    from transformers.utils.peft_utils import find_adapter_config_file

    found = None
    with suppress(OSError):  # loading the model says what is wrong
        found = find_adapter_config_file(source, revision=revision or "main", local_files_only=local_only)
    if found is None:
        return None
    if not is_peft_available():
        raise DependencyError(
            f"The model {source!r} has an adapter, which needs PEFT, which is not installed. Install it with: "
            "pip install peft"
        )
    if (Path(source) / "config.json").is_file():
        return None
    try:
        return os.fspath(parse_json(Path(found).read_bytes())["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{found} is damaged: {type(error).__name__}: {error}; expected base_model_name_or_path in it, a folder or "
            "hub id. Fetch or save the adapter again."
        ) from error


def load_checkpoint(
    source: str, options: Options, *, local_only: bool = False, base: str | None = None
) -> tuple[Any, Any]:
    """The model, in evaluation mode, and the tokenizer of a folder or hub id.

    Args:
        source: the folder or hub id.
        options: how it is loaded.
        local_only: never asks the hub.
        base: the model that the adapter in `source` is put on, of `adapter_base`; its tokenizer is used where the
            adapter comes with none.

    Raises:
        UnsupportedModelError: not a decoder-only language model.
        ModelNotFoundError: the hub has no such model, or will not give it.
        ModelError: the checkpoint is damaged or lacks weights, or the device cannot hold it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    common: dict[str, Any] = {
        "revision": options.revision or "main",
        "trust_remote_code": options.trust_remote_code,
        "local_files_only": local_only,
    }
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(base or source, **common)
            _check_decoder_only(source, config)
            tokenizer = AutoTokenizer.from_pretrained(_with_tokenizer(source, base, options, local_only), **common)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=options.dtype,
                device_map=options.device_map,
                attn_implementation=options.attn_implementation,
                output_loading_info=True,
                **common,
            )
            model, report = loaded
            check_complete(source, report)
            if options.device is not None:
                model.to(options.device)
    except (UnsupportedModelError, ModelError):
        raise
    except Exception as error:  # transformers, the hub, safetensors and torch have no root in common
        raise _explain(source, error) from error
    return model.eval(), tokenizer


def _with_tokenizer(source: str, base: str | None, options: Options, local_only: bool) -> str:
    """The source, or the model that its adapter is put on where only that has a tokenizer."""
    from transformers.utils.hub import cached_file

    if base is None:
        return source
    found = cached_file(
        source,
        "tokenizer_config.json",
        revision=options.revision or "main",
        local_files_only=local_only,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return base if found is None else source


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Hides transformers' progress bars and warnings, and restores both settings.

    The hub's download bars stay: they are on stderr, shown only on a terminal, and worth seeing. A verbosity that
    the user chose (anything but the default) stays too. Both are settings of the process, as are those that
    transformers makes while it builds a model: within it there is one thread at a time.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    with _quiet:
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
        kind_of_model = "an encoder-decoder"
    elif any(name.endswith("ForMaskedLM") for name in names) and not getattr(config, "is_decoder", False):
        kind_of_model = "a masked language model"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        kind_of_model = "not a causal language model"
    else:
        return
    raise UnsupportedModelError(
        f"{source!r} is {kind_of_model} ({kind}, {', '.join(names) or 'no architecture named'}). "
        "Expected a decoder-only language model, such as those that AutoModelForCausalLM loads."
    )


def check_complete(source: str, report: dict[str, Any]) -> None:
    """Raises ModelError when weights were initialised at random, as transformers' `output_loading_info` says."""
    lacking = sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))
    if lacking:
        raise ModelError(
            f"The checkpoint of {source!r} lacks {len(lacking)} weights of the model, such as {lacking[0]!r}: "
            "they would be random, and so would every score. Expected a complete causal language model; "
            "if the random weights are wanted, load it yourself and pass it to noiser.wrap(model, tokenizer)."
        )


_HUB_REFUSALS = {
    "GatedRepoError": "is gated: the hub wants its licence accepted and you logged in. Accept it on the model's page, "
    "then run: hf auth login",
    "RevisionNotFoundError": "has no such revision on the hub. Expected a branch, tag or commit of it.",
    "RepositoryNotFoundError": "is not on the hub, or is private. Check the spelling; for a private one run: hf auth "
    "login",
}


def _explain(source: str, error: Exception) -> Exception:
    kinds = {type(link).__name__ for link in _chain(error)}
    where, said = f"The model {source!r}", " ".join(str(error).split()).removesuffix(".")
    for kind, message in _HUB_REFUSALS.items():
        if kind in kinds:
            return ModelNotFoundError(f"{where} {message}")
    if "trust_remote_code" in said:
        return ModelError(
            f"{where} comes with Python code of its own, which is not run unless you ask for it. "
            "If you trust its authors, pass trust_remote_code=True (--trust-remote-code)."
        )
    if isinstance(error, ImportError):
        return DependencyError(f"{where} needs a package that is not installed: {error}")
    if is_out_of_memory(error):
        return ModelError(
            f"{where} does not fit into memory: {said}. Load it in a smaller dtype, on another device, or with "
            "device_map='auto' on several."
        )
    what = "is damaged or incomplete" if Path(source).is_dir() else "could not be loaded"
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
