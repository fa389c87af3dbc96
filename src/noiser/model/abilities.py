"""What a model can do, found out by running it, not by its name.

A trial on eight tokens finds most of it. Attention that selects what it sees (blocks, chunks, the
best keys) may begin to do so after thousands of tokens, so a trial of eight says nothing about it.
`attention_is_known` says whether a model's attention is full or sliding at any length. Other models
get a trial for each length that is asked about.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from noiser.errors import ModelError, UnsupportedModelError
from noiser.model.attention import callers_attention, is_known_code, set_attention
from noiser.model.memory import is_out_of_memory
from noiser.model.packing import Branch, Context, continued
from noiser.model.runtime import running
from noiser.notices import warn

_LIBRARIES = (
    "builtins",
    "torch",
    "transformers",
    "transformers_modules",
    "accelerate",
    "einops",
    "jaxtyping",
)
_SELECTS = re.compile(
    "window|chunk|block|topk|top_k|index|sparse|stride|segment|bucket|select|compress|local|span"
    "|keep|sink|recent|landmark|anchor|page|evict|budget"
)
"""Names of settings of attention that does not see everything before a token."""

_IN_MODULES = (
    "create_causal_mask",
    "create_sliding_window_causal_mask",
    "create_masks_for_generate",
    "eager_attention_forward",
)
"""Functions of attention that the modules of transformers' architectures import."""

_SELECTS_NOT = re.compile(
    "expert|moe|group|mlp|mamba|conv|vision|audio|logits|token_id|rope"
    "|sliding_window|max_window_layers|decoder_sparse_step|chunk_size_feed_forward"
)
"""Names among them that are about something else, or about windows, which a pass respects."""

RowLogits = Float[Tensor, "*rows vocab"]


class Packing(NamedTuple):
    """How sequences up to some length can be run."""

    supports_packing: bool  # whether sequences of different lengths run end to end
    supports_cached_prefix: (
        bool  # whether the model itself goes on after keys and values of such passes
    )


@dataclass(kw_only=True)
class Abilities:
    """How a model can be run.

    Attributes:
        embedding_scale: the factor that its embedding module puts on rows, sqrt(d) for Gemma.
        supports_packing: as in `Packing`, on eight tokens.
        supports_cached_prefix: as in `Packing`, on eight tokens.
        is_known: whether longer sequences attend as these do.
        tried: how sequences of other lengths run, where they may differ.
        found_with: `callers_attention` when that was found.
    """

    embedding_scale: float
    supports_packing: bool
    supports_cached_prefix: bool = False
    is_known: bool = True
    tried: dict[int, Packing] = field(default_factory=dict[int, Packing], compare=False, repr=False)
    found_with: str | None = field(default=None, compare=False, repr=False)


def find_abilities(lm: Any) -> Abilities:
    """How a model can be run, found by running it.

    A model whose numbers depend on the batch gets one sequence per pass.

    Raises:
        ModelError: the model's code fails.
        UnsupportedModelError: a token is predicted from later ones, or embeddings do not predict
            what their tokens do.
    """
    kind = type(lm.model).__name__
    pair = _trial_tokens(lm)
    try:
        output = lm.model(input_ids=pair, use_cache=False)
    except Exception as error:
        raise_failure(lm.model, error)
    if not isinstance(getattr(output, "logits", None), Tensor):
        raise UnsupportedModelError(
            f"{kind} returns no logits of a next token. Load it with AutoModelForCausalLM."
        )
    logits = output.logits[:, -8:]  # learned prompts have rows in front
    scale = _embedding_scale(lm.model.get_input_embeddings())
    abilities = Abilities(embedding_scale=scale, supports_packing=False)
    if not bool(logits[0].isfinite().all()):  # damaged weights are reported where they are used
        return abilities
    agree = partial(logits_agree, dtype=lm.dtype)
    works = partial(_works, lm.model)
    inputs = lm.embed(pair)
    # The third row is neither of the two: zeros, and then large numbers.
    rows = torch.stack([*inputs, 4 * inputs[0].flip(0)])
    rows[2, :4] = 0

    batches = works(lambda: _stay_apart(lm, rows))
    # Both sequences begin alike. Where rows mix, what differs may come from the other row.
    if batches and not agree(logits[1, :4], logits[0, :4]):
        raise UnsupportedModelError(
            f"{kind} predicts a token from those that follow it too, as masked language models do. "
            "Take a causal one, or load it with `is_decoder=True` where it was trained as a "
            "decoder."
        )
    if not works(lambda: agree(_run_rows(lm, *inputs), logits)):
        raise UnsupportedModelError(
            f"{kind} does not predict from embeddings what it predicts from their tokens. "
            "Take another model, without embeddings in every layer."
        )
    if not batches:
        lm.batch_tokens = 1
        warn(
            f"{lm.identity.name}: numbers depend on what else is in a batch, as in some quantised "
            "models, so sequences run one at a time.",
        )
        return abilities
    context = Context(rows[0], 1.0, supports_packing=True)
    abilities.supports_packing = works(lambda: _packs(lm, context, logits[0]))
    if abilities.supports_packing:
        abilities.supports_cached_prefix = works(
            lambda: agree(_go_on(lm, context, 5), logits[0, 5:])
        )
    abilities.is_known = attention_is_known(lm.model)
    abilities.found_with = callers_attention(lm.model)
    return abilities


