"""The web page without a browser: questions and links, jobs and turns, handlers, charts, where it listens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from urllib.parse import parse_qsl

import pytest
import torch
from typer.testing import CliRunner

import noiser
from noiser.app import check_address, listen
from noiser.app import jobs as jobs_module
from noiser.app.chart import tolerance_html
from noiser.app.examples import EXAMPLES, example_answer, offered_examples
from noiser.app.handlers import METRICS, Handlers, TooLongError, file_of, result_html, target_choices, unit_choices
from noiser.app.jobs import BusyError, Job, Jobs, Models, StoppedError, Turns, offered
from noiser.app.question import MOST_CHARACTERS, MOST_TARGETS, Question, parse_chat
from noiser.app.show import explain, progress_line
from noiser.cli import app
from noiser.errors import ModelError, NoiserError, ParameterError, PromptError, UnknownNameError
from noiser.explain import tolerance
from noiser.methods import METHODS
from tiny import tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick brown fox jumps"
HOSTILE = "<script>alert(1)</script> {{value}} ${1+1} <img src=x onerror=alert(2)> \"quotes\" 'too' & שלום 🦊"


@pytest.fixture
def handlers():
    yield Handlers(Models({"llama": lambda: tiny("llama"), "gemma3": lambda: tiny("gemma3")}))
    for thread in threading.enumerate():  # tests share the models: work that was stopped must have left them
        if thread.name == "noiser-job":
            thread.join()


def last(views):
    *states, end = views
    assert all(state.busy for state in states)
    assert not end.busy
    return end


def ask(handlers, longest_wait=None, **fields):
    return last(handlers.ask("visitor", Question(**({"prompt": PROMPT} | fields)), longest_wait))


# ---- questions and links ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": HOSTILE},
        {"prompt": "user: a\nassistant: b", "chat": True, "model": "m", "unit": "sentence", "seed": 7},
        {"methods": ("noiser", "occlusion"), "target": " fox ", "foil": "\n", "max_new_tokens": 5},
        {"all_thresholds": False},
        {"seed": 2**53 - 1},
        {"target_unit": "sentence"},
        {"sources": "A fox.\n---\nA dog."},
    ],
)
def test_a_link_restores_the_question(fields):
    from urllib.parse import parse_qsl

    question = Question(**fields)
    assert Question.from_query(dict(parse_qsl(question.to_query(), keep_blank_values=True))) == question


def test_the_link_of_the_empty_question_is_empty_and_other_parameters_are_left_alone():
    assert Question().to_query() == ""
    assert Question.from_query({"__theme": "dark"}) == Question()


def test_parameters_of_others_are_no_link_and_leave_what_was_typed():
    pytest.importorskip("gradio")
    from noiser.app.page import _Page

    page = object.__new__(_Page)  # without components, which would leave an event loop behind
    page.handlers, page.fields = Handlers(Models({"llama": lambda: tiny("llama")})), {"prompt": None}
    assert page.restore("?__theme=dark&utm_source=x") == page.restore("")
    assert page.restore("?prompt=fox")[1] == "?prompt=fox"
    for seed in (10**20, 2**53):
        assert "expected an integer from" in page.restore(f"?prompt=fox&seed={seed}")[0]


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"methods": "nosier"}, UnknownNameError, "Did you mean 'noiser'"),
        ({"methods": ""}, ParameterError, "expected at least one"),
        ({"unit": "letter"}, UnknownNameError, "Known: sentence, token, word"),
        ({"max_new_tokens": "900"}, ParameterError, f"expected 1 to {MOST_TARGETS}"),
        ({"seed": "x" * 1000}, ParameterError, "expected an integer"),
        ({"seed": str(2**53)}, ParameterError, "seed is 9007199254740992; expected an integer from -9007199254740991"),
        ({"seed": "-" + "9" * 1000}, ParameterError, "seed is -999.*; expected an integer from"),
        ({"chat": "yes"}, ParameterError, "chat='yes'; expected 0 or 1"),
        ({"all_thresholds": ""}, ParameterError, "all_thresholds=''; expected 0 or 1"),
    ],
)
def test_a_damaged_link_says_what_is_wrong(parameters, error, message):
    with pytest.raises(error, match=message) as caught:
        Question.from_query(parameters)
    assert len(str(caught.value)) < 600


def test_a_number_of_tokens_out_of_range_gets_an_error_that_says_what_it_is():
    pytest.importorskip("gradio")
    code = """
import gradio as gr  # which leaves an event loop behind
from noiser.app.page import _Page
page = object.__new__(_Page)
with gr.Blocks():
    page._lay_out_question(["llama"])
