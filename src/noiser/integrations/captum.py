"""Captum's methods as methods of Noiser: `method="captum:ShapleyValueSampling"`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from noiser.engine import Call, Predict, Query, ask, differentiate, set_rows
from noiser.integrations.common import LibraryMethod, check_keywords, imported, names_of, seeded
from noiser.methods.gradients import Reduce, movable_positions, reduce_dimensions
from noiser.methods.protocol import DifferentiableObjective, Scores, sum_over_units
from noiser.model.language_model import LanguageModel
from noiser.registry import version_of
from noiser.types import Baseline

# perturbed inputs that Captum is asked to make at a time; the engine cuts them into batches of its
# own
_BATCH = 32

_OURS = (
    *(
        "forward_func",
        "inputs",
        "baselines",
        "target",
        "additional_forward_args",
        "feature_mask",
        "show_progress",
    ),
    "return_convergence_delta",
)
"""Arguments of Captum's classes and of their `attribute` that the adapter gives."""

_OFFERED = (
    *(
        "FeatureAblation",
        "KernelShap",
        "Lime",
        "Occlusion",
        "ShapleyValueSampling",
        "ShapleyValues",
    ),
    *("GradientShap", "InputXGradient", "IntegratedGradients", "Saliency"),
)
"""Methods that explain a function of embeddings; the others need modules, several inputs or another
method.
"""


@dataclass(frozen=True)
class CaptumMethod(LibraryMethod):
    """A method of `captum.attr` on the rows of the embedding table; special tokens and template
    text stay.

    A perturbation method has the units before the target as its features: a unit that is taken away
    gets the baseline row at each of its tokens. A gradient method moves every token that is not
    frozen, and a unit's score is the sum over its tokens. Captum draws from global random states;
    they follow the seed and are put back.

    Args:
        name: the class's name, such as "ShapleyValueSampling"; `CaptumMethod.names()` lists them.
        baseline: row of a unit that is taken away, where the method has baselines: "zero", "pad",
            "unk" or "mean".
        objective: the explained number: "prob" or "logprob" of the target; with a foil, the
            difference of the two tokens'.
        reduce: from the dimensions of a gradient method to a token's score: "sum" or "l2".
        settings: of Captum's class and its `attribute`, such as `{"n_samples": 50}`.
    """

    library = "Captum"
    hint = (
        "Methods for layers and neurons, and methods that rewrite torch modules, are not offered."
    )
    needs_internals: ClassVar[bool] = True

    baseline: Baseline = field(default="zero", kw_only=True)
    objective: DifferentiableObjective = field(default="prob", kw_only=True)
    reduce: Reduce = field(default="sum", kw_only=True)

    @classmethod
    def _classes(cls) -> dict[str, Any]:
        module = imported("captum.attr", "captum")
        return {name: getattr(module, name) for name in _OFFERED if name in module.__all__}

    def __post_init__(self) -> None:
        super().__post_init__()
        cls = self.class_of(self.name)
        check_keywords(
            self.name, self.settings, names_of(cls, *_OURS) + names_of(cls.attribute, *_OURS)
        )

    async def __call__(self, query: Query, rng: torch.Generator) -> Scores:
        scores = torch.full(query.causal_mask.shape, torch.nan, dtype=torch.float32)
        for target in query.causal_mask.any(-1).nonzero().flatten().tolist():
            scores[target] = await Call(query, partial(self._run, target=target, rng=rng))
        return Scores(scores=scores, info={"captum": version_of("captum"), "frozen_tokens": "kept"})

    def _run(
        self, lm: LanguageModel, query: Query, target: int, rng: torch.Generator
    ) -> Float[Tensor, " units"]:
        cls = self.class_of(self.name)
        features = _features(query, target) if "feature_mask" in names_of(cls.attribute) else {}
        positions = [*features] or [
            i for i in movable_positions(query) if i <= query.target_positions[target][0]
        ]
        rows = query.context.rows[positions][None].clone()
        of_class, of_call = self.split()
        defaults = {
            "baselines": query.baseline(self.baseline).to(rows).expand_as(rows).clone(),
            "perturbations_per_eval": _BATCH,
            "sliding_window_shapes": (1, rows.shape[-1]),
        }
        arguments = {
            name: value for name, value in defaults.items() if name in names_of(cls.attribute)
        }
        arguments |= {key: _as_tuple(value) for key, value in of_call.items()}
        if features:
            numbers = torch.tensor([*features.values()], device=rows.device)
            arguments["feature_mask"] = numbers[:, None].expand(rows.shape).contiguous()
        replaces = bool(features) or "sliding_window_shapes" in arguments
        with seeded(rng, lm.device), self.explained():
            method = cls(
                TargetFunction(lm, query, target, tuple(positions), self.objective), **of_class
            )
            attributions = method.attribute(rows.requires_grad_(not replaces), **arguments)[
                0
            ].detach()
        # A unit that is replaced as a whole has one number, which Captum gives to all its
        # dimensions and tokens.
        per_token = attributions[:, 0] if replaces else reduce_dimensions(attributions, self.reduce)
        tokens = torch.zeros(len(query.encoding.token_ids))
        tokens[positions] = per_token.float().cpu()
        if features:
            tokens[[i for unit in query.units for i in unit.token_indices[1:]]] = 0
        return sum_over_units(query, tokens.expand(len(query.targets), -1))[target]


def _features(query: Query, target: int) -> dict[int, int]:
    """From each position of the units before a target to the number of its unit among them, from 0
    on.
    """
    before: list[int] = query.causal_mask[target].nonzero().flatten().tolist()
    return dict(
        sorted(
            (i, number)
            for number, unit in enumerate(before)
            for i in query.units[unit].token_indices
        )
    )


def _as_tuple(value: Any) -> Any:
    """Lists, as they come from JSON, as the tuples that Captum takes."""
    return tuple(map(_as_tuple, cast("list[Any]", value))) if isinstance(value, list) else value


class TargetFunction:
    """From rows at some positions to the target's score, [batch, positions, dim] to [batch];
    differentiable.
    """

    def __init__(
        self,
        lm: LanguageModel,
        query: Query,
        target: int,
        positions: tuple[int, ...],
        objective: DifferentiableObjective,
    ) -> None:
        self.lm, self.query, self.target, self.positions, self.read = (
            lm,
            query,
            target,
            positions,
            query.objective(objective),
        )

    def __call__(self, rows: Float[Tensor, "batch positions dim"]) -> Float[Tensor, " batch"]:
        if torch.is_grad_enabled() and rows.requires_grad:
            return _Differentiable.apply(rows, self)  # pyright: ignore
        (values,) = ask(
            self.lm,
            Predict(
                self.query, [set_rows(self.positions, rows.detach(), (self.target,))], self.read
            ),
        )
        return values[0].to(rows)


class _Differentiable(torch.autograd.Function):
    """The function with the engine's own gradients, so that all passes run in the engine's
    batches.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, function: TargetFunction) -> Tensor:
        at = function.positions
        perturbations = [set_rows(at, row[None], (function.target,)) for row in rows.detach()]
        slopes = list(differentiate(function.lm, function.query, perturbations, function.read))
        ctx.save_for_backward(torch.stack([slope.gradient[list(at)] for slope in slopes]).to(rows))
        return torch.stack([slope.value for slope in slopes]).to(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (slopes,) = ctx.saved_tensors
        return grads[0][:, None, None] * slopes, None
