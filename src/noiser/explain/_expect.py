"""`noiser.expect`: what an answer is expected to depend on, as a test."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

from noiser.attribution.store import SavedNumber, restored, to_jsonable
from noiser.checks import check_count, check_positive, check_seed
from noiser.engine import Query, prepare, run_one
from noiser.errors import ExpectationError, ParameterError, PromptError
from noiser.explain._cite import MEMORY
from noiser.explain._diff import prompt_edits, prompt_with_edits
from noiser.explain.calls import called_functions
from noiser.explain.clauses import ClausePlace, Clauses, quoted
from noiser.explain.injected import user_loss
from noiser.explain.many import run_many
from noiser.explain.sameness import SHORT
from noiser.explain.tabled import TabledResult
from noiser.model.language_model import LanguageModel, check_model, check_probabilities
from noiser.text import as_prompt
from noiser.types import ASKED, STAYS, ModelIdentity, Prompt, Question

ExpectationVerdict = Literal["pass", "FAIL", "undecided"]

UNMOVED = 0.7
"""A clause on which the answer must not depend moves it by fewer nats: e^0.7 is twice as
probable.
"""

CONTEXTS = 8
"""Random parts of the prompt in which a clause must not move the answer."""

KEPT = 0.75
"""The chance of each other sentence to stand in a random context."""

# Of Student's distribution with CONTEXTS - 1 degrees of freedom: 95 % are within so many errors.
_WIDTH = 2.365


class Finding(NamedTuple):
    """One expectation and what became of it.

    Attributes:
        kind: "depends_on", "not_on", "says", "from_memory" or "action".
        about: the clause, the text or the function's name.
        verdict: "pass", "FAIL", or "undecided" where the interval holds the limit.
        nats: the log-probability that the answer loses; NaN where none was measured.
        reason: a sentence.
    """

    kind: str
    about: str
    verdict: ExpectationVerdict
    nats: SavedNumber
    reason: str


@dataclass(frozen=True, kw_only=True)
class Expectations(TabledResult):
    """What became of the expectations of one prompt.

    Attributes:
        answer: the model's greedy answer.
        findings: one per expectation.
        strongest: the two sentences of the prompt without which the answer loses most, with the
            nats; empty where nothing failed.
        model: the model that answered.
    """

    title: ClassVar[str] = "Expectations of a prompt"

    answer: str
    findings: tuple[Finding, ...]
    strongest: tuple[tuple[str, SavedNumber], ...]
    model: ModelIdentity

    @property
    def verdict(self) -> ExpectationVerdict:
        """The worst verdict of all expectations."""
        verdicts = {finding.verdict for finding in self.findings}
        if "FAIL" in verdicts:
            return "FAIL"
        return "undecided" if "undecided" in verdicts else "pass"

    def facts(self) -> list[str]:
        """The answer, and what it follows from where an expectation failed."""
        facts = [f"{self.verdict}: {self.model.name} answers {self.answer!r}"]
        if self.strongest:
            named: list[str] = []
            for text, nats in self.strongest:
                named.append(f"{quoted(text.strip())} ({nats:.1f} nats)")
            facts.append(f"the answer follows most from {' and '.join(named)}")
        return facts

    def table(self) -> list[list[str]]:
        """One row per expectation."""
        rows = [["verdict", "expectation", "about", "reason"]]
        for finding in self.findings:
            rows.append([finding.verdict, finding.kind, finding.about, finding.reason])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file as plain dicts, lists, texts and numbers."""
        return {"format": "noiser.expectations", "schema": 1, **to_jsonable(vars(self))}

    @classmethod
    def from_dict(cls, data: Any) -> Expectations:
        """The result whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.expectations"], data)


def expect(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    depends_on: str | Sequence[str] = (),
    not_on: str | Sequence[str] = (),
    says: str | None = None,
    from_memory: bool | None = None,
    action: str | None = None,
    answer: str | None = None,
    limit: float = STAYS,
    max_new_tokens: int = 40,
    seed: int = 0,
    strict: bool = False,
    passed_before: Prompt | None = None,
) -> Expectations:
    """Raises an AssertionError unless the model's answer depends on what it should.

    A clause is taken out as text, with all its copies, and the answer's log-probability is read
    again. An answer *stays* if it loses less than `limit`. A greedy answer of up to 5 tokens stays
    only if, in addition, each of its tokens stays the most probable one.

    Args:
        lm: from `noiser.load_model` or `noiser.wrap`.
        prompt: a text, or chat messages. The answer to a text ends with its line.
        depends_on: clauses, each word for word in the prompt, without which the answer does not
            stay. If a clause stands nowhere in the prompt, each * in it matches within a line.
        not_on: clauses without which the answer stays and moves by less than 0.7 nats, alone and
            on average in 8 random parts of the prompt, which keep the question and what
            `depends_on` names.
        says: a text that must stand in the answer.
        from_memory: whether the answer loses less than 4 nats without everything but the question:
            the last user's message, or the last line of a text.
        action: the name of a function: the answer is a call of it that the user's words ask for:
            without them it loses at least 2 nats. The chat ends before the call, and the model must
            be able to write calls.
        answer: the answer that is tested; None: the model's own, the greedy one.
        limit: see above, in nats.
        max_new_tokens: the most tokens of the model's own answer.
        seed: of the random parts.
        strict: whether undecided expectations fail, too.
        passed_before: a version of the prompt that passed: a failure then names the edit after
            which it no longer does.

    Raises:
        ExpectationError: an expectation failed; its `result` has all of them. An AssertionError.
        PromptError: a clause does not stand in the prompt.

    Example:
        >>> noiser.expect(lm, prompt, depends_on="within 30 days")  # doctest: +SKIP
    """
    check_model(lm)
    check_probabilities(lm, "a test of a prompt")
    check_positive("limit", limit)
    check_count("max_new_tokens", max_new_tokens)
    prompt = as_prompt(lm.tokenizer, prompt)
    wanted = _Wanted(
        depends_on=_clauses(depends_on),
        not_on=_clauses(not_on),
        says=says,
        from_memory=from_memory,
        action=action,
    )
    if all(expected in ((), None) for expected in wanted):
        raise ParameterError(
            "Nothing is expected; give depends_on, not_on, says, from_memory or action."
        )
    trial = _Trial(lm, prompt, wanted, answer, limit, max_new_tokens, check_seed(seed))
    result = trial.result()
    failing = ("FAIL", "undecided") if strict else ("FAIL",)
    if result.verdict not in failing:
        return result
    if passed_before is not None and result.verdict == "FAIL":
        result = _with_edit(trial, result, passed_before)
    raise ExpectationError(_failure_text(result, failing), result)


def _failure_text(result: Expectations, failing: Sequence[str]) -> str:
    """What failed, what the answer follows from instead, and what shows more."""
    lines = [result.facts()[0]]
    for finding in result.findings:
        if finding.verdict in failing:
            about = f" {quoted(finding.about)}" if finding.about else ""
            lines.append(f"{finding.verdict} {finding.kind}{about}: {finding.reason}")
    lines += result.facts()[1:]
    lines.append('More: print(noiser.attribute(lm, prompt, unit="sentence"))')
    return "\n".join(lines)


def _clauses(clauses: str | Sequence[str]) -> tuple[str, ...]:
    return (clauses,) if isinstance(clauses, str) else tuple(clauses)


class _Wanted(NamedTuple):
    """The expectations of a prompt."""

    depends_on: tuple[str, ...]
    not_on: tuple[str, ...]
    says: str | None
    from_memory: bool | None
    action: str | None


class _Effect(NamedTuple):
    """What a shortened prompt does to an answer: the log-probability, and whether it is greedy."""

    log_p: float
    greedy: bool


class _Trial:
    """A prompt, its answer, and the answer's log-probability after other prompts."""

    def __init__(
        self,
        lm: LanguageModel,
        prompt: Prompt,
        wanted: _Wanted,
        answer: str | None,
        limit: float,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        self.lm = lm
        self.wanted = wanted
        self.given_answer = answer
        self.limit = limit
        self.seed = seed
        self.max_new_tokens = max_new_tokens
        self.clauses = Clauses(prompt)
        # Clauses that do not stand in the prompt are refused before the model runs.
        self.needed = self._places("depends_on", wanted.depends_on)
        self.unneeded = self._places("not_on", wanted.not_on)
        if wanted.action is not None and isinstance(prompt, str):
            raise PromptError(
                f"action is {wanted.action!r}, and the prompt is a text. Pass a chat."
            )
        stop = "\n" if isinstance(prompt, str) else None
        question = Question(
            prompt=prompt,
            target=answer,
            is_answer=True,
            target_unit="all",
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        self.query: Query = run_one(lm, prepare(lm, question))
        self.answer = "".join(self.query.target_texts)
        self.whole = self._effect_of(self.query)

    def _places(self, name: str, clauses: Sequence[str]) -> list[tuple[str, list[ClausePlace]]]:
        found: list[tuple[str, list[ClausePlace]]] = []
        for index, clause in enumerate(clauses):
            found.append((clause, self.clauses.removable(clause, f"{name}[{index}]")))
        return found

    def result(self) -> Expectations:
        """Every expectation, tried."""
        wanted = self.wanted
        findings: list[Finding] = []
        if wanted.says is not None:
            findings.append(self._says(wanted.says))
        findings += self._depends_on()
        findings += [self._not_on(clause, places) for clause, places in self.unneeded]
        if wanted.from_memory is not None:
            findings.append(self._from_memory(wanted.from_memory))
        if wanted.action is not None:
            findings.append(self._action(wanted.action))
        failed = any(finding.verdict == "FAIL" for finding in findings)
        return Expectations(
            answer=self.answer,
            findings=tuple(findings),
            strongest=self._strongest() if failed else (),
            model=self.query.model,
        )

    # ---- one expectation each ------------------------------------------------------------------

    def _says(self, text: str) -> Finding:
        is_said = text in self.answer
        reason = "the answer says it" if is_said else f"the answer is {self.answer!r}"
        return Finding("says", text, _verdict(is_said), math.nan, reason)

    def _depends_on(self) -> list[Finding]:
        shortened = [self.clauses.without(places) for _, places in self.needed]
        findings: list[Finding] = []
        for (clause, places), effect in zip(self.needed, self._effects(shortened), strict=True):
            loss = self.whole.log_p - effect.log_p
            stays = self._stays(effect)
            if stays:
                reason = f"without it the answer stays ({_loss_text(loss)})"
                other = self._alternative(places)
                if other:
                    reason += f": the answer also follows from {other!r}"
            else:
                reason = f"without it the answer {self._change_text(effect)}"
            findings.append(Finding("depends_on", clause, _verdict(not stays), loss, reason))
        return findings

    def _alternative(self, places: Sequence[ClausePlace]) -> str | None:
        """The sentence that stands in for the clause: without either one the answer stays, without
        both it does not. None if there is none.
        """
        others: list[ClausePlace] = []
        for place in self.clauses.sentences():
            if not _touches(place, places) and not self.clauses.is_all([place, *places]):
                others.append(place)
        alone = self._effects([self.clauses.without([other]) for other in others])
        both = self._effects([self.clauses.without([other, *places]) for other in others])
        found: list[tuple[float, str]] = []
        for other, without_other, without_both in zip(others, alone, both, strict=True):
            if self._stays(without_other) and not self._stays(without_both):
                found.append((without_both.log_p, self.clauses.text(other).strip()))
        return min(found)[1] if found else None

    def _not_on(self, clause: str, places: Sequence[ClausePlace]) -> Finding:
        (effect,) = self._effects([self.clauses.without(places)])
        loss = self.whole.log_p - effect.log_p
        if abs(loss) >= UNMOVED or not self._stays(effect):
            reason = f"without it the answer {self._change_text(effect)}"
            return Finding("not_on", clause, "FAIL", loss, reason)
        moves = self._moves_in_contexts(places)
        if not moves:  # nothing stands in the prompt that may go
            reason = f"without it the answer stays ({_loss_text(loss)})"
            return Finding("not_on", clause, "pass", loss, reason)
        mean = statistics.mean(moves)
        half_width = _WIDTH * statistics.stdev(moves) / len(moves) ** 0.5
        low = mean - half_width
        high = mean + half_width
        if low > -UNMOVED and high < UNMOVED:
            verdict: ExpectationVerdict = "pass"
        elif low >= UNMOVED or high <= -UNMOVED:
            verdict = "FAIL"
        else:
            verdict = "undecided"
        reason = (
            f"alone {_loss_text(loss)}; in {len(moves)} random parts of the prompt "
            f"{mean:+.1f} nats ({low:.1f} to {high:.1f})"
        )
        return Finding("not_on", clause, verdict, loss, reason)

    def _moves_in_contexts(self, places: Sequence[ClausePlace]) -> list[float]:
        """The nats that the answer loses with the clause, in random parts of the prompt.

        The question and the clauses of `depends_on` stay: without them the model has no ground for
        the answer, and any sentence moves it.
        """
        staying = [*places, *_question(self.clauses)]
        for _, needed in self.needed:
            staying += needed
        others = [place for place in self.clauses.sentences() if not _touches(place, staying)]
        if not others:
            return []
        rng = random.Random(self.seed)
        prompts: list[Prompt] = []
        for _ in range(CONTEXTS):
            gone = [place for place in others if rng.random() >= KEPT]
            prompts.append(self._without_unless_empty(gone))
            prompts.append(self._without_unless_empty([*gone, *places]))
        effects = self._effects(prompts)
        pairs = zip(effects[::2], effects[1::2], strict=True)
        return [with_clause.log_p - without.log_p for with_clause, without in pairs]

    def _without_unless_empty(self, gone: Sequence[ClausePlace]) -> Prompt:
        """The prompt without the places; with the last of them where nothing would be left."""
        return self.clauses.without(gone[:-1] if self.clauses.is_all(gone) else gone)

    def _from_memory(self, expected: bool) -> Finding:
        places = _all_but_the_question(self.clauses)
        if not places:
            raise PromptError(
                "from_memory needs something besides the question: the last user's message of a "
                "chat, or the last line of a text."
            )
        (effect,) = self._effects([self.clauses.without(places)])
        loss = self.whole.log_p - effect.log_p
        is_memory = loss < MEMORY["delete"] and not self._changes(effect)
        reason = f"with the question alone {self._change_text(effect)}"
        verdict = _verdict(is_memory == expected)
        return Finding("from_memory", str(expected).lower(), verdict, loss, reason)

    def _action(self, name: str) -> Finding:
        names = called_functions(self.answer)
        if name not in names:
            called = f"calls {names[0]!r}" if names else "is no call"
            return Finding("action", name, "FAIL", math.nan, f"the answer {called}")
        loss = run_one(self.lm, user_loss(self.query))
        reason = f"without the user's words {_loss_text(loss)}"
        return Finding("action", name, _verdict(loss >= ASKED), loss, reason)

    # ---- effects -------------------------------------------------------------------------------

    def _effects(self, prompts: Sequence[Prompt]) -> list[_Effect]:
        """What each prompt does to the answer."""

        async def effect(prompt: Prompt) -> _Effect:
            question = Question(prompt=prompt, target=self.query.target_ids, target_unit="all")
            return self._effect_of(await prepare(self.lm, question))

        return run_many(self.lm, [effect(prompt) for prompt in prompts]) if prompts else []

    @staticmethod
    def _effect_of(query: Query) -> _Effect:
        log_p = float(query.read_clean(query.objective("logprob")))
        return _Effect(log_p, query.targets[0].rank == 1)

    def _stays(self, effect: _Effect) -> bool:
        loss = self.whole.log_p - effect.log_p
        return loss < self.limit and not self._changes(effect)

    def _changes(self, effect: _Effect) -> bool:
        """Whether a short greedy answer is no longer greedy."""
        is_short = len(self.query.target_ids) <= SHORT
        return is_short and self.whole.greedy and not effect.greedy

    def _change_text(self, effect: _Effect) -> str:
        changes = "changes and " if self._changes(effect) else ""
        return changes + _loss_text(self.whole.log_p - effect.log_p)

    def _strongest(self) -> tuple[tuple[str, float], ...]:
        """The two sentences without which the answer loses most."""
        places = self.clauses.sentences()
        if len(places) < 2:
            return ()
        effects = self._effects([self.clauses.without([place]) for place in places])
        with_losses: list[tuple[str, float]] = []
        for place, effect in zip(places, effects, strict=True):
            with_losses.append((self.clauses.text(place), self.whole.log_p - effect.log_p))
        largest_first = sorted(with_losses, key=lambda entry: -entry[1])
        return tuple(largest_first[:2])


def _verdict(holds: bool) -> ExpectationVerdict:
    return "pass" if holds else "FAIL"


def _loss_text(nats: float) -> str:
    return f"loses {nats:.1f} nats" if nats >= 0 else f"gains {-nats:.1f} nats"


def _touches(place: ClausePlace, places: Sequence[ClausePlace]) -> bool:
    return any(place.overlaps(other) for other in places)


def _all_but_the_question(clauses: Clauses) -> list[ClausePlace]:
    """Everything but the last user's message of a chat, or the last line of a text."""
    if isinstance(clauses.prompt, str):
        text = clauses.prompt.rstrip("\n")
        end = text.rfind("\n") + 1
        return [ClausePlace(0, 0, end)] if text[:end].strip() else []
    messages = clauses.prompt
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    places: list[ClausePlace] = []
    for index, text in enumerate(clauses.texts):
        if text and index != max(users, default=-1):
            places.append(ClausePlace(index, 0, len(text)))
    return places


def _question(clauses: Clauses) -> list[ClausePlace]:
    """The last user's message of a chat; of a text its last line, or where it has one line, all
    from the last question on, or else the last sentence.
    """
    before = _all_but_the_question(clauses)
    asked: list[ClausePlace] = []
    for place in clauses.sentences():
        text = clauses.text(place)
        space = len(text) - len(text.lstrip())  # a line break that ends the line before
        if not _touches(place._replace(start=place.start + space), before):
            asked.append(place)
    if before or not asked:
        return asked
    for number in range(len(asked) - 1, -1, -1):
        if clauses.text(asked[number]).rstrip().endswith("?"):
            return asked[number:]
    return asked[-1:]


def _with_edit(trial: _Trial, result: Expectations, passed_before: Prompt) -> Expectations:
    """The result, whose failures name the edit without which they pass.

    Each edit is undone alone. Where none alone restores a failed expectation, nothing is added.
    """
    try:
        edits = prompt_edits(as_prompt(trial.lm.tokenizer, passed_before), trial.clauses.prompt)
    except PromptError:  # equal, or other messages
        return result
    restored_by: dict[tuple[str, str], str] = {}
    for number, edit in enumerate(edits, 1):
        undone = prompt_with_edits(passed_before, trial.clauses.prompt, leave_out=number - 1)
        try:
            other = _Trial(
                trial.lm,
                undone,
                trial.wanted,
                trial.given_answer,
                trial.limit,
                trial.max_new_tokens,
                trial.seed,
            ).result()
        except PromptError:  # the clause came with the edit
            continue
        for old, new in zip(result.findings, other.findings, strict=True):
            if old.verdict == "FAIL" and new.verdict == "pass":
                moved = ""
                if not math.isnan(old.nats) and not math.isnan(new.nats):
                    moved = f", it moved the measure by {abs(new.nats - old.nats):.1f} nats"
                text = f"edit {number} broke it{moved}: {edit}"
                restored_by.setdefault((old.kind, old.about), text)
    findings: list[Finding] = []
    for finding in result.findings:
        cause = restored_by.get((finding.kind, finding.about))
        if cause:
            finding = finding._replace(reason=f"{finding.reason}; {cause}")
        findings.append(finding)
    return replace(result, findings=tuple(findings))
