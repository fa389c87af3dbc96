"""Inseq's methods as methods of Noiser: `method="inseq:saliency"`.

Inseq gets a twin of the model, which shares its weights and nothing else, and the very tokens of the query: nothing
is decoded and encoded again. What comes back is what Inseq computes, with its own baselines and defaults.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Call, Query, Session, Steps
from noiser.errors import DependencyError, ModelError, NoiserError, ParameterError, UnknownNameError
from noiser.integrations.adapter import FlatFactory, RandomStates, check_keywords, copied_tokenizer, names_of, twin
from noiser.methods.protocol import Scores, sum_over_units
from noiser.model.attention import eager_attention
from noiser.model.language_model import LanguageModel
from noiser.version import version_of

__all__ = ["InseqMethod", "factory", "import_inseq", "inseq_methods"]

Reduction = Literal["l2", "sum", "mean"]

OURS = ("inputs", "baselines", "target", "additional_forward_args", "show_progress")
"""Arguments of an attribution step that Inseq itself gives."""

OURS_OF_A_CLASS = ("attribution_model", "hook_to_model")
"""Likewise of a class."""


@dataclass(frozen=True)
class InseqMethod:
    """A method of Inseq, run by Inseq.

    Special tokens and template text are part of Inseq's input: it perturbs them, and moves them to its baseline (the
    embedding of the unknown, else the padding or end token), which is what the paper's runs did. They get no score of
    their own unless `attribute` is told `special_tokens="perturbed"`. A unit's score is the sum over its tokens.

    Args:
        name: Inseq's name of the method, such as "saliency"; `inseq_methods()` lists them.
        attributed_fn: what is explained, by Inseq's name of the step function; "probability" is that of the target.
            With a foil it must be "probability", and the difference of the two tokens' is explained.
        reduce: from the further dimensions of Inseq's scores (embedding, layers, heads) to one number per token: "l2",
            "sum" or "mean"; None for what Inseq's own aggregation does, without its normalisation.
        arguments: of Inseq's attribution step, such as `{"n_steps": 50}`.
        constructor: of Inseq's class, such as `{"multiply_by_inputs": False}`.

    Raises:
        DependencyError: Inseq is not installed.
        UnknownNameError: no such method or step function. ParameterError: the method has no such argument.
        ModelError: Inseq failed on this model (when called).
    """

    looks_inside: ClassVar[bool] = True

    name: str
    attributed_fn: str = field(default="probability", kw_only=True)
    reduce: Reduction | None = field(default=None, kw_only=True)
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    constructor: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def __post_init__(self) -> None:
        cls = _class_of(self.name)
        check_choice("attributed_fn", self.attributed_fn, import_inseq().list_step_functions())
        if self.reduce is not None:
            check_choice("reduce", self.reduce, get_args(Reduction))
        check_keywords(self.name, self.constructor, names_of(cls, *OURS_OF_A_CLASS))

    @property
    def registry_name(self) -> str:
        """What a result calls it."""
        return f"inseq:{self.name}@1"

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores of every unit for every target; see `Method`."""
        if query.of is not None:
            raise ParameterError(
                "Inseq has no place for a function of your own (of=); expected none. Use another method; `noiser "
                "methods` lists those that need no Inseq."
            )
        if query.target_unit == "all" or len(query.target_spans) < len(query.target_ids) or any(query.skipped_ids[1:]):
            raise ParameterError(
                f"Inseq explains a continuation token by token, got target_unit={query.target_unit!r}; expected "
                "'token'. Or use a method of our own; see `noiser methods`."
            )
        tokens = yield Call(partial(self._of_session, query=query, states=RandomStates(rng)))
        return Scores(
            scores=sum_over_units(query, tokens[:, : len(query.token_ids)]),
            info={"inseq": version_of("inseq"), "frozen_tokens": "perturbed"},
        )

    def _of_session(self, session: Session, query: Query, states: RandomStates) -> Float[Tensor, "targets tokens"]:
        """Inseq's scores of a query; counts its forward passes, since its backward passes are not seen."""
        lm, model = session.lm, twin(session.lm.model)
        model.register_forward_pre_hook(partial(_count, session), with_kwargs=True)
        try:
            with eager_attention(model), states.on(lm.device), _ignored_warnings():
                scores = self._run(lm, model, query)
        except NoiserError:
            raise
        except Exception as error:
            raise ModelError(
                f"Inseq's {self.name} failed on {type(lm.model).__name__}: {type(error).__name__}: {error}. "
                "Use another method; `noiser methods` lists those that need no Inseq."
            ) from error
        session.report()
        return scores

    def _run(self, lm: LanguageModel, model: Any, query: Query) -> Float[Tensor, "targets tokens"]:
        theirs = _load(lm, model, self.name, self.constructor)
        method = theirs.attribution_method
        arguments, unknown = method.get_attribution_args(**self.arguments)
        known = names_of(method.method.attribute, *OURS) if hasattr(method, "method") else ()
        check_keywords(f"Inseq's {self.name}", unknown, known)
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
        return _reduced(sequence.target_attributions, type(sequence).__name__, self.reduce).T

    def _explained(self, theirs: Any, method: Any, query: Query) -> Callable[..., Tensor]:
        if query.foil_id is None:
            return theirs.get_attributed_fn(self.attributed_fn)
        if self.attributed_fn != "probability" or not method.use_predicted_target:
            raise ParameterError(
                f"Inseq's {self.name} with attributed_fn={self.attributed_fn!r} has no place for a foil; expected "
                "attributed_fn='probability' and a method that explains a probability."
            )
        return partial(_difference, foil=query.foil_id)


