"""The line before a model: its order, what those in it are told, and how it is left."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

import noiser
from noiser.server import jobs
from noiser.server import line as line_module
from noiser.server.line import Line, _ordinal, _rounded
from web_for_tests import PROMPT, chatty, held, served


class Left(BaseException):
    """Somebody leaves the line."""


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_lowest_number_has_the_next_seat_whenever_it_came():
    line, order = Line(), []

    def take(number):
        with line.seat(number, lambda _: None):
            order.append(number)

    with ThreadPoolExecutor(5) as pool, line.seat(0, lambda _: None):
        numbers = [5, 3, 9, 1, 7]
        for count, number in enumerate(numbers, 1):
            pool.submit(take, number)
            wait_until(lambda count=count: len(line._waiting) == count)
    assert order == sorted(numbers)


@pytest.mark.parametrize("seats", [1, 3])
def test_no_more_sit_than_there_are_seats_and_all_come_to_sit(seats):
    line, lock = Line(seats), threading.Lock()
    sitting, most, done = 0, 0, []

    def take(number):
        nonlocal sitting, most
        with line.seat(number, lambda _: None):
            with lock:
                sitting += 1
                most = max(most, sitting)
            time.sleep(0.002)
            with lock:
                sitting -= 1
                done.append(number)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(take, range(60)))
    assert most <= seats
    assert sorted(done) == list(range(60))


def test_those_who_wait_are_told_their_place_and_about_how_long():
    line, told = Line(), {1: [], 2: [], 3: []}
    line._durations.extend([8.0, 12.0])  # two turns before

    def take(number):
        with line.seat(number, told[number].append):
            pass

    with ThreadPoolExecutor(3) as pool, line.seat(0, lambda _: None):
        for number in told:
            pool.submit(take, number)
            wait_until(lambda number=number: len(line._waiting) == number)
        wait_until(lambda: all(told.values()))
    assert told[1][0] == "First in line, about 10 s"
    assert told[2][0] == "Second in line, about 20 s"
    assert told[3][0] == "Third in line, about 30 s"


def test_who_leaves_the_line_holds_nobody():
    line = Line()

    def leave(_):
        raise Left

    with line.seat(0, lambda _: None):
        with pytest.raises(Left), line.seat(1, leave):
            pytest.fail("there was no seat")
        assert not line._waiting
    with pytest.raises(ZeroDivisionError), line.seat(2, leave):
        raise ZeroDivisionError
    with line.seat(3, leave):
        assert line._free == 0
    assert line._free == 1


def test_a_seat_that_comes_at_the_moment_of_leaving_goes_to_the_next():
    line = Line()
    first = line.seat(0, lambda _: None)
    first.__enter__()

    def leave(_):
        first.__exit__(None, None, None)  # the seat is free, and ours
        raise Left

    with pytest.raises(Left), line.seat(1, leave):
        pytest.fail("it left")
    assert line._free == 1


@pytest.mark.parametrize(
    ("place", "name"),
    [
        (0, "First"),
        (2, "Third"),
        (9, "Tenth"),
        (10, "11th"),
        (20, "21st"),
        (21, "22nd"),
        (111, "112th"),
    ],
)
def test_places_have_names(place, name):
    assert _ordinal(place) == name


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (4.1, "5 s"), (11, "20 s"), (60, "60 s"), (119, "120 s"), (121, "3 min")],
)
def test_times_are_rounded_up(seconds, text):
    assert _rounded(seconds) == text


def test_a_long_turn_lets_those_who_wait_go_first_and_then_goes_on(monkeypatch):
    monkeypatch.setattr(line_module, "TURN", 0.0)
    line, order = Line(), []
    with ThreadPoolExecutor(2) as pool, line.seat(0, lambda _: None) as seat:
        assert not seat.rest(9, order.append)  # nobody waits

        def take(number):
            with line.seat(number, lambda _: None):
                order.append(number)

        for number in (1, 2):
            pool.submit(take, number)
            wait_until(lambda number=number: len(line._waiting) == number)
        assert seat.rest(9, lambda _: None)
        assert order == [1, 2]
        assert seat.is_held
        assert line._free == 0
    assert (line._free, line._resting) == (1, 0)


def test_a_short_turn_is_not_interrupted():
    line = Line()
    with line.seat(0, lambda _: None) as seat, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(line.wait_for_seat, 1, lambda _: None)
        wait_until(lambda: line._waiting)
        assert not seat.rest(2, lambda _: None)
        line.free_seat()  # as if there were another one
        waiting.result()


def test_who_leaves_while_resting_has_no_seat_to_give_back(monkeypatch):
    monkeypatch.setattr(line_module, "TURN", 0.0)
    line, go = Line(), threading.Event()

    def take():
        with line.seat(1, lambda _: None):
            go.wait(30)

    def leave(_):
        raise Left

    def rest():
        with line.seat(0, lambda _: None) as seat:
            pool.submit(take)
            wait_until(lambda: line._waiting)
            seat.rest(2, leave)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(Left):
            rest()
        assert line._free == 0  # the other one's
        go.set()
    assert (line._free, line._resting) == (1, 0)


def test_only_so_many_rest_at_once(monkeypatch):
    monkeypatch.setattr(line_module, "TURN", 0.0)
    monkeypatch.setattr(line_module, "MOST_RESTING", 0)
    line = Line()
    with line.seat(0, lambda _: None) as seat, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(line.wait_for_seat, 1, lambda _: None)
        wait_until(lambda: line._waiting)
        assert not seat.rest(2, lambda _: None)
        line.free_seat()
        waiting.result()


def test_a_short_question_does_not_wait_for_a_long_one(monkeypatch):
    monkeypatch.setattr(line_module, "TURN", 0.0)
    lm = chatty("llama")
    monkeypatch.setattr(lm, "batch_tokens", 32)  # many passes
    long = {"prompt": f"{PROMPT} and " * 4, "method": "occlusion"}
    short = {"prompt": PROMPT, "method": "occlusion"}
    with served(named=("llama",)) as web:
        web.client.post("v1/attribute", json=short)  # the server has begun
        slow = lm.model.register_forward_pre_hook(lambda *_: time.sleep(0.05))
        try:
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(web.ask, "v1/attribute", **long)
                wait_until(lambda: any("noiser-job" in t.name for t in threading.enumerate()))
                time.sleep(0.3)
                assert web.client.post("v1/attribute", json=short).status_code == 200
                assert not asked.done()
                found = asked.result()[-1]
        finally:
            slow.remove()
    expected = noiser.attribute(lm, long["prompt"], method="occlusion").to_dict()
    assert found[0] == "answer"
    for row, other in zip(found[1]["scores"], expected["scores"], strict=True):
        assert row == pytest.approx(other, abs=1e-4, nan_ok=True)


def test_a_full_server_says_when_to_come_again(monkeypatch):
    monkeypatch.setattr(jobs, "MOST_JOBS", 2)
    question = {"prompt": PROMPT, "method": "occlusion"}
    stream = {"accept": "text/event-stream"}
    with held("llama") as release, served() as web, ExitStack() as open_streams:
        for _ in range(2):
            reply = open_streams.enter_context(
                web.client.stream("POST", "v1/attribute", json=question, headers=stream)
            )
            assert reply.status_code == 200
        chat = {"messages": [{"role": "user", "content": "The"}]}
        for path, body in (
            ("v1/attribute", question),
            ("ask", {"prompt": PROMPT}),
            ("v1/chat/completions", chat),
            ("v1/chat/completions", chat | {"stream": True}),
        ):
            full = web.client.post(path, json=body)
            assert (full.status_code, full.json()["error"]["type"]) == (429, "FullError")
            assert 1 <= int(full.headers["retry-after"]) <= 60
        release()
        open_streams.close()
        wait_until(lambda: web.client.post("v1/attribute", json=question).status_code == 200)


def test_the_stream_says_the_place_in_line(monkeypatch):
    monkeypatch.setattr(jobs, "SEATS", 1)
    question = {"prompt": PROMPT, "method": "occlusion"}
    stream = {"accept": "text/event-stream"}
    with held("llama") as release, served() as web:
        first = {"messages": [{"role": "user", "content": "The"}], "stream": True, "max_tokens": 2}
        with web.client.stream("POST", "v1/attribute", json=question, headers=stream) as one:
            next(one.iter_lines())
            with web.client.stream("POST", "v1/chat/completions", json=first) as other:
                lines = other.iter_lines()
                wait_until(lambda: next(lines).startswith(": First in line"))
        release()
