"""Inseq's methods as methods of Noiser: `method="inseq:saliency"`.

Inseq gets a twin of the model, which shares its weights and nothing else, and the very tokens of the query: nothing
is decoded and encoded again. The scores are Inseq's, with its own baselines and defaults.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Call, Query, Steps
from noiser.errors import ParameterError
from noiser.integrations.common import LibraryMethod, check_keywords, imported, names_of, seeded
from noiser.methods.protocol import Scores, sum_over_units
from noiser.model.attention import set_attention
from noiser.model.language_model import LanguageModel
from noiser.model.runtime import twin
from noiser.registry import version_of

__all__ = ["InseqMethod", "factory"]

Reduction = Literal["l2", "sum", "mean"]

_OURS = (
    *("attribution_model", "hook_to_model", "inputs", "baselines", "target", "additional_forward_args"),
    "show_progress",
)
"""Arguments of Inseq's classes and attribution steps that Inseq or the adapter gives."""


@dataclass(frozen=True)
class InseqMethod(LibraryMethod):
    """A method of Inseq, run by Inseq.

    Special tokens and template text are part of Inseq's input: it perturbs them, and moves them to its baseline (the
    embedding of the unknown, else the padding or end token), as in the paper's runs. They get no score of their own
    unless `attribute` is told `special_tokens="perturbed"`. A unit's score is the sum over its tokens.

    Args:
        name: Inseq's name of the method, such as "saliency"; `InseqMethod.names()` lists them.
        attributed_fn: Inseq's name of the explained step function. With a foil it must be "probability".
        reduce: from the further dimensions of Inseq's scores (embedding, layers, heads) to one number per token: "l2",
            "sum" or "mean"; None for Inseq's own aggregation, without its normalisation.
        settings: of Inseq's class and attribution step, such as `{"n_steps": 50}`.
    """

    library = "Inseq"
    looks_inside: ClassVar[bool] = True
    target_unit: ClassVar[str] = "token"

    attributed_fn: str = field(default="probability", kw_only=True)
    reduce: Reduction | None = field(default=None, kw_only=True)

    @classmethod
    def _classes(cls) -> dict[str, Any]:
        known: dict[str, Any] = imported("inseq.attr.feat", "inseq").FeatureAttribution.available_classes()
        return {name: one for name, one in known.items() if one.__module__.startswith("inseq.") and name != "dummy"}

    def __post_init__(self) -> None:
        self.class_of(self.name)
        check_choice("attributed_fn", self.attributed_fn, imported("inseq", "inseq").list_step_functions())
        if self.reduce is not None:
            check_choice("reduce", self.reduce, get_args(Reduction))

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores of every unit for every target; see `Method`."""
        spans = query.target_unit == "all" or len(query.targets) < len(query.target_ids)
        if spans or query.of is not None or any(target.before for target in query.targets[1:]):
            raise ParameterError(
                f"Inseq explains token by token; expected target_unit='token' and no of=, got {query.target_unit!r}."
            )
        tokens = yield Call(query, partial(self._run, rng=rng))
        info = {"inseq": version_of("inseq"), "frozen_tokens": "perturbed"}
        return Scores(scores=sum_over_units(query, tokens[:, : len(query.token_ids)]), info=info)

    def _run(self, lm: LanguageModel, query: Query, rng: torch.Generator) -> Float[Tensor, "targets tokens"]:
        """Inseq's scores of a query; counts its forward passes, as its backward passes are not seen."""
        set_attention(model := twin(lm.model), "eager")  # for good: it is our own

        def count(_model: Any, _args: Any, given: Mapping[str, Any]) -> None:
            inputs = given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
            query.spent.add(inputs.shape[0] * inputs.shape[1])

        model.register_forward_pre_hook(count, with_kwargs=True)
        of_class, of_step = self.split(*_OURS)
        quiet = warnings.catch_warnings(action="ignore")  # Captum's, about what Inseq asks of it
        with self.explained(), seeded(rng, lm.device), quiet:
            if lm.device.type != "cpu" and not getattr(model, "hf_device_map", None):
                model.hf_device_map = {"": str(lm.device)}  # else Inseq moves it to the first device of its kind
            tokenizer = _copied(lm.tokenizer)
            theirs = imported("inseq", "inseq").load_model(
                model, self.name, tokenizer=tokenizer, device=lm.device.type, **of_class
            )
            method = theirs.attribution_method
            arguments, unknown = method.get_attribution_args(**of_step)
            names = names_of(method.method.attribute, *_OURS) if hasattr(method, "method") else ()
            check_keywords(f"Inseq's {self.name}", unknown, names)
            output = method.attribute(
                _batch(theirs, query, lm.device),
                attributed_fn=self._explained(theirs, method, query),
                attr_pos_start=query.logit_positions[0] + 1,
                attr_pos_end=query.logit_positions[-1] + 2,
                show_progress=False,
                pretty_progress=False,
                attribution_args=arguments,
            )
        (sequence,) = output.sequence_attributions
        return self._reduced(sequence.target_attributions.float(), type(sequence).__name__).T

    def _explained(self, theirs: Any, method: Any, query: Query) -> Callable[..., Tensor]:
        """The step function."""
        if query.foil_id is None:
            return theirs.get_attributed_fn(self.attributed_fn)
        if self.attributed_fn != "probability" or not method.use_predicted_target:
            raise ParameterError(
                f"Inseq's {self.name} of {self.attributed_fn!r} has no place for a foil. Leave it out."
            )
        return partial(_difference, foil=query.foil_id)

    def _reduced(self, scores: Float[Tensor, "tokens targets *rest"], kind: str) -> Float[Tensor, "tokens targets"]:
        """One number per token and target: by default over layers and heads the mean, over dimensions the L2 norm."""
        how = self.reduce or ("mean" if kind.startswith("MultiDimensional") else "l2")
        reduction = {"l2": torch.linalg.vector_norm, "sum": torch.sum, "mean": torch.mean}[how]
        return scores if scores.ndim == 2 else reduction(scores.flatten(2), dim=-1)


def _difference(args: Any, foil: int) -> Float[Tensor, " batch"]:
    """p(target) - p(foil), as a step function of Inseq."""
    probabilities = args.attribution_model.output2logits(args.forward_output).softmax(-1)
    target = args.target_ids.reshape(len(probabilities), 1).to(probabilities.device)
    return probabilities.gather(-1, target).squeeze(-1) - probabilities[:, foil]


@lru_cache(maxsize=1)
def _copied(tokenizer: Any) -> Any:
    """A copy that Inseq may change; a vocabulary of 262,144 tokens takes two seconds."""
    return copy.deepcopy(tokenizer)


def _batch(theirs: Any, query: Query, device: torch.device) -> Any:
    """The query's tokens and the last target, as Inseq would have encoded their text."""
    from inseq.data import BatchEmbedding, BatchEncoding, DecoderOnlyBatch  # pyright: ignore

    ids = torch.tensor([[*query.encoding.token_ids, query.target_ids[-1]]], device=device)
    baseline = torch.where(ids == theirs.eos_token_id, ids, theirs.tokenizer.unk_token_id)
    tokens = theirs.convert_ids_to_tokens(ids, skip_special_tokens=False)
    encoding = BatchEncoding(ids, torch.ones_like(ids), tokens, baseline)
    return DecoderOnlyBatch(encoding, BatchEmbedding(theirs.embed_ids(ids), theirs.embed_ids(baseline)))


factory = InseqMethod.factory
