"""A language model whose forward passes run elsewhere: in vLLM, or behind a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from noiser.model.abilities import Abilities
from noiser.model.language_model import LanguageModel
from noiser.model.loading import Options, Place, explained
from noiser.model.packing import Branch
from noiser.model.runtime import running
from noiser.types import ModelIdentity

BATCH_TOKENS = 2**15
"""The most tokens of one call, which is cut into batches elsewhere: enough to keep eight cards at work."""

Predict = Callable[[Sequence[Branch]], list[Tensor]]
"""From branches to logits [copies, wanted, vocab] of each, computed elsewhere."""


class ServedNetwork(nn.Module):
    """A stand-in for the layers that are elsewhere; hooks on it see every call."""

    config = None

    def __init__(self, predict: Predict, table: Float[Tensor, "vocab dim"], generation_config: Any) -> None:
        super().__init__()
        self.predict, self.dtype, self.generation_config = predict, table.dtype, generation_config
        self.embedding = nn.Embedding.from_pretrained(table)  # pyright: ignore[reportUnknownMemberType]

    def get_input_embeddings(self) -> nn.Module:
        """The table; the head is elsewhere, but a model without one is refused."""
        return self.embedding

    get_output_embeddings = get_input_embeddings

    def forward(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """Float32 logits of each branch; -inf for rows of the table that belong to no token."""
        size = self.embedding.num_embeddings
        found = [logits[..., :size].float() for logits in self.predict(branches)]
        return [nn.functional.pad(each, (0, size - each.shape[-1]), value=-torch.inf) for each in found]


class ServedModel(LanguageModel):
    """A model that runs elsewhere, as `load_model` returns it: it predicts, and nothing else.

    Args:
        predict: runs it.
        tokenizer: its tokenizer.
        generation_config: its settings for generating, or None.
        identity: how to load it again.
        context_length: the most tokens that it can read; None where that is not known.
        table: its embedding table times `scale`, in the type that it reads; None where it takes token ids alone: then
            the row of a token is its number, and tokens can only be taken out.
        scale: the factor that the model puts on rows of the table.
    """

    looks_inside = False

    def __init__(
        self,
        predict: Predict,
        tokenizer: Any,
        generation_config: Any,
        *,
        identity: ModelIdentity,
        context_length: int | None,
        table: Float[Tensor, "vocab dim"] | None = None,
        scale: float = 1.0,
    ) -> None:
        ids = torch.arange(len(tokenizer), dtype=torch.float32)[:, None]
        network: Any = ServedNetwork(predict, ids if table is None else table, generation_config)
        super().__init__(network, tokenizer, batch_tokens=BATCH_TOKENS)
        self.takes_embeddings, self.identity, self.context_length = table is not None, identity, context_length
        self.abilities = Abilities(embedding_scale=scale, packs=False)

    def run(self, branches: Sequence[Branch]) -> list[Float[Tensor, "copies wanted vocab"]]:
        """Logits of all branches, from one call."""
        with running(self.model):
            return self.model(branches)


def read_settings(place: Place, options: Options) -> tuple[Any, Any]:
    """A checkpoint's tokenizer, and its settings for generating or None without any."""
    from transformers import AutoTokenizer, GenerationConfig

    with explained(place.name):
        tokenizer: Any = AutoTokenizer.from_pretrained(place.source, **options.source)
    with suppress(OSError):
        return tokenizer, GenerationConfig.from_pretrained(place.source, revision=options.source["revision"])
    return tokenizer, None
