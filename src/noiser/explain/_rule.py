"""`noiser.rule`: a prompt in, its answer as a rule that was tried on fresh inputs out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from noiser.attribution import Attribution
from noiser.attribution.speakers import Heading, role_headings
from noiser.checks import check_count, check_seed, plain
from noiser.engine import LiveGame, Query, prepare, remover, run_one
from noiser.errors import ParameterError, UnitError, UnsupportedModelError
from noiser.explain._restore import restore
from noiser.explain.announce import announce_all
from noiser.explain.placing import placed_unless_there
from noiser.explain.rule_record import Rule, Trial
from noiser.explain.rule_tables import TruthTable, can_be_empty, most_inputs, play_rules
from noiser.explain.sameness import SHORT, Same, Sameness
from noiser.methods import AttentionGradient, run_method
from noiser.methods.rules import MOST_TERMS, Term, Terms, smallest_flip
from noiser.model.language_model import LanguageModel, check_model
from noiser.progress import progress_of
from noiser.tensors import integers
from noiser.text import names_action, read_documents
from noiser.types import (
    Documents,
    ImageRemoval,
    ImageUnit,
    Progress,
    Prompt,
    Question,
    Source,
    Span,
    TargetUnit,
    Unit,
)

FRESH = 40
FEWEST_FRESH = 10

_CLAIMS = MOST_TERMS + 1
"""The most claims of a rule: each term is enough, and without some units the answer changes."""

MOST_PLAYERS = 24
"""Of more units, those with the largest scores take part; the others are always there."""


def rule(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    target: str | int | None = None,
    foil: str | int | None = None,
    max_new_tokens: int | None = None,
    target_unit: TargetUnit = "all",
    unit: Unit | None = None,
    sources: Documents | None = None,
    same: Same | None = None,
    fresh: int = FRESH,
    seed: int = 0,
    image_unit: ImageUnit = (2, 2),
    image_removal: ImageRemoval = "grey",
    progress: Progress | bool | None = None,
) -> Rule:
    """Which parts of the prompt are needed for the answer, as a rule with a hit rate.

    The model is asked with some units of the prompt taken out as text, and whether it still gives
    the same answer. A rule is an OR of at most 3 terms, each an AND of at most 3 units, perhaps
    "unless" one more. It is fitted to some inputs and then tried on fresh ones. With up to 6 units
    all inputs are run. What the rule claims is tried once more on prompts written anew.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text or chat messages.
        target: the answer, as for `noiser.attribute`. None: the model's own.
        foil: "why target rather than foil?": when the target is more probable than the foil.
        max_new_tokens: the most tokens of the model's own answer. None: 1, or 40 of a chat.
        target_unit: "all" of the answer; or a list of one (start, end) span of its characters, such
            as a sentence.
        unit: as for `noiser.attribute`. None: "source" with sources, else "sentence".
        sources: documents, in the forms that `noiser.cite` takes. They may stand in the prompt word
            for word. Where none does, the prompt is a question, and they are placed in it as
            `noiser.cite` does; a text becomes a user's message where the model chats.
        same: when an answer is the same. "tokens": each token is still the most probable one; the
            default for answers of up to 5 tokens, and for a tool call that the model makes.
            "logprob": it loses less than 3 nats of log-probability; the default for longer ones.
            "text": the model writes an equal text, in lower case, without white space and a final
            full stop. Or a function (answer, other) -> bool. The last two generate after each
            input. A chat model of which the text alone is known has a `same` of its own; up to 6
            units take at most 70 requests there, and more units 13 each and 45 on top.
        fresh: inputs that the rule is tried on, at least 10.
        seed: of the inputs.
        image_unit: the parts of pictures in the prompt, as for `noiser.attribute`.
        image_removal: how such a part is removed: "grey" or "blur" pixels.
        progress: as for `noiser.attribute`.

    Raises:
        UnitError: there are fewer than two units. ParameterError: `fresh` is less than 10, or there
            are several targets. TargetError: the model does not give the target, whose tokens are
            to be the same.

    Example:
        >>> question = "Where is the lute?"
        >>> print(noiser.rule(lm, question, sources=documents))  # doctest: +SKIP
        attic: stays if [1] and [4], or [6]
    """
    check_model(lm)
    fresh = check_count("fresh", fresh, least=FEWEST_FRESH)
    seed = check_seed(seed)
    asked: Prompt = plain(prompt)
    encoding = None
    begin = 0
    documents = None if sources is None else read_documents(plain(sources))
    if documents is not None:
        _, asked, encoding, begin = placed_unless_there(lm, asked, documents)
    question = Question(
        prompt=asked,
        target=target,
        foil=foil,
        max_new_tokens=max_new_tokens,
        target_unit=None if foil is not None else target_unit,
        unit=unit or ("sentence" if sources is None else "source"),
        sources=documents,
        sources_begin=begin,
        continuation_units=False,
        image_unit=image_unit,
        image_removal=image_removal,
    )

    def inputs_of(units: int) -> int:
        """The most inputs, with those that its claims are tried on."""
        inputs = most_inputs(min(units, MOST_PLAYERS), fresh) + _CLAIMS
        if units > MOST_PLAYERS:
            inputs += units  # each unit alone is taken out, to find those that take part
        return inputs

    if lm.is_text_only and same is not None:
        raise ParameterError(
            f"same is {same!r}, and a chat model compares answers itself. Leave it out, or load "
            "the model with same=."
        )
    announce_all(lm, question, "A rule", inputs_of)

    async def work() -> Rule:
        query = await prepare(lm, question, encoding, pictures=True)
        if len(query.targets) != 1:
            raise ParameterError(
                f"target_unit is {target_unit!r:.60}, which makes {len(query.targets)} answers; "
                "expected one: 'all', or a list of one (start, end) span."
            )
        chosen = same
        if same is None and names_action(asked, target):
            chosen = _same_of_target(lm, query, by_tokens=True)
        (found,) = await rules_of(Sameness.of(lm, query, chosen), fresh=fresh, seed=seed)
        return found

    with progress_of(progress, "Looking for a rule") as told:
        return run_one(lm, work(), told)


def rule_of(
    lm: LanguageModel,
    att: Attribution,
    target: int = 0,
    *,
    fresh: int = FRESH,
    seed: int = 0,
    prompt: Prompt | None = None,
    progress: Progress | None = None,
) -> Rule:
    """The rule of a target of an attribution, over its units in the prompt.

    Short answers that the model gives are the same by their tokens, others by log-probability.
    `fresh` and `seed` are as for `rule`, `prompt` as for `noiser.without`. Raises also what
    `noiser.explain.restore` does.
    """

    async def work() -> Rule:
        query = await restore(lm, att, prompt)
        in_prompt = [unit for unit in query.units if unit.end <= query.prompt_length]
        query = query.with_units(in_prompt)
        is_short = len(query.targets[target].token_ids) <= SHORT
        same = _same_of_target(lm, query, by_tokens=is_short)
        (found,) = await rules_of(Sameness.of(lm, query, same), [target], fresh=fresh, seed=seed)
        return found

    return run_one(lm, work(), progress)


def _same_of_target(lm: LanguageModel, query: Query, *, by_tokens: bool) -> Same | None:
    """How a target is compared: by tokens if wanted and the model writes them, else by
    log-probability; None where there is a foil, which is what it is compared with.
    """
    if query.foil is not None:
        return None
    if by_tokens and Sameness(lm, query, "tokens").is_models_own:
        return "tokens"
    return "logprob"


async def rules_of(
    sameness: Sameness,
    targets: Sequence[int] | None = None,
    *,
    fresh: int = FRESH,
    seed: int = 0,
) -> list[Rule]:
    """A rule for each target of a query, or for some; they share their inputs."""
    query = sameness.query
    chosen = [*range(len(query.targets))] if targets is None else [*targets]
    game = sameness.game(await _players(sameness, chosen))
    allows_empty: list[bool] = []
    for target in chosen:
        allows_empty.append(can_be_empty(query, target, integers(game.units[target])))
    tables = await play_rules(game, chosen, fresh, seed, allows_empty=allows_empty)
    return [await tried_rule(sameness, table, seed) for table in tables]


async def tried_rule(sameness: Sameness, table: TruthTable, seed: int) -> Rule:
    """The rule of a target, whose claims are tried on prompts that are written anew."""
    query = sameness.query
    findings = table.findings()
    found = Rule(
        answer=query.targets[table.target].text,
        foil=None if query.foil is None else query.foil.text,
        text=query.encoding.text[: query.prompt_length],
        units=query.units,
        unit=query.unit,
        same=sameness.name,
        trials=tuple(await _trials(sameness, table, findings["terms"])),
        seed=seed,
        model=query.model,
        headings=_headings(query),
        **findings,
    )
    return _numbered_as_sources(found, query.sources) if query.unit == "source" else found


def _numbered_as_sources(rule: Rule, sources: Sequence[Source]) -> Rule:
    """The rule with a unit for each source, so that its numbers are those of the sources.

    A source without text is no unit of the query, but keeps its number: of three sources, the
    second one empty, the units [1] and [2] are the sources [1] and [3].
    """
    with_text = [number for number, source in enumerate(sources, 1) if source.text]
    if len(with_text) == len(sources):
        return rule

    def renumbered(numbers: Iterable[int]) -> Term:
        return tuple(with_text[abs(number) - 1] * (1 if number > 0 else -1) for number in numbers)

    units = [Span("", source.start, source.start, ()) for source in sources]
    for number, unit in zip(with_text, rule.units, strict=True):
        units[number - 1] = unit
    return replace(
        rule,
        units=tuple(units),
        terms=tuple(renumbered(term) for term in rule.terms),
        best=tuple(renumbered(term) for term in rule.best),
        always_there=renumbered(rule.always_there),
        trials=tuple(trial._replace(units=renumbered(trial.units)) for trial in rule.trials),
    )


class _Asked(NamedTuple):
    """A question's prompt, for `role_headings`."""

    prompt: Prompt
    text: str
    prompt_length: int
    info: Mapping[str, Any]


