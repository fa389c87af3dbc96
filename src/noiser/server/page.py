"""What the page asks, with the names that its links use, and the HTML of what it shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, Field

from noiser.errors import NoiserError, ParameterError, PromptError
from noiser.files import json_messages
from noiser.server.jobs import Job, Models
from noiser.types import Prompt, TargetUnitName, TextUnitName

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.evaluation import Evaluation

FACT = "LeBron James professionally plays the sport of"
LONGEST_ANSWER = 96
"""Tokens of an answer from sources."""

_ROLE = re.compile(r"^(system|user|assistant):[ \t]*", re.MULTILINE | re.IGNORECASE)
_RULE = re.compile(r"^-{3,}[ \t]*$", re.MULTILINE)


class Ask(BaseModel):
    """The fields of the form; a link's parameters have the same names. Parameters of other names are ignored."""

    prompt: str = Field(max_length=200_000)
    chat: bool = False
    model: str = ""
    methods: str = "noiser"
    target: str = ""
    max_new_tokens: int = Field(default=1, ge=1, le=20)
    target_unit: TargetUnitName = "token"
    foil: str = ""
    unit: TextUnitName = "token"
    seed: int = 0
    sources: str = Field(default="", max_length=200_000)

    def question(self) -> dict[str, Any]:
        """The arguments of `noiser.attribute`, without the method. Raises PromptError where there is no prompt."""
        if not self.prompt.strip():
            raise PromptError("The prompt is empty; type a text, or paste one.")
        return {
            "prompt": parse_chat(self.prompt) if self.chat else self.prompt,
            "target": self.target or None,
            "foil": self.foil or None,
            "max_new_tokens": self.max_new_tokens,
            "target_unit": self.target_unit,
            "unit": self.unit,
            "seed": self.seed,
        }

    def run(self, models: Models, job: Job[Any]) -> Answer:
        """A heat map, several side by side, or citations."""
        asked, documents = self.question(), [text.strip() for text in _RULE.split(self.sources) if text.strip()]
        with models.use(self.model, job) as lm:
            if documents:
                from noiser import cite

                job.step(f"Answering from {len(documents)} sources")
                options: dict[str, Any] = {"answer": self.target or None, "max_new_tokens": LONGEST_ANSWER}
                cited = cite(lm, asked["prompt"], documents, seed=self.seed, progress=job.progress, **options)
                return Answer(cited._repr_html_(), [cited.to_dict()])  # pyright: ignore[reportPrivateUsage]
            attributions, failures = self._attributions(lm, asked, job)
        if not attributions:
            raise ParameterError(" ".join(failures) or "No method is chosen; expected at least one, such as noiser.")
        from noiser.attribution.html import fragment

        html = "".join(map(problem, failures)) + fragment(attributions)
        return Answer(html, [att.to_dict() for att in attributions])

    def _attributions(self, lm: Any, asked: dict[str, Any], job: Job[Any]) -> tuple[list[Attribution], list[str]]:
        """One attribution for each method, and what failed; the others stay."""
        from noiser import attribute

        attributions: list[Attribution] = []
        failures: list[str] = []
        for name in dict.fromkeys(filter(None, self.methods.split(","))):
            job.step(name)
            try:
                attributions.append(attribute(lm, method=name, progress=job.progress, **asked))
            except NoiserError as error:
                failures.append(f"{name}: {error}")
        return attributions, failures


class Tolerate(BaseModel):
    """How much noise does a unit tolerate?"""

    model: str = ""
    answer: dict[str, Any] = Field(description="The attribution that the page shows.")
    unit: int
    target: int = 0

    def run(self, models: Models, job: Job[Any]) -> Answer:
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
        return Answer(tolerance_html(att, curve, self.target))


class Measure(BaseModel):
    """Can the scores be believed?"""

    model: str = ""
    answers: list[dict[str, Any]] = Field(description="The attributions that the page shows.")
    metrics: list[str] = ["faithfulness"]
    seed: int = 0

    def run(self, models: Models, job: Job[Any]) -> Answer:
        """A table of numbers with a column for each attribution."""
        from noiser import evaluate
        from noiser.attribution import Attribution

        attributions = [Attribution.from_dict(answer) for answer in self.answers]
        evaluations: list[Evaluation] = []
        with models.use(self.model, job) as lm:
            for att in attributions:
                job.step(f"Measuring {att.method}")
                options: dict[str, Any] = {"metrics": self.metrics, "seed": self.seed}
                evaluations.append(evaluate(lm, att, progress=job.progress, **options))
        without = "<p>These numbers are about the target alone, without the foil.</p>"
        foils = any(att.foil is not None for att in attributions)
        return Answer(without * foils + numbers_html(evaluations))


class Answer(NamedTuple):
    """What the page shows and can save."""

    html: str
    saved: Sequence[dict[str, Any]] = ()


def problem(text: str) -> str:
    """An error as a line that is read out."""
    return f'<p class="error" role=alert>{escape(text)}</p>'


def numbers_html(evaluations: Sequence[Evaluation]) -> str:
    """What was measured, in words, a column for each evaluation; of many numbers, those without a reference fold."""
    from noiser.attribution.display import label
    from noiser.numbers import number
    from noiser.pages import html_table

    lines: dict[str, Any] = {}
    values: dict[str, list[str]] = {}
    for column, evaluation in enumerate(evaluations):
        for name, line in evaluation.summary().to_dict("index").items():
            lines[str(name)] = line
            values.setdefault(str(name), [""] * len(evaluations))[column] = number(line["value"])
    head = ["number", *(escape(label(evaluation.method)) for evaluation in evaluations), "no signal", "better"]

    def table(names: Sequence[str]) -> str:
        rows: list[list[str]] = []
        for name in names:
            line, none = lines[name], lines[name]["no_signal"]
            words = f"{escape(line['meaning'])}<small>{escape(name)}</small>"
            rows.append([words, *values[name], "" if none != none else f"{none:g}", line["better"]])
        return html_table(head, rows)

    folded = [name for name, line in lines.items() if len(lines) > 8 and line["no_signal"] != line["no_signal"]]
    html = table([name for name in lines if name not in folded])
    html += f"<details><summary>all other numbers</summary>{table(folded)}</details>" if folded else ""
    skipped = sorted({label(each.error) for evaluation in evaluations for each in evaluation.skipped})
    return f'<div class="noiser-att numbers">{html}</div>{"".join(map(problem, skipped))}'


def parse_chat(text: str) -> Prompt:
    r"""Chat messages from a transcript.

    A line that begins with `system:`, `user:` or `assistant:` begins a message; without any, all is one message of
    the user. A JSON list of messages is taken unchanged.

    >>> parse_chat("system: Be brief.\nuser: Name a sport.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Name a sport.'}]

    Raises:
        PromptError: there is text before the first role.
    """
    if (messages := json_messages(text)) is not None:
        return messages
    before, *rest = _ROLE.split(text)
    if not rest:
        return [{"role": "user", "content": text}]
    if before.strip():
        text = f"The chat has {before.strip()[:40]!r} before the first role; expected a line that begins with a role."
        raise PromptError(f"{text} Begin with system:, user: or assistant:.")
    return [
        {"role": role.lower(), "content": content.strip("\n")}
        for role, content in zip(rest[::2], rest[1::2], strict=True)
    ]
