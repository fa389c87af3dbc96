"""What happens on the page: which component calls which handler, and where its views go."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any, Literal, cast
from urllib.parse import parse_qsl

import gradio as gr
from gradio import themes

from noiser.app.answers import Answer
from noiser.app.handlers import Handlers, View, file_of, result_html, target_choices, unit_choices
from noiser.app.layout import Layout, lay_out
from noiser.app.question import Question
from noiser.app.status import explain
from noiser.errors import NoiserError

__all__ = ["build", "css", "head", "theme"]

Shown = tuple[Any, ...]
"""One value a component, in the order of the event's outputs."""

LINK = """(query) => {
  if (!query) return "";
  if (query.length > 60000) return "Too long for a link: keep the answer as JSON or HTML.";
  const own = [...new URLSearchParams(location.search)].filter(([name]) => name.startsWith("__"));
  const all = [query, new URLSearchParams(own).toString()].filter(Boolean).join("&");
  history.replaceState(history.state, "", location.pathname + "?" + all);
  return location.origin + location.pathname + "?" + query;
}"""
"""The link, which becomes the page's address too; servers refuse addresses of more than 65,536 characters."""


def theme() -> themes.Base:
    """System fonts, so that nothing is fetched; the visitor's colour scheme; text that contrasts (WCAG AA)."""
    text = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Noto Sans", "sans-serif"]
    made = themes.Default(primary_hue="blue", neutral_hue="slate", font=text, font_mono=["ui-monospace", "monospace"])
    return made.set(
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


def head() -> str:
    """The page's own script: tips, keys in a heat map, files."""
    return f"<script>{_asset('page.js')}</script>"


def css() -> str:
    """The page's own rules; heat maps bring theirs."""
    return _asset("page.css")


def _asset(name: str) -> str:
    return files("noiser.app").joinpath(name).read_text(encoding="utf-8")


def build(handlers: Handlers) -> gr.Blocks:
    """The page as Gradio has it, not yet served."""
    with gr.Blocks(title="Noiser", analytics_enabled=False, fill_width=True) as blocks:
        _Page(handlers, lay_out(handlers.models.names)).connect(blocks)
    return blocks


class _Page:
    """The events. Methods take what their inputs hold and give what their outputs show."""

    def __init__(self, handlers: Handlers, layout: Layout) -> None:
        self.handlers, self.layout = handlers, layout

    def connect(self, blocks: gr.Blocks) -> None:
        """Ties every event to its method."""
        at = self.layout
        # Models have a queue of their own (`Turns`); Gradio's would hold back one model's visitors for another's.
        options: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
        asking = [at.longest_wait, *at.fields.values()]
        work = [at.status, at.run]
        shown = [*work, at.result, at.given, at.query, at.after, at.unit, at.target, at.chart, at.evaluation]

        ask = [at.run.click, at.fields["prompt"].submit]
        asked = gr.on(ask, self.ask, asking, shown, scroll_to_output=True, **options)
        restored = [at.status, at.linked, at.asked, *at.fields.values()]
        blocks.load(self.restore, at.linked, restored, js="() => [location.search]", **options)
        # Only by a link with a prompt: an event that leaves a component alone could undo what another does to it.
        from_link = at.asked.change(self.ask, asking, shown, **options)
        for answered in (asked, from_link):
            answered.then(None, at.query, at.link, js=LINK, **options)
        at.stop.click(self.stop, queue=False, **options)
        blocks.unload(self.stop)

        # Also while one waits for the question: the last one counts.
        aside: dict[str, Any] = {**options, "trigger_mode": "multiple"}
        picked = at.result.pick(self.pick, None, [at.unit, at.target], **aside)
        for draw in (at.tolerate.click, picked.then):
            draw(self.tolerance, [at.given, at.unit, at.target], [*work, at.chart], **aside)
        at.measure.click(self.faithfulness, at.given, [*work, at.evaluation], **aside)
        at.save["png"].click(None, js="() => noiserPage.savePicture()", **options)
        for form, save in (("json", self.save_json), ("html", self.save_html)):
            saved = at.save[form].click(save, at.given, at.file, **options)
            saved.then(None, at.file, at.file, js="(file) => noiserPage.saveFile(file)", **options)

    # ---- asking ---------------------------------------------------------------------------------------------------

    def ask(self, request: gr.Request, minutes: float | None, *values: Any) -> Iterator[Shown]:
        """States of the work, then the heat map and what comes with it."""
        try:
            question = Question(**dict(self._read(values)))
        except NoiserError as error:
            yield self._show(View(explain(error)))
            return
        views = self.handlers.ask(_visitor(request), question, minutes * 60 if minutes else None)
        yield from map(self._show, views)

    def restore(self, search: str) -> list[Any]:
        """The fields as a link has them; what is wrong with it, if something is.

        Without a link nothing is set: a quick visitor has typed something by now.
        """
        fields = self.layout.fields
        parameters = _parameters(search)
        if not parameters:
            return [gr.skip(), "", "", *_nothing(len(fields))]
        try:
            question = Question.from_query(parameters)
        except NoiserError as error:
            return [explain(error, "Link"), "", "", *_nothing(len(fields))]
        values = {name: getattr(question, name) for name in fields} | {
            "chat": "chat" if question.chat else "text",
            "model": question.model or self.handlers.models.names[0],
            "methods": list(question.methods),
        }
        return [gr.skip(), search, search if parameters.get("prompt") else "", *values.values()]

    def stop(self, request: gr.Request) -> None:
        """Stops the visitor's work, also when the visitor goes away."""
        self.handlers.jobs.stop(_visitor(request))

    def _read(self, values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
        for name, value in zip(self.layout.fields, values, strict=True):
            if name == "chat":
                yield name, value == "chat"
            elif name == "methods":
                yield name, tuple(value or ())
            else:
                yield name, int(value or 0) if name in ("seed", "max_new_tokens") else value

    def _show(self, view: View) -> Shown:
        answer: Answer | None = view.answer
        if answer is None:
            return *_work(view), *_nothing(8)
        units, targets = unit_choices(answer), target_choices(answer)
        return (
            *_work(view),
            result_html(answer),
            answer,
            answer.question.to_query(),
            gr.update(visible=True),
            gr.update(choices=units, value=units[0][1]),
            gr.update(choices=targets, value=targets[0][1]),
            "",
            "",
        )

    # ---- afterwards -----------------------------------------------------------------------------------------------

    def pick(self, event: gr.EventData) -> tuple[int, int]:
        """Unit and target of a place in the heat map."""
        data: Any = event
        return int(data.unit), int(data.row)

    def tolerance(self, request: gr.Request, answer: Answer | None, unit: int, target: int) -> Iterator[Shown]:
        """The drawing of how much noise a unit tolerates."""
        if answer is None:
            yield _nothing(3)
        else:
            views = self.handlers.tolerance(_visitor(request), answer, int(unit or 0), int(target or 0))
            yield from map(_side, views)

    def faithfulness(self, request: gr.Request, answer: Answer | None) -> Iterator[Shown]:
        """Numbers that say whether to believe the heat map."""
        if answer is None:
            yield _nothing(3)
        else:
            yield from map(_side, self.handlers.faithfulness(_visitor(request), answer))

    def save_json(self, answer: Answer | None) -> str:
        """The answer as a file, for the page's script to hand over."""
        return _file(answer, "json")

    def save_html(self, answer: Answer | None) -> str:
        """The same as a page of its own."""
        return _file(answer, "html")


def _visitor(request: gr.Request) -> str:
    return str(request.session_hash)


def _parameters(search: str) -> dict[str, str]:
    return dict(parse_qsl(search.removeprefix("?"), keep_blank_values=True))


def _nothing(components: int) -> Shown:
    """Leaves components as they are; from a generator that yields nothing at all, Gradio would empty them."""
    return (gr.skip(),) * components


def _work(view: View) -> Shown:
    return _nothing(2) if view.status is None else (view.status, gr.update(interactive=not view.busy))


def _side(view: View) -> Shown:
    return *_work(view), gr.skip() if view.answer is None else view.answer


def _file(answer: Answer | None, form: Literal["json", "html"]) -> str:
    return "" if answer is None else json.dumps(cast("Any", file_of(answer, form)._asdict()))
