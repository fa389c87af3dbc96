"""The page's questions, named as in its links, and the HTML of their answers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field

from noiser.attribution.display import headings
from noiser.attribution.markup import css
from noiser.attribution.regions import pictures_of
from noiser.engine._prepare_text import units_of_text
from noiser.errors import ParameterError, PromptError
from noiser.explain.announce import expected_inputs
from noiser.explain.tolerance_html import tolerance_html
from noiser.files import json_messages
from noiser.server.bounds import (
    MESSAGES,
    NAMES,
    PICTURES,
    SOURCES,
    BoundedName,
    BoundedText,
    DataUrl,
    Names,
    items,
)
from noiser.server.jobs import Models, QuestionJob
from noiser.server.questions import bounded_method
from noiser.text.pictures import (
    MOST_REGIONS,
    add_pictures,
    check_data_urls,
    grey_of,
    painted,
    read_picture,
    region_of,
)
from noiser.types import (
    WHOLE_ANSWER,
    AutoUnit,
    ImageUnit,
    Prompt,
    Question,
    Sources,
    TargetUnitName,
    TextUnitName,
    TorchSeed,
)

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.explain import Comparison
    from noiser.model import LanguageModel

FACT = "Anna was born in Lisbon. Her mother tongue is"

_ROLE = re.compile(r"^(system|user|assistant|tool):[ \t]*", re.MULTILINE | re.IGNORECASE)
# A rule between sources may have the title of the one that follows, as in "--- Opening hours".
_RULE = re.compile(r"^-{3,}(?:[ \t]+([^\s|:-].*?))?[ \t]*$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")


class AskedPictures(BaseModel):
    """A prompt with pictures, as the form has them. `greyed` has boxes (picture, left, top, right,
    bottom) that the visitor has struck out: they are grey before anything is asked.
    """

    prompt: BoundedText = ""
    pictures: Annotated[list[DataUrl], *items(PICTURES)] = []
    greyed: Annotated[list[tuple[int, int, int, int, int]], *items(MOST_REGIONS)] = []

    def chat_with_pictures(self, lm: LanguageModel) -> Prompt:
        """The prompt as a chat, with the pictures before the text of its last user message."""
        parts: list[dict[str, Any]] = [{"type": "image", "url": url} for url in self.pictures]
        if self.greyed:
            images = [
                read_picture(part, f"Picture {number}") for number, part in enumerate(parts, 1)
            ]
            regions = [region_of(images, picture, box) for picture, *box in self.greyed]
            grey = painted(images, regions, "grey", grey_of(lm.processor))
            parts = [{"type": "image", "image": image} for image in grey]
        chat = bounded_chat(self.prompt)
        return add_pictures(chat, parts) if parts else chat

    def again(self, lm: LanguageModel, att: Attribution) -> Prompt | None:
        """The prompt of an answer with its pictures, of which the answer has previews only; None
        where it has none.
        """
        return self.chat_with_pictures(lm) if pictures_of(att) else None


class PageForm(AskedPictures):
    """The fields of the form; a link's parameters have the same names.

    Parameters of other names are ignored. A prompt is a chat where the model has a chat template,
    unless `chat` says otherwise.
    """

    image_unit: Literal["2x2", "3x3", "4x4", "6x6", "8x8", "image"] = "4x4"
    chat: bool | None = None
    model: BoundedName = ""
    methods: BoundedName = "joint"
    target: BoundedText = ""
    max_new_tokens: int | None = Field(default=None, ge=1, le=20)
    target_unit: TargetUnitName | None = None
    foil: BoundedName = ""
    unit: Literal[TextUnitName, AutoUnit, "turn"] = "word"
    seed: TorchSeed = 0
    sources: BoundedText = ""
    before: BoundedText = ""

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """A heat map, several side by side, citations, or edits."""
        if not self.prompt.strip():
            raise PromptError("The prompt is empty; type a text, or paste one.")
        documents = _split_sources(self.sources)
        has_before = bool(self.before.strip())
        if documents and has_before:
            raise ParameterError(
                "Sources and an earlier version are two questions. Empty one of them."
            )
        methods = list(dict.fromkeys(filter(None, self.methods.split(","))))
        for name in methods:
            bounded_method(name)
        with models.use(self.model, job) as lm:
            if self.chat and not lm.chats:
                raise PromptError(
                    "This model has no chat template. Choose a chat model in the settings."
                )
            is_chat = lm.chats if self.chat is None else self.chat
            if self.pictures and (documents or has_before):
                raise ParameterError(
                    "Pictures are explained without sources or an earlier version. Empty these "
                    "fields, or take the pictures out."
                )
            if self.pictures:
                prompt = self.chat_with_pictures(lm)
            else:
                prompt = bounded_chat(self.prompt) if is_chat else self.prompt
            if documents:
                return self._cite(lm, prompt, documents, job)
            if has_before:
                before = bounded_chat(self.before) if is_chat else self.before
                return self._diff(lm, before, prompt, job)
            began = time.monotonic()
            speed = models.speeds.get(lm.identity.name)
            expected = self._expected_token_forwards(lm, prompt, methods)
            if speed and expected:
                job.expected = expected / speed + began - job.began
            comparison = self._compare(lm, prompt, methods, job)
            # The work that was expected, not the work done, over the time: inputs share prefixes
            # and answers end early, here as in the next question.
            seconds = max(time.monotonic() - began, 1e-3)
            models.speeds[lm.identity.name] = max(speed or 0.0, expected / seconds)
            return _answer(comparison, comparison)

    def _parts_of_pictures(self) -> ImageUnit:
        """Rows and columns, or each picture as one."""
        if self.image_unit == "image":
            return "image"
        rows, columns = map(int, self.image_unit.split("x"))
        return (rows, columns)

    def _cite(
        self, lm: LanguageModel, prompt: Prompt, documents: Sources, job: QuestionJob
    ) -> dict[str, Any]:
        """The answer to the prompt, with the documents that it was written from."""
        from noiser import cite

        job.step(f"Answering from {len(documents)} sources")
        citations = cite(
            lm,
            prompt,
            documents,
            answer=self.target or None,
            seed=self.seed,
            progress=job.progress,
        )
        return _answer(citations, [citations])

    def _diff(
        self, lm: LanguageModel, before: Prompt, prompt: Prompt, job: QuestionJob
    ) -> dict[str, Any]:
        """The edits of the prompt that changed the answer."""
        from noiser import diff

        job.step("Comparing both versions")
        edits = diff(
            lm,
            before,
            prompt,
            target=self.target or None,
            max_new_tokens=self.max_new_tokens or 16,
            seed=self.seed,
            progress=job.progress,
        )
        return _answer(edits, [edits])

    def _expected_token_forwards(
        self, lm: LanguageModel, prompt: Prompt, methods: Sequence[str]
    ) -> int:
        """About how many tokens the methods run, so that long work is announced; 0 if unknown."""
        if self.unit == "auto" or lm.is_text_only:
            return 0
        question = Question(prompt=prompt, unit=self.unit)
        encoding = lm.encode(prompt, pictures=True)
        units, _ = units_of_text(encoding, question)
        answer = self.max_new_tokens or (1 if isinstance(prompt, str) else WHOLE_ANSWER)
        inputs = 0
        for name in methods:
            inputs += expected_inputs(bounded_method(name), len(units), self.seed)
        return inputs * (len(encoding.token_ids) + answer)

    def _compare(
        self, lm: LanguageModel, prompt: Prompt, methods: Sequence[str], job: QuestionJob
    ) -> Comparison:
        """The attributions by all methods."""
        from noiser import compare

        job.step("Explaining" if len(methods) == 1 else f"Explaining by {', '.join(methods)}")
        return compare(
            lm,
            prompt,
            methods,
            target=self.target or None,
            foil=self.foil or None,
            unit=self.unit,
            image_unit=self._parts_of_pictures(),
            max_new_tokens=self.max_new_tokens,
            target_unit=self.target_unit,
            seed=self.seed,
            progress=job.progress,
        )


def _split_sources(text: str) -> list[str | tuple[str, str]]:
    r"""The sources of a text, cut at its rules (---), or at blank lines where it has no rule.

    A rule may have a title, which its source then has.

    >>> _split_sources("--- Hours\nOpen at nine.\n---\nDogs wait outside.")
    [('Hours', 'Open at nine.'), 'Dogs wait outside.']
    """
    if _RULE.search(text):
        first, *others = _RULE.split(text)  # a title, or None, and a text in turn
        titled = [("", first), *zip(others[::2], others[1::2], strict=True)]
    else:
        titled = [("", part) for part in _BLANK_LINES.split(text)]
    sources: list[str | tuple[str, str]] = []
    for title, part in titled:
        body = part.strip()
        if body:
            sources.append((title, body) if title else body)
    if len(sources) > SOURCES:
        raise ParameterError(f"There are {len(sources)} sources; expected at most {SOURCES}.")
    return sources


def _answer(result: Any, saved: Iterable[Any]) -> dict[str, Any]:
    """The HTML of a result, and the records that the page keeps to ask further."""
    return {"html": result._repr_html_(), "saved": [part.to_dict() for part in saved]}


class Keep(BaseModel):
    """An answer as a text that can be kept: a page, or Markdown for a report."""

    answers: Annotated[list[dict[str, Any]], *items(NAMES), Field(min_length=1)]
    form: Literal["html", "markdown"]

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:  # noqa: ARG002 - no model is asked
        """The text that the library writes of the same result."""
        result = _result_of(self.answers)
        if self.form == "html":
            return {"text": result.to_html()}
        return {"text": result.to_markdown()}


def _result_of(records: Sequence[Mapping[str, Any]]) -> Any:
    """The result that was saved: citations, edits, or the attributions of one prompt."""
    from noiser.attribution import Attribution
    from noiser.explain import Citations, Comparison, Diff

    kinds = {"noiser.citations": Citations, "noiser.diff": Diff}
    kind = kinds.get(str(records[0].get("format")))
    if kind is not None:
        return kind.from_dict(records[0])
    return Comparison(tuple(Attribution.from_dict(record) for record in records))


class RunWithout(AskedPictures):
    """What does the model say without each word? For answers of methods that do not run that."""

    model: BoundedName = ""
    answers: Annotated[list[dict[str, Any]], *items(NAMES), Field(min_length=1)]

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """The same answer, with what was asked."""
        from noiser import without
        from noiser.attribution import Attribution
        from noiser.explain import Comparison

        attributions = [Attribution.from_dict(answer) for answer in self.answers]
        with models.use(self.model, job) as lm:
            job.step("Taking each word out")
            for index, att in enumerate(attributions):
                if att.without is None:
                    prompt = self.again(lm, att)
                    attributions[index] = without(lm, att, prompt=prompt, progress=job.progress)
        return _answer(Comparison(tuple(attributions)), attributions)


class CheckScores(AskedPictures):
    """Can the scores be believed? A test of a few seconds."""

    model: BoundedName = ""
    answers: Annotated[list[dict[str, Any]], *items(NAMES), Field(min_length=1)]
    target: int = 0

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """What the test found, a paragraph for each method."""
        from noiser.attribution import Attribution
        from noiser.attribution.markup import sentence_html
        from noiser.explain.spot_check import spot_check

        attributions = [Attribution.from_dict(answer) for answer in self.answers]
        check_target(self.target, attributions[0])
        parts: list[str] = []
        with models.use(self.model, job) as lm:
            for att, name in zip(attributions, headings(attributions), strict=True):
                job.step("Testing" if len(attributions) == 1 else f"Testing {name}")
                prompt = self.again(lm, att)
                found = spot_check(lm, att, self.target, job.progress, prompt=prompt)
                heading = f"<h3>{escape(name)}</h3>" if len(attributions) > 1 else ""
                pieces = sentence_html(found.pieces) if found.pieces else ""
                parts.append(f"{heading}<p class=says>{escape(found.verdict)}</p>{pieces}")
        return {"html": f'<div class="noiser-att tested">{"".join(parts)}</div>'}


def check_target(target: int, att: Attribution) -> None:
    """Raises ParameterError unless the attribution has the target."""
    if not 0 <= target < len(att.targets):
        raise ParameterError(f"target is {target}; expected 0 to {len(att.targets) - 1}.")


class Tolerate(BaseModel):
    """How much noise does a unit tolerate?"""

    model: BoundedName = ""
    answer: dict[str, Any]
    unit: int
    target: int = 0

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """A chart."""
        from noiser import tolerance
        from noiser.attribution import Attribution

        att = Attribution.from_dict(self.answer)
        check_target(self.target, att)
        with models.use(self.model, job) as lm:
            job.step("Adding noise")
            curve = tolerance(lm, att, self.unit, progress=job.progress)
        return {"html": tolerance_html(curve, self.target)}


class FindRule(AskedPictures):
    """Which units does the answer need, as a rule?"""

    model: BoundedName = ""
    answer: dict[str, Any]
    target: int = 0
    seed: TorchSeed = 0

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """The rule as a line below the heat map, and for its units the class of their ring."""
        from noiser.attribution import Attribution
        from noiser.explain import rule_of

        att = Attribution.from_dict(self.answer)
        check_target(self.target, att)
        with models.use(self.model, job) as lm:
            job.step("Looking for a rule")
            prompt = self.again(lm, att)
            found = rule_of(
                lm, att, self.target, seed=self.seed, prompt=prompt, progress=job.progress
            )
        style = css("explain", "rule.css")
        return {"html": f"<style>{style}</style>{found.line()}", "rings": found.rings}


class Measure(BaseModel):
    """All the numbers that say whether scores can be believed."""

    model: BoundedName = ""
    answers: Annotated[list[dict[str, Any]], *items(NAMES)]
    metrics: Names = ["faithfulness"]
    seed: TorchSeed = 0

    def run(self, models: Models, job: QuestionJob) -> dict[str, Any]:
        """A table of numbers for each attribution."""
        from noiser import evaluate
        from noiser.attribution import Attribution

        attributions = [Attribution.from_dict(answer) for answer in self.answers]
        options: dict[str, Any] = {
            "metrics": self.metrics,
            "seed": self.seed,
            "progress": job.progress,
        }
        parts: list[str] = []
        with models.use(self.model, job) as lm:
            for att, name in zip(attributions, headings(attributions), strict=True):
                job.step(f"Measuring {name}")
                table = evaluate(lm, att, **options).fragment()
                parts.append(f"<h3>{escape(name)}</h3>{table}")
        return {"html": f'<div class="noiser-att numbers">{"".join(parts)}</div>'}


def bounded_chat(text: str) -> list[dict[str, Any]]:
    """The messages of a chat. Raises PromptError for too many, and for pictures that are no data
    URLs.
    """
    chat = parse_chat(text)
    if len(chat) > MESSAGES:
        raise PromptError(f"The chat has {len(chat)} messages; expected at most {MESSAGES}.")
    check_data_urls(chat)
    return chat


def parse_chat(text: str) -> list[dict[str, Any]]:
    r"""Chat messages from JSON, or from a transcript.

    A text without any role is one message of the user.

    >>> parse_chat("system: Be brief.\nuser: Name a sport.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Name a sport.'}]
    """
    messages = json_messages(text)
    if messages is not None:
        return messages
    before, *parts = _ROLE.split(text)  # a role and its content in turn
    if not parts:
        return [{"role": "user", "content": text}]
    if before.strip():
        raise PromptError(
            f"The chat has {before.strip()[:40]!r} before the first role; expected a line that "
            "begins with a role. Begin with system:, user:, assistant: or tool:."
        )
    chat: list[dict[str, str]] = []
    for role, content in zip(parts[::2], parts[1::2], strict=True):
        chat.append({"role": role.lower(), "content": content.strip("\n")})
    return chat
