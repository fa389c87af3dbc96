"""Captum's methods as methods of Noiser: `method="captum:ShapleyValueSampling"`.

Captum sees a function of the rows of the embedding table that may change, and nothing else: special tokens and
template text stay as they are, each target is a call of its own, and the engine runs what Captum asks for in batches
behind the clean prefix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Engine, Objective, ObjectiveScore
from noiser.errors import ModelError, NoiserError, ParameterError
from noiser.integrations.captum_catalog import arguments_of, captum_methods, class_of, constructor_of, names_of
from noiser.integrations.captum_function import TargetFunction
from noiser.integrations.isolation import Pause, seeded
from noiser.integrations.keywords import FlatFactory, check_keywords
from noiser.methods.baseline import BASELINES, BaselineName, baseline_row
from noiser.methods.gradients import Reduce, objectives_of, reduce_dimensions
from noiser.methods.protocol import Scores, movable_positions, sum_over_units
from noiser.model.memory import is_out_of_memory
from noiser.model.query import Query
from noiser.version import version_of

__all__ = ["CaptumMethod", "captum_methods", "factory"]

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
            tokenizer lacks the baseline's token, or Captum refuses the arguments or the prompt.
        ModelError: Captum failed (when called).
    """

    name: str
    baseline: BaselineName = field(default="zero", kw_only=True)
    score: ObjectiveScore = field(default="prob", kw_only=True)
    reduce: Reduce = field(default="sum", kw_only=True)
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)
    constructor: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True)

    def __post_init__(self) -> None:
        cls = class_of(self.name)
        check_choice("baseline", self.baseline, BASELINES)
        check_choice("score", self.score, get_args(ObjectiveScore))
        check_choice("reduce", self.reduce, get_args(Reduce))
        check_keywords(f"{self.name}.attribute", self.arguments, arguments_of(cls))
        check_keywords(self.name, self.constructor, constructor_of(cls))

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
        with seeded(generator, engine.lm.device) as pause:
            for g, objective in enumerate(objectives):
                if query.visible[g].any():
                    scores[g], delta = self._of_target(engine, g, objective, base, pause)
                    deltas += delta
                with pause():
                    engine.report(engine.token_forwards * len(objectives) / (g + 1))
        return Scores(
            scores=scores,
            info={
                "captum": version_of("captum"),
                "frozen_tokens": "kept",
                "token_forwards": engine.token_forwards,
                "passes": engine.passes,
                **({"delta": deltas} if deltas else {}),
            },
        )

    def _of_target(
        self, engine: Engine, g: int, objective: Objective, base: Float[Tensor, " dim"], pause: Pause
    ) -> tuple[Float[Tensor, " units"], list[float]]:
        """Scores for one target, and the convergence delta where it was asked for."""
        cls, query = class_of(self.name), engine.query
        positions, features = _movable_before(query, g), None
        if "feature_mask" in names_of(cls.attribute):
            positions, features = _features(query, g)
        function = TargetFunction(engine, g, tuple(positions), objective, pause)
        rows = engine.table_rows[positions][None].clone()
        arguments = self._arguments(cls, rows, base)
        replaces = features is not None or "sliding_window_shapes" in arguments
        if features is not None:
            arguments["feature_mask"] = features[:, None].to(rows.device).expand(rows.shape).contiguous()
        with _explained(self):
            found = cls(function, **self.constructor).attribute(rows.requires_grad_(not replaces), **arguments)
        found, delta = found if isinstance(found, tuple) else (found, None)
        # What is replaced as a whole has one number, which Captum gives to all its dimensions and tokens.
        each = found[0, :, 0] if replaces else reduce_dimensions(found[0], self.reduce)
        tokens = torch.zeros(len(query.encoding.token_ids))
        tokens[positions] = each.detach().float().cpu()
        if features is not None:
            tokens[[i for unit in query.units for i in unit.token_indices[1:]]] = 0
        row = sum_over_units(query, tokens.expand(len(query.rows), -1))[g]
        return row, [] if delta is None else [float(delta.mean())]

    def _arguments(self, cls: Any, rows: Float[Tensor, "1 positions dim"], base: Tensor) -> dict[str, Any]:
        names, given = names_of(cls.attribute), {name: _as_tuple(value) for name, value in self.arguments.items()}
        if "baselines" in names:
            given["baselines"] = base.expand_as(rows).clone()
        if "perturbations_per_eval" in names:
            given.setdefault("perturbations_per_eval", BATCH)
        if "sliding_window_shapes" in names:
            given.setdefault("sliding_window_shapes", (1, rows.shape[-1]))
        return given


@contextlib.contextmanager
def _explained(method: CaptumMethod) -> Generator[None]:
    """What Captum raises, as errors that say which settings it was given."""
    try:
        yield
    except NoiserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refused = isinstance(error, AssertionError | LookupError | TypeError | ValueError)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise (ParameterError if refused else ModelError)(
            f"Captum's {method.name} cannot take this prompt with arguments={dict(method.arguments)} and "
            f"constructor={dict(method.constructor)} ({text}). Change them, or use another method; `noiser methods` "
            "lists those that need no Captum."
        ) from error


def _as_tuple(value: Any) -> Any:
    """Lists, which is what JSON has, as the tuples that Captum takes."""
    return tuple(map(_as_tuple, cast("list[Any]", value))) if isinstance(value, list) else value


def factory(name: str) -> Callable[..., CaptumMethod]:
    """What makes the method behind "captum:NAME", with all hyper-parameters as flat keywords.

    Raises:
        DependencyError: Captum is not installed. UnknownNameError: it has no such method.
    """
    cls = class_of(name)
    return FlatFactory(
        make=CaptumMethod, name=name, fields=("baseline", "score", "reduce"), constructor=constructor_of(cls)
    )


def _features(query: Query, g: int) -> tuple[list[int], Int[Tensor, " positions"]]:
    """The positions of the units before a target, and the feature that each belongs to, numbered from 0."""
    seen: list[int] = query.visible[g].nonzero().flatten().tolist()
    pairs = sorted((position, i) for i, unit in enumerate(seen) for position in query.units[unit].token_indices)
    return [position for position, _ in pairs], torch.tensor([feature for _, feature in pairs])


def _movable_before(query: Query, g: int) -> list[int]:
    return [position for position in movable_positions(query) if position <= query.rows[g]]
