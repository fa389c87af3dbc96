"""Inseq's methods inside Noiser, `method="inseq:saliency"`, and ours inside Inseq, as its method
"noiser".

    import inseq
    import noiser.integrations.inseq

    model = inseq.load_model("gpt2", "noiser")
    model.attribute("The capital of France is", samples=20, objective="hellinger").show()
    model.attribute("The capital of France is", noiser_method="occlusion").show()

Inseq's command line, with the import made: `python -m noiser.integrations.inseq attribute
--attribution_method noiser`.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Call, Prefill, Query, query_of, run_one
from noiser.engine.query import FoilRun
from noiser.errors import ParameterError
from noiser.integrations.common import LibraryMethod, check_keywords, imported, names_of, seeded
from noiser.methods import METHODS, Method, Scores, make_method, run_method
from noiser.methods.protocol import sum_over_units
from noiser.model.language_model import LanguageModel
from noiser.model.runtime import twin
from noiser.registry import version_of
from noiser.text import Encoding, extend, make_units
from noiser.types import Question

_INSEQ, _DATA, _FEAT = (
    imported(module, "inseq") for module in ("inseq", "inseq.data", "inseq.attr.feat")
)
_Registry: Any = imported(
    "inseq.attr.feat.perturbation_attribution", "inseq"
).PerturbationAttributionRegistry

InseqReduction = Literal["l2", "sum", "mean"]

_OURS = (
    *(
        "attribution_model",
        "hook_to_model",
        "inputs",
        "baselines",
        "target",
        "additional_forward_args",
    ),
    "show_progress",
)
"""Arguments of Inseq's classes and attribution steps that Inseq or the adapter gives."""


