"""The page: its components, which handler each event calls, and where the handlers' views go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any, Literal, get_args
from urllib.parse import parse_qsl

import gradio as gr
from gradio import themes

from noiser.app.examples import FACT, example_answer, offered_examples
from noiser.app.handlers import METRICS, Answer, Handlers, View, file_of, result_html, target_choices, unit_choices
from noiser.app.question import MOST_TARGETS, Question
from noiser.app.show import example_note, explain, problem
from noiser.checks import check_choice, check_not_negative
from noiser.errors import NoiserError
from noiser.methods import METHODS
from noiser.types import TargetUnitName

Shown = tuple[Any, ...]
"""One value per component, in the order of the event's outputs."""

LONGEST_WAIT = 2
"""Minutes; what would take longer is answered with what to do instead."""

ANSWER_KEPT = 3600
"""Seconds that an answer stays in memory."""

GONE = "The answer is no longer kept on the server. Press Ask to get it again."


def look() -> dict[str, Any]:
    """Theme, style sheet and script, as Gradio takes them.

    System fonts, so that nothing is fetched; the visitor's colour scheme; text that contrasts (WCAG AA).
    """
    text = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
    theme = themes.Default(primary_hue="blue", neutral_hue="slate", font=text, font_mono=["ui-monospace", "monospace"])
    theme.set(
        body_text_color_subdued="*neutral_600",
        body_text_color_subdued_dark="*neutral_300",
        block_info_text_color="*neutral_600",
        block_info_text_color_dark="*neutral_300",
        button_primary_background_fill="*primary_700",
        button_primary_background_fill_hover="*primary_800",
        button_primary_background_fill_dark="*primary_700",
        button_primary_text_color="white",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )
    return {"theme": theme, "css": _asset("page.css"), "head": f"<script>{_asset('page.js')}</script>"}


def _asset(name: str) -> str:
    return files("noiser.app").joinpath(name).read_text(encoding="utf-8")


def build(handlers: Handlers) -> gr.Blocks:
    """The page as Gradio has it, not yet served."""
    with gr.Blocks(title="Noiser", analytics_enabled=False, fill_width=True) as blocks:
        page = _Page(handlers)
        page.connect(blocks)
    return blocks


