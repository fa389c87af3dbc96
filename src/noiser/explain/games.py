"""`noiser.Game`: a model's predictions for parts of a prompt, as a function that can be saved and played without it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from pydantic import BaseModel, ValidationError
from torch import Tensor

from noiser.engine import Game as LiveGame
from noiser.engine import ScoreName, StoredGame, prepare, remover, run_one
from noiser.errors import ParameterError, StoredFileError
from noiser.files import write_text
from noiser.methods import Method, Scores, make_method
from noiser.model.language_model import LanguageModel
from noiser.question import Question
from noiser.types import Prompt, RemovalName, Span


class Game:
    """The value of each target when some units of a prompt are kept and the others removed.

    Every input is run once, and all values are kept: they can be saved, and methods that remove units can be played on
    them without a model. The form is that of shapiq: a game is a function of boolean masks.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text or chat messages.
        score: the value of a target: "logit", its log odds, or another of `noiser.engine.SCORES`.
        removal: how units are removed; see `noiser.engine.remover`.
        seed: of the noise, if they are removed by noise.
        question: further fields of `noiser.question.Question`, such as `unit`, `target` and `sources`.

    Attributes:
        units: the players.
        targets: the targets as text.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Prompt,
        *,
        score: ScoreName = "logit",
        removal: RemovalName = "zero",
        seed: int = 0,
        **question: Any,
    ) -> None:
        query = run_one(lm, prepare(lm, Question(prompt=prompt, **question)))
        remove = remover(query, removal, torch.Generator().manual_seed(seed))
        plain = query.foil_id is None and query.of is None
        game = LiveGame(query, score if plain else query.score(score), remove)
        self._fill(lm, game, query.units, query.target_texts)

    def _fill(self, lm: LanguageModel | None, game: StoredGame, units: Sequence[Span], targets: Sequence[str]) -> None:
        self._lm, self._game, self.units, self.targets = lm, game, tuple(units), tuple(targets)

    def __call__(self, kept: Any) -> Float64[Tensor, "targets inputs"]:
        """The value of every target for each row of a boolean array [inputs, units].

        Raises ParameterError for another number of units, or without a model for an input that is not stored.
        """
        masks = torch.from_numpy(np.atleast_2d(np.asarray(kept)).astype(bool))
        if masks.shape[1:] != (len(self.units),):
            raise ParameterError(f"kept has shape {list(masks.shape)}; expected [inputs, {len(self.units)}].")
        return self._run(self._game(masks))

    def play(self, method: str | Method, seed: int = 0) -> Scores:
        """The scores of a method that removes units, on the values of this game in place of the method's own.

        Raises ParameterError for other methods, or without a model for an input that is not stored.
        """
        made: Any = make_method(method)
        if not hasattr(made, "play"):
            raise ParameterError(f"{method!r} is not a method that removes units. Take one that is, such as 'lime'.")
        return self._run(made.play(self._game, torch.Generator().manual_seed(seed)))

    def _run(self, steps: Any) -> Any:
        if self._lm is not None:
            return run_one(self._lm, steps)
        try:
            return next(steps)
        except StopIteration as stop:  # a stored game asks nothing
            return stop.value

    def save(self, path: str | PathLike[str]) -> None:
        """Writes units, targets and all values so far as JSON."""
        game = self._game
        values = [{} for _ in self.targets]
        for (target, key), value in game.table.items():
            values[target]["".join(map(str, key))] = value
        saved = _Saved(
            score=game.score, units=list(self.units), targets=list(self.targets), mask=game.mask.tolist(), values=values
        )
        write_text(path, saved.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Game:
        """A game that `save` wrote, without a model. Raises StoredFileError for any other file."""
        try:
            saved = _Saved.model_validate(json.loads(Path(path).read_text(encoding="utf-8")))
            values = {(g, bytes(map(int, key))): v for g, row in enumerate(saved.values) for key, v in row.items()}
            every = b"\1" * len(saved.units)
            whole = torch.tensor([values[g, every] for g in range(len(saved.targets))], dtype=torch.float64)
        except (ValidationError, ValueError, LookupError) as error:
            raise StoredFileError(f"{path} is not a saved game: {error}. Save it again.") from error
        game = cls.__new__(cls)
        game._fill(None, StoredGame(torch.tensor(saved.mask), whole, saved.score, values), saved.units, saved.targets)
        return game


class _Saved(BaseModel):
    """The file: for each target, values by inputs written as 0 and 1 for each unit."""

    schema_version: int = 1
    score: ScoreName | None
    units: list[Span]
    targets: list[str]
    mask: list[list[bool]]
    values: list[dict[str, float]]
