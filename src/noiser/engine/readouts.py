"""Readouts: which few numbers are read of next-token distributions, on the device, before anything is copied.

A readout has two halves. `measure` makes numbers of the distributions of one perturbation, on their device; `table`
makes the answer of all numbers, on the CPU, after one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor

from noiser.engine.requests import CleanStats, EffectTable, ScoreName, ValueName, ValueTable
from noiser.errors import ParameterError
from noiser.model.language_model import check_finite
from noiser.model.query import Query

Answer = TypeVar("Answer", covariant=True)

TINY = torch.finfo(torch.float32).tiny


def hellinger(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Hellinger distance sqrt(½ Σ (√p - √q)²) between distributions over the last dimension; 0 to 1.

    >>> import torch
    >>> hellinger(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item()
    1.0
    """
    return ((p.sqrt() - q.sqrt()).square().sum(-1) / 2).sqrt()


def squared_hellinger(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Σ (√p - √q)² / √2, which the script published with the Noiser paper takes for it; 0 to √2.

    >>> import torch
    >>> round(squared_hellinger(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])).item(), 4)
    1.4142
    """
    return (p.sqrt() - q.sqrt()).square().sum(-1) / 2**0.5


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"hellinger": hellinger, "squared": squared_hellinger}
"""By name: "hellinger", the definition; "squared", the published script's."""


ROW_BYTES = 2**20
"""Logits that are read at a time where whole distributions are not needed: what a processor's cache holds."""


