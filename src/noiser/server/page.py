"""The page's questions, named as in its links, and the HTML of their answers."""

from __future__ import annotations

import re
from html import escape
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from noiser.errors import ParameterError, PromptError
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

    def run(self, models: Models, job: Job[Any]) -> dict[str, Any]:
        """A heat map, several side by side, citations, or edits."""
        from noiser import cite, compare, diff

        if not self.prompt.strip():
            raise PromptError("The prompt is empty; type a text, or paste one.")
        read = parse_chat if self.chat else str
        prompt = read(self.prompt)
        asked: dict[str, Any] = {"seed": self.seed, "progress": job.progress}
        between = _RULE if _RULE.search(self.sources) else _BLANK
        with models.use(self.model, job) as lm:
            if self.chat and not lm.chats:
                raise PromptError("This model has no chat template. Choose a chat model in the settings.")
            if documents := [text.strip() for text in between.split(self.sources) if text.strip()]:
                if self.before.strip():
                    raise ParameterError("Sources and an earlier version are two questions. Empty one of them.")
                job.step(f"Answering from {len(documents)} sources")
                cited = cite(lm, prompt, documents, answer=self.target or None, **asked)
                return {"html": cited._repr_html_(), "saved": [cited.to_dict()]}  # pyright: ignore[reportPrivateUsage]
            asked["target"] = self.target or None
            if self.before.strip():
                job.step("Comparing both versions")
                found = diff(lm, read(self.before), prompt, max_new_tokens=self.max_new_tokens or 16, **asked)
                return {"html": found._repr_html_(), "saved": [found.to_dict()]}  # pyright: ignore[reportPrivateUsage]
            asked |= {"foil": self.foil or None, "unit": self.unit}
            asked |= {"max_new_tokens": self.max_new_tokens, "target_unit": self.target_unit}
            methods = list(dict.fromkeys(filter(None, self.methods.split(","))))
            for name in methods:
                bounded_method(name)
            job.step(", ".join(methods))
            found = compare(lm, prompt, methods, **asked)
        return {"html": found._repr_html_(), "saved": [att.to_dict() for att in found]}  # pyright: ignore[reportPrivateUsage]


class Tolerate(BaseModel):
    """How much noise does a unit tolerate?"""

    model: Short = ""
    answer: dict[str, Any]
    unit: int
    target: int = 0

    def run(self, models: Models, job: Job[Any]) -> dict[str, Any]:
        """A chart."""
        from noiser import tolerance
        from noiser.attribution import Attribution
        from noiser.server.chart import tolerance_html

        att = Attribution.from_dict(self.answer)
        if not 0 <= self.target < len(att.targets):
            raise ParameterError(f"target is {self.target}; expected 0 to {len(att.targets) - 1}.")
        with models.use(self.model, job) as lm:
            job.step("Adding noise")
            curve = tolerance(lm, att, self.unit, progress=job.progress)
        return {"html": tolerance_html(att, curve, self.target)}


class Measure(BaseModel):
    """Can the scores be believed?"""

    model: Short = ""
    answers: Annotated[list[dict[str, Any]], Field(max_length=20)]
    metrics: Annotated[list[Short], Field(max_length=20)] = ["faithfulness"]
    seed: int = 0

    def run(self, models: Models, job: Job[Any]) -> dict[str, Any]:
        """A table of numbers for each attribution."""
        from noiser import evaluate
        from noiser.attribution import Attribution
        from noiser.attribution.display import label

        attributions = [Attribution.from_dict(answer) for answer in self.answers]
        parts: list[str] = []
        with models.use(self.model, job) as lm:
            for att in attributions:
                name = label(att.method)
                job.step(f"Measuring {name}")
                options: dict[str, Any] = {"metrics": self.metrics, "seed": self.seed}
                found = evaluate(lm, att, progress=job.progress, **options)
                parts.append(f"<h3>{escape(name)}</h3>{found.to_html()}")
        return {"html": f'<div class="noiser-att numbers">{"".join(parts)}</div>'}


def parse_chat(text: str) -> Prompt:
    r"""Chat messages from a transcript.

    A line that begins with `system:`, `user:`, `assistant:` or `tool:` begins a message; without any, all is one
    message of the user. A JSON list of messages is taken unchanged.

    >>> parse_chat("system: Be brief.\nuser: Name a sport.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Name a sport.'}]

    Raises:
        PromptError: there is text before the first role.
    """
    if (messages := json_messages(text)) is not None:
        return messages
    before, *rest = _ROLE.split(text)
    if rest and before.strip():
        text = f"The chat has {before.strip()[:40]!r} before the first role; expected a line that begins with a role."
        raise PromptError(f"{text} Begin with system:, user:, assistant: or tool:.")
    pairs = zip(rest[::2], rest[1::2], strict=True) if rest else [("user", text)]
    return [{"role": role.lower(), "content": content.strip("\n") if rest else content} for role, content in pairs]
