"""Relations between units: pairs of one target, and paths through the continuation; in words and as arcs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from noiser.attribution.display import label, labels
from noiser.errors import ParameterError
from noiser.numbers import number_format

if TYPE_CHECKING:
    from noiser.attribution.result import Attribution

WORDS = {"together": ("only together", "with"), "either": ("either would do", "or")}
"""From the kind of a pair to its name, and to the word between its units."""

_MOST, _LEAST = 3, 0.05
"""Pairs of each kind that are put into words, and the part of the influence that a path carries which is drawn."""
_LINE, _WIDTH = 26, 150
"""Pixels: the height of a line, and the width of the arcs."""


class Arc(NamedTuple):
    """A relation between two lines."""

    start: int  # number of a line, from 0 on
    end: int  # number of another line
    weight: float  # strength, 0 to 1, shown as thickness
    style: str = "p"  # class of the arc, which gives its colour: "p" or "n"
    dashed: bool = False


def arcs(lines: Sequence[tuple[str, str]], links: Sequence[Arc]) -> str:
    """The lines, each a number and a plain text, as HTML, with an arc of an SVG on their left for each link."""
    longest, height = (
        max((abs(link.end - link.start) for link in links), default=1),
        _LINE * len(lines),
    )
    paths = "".join(_path(link, longest) for link in sorted(links, key=lambda link: link.weight))
    items = "".join(
        f"<li><span>{escape(number)}</span><bdi>{escape(text)}</bdi></li>" for number, text in lines
    )
    return (
        f'<div class=arcs><svg width={_WIDTH} height={height} viewBox="0 0 {_WIDTH} {height}" aria-hidden=true>'
        f'{paths}</svg><ol style="line-height:{_LINE}px">{items}</ol></div>'
    )


def _path(link: Arc, longest: int) -> str:
    """Half an ellipse, as wide as it is long."""
    top, bottom = sorted(_LINE * (line + 0.5) for line in (link.start, link.end))
    width = 0.95 * _WIDTH * abs(link.end - link.start) / longest
    curve = f"M{_WIDTH} {top:g}A{width:.1f} {(bottom - top) / 2:g} 0 0 0 {_WIDTH} {bottom:g}"
    look = f"stroke-width={0.5 + 5 * link.weight:.2f} opacity={min(1.0, 0.25 + link.weight):.2f}"
    return f'<path class={link.style} d="{curve}" {look}{" stroke-dasharray=5,4" * link.dashed} />'


def sentences(att: Attribution, row: int) -> list[str]:
    """A line for each kind of pair, such as "either would do: “A” or “B” (-1.2 ± 0.1)"; safe to show."""
    lines, names = list[str](), labels(att)
    for kind, (heading, word) in WORDS.items():
        found = [pair for pair in att.pairs if pair.target == row and pair.kind == kind]
        show = number_format([pair.score for pair in found])
        texts = [
            f"“{names[first]}” {word} “{names[second]}” ({show.with_error(score, stderr)})"
            for _, (first, second), score, stderr, _ in found[:_MOST]
        ]
        more = [f"{len(found) - _MOST} more"] * (len(found) > _MOST)
        lines += [f"{heading}: {' · '.join([*texts, *more])}"] * bool(found)
    return lines


def pair_arcs(att: Attribution, row: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """A line for each unit that is in a pair, with its score, and an arc for each pair; dashed for "either"."""
    found = [pair for pair in att.pairs if pair.target == row]
    units = sorted({unit for pair in found for unit in pair.units})
    show, names = number_format(att.scores[row].tolist()), labels(att)
    lines = [(show(float(att.scores[row, unit])), names[unit]) for unit in units]
    largest = max((abs(pair.score) for pair in found), default=1.0)
    looks = {"together": ("p", False), "either": ("n", True)}
    return lines, [
        Arc(units.index(first), units.index(second), abs(score) / largest, *looks[kind])
        for _, (first, second), score, _, kind in found
    ]


def through(att: Attribution) -> Attribution:
    """See `Attribution.through`.

    W[t, u] = max(s, 0), each row divided by its sum, is a weighted acyclic graph; the influence of a prompt unit on a
    target is the sum over all paths between them of the product of their weights (CAGE, arXiv 2512.15663). With W_p the
    columns of the prompt and W_g those of the continuation, summed by the target that they belong to,
    X = W_p + W_g X, so X = (I - W_g)^-1 W_p.
    """
    weights = att.scores.double().nan_to_num(0.0).clamp_min(0)
    weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    prompt = [i for i, unit in enumerate(att.units) if unit.start < att.prompt_length]
    written = [i for i, unit in enumerate(att.units) if unit.start >= att.prompt_length]
    if len(att.targets) > 1 and not written:
        raise ParameterError(
            "The continuation has no units, so nothing leads through it. Attribute with unit='sentence', "
            "target_unit='sentence' and continuation_units=True."
        )
    between = weights.new_zeros(len(att.targets), len(att.targets))
    for column, owners in zip(written, _owners(att, written), strict=True):
        between[:, owners] += weights[:, [column]] / len(owners)
    less = torch.ones_like(between[0]).diag() - between
    scores = torch.linalg.solve_triangular(
        less, weights[:, prompt], upper=False, unitriangular=True
    )
    nothing = dict.fromkeys(("thresholds", "k_min", "stderr"))
    info = {**att.info, "through": between.tolist()}
    return replace(
        att,
        scores=scores.float(),
        units=tuple(att.units[i] for i in prompt),
        pairs=(),
        info=info,
        **nothing,
    )


def _owners(att: Attribution, written: Sequence[int]) -> list[list[int]]:
    """The target that each unit is in; or all targets that are pieces of one character, as the unit is."""
    starts, tokens = (
        list[int](),
        list[int | None](),
    )  # the first token of each target, and the target of each token
    for row, target in enumerate(att.targets):
        tokens += [None] * len(target.before)
        starts.append(len(tokens))
        tokens += [row] * len(target.token_ids)
    last = att.scores.new_tensor([unit.token_indices[-1] for unit in att.units])
    rows = zip(
        att.scores, starts, strict=True
    )  # a row has scores up to the token before its target
    first = max(int(last[~row.isnan()].amax()) + 1 - start for row, start in rows) if written else 0
    found: list[list[int]] = []
    for unit in (att.units[column] for column in written):
        inside = {tokens[index - first] for index in unit.token_indices}
        owners = sorted(row for row in inside if row is not None)
        if None in inside or len({att.targets[row].text.strip() for row in owners}) > 1:
            raise ParameterError(
                f"The unit {unit.text!r:.60} of the continuation is not inside one target. Attribute with the same "
                "unit and target_unit, such as 'sentence'."
            )
        found.append(owners)
    return found


def flow(att: Attribution, target: int) -> Float64[Tensor, "targets units_and_targets"]:
    """The part of the paths to one target that uses each edge, [to, from]: the prompt's units, then the targets.

    An edge into target t carries its own weight times the weight of all paths from t, which is in (I - W_g)^-1.
    """
    between = torch.tensor(att.info["through"], dtype=torch.float64)
    less = torch.ones_like(between[0]).diag() - between
    return torch.linalg.inv(less)[target, :, None] * torch.cat(
        [less @ att.scores.double().cpu(), between], 1
    )


def path_arcs(att: Attribution, target: int) -> tuple[list[tuple[str, str]], list[Arc]]:
    """Lines and arcs of the paths to one target: the prompt's units and targets, each with the part that leaves it."""
    count, parts = len(att.units), flow(att, target)
    texts = [*(unit.text for unit in att.units), *(each.text for each in att.targets[: target + 1])]
    leaving: list[float] = parts.sum(0).tolist()
    shares = [f"{share:.0%}" for share in leaving[: count + target]]
    found = [
        Arc(start, count + row, weight, "p" if start < count else "n")
        for row, line in enumerate(parts.tolist())
        for start, weight in enumerate(line)
        if weight >= _LEAST
    ]
    return list(zip([*shares, ""], map(label, texts), strict=True)), found
