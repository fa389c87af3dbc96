"""Whether a model still gives the same answer when parts of the prompt are gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.checks import check_choice
from noiser.engine import Coalition, LiveGame, Query, StoredGame, prepare, remover
from noiser.errors import ParameterError, PromptError, TargetError, UnitError
from noiser.explain.many import run_many
from noiser.model.language_model import LanguageModel
from noiser.tensors import integers
from noiser.text import token_texts, without_spans
from noiser.text.pictures import with_pictures
from noiser.types import STAYS, Prompt, Question, SameName

Same = SameName | Callable[[str, str], bool]
"""When an answer is the same: every token is still the most probable one; its log-probability falls
by less than `STAYS`; the text that the model writes is equal; or a function of both texts says so.
"""

SHORT = 5
"""Answers of up to so many tokens are compared by their tokens, longer ones by log-probability."""


def equal_texts(answer: str, other: str) -> bool:
    """Whether two answers are equal in lower case, without white space and a final full stop.

    >>> equal_texts(" The attic.", "the  attic")
    True
    """
    return _simplified(answer) == _simplified(other)


def _simplified(text: str) -> str:
    return " ".join(text.lower().split()).removesuffix(".").rstrip()


def still_same(
    game: StoredGame, target: int, values: Float64[Tensor, " inputs"]
) -> Bool[Tensor, " inputs"]:
    """Whether a target is still the answer, from the values of a game.

    With the objective "lead", while it leads; with "logprob" and "logit", while it loses less than
    `STAYS` nats of log-probability; with a number of the caller's own, while that is above ½.

    Raises ParameterError for other objectives.
    """
    whole = game.whole[target]
    if game.objective == "lead":
        return values > 0
    if game.objective is None:
        return values > 0.5
    if game.objective == "logprob":
        return values > whole - STAYS
    if game.objective == "logit":
        log_p = torch.nn.functional.logsigmoid
        return log_p(values) > log_p(whole) - STAYS
    raise ParameterError(
        f"The game has the score {game.objective!r}, which does not say whether an answer stays; "
        "expected 'lead', 'logprob' or 'logit'."
    )


@dataclass(frozen=True, eq=False)
class Sameness:
    """A query, and when its answers are the same.

    Attributes:
        lm: the model.
        query: the question. With several targets, each is an answer after those before it.
        same: see `Same`; "foil": the target is more probable than the foil.
    """

    lm: LanguageModel
    query: Query
    same: Same | Literal["foil"]

    @classmethod
    def of(cls, lm: LanguageModel, query: Query, same: Same | None) -> Sameness:
        """With the default for the query's target where `same` is None.

        Raises:
            ParameterError: `same` beside a foil, or something else than a name or a function.
            TargetError: the tokens are to be the same, and the model does not give the target.
        """
        if query.foil is not None:
            if same is not None:
                raise ParameterError(
                    f"same is {same!r} beside a foil; the answer is then the same while it is more "
                    "probable than the foil. Leave one of them out."
                )
            return cls(lm, query, "foil")
        if lm.is_text_only:
            # Each target is one token, which leads while most answers are the same. `cite` and
            # `rule_of` name `same`: they take answers that the model does not give, too.
            made = cls(lm, query, "tokens")
            return made._checked() if same is None else made
        if same is not None and not callable(same):
            check_choice("same", same, get_args(SameName), "Or give a function of two texts.")
        if same is None:
            is_short = all(len(target.token_ids) <= SHORT for target in query.targets)
            same = "tokens" if is_short else "logprob"
        return cls(lm, query, same)._checked()

    @property
    def is_models_own(self) -> bool:
        """Whether the targets are what the model itself writes, token by token."""
        return tuple(integers(self.query.clean.argmax(-1))) == self.query.target_ids

    @property
    def name(self) -> str:
        """The name of the comparison, for the result."""
        if self.lm.is_text_only:
            return self._chat.same_name
        if isinstance(self.same, str):
            return self.same
        return getattr(self.same, "__name__", None) or repr(self.same)

    def _checked(self) -> Sameness:
        """Itself. Raises TargetError where tokens are compared, and the model says others."""
        if self.same != "tokens" or self.is_models_own:
            return self
        wanted = "".join(self.query.target_texts)
        if self.lm.is_text_only:
            context: Any = self.query.context
            said = self._chat.most_usual(context.answers).reply
            advice = "leave the target out, or load the model with another same=."
        else:
            greedy = integers(self.query.clean.argmax(-1))
            said = "".join(token_texts(self.lm.tokenizer, greedy))
            advice = "name same='logprob'. Or leave the target out."
        raise TargetError(f"The model answers {said!r}, not {wanted!r}: {advice}")

    @property
    def _chat(self) -> Any:
        """The model, where its text alone is known."""
        return self.lm

    # ---- inputs of tokens -----------------------------------------------------------------------

    def game(self, mask: Bool[Tensor, "targets units"]) -> StoredGame:
        """The game whose values say whether the answer stays, see `still_same`."""
        if self._generates:
            whole = torch.ones(len(mask), dtype=torch.float64)
            return StoredGame(mask, whole, None, evaluate=self._write)
        objective = "logprob" if self.same == "logprob" else "lead"
        return LiveGame(self.query, objective, remover(self.query, "delete"), mask)

    @property
    def _generates(self) -> bool:
        return callable(self.same) or self.same == "text"

    async def _write(self, keys: Sequence[Coalition]) -> Mapping[Coalition, float]:
        """1 for inputs after which the model writes the same text, else 0."""
        values = run_many(self.lm, [self._writes_the_same(kept) for _, kept in keys])
        return dict(zip(keys, values, strict=True))

    async def _writes_the_same(self, kept: bytes) -> float:
        removed = [unit for unit, is_kept in enumerate(kept) if not is_kept]
        prompt = self._prompt_without(removed)
        return 0.0 if prompt is None else float(self._is_equal(await self._answer_to(prompt)))

    def _is_equal(self, other: str) -> bool:
        answer = self.query.target_texts[0]
        compare = self.same if callable(self.same) else equal_texts
        return bool(compare(answer, other))

    # ---- text that is tokenised anew ------------------------------------------------------------

    async def try_without(self, target: int, removed: Sequence[int]) -> tuple[bool, str] | None:
        """Whether the answer stays without some units, taken out as text, and what the model says.

        The answer is empty for a target after others. None where no text is left, or where
        the text cannot be changed.
        """
        if self.lm.is_text_only:
            return self._asked_without(target, removed)
        prompt = self._prompt_without(removed)
        if prompt is None:
            return None
        try:
            if self._generates:
                answer = await self._answer_to(prompt)
                return self._is_equal(answer), answer
            stays = await self._stays_after(prompt, target)
            return stays, "" if target > 0 else await self._answer_to(prompt)
        except (PromptError, UnitError):  # what is left is too little to ask about
            return None

    def _asked_without(self, target: int, removed: Sequence[int]) -> tuple[bool, str] | None:
        """What `try_without` returns, of a chat model, whose inputs are all text."""
        context: Any = self.query.context
        gone = {token for unit in removed for token in self.query.units[unit].token_indices}
        kept = [token for token in range(len(self.query.encoding.token_ids)) if token not in gone]
        answers = self._chat.answers_to(context, kept)
        if answers is None:
            return None
        # The last token of a chat model's vocabulary is "another answer".
        row = context.logits(answers, (target,))
        stays = bool(row[target] > row[-1])
        return stays, self._chat.most_usual(answers).reply

    def _prompt_without(self, removed: Sequence[int]) -> Prompt | None:
        query = self.query
        gone = [query.units[unit] for unit in removed]
        spans = [(unit.start, unit.end) for unit in gone if unit not in query.regions]
        prompt = without_spans(query.prompt, query.encoding, spans)
        if query.scene is None or prompt is None or isinstance(prompt, str):
            return prompt
        regions = [query.regions[unit] for unit in gone if unit in query.regions]
        return with_pictures(prompt, query.scene.painted(regions, query.image_removal))

    async def _answer_to(self, prompt: Prompt) -> str:
        """The model's own answer, as long as the first target."""
        length = len(self._continuation(1))
        options: Any = {"target_unit": "all", **self._whole_pictures}
        question = Question(prompt=prompt, max_new_tokens=length, **options)
        return "".join((await prepare(self.lm, question, pictures=True)).target_texts)

    async def _stays_after(self, prompt: Prompt, target: int) -> bool:
        """Whether a target is still the answer after another prompt."""
        ids = self._continuation(target + 1)
        options: Any = {"target": ids, "target_unit": "token", "continuation_units": False}
        if self.query.foil is not None:
            shared = self.query.targets[0].before
            options = {"target": ids, "foil": (*shared, *self.query.foil_ids)}
        question = Question(prompt=prompt, **options, **self._whole_pictures)
        other = await prepare(self.lm, question, pictures=True)
        if self.query.foil is not None:
            return float(other.read_clean(other.objective("logprob"))[0]) > 0
        own_ids = self.query.targets[target].token_ids
        log_p = other.clean[-len(own_ids) :]
        chosen = torch.tensor(own_ids, device=log_p.device)
        if self.same == "tokens":
            return bool((log_p.argmax(-1) == chosen).all())
        with_all = float(self.query.read_clean(self.query.objective("logprob"))[target])
        without = float(log_p.gather(-1, chosen[:, None]).sum())
        return without > with_all - STAYS

    @property
    def _whole_pictures(self) -> dict[str, Any]:
        """Options with which the pictures of another prompt are read whole."""
        return {} if self.query.scene is None else {"image_unit": "image"}

    def _continuation(self, targets: int) -> tuple[int, ...]:
        """The ids of the first targets and of what stands between them."""
        ids: list[int] = []
        for target in self.query.targets[:targets]:
            ids += [*target.before, *target.token_ids]
        return tuple(ids)
