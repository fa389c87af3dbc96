"""Language models whose forward passes run elsewhere: in vLLM, or behind a server (`http.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from noiser.errors import ModelError, TargetError
from noiser.model.abilities import Abilities
from noiser.model.checkpoints import CheckpointPlace, explain_errors
from noiser.model.language_model import LanguageModel
from noiser.model.packing import Branch
from noiser.model.runtime import running
from noiser.text import Encoding, encode_target
from noiser.types import ModelIdentity

ROW = "noiser_row"  # in a vLLM request's `extra_args`: the number of the row that its logits become
# No number is used twice: what an interrupted call has left may run beside the next call.
_numbers = itertools.count()
_ROWS_AT_ONCE = 256
"""Rows of logits that the workers keep: with 128,000 tokens 131 MB of a card's memory."""

PredictBranches = Callable[[Sequence[Branch]], list[Tensor]]
"""From branches to the logits of each, [copies, wanted, vocab]."""

Write = Callable[[Sequence[int], int], str | Sequence[int]]
"""From a prompt's tokens to what is written next, as text or tokens, up to so many tokens; empty
where that failed."""


class ServedNetwork(nn.Module):
    """A stand-in for the layers that are elsewhere; hooks on it see every call."""

    def __init__(
        self, predict: PredictBranches, table: Float[Tensor, "vocab dim"], generation_config: Any
    ) -> None:
        super().__init__()
        self.predict = predict
        self.dtype = table.dtype
        self.generation_config = generation_config
        self.embedding = nn.Embedding.from_pretrained(table)  # pyright: ignore[reportUnknownMemberType]

    def get_input_embeddings(self) -> nn.Module:
        """The table; the head is elsewhere, but a model without one is refused."""
        return self.embedding

    get_output_embeddings = get_input_embeddings

    def forward(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """Float32 logits of each branch; -inf for rows of the table that belong to no token."""
        size = self.embedding.num_embeddings
        padded: list[Tensor] = []
        for logits in self.predict(branches):
            of_tokens = logits[..., :size].float()
            missing = size - of_tokens.shape[-1]
            padded.append(nn.functional.pad(of_tokens, (0, missing), value=-torch.inf))
        return padded


class ServedModel(LanguageModel):
    """A model that runs elsewhere: it predicts, and nothing else.

    `table` is its embedding table times `scale`, in the type that it reads. None: it takes token
    ids alone, the row of a token is its number, and tokens can only be taken out.
    """

    needs_internals = False

    def __init__(
        self,
        predict: PredictBranches,
        tokenizer: Any,
        generation_config: Any,
        identity: ModelIdentity,
        context_length: int | None,
        table: Float[Tensor, "vocab dim"] | None = None,
        scale: float = 1.0,
        close: Callable[[], object] | None = None,
        write: Write | None = None,
    ) -> None:
        ids = torch.arange(len(tokenizer), dtype=torch.float32)[:, None]
        network: Any = ServedNetwork(predict, ids if table is None else table, generation_config)
        # The tokens of one call: enough to keep eight cards busy.
        super().__init__(network, tokenizer, batch_tokens=2**15)
        self.accepts_embeddings = table is not None
        self.identity = identity
        self.context_length = context_length
        self.abilities = Abilities(embedding_scale=scale, supports_packing=False)
        self._close = close
        self._write = write

    def close(self) -> None:
        """Closes the connections to a server."""
        if self._close is not None:
            self._close()

    def draft(self, encoding: Encoding, count: int) -> Sequence[int]:
        """What is probably written next, from one call in place of one for each token."""
        if self._write is None:
            return ()
        with running(self.model):
            written = self._write(encoding.token_ids, count)
        if not isinstance(written, str):
            return written
        try:
            return encode_target(self.tokenizer, encoding, written)
        except TargetError:  # its tokens are not known
            return ()

    def run(
        self, branches: Sequence[Branch], **_: Any
    ) -> list[Float[Tensor, "copies wanted vocab"]]:
        """Logits of all branches, from one call."""
        with running(self.model):
            return self.model(branches)


def read_settings(place: CheckpointPlace, origin: dict[str, Any]) -> tuple[Any, Any]:
    """A checkpoint's tokenizer, and its settings for generating or None without any."""
    from transformers import AutoTokenizer, GenerationConfig

    with explain_errors(place.name):
        tokenizer: Any = AutoTokenizer.from_pretrained(place.source, **origin)
    with suppress(OSError):
        return tokenizer, GenerationConfig.from_pretrained(
            place.source, revision=origin["revision"]
        )
    return tokenizer, None


def predict(llm: Any, branches: Sequence[Branch]) -> list[Tensor]:
    """The logits of branches, each row from a sequence that ends there.

    Shorter sequences come first, so that a prefix cache finds them.
    """
    sequences: list[Tensor] = []
    for branch in branches:
        for inputs in branch.inputs:
            sequences += [inputs[: row + 1] for row in branch.wanted]
    batches: list[Tensor] = []
    for first in range(0, len(sequences), _ROWS_AT_ONCE):
        batches.append(logits_of(llm, sequences[first : first + _ROWS_AT_ONCE]))
    sizes = [len(branch.inputs) * len(branch.wanted) for branch in branches]
    parts = torch.cat(batches).split(sizes)
    return [
        part.unflatten(0, (len(branch.inputs), -1))
        for part, branch in zip(parts, branches, strict=True)
    ]


def written_by(llm: Any, token_ids: Sequence[int], count: int) -> Sequence[int]:
    """The tokens that vLLM writes next without sampling; none where it fails, as at its limit."""
    from vllm import SamplingParams  # pyright: ignore

    settings = SamplingParams(max_tokens=count, temperature=0.0, detokenize=False)
    prompt = {"prompt_token_ids": [*token_ids]}
    try:
        (answer,) = llm.generate([prompt], [settings], use_tqdm=False)
        return [*answer.outputs[0].token_ids]
    except Exception:  # of vLLM's many kinds: token by token it says what it lacks
        return ()


def logits_of(llm: Any, inputs: Sequence[Tensor]) -> Float[Tensor, "inputs vocab"]:
    """Exact logits after sequences of embeddings [length, dim] or token ids [length].

    The workers keep them, and send them when all have run.
    """
    from vllm import SamplingParams  # pyright: ignore

    settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
    prompts: list[dict[str, Any]] = []
    for sequence in inputs:
        if sequence.is_floating_point():
            prompts.append({"prompt_embeds": sequence})
        else:
            prompts.append({"prompt_token_ids": sequence.tolist()})
    numbers = [next(_numbers) for _ in inputs]
    try:
        parameters = [SamplingParams(**settings, extra_args={ROW: number}) for number in numbers]
        llm.generate(prompts, parameters, use_tqdm=False)
        answers: list[tuple[list[int], bytes]] = llm.collective_rpc("take_logits")
        kept, sent = next(answer for answer in answers if answer[0])
        rows = torch.frombuffer(bytearray(sent), dtype=torch.float32).view(len(kept), -1)
        return rows[[kept.index(number) for number in numbers]]
    except Exception as error:  # of vLLM's many kinds, or where logits are missing
        raise ModelError(
            f"vLLM failed: {type(error).__name__}: {error}. Load the model again."
        ) from error
