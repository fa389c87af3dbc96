"""`load_model`: a name, an id, a folder or a file becomes a language model."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from noiser.errors import DependencyError, ParameterError
from noiser.files import parse_json
from noiser.model.backends import BACKENDS
from noiser.model.checkpoints import CheckpointPlace, explain_errors, find, revision_of
from noiser.model.classes import auto_class_of, may_have_processor
from noiser.model.gguf import BUILT_IN, complete
from noiser.model.language_model import LanguageModel
from noiser.model.runtime import own_defaults

_DTYPES: dict[Any, Any] = {
    name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")
}
# While it builds a model, transformers changes settings of the whole process.
_one_at_a_time = threading.Lock()


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | torch.dtype = "auto",
    device: str = "auto",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> LanguageModel:
    """Loads a causal language model and its tokenizer, into this process, into vLLM, or from a
    server.

    Of an image-text checkpoint it loads the whole model, whose text is explained. Encoder-decoder
    models and classifiers are refused.

    Args:
        name_or_path: a built-in name ("gemma-3-270m"), a local folder, a `.gguf` file, or a hub id.
            Built-in models and GGUF files are converted once, to float32, into the cache folder
            (`NOISER_CACHE`, else the user's). "vllm:NAME" runs the model NAME in vLLM, and
            "http://HOST/v1" is a model behind a server; both only predict. Other prefixes are in
            `noiser.model.BACKENDS`, which packages add to.
        dtype: of the weights. "auto": float32 on the CPU, so that scores do not depend on the
            machine; the checkpoint's own on anything else. A large model on the CPU takes half the
            memory with "bfloat16".
        device: "auto" (CUDA, else MPS, else CPU), or such as "cpu", "cuda", "cuda:1".
        device_map: how accelerate spreads the model over devices ("auto", or a map), instead of
            `device`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the checkpoint may run.
        attn_implementation: of transformers, such as "eager" or "sdpa".
        chat_template_kwargs: further arguments of the tokenizer's chat template, such as
            `{"enable_thinking": False}`.
        engine_args: with "vllm:NAME", arguments of `vllm.LLM`, such as `tensor_parallel_size=8`;
            with an address, those of `noiser.model.http.load_server`, such as `model`, `tokenizer`
            and `api_key_env`.

    Raises:
        ModelNotFoundError: the name is not built in, nor a path that exists, nor found on the hub.
        ModelError, UnsupportedModelError: the checkpoint is damaged, too large for memory, or not
            decoder-only.
        CacheError: the converted model cannot be written.
        DependencyError: a package is missing; the message has the command that installs it.
        ParameterError: an argument outside its domain, or that this kind of model does not take.
    """
    if device_map is not None and device != "auto":
        raise ParameterError(
            f"device={device!r} and device_map={device_map!r} exclude each other. Leave one out."
        )
    name = _checked_name(name_or_path)
    place = None if device_map is not None else _device(device)
    weights = _checked_dtype(dtype, place)
    prefix, _, rest = name.partition(":")
    if revision is not None and (rest or name) in BUILT_IN:
        raise ParameterError(
            f"revision is {revision!r}, and {rest or name} is built in. Leave revision out."
        )
    origin: dict[str, Any] = {
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
    }
    if rest and prefix in BACKENDS.names():
        lm = BACKENDS.get(prefix).factory(name, dtype=weights, **origin, **engine_args)
    elif engine_args:
        first = next(iter(engine_args))
        raise ParameterError(
            f"{first!r} is for models named vllm:... or http://..., not {name!r}. Leave it out."
        )
    else:
        how = {
            "dtype": weights,
            "device_map": device_map,
            "attn_implementation": attn_implementation,
        }
        lm = _load(name, origin, how, place)
    lm.chat_template_kwargs = dict(chat_template_kwargs or {})
    return lm


def _checked_name(name_or_path: Any) -> str:
    if isinstance(name_or_path, str | os.PathLike):
        name = os.fspath(name_or_path)
        if isinstance(name, str):
            return name
    raise ParameterError(
        f"The model is a {type(name_or_path).__name__}; expected a name or a path. "
        "noiser.wrap(model, tokenizer) takes what is loaded already."
    )


def _checked_dtype(dtype: Any, place: torch.device | None) -> Any:
    """The dtype of the weights: of torch, or "auto" for the checkpoint's own."""
    weights = _DTYPES.get(dtype, dtype)
    if weights == "auto":
        # On the CPU scores should not depend on the machine.
        on_cpu = place is not None and place.type == "cpu"
        return torch.float32 if on_cpu else weights
    if not isinstance(weights, torch.dtype):
        raise ParameterError(f"dtype is {dtype!r}; expected one of auto, {', '.join(_DTYPES)}.")
    return weights


def _device(device: str) -> torch.device:
    if device == "auto":
        device = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    try:
        return torch.empty(1, device=device).device
    except (RuntimeError, ValueError, AssertionError, NotImplementedError) as error:
        text = (
            f"device is {device!r}, which this machine does not have; expected one such as 'cpu' "
            f"or 'cuda'."
        )
        raise ParameterError(text) from error


def _load(
    name: str, origin: dict[str, Any], how: Mapping[str, Any], device: torch.device | None
) -> LanguageModel:
    """A model in this process; `origin` and `how` to load it, on a device, or None where
    `device_map` decides.
    """
    from transformers import AutoTokenizer
    from transformers.utils.import_utils import is_peft_available

    place = find(name)
    adapts = place.is_folder and Path(place.source, "adapter_config.json").is_file()
    if adapts and not is_peft_available():  # transformers would leave the adapter out
        raise DependencyError(
            f"The model {name!r} has an adapter, which needs PEFT. Install it with: pip "
            f"install peft"
        )
    common = {**origin, "local_files_only": place.is_folder and not adapts}
    # In a caller's inference mode the weights would be tensors that cannot be saved for a backward
    # pass.
    with _one_at_a_time, own_defaults(), explain_errors(name):
        auto_class = auto_class_of(_configuration(place, common), name)
        loaded = auto_class.from_pretrained(place.source, **how, **common, output_loading_info=True)
        model = complete(loaded)
        if device is not None:
            model.to(device)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(place.source, **common)
        except (
            OSError,
            ValueError,
        ):  # an adapter without one takes that of the model that it is put on
            bases = [
                each.base_model_name_or_path for each in getattr(model, "peft_config", {}).values()
            ]
            if not bases:
                raise
            tokenizer = AutoTokenizer.from_pretrained(bases[0], **common)
        if not getattr(tokenizer, "chat_template", None):
            template = _template_of_processor(place.source, origin["revision"])
            tokenizer.chat_template = template
        lm = LanguageModel(model.eval(), tokenizer)
        if may_have_processor(model.config):
            lm._find_processor = partial(_processor, name, place.source, common)  # pyright: ignore[reportPrivateUsage]
        lm.identity = lm.identity._replace(
            name=place.name, revision=revision_of(place, model, origin)
        )
    return lm


def _processor(name: str, source: str, common: Mapping[str, Any]) -> Any:
    """The processor of a checkpoint's pictures; None if it has none.

    Raises DependencyError where a package is missing that it needs.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(source, **common)
    except ImportError as error:
        raise DependencyError(
            f"The processor of {name!r} needs packages for pictures that are not installed. "
            'Install them with: pip install "noiser[images]"'
        ) from error
    except (OSError, ValueError):  # the checkpoint has files of a tokenizer alone
        return None
    has_images = hasattr(processor, "image_processor") and hasattr(processor, "tokenizer")
    return processor if has_images else None


def _configuration(place: CheckpointPlace, common: Mapping[str, Any]) -> Any:
    """The configuration of a checkpoint, or of the model that an adapter was trained on."""
    from transformers import AutoConfig
    from transformers.utils.import_utils import is_peft_available
    from transformers.utils.peft_utils import find_adapter_config_file

    source = place.source
    is_whole = place.is_folder and Path(source, "config.json").is_file()
    if is_peft_available() and not is_whole:
        adapter = find_adapter_config_file(source, revision=common["revision"])
        if adapter is not None:
            source = parse_json(Path(adapter).read_bytes())["base_model_name_or_path"]
    return AutoConfig.from_pretrained(source, **common)


def _template_of_processor(source: str, revision: str) -> str | None:
    """The chat template that older image-text checkpoints keep in a file of their processor."""
    from transformers.utils.hub import cached_file

    options: dict[str, Any] = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    path = cached_file(source, "chat_template.json", revision=revision, **options)
    return parse_json(Path(path).read_bytes())["chat_template"] if path else None
