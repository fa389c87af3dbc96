"""Passes that visitors share: whose turn it is, who joins, and that each question is by itself."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import noiser
from noiser.errors import NoiserError
from noiser.model.runtime import running
from noiser.server import jobs
from noiser.server import passes as passes_module
from noiser.server.passes import Passes, Stopped, Visitor
from noiser.server.questions import Attribute, Cite, Evaluate
from soak import times
from test_line import wait_until
from tiny import tiny_model, tiny_tokenizer
from visitors import lost, visit_together
from web_for_tests import chatty, served

PROMPT = "The quick fox sings near the river"


class Network(torch.nn.Module):
    """A model without layers."""

    def get_output_embeddings(self):
        return None


class Log:
    """A model whose passes take as many seconds of its own clock as they have tokens.

    `runs` has the names of the branches of every pass.
    """

    needs_internals = True
    batch_tokens = 100
    logit_rows = 1000

    def __init__(self):
        self.model = Network()
        self.clock = 0.0
        self.runs = []
        self.fails = lambda names, tokens: None

    def run(self, branches):
        names = [branch.name for branch in branches]
        tokens = sum(branch.inputs.shape[1] for branch in branches)
        self.runs.append(names)
        error = self.fails(names, tokens)
        if error:
            raise error
        self.clock += tokens
        return names  # in place of logits


def branch(name, tokens, rows=1):
    return SimpleNamespace(name=name, inputs=torch.zeros(1, tokens, 2), wanted=range(rows))


@pytest.fixture
def lm(monkeypatch):
    made = Log()
    clock = SimpleNamespace(monotonic=lambda: made.clock)
    monkeypatch.setattr(passes_module, "time", clock)
    monkeypatch.setattr(passes_module, "LEAD", 5.0)
    return made


class Room:
    """Visitors of a model, each with a thread that asks for one pass after the other."""

    def __init__(self, lm):
        self.lm = lm
        self.passes = Passes(lm)
        self.pool = ThreadPoolExecutor(20)
        self.go = threading.Event()
        self.stopped = set()
        self.holder = self.pool.submit(self._hold)
        wait_until(lambda: self.passes._is_taken)

    def _hold(self):
        """Has the model, until all others wait for it."""
        with self.passes.alone(Visitor(self.passes, lambda: False)):
            self.go.wait(60)

    def ask(self, name, *sizes, rows=1):
        """The answers to passes of such sizes, later; it waits in line when this returns."""
        before = len(self.passes._waiting)
        visitor = Visitor(self.passes, lambda: name in self.stopped)

        def work():
            with self.passes.visited(visitor):
                return [
                    self.passes.run(visitor, [branch(name, size, rows)], self.lm.run)
                    for size in sizes
                ]

        asked = self.pool.submit(work)
        wait_until(lambda: len(self.passes._waiting) == before + 1 or asked.done())
        return asked

    def start(self):
        self.go.set()
        self.holder.result()


@pytest.fixture
def room(lm):
    made = Room(lm)
    yield made
    made.go.set()
    made.pool.shutdown()
    assert not made.passes._waiting
    assert not made.passes._is_taken


def test_short_questions_share_every_pass(lm, room):
    asked = [room.ask(name, 10, 1, 1) for name in "abc"]
    room.start()
    assert [each.result() for each in asked] == [[[name]] * 3 for name in "abc"]
    assert [sorted(names) for names in lm.runs] == [["a", "b", "c"]] * 3


@pytest.mark.parametrize(
    ("first", "second"),
    [((60, 1), (60, 1)), ((2, 600), (2, 600))],
    ids=["tokens", "rows of logits"],
)
def test_what_does_not_fit_runs_next(lm, room, first, second):
    asked = [room.ask("a", first[0], rows=first[1]), room.ask("b", second[0], rows=second[1])]
    room.start()
    assert [each.result() for each in asked] == [[["a"]], [["b"]]]
    assert lm.runs == [["a"], ["b"]]


def test_a_pass_that_is_larger_than_all_may_be_runs_alone(lm, room):
    asked = [room.ask("a", 500), room.ask("b", 1)]
    room.start()
    assert [each.result() for each in asked] == [[["a"]], [["b"]]]
    assert lm.runs == [["a"], ["b"]]


def test_a_long_question_holds_a_short_one_up_by_one_pass(lm, room):
    long = room.ask("long", *[90] * 10)
    short = room.ask("short", *[20] * 4)
    room.start()
    long.result()
    short.result()
    names = [name for names in lm.runs for name in names]
    # 90 tokens of the long one, which the short one catches up with, and then in turn.
    assert names[:5] == ["long", "short", "short", "short", "short"]
    assert names[5:] == ["long"] * 9


def test_new_short_questions_do_not_keep_a_long_one_from_its_turn(lm, room):
    short = []

    def another(_names, _tokens):
        if len(short) < 200 and sum("long" in names for names in lm.runs) < 3:
            short.append(room.ask(f"short {len(short)}", 5, 5))

    lm.fails = another
    long = room.ask("long", *[90] * 3)
    room.start()
    long.result()
    for each in short:
        each.result()
    assert len(short) < 150  # they have 90 tokens, 2.5 a pass, between two passes of the long one


def test_a_new_question_begins_level_with_those_that_are_there(lm, room):
    long = room.ask("long", *[90] * 4)
    room.start()
    long.result()
    assert room.passes._clock == 360
    late = Visitor(room.passes, lambda: False)
    with room.passes.visited(late):
        room.passes.run(late, [branch("late", 7)], lm.run)
    assert late.seconds == 367


def test_a_long_question_has_an_equal_share_beside_short_ones_that_follow_each_other(lm, room):
    asking = set("abc")

    def ask_again(name):
        for _ in range(30):
            visitor = Visitor(room.passes, lambda: False)
            with room.passes.visited(visitor):
                for _ in range(2):
                    room.passes.run(visitor, [branch(name, 10)], lm.run)
        asking.remove(name)

    def wait_for_others(names, _tokens):
        """A pass takes longer than to ask the next question."""
        wait_until(lambda: len(room.passes._waiting) >= len({*asking, "long"} - {*names}))

    long = room.ask("long", *[40] * 60)
    short = [room.pool.submit(ask_again, name) for name in asking]
    wait_until(lambda: len(room.passes._waiting) == 4)
    lm.fails = wait_for_others
    room.start()
    for each in short:
        each.result()
    last = max(number for number, names in enumerate(lm.runs) if {*names} - {"long"})
    long.result()
    seconds_of_long = 40 * sum("long" in names for names in lm.runs[:last])
    assert seconds_of_long == pytest.approx(30 * 2 * 10, rel=0.2)


def test_who_had_more_of_the_model_does_not_share_the_passes_of_others(lm, room):
    long = room.ask("long", 90, 5, 5)
    short = room.ask("short", 20, 1, 1)
    room.start()
    long.result()
    short.result()
    assert lm.runs == [["long"], ["short"], ["short"], ["short"], ["long"], ["long"]]


def test_an_error_is_of_the_question_that_has_it(lm, room):
    lm.fails = lambda names, _: ValueError("bad weights") if "bad" in names else None
    good = room.ask("good", 5)
    bad = room.ask("bad", 5)
    room.start()
    assert good.result() == [["good"]]
    with pytest.raises(ValueError, match="bad weights"):
        bad.result()


def test_after_memory_ran_out_passes_are_smaller(lm, room):
    lm.fails = lambda _, tokens: torch.OutOfMemoryError() if tokens > 45 else None
    asked = [room.ask(name, 20, 20) for name in "abc"]
    room.start()
    assert [each.result() for each in asked] == [[[name]] * 2 for name in "abc"]
    assert lm.runs[0] == ["a", "b", "c"]  # 60 tokens, and from then on at most 30
    assert all(len(names) == 1 for names in lm.runs[1:])


def test_a_question_that_needs_too_much_memory_says_so_and_others_go_on(lm, room):
    lm.fails = lambda names, _: torch.OutOfMemoryError() if "large" in names else None
    large, other = room.ask("large", 50), room.ask("other", 5)
    room.start()
    assert other.result() == [["other"]]
    with pytest.raises(torch.OutOfMemoryError):
        large.result()


def test_who_is_stopped_while_waiting_leaves_and_others_are_answered(lm, room):
    gone, other = room.ask("gone", 5), room.ask("other", 5)
    room.stopped.add("gone")
    with pytest.raises(Stopped):
        gone.result(60)
    room.start()
    assert other.result() == [["other"]]
    assert lm.runs == [["other"]]


@pytest.mark.parametrize(("stopped", "ends"), [("ab", True), ("a", False), ("b", False)])
def test_a_pass_goes_on_until_nobody_waits_for_it(lm, room, stopped, ends):
    def run_layers(*_):
        room.stopped.update(stopped)
        passes_module._check_thread()

    lm.fails = run_layers
    asked = {name: room.ask(name, 5) for name in "ab"}
    room.start()
    for each in asked.values():
        if ends:
            with pytest.raises(Stopped):
                each.result()
        else:
            assert each.exception() is None or isinstance(each.exception(), Stopped)
    if not ends:
        (stays,) = {"a", "b"} - {stopped}
        assert asked[stays].result() == [[stays]]


def test_who_has_the_model_alone_shares_no_pass_and_lets_others_go_first_after_a_turn(lm, room):
    moments = []

    def write():
        visitor = Visitor(room.passes, lambda: False)
        with room.passes.visited(visitor), room.passes.alone(visitor) as let_others:
            for _ in range(4):
                moments.append(len(lm.runs))
                lm.clock += 0.3
                let_others()

    writer = room.pool.submit(write)
    wait_until(lambda: room.passes._waiting)
    asked = [room.ask(name, 1) for name in "ab"]
    room.start()
    writer.result()
    assert [each.result() for each in asked] == [[["a"]], [["b"]]]
    assert lm.runs == [["a", "b"]]
    assert moments == [0, 0, 1, 1]  # after 0.6 s the others had their pass


def test_who_runs_the_model_already_waits_for_no_turn(lm, room):
    visitor = Visitor(room.passes, lambda: False)
    with running(lm.model):  # another one has the turn, and waits for the model
        assert room.passes.run(visitor, [branch("a", 1)], lm.run) == ["a"]
        with room.passes.alone(visitor) as let_others:
            let_others()


def test_a_model_that_runs_elsewhere_gets_the_passes_of_one_question_at_a_time(lm, room):
    lm.needs_internals = False
    asked = [room.ask(name, 1) for name in "abc"]
    room.start()
    for each in asked:
        each.result()
    assert lm.runs == [["a"], ["b"], ["c"]]


# ---- real questions of tiny models ---------------------------------------------------------------


QUESTIONS = [
    Attribute(prompt=PROMPT, method="occlusion"),
    Attribute(prompt=f"{PROMPT}. A dog sings.", method="joint", max_new_tokens=3),
    Attribute(prompt="Trains run late", method="noiser", parameters={"samples": 2, "steps": 3}),
    Attribute(prompt="A teacher", method="input_x_gradient"),
    Attribute(prompt=f"{PROMPT} again", method="last_attention"),
    Cite(question="Who sings?", sources=["The fox sings.", "The dog sleeps."], max_new_tokens=4),
    Evaluate(examples=[PROMPT, "A dog"], method="occlusion", masks=2),
    Attribute(prompt=[{"role": "user", "content": "Sing"}], max_new_tokens=4, unit="token"),
]


def begun(questions, lm):
    """A job for each question, of visitors who come at the same moment."""
    models = jobs.Models(["it"], lambda _: lm)
    with models._load_lock:  # nobody begins before all are there
        return [models.begin(lambda job, q=q: q.run(models, job)) for q in questions]


def numbers(value):
    """All numbers of an answer but those of time and of passes, in order."""
    if isinstance(value, dict):
        skipped = {"passes", "token_forwards", "seconds"}
        return [n for key in value if key not in skipped for n in numbers(value[key])]
    if isinstance(value, list | tuple):
        return [n for part in value for n in numbers(part)]
    return [value] if isinstance(value, int | float) and value == value else []


@pytest.mark.parametrize(
    ("family", "questions"),
    [("llama", QUESTIONS), ("gemma3", QUESTIONS), ("mamba", QUESTIONS[:2])],
    ids=["all kinds", "with windows", "without packing"],
)
def test_questions_at_the_same_moment_have_the_answers_that_they_have_alone(family, questions):
    lm = chatty(family)
    counted = []
    handle = lm.model.register_forward_pre_hook(lambda *_: counted.append(1))
    try:
        alone = [begun([question], lm)[0].future.result() for question in questions]
        passes_alone = len(counted)
        counted.clear()
        together = [job.future.result() for job in begun(questions, lm)]
    finally:
        handle.remove()
    for found, expected in zip(together, alone, strict=True):
        assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4, nan_ok=True)
    assert len(counted) < passes_alone
    assert not lm.known
    assert type(lm) is noiser.LanguageModel


def test_one_question_runs_out_of_time_and_the_others_are_answered():
    lm = chatty("llama")
    hurried = Attribute(prompt=f"{PROMPT} and " * 6, method="noiser", max_seconds=1e-9)
    late, *others = begun([hurried, *QUESTIONS[:3]], lm)
    with pytest.raises(NoiserError, match="max_seconds"):
        late.future.result()
    for job in others:
        assert job.future.result()["scores"]


def test_one_question_is_wrong_and_the_others_are_answered():
    lm = chatty("llama")
    wrong = Attribute(prompt=PROMPT, method="occlusion", target="")
    refused, *others = begun([wrong, *QUESTIONS[:3]], lm)
    with pytest.raises(NoiserError, match="target"):
        refused.future.result()
    for job in others:
        assert job.future.result()["scores"]


def test_a_stopped_question_ends_and_the_others_are_answered():
    lm = chatty("llama")
    slow = lm.model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    try:
        long = Attribute(prompt=f"{PROMPT} and " * 6, method="noiser")
        stopped, *others = begun([long, *QUESTIONS[:3]], lm)
        wait_until(lambda: stopped.state["share"])  # in the middle
        stopped.stop()
        with pytest.raises(NoiserError, match="stopped"):
            stopped.future.result()
        for job in others:
            assert job.future.result()["scores"]
    finally:
        slow.remove()
    assert not lm.model._forward_pre_hooks


def test_progress_is_of_each_question_by_itself():
    lm = chatty("llama")
    told = {}

    class Watched(jobs.QuestionJob):
        def progress(self, done, expected):
            told.setdefault(self.number, []).append(done)
            super().progress(done, expected)

    models = jobs.Models(["it"], lambda _: lm)
    started = [Watched(lambda job, q=q: q.run(models, job)) for q in QUESTIONS[:3]]
    for job, question in zip(started, QUESTIONS, strict=False):
        forwards = job.future.result()["info"]["token_forwards"]
        done = told[job.number]
        assert done == sorted(done)
        assert 0 < forwards <= done[-1] + len(question.prompt)


@pytest.mark.slow
@pytest.mark.soak
def test_no_short_question_waits_more_than_twice_the_mean_and_none_is_lost():
    lm = noiser.wrap(tiny_model("llama", max_position_embeddings=4096).eval(), tiny_tokenizer())
    clients, seconds = times(6, 50), times(4, 180)
    with served(load=lambda _: lm, named=("it",)) as web:
        waits = visit_together(f"{web.address}v1", clients, max(1, clients // 16), seconds)
    assert not lost(waits)
    answered = [wait for wait in waits if wait.status == 200]
    short = [wait.seconds for wait in answered if not wait.is_long]
    if clients >= 50:  # the mean of few is of chance
        assert max(short) <= 2 * fmean(wait.seconds for wait in answered)
