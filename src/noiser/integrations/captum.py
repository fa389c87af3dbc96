"""Captum's methods as methods of Noiser: `method="captum:ShapleyValueSampling"`.

Captum sees a function of the rows of the embedding table that may change, and nothing else: special tokens and
template text stay as they are, each target is a call of its own, and the engine runs what Captum asks for in batches
behind the clean prefix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Engine, Objective, ObjectiveScore, Perturbation, gradients
from noiser.errors import DependencyError, ParameterError, UnknownNameError
from noiser.integrations.isolation import seeded
from noiser.integrations.keywords import FlatFactory, check_keywords
from noiser.methods.baseline import BASELINES, BaselineName, baseline_row
from noiser.methods.checks import check_choice
from noiser.methods.gradients import Reduce, objectives_of, reduce_dimensions
from noiser.methods.protocol import Scores
from noiser.methods.tokens import movable_positions, sum_over_units
from noiser.model.query import Query

__all__ = ["CaptumMethod", "captum_methods", "factory"]

OURS = ("inputs", "baselines", "target", "additional_forward_args", "feature_mask", "show_progress")
"""Arguments of Captum's `attribute` that the adapter gives."""

REFUSED = {
    "FeaturePermutation": "permutes a feature between the inputs of a batch, and a prompt is one input",
    "NoiseTunnel": "wraps another method",
    **dict.fromkeys(
        ("DeepLift", "DeepLiftShap", "LRP", "GuidedBackprop", "Deconvolution", "GuidedGradCam"),
        "rewrites torch modules, and has no rule for what language models are made of",
    ),
}