for typed in (50, 0, None):
    values = {name: field.value for name, field in page.fields.items()}
    values["max_new_tokens"] = page.fields["max_new_tokens"].preprocess(typed)  # here Gradio raises errors of its own
    print(next(page.ask(None, 2, *values.values()))[0])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = re.findall("The number of continuation tokens is (.*?)<", ran.stdout)
    assert said == [f"{number}; expected 1 to 20." for number in (50, 0, 0)]


def test_a_negative_wait_is_an_error():
    pytest.importorskip("gradio")
    from noiser.app.page import _Page

    page = object.__new__(_Page)
    for shown in (page.ask(None, -1.0), page.measured(None, None, "answer", [], -1.0)):
        ((status, *_),) = shown
        assert "The longest wait is -1.0; expected a finite number of at least 0." in status


def test_a_method_that_is_given_twice_counts_once():
    assert Question.from_query({"methods": "noiser,occlusion,noiser"}).methods == ("noiser", "occlusion")


def test_chat_as_a_transcript_or_as_json():
    assert parse_chat("hello\nthere") == [{"role": "user", "content": "hello\nthere"}]
    assert parse_chat("User: a\nb: c\n\nassistant: d\nuser: ") == [
        {"role": "user", "content": "a\nb: c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": ""},
    ]
    messages = [{"role": "user", "content": "user: not a role"}]
    assert parse_chat(json.dumps(messages)) == messages
    assert parse_chat("[1, 2]") == [{"role": "user", "content": "[1, 2]"}]
    with pytest.raises(PromptError, match="before the first role"):
        parse_chat("Hello\nuser: a")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 30_000, "[[[[{}"])
