"""`load_model`: a name, an id, a folder or a file becomes a language model."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from noiser.errors import ModelError, ModelNotFoundError, ParameterError, UnknownNameError
from noiser.model.catalog import BUILT_IN
from noiser.model.checkpoint import Dtype, Options, adapter_base, choose_device, choose_dtype, load_checkpoint
from noiser.model.conversion import Converted, built_in_entry, gguf_entry
from noiser.model.hub import cached_commit, check_hub_id, hub_answers, model_not_found
from noiser.model.language_model import LanguageModel, dtype_name
from noiser.model.runtime import on_the_cpu
from noiser.model.store import checkpoint_state, folder_sha256, reading
from noiser.text import check_template_kwargs
from noiser.types import ModelIdentity


class _Loaded(NamedTuple):
    name: str
    model: Any
    tokenizer: Any
    revision: str | None


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: Dtype = "auto",
    device: str = "auto",
    device_map: Any = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **engine_args: Any,
) -> LanguageModel:
    """Loads a causal language model and its tokenizer, into this process, into vLLM, or from a server.

    Args:
        name_or_path: a built-in name ("gemma-3-270m"), a local folder, a `.gguf` file, or a hub id. Built-in models
            and GGUF files are converted once, to float32, into the cache folder (`NOISER_CACHE`, else the user's).
            "vllm:NAME" runs the model NAME in vLLM, and "http://HOST/v1" is a model behind a server; both only predict.
        dtype: of the weights. "auto": float32 on the CPU, so that scores do not depend on the machine; the checkpoint's
            own on anything else. A large model on the CPU takes half the memory with "bfloat16".
        device: "auto" (CUDA, else MPS, else CPU), or such as "cpu", "cuda", "cuda:1".
        device_map: how accelerate spreads the model over devices ("auto", or a map), instead of `device`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the checkpoint may run.
        attn_implementation: of transformers, such as "eager" or "sdpa".
        chat_template_kwargs: further arguments of the tokenizer's chat template, such as `{"enable_thinking": False}`.
        engine_args: with "vllm:NAME", arguments of `vllm.LLM`, such as `tensor_parallel_size=8`; with an address, those
            of `noiser.model.server.load_server`, such as `model`, `tokenizer` and `api_key_env`.

    Raises:
        ModelNotFoundError: the name is not built in, nor a path that exists, nor found on the hub.
        UnsupportedModelError: the model is not a decoder-only language model.
        ModelError: the checkpoint or the GGUF file is damaged.
        CacheError: no room for the converted model, or no permission.
        DependencyError: a package is missing; the message has the command that installs it.
        ParameterError: no name, a dtype or device that does not exist, or a chat template cannot get these arguments.
            UnknownNameError: a server takes no such argument.
    """
    template_kwargs = check_template_kwargs(chat_template_kwargs)
    chosen = choose_device(device, device_map)
    options = Options(
        dtype=choose_dtype(dtype, chosen),
        device=chosen,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
    )
    if not isinstance(name_or_path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ParameterError(f"The model is {name_or_path!r}; expected a name, a path or an address.")
    lm = _load_any(name_or_path, options, engine_args)
    lm.chat_template_kwargs = template_kwargs
    return lm


def _load_any(name_or_path: str | os.PathLike[str], options: Options, engine_args: Mapping[str, Any]) -> LanguageModel:
    kind, _, rest = os.fspath(name_or_path).partition(":")
    if kind == "vllm":
        from noiser.model.vllm import load_vllm

        return load_vllm(rest, options, engine_args)
    if kind in ("http", "https"):
        from noiser.model.server import load_server

        known = [*inspect.signature(load_server).parameters][2:]
        if unknown := sorted({*engine_args} - {*known}):
            raise UnknownNameError("argument of a model behind a server", unknown[0], known)
        return load_server(os.fspath(name_or_path), options, **engine_args)
    if engine_args:
        raise ParameterError(
            f"{next(iter(engine_args))!r} is not an argument of load_model for {name_or_path!r}; expected it with a "
            "model in vLLM or behind a server. Name it vllm:... or http://..., or leave the argument out."
        )
    with on_the_cpu():
        name, model, tokenizer, known_revision = _load(name_or_path, options)
    identity = ModelIdentity(name, known_revision, dtype_name(model), type(model).__name__)
    return LanguageModel(model, tokenizer, identity=identity)


def _load(name_or_path: str | os.PathLike[str], options: Options) -> _Loaded:
    name = os.fspath(name_or_path)
    path = Path(os.path.expanduser(name))  # noqa: PTH111 - Path's own raises for a user that does not exist
    if name in BUILT_IN:
        if options.revision is not None:
            raise ParameterError(
                f"revision: got {options.revision!r}, but {name} is built in and has only one; expected it with the "
                "id of a model on the hub. Leave it out."
            )
        return _load_converted(name, built_in_entry(BUILT_IN[name]), options)
    if os.path.isdir(path) and name.strip():  # noqa: PTH112 - Path's own raises for names that are too long
        return _load_folder(path.resolve(), options)
    if os.path.isfile(path):  # noqa: PTH113
        return _load_converted(str(path.resolve()), gguf_entry(path), options)
    if isinstance(name_or_path, os.PathLike):
        raise model_not_found(name, "there is no such file or folder.")
    return _load_from_hub(name, options)


def _load_folder(folder: Path, options: Options) -> _Loaded:
    base = adapter_base(str(folder))
    folders = [folder, *([Path(base)] if base and Path(base).is_dir() else [])]
    with reading(folder):
        before = [checkpoint_state(each) for each in folders]
    on_disk = base is None or len(folders) > 1 or not hub_answers()
    model, tokenizer = load_checkpoint(str(folder), options, local_only=on_disk, base=base)
    with reading(folder):
        revision, after = folder_sha256(folder), [checkpoint_state(each) for each in folders]
        revision = _with_base(revision, base, options)
    if after != before:
        raise ModelError(f"{folder} was changed while it was loaded; expected files at rest. Load it again.")
    return _Loaded(str(folder), model, tokenizer, revision)


def _with_base(revision: str | None, base: str | None, options: Options) -> str | None:
    """The revision of a model; of an adapter, a hash of its own and of that of the model that it is put on."""
    if base is None:
        return revision
    of_base = folder_sha256(Path(base)) if Path(base).is_dir() else cached_commit(base, options.revision)
    return hashlib.sha256(f"{revision} {of_base}".encode()).hexdigest()


def _load_converted(name: str, converted: Converted, options: Options) -> _Loaded:
    converted.ensure()
    folder = str(converted.folder)
    try:
        parts = load_checkpoint(folder, options, local_only=True)
    except ModelError:
        if not converted.is_damaged():
            raise
        converted.ensure(rebuild=True)
        parts = load_checkpoint(folder, options, local_only=True)
    return _Loaded(name, *parts, converted.sha256)


def _load_from_hub(name: str, options: Options) -> _Loaded:
    online = check_hub_id(name, options.revision)
    try:
        base = adapter_base(name, options.revision, local_only=not online)
        parts = load_checkpoint(name, options, local_only=not online, base=base)
    except ModelNotFoundError as error:
        raise model_not_found(name, str(error)) from error
    return _Loaded(name, *parts, _with_base(cached_commit(name, options.revision), base, options))