class Predicted:
    """What a model predicts under one perturbation, made of its logits as far as it is read.

    Args:
        logits: [samples, tokens, vocab], of any precision. A single one that is NaN or infinite makes all that is read
            at its token NaN.
    """

    def __init__(self, logits: Float[Tensor, "samples tokens vocab"]) -> None:
        self._logits = logits

    @cached_property
    def probabilities(self) -> Float[Tensor, "samples tokens vocab"]:
        """The whole distributions, float32."""
        return self._logits.float().softmax(-1)

    def target_and_rest(self, ids: Int[Tensor, " tokens"]) -> Float[Tensor, "samples tokens 2"]:
        """The probability of a token, and of all others together, float32; neither loses digits near 0."""
        rows = self._logits.flatten(0, 1)
        columns = ids.repeat(len(self._logits))[:, None]
        on_cpu = rows.device.type == "cpu"
        size = max(1, ROW_BYTES // (4 * rows.shape[-1])) if on_cpu else max(1, len(rows))
        found: list[Tensor] = []
        for part, column in zip(rows.split(size), columns.split(size), strict=True):
            logits = part.float()
            target = logits.gather(-1, column)[:, 0]
            rest = logits.scatter(-1, column, -torch.inf).logsumexp(-1)
            found.append(torch.stack([target, rest], -1).softmax(-1))
        numbers = torch.cat(found) if found else rows.new_zeros(0, 2, dtype=torch.float32)
        return numbers.unflatten(0, self._logits.shape[:2])


class TokenIndex(NamedTuple):
    """The tokens of some targets.

    Attributes:
        tokens: their indices among all targets' tokens.
        owners: for each, the number of its target among these targets.
        sizes: for each, how many tokens that target has.
    """

    tokens: Int[Tensor, " tokens"]
    owners: Int[Tensor, " tokens"]
    sizes: Int[Tensor, " tokens"]


class CleanRun:
    """The unperturbed next-token distributions of a query, and what every readout compares with.

    Args:
        predicted: at the targets' tokens, one sample.
        query: the tokens, how they make up targets, and the foil.

    Attributes:
        probabilities: [tokens, vocab], float32.
        dtype: what the model computes in.
        target_and_rest: [tokens, 2], of each target's token and of all others together.

    Raises:
        NumericalError: a logit is NaN or infinite.
    """

    def __init__(self, predicted: Predicted, query: Query) -> None:
        self.probabilities, self.foil_id, self.of = predicted.probabilities[0], query.foil_id, query.of
        self.dtype = query.dtype
        check_finite(self.probabilities, self.dtype)
        self.spans = query.target_spans
        self.target_ids: Int[Tensor, " tokens"] = torch.tensor(query.target_ids, device=self.probabilities.device)
        self.target_and_rest = predicted.target_and_rest(self.target_ids)[0]
        self._places: dict[tuple[int, ...], TokenIndex] = {}

    @property
    def targets(self) -> range:
        """Indices of all targets."""
        return range(len(self.spans))

    def tokens(self, targets: Sequence[int]) -> list[int]:
        """Indices of the targets' tokens."""
        return [token for target in targets for token in self.spans[target]]

    def sizes(self, targets: Sequence[int]) -> list[int]:
        """How many tokens each target has."""
        return [len(self.spans[target]) for target in targets]

    def place(self, targets: Sequence[int]) -> TokenIndex:
        """Where the targets' tokens are, on the device, to which the same ones are copied once."""
        key = tuple(targets)
        if key not in self._places:
            sizes = self.sizes(key)
            owners = [number for number, size in enumerate(sizes) for _ in range(size)]
            columns = (self.tokens(key), owners, [sizes[owner] for owner in owners])
            self._places[key] = TokenIndex(*(torch.tensor(c, device=self.probabilities.device) for c in columns))
        return self._places[key]

    @cached_property
    def leaders(self) -> Int[Tensor, " tokens"]:
        """The model's own tokens, on the device; found once, since a vocabulary is long."""
        return self.probabilities.argmax(-1)

    def check(self, numbers: Sequence[Float[Tensor, "_rows _tokens numbers"]]) -> None:
        """Raises NumericalError where a token's first number is NaN, which a NaN or infinite logit makes it."""
        read = [part[..., 0].flatten() for part in numbers if part.numel()]
        if read:
            check_finite(torch.cat(read)[:, None], self.dtype)

    def objective(self, log_p: Float[Tensor, "samples tokens vocab"], target: int) -> Float[Tensor, " samples"]:
        """The query's own number of a target, from log-probabilities at its tokens.

        Raises:
            ParameterError: the function does not return one finite number per sample.
        """
        assert self.of is not None
        check_finite(log_p, self.dtype)
        values: object = self.of(log_p, log_of(self.probabilities[list(self.spans[target])]))
        if not isinstance(values, Tensor) or values.shape != log_p.shape[:1]:
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ParameterError(
                f"The function given as of= returned {got}; expected a tensor of shape [{len(log_p)}], one number per "
                f"sample, from log-probabilities {list(log_p.shape)}: samples, tokens, vocabulary."
            )
        if not values.isfinite().all():
            raise ParameterError(
                "The function given as of= returned NaN or an infinite number; expected finite ones. Keep it from "
                "dividing by 0, and from logarithms of 0."
            )
        return values

    def stats(self) -> CleanStats:
        """What the model says, as plain numbers."""
        p = self.probabilities
        target = p.gather(-1, self.target_ids[:, None])
        foil, rank = None, None
        if self.foil_id is not None:
            foil, rank = float(p[0, self.foil_id]), 1 + int((p[0] > p[0, self.foil_id]).sum())
        numbers = torch.stack([target[:, 0].cpu().double(), 1.0 + (p > target).sum(-1).cpu()], -1)[None]
        sizes = self.sizes(self.targets)
        probabilities = by_target(numbers, sizes, _geometric_mean)[0]
        ranks = by_target(numbers, sizes, lambda tokens: tokens[..., 1].amax(-1))[0]
        return CleanStats(probabilities.tolist(), ranks.long().tolist(), foil, rank)


class Readout(Protocol[Answer]):
    """What is read of predictions."""

    def measure(self, predicted: Predicted, targets: Sequence[int]) -> Float[Tensor, "rows tokens numbers"]:
        """Numbers of one perturbation, on its device; `targets` are the indices of the targets that are there."""
        ...

    def table(self, numbers: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> Answer:
        """The answer, from each perturbation's numbers on the CPU and the targets that it was asked about.

        Raises:
            NumericalError: a logit was NaN or infinite.
        """
        ...


def by_target(
    numbers: Shaped[Tensor, "rows tokens numbers"],
    sizes: Sequence[int],
    reduce: Callable[[Tensor], Tensor],
) -> Shaped[Tensor, "rows targets"]:
    """One number per target, from the numbers of its tokens.

    Args:
        numbers: of all targets' tokens, in order.
        sizes: how many tokens each target has.
        reduce: from [rows, targets, size, numbers], of targets with `size` tokens, to [rows, targets].
    """
    if len(set(sizes)) == 1:
        return reduce(numbers.unflatten(1, (len(sizes), sizes[0])))
    parts = [reduce(part[:, None]) for part in numbers.split(list(sizes), 1)]
    return torch.cat(parts, 1) if parts else numbers.new_zeros(len(numbers), 0)


class EffectReadout:
    """Scores of mean distributions, their standard errors, flips and leads; see `EffectTable`.

    Args:
        clean: the unperturbed run.
        score: "prob", "logprob" or "hellinger" (without a foil).
        leads: whether flips, leads and leaders are wanted too.
    """

    def __init__(self, clean: CleanRun, score: ScoreName, leads: bool = True) -> None:
        self.clean, self.score = clean, score
        self._whole = leads or score == "hellinger" or clean.foil_id is not None or clean.of is not None

    def measure(self, predicted: Predicted, targets: Sequence[int]) -> Float[Tensor, "rows tokens numbers"]:
        """As `_numbers`; without leads from the targets' probabilities alone."""
        if self._whole:
            return self._numbers(predicted.probabilities, targets)
        ids = self.clean.target_ids[self.clean.place(targets).tokens]
        return self._alone(predicted.target_and_rest(ids)[..., 0], targets)

    def _alone(
        self, of_target: Float[Tensor, "samples tokens"], targets: Sequence[int]
    ) -> Float[Tensor, "rows tokens numbers"]:
        target = of_target.mean(0)
        unknown = torch.full_like(target, torch.nan)
        numbers = torch.stack([target, torch.zeros_like(target), *[unknown] * 5], -1)
        on_probability = of_target * self._slope(target, targets)
        return _rows(numbers, of_target / target if self.score == "logprob" else on_probability, on_probability)

    def _numbers(
        self, samples: Float[Tensor, "samples tokens vocab"], targets: Sequence[int]
    ) -> Float[Tensor, "rows tokens numbers"]:
        """Of the mean distribution p of target, foil, own token, rival and leader, and distance; influences by sample.

        By the delta method, a sample's influence on a number is its part of the number's derivative.
        """
        clean = self.clean
        place, mean = clean.place(targets), samples.mean(0) if len(samples) > 1 else samples[0]
        none = torch.zeros_like(mean[:, 0])
        top, tokens = mean.topk(2)
        ids = clean.target_ids[place.tokens][:, None]
        target = mean.gather(-1, ids)[:, 0]
        of_target = samples.gather(-1, ids.expand(len(samples), -1, 1))[..., 0]
        if clean.foil_id is None:
            leaders = clean.leaders[place.tokens]
            own = mean.gather(-1, leaders[:, None])[:, 0]
            rival = torch.where(tokens[:, 0] == leaders, top[:, 1], top[:, 0])
            foil, of_foil = none, torch.zeros_like(of_target)
        else:
            foil, of_foil = mean[:, clean.foil_id], samples[..., clean.foil_id]
            own, rival = target, foil
        sizes = clean.sizes(targets)
        on_probability = of_target * self._slope(target, targets)
        distance = none
        if clean.of is not None:
            distance, influence = self._own(samples, mean, targets)
        elif self.score == "hellinger":
            distance = hellinger(clean.probabilities[place.tokens], mean)
            influence = self._influence_on_distance(samples, mean, distance, sizes, place)
        elif self.score == "logprob":
            influence = of_target / target - (0 if clean.foil_id is None else of_foil / foil)
        else:
            influence = on_probability - of_foil
        numbers = torch.stack([target, foil, own, rival, mean.argmax(-1).to(mean), top[:, 0], distance], -1)
        return _rows(numbers, influence, on_probability)

    def _slope(self, p: Float[Tensor, " tokens"], targets: Sequence[int]) -> Float[Tensor, " tokens"]:
        """That of the geometric mean of a target's probabilities, with respect to each: 1 for a single token."""
        place, logs = self.clean.place(targets), log_of(p)
        mean = by_target(logs[None, :, None], self.clean.sizes(targets), lambda tokens: tokens[..., 0].mean(-1))[0]
        return (mean[place.owners] - logs).exp() / place.sizes

    def table(self, numbers: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> EffectTable:
        """Every perturbation's effects, in one table."""
        clean, sizes = self.clean, self.clean.sizes(self.clean.targets)
        clean.check([part[:1] for part in numbers])
        if self._whole:
            at_rest = self._numbers(clean.probabilities[None], clean.targets)
        else:
            at_rest = self._alone(clean.target_and_rest[None, :, 0], clean.targets)
        at_rest = at_rest[:1].cpu().double()
        filled = torch.full((len(numbers), *at_rest.shape[1:]), torch.nan, dtype=torch.float64)
        influences = [
            torch.full((2, max(1, len(part) - 1), len(sizes)), torch.nan, dtype=torch.float64) for part in numbers
        ]
        for row, influence, part, wanted in zip(filled, influences, numbers, targets, strict=True):
            if len(wanted):
                row[clean.tokens(wanted)] = part[0].double()
                for number, column in enumerate(influence):
                    column[:, list(wanted)] = _sum(part[1:, :, number].double(), clean.sizes(wanted))
        target, foil, own, rival, leader, most, _ = filled.unbind(-1)
        rest = at_rest[0].unbind(-1)
        led = ~leader.isnan()
        clean_lead = log_of(rest[2]) - log_of(rest[3])
        lead = (log_of(own) - log_of(rival)) / torch.where(clean_lead == 0, math.inf, clean_lead)
        changes = leader != rest[4] if clean.foil_id is None else (rest[0] > rest[1]) != (target > foil)
        first = torch.tensor([span[0] for span in clean.spans])
        weakest = first + by_target(lead[..., None], sizes, lambda tokens: tokens[..., 0].argmin(-1))
        probability = by_target(target[..., None], sizes, _geometric_mean)
        return EffectTable(
            score=self._value(at_rest, sizes) - self._value(filled, sizes),
            stderr=stderr_of([influence[0] for influence in influences], len(sizes)),
            flips=by_target((changes & led)[..., None], sizes, lambda tokens: tokens[..., 0].any(-1)),
            lead=lead.gather(1, weakest),
            probability=probability,
            probability_stderr=stderr_of([influence[1] for influence in influences], len(sizes)),
            foil_probability=foil[:, first],
            leader=torch.where(led, leader.nan_to_num(), -1).long().gather(1, weakest),
            leader_probability=most.gather(1, weakest),
            clean_lead=by_target(clean_lead[None, :, None], sizes, lambda tokens: tokens[..., 0].amin(-1))[0],
            influence=tuple(influence[0] for influence in influences),
        )

    def _value(
        self, numbers: Float64[Tensor, "rows tokens numbers"], sizes: Sequence[int]
    ) -> Float64[Tensor, "rows targets"]:
        """What the score is the loss of: the target's probability or its logarithm, less the foil's; or -distance."""
        if self.clean.of is not None:
            return by_target(numbers[..., -1:], sizes, _first)
        if self.score == "hellinger":
            return -by_target(numbers[..., -1:], sizes, _root_mean_square)
        target, foil = (by_target(numbers[..., [i]], sizes, self._scale) for i in (0, 1))
        return target - foil if self.score == "prob" or self.clean.foil_id is not None else target

    def _scale(self, tokens: Float64[Tensor, "rows targets size 1"]) -> Float64[Tensor, "rows targets"]:
        return _geometric_mean(tokens) if self.score == "prob" else log_of(tokens[..., 0]).sum(-1)

    def _own(
        self,
        samples: Float[Tensor, "samples tokens vocab"],
        mean: Float[Tensor, "tokens vocab"],
        targets: Sequence[int],
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, "samples tokens"]]:
        """The query's own number of each target, and its samples' influences, at the target's first token; 0 elsewhere.

        Influences are NaN where the function cannot be differentiated.
        """
        values, influences = torch.zeros_like(mean[:, 0]), torch.zeros_like(samples[..., 0])
        start = 0
        for target, size in zip(targets, self.clean.sizes(targets), strict=True):
            here = slice(start, start + size)
            with torch.enable_grad():
                p = mean[here].detach().clone().requires_grad_()
                value = self.clean.objective(log_of(p)[None], target)
                (slope,) = (
                    torch.autograd.grad(value.sum(), p) if value.requires_grad else (torch.full_like(p, torch.nan),)
                )
            values[start] = value.detach()[0]
            influences[:, start] = torch.einsum("stv,tv->s", samples[:, here], slope)
            start += size
        return values, influences

    def _influence_on_distance(
        self,
        samples: Float[Tensor, "samples tokens vocab"],
        mean: Float[Tensor, "tokens vocab"],
        distance: Float[Tensor, " tokens"],
        sizes: Sequence[int],
        place: TokenIndex,
    ) -> Float[Tensor, "samples tokens"]:
        """Of sqrt(mean_j H_j²), where H² = 1 - Σ √(pq) has the derivative -½ √(p/q) with respect to q."""
        clean = self.clean.probabilities[place.tokens]
        weights = (clean / mean.clamp_min(TINY)).sqrt()
        products = torch.stack([part @ weight for part, weight in zip(samples.unbind(1), weights, strict=True)], 1)
        of_target = by_target(distance[None, :, None], sizes, _root_mean_square)[0][place.owners]
        return 0.5 * products / (2 * place.sizes * of_target).clamp_min(1e-12)


class ValueReadout:
    """One number per sample; see `Values`.

    Args:
        clean: the unperturbed run.
        value: the number's name.
    """

    def __init__(self, clean: CleanRun, value: ValueName) -> None:
        self.clean, self.value = clean, value

    def measure(self, predicted: Predicted, targets: Sequence[int]) -> Float[Tensor, "samples tokens numbers"]:
        """The distance, the query's own number of the target, or the probabilities that a value is made of."""
        if self._whole:
            return self._of_distributions(predicted.probabilities, targets)
        return predicted.target_and_rest(self.clean.target_ids[self.clean.place(targets).tokens])

    def _of_distributions(
        self, samples: Float[Tensor, "samples tokens vocab"], targets: Sequence[int]
    ) -> Float[Tensor, "samples tokens numbers"]:
        clean = self.clean
        if self._is_own:
            spans = samples.split(clean.sizes(targets), 1)
            values = [clean.objective(log_of(span), target) for span, target in zip(spans, targets, strict=True)]
            columns = [value[:, None].expand(span.shape[:2]) for span, value in zip(spans, values, strict=True)]
            return torch.cat(columns, 1)[..., None].detach()
        if self.value in DISTANCES:
            pairs = zip(samples.unbind(1), clean.tokens(targets), strict=True)
            distance = DISTANCES[self.value]
            return torch.stack([distance(clean.probabilities[t].expand_as(p), p) for p, t in pairs], 1)[..., None]
        assert clean.foil_id is not None
        ids = clean.target_ids[clean.place(targets).tokens][:, None].expand(len(samples), -1, 1)
        return torch.stack([samples.gather(-1, ids)[..., 0], samples[..., clean.foil_id]], -1)

    def table(self, numbers: Sequence[Tensor], targets: Sequence[Sequence[int]]) -> ValueTable:
        """Every perturbation's values."""
        every = self.clean.targets
        self.clean.check(numbers)
        if self.value in DISTANCES:
            clean = torch.zeros(len(every), dtype=torch.float64)
        else:
            p, alone = self.clean.probabilities[None], self.clean.target_and_rest[None]
            at_rest = self._of_distributions(p, every) if self._whole else alone
            clean = self._values(at_rest.cpu(), every)[0]
        return ValueTable(
            values=tuple(self._values(part, wanted) for part, wanted in zip(numbers, targets, strict=True)), clean=clean
        )

    @property
    def _whole(self) -> bool:
        """Whether whole distributions are read, or the target's probability alone."""
        return self._is_own or self.value in DISTANCES or self.clean.foil_id is not None

    @property
    def _is_own(self) -> bool:
        return self.clean.of is not None and self.value not in DISTANCES

    def _values(
        self, numbers: Float[Tensor, "samples tokens numbers"], targets: Sequence[int]
    ) -> Float64[Tensor, "samples targets"]:
        return by_target(numbers.double(), self.clean.sizes(targets), self._value)

    def _value(self, tokens: Float64[Tensor, "samples targets size numbers"]) -> Float64[Tensor, "samples targets"]:
        if self._is_own:
            return _first(tokens)
        if self.value == "hellinger":
            return _root_mean_square(tokens)
        if self.value == "squared":
            return tokens[..., 0].mean(-1)
        target, other = tokens.unbind(-1)
        if self.value == "prob":
            return _geometric_mean(tokens) - (0 if self.clean.foil_id is None else other[..., 0])
        value = log_of(target).sum(-1)
        if self.clean.foil_id is not None:
            return value - log_of(other).sum(-1)
        if self.value == "logit":  # 1 - Π p_j is the sum over j of being right before token j and wrong at it
            right = torch.cat([torch.ones_like(target[..., :1]), target[..., :-1].cumprod(-1)], -1)
            return value - log_of((right * other).sum(-1))
        return value


def _geometric_mean(tokens: Float[Tensor, "rows targets size numbers"]) -> Float[Tensor, "rows targets"]:
    """exp(mean log p) of the first number."""
    return tokens[..., 0].pow(1 / tokens.shape[2]).prod(-1)


def _first(tokens: Float[Tensor, "rows targets size numbers"]) -> Float[Tensor, "rows targets"]:
    """The first number of each target's first token."""
    return tokens[..., 0, 0]


def _root_mean_square(tokens: Float[Tensor, "rows targets size 1"]) -> Float[Tensor, "rows targets"]:
    return tokens[..., 0].square().mean(-1).sqrt()


def _rows(
    numbers: Float[Tensor, "tokens numbers"],
    influence: Float[Tensor, "samples tokens"],
    on_probability: Float[Tensor, "samples tokens"],
) -> Float[Tensor, "rows tokens numbers"]:
    """A row of numbers, and one for each sample's influences on the score and the probability."""
    influences = torch.stack([influence, on_probability], -1)
    padding = influences.new_zeros(*influences.shape[:2], numbers.shape[-1] - 2)
    return torch.cat([numbers[None], torch.cat([influences, padding], -1)])


def stderr_of(
    influences: Sequence[Float64[Tensor, "_samples targets"]], targets: int
) -> Float64[Tensor, "perturbations targets"]:
    """Standard errors of numbers, from the influence that each sample has on them; NaN for a single sample."""
    errors = [i.std(0) / len(i) ** 0.5 if len(i) > 1 else torch.full_like(i[0], torch.nan) for i in influences]
    return torch.stack(errors) if errors else torch.zeros(0, targets, dtype=torch.float64)


def _sum(tokens: Float[Tensor, "rows tokens"], sizes: Sequence[int]) -> Float[Tensor, "rows targets"]:
    return by_target(tokens[..., None], sizes, lambda each: each[..., 0].sum(-1))


def log_of(p: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """The logarithm of probabilities, of float32's smallest where they are 0."""
    return p.clamp_min(TINY).log()