@dataclass(frozen=True)
class InseqMethod(LibraryMethod):
    """A method of Inseq, run by Inseq on a twin of the model and the very tokens of the query.

    Special tokens and template text are part of Inseq's input: it perturbs them, and moves them to
    its baseline (the embedding of the unknown, else the padding or end token), as in the paper's
    runs. They get no score of their own unless `attribute` is told `special_tokens="perturbed"`. A
    unit's score is the sum over its tokens.

    Args:
        name: Inseq's name of the method, such as "saliency"; `InseqMethod.names()` lists them.
        attributed_fn: Inseq's name of the explained step function. With a foil it must be
            "probability".
        reduce: from the further dimensions of Inseq's scores (embedding, layers, heads) to one
            number per token: "l2", "sum" or "mean"; None for Inseq's own aggregation, without its
            normalisation.
        settings: of Inseq's class and attribution step, such as `{"n_steps": 50}`.
    """

    library = "Inseq"
    needs_internals: ClassVar[bool] = True
    target_unit: ClassVar[str] = "token"

    attributed_fn: str = field(default="probability", kw_only=True)
    reduce: InseqReduction | None = field(default=None, kw_only=True)

    @classmethod
    def _classes(cls) -> dict[str, Any]:
        known: dict[str, Any] = _FEAT.FeatureAttribution.available_classes()
        return {
            name: one
            for name, one in known.items()
            if one.__module__.startswith("inseq.") and name != "dummy"
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.class_of(self.name)
        check_choice("attributed_fn", self.attributed_fn, _INSEQ.list_step_functions())

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        spans = query.target_unit == "all" or len(query.targets) < len(query.target_ids)
        if spans or query.of is not None or any(target.before for target in query.targets[1:]):
            raise ParameterError(
                f"Inseq explains token by token; expected target_unit='token' and no of=, got "
                f"{query.target_unit!r}."
            )
        tokens = await Call(query, partial(self._run, rng=rng))
        info = {"inseq": version_of("inseq"), "frozen_tokens": "perturbed"}
        return Scores(scores=sum_over_units(query, tokens[:, : len(query.token_ids)]), info=info)

    def _run(
        self, lm: LanguageModel, query: Query, rng: torch.Generator
    ) -> Float[Tensor, "targets tokens"]:
        """Inseq's scores of a query; counts its forward passes, as its backward passes are not
        seen.
        """
        model = twin(lm.model)
        model.set_attn_implementation("eager")

        def count(_model: Any, _args: Any, given: Mapping[str, Any]) -> None:
            inputs = (
                given["input_ids"] if given.get("inputs_embeds") is None else given["inputs_embeds"]
            )
            query.spent.add(inputs.shape[0] * inputs.shape[1])

        model.register_forward_pre_hook(count, with_kwargs=True)
        of_class, of_step = self.split(*_OURS)
        quiet = warnings.catch_warnings(action="ignore")  # Captum's, about what Inseq asks of it
        with self.explained(), seeded(rng, lm.device), quiet:
            if lm.device.type != "cpu" and not getattr(model, "hf_device_map", None):
                model.hf_device_map = {
                    "": str(lm.device)
                }  # else Inseq moves it to the first device of its kind
            tokenizer = _copied(lm.tokenizer)
            theirs = _INSEQ.load_model(
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
        scores = sequence.target_attributions.float().transpose(0, 1)
        if scores.ndim == 2:
            return scores
        # by default the mean over layers and heads, the L2 norm over dimensions
        how = self.reduce or (
            "mean" if type(sequence).__name__.startswith("MultiDimensional") else "l2"
        )
        return {"l2": torch.linalg.vector_norm, "sum": torch.sum, "mean": torch.mean}[how](
            scores.flatten(2), dim=-1
        )

    def _explained(self, theirs: Any, method: Any, query: Query) -> Callable[..., Tensor]:
        if query.foil is None:
            return theirs.get_attributed_fn(self.attributed_fn)
        if self.attributed_fn != "probability" or not method.use_predicted_target:
            raise ParameterError(
                f"Inseq's {self.name} of {self.attributed_fn!r} has no place for a foil. Leave "
                f"it out."
            )
        if query.foil_runs:
            raise ParameterError(
                f"Inseq's {self.name} explains one token; target or foil has several. Name one "
                f"token each, or take a "
                "method of Noiser, such as 'occlusion'."
            )
        return partial(_difference, foil=query.foil_ids[0])


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
    ids = torch.tensor([[*query.encoding.token_ids, query.target_ids[-1]]], device=device)
    baseline = torch.where(ids == theirs.eos_token_id, ids, theirs.tokenizer.unk_token_id)
    tokens = theirs.convert_ids_to_tokens(ids, skip_special_tokens=False)
    encoding = _DATA.BatchEncoding(ids, torch.ones_like(ids), tokens, baseline)
    return _DATA.DecoderOnlyBatch(
        encoding, _DATA.BatchEmbedding(theirs.embed_ids(ids), theirs.embed_ids(baseline))
    )


class NoiserAttribution(_Registry):
    """A method of Noiser as a method of Inseq, for decoder-only models.

    `noiser_method` (a name such as "occlusion"), the method's hyper-parameters, `seed` and
    `special_tokens` are keyword arguments of Inseq's `attribute`. Every generated token is a run of
    its own over the tokens before it, with the same seed: the scores are those of
    `noiser.attribute` for the same tokens. Special tokens have the score NaN. Where several tokens
    make up one character, each has an equal share of the character's score.

    `attributed_fn` may be "probability" (the default) or "contrast_prob_diff", whose contrastive
    token is the foil.
    """

    method_name = "noiser"

    _lm: LanguageModel | None = None

    def get_attribution_args(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The method's keywords, and all others; called by Inseq."""
        make = METHODS.get(kwargs.get("noiser_method", "noiser")).factory
        names = {*inspect.signature(make if isinstance(make, type) else type(make())).parameters}
        names |= {"noiser_method", "seed", "special_tokens"}
        return {k: v for k, v in kwargs.items() if k in names}, {
            k: v for k, v in kwargs.items() if k not in names
        }

    def attribute_step(
        self,
        attribute_fn_main_args: dict[str, Any],
        attribution_args: dict[str, Any] = {},  # noqa: B006 - Inseq's signature
    ) -> Any:
        """Scores of the tokens before one generated token, for each sequence of a batch; called by
        Inseq.
        """
        ids, targets, explained, mask, _, names, *values = attribute_fn_main_args[
            "additional_forward_args"
        ]
        given = dict(attribution_args)
        settings = dict(zip(names, values, strict=True))
        seed = given.pop("seed", 0)
        special_tokens = given.pop("special_tokens", None)
        foils = self._foils(explained, settings, ids.shape[1])
        if settings.get("logprob"):
            given.setdefault("objective", "logprob")
        method = make_method(given.pop("noiser_method", "noiser"), **given)
        frozen = special_tokens or getattr(method, "special_tokens", "frozen")
        theirs: Any = self.attribution_model
        self._lm = self._lm or LanguageModel(theirs.model, theirs.tokenizer)
        scores = torch.full(ids.shape, torch.nan)
        for row, (line, target) in enumerate(
            zip(ids.cpu(), targets.flatten().tolist(), strict=True)
        ):
            present = mask[row].bool().cpu()
            foil = foils[row] if foils else None
            scores[row, present] = 0.0  # the score where the contrastive text has the same token
            if foil != target:
                scores[row, present] = _token_scores(
                    self._lm, line[present], target, foil, method, seed, frozen
                )
        return _DATA.CoarseFeatureAttributionStepOutput(
            source_attributions=None, target_attributions=scores
        )

    def _foils(self, explained: Any, settings: Mapping[str, Any], length: int) -> list[int]:
        """The contrastive token of each sequence at this step, as Inseq aligns it; none without a
        contrast.
        """
        name = getattr(explained, "__name__", str(explained))
        if name == "probability_fn":
            return []
        if name != "contrast_prob_diff_fn" or settings.get("contrast_targets") is None:
            raise ParameterError(
                f"attributed_fn is {name!r}; expected 'probability', or 'contrast_prob_diff' "
                f"with contrast_targets. "
                "objective='logprob' or 'hellinger' reads the probability differently."
            )
        inputs = _DATA.get_batch_from_inputs(
            self.attribution_model, inputs=settings["contrast_targets"]
        )
        alignments = settings.get("contrast_targets_alignments")
        batch = _DATA.DecoderOnlyBatch.from_batch(inputs)
        _, foils = _DATA.batch.slice_batch_from_position(batch, length, alignments)
        return foils.flatten().tolist()


def _token_scores(
    lm: LanguageModel,
    ids: Int[Tensor, " length"],
    target: int,
    foil: int | None,
    method: Method,
    seed: int,
    frozen: Any,
) -> Float[Tensor, " length"]:
    """Scores of tokens for the one after them, NaN for special tokens; pieces of a character share
    its score.
    """
    nothing = Encoding(text="", token_ids=(), offsets=(), frozen=(), regions=(), tokens=())
    encoding = extend(lm.tokenizer, nothing, ids.tolist())
    units = make_units(encoding, "token", special_tokens=frozen)
    tokens = torch.full((len(ids),), torch.nan)
    if not units:
        return tokens

    async def steps() -> Scores:
        context = lm.context(ids.tolist())
        logits = await Prefill(
            context, [len(ids) - 1], [(target,) if foil is None else (target, foil)]
        )
        question = Question(prompt=encoding.text, target_unit="token")
        contrasted = None if foil is None else FoilRun((foil,), context, logits)
        query = query_of(
            lm, question, encoding, (target,), [[len(ids)]], units, context, logits, contrasted
        )
        return await run_method(method, query, seed)

    for unit, score in zip(units, run_one(lm, steps()).scores[0], strict=True):
        tokens[list(unit.token_indices)] = score / len(unit.token_indices)
    return tokens


if __name__ == "__main__":
    from inseq.commands.cli import main

    main()