def test_brackets_in_brackets_are_a_text(text):
    assert Question(prompt=text, chat=True).asked["prompt"] == [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", ["prompt", "target", "foil"])
def test_a_question_has_a_length(name):
    Question(**{name: "a" * MOST_CHARACTERS})
    with pytest.raises(PromptError, match=f"The {name} has 200,001 characters; expected at most 200,000. Shorten it"):
        Question(**{name: "a" * (MOST_CHARACTERS + 1)})


def test_thresholds_are_asked_of_the_search_alone():
    question = Question(methods=("noiser",))
    assert question.threshold_method("noiser") == noiser.Noiser(bounding="k_max_per_unit")
    assert Question(all_thresholds=False).threshold_method("noiser") is None
    assert question.threshold_method("noiser_relative") is None
    for name in METHODS.names():
        question.threshold_method(name)


# ---- jobs and turns --------------------------------------------------------------------------------------------------


def test_a_job_says_how_far_it_is_and_gives_its_result():
    half, go_on = threading.Event(), threading.Event()

    def work(job):
        job.step("Halving")
        job.progress(1, 2)
        half.set()
        assert go_on.wait(60)
        return 42

    job = Job(work)
    assert half.wait(60)
    watching = job.watch(0.01)
    state = next(watching)
    assert (state.label, state.share, state.ahead) == ("Halving", 0.5, 0)
    go_on.set()
    assert job.result() == 42


def test_a_stopped_job_answers_at_once_and_ends_at_its_next_report():
    ended = threading.Event()

    def work(job):
        try:
            while True:
                time.sleep(0.01)
                job.progress(0, 1)
        finally:
            ended.set()

    job = Job(work)
    job.stop()
    list(job.watch(0.01))
    with pytest.raises(StoppedError):
        job.result()
    assert ended.wait(60)


def test_a_failing_job_raises_without_holding_on_to_its_frames(caplog):
    def work(job):
        raise torch.OutOfMemoryError("out of memory")

    job = Job(work)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        job.result()
    assert [entry.name for entry in caught.traceback if entry.name == "work"] == []
    assert "out of memory" in caplog.text


def test_a_visitor_has_one_job_and_none_is_left():
    jobs, seen = Jobs(), []

    def work(job):
        while True:
            time.sleep(0.01)
            job.check()

    with jobs.run("a", work) as first, jobs.run("b", work) as other:
        with jobs.run("a", lambda job: 1) as second:
            assert second.result() == 1
            with pytest.raises(StoppedError):
                first.result()
            seen.append(len(jobs))
        jobs.stop("b")
        with pytest.raises(StoppedError):
            other.result()
    jobs.stop("nobody")
    assert seen == [2]
    assert len(jobs) == 0


def test_what_is_asked_aside_stops_only_its_like_and_a_question_stops_all():
    jobs = Jobs()

    def work(job):
        while True:
            time.sleep(0.01)
            job.check()

    def ended(job):
        with pytest.raises(StoppedError):
            job.result()

    def aside():
        return jobs.run("a", work, aside=True)

    with jobs.run("a", work) as question, aside() as first, aside() as second:
        ended(first)
        assert (jobs.has("a", aside=False), jobs.has("a", aside=True), len(jobs)) == (True, True, 2)
        with jobs.run("a", work) as other, aside() as third:
            ended(question)
            ended(second)
            jobs.stop("a")
            ended(other)
            ended(third)
    assert len(jobs) == 0


def until(condition):
    """Waits for what another thread does."""
    ended = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ended
        time.sleep(0.001)


def test_turns_are_taken_one_at_a_time_in_order():
    turns, order, inside, all_there = Turns(), [], [], threading.Event()

    def work(name):
        def run(job):
            with turns.turn(job):
                inside.append(name)
                assert all_there.wait(60)
                assert len(inside) == 1
                order.append(name)
                inside.remove(name)

        return run

    jobs = [Job(work("a"))]
    until(lambda: inside)
    for ahead, name in enumerate("bcd", start=1):
        jobs.append(Job(work(name)))
        until(lambda ahead=ahead: jobs[ahead].state.ahead == ahead)
    all_there.set()
    for job in jobs:
        job.result()
    assert order == list("abcd")


def test_waiting_can_be_stopped_and_has_an_end():
    turns, taken, leave = Turns(most=2), threading.Event(), threading.Event()

    def work(job):
        with turns.turn(job):
            taken.set()
            assert leave.wait(60)

    first = Job(work)
    assert taken.wait(60)
    second = Job(work)
    until(lambda: second.state.ahead == 1)
    with pytest.raises(BusyError, match="Try again"):
        Job(work).result()
    second.stop()
    with pytest.raises(StoppedError):
        second.result()
    leave.set()
    first.result()
    Job(work).result()


# ---- models ----------------------------------------------------------------------------------------------------------


def test_the_default_model_is_loaded_ahead_and_a_failure_is_for_the_next_to_try():
    loads = []

    def load():
        loads.append(1)
        if len(loads) == 1:
            raise ModelError("no memory")
        return tiny("llama")

    models = Models({"llama": load, "other": lambda: pytest.fail("not the default")})
    with pytest.raises(ModelError, match="no memory"):
        models.load_ahead().result()
    models.load_ahead().result()
    assert models._loaded["llama"]._capabilities is not None  # measured, too
    assert ask(Handlers(models), model="llama").answer is not None
    assert len(loads) == 2


def test_models_are_loaded_once_and_only_those_that_are_offered():
    loads = []
    models = Models({"llama": lambda: loads.append(1) or tiny("llama")})
    for _ in range(2):
        Job(lambda job: models.use("", job).__enter__()).result()
        models._turns["llama"]._waiting.clear()
    assert loads == [1]

    def use_other(job):
        with models.use("/etc/passwd", job):
            pass

    with pytest.raises(UnknownNameError, match="Only models that the server offers"):
        Job(use_other).result()


def test_a_model_that_fails_to_load_is_tried_again(handlers):
    broken = Handlers(Models({"m": iter_sources([OSError("no such file"), tiny("llama")])}))
    assert "no such file" in ask(broken).status
    assert ask(broken).answer is not None


def iter_sources(results):
    def load():
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return load


def test_offered_are_the_named_and_the_installed(monkeypatch):
    loaded = []
    sources = offered(["mine"], loaded.append)
    installed = [m.name for m in jobs_module.BUILT_IN.values() if m.folder() is not None]
    assert list(sources) == ["mine", *installed]
    for source in sources.values():
        source()
    assert loaded == list(sources)


def test_visitors_see_no_folders(monkeypatch, tmp_path):
    home, other = tmp_path / "My Models" / "llama", tmp_path / "b" / "llama"
    for folder in (home, other):
        folder.mkdir(parents=True)
    monkeypatch.chdir(home.parent)

    def load(name):
        if name == str(other):
            raise FileNotFoundError(2, "No such file or directory", f"{other}/config.json")
        lm = tiny("llama")
        return noiser.wrap(lm.model, lm.tokenizer, identity=lm.identity._replace(name=name))

    sources = offered([str(home), str(other), "./llama", "org/name"], load)
    assert list(sources)[:4] == ["llama", "llama (2)", "llama (3)", "org/name"]
    handlers = Handlers(Models(sources))
    for name in ("llama", "llama (3)", "gpt-9"):
        views = list(handlers.ask("visitor", Question(prompt=PROMPT, model=name, methods=("random",)), None))
        if answer := views[-1].answer:
            assert answer.attributions[0].model.name == "llama"
            views += [view._replace(answer=None) for view in handlers.measure("visitor", answer, METRICS[:1], None)]
            shown = result_html(answer) + "".join(file_of(answer, form).text for form in ("json", "html"))
            assert str(tmp_path) not in shown
        assert [view.status for view in views if str(tmp_path) in (view.status or "")] == []
    status = ask(handlers, model="llama (2)").status
    assert "FileNotFoundError" in status
    assert "'…/config.json'" in status.replace("&#x27;", "'")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/srv/models/a/config.json is missing", "…/config.json is missing"),
        ("'/srv/models/a'", "'…/a'"),
        ("'/srv/My Models/a b' is damaged", "'…/a b' is damaged"),
        (r"C:\models\a is not there", r"…\a is not there"),
        ("~/models/a", "…/a"),
        ("and/or, 1/2, org/name, https://example.org/a/b, <b>", "and/or, 1/2, org/name, https://example.org/a/b, <b>"),
    ],
)
def test_of_a_path_in_an_error_only_the_end_is_shown(text, shown):
    assert "".join(Tags(explain(PromptError(text))).text) == f"Error {shown}"


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_the_answer_is_what_the_library_says_and_leaves_no_hook(handlers):
    view = ask(handlers, methods=("noiser", "occlusion"), max_new_tokens=2, seed=3)
    expected = noiser.attribute(
        tiny("llama"), PROMPT, method=noiser.Noiser(all_thresholds=True), max_new_tokens=2, seed=3
    )
    first, second = view.answer.attributions
    records = [att.to_dict() for att in (first, expected)]
    for record in records:
        del record["info"]["token_forwards"], record["info"]["passes"]
    assert records[0] == records[1]
    assert not first.thresholds[0, : len(first.units) - 1].isnan().any()
    assert second.method == "occlusion@1"
    assert not tiny("llama").model._forward_pre_hooks
    assert len(handlers.jobs) == 0


