"""A small model of the same tokenizer orders the sources; a large one scores only those that come first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from noiser.attribution import Attribution
from noiser.engine import LocalEngine, Query
from noiser.engine.scheduler import complete
from noiser.errors import ParameterError
from noiser.explain.attribute import attribution_steps
from noiser.explain.refine import Budget, SplitRule
from noiser.methods import Method
from noiser.model.language_model import LanguageModel
from noiser.model.query import check_length
from noiser.types import Span


@dataclass(frozen=True, eq=False)
class Shortlist:
    """Which units are worth scoring.

    Attributes:
        att: what the proxy says of the same targets and units.
        most: how many units are kept for each target.
    """

    att: Attribution
    most: int

    @property
    def info(self) -> dict[str, Any]:
        """For the record: which model, and what it took."""
        return {"model": self.att.model.name, "token_forwards": self.att.info.get("token_forwards")}

    def choose(self, units: Sequence[Span], targets: Sequence[int]) -> tuple[Span, ...]:
        """Those among the first `most` for any of the targets, in order; all, where the proxy did not go as deep."""
        owner = {token: index for index, unit in enumerate(units) for token in unit.token_indices}
        columns: list[list[int]] = [[] for _ in units]
        for column, each in enumerate(self.att.units):
            inside = {owner.get(token) for token in each.token_indices}
            if len(inside) == 1 and (index := inside.pop()) is not None:
                columns[index].append(column)
        if not all(columns):
            return tuple(units)
        scores = torch.stack([self.att.scores[:, inside].sum(1) for inside in columns], 1)[list(targets)]
        best = scores.topk(min(self.most, len(units)), dim=1).indices
        return tuple(units[i] for i in sorted({*best.flatten().tolist()}))


def make_shortlist(
    lm: LanguageModel,
    proxy: LanguageModel,
    query: Query,
    method: Method,
    seed: int,
    rule: SplitRule,
    least_share: float,
) -> Shortlist:
    """What a proxy says of a query of `lm`, about the same tokens.

    As many units are kept for each target as can have `least_share` of its score.

    Raises:
        PromptError: the proxy cannot read so long a text.
        ParameterError: it is of another tokenizer.
    """
    check_length(proxy, len(query.token_ids))
    check_proxy(lm, proxy, query.target_ids)
    same = replace(
        query,
        model=proxy.identity,
        embedding_dim=proxy.embedding_dim,
        dtype=proxy.dtype,
        device=proxy.device,
        continuation=None,
    )
    engine = LocalEngine(proxy)
    att = complete(engine, engine.answer(same, attribution_steps(proxy, same, method, seed, Budget(), rule)))
    return Shortlist(att, math.floor(1 / max(least_share, 1e-6)))


def check_proxy(lm: LanguageModel, proxy: LanguageModel, token_ids: Sequence[int]) -> None:
    """Raises ParameterError where the proxy knows one of the tokens by another name, or not at all."""
    size = min(proxy.vocabulary_size, len(proxy.tokenizer))
    for token in token_ids:
        name = lm.tokenizer.convert_ids_to_tokens(token)
        other = proxy.tokenizer.convert_ids_to_tokens(token) if token < size else None
        if name != other:
            raise ParameterError(
                f"proxy: token {token} is {name!r} in {lm.identity.name} and {other!r} in {proxy.identity.name}; "
                "expected a model of the same tokenizer. Take a smaller one of the same family, or leave proxy out."
            )