def _trial_tokens(lm: Any) -> Int[Tensor, "2 8"]:
    """Two sequences of eight tokens from the whole vocabulary; they have the same first half."""
    padding = {setting(lm.model.config, "pad_token_id"), lm.tokenizer.pad_token_id}
    # Some models count positions from padding.
    usable = [token for token in range(1, lm.vocabulary_size) if token not in padding] or [0]
    last = len(usable) - 1
    ids = torch.tensor([usable[place * last // 7] for place in range(8)], device=lm.device)
    return torch.stack([ids, torch.cat([ids[:4], ids[:4]])])


def _works(model: Any, trial: Callable[[], bool]) -> bool:
    """The result of a trial; False where a library says that the architecture does not work so."""
    try:
        return trial()
    except Exception as error:
        with suppress(ModelError):
            raise_failure(model, error)
        return False


def _run_rows(lm: Any, *sequences: Tensor) -> Float[Tensor, "sequences 8 vocab"]:
    """The logits of sequences of eight embeddings, in one batch."""
    return lm.output(torch.stack(sequences), positions=range(8)).logits


def _stay_apart(lm: Any, rows: Float[Tensor, "sequences 8 dim"]) -> bool:
    """Whether a row of a batch has the numbers that it has alone, and beside itself.

    Passes of one shape round alike, so beside itself the numbers must agree more closely.
    """
    together = _run_rows(lm, *rows)
    alone = torch.cat([_run_rows(lm, row) for row in rows])
    beside_itself: list[Tensor] = []
    for number, row in enumerate(rows):
        beside_itself.append(_run_rows(lm, row, row, row)[number])
    if not logits_agree(together, alone, lm.dtype):
        return False
    return logits_agree(together, torch.stack(beside_itself), lm.dtype, closely=True)


def _go_on(lm: Any, context: Context, start: int) -> Float[Tensor, "rest vocab"]:
    """The logits from `start` on by the model itself, after the cached keys and values.

    Some models, such as DeepSeek's, cache other states than keys and values.
    """
    rest = context.inputs[None, start:]
    options = continued(context.cache, start)
    return lm.output(rest, positions=range(rest.shape[1]), **options).logits[0]


def attention_is_known(model: Any) -> bool:
    """Whether every layer's attention is full or sliding at any length.

    The configuration must have no setting of attention that selects, and all code that runs in a
    pass must be of known libraries.
    """
    config: Any = model.config.get_text_config()
    types = setting(config, "layer_types", list | tuple) or ()
    if not {*types} <= {"full_attention", "sliding_attention"}:
        return False
    for name, value in config.to_dict().items():
        is_number = isinstance(value, int | list | tuple) and not isinstance(value, bool)
        if is_number and value and _SELECTS.search(name) and not _SELECTS_NOT.search(name):
            return False
    return callers_attention(model) is None and all(map(is_known_code, _code_of_passes(model)))


def _code_of_passes(model: Any) -> Iterator[Any]:
    """The classes, functions and hooks that run in a pass, and the functions that make masks."""
    from transformers import AttentionMaskInterface

    masks: Any = AttentionMaskInterface._global_mapping  # pyright: ignore[reportPrivateUsage]
    yield from masks.values()
    kinds: dict[type[Any], None] = {}
    for module in model.modules():
        kinds[type(module)] = None
        state = vars(module)
        if "forward" in state:
            yield state["forward"]
        if module is not model:  # whose hooks see no more than inputs and logits
            for hooks in (state["_forward_pre_hooks"], state["_forward_hooks"]):
                yield from hooks.values()
    for kind in kinds:
        yield kind
        yield kind.forward
    for name in {kind.__module__ for kind in kinds}:
        of_architecture = vars(sys.modules[name])
        yield from (of_architecture[each] for each in _IN_MODULES if each in of_architecture)


def try_length(lm: Any, length: int) -> Packing:
    """How sequences of up to that length run, by a trial of that length.

    In a whole pass, layers must give their attention the masks that a packed pass uses. The logits
    of whole, packed and continued passes must be the same, and of a pass that is full of short
    sequences: some code depends on how many tokens a pass has.
    """
    # A short rest: a pass of few tokens must attend as a long one does. Seven, so that sequences
    # end to end do not stand as blocks of 8 or 16 do.
    middle = length - 7
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, lm.vocabulary_size, (length,), generator=generator)
    inputs = lm.embed(ids)
    context = Context(inputs, 1.0, supports_packing=True)
    wanted = sorted({*range(0, length, max(1, length // 16)), *range(middle, length)})
    after = [position for position in wanted if position >= middle]
    strange: list[Any] = []

    def watch(
        own: Any, module: Any, q: Tensor, k: Tensor, v: Tensor, *mask: Any, **more: Any
    ) -> Any:
        """The layer's own attention; notes layers whose mask is not that of a packed pass."""
        layer_mask = mask[0] if mask else more.get("attention_mask")
        window = more.get("sliding_window")
        if not _is_causal(layer_mask, window, q.shape[-2], k.shape[-2]):
            strange.append(module)
        return own(module, q, k, v, *mask, **more)

    def whole() -> Tensor:
        return lm.output(inputs[None], positions=wanted).logits[0]

    def go_on() -> Tensor:
        options = continued(context.cache, middle)
        positions = [position - middle for position in after]
        return lm.output(inputs[None, middle:], positions=positions, **options).logits[0]

    try:
        expected = whole()  # by the model's own attention, and then once more to see its masks
        with running(lm.model):
            set_attention(lm.model, watch)
            whole()
        if strange:
            return Packing(supports_packing=False, supports_cached_prefix=False)
        (clean,) = lm.run([Branch(context, 0, inputs[None], wanted, record=True)])
        (branch,) = lm.run([Branch(context, middle, inputs[None, middle:], after)])
        count = max(1, min(lm.batch_tokens // 7, lm.logit_rows))
        copies = inputs[middle:].expand(count, -1, -1)
        (many,) = lm.run([Branch(context, middle, copies, [length - 1])])
        late = expected[-len(after) :]
        agree = partial(logits_agree, dtype=lm.dtype)
        supports_packing = (
            agree(clean[0], expected)
            and agree(branch[0], late)
            and agree(many[:, 0], late[-1:].expand(count, -1))
        )
        return Packing(supports_packing, supports_packing and agree(go_on(), late))
    except Exception as error:
        with suppress(ModelError):
            raise_failure(lm.model, error)
        return Packing(supports_packing=False, supports_cached_prefix=False)


def _is_causal(mask: Any, window: int | None, queries: int, keys: int) -> bool:
    """Whether a mask hides the tokens after a token and outside of a window, and no others."""
    if mask is None:
        return True
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return False
    visible = mask if mask.dtype == torch.bool else mask == 0
    rows = torch.arange(keys - queries, keys, device=mask.device)[:, None]
    distance = rows - torch.arange(keys, device=mask.device)
    expected = (distance >= 0) & (distance < (window or keys))
    return visible.shape[-2:] == expected.shape and bool((visible == expected).all())


def raise_failure(model: Any, error: Exception) -> NoReturn:
    """Raises ModelError for an error of an architecture's own code; any other error as it is."""
    is_of_library = type(error).__module__.partition(".")[0] in _LIBRARIES
    if not is_of_library or isinstance(error, RecursionError) or is_out_of_memory(error):
        raise error
    raise ModelError(
        f"{type(model).__name__} failed while it ran: {type(error).__name__}: {error}. "
        "Take another method or model, or another version of transformers."
    ) from error


def _packs(lm: Any, context: Context, expected: RowLogits) -> bool:
    """Whether a packed pass gives the logits of whole sequences of eight tokens.

    Layers must also slide as the configuration says.
    """
    from transformers import DynamicCache

    if _rotates_by_longest(lm.model.config):
        return False
    layers = DynamicCache(config=lm.model.config).layers
    inputs = context.inputs
    (first,) = lm.run([Branch(context, 0, inputs[None], range(8), record=True)])
    branches = [
        Branch(context, 5, inputs[5:].expand(2, -1, -1), [7]),
        Branch(context, 2, inputs[2:].expand(3, -1, -1), [7]),
    ]
    last_rows = [logits[:, 0] for logits in lm.run(branches)]
    rows = torch.cat([first[0], *last_rows])
    declared = {i: getattr(layer, "sliding_window", None) for i, layer in enumerate(layers)}
    if context.windows != declared:
        return False
    return logits_agree(rows, expected[[*range(8), 7, 7, 7, 7, 7]], lm.dtype)


def _rotates_by_longest(config: Any) -> bool:
    """Whether all tokens are rotated by the largest position of a pass, as in Phi-3."""
    rotary: Mapping[str, Any] = setting(config, "rope_parameters", Mapping) or {}
    by_kind_of_layer = [value for value in rotary.values() if isinstance(value, Mapping)]
    types = [parameters.get("rope_type") for parameters in (rotary, *by_kind_of_layer)]
    return "longrope" in types or "dynamic" in types


def setting(config: Any, name: str, kind: Any = int) -> Any:
    """A setting of a text model's configuration.

    None where it has none of that kind, or one for each layer.
    """
    value: Any = None
    # A RuntimeError comes from configurations that differ by layer.
    with suppress(AttributeError, RuntimeError):
        value = getattr(config.get_text_config(), name, None)
    if not isinstance(value, kind):
        return None
    if kind is int and value <= 0:
        return None
    return value


def _embedding_scale(embedding: Any) -> float:
    from accelerate.utils import align_module_device

    # Without the adapter of PEFT, which adds to its rows.
    embedding = getattr(embedding, "base_layer", embedding)
    with align_module_device(embedding):  # a table that is offloaded is brought in
        table = embedding.weight
        ids = torch.linspace(0, table.shape[0] - 1, 16, dtype=torch.float64).long().to(table.device)
        rows = functional.embedding(ids, table).cpu().double()
        outputs = embedding(ids).cpu().double()
    if rows.shape != outputs.shape or not rows.any():
        return 1.0
    # The factor of least squares: Σ row · output / Σ row².
    scale = float((rows * outputs).sum() / (rows * rows).sum())
    is_factor = torch.allclose(outputs, scale * rows, rtol=2e-2, atol=1e-6)
    return scale if is_factor else 1.0


def logits_agree(
    found: RowLogits, expected: RowLogits, dtype: torch.dtype, *, closely: bool = False
) -> bool:
    """Whether two ways of running a model give the same logits, apart from rounding.

    In float32 none may differ by more than a thousandth of their standard deviation. In half
    precision, or with less precise products, all differ by 0.03 in the mean; a token one position
    off gives 0.3. `closely`: 0.01.
    """
    difference = found.float() - expected.float()
    deviation = float(expected.float().std())
    exact_products = torch.get_float32_matmul_precision() == "highest"
    autocast = torch.is_autocast_enabled(found.device.type)
    if exact_products and not autocast and dtype in (torch.float32, torch.float64):
        return float(difference.abs().max()) <= 1e-3 * deviation
    limit = 0.01 if closely else 0.1
    return float(difference.square().mean().sqrt()) <= limit * deviation
