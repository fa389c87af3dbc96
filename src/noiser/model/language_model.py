"""A causal language model, reduced to the few operations that attribution needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.checks import check_choice, check_count
from noiser.errors import (
    ModelError,
    NumericalError,
    ParameterError,
    PromptError,
    UnsupportedModelError,
)
from noiser.model.abilities import (
    Abilities,
    Packing,
    attention_is_known,
    find_abilities,
    raise_failure,
    setting,
    try_length,
)
from noiser.model.attention import callers_attention, set_attention
from noiser.model.classes import refuse_other_kinds
from noiser.model.generation import describe_settings, greedy_text, text_settings
from noiser.model.memory import send
from noiser.model.packing import BLOCK, Branch, Context, KeysValues, Pass, whole_logits
from noiser.model.products import PLAIN
from noiser.model.runtime import add_hook, exactly, running
from noiser.model.scene import Scene, check_packed, find_door
from noiser.notices import warn
from noiser.text import Encoding, encode, encode_pictures, reads_tools
from noiser.text.pictures import has_pictures, refuse_picture
from noiser.types import Baseline, ModelIdentity, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


AttentionOf = Callable[[Pass], Callable[..., Any]]
"""From a pass to its attention: a function (own, module, queries, keys, values, mask, **options),
as of `set_attention`.
"""


def attention_of_pass(packed: Pass) -> Callable[..., Any]:
    """The model's own attention, of packed sequences."""
    return packed.attend