def test_scores_are_shown_while_thresholds_are_searched(handlers, monkeypatch):
    taken = threading.Event()  # the search goes on only then, however fast this machine is
    offer, offered = Job.offer, Job.offered

    def offer_and_wait(job, result):
        offer(job, result)
        assert taken.wait(60)

    def take(job):
        result = offered(job)
        if result is not None:
            taken.set()
        return result

    monkeypatch.setattr(Job, "offer", offer_and_wait)
    monkeypatch.setattr(Job, "offered", take)
    *states, end = handlers.ask("visitor", Question(prompt=PROMPT * 3, methods=("noiser", "occlusion")), None)
    early = [state.answer for state in states if state.answer is not None]
    assert len(early) == 1
    assert early[0].attributions[0].thresholds.isnan().any()
    assert not end.answer.attributions[0].thresholds.isnan().any()
    for first, last in zip(early[0].attributions, end.answer.attributions, strict=True):
        assert torch.equal(first.scores, last.scores)


def test_what_is_asked_about_scores_waits_for_the_thresholds(handlers, monkeypatch):
    offer, go_on = Job.offer, threading.Event()

    def offer_and_wait(job, result):
        offer(job, result)
        assert go_on.wait(60)

    monkeypatch.setattr(Job, "offer", offer_and_wait)
    views = handlers.ask("visitor", Question(prompt=PROMPT), None)
    early = next(view.answer for view in views if view.answer is not None)
    drawn, measured = handlers.tolerance("visitor", early, 1, 0), handlers.measure("visitor", early, METRICS[:1], None)
    assert next(drawn)[:2] == (None, True)
    assert "comes next" in next(views).status
    assert next(measured)[:2] == (None, True)
    assert "Stopped" not in next(views).status
    go_on.set()
    end = last(views)
    assert "Done" in end.status
    assert not end.answer.attributions[0].thresholds.isnan().any()
    assert last(drawn) == (None, False, None)  # what was asked aside after it has the status
    shown = last(measured)
    assert "Measured" in shown.status
    assert "faithfulness" in shown.answer


def test_both_models_can_be_asked(handlers):
    assert ask(handlers, model="gemma3").answer.attributions[0].model.architecture == "Gemma3ForCausalLM"


def test_a_prompt_that_is_too_long_waits_for_nobody_s_turn(handlers):
    assert ask(handlers).answer is not None  # the model is loaded
    leave = threading.Event()

    def occupy(job):
        with handlers.models.use("", job):
            assert leave.wait(60)

    with handlers.jobs.run("other", occupy):
        status = ask(handlers, prompt="word " * 30_000).status
        leave.set()
    assert "can read 256" in status


