"""What methods and metrics ask of an engine, and what it answers: plain data, on the CPU.

A method is a generator. It yields requests, is sent their answers, and returns its result:

    effects: EffectTable = yield Effects([Replace(unit.token_indices) for unit in query.units])
    return Scores(scores=effects.score.T)

All requests of one generator are about one `Query`: its tokens, targets and foil.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from noiser.engine.perturbation import Baseline, Perturbation
from noiser.engine.rules import Rules
from noiser.engine.scores import Read

T = TypeVar("T")

ScoreName = Literal["prob", "logprob", "hellinger"]
ValueName = Literal["prob", "logprob", "logit", "hellinger", "squared"]


class Request:
    """Something that an engine answers."""


Steps = Generator[Request, Any, T]
"""A method or metric at work: yields requests, is sent answers, returns its result."""


# ---- what is predicted under perturbations --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Effects(Request):
    """What each perturbation does to each target; answered by an `EffectTable`.

    Attributes:
        perturbations: the changed inputs. The mean distribution over a perturbation's samples is what counts.
        score: "prob", the drop of p(target), or of p(target) - p(foil); "logprob", that of its logarithm; "hellinger",
            the distance between the whole distributions. Of a span "prob" is about the geometric mean of its tokens'
            probabilities, "logprob" about the sum of log p, and "hellinger" is the root mean square of the distances.
        leads: whether flips, leads and leaders are wanted too. They take whole distributions, which are long.
        expected: token-forwards that the whole method is likely to take, for progress; 0 if this request is the last.
    """

    perturbations: Sequence[Perturbation]
    score: ScoreName = "prob"
    leads: bool = True
    expected: float = 0.0


class Effect(NamedTuple):
    """What one perturbation does to one target; see `EffectTable`."""

    score: float
    stderr: float
    flips: bool
    lead: float


@dataclass(frozen=True, kw_only=True, eq=False)
class EffectTable:
    """Effects of perturbations on targets; NaN (or False, or -1) where one was not asked about a target, or for leads.

    Attributes:
        score: what the prediction loses, signed so that a loss counts positive.
        stderr: standard error of the score over the samples, by the delta method; NaN for a single one.
        flips: whether the model changes its mind: the most probable token is another one than without perturbation, at
            any of the target's tokens; with a foil, the other one of the pair leads.
        lead: log odds of the model's own token against its strongest rival (of target against foil), in parts of what
            they are without perturbation: 1 for no change, negative after a flip. Of a span the smallest of its
            tokens'; `leader` and `leader_probability` are then about the token that has it.
        probability: of the target.
        probability_stderr: its standard error; NaN for a single sample.
        foil_probability: of the foil; 0 without one.
        leader: id of the most probable token.
        leader_probability: its probability.
        clean_lead: log odds, without perturbation, of what `lead` is in parts of; of a span the smallest.
        influence: for each perturbation [samples, targets], each sample's influence on the score, by the delta method.
    """

    score: Float64[Tensor, "perturbations targets"]
    stderr: Float64[Tensor, "perturbations targets"]
    flips: Bool[Tensor, "perturbations targets"]
    lead: Float64[Tensor, "perturbations targets"]
    probability: Float64[Tensor, "perturbations targets"]
    probability_stderr: Float64[Tensor, "perturbations targets"]
    foil_probability: Float64[Tensor, "perturbations targets"]
    leader: Int[Tensor, "perturbations targets"]
    leader_probability: Float64[Tensor, "perturbations targets"]
    clean_lead: Float64[Tensor, " targets"]
    influence: tuple[Float64[Tensor, "_samples targets"], ...] = ()

    def rows(self) -> Iterator[list[Effect]]:
        """For each perturbation its effects, one per target."""
        columns = (self.score, self.stderr, self.flips, self.lead)
        for row in zip(*(column.tolist() for column in columns), strict=True):
            yield [Effect(*values) for values in zip(*row, strict=True)]


@dataclass(frozen=True, eq=False)
class Values(Request):
    """A number for each sample of each perturbation, not their mean; answered by a `ValueTable`.

    Attributes:
        perturbations: the changed inputs.
        value: "prob", p(target); "logprob", log p(target); "logit", log p / (1 - p); with a foil, p(target) - p(foil),
            and for the other two log p(target) / p(foil). "hellinger" and "squared" are distances to the clean
            distribution, without a foil: sqrt(½ Σ (√p - √q)²), and Σ (√p - √q)² / √2 of the published script. Of a
            span "prob" is the geometric mean of its tokens' p, "logprob" log Πp, "logit" log Πp / (1 - Πp), "hellinger"
            the root mean square of the tokens' distances and "squared" the mean.
    """

    perturbations: Sequence[Perturbation]
    value: ValueName = "prob"


@dataclass(frozen=True, kw_only=True, eq=False)
class ValueTable:
    """Values under perturbations.

    Attributes:
        values: for each perturbation [samples, targets that it was asked about].
        clean: [targets], the value without perturbation; 0 for distances.
    """

    values: tuple[Float64[Tensor, "_samples _targets"], ...]
    clean: Float64[Tensor, " targets"]


# ---- gradients, relevance, attention --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Path:
    """Points `base + α (x + shift - base)` on a straight path from a baseline row to the clean rows x.

    Attributes:
        positions: the tokens that move, all together; the others stay as they are.
        targets: indices of the targets that are read; None for all.
        baseline: name of the row where the path begins, at every position.
        alphas: points on the path, 0 for the baseline and 1 for the input.
        weights: of the points in an integral along the path.
        shift: noise [positions, dim] that is added to the end of the path; None for none.
    """

    positions: tuple[int, ...]
    targets: tuple[int, ...] | None = None
    baseline: Baseline = "zero"
    alphas: Sequence[float] = (1.0,)
    weights: Sequence[float] = (1.0,)
    shift: Float[Tensor, "positions dim"] | None = None


@dataclass(frozen=True, eq=False)
class Integrals(Request):
    """The request for integrals of a score's gradient along paths; answered by an `IntegralTable`.

    Attributes:
        paths: a path with one point at 1, of weight 1, is the gradient times the input (minus the baseline).
        read: the score that is differentiated, as `noiser.engine.scores` has them.
    """

    paths: Sequence[Path]
    read: Read


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegralTable:
    """Integrals along paths.

    Attributes:
        contributions: [targets, length, dim], Σ over paths and points of weight × gradient × direction of the path.
        sums: [paths, targets, length], each path's contributions summed over dimensions.
    """

    contributions: Float[Tensor, "targets length dim"]
    sums: Float[Tensor, "paths targets length"]


@dataclass(frozen=True, eq=False)
class Relevance(Request):
    """The request for one backward pass per target by rules in place of derivatives; answered by a `RelevanceTable`.

    Attributes:
        rules: what takes the place of derivatives.
        read: the score that relevance starts from.
        reference: the input at the beginning of this path, and the targets that are explained against it; None: no
            reference, and all targets.
    """

    rules: Rules
    read: Read
    reference: Path | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class RelevanceTable:
    """Relevance of tokens.

    Attributes:
        values: [the reference's targets or all, 1 or 2], the score of the clean input and of the reference.
        contributions: [targets, length], each token's Σ_d (x - reference) × gradient, float64.
    """

    values: Float[Tensor, "targets inputs"]
    contributions: Float64[Tensor, "targets length"]


@dataclass(frozen=True, eq=False)
class Attentions(Request):
    """The request for attention weights of the clean input: answered by a list of [length, length], one for each layer
    with attention, mean over heads, float32.
    """


# ---- the rest -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Clean(Request):
    """What the model says without perturbation; answered by `CleanStats`."""


class CleanStats(NamedTuple):
    """Probability and rank (1 for the most probable) of every target, and of the foil at the first one.

    Of a span the geometric mean of its tokens' probabilities, and the largest of their ranks.
    """

    probabilities: list[float]
    ranks: list[int]
    foil_probability: float | None
    foil_rank: int | None


@dataclass(frozen=True, eq=False)
class Spent(Request):
    """What has been run so far; answered by `Counters`."""


class Counters(NamedTuple):
    """Work so far, the clean sequence's own pass apart.

    Attributes:
        token_forwards: tokens that have been run; a backward pass counts as much as a forward pass.
        passes: forward and backward passes.
        head_rows: rows of logits.
        left_out: the most probability that any distribution has on tokens that a server did not send; a distance that
            is read of it is off by at most 2 √left_out.
    """

    token_forwards: int = 0
    passes: int = 0
    head_rows: int = 0
    left_out: float = 0.0


@dataclass(frozen=True, eq=False)
class Call(Request):
    """A call of another library that runs the model by itself: its result is the answer.

    Attributes:
        function: called with the query's `noiser.engine.Session`, which has the model, the clean rows and baselines,
            answers other requests at once (`ask`, `run`), and counts what the library runs (`count`).
    """

    function: Callable[[Any], Any]