BATCH = 32
"""Perturbed inputs that Captum is asked to make at a time; the engine cuts them into batches of its own."""


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
            tokenizer lacks the baseline's token.
    """

    name: str
    baseline: BaselineName = field(default="zero", kw_only=True)
    score: ObjectiveScore = field(default="prob", kw_only=True)
    reduce: Reduce = field(default="sum", kw_only=True)
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    constructor: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def __post_init__(self) -> None:
        cls = _class_of(self.name)
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(ObjectiveScore))
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_keywords(f"{self.name}.attribute", self.arguments, _arguments(cls))
        check_keywords(self.name, self.constructor, _constructor(cls))

    @property
    def registry_name(self) -> str:
        """What a result calls it."""
        return f"captum:{self.name}@1"

    def __call__(self, engine: Engine, generator: torch.Generator) -> Scores:
        """Scores of every unit for every target; see `Method`."""
        query = engine.query
        objectives = objectives_of(query, self.score)
        base = baseline_row(engine.lm, self.baseline).to(engine.table_rows)
        scores = torch.full(query.visible.shape, torch.nan)
        deltas: list[float] = []
        with seeded(generator, engine.lm.device):
            for g, objective in enumerate(objectives):
                if query.visible[g].any():
                    scores[g], delta = self._of_target(engine, g, objective, base)
                    deltas += delta
                engine.report(engine.token_forwards * len(objectives) / (g + 1))
        return Scores(
            scores=scores,
            info={
                "captum": version("captum"),
                "frozen_tokens": "kept",
                "token_forwards": engine.token_forwards,
                "passes": engine.passes,
                **({"delta": deltas} if deltas else {}),
            },
        )

    def _of_target(
        self, engine: Engine, g: int, objective: Objective, base: Float[Tensor, " dim"]
    ) -> tuple[Float[Tensor, " units"], list[float]]:
        """Scores for one target, and the convergence delta where it was asked for."""
        cls, query = _class_of(self.name), engine.query
        features = _features(query, g) if "feature_mask" in _names(cls.attribute) else None
        positions = sorted(features) if features is not None else _movable_before(query, g)
        function = _Function(engine, g, tuple(positions), objective)
        rows = engine.table_rows[positions][None].clone()
        arguments = self._arguments(cls, rows, base)
        if features is not None:
            mask = torch.tensor([features[position] for position in positions], device=rows.device)
            arguments["feature_mask"] = mask[None, :, None].expand_as(rows).contiguous()
        else:
            rows.requires_grad_("sliding_window_shapes" not in arguments)
        found = cls(function, **self.constructor).attribute(rows, **arguments)
        found, delta = found if isinstance(found, tuple) else (found, None)
        tokens = torch.zeros(len(query.encoding.token_ids))
        if features is not None:
            return self._of_features(query, g, found[0, :, 0].detach().float().cpu(), features, positions), []
        each = found[0, :, 0] if "sliding_window_shapes" in arguments else reduce_dimensions(found[0], self.reduce)
        tokens[positions] = each.detach().float().cpu()
        row = sum_over_units(query, tokens.expand(len(query.rows), -1))[g]
        return row, [] if delta is None else [float(delta.mean())]

    @staticmethod
    def _of_features(
        query: Query, g: int, values: Float[Tensor, " positions"], features: Mapping[int, int], positions: list[int]
    ) -> Float[Tensor, " units"]:
        row = torch.full((len(query.units),), torch.nan)
        value_of = {features[position]: float(value) for position, value in zip(positions, values, strict=True)}
        for feature, unit in enumerate(query.visible[g].nonzero().flatten().tolist()):
            row[unit] = value_of[feature]
        return row

    def _arguments(self, cls: Any, rows: Float[Tensor, "1 positions dim"], base: Tensor) -> dict[str, Any]:
        names, given = _names(cls.attribute), dict(self.arguments)
        if "baselines" in names:
            given["baselines"] = base.expand_as(rows).clone()
        if "perturbations_per_eval" in names:
            given.setdefault("perturbations_per_eval", BATCH)
        if "sliding_window_shapes" in names:
            given.setdefault("sliding_window_shapes", (1, rows.shape[-1]))
        return given


class _Function:
    """What Captum explains: from rows at some positions to the objective, [batch, positions, dim] to [batch]."""

    def __init__(self, engine: Engine, g: int, positions: tuple[int, ...], objective: Objective) -> None:
        self.engine, self.g, self.positions, self.objective = engine, g, positions, objective

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        ((_, found),) = self.engine.distributions([self.perturbation(rows)])
        return self.objective(found[:, 0].clamp_min(torch.finfo(torch.float32).tiny).log())

    def perturbation(self, rows: Float[Tensor, "batch positions dim"]) -> Perturbation:
        """All rows of a batch, as samples of one perturbation."""
        rows = rows.detach()
        return Perturbation(
            positions=self.positions, samples=len(rows), rows=lambda clean: rows.to(clean), targets=(self.g,)
        )

    def gradients(
        self, rows: Float[Tensor, "batch positions dim"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch positions dim"]]:
        """Objectives and their gradients."""
        values, slopes = rows.new_zeros(len(rows)), torch.zeros_like(rows)
        same = [self.objective] * len(self.engine.query.rows)  # only that of target g is asked for
        for part in gradients(self.engine, [self.perturbation(rows)], same):
            values[part.first : part.last] = part.values
            slopes[part.first : part.last] = part.gradients
        return values, slopes


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that Captum's passes run in the engine's batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: _Function) -> Tensor:
        values, slopes = function.gradients(rows.detach())
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None


def captum_methods() -> list[str]:
    """Names of the methods of the installed Captum that work on embeddings. Raises DependencyError without Captum."""
    attr = _captum()
    classes = [getattr(attr, name) for name in attr.__all__]
    return sorted(cls.__name__ for cls in classes if inspect.isclass(cls) and _works(attr, cls))


def factory(name: str) -> Callable[..., CaptumMethod]:
    """What makes the method behind "captum:NAME", with all hyper-parameters as flat keywords.

    Raises:
        DependencyError: Captum is not installed. UnknownNameError: it has no such method.
    """
    cls = _class_of(name)
    return FlatFactory(
        make=CaptumMethod, name=name, fields=("baseline", "score", "reduce"), constructor=_constructor(cls)
    )


def _captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise DependencyError(
            "Captum's methods need Captum; install it with: pip install 'noiser[captum]' (or pip install captum)."
        ) from error
    return captum.attr


def _class_of(name: str) -> Any:
    attr, known = _captum(), captum_methods()
    if name in REFUSED:
        raise ParameterError(f"Captum's {name} {REFUSED[name]}; expected one of {', '.join(known)}.")
    if name not in known:
        hint = "Layer and neuron methods attribute to what is inside a model, not to its input."
        raise UnknownNameError("method", f"captum:{name}", [f"captum:{other}" for other in known], hint)
    return getattr(attr, name)


def _works(attr: Any, cls: Any) -> bool:
    """Whether a class explains a function of its input, and needs nothing but the function."""
    if not issubclass(cls, attr.Attribution) or cls.__name__ in REFUSED or "attribute" not in vars(cls):
        return False
    parameters = list(inspect.signature(cls).parameters.values())
    return (
        [parameter.name for parameter in parameters[:1]] == ["forward_func"]
        and all(parameter.default is not inspect.Parameter.empty for parameter in parameters[1:])
        and "inputs" in _names(cls.attribute)
    )


def _arguments(self, cls: Any, rows: Float[Tensor, "1 positions dim"], base: Tensor) -> dict[str, Any]:
    names, given = _names(cls.attribute), dict(self.arguments)
    if "baselines" in names:
        given["baselines"] = base.expand_as(rows).clone()
    if "perturbations_per_eval" in names:
        given.setdefault("perturbations_per_eval", BATCH)
    if "sliding_window_shapes" in names:
        given.setdefault("sliding_window_shapes", (1, rows.shape[-1]))
    return given


class _Function:
    """What Captum explains: from rows at some positions to the objective, [batch, positions, dim] to [batch]."""

    def __init__(self, engine: Engine, g: int, positions: tuple[int, ...], objective: Objective) -> None:
        self.engine, self.g, self.positions, self.objective = engine, g, positions, objective

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        ((_, found),) = self.engine.distributions([self.perturbation(rows)])
        return self.objective(found[:, 0].clamp_min(torch.finfo(torch.float32).tiny).log())

    def perturbation(self, rows: Float[Tensor, "batch positions dim"]) -> Perturbation:
        """All rows of a batch, as samples of one perturbation."""
        rows = rows.detach()
        return Perturbation(
            positions=self.positions, samples=len(rows), rows=lambda clean: rows.to(clean), targets=(self.g,)
        )

    def gradients(
        self, rows: Float[Tensor, "batch positions dim"]
    ) -> tuple[Float[Tensor, " batch"], Float[Tensor, "batch positions dim"]]:
        """Objectives and their gradients."""
        values, slopes = rows.new_zeros(len(rows)), torch.zeros_like(rows)
        same = [self.objective] * len(self.engine.query.rows)  # only that of target g is asked for
        for part in gradients(self.engine, [self.perturbation(rows)], same):
            values[part.first : part.last] = part.values
            slopes[part.first : part.last] = part.gradients
        return values, slopes


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that Captum's passes run in the engine's batches."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: _Function) -> Tensor:
        values, slopes = function.gradients(rows.detach())
        ctx.save_for_backward(slopes)
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None


def captum_methods() -> list[str]:
    """Names of the methods of the installed Captum that work on embeddings. Raises DependencyError without Captum."""
    attr = _captum()
    classes = [getattr(attr, name) for name in attr.__all__]
    return sorted(cls.__name__ for cls in classes if inspect.isclass(cls) and _works(attr, cls))


def factory(name: str) -> Callable[..., CaptumMethod]:
    """What makes the method behind "captum:NAME", with all hyper-parameters as flat keywords.

    Raises:
        DependencyError: Captum is not installed. UnknownNameError: it has no such method.
    """
    cls = _class_of(name)
    return FlatFactory(
        make=CaptumMethod, name=name, fields=("baseline", "score", "reduce"), constructor=_constructor(cls)
    )


def _captum() -> Any:
    try:
        import captum.attr
    except ImportError as error:
        raise DependencyError(
            "Captum's methods need Captum; install it with: pip install 'noiser[captum]' (or pip install captum)."
        ) from error
    return captum.attr


def _class_of(name: str) -> Any:
    attr, known = _captum(), captum_methods()
    if name in REFUSED:
        raise ParameterError(f"Captum's {name} {REFUSED[name]}; expected one of {', '.join(known)}.")
    if name not in known:
        hint = "Layer and neuron methods attribute to what is inside a model, not to its input."
        raise UnknownNameError("method", f"captum:{name}", [f"captum:{other}" for other in known], hint)
    return getattr(attr, name)


def _works(attr: Any, cls: Any) -> bool:
    """Whether a class explains a function of its input, and needs nothing but the function."""
    if not issubclass(cls, attr.Attribution) or cls.__name__ in REFUSED or "attribute" not in vars(cls):
        return False
    first, *others = list(inspect.signature(cls).parameters.values()) or [None]
    return (
        first is not None
        and first.name == "forward_func"
        and all(other.default is not inspect.Parameter.empty for other in others)
        and "inputs" in _names(cls.attribute)
    )


def _arguments(cls: Any) -> tuple[str, ...]:
    ours = (*OURS, "self", "kwargs", "return_input_shape")
    return tuple(name for name in _names(cls.attribute) if name not in ours)


def _constructor(cls: Any) -> tuple[str, ...]:
    return tuple(name for name in _names(cls) if name != "forward_func")


def _names(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _features(query: Query, g: int) -> dict[int, int]:
    """Captum's feature of each position of the units before a target; features are numbered from 0."""
    seen: list[int] = query.visible[g].nonzero().flatten().tolist()
    return {position: feature for feature, unit in enumerate(seen) for position in query.units[unit].token_indices}


def _movable_before(query: Query, g: int) -> list[int]:
    return [position for position in movable_positions(query) if position <= query.rows[g]]
