"""A language model whose forward passes run elsewhere: in vLLM, or behind a server.

Only the embedding table is here. To the rest of the package the model is a `torch.nn.Module` like any other, whose
`forward` asks a `Backend`: embeddings in, the logits of the next token out.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from noiser.errors import UnsupportedModelError
from noiser.model.capabilities import Capabilities
from noiser.model.language_model import LanguageModel
from noiser.model.packing import Branches, Packed
from noiser.types import ModelIdentity

if TYPE_CHECKING:
    from noiser.model.table import Checkpoint

BATCH_TOKENS = 2**15
"""The most tokens of one call of a backend, which makes batches of its own: enough to keep eight cards at work."""

PROBE = 0.05
"""The largest Hellinger distance between predictions from tokens and from their embeddings; a wrong scale gives 0.5."""


class Input(NamedTuple):
    """A sequence whose next token is predicted.

    Attributes:
        sequence: embeddings, or token ids.
        tokens: token ids whose log-probabilities must be exact, where a backend does not send all.
        clean: whether it is unperturbed, so that these tokens are targets that must be known at least here.
    """

    sequence: Float[Tensor, "length dim"] | Int[Tensor, " length"]
    tokens: tuple[int, ...] = ()
    clean: bool = False


class Prediction(NamedTuple):
    """What comes after sequences.

    Attributes:
        logits: [sequences, vocab], or log-probabilities. Probability that a backend does not send is spread evenly
            over the tokens that it did not send.
        left_out: the most probability that any of the distributions has on tokens that were not sent.
    """

    logits: Float[Tensor, "sequences vocab"]
    left_out: float = 0.0


@runtime_checkable
class Backend(Protocol):
    """What runs a model elsewhere."""

    def predict(self, inputs: Sequence[Input]) -> Prediction:
        """The distribution of the next token after each sequence."""
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
    """Stands for the layers that are elsewhere; hooks on it see every call of the backend.

    Args:
        backend: runs the model.
        config: of transformers, of the model.
        generation_config: of transformers, if there is one: it may name tokens that end a text.
        table: rows of the model's embedding table, in the type that it reads.
        scale: the factor that the model puts on them.
    """

    def __init__(
        self, backend: Backend, config: Any, generation_config: Any, table: Float[Tensor, "vocab dim"], scale: float
    ) -> None:
        super().__init__()
        self.backend, self.config, self.generation_config = backend, config, generation_config
        self.embedding = _Embedding(table, scale)

    @property
    def dtype(self) -> torch.dtype:
        """Of the embeddings that are sent."""
        return self.embedding.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        """The table."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """The head is elsewhere; this is not None, as that of a model without one is."""
        return self.embedding

    def forward(
        self,
        inputs: Sequence[Input] = (),
        *,
        inputs_embeds: Float[Tensor, "batch length dim"] | None = None,
        logits_to_keep: Sequence[int] | Int[Tensor, " positions"] = (),
        use_cache: bool = False,
    ) -> Any:
        """The prediction after some inputs; or, as models of transformers, `logits` at positions of embeddings."""
        assert not use_cache, "the cache is elsewhere"
        if inputs_embeds is None:
            prediction = self.backend.predict(inputs)
            size = self.embedding.num_embeddings
            logits = prediction.logits[:, :size].float()
            padding = logits.new_full((len(logits), size - logits.shape[1]), -torch.inf)  # rows that belong to no token
            return prediction._replace(logits=torch.cat([logits, padding], 1))
        positions = [int(position) for position in logits_to_keep]
        wanted = [Input(one[: position + 1]) for one in inputs_embeds for position in positions]
        return SimpleNamespace(logits=self(wanted).logits.unflatten(0, (len(inputs_embeds), -1)))


class ServedModel(LanguageModel):
    """A model that runs elsewhere, as `load_model` returns it: it predicts, and nothing else.

    A backend that reads token ids or text alone is given a table in which the row of a token is its number: taking out
    rows takes out tokens, and whatever else is done to them is refused.

    Args:
        backend: runs it.
        checkpoint: where its configuration comes from.
        tokenizer: its tokenizer.
        table: its embedding table, in the type that it reads; None for a backend that takes no embeddings.
        name: how to load it again.
        dtype: of its weights, for its identity.
        architecture: for its identity; None for that of the configuration.
        context_length: the most tokens that it can read.

    Raises:
        UnsupportedModelError: see `measure_embedding_scale`.
    """

    looks_inside = False

    def __init__(
        self,
        backend: Backend,
        checkpoint: Checkpoint,
        tokenizer: Any,
        table: Float[Tensor, "vocab dim"] | None,
        *,
        name: str,
        dtype: str,
        architecture: str | None = None,
        context_length: int | None,
    ) -> None:
        self.takes_embeddings = table is not None
        self._context_length = context_length
        config, scale = None, 1.0
        if table is None:
            table = torch.arange(len(tokenizer), dtype=torch.float32)[:, None]
        else:
            config = checkpoint.config()
            scale = measure_embedding_scale(backend, table, config)
            architecture = architecture or next(
                iter(getattr(config, "architectures", None) or []), type(config).__name__
            )
        super().__init__(
            ServedNetwork(backend, config, checkpoint.generation_config(), table, scale),  # pyright: ignore[reportArgumentType]
            tokenizer,
            identity=ModelIdentity(name, checkpoint.revision, dtype, architecture or ""),
            batch_tokens=BATCH_TOKENS,
        )
        self.capabilities = Capabilities(
            reads_embeddings=True,
            embedding_scale=scale,
            reuses_prefix=False,  # whoever runs it may
            packs=True,
            longest_pass=None,
        )

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can read, or None where it has no limit."""
        return self._context_length

    def run_packed(self, passes: Sequence[Branches]) -> list[Packed]:
        """All sequences of all passes in one call of the backend, each position that is read a sequence of its own.

        They are sent in the order of their length within a group, so that a prefix cache finds the shorter ones.
        """
        groups = [
            (group, branches.clean and not number)
            for branches in passes
            for number, group in enumerate(branches.groups)
        ]
        inputs = [
            Input(sequence[: row + 1], tokens, clean)
            for group, clean in groups
            for sequence in group.embeddings
            for row, tokens in zip(group.rows, group.tokens or [()] * len(group.rows), strict=True)
        ]
        with self.running():
            prediction: Prediction = self.model(inputs)
        counts = [len(group.embeddings) * len(group.rows) for group, _ in groups]
        parts = iter(prediction.logits.split(counts))
        return [
            Packed(
                [next(parts).unflatten(0, (-1, len(group.rows))) for group in branches.groups],
                branches.prefix,
                prediction.left_out,
            )
            for branches in passes
        ]


