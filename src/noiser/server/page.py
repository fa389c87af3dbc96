"""The page's questions, named as in its links, and the HTML of their answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from noiser.attribution.display import label
from noiser.errors import ParameterError, PromptError
from noiser.explain.tolerance_html import tolerance_html
from noiser.files import json_messages
from noiser.server.jobs import Job, Models
from noiser.server.questions import bounded_method
from noiser.types import AutoUnit, Prompt, TargetUnitName, TextUnitName

FACT = "LeBron James professionally plays the sport of"

_ROLE = re.compile(r"^(system|user|assistant|tool):[ \t]*", re.MULTILINE | re.IGNORECASE)
_RULE, _BLANK = re.compile(r"^-{3,}[ \t]*$", re.MULTILINE), re.compile(r"\n\s*\n")

Short = Annotated[str, Field(max_length=1000)]
Long = Annotated[str, Field(max_length=200_000)]


class Ask(BaseModel):
    """The fields of the form; a link's parameters have the same names. Parameters of other names are ignored."""

    prompt: Long = ""
    chat: bool = False
    model: Short = ""
    methods: Short = "joint"
    target: Long = ""
    max_new_tokens: int | None = Field(default=None, ge=1, le=20)
    target_unit: TargetUnitName | None = None
    foil: Short = ""
    unit: Literal[TextUnitName, AutoUnit, "turn"] = "token"
    seed: int = 0
    sources: Long = ""
    before: Long = ""

    def run(self, models: Models, job: Job) -> dict[str, Any]:
        """A heat map, several side by side, citations, or edits."""
        from noiser import cite, compare, diff

        if not self.prompt.strip():
            raise PromptError("The prompt is empty; type a text, or paste one.")
        read = parse_chat if self.chat else str
        prompt, before = read(self.prompt), self.before.strip() and read(self.before)
        between = _RULE if _RULE.search(self.sources) else _BLANK
        documents = [text.strip() for text in between.split(self.sources) if text.strip()]
        if documents and before:
            raise ParameterError(
                "Sources and an earlier version are two questions. Empty one of them."
            )
        methods = list(dict.fromkeys(filter(None, self.methods.split(","))))
        for name in methods:
            bounded_method(name)
        asked: dict[str, Any] = {"seed": self.seed, "progress": job.progress}
        with models.use(self.model, job) as lm:
            if self.chat and not lm.chats:
                raise PromptError(
                    "This model has no chat template. Choose a chat model in the settings."
                )
            if documents:
                job.step(f"Answering from {len(documents)} sources")
                found = cite(lm, prompt, documents, answer=self.target or None, **asked)
                return _shown(found, [found])
            asked["target"] = self.target or None
            if before:
                job.step("Comparing both versions")
                found = diff(lm, before, prompt, max_new_tokens=self.max_new_tokens or 16, **asked)
                return _shown(found, [found])
            asked |= {"foil": self.foil or None, "unit": self.unit}
            asked |= {"max_new_tokens": self.max_new_tokens, "target_unit": self.target_unit}
            job.step(", ".join(methods))
            found = compare(lm, prompt, methods, **asked)
        return _shown(found, found)


def _shown(found: Any, saved: Iterable[Any]) -> dict[str, Any]:
    return {"html": found._repr_html_(), "saved": [each.to_dict() for each in saved]}


class Keep(BaseModel):
    """An answer as a text that can be kept: a page, or Markdown for a report."""

    answers: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=20)]
    form: Literal["html", "markdown"]

    def run(self, models: Models, job: Job) -> dict[str, Any]:  # noqa: ARG002 - no model is asked
        """The text that the library writes of the same result."""
        result = _result_of(self.answers)
        return {"text": result.to_html() if self.form == "html" else result.to_markdown()}


def _result_of(records: Sequence[Mapping[str, Any]]) -> Any:
    """The result that was saved: citations, edits, or the attributions of one prompt."""
    from noiser.attribution import Attribution
    from noiser.explain import Citations, Comparison, Diff

    kinds = {"noiser.citations": Citations, "noiser.diff": Diff}
    kind = kinds.get(str(records[0].get("format")))
    if kind is not None:
        return kind.from_dict(records[0])
    return Comparison(tuple(Attribution.from_dict(record) for record in records))


class Tolerate(BaseModel):
    """How much noise does a unit tolerate?"""

    model: Short = ""
    answer: dict[str, Any]
    unit: int
    target: int = 0

    def run(self, models: Models, job: Job) -> dict[str, Any]:
        """A chart."""
        from noiser import tolerance
        from noiser.attribution import Attribution

        att = Attribution.from_dict(self.answer)
        if not 0 <= self.target < len(att.targets):
            raise ParameterError(f"target is {self.target}; expected 0 to {len(att.targets) - 1}.")
        with models.use(self.model, job) as lm:
            job.step("Adding noise")
            curve = tolerance(lm, att, self.unit, progress=job.progress)
        return {"html": tolerance_html(curve, self.target)}


class Measure(BaseModel):
    """Can the scores be believed?"""

    model: Short = ""
    answers: Annotated[list[dict[str, Any]], Field(max_length=20)]
    metrics: Annotated[list[Short], Field(max_length=20)] = ["faithfulness"]
    seed: int = 0

    def run(self, models: Models, job: Job) -> dict[str, Any]:
        """A table of numbers for each attribution."""
        from noiser import evaluate
        from noiser.attribution import Attribution

        attributions, parts = (
            [Attribution.from_dict(answer) for answer in self.answers],
            list[str](),
        )
        options: dict[str, Any] = {
            "metrics": self.metrics,
            "seed": self.seed,
            "progress": job.progress,
        }
        with models.use(self.model, job) as lm:
            for att in attributions:
                name = label(att.method)
                job.step(f"Measuring {name}")
                parts.append(f"<h3>{escape(name)}</h3>{evaluate(lm, att, **options).fragment()}")
        return {"html": f'<div class="noiser-att numbers">{"".join(parts)}</div>'}


def parse_chat(text: str) -> Prompt:
    r"""Chat messages from JSON, or from a transcript; without any role, all is one message of the user.

    >>> parse_chat("system: Be brief.\nuser: Name a sport.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Name a sport.'}]
    """
    if (messages := json_messages(text)) is not None:
        return messages
    before, *rest = _ROLE.split(text)
    if rest and before.strip():
        text = f"The chat has {before.strip()[:40]!r} before the first role; expected a line that begins with a role."
        raise PromptError(f"{text} Begin with system:, user:, assistant: or tool:.")
    pairs = zip(rest[::2], rest[1::2], strict=True) if rest else [("user", text)]
    return [
        {"role": role.lower(), "content": content.strip("\n") if rest else content}
        for role, content in pairs
    ]