def _reduced(
    scores: Float[Tensor, "tokens targets *rest"], kind: str, how: Reduction | None
) -> Float[Tensor, "tokens targets"]:
    """One number per token and target: over layers and heads the mean, over embedding dimensions the L2 norm."""
    scores = scores.float()
    if scores.ndim == 2:
        return scores
    flat = scores.flatten(2)
    how = how or ("mean" if kind.startswith("MultiDimensional") else "l2")
    return flat.norm(dim=-1) if how == "l2" else flat.sum(-1) if how == "sum" else flat.mean(-1)


def _difference(args: Any, foil: int) -> Float[Tensor, " batch"]:
    """p(target) - p(foil), as a step function of Inseq."""
    logits = args.attribution_model.output2logits(args.forward_output)
    probabilities = logits.softmax(-1)
    target = args.target_ids.reshape(logits.shape[0], 1).to(logits.device)
    return probabilities.gather(-1, target).squeeze(-1) - probabilities[:, foil]


def _count(session: Session, _model: Any, _args: Any, given: Mapping[str, Any]) -> None:
    inputs = given.get("inputs_embeds")
    inputs = given["input_ids"] if inputs is None else inputs
    session.count(inputs.shape[0] * inputs.shape[1], head_rows=0)


def inseq_methods() -> list[str]:
    """Names of Inseq's own methods. Raises DependencyError without Inseq."""
    return sorted(_classes())


def factory(name: str) -> FlatFactory[InseqMethod]:
    """What constructs the method "inseq:NAME", with all hyper-parameters as flat keywords.

    Raises:
        DependencyError: Inseq is not installed. UnknownNameError: it has no such method.
    """
    return FlatFactory(make=InseqMethod, name=name, constructor=names_of(_class_of(name), *OURS_OF_A_CLASS))


def import_inseq() -> Any:
    """The package. Raises DependencyError where it is not installed."""
    try:
        with _ignored_warnings():
            import inseq
    except ImportError as error:
        raise DependencyError(
            f"Inseq could not be imported ({error}); install it with: pip install 'noiser[inseq]' (or "
            "pip install inseq)."
        ) from error
    return inseq


@contextlib.contextmanager
def _ignored_warnings() -> Generator[None]:
    """Inseq leaves a file of its own open when it is imported, and lets Captum say what Inseq makes it do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file .*model_config.yaml", ResourceWarning)
        warnings.filterwarnings("ignore", "Input Tensor 0 did not already require gradients", UserWarning)
        warnings.filterwarnings("ignore", "Setting forward, backward hooks and attributes on non-linear", UserWarning)
        yield


def _classes() -> dict[str, Any]:
    import_inseq()
    from inseq.attr.feat import FeatureAttribution  # pyright: ignore

    return {
        name: cls
        for name, cls in FeatureAttribution.available_classes().items()
        if cls.__module__.startswith("inseq.") and name != "dummy"
    }


def _class_of(name: str) -> Any:
    classes = _classes()
    if name not in classes:
        raise UnknownNameError("method", f"inseq:{name}", [f"inseq:{other}" for other in classes])
    return classes[name]


def _load(lm: LanguageModel, model: Any, name: str, constructor: Mapping[str, Any]) -> Any:
    """Inseq's wrapper, which stays where the model is."""
    device = lm.device.type
    if device != "cpu" and not getattr(model, "hf_device_map", None):
        model.hf_device_map = {"": str(lm.device)}  # Inseq moves a model to the first device of a kind, but not then
    return import_inseq().load_model(
        model, name, tokenizer=copied_tokenizer(lm.tokenizer), device=device, **constructor
    )


def _batch(theirs: Any, query: Query, device: torch.device) -> Any:
    """The query's tokens and the last target, as Inseq would have encoded their text."""
    from inseq.data import BatchEmbedding, BatchEncoding, DecoderOnlyBatch  # pyright: ignore

    ids = torch.tensor([[*query.encoding.token_ids, query.target_ids[-1]]], device=device)
    ends = ids == theirs.eos_token_id
    baseline = torch.where(ends, ids, torch.full_like(ids, theirs.tokenizer.unk_token_id))
    tokens = theirs.convert_ids_to_tokens(ids, skip_special_tokens=False)
    encoding = BatchEncoding(ids, torch.ones_like(ids), tokens, baseline)
    return DecoderOnlyBatch(encoding, BatchEmbedding(theirs.embed_ids(ids), theirs.embed_ids(baseline)))