def test_one_method_that_fails_does_not_take_the_others_with_it(handlers):
    view = ask(handlers, methods=("noiser_relative", "occlusion"), target=" fox", foil=" dog")
    assert [att.method for att in view.answer.attributions] == ["occlusion@1"]
    assert "<b>noiser_relative</b>" in view.status
    assert "role=alert" in view.status


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "  "}, "The prompt is empty; type a text"),
        ({"prompt": "word " * 2000}, "can read 256"),
        ({"prompt": "hello", "chat": True}, "chat template"),
        ({"model": "gpt-9"}, "Only models that the server offers"),
        ({"target": "a", "foil": "a"}, "expected a foil that differs"),
    ],
)
def test_errors_are_shown(handlers, fields, message):
    view = ask(handlers, **fields)
    assert view.answer is None
    assert "role=alert" in view.status
    assert message in view.status


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("weights <b>gone</b>")])
def test_a_failing_model_is_an_error_and_the_next_question_is_answered(handlers, monkeypatch, error):
    lm = tiny("llama")

    def fail(*_, **__):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(lm.model.model, "forward", fail)
        view = ask(handlers)
    assert "role=alert" in view.status
    assert "<b>gone" not in view.status
    assert ("emory" in view.status) == isinstance(error, torch.OutOfMemoryError)
    assert ask(handlers).answer is not None


def test_what_would_take_too_long_says_what_to_do(handlers, monkeypatch):
    monkeypatch.setattr(jobs_module, "SETTLED", 0.0)
    text = "One fox jumps. Two dogs sleep! " * 4
    view = ask(handlers, longest_wait=0.01, prompt=text)
    assert view.answer is None
    found = re.search(r"word \((\d+) units instead of (\d+)\) or sentence \(8 units", view.status)
    assert found, view.status
    assert int(found[1]) < int(found[2])
    assert "allow a longer wait" in view.status
    assert ask(handlers, longest_wait=3600, prompt=PROMPT).answer is not None
    assert issubclass(TooLongError, NoiserError)


def test_the_advice_leaves_out_what_is_chosen_already(handlers, monkeypatch):
    monkeypatch.setattr(jobs_module, "SETTLED", 0.0)

    def faster(*methods):
        status = ask(handlers, longest_wait=1e-9, prompt=PROMPT * 3, methods=methods).status
        assert "shorten the prompt" in status
        return re.findall("such as (.*?);", status)

    assert faster("noiser") == ["occlusion or input_x_gradient"]
    assert faster("occlusion") == ["input_x_gradient"]
    assert faster("lime", "input_x_gradient") == ["occlusion"]
    assert faster("lime", "occlusion", "input_x_gradient") == []
    monkeypatch.setattr(noiser.LanguageModel, "looks_inside", False)  # as behind a server, where there are no gradients
    assert faster("noiser") == ["occlusion"]
    assert faster("occlusion") == []


def test_measuring_says_how_far_it_is_and_has_a_longest_wait(handlers, monkeypatch):
    seen, progress = [], Job.progress

    def note(job, done, expected):
        progress(job, done, expected)
        seen.append((job.label, job.state.share))

    answer = ask(handlers, methods=("occlusion", "random")).answer
    monkeypatch.setattr(Job, "progress", note)
    assert last(handlers.measure("v", answer, METRICS[:1], 3600)).answer is not None
    for method in ("occlusion@1", "random@1"):
        shares = [share for label, share in seen if label == f"Metrics of {method}"]
        assert shares == sorted(shares)
        assert shares[0] == 0
        assert len({*shares}) > 5  # not done after the first of its requests
    monkeypatch.setattr(jobs_module, "SETTLED", 0.0)
    view = last(handlers.measure("v", answer, METRICS[:1], 1e-9))
    assert view.answer is None
    assert "Measuring faithfulness would take" in view.status
    assert "Choose fewer metrics" in view.status


def test_stopping_ends_the_work_within_a_pass(handlers):
    views = handlers.ask("visitor", Question(prompt="The quick brown fox " * 20, methods=("shapley_sampling",)), None)
    next(views)
    handlers.jobs.stop("visitor")
    assert "Stopped." in last(views).status
    assert ask(handlers).answer is not None


@pytest.mark.parametrize("passes", range(1, 10))
@pytest.mark.parametrize("method", ["noiser", "attn_lrp"])
def test_a_stop_of_the_first_question_leaves_nothing_behind(method, passes):
    """Wherever it comes, also while the model is tried out: the next question gets what it would have got."""
    model, seen = tiny_model("llama").eval(), []
    handlers = Handlers(Models({"m": lambda: noiser.wrap(model, tiny_tokenizer())}))
    question = Question(prompt=PROMPT, methods=(method,), all_thresholds=False)

    def stop(*_):
        seen.append(1)
        if len(seen) == passes:
            handlers.jobs.stop("visitor")

    hook = model.register_forward_pre_hook(stop)
    status = last(handlers.ask("visitor", question, None)).status
    hook.remove()
    assert "role=alert" not in status
    (att,) = last(handlers.ask("visitor", question, None)).answer.attributions
    expected = noiser.attribute(noiser.wrap(tiny_model("llama").eval(), tiny_tokenizer()), PROMPT, method=method)
    assert torch.equal(att.scores, expected.scores)


