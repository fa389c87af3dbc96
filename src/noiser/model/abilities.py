"""What a model can do, found out on eight tokens, not by its name; its attention's weights, and shares of gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from noiser.errors import ModelError, UnsupportedModelError
from noiser.model.packing import Branch, Context, continued, set_attention
from noiser.model.runtime import add_hook, is_out_of_memory, put, running

_CAPTURING = (
    "_output_capturing_hooks_installed"  # transformers' mark on a model whose hooks collect weights
)
_LIBRARIES = (
    "builtins",
    "torch",
    "transformers",
    "transformers_modules",
    "accelerate",
    "einops",
    "jaxtyping",
)
Logits = Float[Tensor, "*rows vocab"]


@dataclass(kw_only=True)
class Abilities:
    """How a model can be run."""

    embedding_scale: float  # the factor that its embedding module puts on rows, sqrt(d) for Gemma
    packs: bool  # whether sequences of different lengths run end to end
    continues: bool = False  # whether the model itself goes on after keys and values of such passes


def find_abilities(lm: Any) -> Abilities:
    """How a model can be run, found by running it; one whose numbers depend on the batch gets one sequence a pass."""
    size, pads = (
        lm.vocabulary_size,
        {setting(lm.model.config, "pad_token_id"), lm.tokenizer.pad_token_id},
    )
    usable = [token for token in range(1, size) if token not in pads] or [
        0
    ]  # some models count positions from padding
    ids = torch.tensor(
        [usable[place * (len(usable) - 1) // 7] for place in range(8)], device=lm.device
    )
    both = torch.stack([ids, torch.cat([ids[:4], ids[:4]])])  # with another second half
    try:
        logits = lm.model(input_ids=both, use_cache=False).logits[
            :, -8:
        ]  # learned prompts have rows in front
    except Exception as error:
        raise_failure(lm.model, error)
    found = Abilities(
        embedding_scale=_embedding_scale(lm.model.get_input_embeddings()), packs=False
    )
    if not bool(logits[0].isfinite().all()):  # damaged weights are reported where they are used
        return found
    agree, kind, inputs = (
        partial(logits_agree, dtype=lm.dtype),
        type(lm.model).__name__,
        lm.embed(both),
    )
    rows = torch.stack([*inputs, 4 * inputs[0].flip(0)])
    rows[2, :4] = 0

    def works(trial: Callable[[], bool]) -> bool:
        """The result of a trial; False where a library says that the architecture does not work so."""
        try:
            return trial()
        except Exception as error:
            with suppress(ModelError):
                raise_failure(lm.model, error)
            return False

    def run(*sequences: Tensor) -> Tensor:
        return lm.output(torch.stack(sequences), positions=range(8)).logits

    def stay_apart() -> bool:
        """Whether a row has the same numbers alone, and beside itself, where passes of one shape round alike."""
        together, alone = run(*rows), torch.cat([run(row) for row in rows])
        beside = torch.stack([run(row, row, row)[i] for i, row in enumerate(rows)])
        return agree(together, alone) and agree(together, beside, closely=True)

    batches = works(stay_apart)
    if batches and not agree(
        logits[1, :4], logits[0, :4]
    ):  # where rows mix, the later half may be the other row's
        text = f"{kind} predicts a token from those that follow it too, as masked language models do. Take a causal one"
        raise UnsupportedModelError(
            f"{text}, or load it with `is_decoder=True` where it was trained as a decoder."
        )
    if not works(lambda: agree(run(*inputs), logits)):
        text = f"{kind} does not predict from embeddings what it predicts from their tokens."
        raise UnsupportedModelError(
            f"{text} Take another model, without embeddings in every layer."
        )
    if not batches:
        lm.batch_tokens = 1
        text = f"{lm.identity.name}: numbers depend on what else is in a batch, as in some quantised models"
        warnings.warn(f"{text}, so sequences run one at a time.", stacklevel=4)
        return found
    context = Context(rows[0], 1.0)

    def go_on() -> Tensor:
        """Logits after the fifth token by the model itself; some, as DeepSeek's kind, cache others."""
        return lm.output(rows[:1, 5:], positions=range(3), **continued(context.cache, 5)).logits[0]

    found.packs = works(lambda: _packs(lm, context, logits[0]))
    found.continues = found.packs and works(lambda: agree(go_on(), logits[0, 5:]))
    return found


def raise_failure(model: Any, error: Exception) -> NoReturn:
    """Raises ModelError for what an architecture's own code raised; a stop or the caller's error as it is."""
    known = type(error).__module__.partition(".")[0] in _LIBRARIES
    if not known or isinstance(error, RecursionError) or is_out_of_memory(error):
        raise error
    text = f"{type(model).__name__} failed while it ran: {type(error).__name__}: {error}."
    raise ModelError(
        f"{text} Take another method or model, or another version of transformers."
    ) from error


