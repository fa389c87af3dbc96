"""What a model can do, found out by running it, not by its name.

A trial on eight tokens finds most of it. Attention that selects what it sees (blocks, chunks, the best keys) may begin
to do so after thousands of tokens, so a trial of eight says nothing about it. `attention_is_known` says of which models
the attention is known to be full or sliding at any length; others get a trial of each length that is asked about.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from noiser.errors import ModelError, UnsupportedModelError
from noiser.model.attention import set_attention
from noiser.model.memory import is_out_of_memory
from noiser.model.packing import Branch, Context, continued
from noiser.model.runtime import running

_LIBRARIES = (
    "builtins",
    "torch",
    "transformers",
    "transformers_modules",
    "accelerate",
    "einops",
    "jaxtyping",
)
_KNOWN_CODE = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "torchao")
_SELECTS = re.compile(
    "window|chunk|block|topk|top_k|index|sparse|stride|segment|bucket|select|compress|local|span"
    "|keep|sink|recent|landmark|anchor|page|evict|budget"
)
"""Names of settings of attention that does not see everything before a token."""

_SELECTS_NOT = re.compile(
    "expert|moe|group|mlp|mamba|conv|vision|audio|logits|token_id|rope"
    "|sliding_window|max_window_layers|decoder_sparse_step|chunk_size_feed_forward"
)
"""Those of them that are about something else, or about windows, which a pass respects."""

Logits = Float[Tensor, "*rows vocab"]


class Packing(NamedTuple):
    """How sequences up to some length can be run."""

    packs: bool  # whether sequences of different lengths run end to end
    continues: bool  # whether the model itself goes on after keys and values of such passes


@dataclass(kw_only=True)
class Abilities:
    """How a model can be run."""

    embedding_scale: float  # the factor that its embedding module puts on rows, sqrt(d) for Gemma
    packs: bool  # as of `Packing`, on eight tokens
    continues: bool = False
    is_known: bool = True  # whether longer sequences attend as these do
    tried: dict[int, Packing] = field(
        default_factory=dict[int, Packing], compare=False, repr=False
    )  # of other lengths, where they may differ


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
    context = Context(rows[0], 1.0, packs=True)

    def go_on() -> Tensor:
        """Logits after the fifth token by the model itself; some, as DeepSeek's kind, cache others."""
        return lm.output(rows[:1, 5:], positions=range(3), **continued(context.cache, 5)).logits[0]

    found.packs = works(lambda: _packs(lm, context, logits[0]))
    found.continues = found.packs and works(lambda: agree(go_on(), logits[0, 5:]))
    found.is_known = attention_is_known(lm.model)
    return found


def attention_is_known(model: Any) -> bool:
    """Whether every layer's attention is full or sliding at any length, by the configuration and the model's code.

    The configuration must have no setting of attention that selects, and all modules must be of known libraries.
    """
    config: Any = model.config.get_text_config()
    types = setting(config, "layer_types", list | tuple) or ()
    if not {*types} <= {"full_attention", "sliding_attention"}:
        return False
    for name, value in config.to_dict().items():
        is_number = isinstance(value, int | list | tuple) and not isinstance(value, bool)
        if is_number and value and _SELECTS.search(name) and not _SELECTS_NOT.search(name):
            return False
    for module in model.modules():
        for place in (type(module).__module__, module.forward.__module__):
            if place.partition(".")[0] not in _KNOWN_CODE:
                return False
    return True


def try_length(lm: Any, length: int) -> Packing:
    """How sequences of up to that length run: what a trial of that length says.

    The masks that layers give their attention in a whole pass must be those that a packed pass uses, and the logits of
    whole, packed and continued passes must be the same.
    """
    middle = length - 8  # a short rest: a pass of few tokens must attend as a long one does
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, lm.vocabulary_size, (length,), generator=generator)
    inputs = lm.embed(ids)
    context = Context(inputs, 1.0, packs=True)
    wanted = sorted({*range(0, length, max(1, length // 16)), *range(middle, length)})
    after = [position for position in wanted if position >= middle]
    strange: list[Any] = []

    def watch(
        own: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *mask: Any, **more: Any
    ) -> Any:
        """The layer's own attention, which notes layers whose mask is not the one of a packed pass."""
        given = mask[0] if mask else more.get("attention_mask")
        if not _is_causal(given, more.get("sliding_window"), q.shape[-2], k.shape[-2]):
            strange.append(module)
        return own(module, q, k, v, *mask, **more)

    def whole() -> Tensor:
        with running(lm.model):
            set_attention(lm.model, watch)
            return lm.output(inputs[None], positions=wanted).logits[0]

    def go_on() -> Tensor:
        options = continued(context.cache, middle)
        positions = [position - middle for position in after]
        return lm.output(inputs[None, middle:], positions=positions, **options).logits[0]

    try:
        expected = whole()
        if strange:
            return Packing(packs=False, continues=False)
        (clean,) = lm.run([Branch(context, 0, inputs[None], wanted, record=True)])
        (branch,) = lm.run([Branch(context, middle, inputs[None, middle:], after)])
        late = expected[-len(after) :]
        agree = partial(logits_agree, dtype=lm.dtype)
        packs = agree(clean[0], expected) and agree(branch[0], late)
        return Packing(packs, packs and agree(go_on(), late))
    except Exception as error:
        with suppress(ModelError):
            raise_failure(lm.model, error)
        return Packing(packs=False, continues=False)


def _is_causal(mask: Any, window: int | None, queries: int, keys: int) -> bool:
    """Whether a mask of attention hides what stands after a token or outside of a window, and nothing else."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return False
    shown = mask if mask.dtype == torch.bool else mask == 0
    rows = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    distance = rows - torch.arange(keys, device=mask.device)
    expected = (distance >= 0) & (distance < (window or keys))
    return shown.shape[-2:] == expected.shape and bool((shown == expected).all())


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
    (first,) = lm.run([Branch(context, 0, inputs[None], range(8), record=True)])
    branches = [
        Branch(context, start, inputs[start:].expand(n, -1, -1), [7])
        for start, n in ((5, 2), (2, 3))
    ]
    rows = torch.cat([first[0], *(part[:, 0] for part in lm.run(branches))])
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
    exact = torch.get_float32_matmul_precision() == "highest"
    exact = exact and not torch.is_autocast_enabled(found.device.type)
    if exact and dtype in (torch.float32, torch.float64):
        return float(difference.abs().max()) <= 1e-3 * deviation
    return float(difference.square().mean().sqrt()) <= (0.01 if closely else 0.1) * deviation