def test_a_new_question_replaces_the_one_that_is_being_answered(handlers):
    first = handlers.ask("visitor", Question(prompt="The quick brown fox " * 20, methods=("shapley_sampling",)), None)
    next(first)
    second = handlers.ask("visitor", Question(prompt=PROMPT, methods=("occlusion",)), None)
    next(second)
    assert last(first) == (None, False, None)  # no "Stopped." over the state of the second
    assert last(second).answer.attributions[0].text.startswith(PROMPT)


def test_leaving_the_page_ends_the_work(handlers):
    views = handlers.ask("visitor", Question(prompt="The quick brown fox " * 20, methods=("shapley_sampling",)), None)
    next(views)
    views.close()
    assert len(handlers.jobs) == 0


def test_visitors_do_not_mix(handlers):
    prompts = [f"The {word} fox jumps over the dog" for word in ("quick", "brown", "lazy", "small", "old", "new")]
    found = {}

    def visit(prompt):
        question = Question(prompt=prompt, seed=len(prompt), all_thresholds=False)
        found[prompt] = last(handlers.ask(prompt, question, None)).answer

    threads = [threading.Thread(target=visit, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in prompts:
        expected = noiser.attribute(tiny("llama"), prompt, seed=len(prompt))
        assert found[prompt].attributions[0].text == expected.text
        assert torch.equal(found[prompt].attributions[0].scores, expected.scores)


# ---- examples --------------------------------------------------------------------------------------------------------


def test_the_stored_answer_is_that_of_the_first_example_and_complete():
    answer = example_answer()
    (att,) = answer.attributions
    assert att.text == next(iter(EXAMPLES.values())).prompt == answer.question.prompt
    assert att.model.name == answer.model == "gemma-3-270m"
    assert att.stderr is not None
    assert att.thresholds is not None
    assert not att.thresholds.isnan().any()
    assert att.top(1)[0].text == "Bron"


def test_an_example_asks_only_models_that_are_offered():
    assert offered_examples(["smollm2-135m-instruct"])["A chat"].model == "smollm2-135m-instruct"
    assert {question.model for question in offered_examples(["llama"]).values()} == {""}


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_link_holds_every_example(name):
    question = EXAMPLES[name]
    assert Question.from_query(dict(parse_qsl(question.to_query()))) == question


# ---- citations -------------------------------------------------------------------------------------------------------

SOURCES = "The quick brown fox jumps.\n---\nThe lazy dog sleeps.\n --- no rule\n-----\n\n"


def test_sources_stand_between_lines_of_dashes():
    documents = Question(prompt="a", sources=SOURCES).documents
    assert documents == ["The quick brown fox jumps.", "The lazy dog sleeps.\n --- no rule"]
    assert Question(prompt="a", sources="---\n---").documents == []


def test_a_question_with_sources_is_answered_as_the_library_cites(handlers):
    answer = ask(handlers, sources=SOURCES, target=" The dog sleeps. The fox jumps.").answer
    documents = Question(prompt="a", sources=SOURCES).documents
    expected = noiser.cite(tiny("llama"), PROMPT, documents, answer=" The dog sleeps. The fox jumps.")
    assert answer.citations.answer == expected.answer
    assert answer.citations.losses == pytest.approx(expected.losses)
    assert torch.allclose(answer.citations.scores, expected.scores)
    shown = "".join(Tags(result_html(answer)).text)
    assert "lazy dog sleeps" in shown
    assert "The answer without the sources" in shown
    for form, part in (("html", "<!doctype html>"), ("json", '"noiser.citations"'), ("md", "The dog sleeps.")):
        file = file_of(answer, form)
        assert file.name == f"noiser-cite.{form}"
        assert part in file.text
    assert file_of(answer, "md").text == answer.citations.to_markdown()
    assert not tiny("llama").model._forward_pre_hooks


@pytest.mark.slow
def test_the_citations_example_cites_what_it_says(smol):
    question = EXAMPLES["Citations"]
    citations = last(Handlers(Models({question.model: lambda: smol})).ask("visitor", question, None)).answer.citations
    assert "eight euros" in citations.answer
    assert [sentence.mark for sentence in citations.sentences] == ["[1]"]
    assert citations.sentences[0].citations[0].quotes[0].text == "Tickets cost eight euros."


def test_citing_can_be_stopped_and_has_a_longest_wait(handlers, monkeypatch):
    views = handlers.ask("visitor", Question(prompt=PROMPT, sources=SOURCES), None)
    next(views)
    handlers.jobs.stop("visitor")
    assert "Stopped." in [view.status for view in views][-1]
    assert "Give fewer or shorter sources" in ask(handlers, longest_wait=-1.0, sources=SOURCES).status
    with pytest.raises(PromptError, match="The list of sources has"):
        Question(prompt="a", sources="x" * (MOST_CHARACTERS + 1))


def test_markdown_is_that_of_the_library(handlers):
    answer = ask(handlers, methods=("occlusion",)).answer
    assert file_of(answer, "md").text == answer.attributions[0].to_markdown()


# ---- what is shown ---------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text.append(data)


def test_hostile_text_is_text_everywhere(handlers):
    answer = ask(handlers, prompt=HOSTILE, methods=("occlusion", "random"), max_new_tokens=2).answer
    shown = [result_html(answer)]
    shown += [last(handlers.tolerance("v", answer, unit, 1)).answer for unit in (0, 5)]
    shown += [last(handlers.measure("v", answer, METRICS[:1], None)).answer]
    shown += [explain(PromptError(HOSTILE), HOSTILE), explain(ValueError(HOSTILE))]
    shown += [progress_line(Job(lambda job: None, HOSTILE).state)]
    for text in shown:
        page = Tags(text)
        assert {"script", "img"} & set(page.tags) == set()
        assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "".join(Tags(shown[0]).text).count("alert") >= 2


def test_one_method_or_several_side_by_side(handlers):
    one = ask(handlers).answer
    assert "class=row>" not in result_html(one)
    both = ask(handlers, methods=("noiser", "occlusion")).answer
    assert result_html(both).count("<div class=row>") == 2
    titles = [value for name, value in Tags(result_html(both)).attributes if name == "title"]
    assert any("threshold" in title and "score" in title for title in titles)
    units = [int(value) for name, value in Tags(result_html(one)).attributes if name == "data-unit"]
    assert units == list(range(len(one.attributions[0].units)))


def test_a_tie_is_said(handlers, monkeypatch):
    assert "two tokens tie" not in ask(handlers).status
    monkeypatch.setattr("noiser.app.handlers.SMALLEST", 1.0)
    assert "two tokens tie" in ask(handlers).status


def test_choices_name_units_and_targets_by_place(handlers):
    answer = ask(handlers, max_new_tokens=2).answer
    assert unit_choices(answer)[1] == ("2. quick", 1)
    assert [place for _, place in target_choices(answer)] == [0, 1]


def test_the_chart_shows_where_the_model_changes_its_mind():
    att = noiser.attribute(tiny("llama"), PROMPT, method=noiser.Noiser(all_thresholds=True))
    charts = {unit: tolerance(tiny("llama"), att, unit) for unit in range(len(att.units) - 1)}
    flipping = next(unit for unit, found in charts.items() if found.flips.any())
    found = charts[flipping]
    page = tolerance_html(att, found, 0)
    assert page.count('class="point flips"') == int(found.flips[0, 1:].sum())
    assert page.count('class="point stays"') == int((~found.flips[0, 1:]).sum())
    assert page.count("data-tip=") == len(found.ks) - 1
    first = int(found.flips[0].nonzero()[0])
    assert f"At k = {float(found.ks[first]):.3g} the model changes its mind" in page
    assert f"threshold at {float(att.thresholds[0, flipping]):.3g}" in page
    assert page.count("<tr>") == len(found.ks) + 1
    assert "nan" not in page.lower()


def test_a_unit_after_the_target_has_no_chart(handlers):
    answer = ask(handlers, max_new_tokens=2).answer
    shown = last(handlers.tolerance("v", answer, len(answer.attributions[0].units) - 1, 0))
    assert "does not stand before" in shown.answer
    assert "role=alert" in last(handlers.tolerance("v", answer, 99, 0)).status


def test_measuring_says_that_a_foil_is_left_out(handlers):
    for foil in ("", " dog"):
        answer = ask(handlers, methods=("occlusion",), target=" fox", foil=foil).answer
        shown = last(handlers.measure("v", answer, ["top_k"], None)).answer
        assert ("metrics leave the foil out" in shown) == bool(foil)


def test_faithfulness_is_that_of_the_library(handlers):
    answer = ask(handlers, methods=("occlusion", "random")).answer
    shown = last(handlers.measure("v", answer, METRICS[:1], None)).answer
    columns = [noiser.evaluate(tiny("llama"), att).estimates for att in answer.attributions]
    for name, estimate in columns[0].items():
        values = [f"{estimate.value:.3f}", f"{columns[1][name].value:.3f}"]
        line = re.search(rf"<small>{name}</small>.*?</tr>", shown)[0]
        assert re.findall(r"<td>(.*?)</td>", line)[:2] == [text.replace("nan", "undefined") for text in values]
    assert "<th scope=col>occlusion@1</th><th scope=col>random@1</th>" in shown
    first, folded = shown.split("<details>")
    assert first.count("<th scope=row ") == 7
    assert "The area minus that of random scores<small>area_minus_random</small>" in first
    assert first.count("<th scope=row ") + folded.count("<th scope=row ") == len(columns[0])


def test_other_metrics_can_be_chosen(handlers):
    answer = ask(handlers, methods=("occlusion",)).answer
    shown = last(handlers.measure("v", answer, ["lds", "top_k"], None)).answer
    found = noiser.evaluate(tiny("llama"), answer.attributions[0], metrics=["lds", "top_k"]).estimates
    for name in ("lds", "lds_minus_permuted", "drop"):
        assert f"<small>{name}</small></th><td>{found[name].value:.3f}</td>" in shown
    assert "<details>" not in shown
    assert "No metric is chosen" in last(handlers.measure("v", answer, [], None)).status


def test_files_are_what_the_commands_write(handlers, tmp_path):
    one = ask(handlers).answer
    file = file_of(one, "json")
    (tmp_path / file.name).write_text(file.text, encoding="utf-8")
    assert torch.equal(noiser.Attribution.load(tmp_path / file.name).scores, one.attributions[0].scores)
    assert file_of(one, "html").text == one.attributions[0].to_html()
    both = ask(handlers, methods=("noiser", "occlusion")).answer
    listed = json.loads(file_of(both, "json").text)
    assert [noiser.Attribution.from_dict(data).method for data in listed] == ["noiser@2", "occlusion@1"]
    assert file_of(both, "html").text.startswith("<!doctype html>")
    assert "http" not in file_of(both, "html").media_type


# ---- serving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_this_machine_needs_no_password(host):
    assert check_address(host, None) is None
    assert check_address(host, "a:b:c") == ("a", "b:c")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "example.org", ""])