def _packs(lm: Any, context: Context, expected: Logits) -> bool:
    """Whether a packed pass gives the logits of whole sequences, and layers have the windows of the configuration."""
    from transformers import DynamicCache

    rotary: Mapping[str, Any] = setting(lm.model.config, "rope_parameters", Mapping) or {}
    kinds = [
        kind.get("rope_type") for kind in (rotary, *rotary.values()) if isinstance(kind, Mapping)
    ]
    if {"longrope", "dynamic"} & {
        *kinds
    }:  # as in Phi-3, all tokens are rotated by the largest position of a pass
        return False
    layers, inputs = DynamicCache(config=lm.model.config).layers, context.inputs
    (first,) = lm.run([Branch(context, 0, inputs[None], range(8), record=True)], packed=True)
    branches = [
        Branch(context, start, inputs[start:].expand(n, -1, -1), [7])
        for start, n in ((5, 2), (2, 3))
    ]
    rows = torch.cat([first[0], *(part[:, 0] for part in lm.run(branches, packed=True))])
    declared = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(layers)}
    return context.windows == declared and logits_agree(
        rows, expected[[*range(8), *[7] * 5]], lm.dtype
    )


def setting(config: Any, name: str, kind: Any = int) -> Any:
    """A setting of a text model's configuration; None where it has none of that kind, or one for each layer."""
    value: Any = None
    with suppress(
        AttributeError, RuntimeError
    ):  # the latter by configurations that differ by layer
        value = getattr(config.get_text_config(), name, None)
    return value if isinstance(value, kind) and (kind is not int or value > 0) else None


def _embedding_scale(embedding: Any) -> float:
    from accelerate.utils import align_module_device

    embedding = getattr(
        embedding, "base_layer", embedding
    )  # without the adapter of PEFT, which adds to its rows
    with align_module_device(embedding):  # a table that is offloaded is brought in
        table = embedding.weight
        ids = torch.linspace(0, table.shape[0] - 1, 16, dtype=torch.float64).long().to(table.device)
        rows, out = functional.embedding(ids, table).cpu().double(), embedding(ids).cpu().double()
    if rows.shape != out.shape or not rows.any():
        return 1.0
    scale = float((rows * out).sum() / (rows * rows).sum())
    return scale if torch.allclose(out, scale * rows, rtol=2e-2, atol=1e-6) else 1.0


def logits_agree(
    found: Logits, expected: Logits, dtype: torch.dtype, *, closely: bool = False
) -> bool:
    """Whether two ways of running a model give the same logits, apart from rounding.

    In float32 none may differ by more than a thousandth of their standard deviation. In half precision, or with less
    precise products, all differ by 0.03 in the mean; a token one position off gives 0.3. `closely`: 0.01.
    """
    difference, deviation = found.float() - expected.float(), float(expected.float().std())
    if dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest":
        return float(difference.abs().max()) <= 1e-3 * deviation
    return float(difference.square().mean().sqrt()) <= (0.01 if closely else 0.1) * deviation


def attention_maps(
    lm: Any, token_ids: Int[Tensor, " length"]
) -> list[Float[Tensor, "length length"]]:
    """Attention weights of each layer that has attention, first to last, mean over heads, float32.

    Row i holds what position i attends to: zero after i, and outside the window of a layer that slides.
    """
    length = len(token_ids)

    def are_weights(found: Any) -> bool:
        return (
            isinstance(found, Tensor) and found.ndim == 4 and found.shape[-2:] == (length, length)
        )

    def average(_module: Any, _inputs: Any, output: Any) -> Any:
        """Weights leave their layer averaged over heads: memory holds one map per layer, not per head."""
        if isinstance(output, tuple) and len(output) > 1 and are_weights(weights := output[1]):
            output = (output[0], weights.float().mean(1, keepdim=True), *output[2:])
        return output

    with running(lm.model):
        set_attention(lm.model, "eager")
        for module in (
            lm.model.modules()
        ):  # with ours, hooks that transformers installs to collect weights go again
            put(lm.model, vars(module), _CAPTURING, _CAPTURING in vars(module))
            add_hook(lm.model, module, average, prepend=True)  # before the hooks that collect
        out = lm.output(lm.embed(token_ids)[None], positions=[length - 1], output_attentions=True)
    layers = [weights for weights in getattr(out, "attentions", None) or () if weights is not None]
    if not layers or not all(map(are_weights, layers)):
        raise UnsupportedModelError(
            f"{type(lm.model).__name__} gives no attention weights of shape [1, heads, length, length]. Take a method "
            "that does not read them, such as 'occlusion', or load a model of its own code with "
            "attn_implementation='eager'."
        )
    return [weights[0].float().mean(0) for weights in layers]


def divide_gradient(x: Tensor, by: float) -> Tensor:
    """`x`, whose gradient is divided by a number on its way back."""
    if x.requires_grad:
        x = x.view_as(x)
        x.register_hook(partial(torch.mul, other=1 / by))
    return x


def share_attention(model: Any, queries_keys: float, values: float, ran: list[Any]) -> None:
    """Divides gradients that attention returns for queries, keys and values while a model runs; `ran` gets layers."""

    def share(
        own: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any
    ) -> Any:
        ran.append(module)
        q, k, v = (
            divide_gradient(x, by) for x, by in ((q, queries_keys), (k, queries_keys), (v, values))
        )
        return own(module, q, k, v, *args, **options)

    set_attention(model, share)