def _headings(query: Query) -> tuple[Heading, ...]:
    """The pieces of a chat template; none beside pictures, whose marks are the template's too."""
    if query.scene is not None:
        return ()
    asked = _Asked(query.prompt, query.encoding.text, query.prompt_length, {})
    return tuple(role_headings(asked))


async def _trials(sameness: Sameness, table: TruthTable, terms: Terms) -> list[Trial]:
    """The claims of a rule: a term's units are enough, and without some units it says otherwise."""
    trials: list[Trial] = []
    players = {unit + 1 for unit in integers(table.units)}

    async def attempt(claim: Literal["enough", "changes"], units: Term, gone: set[int]) -> None:
        removed = sorted(number - 1 for number in gone)
        found = await sameness.try_without(table.target, removed)
        if found is not None:
            trials.append(Trial(claim, units, *found))

    for term in terms:
        await attempt("enough", term, players - {number for number in term if number > 0})
    units = smallest_flip(terms, len(sameness.query.units))
    if units:
        await attempt("changes", units, set(units))
    return trials


# ---- which units take part ----------------------------------------------------------------------


async def _players(sameness: Sameness, targets: Sequence[int]) -> Bool[Tensor, "targets units"]:
    """The units that take part for each target; UnitError where there are fewer than two."""
    query = sameness.query
    mask = query.before.clone()
    for target in targets:
        count = int(mask[target].sum())
        if count < 2:
            raise UnitError(
                f"The prompt has {count} unit{'s' * (count != 1)} of unit={query.unit!r}; a rule "
                "needs at least 2. Take smaller units, such as unit='word'."
            )
    if max(int(mask[target].sum()) for target in targets) <= MOST_PLAYERS:
        return mask
    scores = await _quick_scores(sameness.lm, query)
    for target in targets:
        row = scores[target].abs().masked_fill(~mask[target], -torch.inf)
        strongest = row.argsort(descending=True, stable=True)[:MOST_PLAYERS]
        chosen = torch.zeros_like(mask[target])
        chosen[strongest] = True
        mask[target] &= chosen
    return mask


async def _quick_scores(lm: LanguageModel, query: Query) -> Float64[Tensor, "targets units"]:
    """Scores of many units: of one pass where the model can be read so, else without each unit."""
    if lm.needs_internals:
        try:
            found = await run_method(AttentionGradient(objective="logprob"), query)
            return found.scores.double().nan_to_num()
        except (ParameterError, UnsupportedModelError):  # small units, or no such attention
            pass
    objective = query.objective("logprob")
    game = LiveGame(query, objective, remover(query, "delete"))
    values = await game(~torch.eye(len(query.units), dtype=torch.bool))
    return game.whole[:, None] - values
