"""What a model can do, measured by running it on eight tokens; no architecture is known by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from noiser.errors import UnsupportedModelError
from noiser.model.memory import is_out_of_memory
from noiser.model.packing import Branches, Group, Layout, packed_logits
from noiser.model.prefix import CausalModel, Prefix, empty_prefix
from noiser.model.runtime import uncompiled

_REFUSALS = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ImportError, AssertionError)
_LIBRARIES = ("builtins", "torch", "transformers", "transformers_modules", "accelerate", "einops", "jaxtyping")


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a model can do.

    Attributes:
        reads_embeddings: it predicts from embeddings what it predicts from their tokens.
        embedding_scale: the factor between the rows of the embedding table and what the embedding module returns:
            sqrt(d) for Gemma, 1 for most models.
        reuses_prefix: a cached prefix gives what the whole sequence gives.
        packs: sequences of different lengths can run end to end in one pass.
        longest_pass: the most tokens of a pass in which a position is encoded as in shorter ones; None for any. Some
            rotary embeddings, such as Phi-3's for long contexts, rotate all tokens by the pass's largest position.
    """

    reads_embeddings: bool
    embedding_scale: float
    reuses_prefix: bool
    packs: bool
    longest_pass: int | None


def measure_capabilities(lm: CausalModel) -> Capabilities:
    """What a model can do; to be called while it runs without gradients.

    An exception that is not the architecture's own refusal, such as a stop, passes through.

    Raises:
        UnsupportedModelError: the model reads the tokens that follow, as BERT and XLNet do.
    """
    embedding = lm.model.get_input_embeddings()
    size = embedding_table(embedding).shape[0]
    ids = torch.linspace(1, size - 1, 8, dtype=torch.float64).long().to(lm.device)
    embeddings = embedding(ids)
    longest = _longest_pass(lm.model.config.get_text_config())
    reads = _reads_embeddings(lm, ids, embeddings)
    reuses = reads and _succeeds(lambda: _reuses_prefix(lm, embeddings))
    return Capabilities(
        reads_embeddings=reads,
        embedding_scale=_embedding_scale(embedding),
        reuses_prefix=reuses,
        packs=reuses and longest is None and _succeeds(lambda: _packs(lm, embeddings)),
        longest_pass=longest,
    )


def _succeeds(probe: Callable[[], bool]) -> bool:
    """What a probe returns; False where the architecture refuses it."""
    try:
        return probe()
    except Exception as error:
        if not _is_refusal(error):
            raise
        return False


def _is_refusal(error: Exception) -> bool:
    """Whether an error says that an architecture does not work so, as those that Python and libraries raise do.

    The caller's own errors, which stop a pass from a hook, say nothing about the model; nor does lack of memory.
    """
    from_library = type(error).__module__.partition(".")[0] in _LIBRARIES
    refuses = isinstance(error, _REFUSALS) and not isinstance(error, RecursionError)
    return from_library and refuses and not is_out_of_memory(error)


def _longest_pass(config: Any) -> int | None:
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    context = getattr(config, "max_position_embeddings", None)
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, Mapping))]
    lengths = [
        kind.get("original_max_position_embeddings") or context
        for kind in kinds
        if kind.get("rope_type") in ("longrope", "dynamic")
    ]
    return min((length for length in lengths if length), default=None)


def embedding_table(embedding: nn.Module) -> Float[Tensor, "vocab dim"]:
    """The weight of an embedding module. Raises UnsupportedModelError where it has none."""
    table = getattr(embedding, "weight", None)
    if not isinstance(table, Tensor):
        raise UnsupportedModelError(
            f"The input embedding is a {type(embedding).__name__} without a weight table; expected an nn.Embedding. "
            "Noise is defined on rows of that table."
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


def _reads_embeddings(lm: CausalModel, ids: Int[Tensor, " length"], embeddings: Float[Tensor, "length dim"]) -> bool:
    def agrees() -> bool:
        logits = lm.model(inputs_embeds=embeddings[None].clone(), use_cache=False).logits  # scaled in place by some
        return logits_agree(logits, expected, lm.dtype)

    with uncompiled(lm.model):  # one pass is not worth compiling for
        half = len(ids) // 2
        other = torch.cat([ids[:half], ids[:half]])  # another second half
        expected, moved = lm.model(input_ids=torch.stack([ids, other]), use_cache=False).logits.split(1)
        if not bool(expected.isfinite().all()):
            return True  # damaged weights are reported where they are used
        if not logits_agree(moved[:, :-half], expected[:, :-half], lm.dtype):
            raise UnsupportedModelError(
                f"{type(lm.model).__name__} predicts a token from those that follow it too, as masked language models "
                "do; expected a causal language model. Take another model, or load this one with `is_decoder=True` "
                "where it was trained as a decoder."
            )
        return _succeeds(agrees)


def _reuses_prefix(lm: CausalModel, embeddings: Float[Tensor, "length dim"]) -> bool:
    """Whether running the second half on a cropped and repeated cache gives what the whole sequence gives.

    Architectures differ in ways that no attribute tells: recurrent states, caches under other names, positions
    counted from a mask.
    """
    length = embeddings.shape[0]
    half = length // 2
    whole = lm.output(embeddings[None], positions=[length - 1]).logits[0, 0]
    prefix = empty_prefix(lm)
    lm.output(embeddings[None], positions=[length - 1], prefix=prefix)
    prefix.length = length
    if not all(hasattr(layer, "keys") and layer.is_croppable for layer in prefix.cache.layers):
        return False
    suffix = embeddings[half:].expand(2, -1, -1)
    branched = lm.output(suffix, positions=[length - half - 1], prefix=prefix.branch(half, 2)).logits[:, 0]
    return logits_agree(branched, whole.expand_as(branched), lm.dtype)


def _packs(lm: CausalModel, embeddings: Float[Tensor, "length dim"]) -> bool:
    """Whether packed sequences give what whole sequences give, and layers have the windows that the cache has.

    Layers must take their attention from transformers' registry, and pass it their sliding window.
    """
    one, other = embeddings, embeddings[2:].flip(0)
    whole = [lm.output(x[None], positions=[len(x) - 2, len(x) - 1]).logits[0] for x in (one, other)]
    first = packed_logits(lm, [_trial(one, empty_prefix(lm)), _trial(other, empty_prefix(lm))])
    packs = [_trial(other, empty_prefix(lm)), _trial(one, first[0].prefix)]
    layout = Layout(packs, lm.device)
    second = packed_logits(lm, packs, layout)
    declared = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(first[0].prefix.cache.layers)}
    return layout.windows == declared and all(
        logits_agree(logits, expected.expand_as(logits), lm.dtype)
        for packed, expected in zip([*first, *reversed(second)], [*whole, *whole], strict=True)
        for logits in packed.logits
    )


def _trial(embeddings: Float[Tensor, "length dim"], prefix: Prefix) -> Branches:
    """Unperturbed branches of a sequence, after the sequence itself where it is not cached."""
    length = len(embeddings)
    shapes = [*([] if prefix.length else [(0, 1)]), (length - 3, 2), (2, 3)]
    groups = [Group(start, embeddings[start:].expand(n, -1, -1), [length - 2, length - 1]) for start, n in shapes]
    return Branches(prefix, groups, clean=not prefix.length)


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