def test_other_addresses_need_one(host):
    with pytest.raises(ParameterError, match="expected --auth user:password"):
        check_address(host, None)
    assert check_address(host, "a:b") == ("a", "b")


@pytest.mark.parametrize("auth", ["", "user", "user:", ":password"])
def test_a_login_has_two_parts(auth):
    with pytest.raises(ParameterError, match="expected user:password"):
        check_address("127.0.0.1", auth)


def test_an_address_says_what_is_wrong_with_it():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ParameterError, match=rf"port {port}: .*in use.* --port 0 takes any that is free"):
            listen("127.0.0.1", port)
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(ParameterError, match="Choose an address of this machine as --host"):
            listen(host, 0)


def test_the_command_checks_the_address_before_it_loads_a_model(monkeypatch):
    loaded = []
    monkeypatch.setattr(noiser.model, "load_model", lambda name, **_: loaded.append(name))
    result = CliRunner().invoke(app, ["serve", "--host", "0.0.0.0"])
    assert result.exit_code == 2
    assert "--auth user:password" in result.stderr
    assert loaded == []


def test_the_command_serves_the_models_that_were_named(monkeypatch):
    seen = {}
    monkeypatch.setattr(noiser.model, "load_model", lambda name, **options: (name, options["revision"]))
    monkeypatch.setattr("noiser.app.serve", lambda sources, **options: seen.update(sources=sources, **options))
    arguments = ["serve", "-m", "first", "-m", "second", "--port", "0", "--revision", "main"]
    result = CliRunner().invoke(app, arguments, env={"NOISER_AUTH": "me:secret"})
    assert result.exit_code == 0, result.stderr
    assert list(seen["sources"])[:2] == ["first", "second"]
    assert seen["sources"]["first"]() == ("first", "main")
    assert (seen["host"], seen["port"], seen["auth"]) == ("127.0.0.1", 0, "me:secret")


def test_without_gradio_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.delitem(sys.modules, "noiser.app.page", raising=False)  # both ways to a module that is imported
    monkeypatch.delattr(noiser.app, "page", raising=False)
    with pytest.raises(noiser.errors.DependencyError, match=r"pip install 'noiser\[app\]'"):
        noiser.app.server.serve({"m": lambda: tiny("llama")})