def measure_embedding_scale(backend: Backend, table: Float[Tensor, "vocab dim"], config: Any) -> float:
    """The factor between rows of the embedding table and what the model reads, measured by running it on eight tokens.

    Raises:
        UnsupportedModelError: with no known factor it predicts from embeddings what it predicts from their tokens.
    """
    ids = torch.linspace(1, len(table) - 1, 8, dtype=torch.float64).long()
    text = config.get_text_config()
    declared = [getattr(text, name, None) for name in ("embedding_multiplier", "scale_emb")]
    scales = [1.0, table.shape[1] ** 0.5, *(float(scale) for scale in declared if isinstance(scale, int | float))]
    rows = table[ids]
    inputs = [Input(ids), *(Input(rows * torch.tensor(scale, dtype=rows.dtype)) for scale in scales)]
    roots = backend.predict(inputs).logits.float().softmax(-1).sqrt()
    distances = ((roots[1:] - roots[0]).square().sum(-1) / 2).sqrt()
    best = int(distances.argmin())
    if not distances[best] <= PROBE:
        raise UnsupportedModelError(
            f"The model does not predict from embeddings what it predicts from their tokens: with rows of the table "
            f"multiplied by {', '.join(f'{scale:.4g}' for scale in scales)} the predictions are at Hellinger distances "
            f"of {', '.join(f'{distance:.2f}' for distance in distances.tolist())}; expected less than {PROBE}. The "
            "embedding table is another model's, or the model reads more of its tokens than their embeddings."
        )
    return scales[best]
