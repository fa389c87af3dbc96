"""The page's questions, named as in its links, and the HTML of their answers, such as the chart of a tolerance."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from noiser.attribution.display import label
from noiser.errors import ParameterError, PromptError
from noiser.files import json_messages
from noiser.server.jobs import Job, Models
from noiser.server.questions import bounded_method
from noiser.types import AutoUnit, Prompt, TargetUnitName, TextUnitName

if TYPE_CHECKING:
    from noiser.attribution import Attribution
    from noiser.explain import Tolerance

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
        return {"html": tolerance_html(att, curve, self.target)}


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
                parts.append(f"<h3>{escape(name)}</h3>{evaluate(lm, att, **options).to_html()}")
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


# ---- the chart of a tolerance ----------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 680, 300, 56, 660, 18, 254
OCTAVES = 10  # powers of two from left to right; the last is k = 1


def tolerance_html(att: Attribution, curve: Tolerance, row: int) -> str:
    """A drawing of one target's probabilities, the same in words, and its numbers in a table.

    Flips are marked by shape, not by colour; every mark says its numbers under the pointer.
    """
    unit, target = (
        f"“<bdi>{escape(label(each.text))}</bdi>”" for each in (curve.unit, curve.targets[row])
    )
    frame: Any = curve.to_dataframe().query(f"target_index == {row} and k > 0")
    if frame.empty:
        return f'<div class="noiser-att"><p>{unit} does not stand before {target}: choose another of them.</p></div>'
    frame["leader"] = frame["leader"].map(label)
    frame["leads"] = [
        f"“{point.leader}” leads with {point.leader_probability:.3g}"
        for point in frame.itertuples()
    ]
    levels = {"threshold": (att.thresholds, (row, curve.unit_index)), "k_min": (att.k_min, row)}
    levels = {
        name: k for name, (ks, at) in levels.items() if ks is not None and (k := float(ks[at])) > 0
    }
    clean, flips = curve.targets[row].probability, frame[frame["flips"]]
    words = f"Without noise the probability is {clean:.3g}. "
    if flips.empty:
        words += f"The prediction does not change up to k = {frame['k'].iloc[-1]:.3g}."
    else:
        words += (
            f"At k = {flips['k'].iloc[0]:.3g} the model changes its mind: {flips['leads'].iloc[0]}."
        )
    if "threshold" in levels:
        words += f" Noiser's search put this unit's threshold at {levels['threshold']:.3g}."
    words, columns = (
        escape(words),
        ["k", "probability", "stderr", "leader", "flips", "leader_probability"],
    )
    numbers = frame[columns].to_html(index=False, border=0, float_format="{:.4g}".format)
    return (
        f'<div class="noiser-att"><h3 class=chart-title>Noise on {unit}, prediction {target}</h3>'
        f'<div class=wide tabindex=0><svg class=chart viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{words}">'
        f"{_drawing(frame, levels, clean)}</svg></div>"
        "<p class=facts>● the prediction stays&ensp;◇ another token leads&ensp;"
        f"band: two standard errors over the noise samples</p><p>{words}</p><details>"
        f"<summary>the chart in numbers</summary><div class=wide tabindex=0>{numbers}</div></details></div>"
    )


def _drawing(frame: Any, levels: Mapping[str, float], clean: float) -> str:
    """The marks of a chart: k on a scale of powers of two, probability from 0 upwards."""
    largest = max(1e-9, frame[["probability", "foil_probability"]].max(axis=None))
    unit = 10.0 ** math.floor(math.log10(largest))
    top = min(1.0, unit * math.ceil(largest / unit))

    def x(k: Any) -> Any:
        return (LEFT + (1 + np.log2(k) / OCTAVES).clip(0, 1) * (RIGHT - LEFT)).round(1)

    def y(p: Any) -> Any:
        return (BOTTOM - np.divide(p, top).clip(0, 1) * (BOTTOM - TOP)).round(1)

    def places(values: Any) -> list[str]:
        return [f"{across},{up}" for across, up in zip(x(frame["k"]), y(values), strict=True)]

    middle, parts = (TOP + BOTTOM) / 2, list[str]()
    for p in (top * tick / 4 for tick in range(5)):
        parts.append(f'<path class=grid d="M{LEFT} {y(p)}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(p) + 4}" text-anchor=end>{p:.3g}</text>')
    for k in (2.0**-power for power in range(0, OCTAVES + 1, 2)):
        parts.append(f'<path class=grid d="M{x(k)} {TOP}V{BOTTOM}"/>')
        parts.append(f'<text x="{x(k)}" y="{BOTTOM + 17}" text-anchor=middle>{k:.2g}</text>')
    parts.append(
        f'<text class=axis x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor=middle>noise k</text>'
    )
    parts.append(
        f'<text class=axis transform="translate(13 {middle}) rotate(-90)" text-anchor=middle>p(target)</text>'
    )
    upper, lower = (
        places(frame["probability"] + 2 * sign * frame["stderr"].fillna(0)) for sign in (1, -1)
    )
    parts.append(f'<polygon class=band points="{" ".join(upper + lower[::-1])}"/>')
    parts.append(f'<path class=clean d="M{LEFT} {y(clean)}H{RIGHT}"/>')
    parts.append(f'<polyline class=line points="{" ".join(places(frame["probability"]))}"/>')
    if frame["foil_probability"].notna().all():
        foil = " ".join(places(frame["foil_probability"]))
        parts.append(
            f'<polyline class="line foil" points="{foil}"><title>the foil</title></polyline>'
        )
    for number, (name, k) in enumerate(levels.items()):
        anchor, side = ("end", -5) if x(k) > WIDTH * 0.75 else ("start", 5)
        place = f'x="{x(k) + side}" y="{TOP + 10 + 14 * number}" text-anchor={anchor}'
        parts.append(
            f'<path class={name} d="M{x(k)} {TOP}V{BOTTOM}"/><text class=axis {place}>{name} {k:.3g}</text>'
        )
    return "".join(
        [*parts, *(_mark(point, x(point.k), y(point.probability)) for point in frame.itertuples())]
    )


def _mark(point: Any, x: float, y: float) -> str:
    circle, diamond = f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", f"M{x} {y - 6}l6 6l-6 6l-6 -6z"
    kind, d = ("flips", diamond) if point.flips else ("stays", circle)
    spread = "" if math.isnan(point.stderr) else f" ± {point.stderr:.2g}"
    leads = f", {point.leads}" if point.flips else ""
    words = f"k {point.k:.3g}: p(target) {point.probability:.3g}{spread}{leads}"
    return f'<path class="point {kind}" d="{d}"><title>{escape(words)}</title></path>'
