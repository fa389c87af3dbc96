"""`noiser.compare` and `noiser.diff_models`: one prompt, several methods side by side, or two models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch

from noiser.attribution import Attribution, markup
from noiser.attribution.display import headings, visible
from noiser.checks import plain, random_state_kept
from noiser.engine import Game, Key, Query, StoredGame, prepare, remover, run_one
from noiser.errors import NoiserError, ParameterError
from noiser.explain.attribute import attribute, attribution_of, is_many, shown
from noiser.files import written
from noiser.methods import Joint, Method, Scores, describe, make_method
from noiser.model.language_model import LanguageModel
from noiser.types import Progress, Prompt, Question

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Comparison:
    """The attributions of one prompt by the methods that can answer, in their order; of others name and reason."""

    attributions: tuple[Attribution, ...]
    failures: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Attribution]:
        return iter(self.attributions)

    def __str__(self) -> str:
        with random_state_kept():
            from noiser.attribution.terminal import to_text
        return "\n".join([to_text(self.attributions), *map(visible, self.failures)])

    def to_dataframe(self) -> DataFrame:
        """The rows of each attribution, with its method in front."""
        import pandas as pd

        frames = [att.to_dataframe() for att in self.attributions]
        for frame, heading in zip(frames, headings(self.attributions), strict=True):
            frame.insert(0, "method", heading)
        return pd.concat(frames, ignore_index=True)

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without network and scripts, also written to `path` if given."""
        return written(markup.page(self.attributions), path)

    def to_markdown(self) -> str:
        """The Markdown of each attribution, one after the other, and of the methods that cannot answer the reason."""
        parts = [att.to_markdown() for att in self.attributions]
        return "\n".join([*parts, *(f"{markup.escaped_line(text)}\n" for text in self.failures)])

    def _repr_html_(self) -> str:
        problems = "".join(
            f'<p class="error" role=alert>{escape(text)}</p>' for text in self.failures
        )
        return problems + markup.fragment(self.attributions)


def compare(
    lm: LanguageModel,
    prompt: Prompt,
    methods: Sequence[str | Method] = ("joint", "noiser", "occlusion:score=logprob"),
    progress: Progress | bool | None = None,
    **question: Any,
) -> Comparison:
    """The attributions of one prompt by several methods; one that cannot answer leaves the others' answers.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text or chat messages.
        methods: names, names with hyper-parameters such as "occlusion:score=logprob:baseline=mean", or methods.
        progress: as for `noiser.attribute`; done and expected count methods.
        question: further arguments of `noiser.attribute`, such as `target`, `foil`, `unit` and `seed`.

    Raises:
        NoiserError: a name or the question is wrong, or no method can answer.

    Example:
        >>> print(noiser.compare(lm, "The capital of France is", ["joint", "occlusion"]))  # doctest: +SKIP
    """
    if isinstance(methods, str) or not methods or is_many(plain(prompt)):
        got = f"prompt is {prompt!r:.60} and methods is {methods!r:.60}"
        raise ParameterError(
            f"{got}; expected one prompt and a list of methods, such as ['joint', 'occlusion']."
        )
    attributions, failures = list[Attribution](), list[str]()
    with shown(progress, "Comparing") as told:
        for index, method in enumerate([make_method(each) for each in methods]):

            def tell(done: float, expected: float, before: int = index) -> None:
                if told:
                    told(before + done / max(expected, 1), len(methods))

            try:
                attributions.append(attribute(lm, prompt, method=method, progress=tell, **question))
            except NoiserError as error:
                given = methods[index]
                failures.append(
                    f"{given if isinstance(given, str) else describe(method)[0]}: {error}"
                )
                if len(failures) == len(methods):
                    raise
    return Comparison(tuple(attributions), tuple(failures))


def diff_models(
    lm: LanguageModel,
    other: LanguageModel,
    prompt: Prompt,
    *,
    method: Any = None,
    seed: int = 0,
    **question: Any,
) -> Attribution:
    """The part of each unit of a prompt in log p(answer | other) - log p(answer | lm).

    Both models run the same inputs, and the method is played on the paired differences.

    Args:
        lm: the model whose greedy answer is explained, unless there is a target.
        other: the model with which it is compared.
        prompt: a text or chat messages.
        method: one that removes units; None: `Joint(score="logprob")`.
        seed: of the method's random numbers.
        question: further fields of `noiser.types.Question`; words are units unless `unit` is given.

    Raises:
        ParameterError: the models cut the prompt into other units, or the method removes none.

    Example:
        >>> noiser.diff_models(lm, quantised, "The capital of France is", target=" Paris")  # doctest: +SKIP
    """
    made: Any = make_method(method or Joint(score="logprob"))
    if not hasattr(made, "play"):
        raise ParameterError(
            f"method is {method!r}; expected one that removes units, such as noiser.Joint()."
        )
    asked: dict[str, Any] = {
        "unit": "word",
        "max_new_tokens": 16,
        **question,
        "target_unit": "all",
        "prompt": prompt,
    }
    pair: list[Query] = []
    for each in (lm, other):
        pair.append(run_one(each, prepare(each, Question(**asked))))
        asked["target"] = pair[0].target_texts[0]
    if (
        pair[0].target_texts != pair[1].target_texts
        or len({tuple(u[:3] for u in each.units) for each in pair}) > 1
    ):
        raise ParameterError(
            "The models read the prompt or the answer in other units. Pass unit='word' or spans."
        )
    games = [Game(query, "logprob", remover(query, "zero")) for query in pair]

    async def play(wanted: Sequence[Key]) -> Mapping[Key, float]:
        kept = torch.tensor([list(units) for _, units in wanted]).bool()
        first, second = (
            run_one(each, game(kept))[0] for each, game in zip((lm, other), games, strict=True)
        )
        return dict(zip(wanted, (second - first).tolist(), strict=True))

    game = StoredGame(games[0].mask, games[1].whole - games[0].whole, "logprob", play=play)

    async def on_both(query: Query, rng: torch.Generator) -> Scores:  # noqa: ARG001 - the game has both
        return await made.play(game, rng)

    found = run_one(lm, attribution_of(lm, pair[0], on_both, seed))
    names = [f"{each.identity.name} ({each.identity.dtype})" for each in (other, lm)]
    info = {**found.info, "of": "log p in {} minus log p in {}".format(*names)}
    name, parameters = describe(made)
    return replace(found, method=name, parameters=parameters, info=info)
