"""How a model can be run, found out by running it on eight tokens; no architecture is known by its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from noiser.errors import UnsupportedModelError
from noiser.model.memory import is_out_of_memory
from noiser.model.packing import Branch, Context, Layout, packed_logits

_LIBRARIES = ("builtins", "torch", "transformers", "transformers_modules", "accelerate", "einops", "jaxtyping")


@dataclass(kw_only=True)
class Abilities:
    """How a model can be run.

    Attributes:
        reads_embeddings: it predicts from embeddings what it predicts from their tokens.
        embedding_scale: the factor between the rows of the embedding table and what the embedding module returns:
            sqrt(d) for Gemma, 1 for most models.
        packs: sequences of different lengths can run end to end in one pass, after a cached beginning.
    """

    reads_embeddings: bool
    embedding_scale: float
    packs: bool


def find_abilities(lm: Any) -> Abilities:
    """How a model can be run; to be called while it runs without gradients.

    Raises:
        UnsupportedModelError: the model reads the tokens that follow, as BERT and XLNet do.
    """
    embedding = lm.model.get_input_embeddings()
    ids = torch.linspace(1, embedding_table(embedding).shape[0] - 1, 8, dtype=torch.float64).long().to(lm.device)
    half = len(ids) // 2
    other = torch.cat([ids[:half], ids[:half]])  # another second half
    logits = lm.model(input_ids=torch.stack([ids, other]), use_cache=False).logits
    expected, moved = logits[:, -len(ids) :].split(1)  # learned prompts have rows in front
    scale = _embedding_scale(embedding)
    if not bool(expected.isfinite().all()):  # damaged weights are reported where they are used
        return Abilities(reads_embeddings=True, embedding_scale=scale, packs=False)
    if not logits_agree(moved[:, :-half], expected[:, :-half], lm.dtype):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} predicts a token from those that follow it too, as masked language models do. "
            "Take a causal language model, or load this one with `is_decoder=True` where it was trained as a decoder."
        )
    inputs = embedding(ids)
    reads = _agrees(lambda: logits_agree(lm.output(inputs[None], positions=range(8)).logits, expected, lm.dtype))
    return Abilities(
        reads_embeddings=reads, embedding_scale=scale, packs=reads and _agrees(lambda: _packs(lm, inputs, expected[0]))
    )


def _agrees(trial: Any) -> bool:
    """The result of a trial; False where a library says that the architecture does not work so."""
    try:
        return trial()
    except Exception as error:
        from_library = type(error).__module__.partition(".")[0] in _LIBRARIES
        if not from_library or isinstance(error, RecursionError | KeyboardInterrupt) or is_out_of_memory(error):
            raise
        return False


def _packs(lm: Any, inputs: Float[Tensor, "length dim"], expected: Float[Tensor, "length vocab"]) -> bool:
    """Whether a packed pass gives the logits of whole sequences, and layers have the windows of the configuration."""
    from transformers import DynamicCache

    if _depends_on_length(lm.model.config.get_text_config()):
        return False
    declared = {
        i: getattr(layer, "sliding_window", None) for i, layer in enumerate(DynamicCache(config=lm.model.config).layers)
    }
    context, length = Context(inputs, 1.0), len(inputs)
    clean = [Branch(context, 0, inputs[None], range(length), record=True)]
    layout = Layout(clean, lm.device)
    (first,) = packed_logits(lm, clean, layout)
    branches = [Branch(context, start, inputs[start:].expand(n, -1, -1), [length - 1]) for start, n in ((5, 2), (2, 3))]
    packed = [first[0, -1], *(row[0] for part in packed_logits(lm, branches) for row in part)]
    return (
        layout.windows == declared
        and logits_agree(first[0], expected, lm.dtype)
        and logits_agree(torch.stack(packed), expected[-1].expand(len(packed), -1), lm.dtype)
    )


def _depends_on_length(config: Any) -> bool:
    """Whether a rotary embedding, such as Phi-3's, rotates all tokens by the largest position of a pass."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, Mapping))]
    return any(kind.get("rope_type") in ("longrope", "dynamic") for kind in kinds)


def embedding_table(embedding: nn.Module) -> Float[Tensor, "vocab dim"]:
    """The weight of an embedding module. Raises UnsupportedModelError where it has none."""
    table = getattr(embedding, "weight", None)
    if not isinstance(table, Tensor):
        raise UnsupportedModelError(
            f"The input embedding is a {type(embedding).__name__} without a weight table. Take a model "
            "with an nn.Embedding."
        )
    return table


def _embedding_scale(embedding: nn.Module) -> float:
    from accelerate.utils import align_module_device

    embedding = getattr(embedding, "base_layer", embedding)  # without the adapter of PEFT, which adds to its rows
    with align_module_device(embedding):  # a table that is offloaded is brought in
        table = embedding_table(embedding)
        ids = torch.linspace(0, table.shape[0] - 1, 16, dtype=torch.float64).long().to(table.device)
        rows, out = functional.embedding(ids, table).cpu().double(), embedding(ids).cpu().double()
    if rows.shape != out.shape or not rows.any():
        return 1.0
    scale = float((rows * out).sum() / (rows * rows).sum())
    return scale if torch.allclose(out, scale * rows, rtol=2e-2, atol=1e-6) else 1.0


def logits_agree(
    logits: Float[Tensor, "*rows vocab"], expected: Float[Tensor, "*rows vocab"], dtype: torch.dtype
) -> bool:
    """Whether two ways of running a model give the same logits, apart from rounding.

    In float32 none may differ by more than a thousandth of their standard deviation. In half precision, or where
    float32 products may be less precise, single ones differ by more than a tenth, and all of them by 0.03 in the mean;
    a token one position off gives 0.3.
    """
    difference, deviation = logits.float() - expected.float(), float(expected.float().std())
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return float(difference.abs().max()) <= 1e-3 * deviation
    return float(difference.square().mean().sqrt()) <= 0.1 * deviation
