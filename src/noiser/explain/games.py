"""`noiser.Game`: a model's predictions for parts of a prompt, as a function that can be saved."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from pydantic import BaseModel
from torch import Tensor

from noiser.checks import check_seed
from noiser.engine import Coalition, StoredGame, prepare, remover, run_one
from noiser.engine import LiveGame as LiveGame
from noiser.errors import ParameterError, StoredFileError
from noiser.explain._rule import MOST_PLAYERS
from noiser.explain.rule_record import Rule
from noiser.explain.rule_tables import can_be_empty, play_rules
from noiser.files import write_text
from noiser.methods import Method, Scores, make_method
from noiser.model.language_model import LanguageModel
from noiser.registry import warn_of_old_name
from noiser.tensors import boolean_rows, integers
from noiser.types import Prompt, Question, Span


class Game:
    """The value of each target when some units of a prompt are kept and the others removed.

    Every input is run once, and all values are kept: they can be saved, and methods that remove
    units can be played on them without a model. As in shapiq, a game is a function of boolean
    masks.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text or chat messages.
        objective: the value of a target: "logit", its log odds, or another of
            `noiser.engine.OBJECTIVES`.
        removal: how units are removed; see `noiser.engine.remover`.
        seed: of the noise, if they are removed by noise.
        question: further fields of `noiser.types.Question`, such as `unit`, `target` and `sources`.

    Attributes:
        units: the players.
        targets: the targets as text.

    Example:
        >>> game = noiser.Game(lm, "The capital of France is", unit="word")  # doctest: +SKIP
        >>> game.score("joint").scores  # doctest: +SKIP
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Prompt,
        *,
        objective: str = "logit",
        removal: str = "zero",
        seed: int = 0,
        **question: Any,
    ) -> None:
        if "score" in question:
            warn_of_old_name("score", "objective")
            objective = question.pop("score")
        query = run_one(lm, prepare(lm, Question(prompt=prompt, **question), pictures=True))
        if lm.is_text_only and removal == "zero":
            removal = "delete"
        remove = remover(query, removal, torch.Generator().manual_seed(seed))
        plain = query.foil is None and query.of is None
        self._lm: LanguageModel | None = lm
        self._game: StoredGame = LiveGame(
            query, objective if plain else query.objective(objective), remove
        )
        self.units = query.units
        self.targets = query.target_texts

    def __call__(self, kept: Any) -> Float64[Tensor, "targets inputs"]:
        """The value of every target for each row of a boolean array [inputs, units].

        Raises ParameterError for another number of units, or without a model for an input that is
        not stored.
        """
        masks = torch.as_tensor(np.atleast_2d(np.asarray(kept)).astype(bool))
        if masks.shape[1:] != (len(self.units),):
            raise ParameterError(
                f"kept has shape {list(masks.shape)}; expected [inputs, {len(self.units)}]."
            )
        return self._run(self._game(masks))

    def score(self, method: str | Method, seed: int = 0) -> Scores:
        """The scores of a method that removes units, on the values of this game.

        They take the place of the method's own objective and removal. Raises ParameterError for
        other methods, or without a model for an input that is not stored.
        """
        removal_method: Any = make_method(method)
        if not hasattr(removal_method, "score_game"):
            raise ParameterError(
                f"{method!r} is not a method that removes units. Take one that is, such as 'lime'."
            )
        return self._run(removal_method.score_game(self._game, torch.Generator().manual_seed(seed)))

    def rule(self, target: int = 0, *, fresh: int = 40, seed: int = 0) -> Rule:
        """Which units a target needs, as a rule that is tried on fresh inputs; see `noiser.rule`.

        What other methods have played on this game costs nothing again, and the other way round.
        The score says when the answer stays: with "lead" while it leads, with "logprob" and "logit"
        while it loses less than 3 nats of log-probability, with a number of your own (`of=`) while
        that is above ½. Text is written anew only by `noiser.rule`: `trials` is empty.

        Raises ParameterError for other scores, for fewer than two units, or without a model for an
        input that is not stored.
        """
        game = self._game
        players = integers(game.units[target])
        if not 2 <= len(players) <= MOST_PLAYERS:
            raise ParameterError(
                f"The game has {len(players)} units before the target; expected 2 to "
                f"{MOST_PLAYERS}."
            )
        stays = [unit not in players for unit in range(len(self.units))]
        nothing = bytes(stays)
        allows_empty = (target, nothing) in game.table
        if isinstance(game, LiveGame):
            removed = game.removal.deletes
            allows_empty = not removed or can_be_empty(game.query, target, players)
        steps = play_rules(game, [target], fresh, check_seed(seed), allows_empty=[allows_empty])
        (table,) = self._run(steps)
        return Rule(
            answer=self.targets[target],
            foil=None,
            text="",
            units=self.units,
            unit="spans",
            same=game.objective or "own",
            trials=(),
            seed=seed,
            model=None,
            **table.findings(),
        )

    def _run(self, steps: Any) -> Any:
        """The result of a coroutine."""
        if self._lm is not None:
            return run_one(self._lm, steps)
        # Without a model the game makes no request, so the first step is the last.
        try:
            return steps.send(None)
        except StopIteration as stop:
            return stop.value

    def save(self, path: str | PathLike[str]) -> None:
        """Writes units, targets and all values so far as JSON."""
        values = [dict[str, float]() for _ in self.targets]
        for (target, key), value in self._game.table.items():
            values[target]["".join(map(str, key))] = value
        score: Any = self._game.objective
        saved = _SavedGame(
            score=score,
            units=self.units,
            targets=self.targets,
            target_tokens=self._game.target_tokens,
            mask=boolean_rows(self._game.mask),
            values=values,
        )
        write_text(path, saved.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Game:
        """A game that `save` wrote, without a model. Raises StoredFileError for any other file."""
        try:
            saved = _SavedGame.model_validate_json(Path(path).read_bytes())
            values: dict[Coalition, float] = {}
            for target, values_of_target in enumerate(saved.values):
                for kept, value in values_of_target.items():
                    values[target, bytes(map(int, kept))] = value
            all_units = b"\1" * len(saved.units)
            whole = [values[target, all_units] for target in range(len(saved.targets))]
        except (ValueError, LookupError) as error:
            raise StoredFileError(f"{path} is not a saved game: {error}. Save it again.") from error
        game = cls.__new__(cls)
        game._lm = None
        game.units = saved.units
        game.targets = saved.targets
        mask = torch.tensor(saved.mask)
        game._game = StoredGame(
            mask,
            torch.tensor(whole).double(),
            saved.score,
            values,
            target_tokens=saved.target_tokens,
        )
        return game


class _SavedGame(BaseModel):
    """The content of the file."""

    # Example of `values`, for one target and two units:
    #   [{"11": 2.5, "01": 0.3, "10": 1.9}]
    # The first unit removed gives 0.3, the second 1.9.
    schema_version: int = 1
    score: str | None
    units: tuple[Span, ...]
    targets: tuple[str, ...]
    target_tokens: tuple[int, ...] | None = None
    mask: list[list[bool]]
    values: list[dict[str, float]]
