"""vLLM in this process: models sharded over cards and nodes, quantised, batched by vLLM's own scheduler."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.errors import DependencyError, ModelError, UnsupportedModelError
from noiser.files import parse_json
from noiser.model.abilities import setting
from noiser.model.loading import Options, explained, find, revision_of
from noiser.model.packing import Branch
from noiser.model.served import ServedModel, read_settings
from noiser.types import ModelIdentity

WORKER = "noiser.model.vllm_worker"
ROW = "noiser_row"  # `vllm_worker.KEY`, in a module that only vLLM's workers import

MOST_ROWS = 256
"""The most rows of logits that the workers keep: with 128,000 tokens 131 MB of a card's memory."""

PROBE = 0.05
"""The largest Hellinger distance between predictions from tokens and from their embeddings; a wrong scale gives 0.5."""

_TABLES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "tok_embeddings.weight")
"""How the names of embedding tables end, in the families that vLLM runs."""

_numbers = itertools.count()
"""Of rows, none used twice: what an interrupted call has left may run beside the next one."""


def predict(llm: Any, branches: Sequence[Branch]) -> list[Tensor]:
    """Logits; each row is a sequence of its own, cut there, shorter ones first: a prefix cache finds them."""
    cut = [each[: row + 1] for branch in branches for each in branch.inputs for row in branch.wanted]
    logits = torch.cat([logits_of(llm, cut[i : i + MOST_ROWS]) for i in range(0, len(cut), MOST_ROWS)])
    parts = logits.split([len(branch.inputs) * len(branch.wanted) for branch in branches])
    return [part.unflatten(0, (len(b.inputs), -1)) for part, b in zip(parts, branches, strict=True)]


def logits_of(llm: Any, inputs: Sequence[Tensor]) -> Float[Tensor, "inputs vocab"]:
    """Logits after sequences of embeddings [length, dim] or token ids [length], exactly, by way of the workers.

    Raises:
        ModelError: vLLM has stopped, or not all logits came back.
    """
    from vllm import SamplingParams  # pyright: ignore

    prompts = [
        {"prompt_embeds": each} if each.is_floating_point() else {"prompt_token_ids": each.tolist()} for each in inputs
    ]
    numbers = [next(_numbers) for _ in inputs]
    settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    try:
        parameters = [SamplingParams(**settings, extra_args={ROW: number}) for number in numbers]
        llm.generate(prompts, parameters, use_tqdm=False)
        answers: list[tuple[list[int], bytes]] = llm.collective_rpc("take_logits")
        kept, sent = next(answer for answer in answers if answer[0])
        rows = torch.frombuffer(bytearray(sent), dtype=torch.float32).view(len(kept), -1)
        return rows[[kept.index(number) for number in numbers]]
    except Exception as error:  # of vLLM's many kinds, or where logits are missing
        raise ModelError(f"vLLM failed: {type(error).__name__}: {error}. Load the model again.") from error


def load_vllm(name: str, options: Options, engine_args: Mapping[str, Any]) -> ServedModel:
    """Loads a model into vLLM, in this process.

    Args:
        name: as for `noiser.load_model`.
        options: of which vLLM takes the type, the revision, and whether remote code may run.
        engine_args: of `vllm.LLM`, such as `tensor_parallel_size`.

    Raises:
        DependencyError: vLLM is not installed.
        ModelError: vLLM cannot run the model.
    """
    # One process less between here and the workers; and the runner whose logits processors these are.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    try:
        from vllm import LLM  # pyright: ignore
    except ImportError as error:
        raise DependencyError(
            f"vLLM is not installed: {error}. Install it: pip install vllm, in an environment of its own "
            "(docs/models.md)."
        ) from error
    from transformers import AutoConfig

    place = find(name, options.revision)
    tokenizer, generation_config = read_settings(place, options)
    with explained(name):
        config: Any = AutoConfig.from_pretrained(place.source, **options.source)
        table = embedding_table(place.source, options.source["revision"])
    arguments: dict[str, Any] = {
        "dtype": str(options.dtype).removeprefix("torch."),
        "trust_remote_code": options.trust_remote_code,
        "enable_prefix_caching": True,
        "revision": None if place.is_folder else options.revision,
        "block_size": None if torch.cuda.is_available() else 32,  # the least of its kernels; blocks are cached
        **engine_args,
        "model": place.source,
        "enable_prompt_embeds": True,
        "logits_processors": [f"{WORKER}:KeepLogits", *engine_args.get("logits_processors", ())],
        "worker_extension_cls": f"{WORKER}.TakeLogits",
    }
    try:
        llm: Any = LLM(**{name: value for name, value in arguments.items() if value is not None})
    except Exception as error:
        raise ModelError(f"vLLM could not load {name!r}: {type(error).__name__}: {error}. See its log.") from error
    settings = llm.llm_engine.vllm_config.model_config
    table = table.to(settings.dtype)
    scale = measure_embedding_scale(llm, table, config)
    dtype = ", ".join(filter(None, [str(settings.dtype).removeprefix("torch."), settings.quantization]))
    architecture = next(iter(getattr(config, "architectures", None) or []), type(config).__name__)
    lm = ServedModel(
        partial(predict, llm),
        tokenizer,
        generation_config,
        identity=ModelIdentity(f"vllm:{name}", None, dtype, architecture),
        context_length=settings.max_model_len - 1,  # one more is generated
        table=table * torch.tensor(scale, dtype=table.dtype),
        scale=scale,
    )
    lm.identity = lm.identity._replace(revision=revision_of(place, lm.model, options.revision))
    return lm


def embedding_table(source: str, revision: str) -> Float[Tensor, "vocab dim"]:
    """The embedding table of a folder or hub id, read from the one safetensors file that holds it."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    def path(name: str, *, needed: bool = True) -> Any:
        return cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=needed)

    index = path("model.safetensors.index.json", needed=False)
    files: dict[str, str] = parse_json(Path(index).read_bytes())["weight_map"] if index else {}
    holder = next((files[name] for name in files if name.endswith(_TABLES)), "model.safetensors")
    with safe_open(path(holder), "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if name.endswith(_TABLES):
                return file.get_tensor(name)
    raise ModelError(f"{source} has no tensor named as an embedding table. Save the model with save_pretrained.")


def measure_embedding_scale(llm: Any, table: Float[Tensor, "vocab dim"], config: Any) -> float:
    """The factor between rows of the embedding table and the model's input, measured by running it on eight tokens.

    Raises:
        UnsupportedModelError: with no known factor it predicts from embeddings what it predicts from their tokens.
    """
    ids = torch.linspace(1, len(table) - 1, 8, dtype=torch.float64).long()
    declared = [setting(config, name, int | float) for name in ("embedding_multiplier", "scale_emb")]
    scales = [1.0, table.shape[1] ** 0.5, *filter(None, declared)]
    rows = table[ids]
    inputs = [ids, *(rows * torch.tensor(scale, dtype=rows.dtype) for scale in scales)]
    roots = logits_of(llm, inputs).float().softmax(-1).sqrt()
    distances = ((roots[1:] - roots[0]).square().sum(-1) / 2).sqrt()
    best = int(distances.argmin())
    if not distances[best] <= PROBE:
        raise UnsupportedModelError(
            "The model does not predict from embeddings what it predicts from their tokens. Take a model that reads "
            "its input embeddings alone, with the table of its own checkpoint."
        )
    return scales[best]
