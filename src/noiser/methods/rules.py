"""Rules: whether an answer stays, as an OR of ANDs of units, fitted to a boolean table.

A table has the inputs that were run, `kept` [inputs, units], and for each of them whether the
answer stays. A term is a tuple of unit numbers, from 1 on: all of them are needed. A negative
number is the unit of "unless", which must not be there. The rule `((1, 4), (6, -2))` reads
"[1] and [4], or [6] unless [2]". A term without a needed unit comes last: `((5,), (-1,))` reads
"[5], or unless [1]".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

Term = tuple[int, ...]
"""Unit numbers from 1 on, ascending; at the end perhaps a negative one, the unit of "unless"."""

Terms = tuple[Term, ...]
"""A rule: the answer stays if any of the terms holds. No term is "never", an empty one "always"."""

NEVER: Terms = ()
ALWAYS: Terms = ((),)

MOST_TERMS = 3
"""A rule has at most so many terms."""

MOST_UNITS_OF_TERM = 3
"""A term needs at most so many units."""

CANDIDATES = 4
"""Terms are made of so many units, those with the largest mean effect."""

OPPONENTS = 2
"""So many units may stand after "unless", those with the most negative mean effect."""

PRICE_OF_UNIT = 1.5
PRICE_OF_TERM = 0.75
"""Prices in errors on the fitting inputs. At half the price of a unit, rules over twelve sentences
fit noise: on 10 development prompts with a copied fact, both copies were found on 2; at this price,
on 4."""

EQUIVALENT_DRAWS = 85
"""The total weight of all inputs when every one is run: as many as are run to fit the rule of
twelve units, (1 + PER_UNIT) * 12 + 1 with the `PER_UNIT` of `noiser.explain.rule_tables`."""

KEEP = (0.4, 0.95)
"""Each input draws its own chance to keep a unit, uniformly from this range. Around ½ too little of
the prompt is left, and a model guesses from any sentence; near 1, either of two alternatives is
nearly always there, so an "or" is not seen."""

ALL_INPUTS = 6
"""Up to this many units, all inputs are run."""


# ---- inputs -------------------------------------------------------------------------------------


def every_input(units: int) -> Bool[Tensor, "inputs units"]:
    """All inputs of some units, from none kept to all kept."""
    numbers = torch.arange(2**units)
    places = torch.arange(units - 1, -1, -1)
    return (numbers[:, None] >> places) % 2 == 1


def draw_inputs(
    count: int, units: int, rng: torch.Generator, taken: set[bytes] | None = None
) -> Bool[Tensor, "count units"]:
    """Random inputs, each with a chance of its own to keep a unit; none of them is in `taken`."""
    low, high = KEEP
    rows: list[Tensor] = []
    while len(rows) < count:
        numbers = torch.rand(units + 1, generator=rng, dtype=torch.float32)
        chance = low + (high - low) * numbers[0]
        row = numbers[1:] < chance
        if not taken or row.numpy().tobytes() not in taken:
            rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, units, dtype=torch.bool)


def weights_of(kept: Bool[np.ndarray, "inputs units"]) -> Float64[np.ndarray, " inputs"]:
    """The weights of all inputs: their probabilities to be drawn, in all `EQUIVALENT_DRAWS`."""
    units = kept.shape[1]
    size = kept.sum(1)
    low, high = KEEP
    # The mean of p^size (1 - p)^(units - size) over p, by Gauss and Legendre: exact.
    nodes, node_weights = np.polynomial.legendre.leggauss(units + 1)
    chances = low + (high - low) * (nodes + 1) / 2
    weights = np.zeros(len(kept))
    for chance, weight in zip(chances, node_weights / 2, strict=True):
        keeps_these = chance**size
        removes_the_rest = (1 - chance) ** (units - size)
        weights += weight * keeps_these * removes_the_rest
    return EQUIVALENT_DRAWS * weights / weights.sum()


# ---- rules --------------------------------------------------------------------------------------


def holds(terms: Terms, kept: Bool[np.ndarray, "inputs units"]) -> Bool[np.ndarray, " inputs"]:
    """Whether a rule says that the answer stays.

    >>> holds(((1, -2),), np.array([[True, False], [True, True]])).tolist()
    [True, False]
    """
    result = np.zeros(len(kept), dtype=bool)
    for term in terms:
        needed = [number - 1 for number in term if number > 0]
        opponents = [-number - 1 for number in term if number < 0]
        has_all_needed = kept[:, needed].all(1)
        has_opponent = kept[:, opponents].any(1)
        result |= has_all_needed & ~has_opponent
    return result


class Fit(NamedTuple):
    """The rule with the least cost, and whether it is told apart from the next best one.

    Attributes:
        terms: the rule, its terms by their first units; one without a needed unit is the last.
        clear: whether no rule with other predictions costs nearly as little. The gap of two costs
            is small where it is within a standard error of their difference of errors.
    """

    terms: Terms
    clear: bool


def fit(
    kept: Bool[np.ndarray, "inputs units"],
    stays: Bool[np.ndarray, " inputs"],
    weights: Float64[np.ndarray, " inputs"] | None = None,
) -> Fit:
    """The rule with the least weighted errors plus its price.

    Equal costs go to the rule with fewer units, then to the one of earlier units. A unit either
    speaks for the answer, by its mean effect, and is then in no "unless", or against it. If the
    answer stays with all units, a rule that denies that is not taken.
    """
    if weights is None:
        weights = np.ones(len(kept))
    terms = _terms(_mean_effects(kept, stays, weights))
    # The last row stands for the terms that a rule does not have.
    predictions = np.zeros((len(terms) + 1, len(kept)), dtype=bool)
    for index, term in enumerate(terms):
        predictions[index] = holds((term,), kept)
    rules = _rules(tuple(terms))
    predicted = np.zeros((len(rules), len(kept)), dtype=bool)
    for place in range(MOST_TERMS):
        predicted |= predictions[rules[:, place]]
    errors = (predicted != stays) @ weights

    lengths = np.array([*map(len, terms), 0])  # of a term that a rule does not have: 0
    units = lengths[rules].sum(1)
    terms_of_rule = (rules < len(terms)).sum(1)
    costs = errors + PRICE_OF_UNIT * units + PRICE_OF_TERM * terms_of_rule
    costs[_denies_the_whole(kept, stays, predicted)] = math.inf

    # Costs are compared as rounded numbers: they are sums in any order.
    costs = costs.round(9)
    tied = (costs == costs.min()).nonzero()[0]
    named = [_named(terms, rules[index]) for index in tied]

    def simplicity(place: int) -> tuple[int, list[tuple[int, ...]]]:
        """The number of units of a tied rule, then its units; the smallest is taken."""
        return int(units[tied[place]]), _order(named[place])

    simplest = min(range(len(tied)), key=simplicity)
    best = tied[simplest]

    differs = (predicted != predicted[best]) @ weights
    gaps = costs - costs[best]
    # Where two rules differ on D inputs, their numbers of errors differ by ±√D by chance.
    is_close = (differs > 0) & (gaps < np.sqrt(differs))
    return Fit(named[simplest], clear=not is_close.any())


def _mean_effects(
    kept: Bool[np.ndarray, "inputs units"],
    stays: Bool[np.ndarray, " inputs"],
    weights: Float64[np.ndarray, " inputs"],
) -> Float64[np.ndarray, " units"]:
    """How much more often the answer stays with each unit than without it."""
    effects: list[float] = []
    for column in kept.T:
        if column.all() or not column.any():
            effects.append(0.0)
            continue
        with_unit = np.average(stays[column], weights=weights[column])
        without = np.average(stays[~column], weights=weights[~column])
        effects.append(float(with_unit - without))
    return np.array(effects).round(9)


def _terms(effects: Float64[np.ndarray, " units"]) -> list[Term]:
    """All terms of the units that matter most; the empty one, and those of "unless" alone, too."""
    strongest_first: list[int] = np.argsort(-effects, kind="stable").tolist()
    speaking_for = [unit for unit in strongest_first[:CANDIDATES] if effects[unit] > 0]
    most_against_first = strongest_first[::-1]
    against = [unit for unit in most_against_first[:OPPONENTS] if effects[unit] < 0]

    needed_numbers = [unit + 1 for unit in sorted(speaking_for)]
    opponents: list[Term] = [()]
    opponents += [(-(unit + 1),) for unit in sorted(against)]
    terms: list[Term] = []
    for size in range(MOST_UNITS_OF_TERM + 1):
        for needed in itertools.combinations(needed_numbers, size):
            terms += [(*needed, *opponent) for opponent in opponents]
    return terms


@cache
def _rules(terms: Terms) -> Int64[np.ndarray, "rules 3"]:
    """Every rule as indices of its terms; `len(terms)` in the places of terms it does not have.

    No term implies another one, and at most one has no needed unit: "unless [1], or unless [2]"
    would only say of two units that they are not both there.
    """
    nothing = len(terms)
    needed = [{number for number in term if number > 0} for term in terms]
    opponents = [{number for number in term if number < 0} for term in terms]
    rules = [(nothing,) * MOST_TERMS]
    rules += [(index, nothing, nothing) for index in range(nothing)]

    def implies(one: int, other: int) -> bool:
        return needed[one] >= needed[other] and opponents[one] >= opponents[other]

    def stand_together(one: int, other: int) -> bool:
        has_units = needed[one] or needed[other]
        return bool(has_units) and not implies(one, other) and not implies(other, one)

    for one, other in itertools.combinations(range(nothing), 2):
        if stand_together(one, other):
            rules.append((one, other, nothing))
            for third in range(other + 1, nothing):
                if stand_together(one, third) and stand_together(other, third):
                    rules.append((one, other, third))
    return np.array(rules)


def _named(terms: Sequence[Term], rule: Int64[np.ndarray, " 3"]) -> Terms:
    """The terms of a rule, by their first units; one without a needed unit is the last."""
    indices: list[int] = rule.tolist()
    chosen = [terms[index] for index in indices if index < len(terms)]
    return tuple(sorted(chosen, key=lambda term: (not _needs_a_unit(term), _order_of_term(term))))


def _needs_a_unit(term: Term) -> bool:
    return any(number > 0 for number in term)


def _order_of_term(term: Term) -> tuple[int, ...]:
    return tuple(abs(number) for number in term)


def _order(terms: Terms) -> list[tuple[int, ...]]:
    return [_order_of_term(term) for term in terms]


def _denies_the_whole(
    kept: Bool[np.ndarray, "inputs units"],
    stays: Bool[np.ndarray, " inputs"],
    predicted: Bool[np.ndarray, "rules inputs"],
) -> Bool[np.ndarray, " rules"]:
    """The rules by which the answer would not be what it is; "never", the first, is no rule."""
    stays_with_all = np.flatnonzero(kept.all(1) & stays)
    denies = np.zeros(len(predicted), dtype=bool)
    if len(stays_with_all):
        denies[1:] = ~predicted[1:, stays_with_all[0]]
    return denies


# ---- how good a rule is -------------------------------------------------------------------------


def smallest_flip(terms: Terms, units: int) -> Term:
    """The fewest units of a rule without which it says something else of the whole prompt.

    None, `()`, for "always" and "never".

    >>> smallest_flip(((1, 4), (6,)), 6)
    (1, 6)
    """
    whole = np.ones((1, units), dtype=bool)
    numbers = sorted({abs(number) for term in terms for number in term})
    for size in range(1, len(numbers) + 1):
        for removed in itertools.combinations(numbers, size):
            kept = whole.copy()
            kept[:, [number - 1 for number in removed]] = False
            if holds(terms, kept)[0] != holds(terms, whole)[0]:
                return removed
    return ()


def in_words(terms: Terms) -> str:
    """A rule as text.

    >>> in_words(((1, 4), (6, -2)))
    '[1] and [4], or [6] unless [2]'
    """
    return ", or ".join(term_in_words(term) for term in terms) or "never"


def term_in_words(term: Term) -> str:
    """A term as text, such as "[1] and [4] unless [2]"."""
    needed = " and ".join(f"[{number}]" for number in term if number > 0)
    opponents = "".join(f"unless [{-number}]" for number in term if number < 0)
    return " ".join(part for part in (needed, opponents) if part) or "always"
