"""`Rule`: an answer as a rule over parts of the prompt, and how often the rule is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from noiser.attribution.display import label, open_ended, shorten, visible
from noiser.attribution.markdown import escaped_line, markdown_table
from noiser.attribution.markup import css, page_of_card, with_breaks
from noiser.attribution.saved import SavedResult
from noiser.attribution.speakers import Heading
from noiser.attribution.store import restored, to_jsonable
from noiser.errors import ParameterError
from noiser.files import write_if
from noiser.methods.rules import ALWAYS, NEVER, Term, Terms, in_words, term_in_words
from noiser.numbers import wilson
from noiser.text.pictures import MARK
from noiser.types import ModelIdentity, Span

if TYPE_CHECKING:
    from pandas import DataFrame

# Characters of a unit that texts and tables show.
_LENGTH = 80


class Trial(NamedTuple):
    """What the model says of a prompt that was written anew without some units.

    Attributes:
        claim: "enough": only the units of a term are there. "changes": the `units` are gone,
            without which the rule says something else than of the whole prompt.
        units: the numbers of the term, or of the units that are gone.
        stays: whether the answer stays.
        answer: the model's answer; empty where it was not asked.
    """

    claim: Literal["enough", "changes"]
    units: Term
    stays: bool
    answer: str


@dataclass(frozen=True, kw_only=True)
class Rule(SavedResult):
    """An answer as a rule, tried on inputs that took no part in it: the result of `noiser.rule`.

    Units are numbered from 1 on, in the order of the prompt. A term is a tuple of numbers: all of
    these units are needed. A negative number is the unit of "unless". The answer stays if any term
    holds.

    Attributes:
        answer: what is explained.
        foil: the rule says when the answer is more probable than this; None without a foil.
        text: the prompt; of a chat, as the template writes it.
        units: the parts of the prompt; where they are sources, those without text as well.
        unit: the name of the segmentation, or "spans".
        terms: the rule; empty where none is clearly right more often than "always" or "never", or
            none on .85 of the inputs.
        best: the rule that was tried: `terms`, or the one that failed.
        same: when an answer is the same: "tokens", "logprob", "text", "foil", or the name of the
            caller's function.
        hits: inputs on which the rule that was tried is right.
        tries: inputs that it was tried on.
        fresh: whether these took no part in the fit; else they are all inputs that there are.
        base: inputs on which the better one of "always" and "never" is right.
        control: which one of them.
        memory: whether the answer stays without any unit; None where no text is left then.
        always_there: the numbers of the units that were never taken out.
        trials: what the model says of prompts that were written anew, see `enough` and `changes`.
        inputs: how many inputs were run.
        seed: of the inputs.
        model: what was asked; None of a stored game.
        headings: the pieces of a chat template in `text`, with what is shown in their places.
    """

    answer: str
    foil: str | None
    text: str
    units: tuple[Span, ...]
    unit: str
    terms: Terms
    best: Terms
    same: str
    hits: int
    tries: int
    fresh: bool
    base: int
    control: Literal["always", "never"]
    memory: bool | None
    always_there: tuple[int, ...]
    trials: tuple[Trial, ...]
    inputs: int
    seed: int
    model: ModelIdentity | None
    headings: tuple[Heading, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.units)
        for term in (*self.terms, *self.best, self.always_there):
            if not all(0 < abs(number) <= count for number in term):
                raise ParameterError(f"{term} has numbers of no unit; there are {count} units.")
        if not 0 <= max(self.hits, self.base) <= self.tries:
            raise ParameterError(
                f"hits is {self.hits} and base {self.base}; expected at most {self.tries} tries."
            )

    # ---- numbers --------------------------------------------------------------------------------

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the rate of hits on fresh inputs; of all inputs the rate itself."""
        if self.fresh:
            return wilson(self.hits, self.tries)
        return self.hits / self.tries, self.hits / self.tries

    @property
    def enough(self) -> dict[Term, bool]:
        """For each term whether the answer stays in a prompt that has only its units."""
        return {trial.units: trial.stays for trial in self.trials if trial.claim == "enough"}

    @property
    def changes(self) -> tuple[Term, str] | None:
        """Units, and the answer to a prompt without them; None where it stays, or was not asked.

        By the rule, the answer does not stay without them.
        """
        for trial in self.trials:
            if trial.claim == "changes" and trial.stays != self._says_of_whole:
                return trial.units, trial.answer
        return None

    @property
    def _says_of_whole(self) -> bool:
        """What the rule says of the whole prompt."""
        return any(all(number > 0 for number in term) for term in self.terms)

    # ---- words ----------------------------------------------------------------------------------

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        """The rule, how often it is right, and the units that it names; safe for a terminal."""
        facts = [f"  {fact}" for fact in self.facts]
        units = [f"  [{number}] {self._label(number)}" for number in self._named]
        return "\n".join([self.sentence, *facts, *(["", *units] if units else [])])

    @property
    def sentence(self) -> str:
        """The rule in words, such as "attic: stays if [1] and [4], or [6]"; safe to show."""
        return f"{self._subject.rstrip('.')}: {self._predicate}"

    @property
    def summary(self) -> str:
        """The rule and how often it is right, in a line without the answer; safe to show."""
        rule = in_words(self.terms) if self.terms else self._predicate
        return f"{rule}; {self._rate()}"

    @property
    def _subject(self) -> str:
        answer = shorten(label(self.answer), _LENGTH)
        return f"{answer} rather than {label(self.foil)}" if self.foil is not None else answer

    @property
    def _verb(self) -> str:
        return "stays" if self.foil is None else "leads"

    @property
    def _predicate(self) -> str:
        """What the rule says of the answer."""
        if self.terms:
            alone = self.terms[0][0] < 0  # "unless" without a unit that is needed
            return f"{self._verb} {'' if alone else 'if '}{in_words(self.terms)}"
        if self.from_memory:
            return "from memory or the question: no unit is needed"
        return f"no short rule: no few parts decide whether it {self._verb}"

    @property
    def from_memory(self) -> bool:
        """Whether the answer stays without any unit, and whichever of them are there."""
        return bool(self.memory) and self.best == ALWAYS

    @property
    def facts(self) -> list[str]:
        """Hits, claims and what was never taken out, each a line; safe to show."""
        lines = [self._rate(), " · ".join(self._claims())]
        needs_a_unit = all(term[0] > 0 for term in self.terms if term)
        if self.memory and self.terms and needs_a_unit:
            lines.append(f"with no unit at all, the answer {self._verb} as well")
        if self.always_there:
            lines.append(
                f"{len(self.always_there)} of {len(self.units)} units with the lowest scores were "
                "always there"
            )
        lines.append(self._provenance())
        return [line for line in lines if line]

    def _rate(self) -> str:
        """How often the rule is right, and how often a constant."""
        kind = "fresh inputs" if self.fresh else "inputs, all ways to take parts out"
        constant = f'guessing "it {self.control} {self._verb}" is right on {self.base}'
        if self.best in (NEVER, ALWAYS):
            return f"{constant} of {self.tries} {kind}"
        name = "" if self.terms else f"the best one, {in_words(self.best)}, is "
        interval = ""
        if self.fresh:
            low, high = self.interval
            interval = f" ({low:.2f} to {high:.2f})"
        right = f"right on {self.hits} of {self.tries} {kind}{interval}"
        return f"{name}{right}; {constant}"

    def _claims(self) -> Iterator[str]:
        """What was tried by generating from text that was written anew."""
        for trial in self.trials:
            # It has as many tokens as the answer: where that is a sentence, it may end in one.
            is_sentence = self.answer.rstrip()[-1:] in ".!?"
            whole = open_ended(trial.answer) if is_sentence else trial.answer
            said = f'"{shorten(label(whole), _LENGTH)}"' if trial.answer else ""
            if trial.claim == "enough":
                there = tuple(number for number in trial.units if number > 0)
                becomes = f"it becomes {said}" if said else "it does not stay"
                if not there:  # "unless" alone says that no unit is needed
                    happens = self._verb if trial.stays else becomes.removeprefix("it ")
                    exception = "" if trial.stays else "an exception: "
                    yield f"{exception}with no unit at all it {happens}"
                elif trial.stays:
                    verb = "is" if len(there) == 1 else "are"
                    yield f"{term_in_words(there)} alone {verb} enough"
                else:
                    yield f"an exception: with {term_in_words(there)} alone {becomes}"
                continue
            words = "without " + " and ".join(f"[{number}]" for number in trial.units)
            if trial.stays == self._says_of_whole:
                stays = self._verb if trial.stays else "does not lead"
                yield f"an exception: {words} it still {stays}"
            elif not trial.stays:
                yield f"{words} it becomes {said}" if said else f"{words} it does not stay"
            else:
                yield f"{words} it {self._verb}"

    def _provenance(self) -> str:
        facts = (
            f"same {self.same}",
            f"{self.inputs} inputs",
            f"{self.model.name} ({self.model.dtype})" if self.model else "",
            f"unit {self.unit}",
            f"seed {self.seed}",
        )
        return " · ".join(label(fact) for fact in facts if fact)

    @property
    def _named(self) -> list[int]:
        """The numbers of the units in the rule, ascending."""
        return sorted({abs(number) for term in self.terms for number in term})

    def _label(self, number: int) -> str:
        return shorten(label(self.units[number - 1].text), _LENGTH)

    # ---- forms ----------------------------------------------------------------------------------

    def to_dataframe(self) -> DataFrame:
        """One row per term and unit of it.

        Columns: term (from 1 on), number (of the unit), unless (whether it must not be there),
        text, start, end, enough (whether the term's units alone are; None where that was not
        tried).
        """
        import pandas as pd

        columns = ["term", "number", "unless", "text", "start", "end", "enough"]
        rows: list[tuple[Any, ...]] = []
        for index, term in enumerate(self.terms, 1):
            for number in term:
                unit = self.units[abs(number) - 1]
                is_opponent = number < 0
                place = (unit.text, unit.start, unit.end)
                rows.append((index, abs(number), is_opponent, *place, self.enough.get(term)))
        return pd.DataFrame(rows, columns=columns)

    def to_dict(self) -> dict[str, Any]:
        """The content of a saved file as plain dicts, lists, texts and numbers."""
        derived = {"rule": in_words(self.terms) if self.terms else "", "interval": self.interval}
        fields = to_jsonable({**vars(self), **derived})
        return {"format": "noiser.rule", "schema": 1, **fields}

    @classmethod
    def from_dict(cls, data: Any) -> Rule:
        """The rule whose `to_dict` gave the data. Raises StoredFileError where `load` does."""
        return restored(cls, Literal["noiser.rule"], data)

    def to_markdown(self) -> str:
        """The rule, how often it is right, and a table of the units that it names."""
        lines = [f"**{escaped_line(self.sentence)}**", *map(escaped_line, self.facts)]
        if self._named:
            rows = [[str(number), self._label(number)] for number in self._named]
            lines.append(markdown_table([["unit", "text"], *rows], (0,)))
        return "\n\n".join(lines) + "\n"

    def to_html(self, path: str | PathLike[str] | None = None) -> str:
        """A complete page without scripts, also written to `path` if given."""
        title = f"{self._subject[:80]} – rule"
        return write_if(page_of_card(self._card(), title, css("explain", "rule.css")), path)

    def _repr_html_(self) -> str:
        return f"<style>{css()}{css('explain', 'rule.css')}</style>{self._card()}"

    def _card(self) -> str:
        text = "".join(self._marked_text())
        return f'<div class="noiser-att">{self.line()}<p class="map rule" dir=auto>{text}</p></div>'

    def line(self) -> str:
        """The rule and its facts as HTML, each term in the colour that rings its units."""
        words: list[str] = []
        for index, term in enumerate(self.terms, 1):
            words.append(f'<b class="r r{index}">{escape(term_in_words(term))}</b>')
        if words:
            joined = ", or ".join(words)
            condition = "" if self.terms[0][0] < 0 else "if "
            predicate = f"{self._verb} {condition}{joined}"
        else:
            predicate = escape(self._predicate)
        *found, provenance = self.facts
        facts = "".join(f"<p class=facts>{escape(fact)}</p>" for fact in found)
        return (
            f"<div class=rule><p><b class=target dir=auto>{escape(self._subject)}</b> "
            f"{predicate}</p>{facts}<details><summary>how this was made</summary>"
            f"<footer>{escape(provenance)}</footer></details></div>"
        )

    @property
    def rings(self) -> dict[int, str]:
        """The class of the ring of each unit in the rule, by its index: that of its first term."""
        rings: dict[int, str] = {}
        for index, term in enumerate(self.terms, 1):
            for number in term:
                against = " against" if number < 0 else ""
                rings.setdefault(abs(number) - 1, f"r r{index}{against}")
        return rings

    def _marked_text(self) -> Iterator[str]:
        """The prompt with a number before each unit, and a ring around those in the rule."""
        position = 0
        for index, unit in _in_order(self.units):
            if not unit.text:  # a source without text
                continue
            is_region = self.text[unit.start : unit.end] == MARK
            if unit.start < position and not is_region:  # shares characters with the unit before
                continue
            if is_region and index not in self.rings:
                continue  # the mark itself stands for the picture
            yield f"<span class=x>{self._between(position, unit.start + is_region)}</span>"
            body = unit.text.lstrip()
            space = unit.text[: len(unit.text) - len(body)]
            ring = self.rings.get(index)
            shown = with_breaks(visible(body))
            if ring:
                shown = f'<span class="{ring}"><sup>{index + 1}</sup>{shown}</span>'
            elif self.unit not in ("word", "token"):  # numbers before all of these hide the text
                shown = f"<sup>{index + 1}</sup>{shown}"
            yield f"{with_breaks(visible(space))}{shown}"
            position = unit.end
        yield f"<span class=x>{self._between(position, len(self.text))}</span>"

    def _between(self, start: int, end: int) -> str:
        """Text that is in no unit, with roles in place of a template's text, and pictures by
        name.
        """
        shown = ""
        for heading in self.headings:
            if start <= heading.start and heading.end <= end:
                shown += self.text[start : heading.start] + heading.words
                start = heading.end
        shown += self.text[start:end]
        return with_breaks(visible(shown)).replace(MARK, "[image] ")


def _in_order(units: Sequence[Span]) -> list[tuple[int, Span]]:
    return sorted(enumerate(units), key=lambda pair: pair[1].start)