class _Page:
    """Components, and the methods that events call: they take what their inputs hold and give what outputs show."""

    def __init__(self, handlers: Handlers) -> None:
        self.handlers = handlers
        self.example = example = example_answer()
        self.answer = gr.State(None, time_to_live=ANSWER_KEPT)  # Gradio's way back when it forgets: never an answer
        # Hidden: the question as the query of a link; the query that the page was opened with, once the fields are as
        # it says; the same if it has a prompt, and so asks; a file on its way to the visitor's disk; and what the page
        # shows, "example", "answer" or nothing, which it remembers itself.
        self.query, self.linked, self.asked, self.file, self.showing = (
            gr.Textbox(value, visible="hidden", elem_id=f"noiser-{name}")
            for name, value in {"query": "", "linked": "", "asked": "", "file": "", "showing": "example"}.items()
        )
        _html("<h1>Noiser</h1><p>Which parts of the input made the model say that?</p>", "noiser-title")
        with gr.Row():
            with gr.Column(scale=4, min_width=320):
                self._lay_out_question(handlers.models.names)
            with gr.Column(scale=7, min_width=320):
                self.status = _html(None, "noiser-status")
                pick = 'noiserPage.onPick(element, (place) => trigger("pick", place))'
                shown = example_note(example.model) + result_html(example)
                self.result: Any = _html(shown, "noiser-result", js_on_load=pick)
                # What comes after an answer needs its model.
                with gr.Column(visible=example.model in handlers.models.names, elem_id="noiser-after") as self.after:
                    self._lay_out_results(example)

    def _lay_out_question(self, models: Sequence[str]) -> None:
        begin, fields = Question(), dict[str, Any]()
        self.examples: dict[gr.Button, Question] = {}
        fields["prompt"] = gr.Textbox(
            FACT,
            label="Prompt",
            lines=5,
            max_lines=16,
            placeholder="Any text that the model continues",
            info="Shift+Enter asks.",
            elem_id="noiser-prompt",
            autofocus=True,
        )
        with gr.Row(elem_id="noiser-examples"):
            _html("<span>Examples:</span>")
            for name, question in offered_examples(models).items():
                self.examples[gr.Button(name, size="sm", min_width=0, scale=0)] = question
        with gr.Row():
            # Always ready: a new question replaces one that is being answered, and updates that cross on a busy machine
            # can leave a button as it was.
            self.run = gr.Button("Ask", variant="primary", min_width=100, elem_id="noiser-run")
            self.stop_button = gr.Button("Stop", min_width=100, elem_id="noiser-stop")
        with gr.Accordion("Answer from sources, and cite them", open=False, elem_id="noiser-sources") as self.sources:
            fields["sources"] = gr.Textbox(
                begin.sources,
                label="Sources",
                lines=6,
                max_lines=16,
                placeholder="A text\n---\nAnother text",
                info="A line --- stands between two of them. The prompt is then a question; of the settings, "
                "model, target, chat and seed count.",
            )
        with gr.Accordion("Settings", open=False, elem_id="noiser-settings") as self.settings:
            fields["model"] = gr.Dropdown(list(models), value=models[0], label="Model")
            fields["methods"] = gr.Dropdown(
                METHODS.names(),
                value=list(begin.methods),
                multiselect=True,
                label="Methods",
                info="Several: side by side.",
            )
            fields["unit"] = gr.Radio(["token", "word", "sentence"], value=begin.unit, label="A score for every")
            fields["chat"] = gr.Radio(
                ["text", "chat"],
                value="text",
                label="The prompt is a",
                info="In a chat, a line beginning with system:, user: or assistant: begins a message.",
            )
            with gr.Row():
                # A field that was never unfolded has no text in Gradio, not an empty one, unless it is given.
                fields["target"] = gr.Textbox(
                    begin.target,
                    label="Target",
                    info="Why this?",
                    placeholder="what the model says",
                    min_width=130,
                )
                fields["foil"] = gr.Textbox(
                    begin.foil, label="Foil", info="And not this?", placeholder="none", min_width=130
                )
            # Without `minimum` and `maximum`, whose errors are Gradio's and do not name the number.
            fields["max_new_tokens"] = gr.Number(
                begin.max_new_tokens,
                precision=0,
                label="Tokens of the continuation",
                info=f"Without a target; 1 to {MOST_TARGETS}.",
            )
            fields["target_unit"] = gr.Radio(
                list(get_args(TargetUnitName)),
                value=begin.target_unit,
                label="Explain every",
                info="Of the continuation.",
            )
            fields["all_thresholds"] = gr.Checkbox(
                begin.all_thresholds,
                label="Thresholds of all units",
                info="Noiser; off is faster, with the same scores.",
            )
            fields["seed"] = gr.Number(begin.seed, precision=0, label="Seed")
            self.longest_wait = gr.Number(LONGEST_WAIT, label="Longest wait (minutes)", info="0: however long.")
        self.fields = fields

    def _lay_out_results(self, example: Answer) -> None:
        units, targets = unit_choices(example), target_choices(example)
        with gr.Row(elem_id="noiser-save"):
            _html("<span>Save:</span>")
            self.save = {
                form: gr.Button(form.upper(), size="sm", min_width=0, scale=0, elem_id=f"noiser-{form}")
                for form in ("json", "html", "png")
            }
            self.copy = gr.Button("Copy as Markdown", size="sm", min_width=0, scale=0, elem_id="noiser-markdown")
        self.link = gr.Textbox(
            label="Link to this question",
            placeholder="There is one when you have asked.",
            interactive=False,
            max_lines=1,
            buttons=["copy"],
            elem_id="noiser-link",
        )
        with gr.Column(elem_id="noiser-probes") as self.probes:
            self._lay_out_probes(units, targets)

    def _lay_out_probes(self, units: list[tuple[str, int]], targets: list[tuple[str, int]]) -> None:
        """What can be asked about a heat map."""
        with gr.Accordion("How much noise does a unit tolerate?"):
            _html("<p>Choose a unit in the heat map, or here.</p>")
            with gr.Row(elem_id="noiser-choose"):
                self.unit = gr.Dropdown(units, label="Unit", scale=3, min_width=160, elem_id="noiser-unit")
                self.target = gr.Dropdown(targets, label="Prediction", scale=2, min_width=160, elem_id="noiser-target")
                self.draw = gr.Button("Draw", scale=1, min_width=90, elem_id="noiser-tolerate")
            self.chart = _html(None, "noiser-chart")
        with gr.Accordion("Can this be believed?"):
            _html(
                "<p>Removes what the scores call important, and keeps it alone, and compares with random scores. One "
                "prompt has no interval: see whether a method is good on many, with <code>noiser evaluate</code>.</p>"
            )
            first, names = METRICS[0], list(METRICS)  # Gradio takes lists alone
            self.metrics = gr.CheckboxGroup(names, value=[first], label="Metrics", elem_id="noiser-metrics")
            self.measure = gr.Button("Measure", elem_id="noiser-measure")
            self.evaluation = _html(None, "noiser-evaluation")

    def connect(self, blocks: gr.Blocks) -> None:
        """Ties every event to its method."""
        # Models have a queue of their own (`Turns`); Gradio's would hold back one model's visitors for another's.
        options: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
        asking = [self.longest_wait, *self.fields.values()]
        shown = [self.status, self.result, self.answer, self.showing, self.query, self.after, self.probes]
        shown += [self.unit, self.target, self.chart, self.evaluation]

        ask = [self.run.click, self.fields["prompt"].submit]
        again: dict[str, Any] = {**options, "trigger_mode": "multiple"}  # also while one runs: the last one counts
        asked = gr.on(ask, self.ask, asking, shown, scroll_to_output=True, **again)
        filled = [self.settings, self.sources, *self.fields.values()]
        for button, question in self.examples.items():
            button.click(partial(self._filled, question), None, filled, queue=False, **options)
        restored = [self.status, self.linked, self.asked, *filled]
        # Not through the queue: Gradio's client may lose a click at the moment that a queued event of its own ends.
        search = "() => [noiserPage.search()]"
        blocks.load(self.restore, self.linked, restored, js=search, queue=False, **options)
        # Only by a link with a prompt: an event that leaves a component alone could undo what another does to it.
        from_link = self.asked.change(self.ask, asking, shown, scroll_to_output=True, **options)
        for answered in (asked, from_link):
            answered.then(None, self.query, self.link, js="(query) => noiserPage.link(query)", **options)
        self.stop_button.click(self.stop, queue=False, **options)
        blocks.unload(self.stop)

        held = [self.answer, self.showing]
        picked = self.result.pick(self.pick, None, [self.unit, self.target], **again)
        for draw in (self.draw.click, picked.then):
            # As the page has them: Gradio would look for them among choices that it may have forgotten.
            chosen = [*held, self.unit, self.target]
            draw(self.tolerance, chosen, [self.status, self.chart], preprocess=False, **again)
        measuring = [*held, self.metrics, self.longest_wait]
        self.measure.click(self.measured, measuring, [self.status, self.evaluation], **again)
        self.save["png"].click(None, js="() => noiserPage.savePicture()", **options)
        copied = self.copy.click(self._saving("md"), held, [self.status, self.file], **options)
        copied.then(None, self.file, self.file, js="(file) => noiserPage.copyText(file)", **options)
        for form in ("json", "html"):
            saved = self.save[form].click(self._saving(form), held, [self.status, self.file], **options)
            saved.then(None, self.file, self.file, js="(file) => noiserPage.saveFile(file)", **options)

    # ---- asking ---------------------------------------------------------------------------------------------------

    def ask(self, request: gr.Request, minutes: float | None, *values: Any) -> Iterator[Shown]:
        """States of the work, then the heat map and what comes with it."""
        try:
            wait, question = _seconds(minutes), self._question(values)
        except NoiserError as error:
            yield self._show(View(explain(error)))
            return
        yield self._cleared()  # what is on the page belongs to the question that was asked last
        yield from map(self._show, self.handlers.ask(_visitor(request), question, wait))

    def restore(self, search: str) -> list[Any]:
        """The fields as a link has them; what is wrong with it, if something is.

        Without a link nothing is set: a quick visitor has typed something by now. Parameters of others, such as a
        theme of Gradio's, are no link.
        """
        unchanged = _nothing(2 + len(self.fields))
        parameters = dict(parse_qsl(search.removeprefix("?"), keep_blank_values=True))
        if not parameters.keys() & Question.__dataclass_fields__.keys():
            return [gr.skip(), "", "", *unchanged]
        try:
            question = Question.from_query(parameters)
            check_choice("model", question.model or self.handlers.models.names[0], self.handlers.models.names)
            for name in question.methods:  # Gradio would show another name, or model, as HTML
                check_choice("method", name, METHODS.names())
        except NoiserError as error:
            return [explain(error, "Link"), "", "", *unchanged]
        return [gr.skip(), search, search if parameters.get("prompt") else "", *self._filled(question)]

    def _filled(self, question: Question) -> list[Any]:
        """Settings and sources, open if one is not as the page begins, and the fields as a question has them."""
        values = {name: getattr(question, name) for name in self.fields} | {
            "chat": "chat" if question.chat else "text",
            "model": question.model or self.handlers.models.names[0],
            "methods": list(question.methods),
        }
        settings = replace(question, prompt="", sources="") != Question()
        folds = [gr.update(open=True) if opened else gr.skip() for opened in (settings, question.sources)]
        return [*folds, *values.values()]

    def stop(self, request: gr.Request) -> None:
        """Stops the visitor's work, also when the visitor goes away."""
        self.handlers.jobs.stop(_visitor(request))

    def _question(self, values: Iterable[Any]) -> Question:
        given: dict[str, Any] = dict(zip(self.fields, values, strict=True))
        given |= {"chat": given["chat"] == "chat", "methods": tuple(given["methods"] or ())}
        given |= {name: int(given[name] or 0) for name in ("seed", "max_new_tokens")}
        return Question(**given)

    def _show(self, view: View) -> Shown:
        answer: Answer | None = view.answer
        if answer is None:
            return _status(view), *_nothing(10)
        units, targets = unit_choices(answer), target_choices(answer)
        return (
            _status(view),
            result_html(answer),
            answer,
            "answer",
            answer.question.to_query(),
            gr.update(visible=True),
            gr.update(visible=answer.citations is None),
            gr.update(choices=units, value=units[0][1]),
            gr.update(choices=targets, value=targets[0][1]),
            "",
            "",
        )

    def _cleared(self) -> Shown:
        return gr.skip(), "", None, "", "", gr.update(visible=False), *_nothing(3), "", ""

    # ---- afterwards -----------------------------------------------------------------------------------------------

    def pick(self, event: gr.EventData) -> tuple[int, int]:
        """Unit and target of a place in the heat map."""
        data: Any = event
        return int(data.unit), int(data.row)

    def tolerance(
        self, request: gr.Request, answer: Answer | None, showing: str, unit: int, target: int
    ) -> Iterator[Shown]:
        """The drawing of how much noise a unit tolerates."""
        work = partial(self.handlers.tolerance, _visitor(request), unit_index=int(unit or 0), row=int(target or 0))
        yield from map(_aside, self._about(answer, showing, work))

    def measured(
        self, request: gr.Request, answer: Answer | None, showing: str, metrics: list[str], minutes: float | None
    ) -> Iterator[Shown]:
        """Numbers that say whether to believe the heat map."""
        try:
            wait = _seconds(minutes)
        except NoiserError as error:
            yield _aside(View(explain(error)))
            return
        work = partial(self.handlers.measure, _visitor(request), metrics=metrics, longest_wait=wait)
        yield from map(_aside, self._about(answer, showing, work))

    def _about(self, answer: Answer | None, showing: str, work: Callable[[Answer], Iterable[View]]) -> Iterable[View]:
        """The views of some work on the answer that the page shows; what to do where the server has forgotten it."""
        answer = self.example if showing == "example" else answer
        if answer is not None:
            return work(answer)
        return [View(problem("Error", GONE) if showing else None)]

    def _saving(self, form: Literal["json", "html", "md"]) -> Callable[[Answer | None, str], Shown]:
        """A handler that returns the answer as a file, for the page's script to hand over."""

        def packed(answer: Answer) -> list[View]:
            return [View(None, answer=json.dumps(file_of(answer, form)._asdict()))]

        def save(answer: Answer | None, showing: str) -> Shown:
            (view,) = self._about(answer, showing, packed)
            return _status(view), view.answer or ""

        return save


def _html(value: str | None, elem_id: str | None = None, **options: Any) -> gr.HTML:
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, **options)


def _visitor(request: gr.Request) -> str:
    return str(request.session_hash)


def _seconds(minutes: float | None) -> float | None:
    """The longest wait; None for no limit. Raises ParameterError for less than nothing."""
    check_not_negative("The longest wait", minutes or 0)
    return minutes * 60 if minutes else None


def _nothing(components: int) -> Shown:
    """Leaves components as they are; from a generator that yields nothing at all, Gradio would empty them."""
    return (gr.skip(),) * components


def _status(view: View) -> Any:
    return gr.skip() if view.status is None else view.status


def _aside(view: View) -> Shown:
    return _status(view), gr.skip() if view.answer is None else view.answer
