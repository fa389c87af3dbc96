"""A causal language model, reduced to the few operations that attribution needs.

How a model can be run is not known by the name of its architecture: it is tried (`noiser.model.abilities`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Generator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from noiser.checks import check_count
from noiser.errors import NumericalError, ParameterError, UnsupportedModelError
from noiser.model.abilities import Abilities, embedding_table, find_abilities
from noiser.model.packing import Branch, Context, packed_logits
from noiser.model.products import fast_products, is_plain, precise_logits
from noiser.model.runtime import evaluation_mode, model_lock, on_the_cpu
from noiser.text import Encoding, check_template_kwargs, encode
from noiser.types import ModelIdentity, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class LanguageModel:
    """A model and its tokenizer, as `load_model` and `wrap` return them.

    Both objects are left exactly as they were: no weight, flag, setting or special token is changed for longer than a
    pass. Threads may share a model: a lock keeps their passes apart. Do not run the model itself meanwhile.

    Args:
        model: a decoder-only Hugging Face model with a language-modelling head.
        tokenizer: its tokenizer.
        identity: how to load the same model again; read off the model when None.
        batch_tokens: the most tokens that one forward pass may hold; None for 1,024 on a CPU, which keeps activations
            in its caches, and 8,192 elsewhere. Lower it when memory is short; results do not depend on it.
        chat_template_kwargs: further arguments of the tokenizer's chat template, such as `{"enable_thinking": False}`.

    Raises:
        UnsupportedModelError: the model is an encoder-decoder, has no language-modelling head, or only one token.
        ParameterError: `tokenizer` is none, batch_tokens is below 1, or a chat template cannot get these arguments.

    Attributes:
        looks_inside: whether the layers are in this process, for gradients, attention and relevance.
        takes_embeddings: whether tokens can be changed, and not only taken out.
    """

    looks_inside: bool = True
    takes_embeddings: bool = True

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        identity: ModelIdentity | None = None,
        batch_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        _check_is_causal(model)
        if batch_tokens is not None:
            batch_tokens = check_count("batch_tokens", batch_tokens)
        if not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise ParameterError(
                f"tokenizer is {tokenizer!r:.200}; expected a tokenizer, as transformers.AutoTokenizer loads it."
            )
        self.model: Any = model
        if self.vocabulary_size < 2:
            raise UnsupportedModelError(
                f"{type(model).__name__} has a vocabulary of {self.vocabulary_size}; expected at least two tokens. "
                "Take another model."
            )
        self.tokenizer: Any = tokenizer
        self._abilities: Abilities | None = None
        self.identity = identity or ModelIdentity(
            name=getattr(model.config, "_name_or_path", "") or type(model).__name__,
            revision=getattr(model.config, "_commit_hash", None),
            dtype=dtype_name(model),
            architecture=type(model).__name__,
        )
        self.batch_tokens = batch_tokens or (1024 if self.device.type == "cpu" else 8192)
        self.chat_template_kwargs = chat_template_kwargs or {}

    def __repr__(self) -> str:
        return f"LanguageModel({self.identity.name!r}, {self.identity.dtype}, {self.device})"

    @property
    def _embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings, to which token ids and embeddings must be sent."""
        device = embedding_table(self._embedding).device
        if device.type == "meta":  # offloaded by accelerate: its hook knows where the module runs
            device = torch.device(self._embedding._hf_hook.execution_device)  # pyright: ignore
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embeddings that the model reads."""
        return self.model.dtype

    @cached_property
    def embedding_dim(self) -> int:
        """The length of one row of the embedding table, d."""
        return embedding_table(self._embedding).shape[1]

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of tokens that the model can read and, padded rows included, predict."""
        return embedding_table(self._embedding).shape[0]

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can read, or None where its configuration sets no limit."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]:
        """Further arguments of the tokenizer's chat template. Raises ParameterError when set to unsuitable ones."""
        return self._chat_template_kwargs

    @chat_template_kwargs.setter
    def chat_template_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        self._chat_template_kwargs = check_template_kwargs(kwargs, self.tokenizer)

    def encode(self, prompt: Prompt | object, *, rendered: str | None = None) -> Encoding:
        """A text or chat messages in tokens; see `noiser.text.encode`."""
        length, kwargs = self.context_length, self.chat_template_kwargs
        return encode(self.tokenizer, prompt, context_length=length, rendered=rendered, chat_template_kwargs=kwargs)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the model ends a text or its turn."""
        declared: Any = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        ids = [*(declared if isinstance(declared, list) else [declared]), self.tokenizer.eos_token_id]
        return frozenset(i for i in ids if isinstance(i, int) and i < self.vocabulary_size)

    @property
    def abilities(self) -> Abilities:
        """How the model can be run, found out at first use; an interrupted trial leaves nothing changed."""
        if self._abilities is None:
            with self.running():  # the only lock: `cached_property` has one of its own before Python 3.12
                if self._abilities is None:
                    with torch.autocast(self.device.type, enabled=False):
                        self._abilities = find_abilities(self)
        return self._abilities

    @property
    def embedding_scale(self) -> float:
        """The constant factor that the embedding module puts on the rows of its table, such as Gemma's sqrt(d).

        Noise and masks are applied to rows of the table, so that they mean the same in every family: what is fed to the
        model is `scale * (row + noise)`.
        """
        return self.abilities.embedding_scale

    @property
    def packs(self) -> bool:
        """Whether sequences of different lengths run end to end in one pass; False in `abilities` prevents it."""
        return self.abilities.packs

    def check_embeddings(self) -> None:
        """Raises UnsupportedModelError when the model reads more of its tokens than their embeddings."""
        if not self.abilities.reads_embeddings:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not predict from embeddings what it predicts from their tokens, as "
                "models with embeddings of their own in every layer do. Take a model that reads its input embeddings "
                "alone."
            )

    @cached_property
    def _keeps_rows(self) -> bool:
        """Whether the head can run at some positions alone. PEFT passes them on, but not past its learned prompts."""
        forwards = [self.model.forward]
        adapter = getattr(self.model, "active_peft_config", None)
        if adapter is not None and not adapter.is_prompt_learning:
            forwards.append(self.model.get_base_model().forward)
        return any("logits_to_keep" in inspect.signature(forward).parameters for forward in forwards)

    @contextlib.contextmanager
    def running(self, *, gradients: bool = False) -> Generator[None]:
        """Holds the model's lock, in evaluation mode, without gradients unless wanted; restores settings afterwards.

        Without gradients, linear layers run as fast as this processor can, and in half precision the logits of the
        tokens that compete are not rounded to it (`noiser.model.products`). Compiled models run eagerly.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(model_lock(self.model))
            stack.enter_context(on_the_cpu())
            stack.enter_context(torch.inference_mode(False))  # a caller's would leave no way back for gradients
            stack.enter_context(evaluation_mode(self.model))
            stack.enter_context(torch.set_grad_enabled(gradients))
            if not gradients:
                stack.enter_context(fast_products(self.model))
                stack.enter_context(precise_logits(self.model.get_output_embeddings()))
            yield

    def embed(self, token_ids: Int[Tensor, "*batch length"]) -> Float[Tensor, "*batch length dim"]:
        """The embeddings that the model itself would feed its first layer, the embedding's factor included."""
        return self._embedding(token_ids.to(self.device))

    def context(self, token_ids: Sequence[int]) -> Context:
        """A clean sequence that has yet to run."""
        with self.running():
            return Context(self.embed(torch.tensor(token_ids)).detach(), self.embedding_scale)

    def run(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """Logits of every branch; out of memory, nothing has changed.

        Packed, they come from one pass; of a model that cannot pack, from one pass for each length, and all branches
        must begin at 0.
        """
        with self.running():
            if self.packs:
                return packed_logits(self, branches)
            found: list[Any] = [None] * len(branches)
            by_length: dict[int, list[int]] = {}
            for i, branch in enumerate(branches):
                by_length.setdefault(branch.stop, []).append(i)
            for same in by_length.values():
                rows = sorted({row for i in same for row in branches[i].wanted})
                inputs = torch.cat([branches[i].inputs for i in same])
                logits = self.output(inputs, positions=rows).logits.split([len(branches[i].inputs) for i in same])
                for i, part in zip(same, logits, strict=True):
                    found[i] = part[:, [rows.index(row) for row in branches[i].wanted]]
            return found

    def logits(
        self, embeddings: Float[Tensor, "batch length dim"], *, positions: Sequence[int]
    ) -> Float[Tensor, "batch positions vocab"]:
        """Float32 logits at some positions of whole sequences.

        Args:
            embeddings: [batch, length, dim], in the space of `embed`, any float type.
            positions: indices into `length` whose logits are wanted; the head runs only there.
        """
        return self.output(embeddings, positions=positions).logits.float()

    def output(self, embeddings: Float[Tensor, "batch length dim"], *, positions: Sequence[int], **options: Any) -> Any:
        """The model's full output; its logits are those of `logits`, in the model's own precision."""
        rows = embeddings.to(self.dtype, copy=True)  # scaled in place by some models, such as CTRL
        arguments: dict[str, Any] = {"inputs_embeds": rows, "use_cache": False, **options}
        if self._keeps_rows:
            arguments["logits_to_keep"] = list(positions)  # numbers, on whatever device the last layer is
        out = self.model(**arguments)
        if torch.is_grad_enabled() and embeddings.requires_grad and not out.logits.requires_grad:
            raise UnsupportedModelError(
                f"No gradient passes through this {type(self.model).__name__} ({self.identity.dtype}): a layer cuts it "
                "off, as those of some quantisation schemes do. Take a method without gradients, such as 'noiser' or "
                "'occlusion', or load the model unquantised."
            )
        if not self._keeps_rows:
            own = out.logits.shape[1] - embeddings.shape[1]  # rows of what it puts in front: learned prompts
            if own < 0:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} returns logits at {out.logits.shape[1]} of {embeddings.shape[1]} "
                    "positions; expected all of them, or a model that takes `logits_to_keep`. Take another model."
                )
            out.logits = out.logits[:, [row + own for row in positions]]
        return out


