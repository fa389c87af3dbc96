"""Models that vLLM runs in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.errors import DependencyError, ModelError, UnsupportedModelError
from noiser.files import parse_json
from noiser.model.abilities import setting
from noiser.model.checkpoints import explain_errors, find, revision_of
from noiser.model.remote import ServedModel, logits_of, predict, read_settings, written_by
from noiser.types import ModelIdentity


def load_vllm(
    name: str, dtype: object, origin: dict[str, Any], engine_args: Mapping[str, Any]
) -> ServedModel:
    """A model in vLLM, in this process, with `engine_args` of `vllm.LLM`."""
    # One process less between here and the workers; and the runner whose logits processors these
    # are.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    try:
        from vllm import LLM  # pyright: ignore
    except ImportError as error:
        text = "Install it: pip install vllm, in an environment of its own (docs/models.md)."
        raise DependencyError(f"vLLM is not installed: {error}. {text}") from error
    place = find(name)
    worker = "noiser.model.vllm_worker"
    with explain_errors(name):
        table = embedding_table(place.source, origin["revision"])
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        **origin,
        "enable_prefix_caching": True,
        **(
            {} if torch.cuda.is_available() else {"block_size": 32}
        ),  # the least of its kernels; blocks are cached
        **engine_args,
        "model": place.source,
        "enable_prompt_embeds": True,
        "logits_processors": [f"{worker}:KeepLogits", *engine_args.get("logits_processors", ())],
        "worker_extension_cls": f"{worker}.TakeLogits",
    }
    try:
        llm: Any = LLM(**arguments)
    except Exception as error:
        raise ModelError(
            f"vLLM could not load {name!r}: {type(error).__name__}: {error}. See its log."
        ) from error
    known = llm.llm_engine.vllm_config.model_config
    table = table.to(known.dtype)
    scale = measure_embedding_scale(llm, table, known.hf_config)
    of_weights = ", ".join(
        filter(None, [str(known.dtype).removeprefix("torch."), known.quantization])
    )
    identity = ModelIdentity(f"vllm:{name}", None, of_weights, known.hf_config.architectures[0])
    inputs = table * torch.tensor(scale, dtype=table.dtype)
    length = known.max_model_len - 1  # one more is generated
    lm = ServedModel(
        partial(predict, llm),
        *read_settings(place, origin),
        identity,
        length,
        inputs,
        scale,
        write=partial(written_by, llm),
    )
    lm.identity = identity._replace(revision=revision_of(place, lm.model, origin))
    return lm


def embedding_table(source: str, revision: str) -> Float[Tensor, "vocab dim"]:
    """The embedding table of a folder or hub id, read from the one safetensors file that holds
    it.
    """
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    # as names end in the families that vLLM runs
    ends = tuple(
        f"{name}.weight"
        for name in ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings")
    )
    path: Any = partial(cached_file, source, revision=revision)
    index = path("model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    files: dict[str, str] = parse_json(Path(index).read_bytes())["weight_map"] if index else {}
    holder = next((files[name] for name in files if name.endswith(ends)), "model.safetensors")
    with safe_open(path(holder), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if name.endswith(ends):
                return file.get_tensor(name)
    raise ModelError(
        f"{source} has no tensor named as an embedding table. Save the model with save_pretrained."
    )


def measure_embedding_scale(llm: Any, table: Float[Tensor, "vocab dim"], config: Any) -> float:
    """The factor between rows of the table and the model's input: the known one that predicts as
    the tokens do.
    """
    ids = torch.linspace(1, len(table) - 1, 8, dtype=torch.float64).long()
    declared = [
        setting(config, name, int | float) for name in ("embedding_multiplier", "scale_emb")
    ]
    scales = [1.0, table.shape[1] ** 0.5, *filter(None, declared)]
    rows = table[ids]
    inputs = [ids, *(rows * torch.tensor(scale, dtype=rows.dtype) for scale in scales)]
    roots = logits_of(llm, inputs).float().softmax(-1).sqrt()
    distances = ((roots[1:] - roots[0]).square().sum(-1) / 2).sqrt()
    distance, best = min(zip(distances.tolist(), scales, strict=True))
    if not distance <= 0.05:  # a wrong factor gives 0.5
        text = (
            "The model does not predict from embeddings what it predicts from their tokens. Take "
            "a model that reads"
        )
        raise UnsupportedModelError(
            f"{text} its input embeddings alone, with the table of its own checkpoint."
        )
    return best
