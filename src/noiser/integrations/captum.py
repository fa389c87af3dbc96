"""Captum's methods as methods of Noiser: `method="captum:ShapleyValueSampling"`.

Captum sees a function of the rows of the embedding table that may change, and nothing else: special tokens and
template text stay as they are, each target is a call of its own, and the engine runs what Captum asks for in batches
after the clean prefix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import (
    BASELINES,
    Baseline,
    Call,
    Input,
    Query,
    Session,
    SetRows,
    Steps,
    Values,
    ValueTable,
)
from noiser.engine.scores import score_of
from noiser.errors import DependencyError, ParameterError, UnknownNameError
from noiser.integrations.adapter import FlatFactory, RandomStates, check_keywords, explained, names_of
from noiser.methods.gradients import GradientScore, Reduce, reduce_dimensions
from noiser.methods.protocol import Scores, movable_positions, sum_over_units
from noiser.version import version_of

__all__ = ["CaptumMethod", "captum_methods", "factory"]

BATCH = 32
"""Perturbed inputs that Captum is asked to make at a time; the engine cuts them into batches of its own."""

OURS = (
    *("inputs", "baselines", "target", "additional_forward_args", "feature_mask", "show_progress"),
    "return_input_shape",
)
"""Arguments of Captum's `attribute` that are not the caller's to give."""

REFUSED = {
    "FeaturePermutation": "permutes a feature between the inputs of a batch, and a prompt is one input",
    "NoiseTunnel": "wraps another method",
    **dict.fromkeys(
        ("DeepLift", "DeepLiftShap", "LRP", "GuidedBackprop", "Deconvolution", "GuidedGradCam"),
        "rewrites torch modules, and has no rule for what language models are made of",
    ),
}


@dataclass(frozen=True)
class CaptumMethod:
    """A method of `captum.attr` on the rows of the embedding table.

    A perturbation method (one with a `feature_mask`) has the units before the target as its features: a unit that is
    taken away gets the baseline row at each of its tokens, everything else stays. A gradient method moves every token
    that is not frozen, and a unit's score is the sum over its tokens.

    Frozen tokens are never in Captum's input. Each target is a call of its own, in which later tokens do not occur.
    Captum draws from global random states; they follow the seed and are put back.

    Args:
        name: the class's name, such as "ShapleyValueSampling"; `captum_methods()` lists them.
        baseline: row that stands for nothing, where the method has baselines: "zero", "pad", "unk" or "mean".
        score: what is explained: "prob" or "logprob" of the target; with a foil, the difference of the two tokens'.
        reduce: from the dimensions of a gradient method to a token's score: "sum" or "l2".
        arguments: of Captum's `attribute`, such as `{"n_samples": 50}`.
        constructor: of Captum's class, such as `{"multiply_by_inputs": False}`.

    Raises:
        DependencyError: Captum is not installed.
        UnknownNameError: no such method, or an unknown value.
        ParameterError: the method cannot work on embeddings alone, or has no such argument, or (when called) the
            tokenizer lacks the baseline's token, or Captum refuses the arguments or the prompt.
        ModelError: Captum failed (when called).
    """

    looks_inside: ClassVar[bool] = True

    name: str
    baseline: Baseline = field(default="zero", kw_only=True)
    score: GradientScore = field(default="prob", kw_only=True)
    reduce: Reduce = field(default="sum", kw_only=True)
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    constructor: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def __post_init__(self) -> None:
        cls = class_of(self.name)
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(GradientScore))
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_keywords(f"{self.name}.attribute", self.arguments, names_of(cls.attribute, *OURS))
        check_keywords(self.name, self.constructor, names_of(cls, "forward_func"))

    @property
    def registry_name(self) -> str:
        """What a result calls it."""
        return f"captum:{self.name}@1"

    def __call__(self, query: Query, rng: torch.Generator) -> Steps[Scores]:
        """Scores of every unit for every target; see `Method`."""
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float32)
        states, deltas = RandomStates(rng), list[float]()
        for g in range(len(scores)):
            row, delta = yield Call(partial(self._of_target, query=query, g=g, states=states))
            scores[g] = row
            deltas += delta
        info = {"captum": version_of("captum"), "frozen_tokens": "kept"}
        return Scores(scores=scores, info={**info, **({"delta": deltas} if deltas else {})})

    def _of_target(
        self, session: Session, query: Query, g: int, states: RandomStates
    ) -> tuple[Float[Tensor, " units"], list[float]]:
        """Scores for one target, and the convergence delta where the arguments ask for it."""
        scores, delta = torch.full((len(query.units),), torch.nan, dtype=torch.float32), None
        if query.causal_mask[g].any():
            with states.on(session.lm.device):
                scores, delta = self._run(session, query, g)
        session.report(session.counters.token_forwards * len(query.target_spans) / (g + 1))
        return scores, [] if delta is None else [float(delta.mean())]

    def _run(self, session: Session, query: Query, g: int) -> tuple[Float[Tensor, " units"], Tensor | None]:
        cls = class_of(self.name)
        features = _features(query, g) if "feature_mask" in names_of(cls.attribute) else None
        positions = [i for i in movable_positions(query) if i <= query.target_rows[g][0]]
        positions = positions if features is None else [*features]
        rows = session.embeddings[positions][None].clone()
        arguments = self._arguments(cls, rows, session.baseline(self.baseline).to(rows))
        replaces = features is not None or "sliding_window_shapes" in arguments
        if features is not None:
            numbers = torch.tensor([*features.values()], device=rows.device)
            arguments["feature_mask"] = numbers[:, None].expand(rows.shape).contiguous()
        function = TargetFunction(session, g, tuple(positions), self.score)
        with explained("Captum", self.name, arguments=self.arguments, constructor=self.constructor):
            result = cls(function, **self.constructor).attribute(rows.requires_grad_(not replaces), **arguments)
        attributions, delta = result if isinstance(result, tuple) else (result, None)
        # What is replaced as a whole has one number, which Captum gives to all its dimensions and tokens.
        per_token = attributions[0, :, 0] if replaces else reduce_dimensions(attributions[0], self.reduce)
        tokens = torch.zeros(len(query.encoding.token_ids))
        tokens[positions] = per_token.detach().float().cpu()
        if features is not None:
            tokens[[i for unit in query.units for i in unit.token_indices[1:]]] = 0
        return sum_over_units(query, tokens.expand(len(query.target_spans), -1))[g], delta

    def _arguments(self, cls: Any, rows: Float[Tensor, "1 positions dim"], base: Tensor) -> dict[str, Any]:
        names, given = names_of(cls.attribute), {name: _as_tuple(value) for name, value in self.arguments.items()}
        if "baselines" in names:
            given["baselines"] = base.expand_as(rows).clone()
        if "perturbations_per_eval" in names:
            given.setdefault("perturbations_per_eval", BATCH)
        if "sliding_window_shapes" in names:
            given.setdefault("sliding_window_shapes", (1, rows.shape[-1]))
        return given


def _features(query: Query, g: int) -> dict[int, int]:
    """From each position of the units before a target to the feature that it belongs to, numbered from 0."""
    before: list[int] = query.causal_mask[g].nonzero().flatten().tolist()
    return dict(sorted((i, number) for number, unit in enumerate(before) for i in query.units[unit].token_indices))


class TargetFunction:
    """From rows at some positions to one target's objective, [batch, positions, dim] to [batch]; differentiable.

    Args:
        session: runs the model.
        g: index of the target.
        positions: which tokens' rows it is a function of; all others are unchanged.
        score: what is read of the target's distribution.
    """

    def __init__(self, session: Session, g: int, positions: tuple[int, ...], score: GradientScore) -> None:
        self.session, self.g, self.positions = session, g, positions
        self.score: GradientScore = score

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        """The objective of every input in a batch."""
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        table: ValueTable = self.session.ask(Values([self.samples(rows)], self.score))
        return table.values[0][:, 0].to(rows)

    def samples(self, rows: Float[Tensor, "batch positions dim"]) -> SetRows:
        """All inputs of a batch, as samples of one perturbation."""
        return SetRows(self.positions, (self.g,), given=rows.detach())


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that Captum's passes run in the engine's batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: TargetFunction) -> Tensor:
        query, at = function.session.query, function.positions
        if query.foil_branch is not None:
            raise ParameterError("Captum's gradients contrast single tokens; expected target_unit='token' with a foil.")
        inputs = [Input(at, partial(torch.clone, row), (function.g,)) for row in rows.detach()]
        slopes = function.session.differentiate(inputs, score_of(function.score, query.foil_id, query.of))
        ctx.save_for_backward(torch.stack([slope.gradient[list(at)] for slope in slopes]).to(rows))
        return torch.stack([slope.value for slope in slopes]).to(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None


def _as_tuple(value: Any) -> Any:
    """Lists, which is what JSON has, as the tuples that Captum takes."""
    return tuple(map(_as_tuple, cast("list[Any]", value))) if isinstance(value, list) else value


# ---- which classes of the installed Captum explain a function of embeddings ------------------------------------------


def captum_methods() -> list[str]:
    """Names of the methods of the installed Captum that work on embeddings. Raises DependencyError without Captum."""
    attr = _captum()
    classes = [getattr(attr, name) for name in attr.__all__]
    return sorted(cls.__name__ for cls in classes if inspect.isclass(cls) and _works(attr, cls))


def class_of(name: str) -> Any:
    """The class of a method. Raises UnknownNameError, or ParameterError where it cannot work on embeddings alone."""
    attr, known = _captum(), captum_methods()
    if name in REFUSED:
        raise ParameterError(f"Captum's {name} {REFUSED[name]}; expected one of {', '.join(known)}.")
    if name not in known:
        hint = "Layer and neuron methods attribute to what is inside a model, not to its input."
        raise UnknownNameError("method", f"captum:{name}", [f"captum:{other}" for other in known], hint)
    return getattr(attr, name)


def _captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise DependencyError(
            "Captum's methods need Captum; install it with: pip install 'noiser[captum]' (or pip install captum)."
        ) from error
    return captum.attr


def _works(attr: Any, cls: Any) -> bool:
    """Whether a class explains a function of its input, and needs nothing but the function."""
    if not issubclass(cls, attr.Attribution) or cls.__name__ in REFUSED or "attribute" not in vars(cls):
        return False
    parameters = list(inspect.signature(cls).parameters.values())
    return (
        [parameter.name for parameter in parameters[:1]] == ["forward_func"]
        and all(parameter.default is not inspect.Parameter.empty for parameter in parameters[1:])
        and "inputs" in names_of(cls.attribute)
    )


def factory(name: str) -> Callable[..., CaptumMethod]:
    """What constructs the method "captum:NAME", with all hyper-parameters as flat keywords.

    Raises:
        DependencyError: Captum is not installed. UnknownNameError: it has no such method.
    """
    return FlatFactory(make=CaptumMethod, name=name, constructor=names_of(class_of(name), "forward_func"))