def check_model(lm: object) -> None:
    """Raises ParameterError for anything but a `LanguageModel`, such as a model that was not wrapped."""
    if not isinstance(lm, LanguageModel):
        raise ParameterError(
            f"The model is a {type(lm).__name__}; expected what noiser.load_model(name) or "
            "noiser.wrap(model, tokenizer) returns."
        )


def check_finite(probabilities: Float[Tensor, "*rows vocab"], dtype: torch.dtype) -> None:
    """Raises NumericalError when a softmax is NaN; a single bad logit makes its whole row so."""
    if not torch.isfinite(probabilities[..., 0]).all():
        remedy = "Load the model with dtype='float32' or dtype='bfloat16'." if dtype is torch.float16 else ""
        raise NumericalError(
            f"The model returned logits that are NaN or infinite (dtype {str(dtype).removeprefix('torch.')}); "
            f"expected finite numbers. Its weights may be damaged or its precision too low. {remedy}".rstrip()
        )


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    batch_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> LanguageModel:
    """A language model of a model and a tokenizer that the caller already has; they are left exactly as they were.

    Args and errors are those of `LanguageModel`; the model may be on any device, in any precision, and have a
    `device_map`.
    """
    return LanguageModel(model, tokenizer, batch_tokens=batch_tokens, chat_template_kwargs=chat_template_kwargs)


def _check_is_causal(model: Any) -> None:
    kind = type(model).__name__
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{kind} is an encoder-decoder model. Take a decoder-only (causal) language model.")
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{kind} has no language-modelling head. Load it with transformers.AutoModelForCausalLM."
        )


def dtype_name(model: PreTrainedModel) -> str:
    """The type of a model's embeddings, such as "float32"; and how it is quantised, such as "float32, torchao".

    The scheme is the one in the model's configuration; where a library has quantised the model without
    it, the classes of its weights.
    """
    settings: Any = getattr(model.config, "quantization_config", None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    kinds = {type(p).__name__ for p in model.parameters() if not is_plain(p)} - {"DTensor"}
    names = [str(getattr(method, "value", method))] if method else sorted(kinds)
    return ", ".join([str(model.dtype).removeprefix("torch."), *names])