class LanguageModel:
    """A model and its tokenizer, as `load_model` and `wrap` return them.

    Both objects are left exactly as they were: nothing is changed for longer than a pass. Threads
    may share a model: a lock keeps their passes apart. Do not run the model itself meanwhile.

    Args:
        model: a decoder-only Hugging Face model with a language-modelling head, on any device, in
            any precision.
        tokenizer: its tokenizer; or the processor of a model that reads pictures, which has one.
        batch_tokens: the most tokens of one forward pass; None for 1,024 on a CPU, which keeps
            activations in its caches, and 8,192 elsewhere. Lower it when memory is short; results
            do not depend on it.
        chat_template_kwargs: further arguments of the tokenizer's chat template, such as
            `{"enable_thinking": False}`.

    Attributes:
        identity: how to load the same model again.
        embedding_dim: the length of one row of the embedding table, d.
        vocabulary_size: the number of tokens that the model can read and, padded rows included,
            predict.
        context_length: the most tokens that the model can read, or None where its configuration
            sets no limit.
        needs_internals: whether the layers are in this process, for gradients, attention and
            relevance.
        accepts_embeddings: whether tokens can be changed, and not only taken out.
        is_text_only: whether nothing but the text of its answers is known.
    """

    needs_internals: bool = True
    accepts_embeddings: bool = True
    is_text_only: bool = False
    _processor: Any = None
    _find_processor: Callable[[], Any] | None = None  # of a checkpoint that may have one

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        kind = type(model).__name__
        if isinstance(model, str):
            raise ParameterError(
                f"model is the text {model!r:.60}; expected a model object. "
                f"noiser.load_model({model!r:.60}) loads by name."
            )
        config = getattr(model, "config", None)
        refuse_other_kinds(kind, config, subject=kind)
        if getattr(model, "get_output_embeddings", lambda: None)() is None:
            raise UnsupportedModelError(
                f"{kind} has no language-modelling head. Load it with AutoModelForCausalLM."
            )
        if hasattr(tokenizer, "image_processor") and hasattr(tokenizer, "tokenizer"):
            self._processor = tokenizer
            tokenizer = self._processor.tokenizer
        if not hasattr(tokenizer, "convert_ids_to_tokens"):
            raise ParameterError(
                f"tokenizer is {tokenizer!r:.200}; expected a tokenizer of transformers."
            )
        table = getattr(model.get_input_embeddings(), "weight", None)
        if not isinstance(table, Tensor):
            raise UnsupportedModelError(
                f"{kind} has no table of input embeddings. Take a model with an nn.Embedding."
            )
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.vocabulary_size, self.embedding_dim = table.shape
        self.context_length: int | None = setting(config, "max_position_embeddings")
        name = getattr(config, "_name_or_path", "") or kind
        commit = getattr(config, "_commit_hash", None)
        self.identity = ModelIdentity(name, commit, dtype=_dtype_name(model), architecture=kind)
        on_cpu = self.device.type == "cpu"
        if batch_tokens is None:
            batch_tokens = 1024 if on_cpu else 8192
        self.batch_tokens = check_count("batch_tokens", batch_tokens)
        # Rows of logits in one pass: float32, of a memory that does not grow with the vocabulary.
        logit_numbers = (192 if on_cpu else 1024) * 2**18
        self.logit_rows = max(1, logit_numbers // self.vocabulary_size)
        self.chat_template_kwargs: Mapping[str, Any] = dict(chat_template_kwargs or {})
        # The cache of sequences that have run, for those that begin with them.
        self.known: dict[tuple[int, ...], KeysValues] = {}
        # Numbers of pictures with which packed passes have been compared with the model's own.
        self._checked_pictures: set[int] = set()

    def __repr__(self) -> str:
        return f"LanguageModel({self.identity.name!r}, {self.identity.dtype}, {self.device})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections of a model behind a server; a model in this process has none."""

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings, to which token ids and embeddings must be sent."""
        embedding = self.model.get_input_embeddings()
        is_offloaded = embedding.weight.is_meta
        if is_offloaded:  # by accelerate, whose hook knows where the module runs
            return torch.device(embedding._hf_hook.execution_device)
        return embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the embeddings that the model reads."""
        return self.model.dtype

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def reads_tools(self) -> bool:
        """Whether its chat template writes tools or their calls."""
        return reads_tools(self.tokenizer, self.chat_template_kwargs)

    @property
    def processor(self) -> Any:
        """The processor of pictures; a checkpoint's is loaded when it is first asked for.

        Raises:
            PromptError: the model has none.
            DependencyError: it needs a package that is not installed.
        """
        if self._processor is None and self._find_processor is not None:
            self._processor = self._find_processor()
        if self._processor is None:
            raise PromptError(
                f"The prompt has a picture, and {self.identity.name} was loaded with a tokenizer "
                "alone, for text. Take a model that reads pictures, or wrap it with its processor: "
                "noiser.wrap(model, processor)."
            )
        return self._processor

    @property
    def reads_pictures(self) -> bool:
        """Whether the model may have a processor of pictures."""
        return self._processor is not None or self._find_processor is not None

    def encode(
        self,
        prompt: Prompt | object,
        *,
        rendered: str | None = None,
        documents: bool = False,
        pictures: bool = False,
    ) -> Encoding:
        """A text or chat messages in tokens; see `noiser.text.encode`.

        `pictures` says that the caller knows what to do with those of a chat.
        """
        if has_pictures(prompt):
            if not pictures:
                raise refuse_picture("The prompt")
            messages: Any = prompt
            return encode_pictures(
                self.processor,
                self.tokenizer,
                messages["messages"] if isinstance(messages, Mapping) else messages,
                context_length=self.context_length,
                chat_template_kwargs=self.chat_template_kwargs,
            )
        return encode(
            self.tokenizer,
            prompt,
            context_length=self.context_length,
            rendered=rendered,
            chat_template_kwargs=self.chat_template_kwargs,
            documents=documents,
        )

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens with which the model ends a text or its turn."""
        generation_config = getattr(self.model, "generation_config", None)
        declared: Any = getattr(generation_config, "eos_token_id", None)
        ids = [*declared] if isinstance(declared, list) else [declared]
        ids.append(self.tokenizer.eos_token_id)
        return frozenset(i for i in ids if isinstance(i, int) and i < self.vocabulary_size)

    def generated(
        self, token_ids: Sequence[int], count: int, pictures: bool = False
    ) -> list[int] | None:
        """The continuation by the model's own greedy `generate()`.

        None where no setting makes it other than the most probable tokens, and after `pictures`.
        """
        settings = text_settings(getattr(self.model, "generation_config", None))
        if not settings:
            return None
        if not self.needs_internals or pictures:
            where = "after pictures" if pictures else "elsewhere"
            warn(
                f"{self.identity.name}: settings of its generation_config are not applied "
                f"{where}, {describe_settings(settings)}. The most probable tokens are "
                "explained.",
            )
            return None
        with self.alone():
            return greedy_text(self, token_ids, count, settings)

    @cached_property
    def abilities(self) -> Abilities:
        """How the model can be run, found out at first use. `supports_packing` may be set to
        False.
        """
        with running(self.model):
            if not torch.is_autocast_enabled(self.device.type):
                return find_abilities(self)
            try:
                with exactly(self.device):
                    return find_abilities(self)
            except ModelError:  # its layers are of types that only meet under autocast
                return find_abilities(self)

    @cached_property
    def _keeps_rows(self) -> bool:
        """Whether the head can run at some positions alone.

        PEFT passes the positions on, but not past its learned prompts.
        """
        models = [self.model]
        adapter = getattr(self.model, "active_peft_config", None)
        if adapter and not adapter.is_prompt_learning:
            models.append(self.model.get_base_model())
        return any(
            "logits_to_keep" in inspect.signature(model.forward).parameters for model in models
        )

    def _kept_rows(self, positions: Sequence[int]) -> Tensor | list[int]:
        """Positions at which the head runs: numbers, since the last layer may be on any device.

        Where there is one accelerator they are sent, so that it is not waited for.
        """
        devices = set(getattr(self.model, "hf_device_map", {}).values())
        if self.device.type == "cpu" or len(devices) > 1:
            return list(positions)
        return send(torch.tensor(positions, dtype=torch.long), self.device)

    def running(self, *, gradients: bool = False) -> AbstractContextManager[None]:
        """`runtime.running` of the model."""
        return running(self.model, gradients=gradients)

    def draft(self, encoding: Encoding, count: int) -> Sequence[int]:  # noqa: ARG002 - of subclasses
        """What the model probably writes next, up to `count` tokens, where one call says that.

        Nothing in this process, where each token is a pass anyway. Whoever uses it checks it.
        """
        return ()

    def alone(self) -> AbstractContextManager[Callable[[], None]]:
        """A context in which nobody else's question runs the model, for work that shares no passes.

        Yields a function that lets others go first, for long work to call now and then. A server
        that shares a model among its visitors overrides it; elsewhere nobody waits.
        """
        return nullcontext(_go_on)

    def embed(self, token_ids: Int[Tensor, "*batch length"]) -> Float[Tensor, "*batch length dim"]:
        """The embeddings that the model feeds its first layer, the embedding's factor included.

        Raises ModelError for a token that the model predicts, and has no row for.
        """
        largest = 0
        if token_ids.numel() and token_ids.is_cpu:  # elsewhere, looking would wait for the device
            largest = int(token_ids.max())
        if largest >= self.vocabulary_size:
            raise ModelError(
                f"{type(self.model).__name__} predicts token id {largest}, which it cannot read: "
                f"its table has {self.vocabulary_size} rows. Name a target, or give the table a "
                "row for each token."
            )
        return self.model.get_input_embeddings()(token_ids.to(self.device))

    def packing(self, length: int) -> Packing:
        """How sequences of up to that many tokens run, found out at first use of such a length.

        Lengths are tried anew after a caller has set another attention function.
        """
        abilities = self.abilities
        if abilities.supports_packing:
            attention = callers_attention(self.model)
            if attention != abilities.found_with:
                abilities.found_with = attention
                abilities.is_known = attention_is_known(self.model)
                abilities.tried.clear()
        if abilities.is_known or not abilities.supports_packing:
            return Packing(abilities.supports_packing, abilities.supports_cached_prefix)
        size = max(64, 1 << (length - 1).bit_length())  # the next power of two
        size = max(length, min(size, self.context_length or size))
        if size not in abilities.tried:
            with running(self.model), exactly(self.device):
                abilities.tried[size] = try_length(self, size)
        tried = abilities.tried[size]
        return Packing(
            tried.supports_packing,
            tried.supports_cached_prefix and abilities.supports_cached_prefix,
        )

    def scene(self, encoding: Encoding) -> Scene | None:
        """The pictures of a prompt, as the model reads them; None without pictures.

        Raises UnsupportedModelError where passes that share a prompt's beginning would not give
        what the model itself predicts.
        """
        pictures = encoding.pictures
        if pictures is None:
            return None
        scene = Scene(self, pictures, encoding.token_ids)
        if not self.packing(len(encoding.token_ids)).supports_packing:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} cannot run sequences of different lengths end to "
                "end, which pictures need. Take another model."
            )
        count = len(pictures.images)
        if count not in self._checked_pictures:
            check_packed(self, scene)
            self._checked_pictures.add(count)
        return scene

    def context(
        self, token_ids: Sequence[int], longest: int = 0, scene: Scene | None = None
    ) -> Context:
        """A clean sequence that has yet to run, except for a beginning that is `known`.

        `longest` is its length after all tokens that will be appended. With a scene the sequence
        begins with its prompt.
        """
        with running(self.model):
            if scene is None:
                inputs = self.embed(torch.tensor(token_ids, dtype=torch.long))
            else:
                rest = torch.tensor(token_ids[len(scene.clean.inputs) :], dtype=torch.long)
                inputs = torch.cat([scene.clean.inputs, self.embed(rest).to(scene.clean.inputs)])
            packing = self.packing(max(longest, len(token_ids)))
            scale = self.abilities.embedding_scale
            context = Context(inputs.detach(), scale, **packing._asdict())
        if scene is not None:
            context.layout = scene.clean.layout
            context.supports_cached_prefix = False
            return context
        for ids, cache in [*self.known.items()]:
            if ids == tuple(token_ids[: len(ids)]):
                context.cache = dict(cache)
                context.done = len(ids) - 1  # the last token runs again: its logits may be wanted
        return context

    def baseline_row(self, name: Baseline) -> Float[Tensor, " dim"]:
        """The row of the embedding table that replaces a removed unit's rows, float32."""
        check_choice("baseline", name, get_args(Baseline))
        if name == "zero":
            return torch.zeros(self.embedding_dim, device=self.device, dtype=torch.float32)
        if name == "mean":
            # A table is often padded to a round number of rows; those belong to no token.
            count = min(len(self.tokenizer), self.vocabulary_size)
            parts = torch.arange(count).split(8192)
            sums = [self.context(part.tolist()).rows.sum(0) for part in parts]
            return torch.stack(sums).sum(0) / count
        token = getattr(self.tokenizer, f"{name}_token_id")
        if token is None or not 0 <= token < self.vocabulary_size:
            lacks = "which it does not have"
            if token is not None:
                lacks = f"whose id {token} the embedding table does not have"
            raise ParameterError(
                f"baseline={name!r} asks for the tokenizer's {name}_token, {lacks}. "
                "Use baseline='zero' or 'mean'."
            )
        return self.context([token]).rows[0]

    def run(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """The logits of every branch. Where a context does not pack, branches begin at position 0.

        When memory runs out, nothing has changed.
        """
        packed = [branch for branch in branches if branch.context.supports_packing]
        if len(packed) == len(branches):
            return self._run_packed(branches)
        if not packed:
            return whole_logits(self, branches)
        unpacked = [branch for branch in branches if not branch.context.supports_packing]
        logits_of_unpacked = iter(whole_logits(self, unpacked))
        logits_of_packed = iter(self._run_packed(packed))
        logits: list[Tensor] = []
        for branch in branches:
            logits.append(
                next(logits_of_packed if branch.context.supports_packing else logits_of_unpacked)
            )
        return logits

    def _run_packed(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """The logits of branches that run end to end in one pass.

        The beginning of a clean sequence that is longer than a pass runs in passes of its own.
        """
        size = max(self.batch_tokens, BLOCK)
        heads: list[list[Tensor]] = []
        ends: list[Branch] = []
        try:
            for branch in branches:
                *pieces, end = branch.pieces(size) if branch.record else [branch]
                heads.append([self.run_packed([piece], gradients=False)[0] for piece in pieces])
                ends.append(end)
            logits = self.run_packed(ends, gradients=False)
        except BaseException:
            for branch in branches:
                if branch.record:  # what has run of it runs again
                    branch.context.done = branch.start
            raise
        whole: list[Tensor] = []
        for head, own in zip(heads, logits, strict=True):
            whole.append(torch.cat([*head, own], 1) if head else own)
        return whole

    def run_packed(
        self,
        branches: Sequence[Branch],
        attention: AttentionOf = attention_of_pass,
        *,
        gradients: bool,
    ) -> list[Float[Tensor, "copies wanted vocab"]]:
        """The logits of branches that run end to end in one forward pass.

        With `gradients` they go back through it.
        """
        inputs = torch.cat([branch.inputs.flatten(0, 1) for branch in branches])[None]
        packed = Pass(branches)
        with running(self.model, gradients=gradients):
            set_attention(self.model, attention(packed), masked=False)
            places = packed.tokens.position[None]
            handed = packed.handed(inputs.device)
            if handed:

                def hand(_module: Any, args: Any, kwargs: Any) -> Any:
                    return args, {**kwargs, **handed}

                door = find_door(self.model)
                add_hook(self.model, door, hand, before=True, with_kwargs=True)
            logits = self.output(inputs, positions=packed.rows, position_ids=places).logits[0]
            for branch in branches:
                if branch.record:
                    branch.context.done = branch.start + branch.inputs.shape[1]
        parts = logits.split([len(branch.inputs) * len(branch.wanted) for branch in branches])
        return [
            part.unflatten(0, (len(branch.inputs), -1))
            for part, branch in zip(parts, branches, strict=True)
        ]

    def output(
        self,
        embeddings: Float[Tensor, "batch length dim"],
        *,
        positions: Sequence[int],
        **options: Any,
    ) -> Any:
        """The model's output for embeddings in the space of `embed`, with logits at `positions`.

        To be called while the model runs.
        """
        # A copy: some models, such as CTRL, scale it in place.
        rows = embeddings.to(self.model.dtype, copy=True)
        if self._keeps_rows:
            options["logits_to_keep"] = self._kept_rows(positions)
        try:
            out = self.model(**{"inputs_embeds": rows, "use_cache": False, **options})
        except Exception as error:
            raise_failure(self.model, error)
        if not self._keeps_rows:
            returned = out.logits.shape[1]
            in_front = returned - embeddings.shape[1]  # rows of learned prompts
            if in_front < 0:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} returns logits at {returned} of "
                    f"{embeddings.shape[1]} positions; expected all. Take another model."
                )
            out.logits = out.logits[:, [in_front + position for position in positions]]
        return out


def check_model(lm: object) -> None:
    """Raises ParameterError unless it is a `LanguageModel`: a model may not have been wrapped."""
    if not isinstance(lm, LanguageModel):
        raise ParameterError(
            f"The model is a {type(lm).__name__}; expected what noiser.load_model or wrap returns."
        )


def _go_on() -> None:
    """Lets others go first where there are none."""


def check_probabilities(lm: LanguageModel, asked: str) -> None:
    """Raises UnsupportedModelError where a model gives text only; `asked` needs probabilities."""
    if lm.is_text_only:
        raise UnsupportedModelError(
            f"A chat endpoint gives text only, and {asked} needs probabilities: take a model in "
            "this process, or behind a server of completions."
        )


def check_finite(lm: LanguageModel, probabilities: Float[Tensor, "*rows vocab"]) -> None:
    """Raises NumericalError when a softmax is NaN; a single bad logit makes its whole row so."""
    if not torch.isfinite(probabilities[..., 0]).all():
        raise not_finite(lm)


def not_finite(lm: LanguageModel) -> NumericalError:
    """The error of a model whose logits are NaN or infinite."""
    return NumericalError(
        "The model returned logits that are NaN or infinite "
        f"(dtype {str(lm.dtype).removeprefix('torch.')}); expected finite numbers. "
        "Load it with dtype='float32' or dtype='bfloat16', or with sound weights."
    )


wrap = LanguageModel
"""Makes a language model of the caller's model and tokenizer, on any device, in any precision."""


def _dtype_name(model: PreTrainedModel) -> str:
    """The type of a model's embeddings, and how the model is quantised.

    The latter is named by its configuration, or else by its weights' classes.
    """
    settings: Any = getattr(getattr(model, "config", None), "quantization_config", None) or {}
    if not isinstance(settings, dict):
        settings = {"quant_method": getattr(settings, "quant_method", None)}
    method = settings.get("quant_method")
    if method:
        names = [str(getattr(method, "value", method))]
    else:
        kinds = {type(p).__name__ for p in model.parameters() if type(p) not in PLAIN}
        names = sorted(kinds - {"DTensor"})
    return ", ".join([str(model.dtype).removeprefix("torch."), *names])
