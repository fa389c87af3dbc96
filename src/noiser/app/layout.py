"""The page's components, without what they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gradio as gr

from noiser.app.question import MOST_TARGETS, Question
from noiser.methods import METHODS

__all__ = ["Layout", "lay_out"]

LONGEST_WAIT = 2
"""Minutes; what would take longer is answered with what to do instead."""

ANSWER_KEPT = 3600
"""Seconds that an answer stays in memory after its visitor last used it."""

PICK = """
const pick = (unit) => {
  const row = [...unit.closest("section").classList].find((name) => /^t\\d+$/.test(name));
  trigger("pick", { unit: Number(unit.dataset.unit), row: Number(row.slice(1)) - 1 });
};
element.addEventListener("click", (event) => {
  const unit = event.target.closest(".u[data-unit]");
  if (unit) pick(unit);
});
element.addEventListener("keydown", (event) => {
  const unit = event.target.closest(".u[data-unit]");
  if (unit && (event.key === "Enter" || event.key === " ")) { event.preventDefault(); pick(unit); }
});
"""
"""A click, Enter or the space bar on a unit of the heat map asks how much noise it tolerates."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything on the page that an event reads or writes.

    Attributes:
        fields: the components of a question, by the names of `Question`'s fields.
        longest_wait: minutes.
        run: asks the question.
        stop: stops whatever runs.
        status: how far the work is, or what went wrong.
        result: the heat maps.
        given: the `Answer` that is shown; None before.
        after: what is there only with an answer.
        link: the address that asks the same question.
        save: buttons by form: "json", "html", "png".
        unit: the unit that gets noise.
        target: the target whose probability is drawn.
        tolerate: draws it.
        chart: the drawing.
        measure: measures faithfulness.
        evaluation: its numbers.
        query: hidden; the question as the query of a link.
        linked: hidden; the query that the page was opened with, once the fields are as it says.
        asked: hidden; the same if it has a prompt, and so asks.
        file: hidden; a file on its way to the visitor's disk.
    """

    fields: dict[str, Any]
    longest_wait: gr.Number
    run: gr.Button
    stop: gr.Button
    status: gr.HTML
    result: Any
    given: gr.State
    after: gr.Column
    link: gr.Textbox
    save: dict[str, gr.Button]
    unit: gr.Dropdown
    target: gr.Dropdown
    tolerate: gr.Button
    chart: gr.HTML
    measure: gr.Button
    evaluation: gr.HTML
    query: gr.Textbox
    linked: gr.Textbox
    asked: gr.Textbox
    file: gr.Textbox


def lay_out(models: Sequence[str]) -> Layout:
    """Makes the components, inside a page that is being built."""
    parts: dict[str, Any] = {"given": gr.State(None, time_to_live=ANSWER_KEPT)}
    for name in ("query", "linked", "asked", "file"):
        parts[name] = gr.Textbox(visible="hidden", elem_id=f"noiser-{name}")
    gr.HTML(
        "<h1>Noiser</h1><p>Which parts of the input made the model say that?</p>",
        elem_id="noiser-title",
        apply_default_css=False,
    )
    with gr.Row():
        with gr.Column(scale=4, min_width=320):
            parts |= _question(models)
        with gr.Column(scale=7, min_width=320):
            parts["status"] = gr.HTML(elem_id="noiser-status", apply_default_css=False)
            parts["result"] = gr.HTML(elem_id="noiser-result", apply_default_css=False, js_on_load=PICK)
            with gr.Column(visible=False, elem_id="noiser-after") as parts["after"]:
                parts |= _results()
    return Layout(**parts)


def _question(models: Sequence[str]) -> dict[str, Any]:
    begin = Question()
    fields: dict[str, Any] = {}
    fields["prompt"] = gr.Textbox(
        label="Prompt",
        lines=5,
        max_lines=16,
        placeholder="LeBron James professionally plays the sport of",
        info="Shift+Enter asks. In a chat, a line beginning with system:, user: or assistant: begins a message.",
        elem_id="noiser-prompt",
        autofocus=True,
    )
    fields["chat"] = gr.Radio(["text", "chat"], value="text", label="The prompt is a")
    fields["methods"] = gr.Dropdown(
        METHODS.names(), value=list(begin.methods), multiselect=True, label="Methods", info="Several: side by side."
    )
    fields["unit"] = gr.Radio(["token", "word", "sentence"], value=begin.unit, label="A score for every")
    with gr.Row():
        run = gr.Button("Ask", variant="primary", elem_id="noiser-run")
        # Always ready: updates that cross on a busy machine can leave a button as it was, and this one must work then.
        stop = gr.Button("Stop", elem_id="noiser-stop")
    fields["model"] = gr.Dropdown(list(models), value=models[0], label="Model")
    with gr.Row():
        fields["target"] = gr.Textbox(label="Target", info="Why this continuation? Empty: what the model says.")
        fields["foil"] = gr.Textbox(label="Foil", info="Why not this?")
    fields["max_new_tokens"] = gr.Slider(
        1,
        MOST_TARGETS,
        value=begin.max_new_tokens,
        step=1,
        label="Tokens of the continuation",
        info="Without a target.",
    )
    with gr.Accordion("More settings", open=False):
        fields["all_thresholds"] = gr.Checkbox(
            begin.all_thresholds, label="Thresholds of all units", info="Noiser; off is faster, with the same scores."
        )
        fields["seed"] = gr.Number(begin.seed, precision=0, label="Seed")
        longest_wait = gr.Number(LONGEST_WAIT, minimum=0, label="Longest wait (minutes)", info="0: however long.")
    return {"fields": fields, "longest_wait": longest_wait, "run": run, "stop": stop}


def _results() -> dict[str, Any]:
    with gr.Row(elem_id="noiser-save"):
        save = {form: gr.Button(form.upper(), size="sm", elem_id=f"noiser-{form}") for form in ("json", "html", "png")}
    link = gr.Textbox(label="Link to this question", interactive=False, buttons=["copy"], elem_id="noiser-link")
    with gr.Accordion("How much noise does a unit tolerate?"):
        gr.HTML("<p>Choose a unit in the heat map, or here.</p>", apply_default_css=False)
        with gr.Row():
            unit = gr.Dropdown([], label="Unit", scale=3, min_width=140, elem_id="noiser-unit")
            target = gr.Dropdown([], label="Prediction", scale=2, min_width=120, elem_id="noiser-target")
            tolerate = gr.Button("Draw", scale=1, min_width=90, elem_id="noiser-tolerate")
        chart = gr.HTML(elem_id="noiser-chart", apply_default_css=False)
    with gr.Accordion("Can this be believed?"):
        gr.HTML(
            "<p>Removes what the scores call important, and keeps it alone, and compares with random scores. "
            "One prompt has no interval: see whether a method is good on many, with <code>noiser evaluate</code>.</p>",
            apply_default_css=False,
        )
        measure = gr.Button("Measure faithfulness", elem_id="noiser-measure")
        evaluation = gr.HTML(elem_id="noiser-evaluation", apply_default_css=False)
    return {
        "save": save,
        "link": link,
        "unit": unit,
        "target": target,
        "tolerate": tolerate,
        "chart": chart,
        "measure": measure,
        "evaluation": evaluation,
    }
