"""A language model whose forward passes run elsewhere: in vLLM, or behind a server."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from noiser.model.abilities import Abilities
from noiser.model.language_model import LanguageModel
from noiser.model.packing import Branch
from noiser.types import ModelIdentity

BATCH_TOKENS = 2**15
"""The most tokens of one call of a backend, which makes batches of its own: enough to keep eight cards at work."""


class Sequenced(NamedTuple):
    """A sequence, and the positions at which the next token is predicted.

    Attributes:
        inputs: embeddings, or token ids.
        rows: ascending positions.
        tokens: for each row, token ids whose log-probabilities must be exact; none for all.
    """

    inputs: Float[Tensor, "length dim"] | Int[Tensor, " length"]
    rows: Sequence[int]
    tokens: Sequence[tuple[int, ...]] = ()


@runtime_checkable
class Backend(Protocol):
    """What runs a model elsewhere."""

    def predict(self, sequences: Sequence[Sequenced]) -> list[Float[Tensor, "rows vocab"]]:
        """Logits, or log-probabilities, at the rows of each sequence."""
        ...


class _Embedding(nn.Embedding):
    """Rows of a table, multiplied by a constant, as Gemma's are by sqrt(d)."""

    def __init__(self, table: Float[Tensor, "vocab dim"], scale: float) -> None:
        super().__init__(table.shape[0], table.shape[1], _weight=table, _freeze=True)
        self.scale = scale

    def forward(self, input: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch dim"]:  # noqa: A002 - torch's name
        rows = super().forward(input)
        return rows * torch.tensor(self.scale, dtype=rows.dtype)


class ServedNetwork(nn.Module):
    """A stand-in for the layers that are elsewhere; hooks on it see every call of the backend."""

    def __init__(
        self, backend: Backend, table: Float[Tensor, "vocab dim"], scale: float, config: Any, generation_config: Any
    ) -> None:
        super().__init__()
        self.backend, self.config, self.generation_config = backend, config, generation_config
        self.embedding = _Embedding(table, scale)
        self.dtype = table.dtype

    def get_input_embeddings(self) -> nn.Module:
        """The table."""
        return self.embedding

    get_output_embeddings = get_input_embeddings  # the head is elsewhere, and a model without one is refused

    def forward(self, sequences: Sequence[Sequenced]) -> list[Float[Tensor, "rows vocab"]]:
        """Float32 logits at the rows of each sequence; -inf for rows of the table that belong to no token."""
        size = self.embedding.num_embeddings
        found = [logits[:, :size].float() for logits in self.backend.predict(sequences)]
        return [nn.functional.pad(each, (0, size - each.shape[1]), value=-torch.inf) for each in found]


class ServedModel(LanguageModel):
    """A model that runs elsewhere, as `load_model` returns it: it predicts, and nothing else.

    Args:
        backend: runs it.
        tokenizer: its tokenizer.
        identity: how to load it again.
        table: its embedding table, in the type that it reads; None for a backend that takes token ids alone: then the
            row of a token is its number, and tokens can only be taken out.
        scale: the factor that the model puts on rows of the table.
        config, generation_config: of transformers, or None.
        context_length: the most tokens that it can read; None where that is not known.
    """

    looks_inside = False

    def __init__(
        self,
        backend: Backend,
        tokenizer: Any,
        identity: ModelIdentity,
        *,
        table: Float[Tensor, "vocab dim"] | None = None,
        scale: float = 1.0,
        config: Any = None,
        generation_config: Any = None,
        context_length: int | None,
    ) -> None:
        self.takes_embeddings = table is not None
        self._context_length = context_length
        if table is None:
            table = torch.arange(len(tokenizer), dtype=torch.float32)[:, None]
        network: Any = ServedNetwork(backend, table, scale, config, generation_config)
        super().__init__(network, tokenizer, identity=identity, batch_tokens=BATCH_TOKENS)
        self._abilities = Abilities(reads_embeddings=True, embedding_scale=scale, packs=False)

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can read, or None where it has no limit."""
        return self._context_length

    def run(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """Logits of all branches, from one call of the backend."""
        with self.running():
            logits = iter(self.model([Sequenced(x, b.wanted, b.tokens) for b in branches for x in b.inputs]))
        return [torch.stack([next(logits) for _ in branch.inputs]) for branch in branches]


def generation_config(source: str, revision: str | None) -> Any:
    """A checkpoint's settings for generating, of transformers; None without any."""
    from transformers import GenerationConfig

    with suppress(OSError):
        return GenerationConfig.from_pretrained(source, revision=revision or "main")
    return None
