"""vLLM in this process: models sharded over cards and nodes, quantised, batched by vLLM's own scheduler."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from noiser.errors import DependencyError, ModelError, ParameterError
from noiser.model.checkpoint import Options
from noiser.model.served import Input, Prediction, ServedModel
from noiser.model.table import Checkpoint

WORKER = "noiser.model.vllm_worker"
ROW = "noiser_row"  # `vllm_worker.KEY`, in a module that only vLLM's workers import

MOST_ROWS = 256
"""The most rows of logits that the workers keep: with 128,000 tokens 131 MB of a card's memory."""


class VllmBackend:
    """Predicts with a `vllm.LLM`; all logits come back, exactly, by way of the workers.

    Args:
        llm: made by `load_vllm`, or by you with `enable_prompt_embeds=True`, `logits_processors` and
            `worker_extension_cls` as there.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self._numbers = itertools.count()

    def predict(self, inputs: Sequence[Input]) -> Prediction:
        """One call of vLLM for as many sequences as the workers may keep logits of.

        Raises:
            ModelError: vLLM has stopped, or not all logits came back.
        """
        parts = [self._logits(inputs[i : i + MOST_ROWS]) for i in range(0, len(inputs), MOST_ROWS)]
        return Prediction(torch.cat(parts))

    def _logits(self, inputs: Sequence[Input]) -> torch.Tensor:
        from vllm import SamplingParams  # pyright: ignore

        prompts = [
            {"prompt_embeds": sequence} if sequence.is_floating_point() else {"prompt_token_ids": sequence.tolist()}
            for sequence, *_ in inputs
        ]
        # Numbers that were never used before: what an interrupted call has left may run beside this one.
        numbers = [next(self._numbers) for _ in inputs]
        parameters = [
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args={ROW: number})
            for number in numbers
        ]
        try:
            self.llm.generate(prompts, parameters, use_tqdm=False)
            answers: list[tuple[list[int], bytes]] = self.llm.collective_rpc("take_logits")
        except Exception as error:  # of vLLM's many kinds
            raise ModelError(
                f"vLLM failed: {type(error).__name__}: {error}. Expected the logits of {len(inputs)} sequences; "
                "its log may say more. Load the model again, and if memory was short, with a lower max_num_seqs."
            ) from error
        kept, sent = next((answer for answer in answers if answer[0]), ([], b""))
        place = {number: index for index, number in enumerate(kept)}
        missing = [number for number in numbers if number not in place]
        if missing:
            raise ModelError(
                f"vLLM's workers kept no logits of {len(missing)} of {len(inputs)} sequences; expected all. They must "
                f"run {WORKER}.KeepLogits, as a model that noiser.load_model('vllm:...') has loaded does."
            )
        rows = torch.frombuffer(bytearray(sent), dtype=torch.float32).view(len(kept), -1)
        return rows[[place[number] for number in numbers]]


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
            f"Models named vllm:... run in vLLM, which is not installed: {error}. Install it: pip install vllm; its "
            "versions of other packages may need an environment of their own, see docs/scale.md."
        ) from error
    checkpoint = Checkpoint.of(name, options)
    ours = {
        "model": checkpoint.hub_id or checkpoint.folder,
        "enable_prompt_embeds": True,
        "logits_processors": [f"{WORKER}:KeepLogits", *engine_args.get("logits_processors", ())],
        "worker_extension_cls": f"{WORKER}.TakeLogits",
    }
    if clash := sorted({"model", "worker_extension_cls", "revision", "trust_remote_code"} & {*engine_args}):
        raise ParameterError(f"{clash[0]} is an argument of vllm.LLM that is set here; expected others. Leave it out.")
    defaults: dict[str, Any] = {
        "dtype": str(options.dtype).removeprefix("torch."),
        "trust_remote_code": options.trust_remote_code,
        "enable_prefix_caching": True,
    }
    if checkpoint.hub_id:
        defaults["revision"] = checkpoint.revision
    if not torch.cuda.is_available():
        defaults["block_size"] = 32  # the least that its kernels take: what is cached is whole blocks
    try:
        llm: Any = LLM(**(defaults | dict(engine_args) | ours))
    except Exception as error:
        raise ModelError(
            f"vLLM could not load {name!r}: {type(error).__name__}: {error}. Expected a model that it runs, and "
            "arguments of vllm.LLM; its log may say more."
        ) from error
    settings = llm.llm_engine.vllm_config.model_config
    table = checkpoint.embedding_table().to(settings.dtype)
    quantization = f", {settings.quantization}" if settings.quantization else ""
    return ServedModel(
        VllmBackend(llm),
        checkpoint,
        checkpoint.tokenizer(),
        table,
        name=f"vllm:{name}",
        dtype=f"{str(settings.dtype).removeprefix('torch.')}{quantization}",
        context_length=settings.max_model_len - 1,  # one more is generated
    )
