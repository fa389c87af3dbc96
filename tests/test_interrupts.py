import itertools
import json
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial

import pytest
import torch

import noiser
from noiser.model import attention, packing, products, runtime
from server_processes import free_port, wait_for
from soak import times
from test_contract import state_of
from tiny import save_tiny, tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def careless():
    """A model in training mode, in part, with settings that nobody expects."""
    model = tiny_model("llama", num_hidden_layers=1)
    model.model.layers[0].eval()
    model.model.norm.weight.requires_grad_(False)
    model.config.return_dict, model.config.output_hidden_states = False, True
    return noiser.wrap(model, tiny_tokenizer())


def in_evaluation_mode():
    lm = careless()
    lm.model.eval()
    return lm


def built_in():
    """The built-in model as a caller's own, in training mode."""
    loaded = noiser.load_model("gemma-3-270m")
    loaded.model.train()
    return noiser.wrap(loaded.model, loaded.tokenizer)


def interrupted(call, number):
    """Whether a call was interrupted, at that line of the files that change a model and undo it."""
    files = [module.__file__ for module in (attention, packing, products, runtime)]
    lines = itertools.count()

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files:
            return None
        # Python looks for signals neither where a block begins nor between the end of a `with`
        # block and its release.
        held = (
            linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            .lstrip()
            .startswith(("with ", "try:"))
        )
        if event == "line" and not held and next(lines) == number:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def test_an_interrupt_at_any_line_leaves_the_model_as_it_was():
    lm = careless()
    assert lm.abilities.supports_packing
    before = state_of(lm)

    def call():
        with lm.running(gradients=True), lm.running():
            attention.set_attention(lm.model, "eager")

    for number in itertools.count():
        if not interrupted(call, number):
            break
        assert not runtime.held[lm.model].lock._is_owned()
        assert state_of(lm) == before, number
        assert torch.is_grad_enabled(), number
    assert number > 300


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (careless, times(50, 1300)),
        (in_evaluation_mode, times(50, 1300)),
        (built_in, times(5, 400)),
    ],
    ids=["training", "evaluation", "built-in"],
)
def test_real_interrupts(make, count):
    lm, chance, stopped = make(), random.Random(0), 0
    names = ["occlusion", "noiser", "attn_lrp", "last_attention", "integrated_gradients"]
    calls = [
        *(partial(noiser.attribute, lm, PROMPT, method=name, unit="token") for name in names),
        partial(noiser.diff, lm, PROMPT, "The slow fox sings", max_new_tokens=2),
        partial(noiser.evaluate, lm, [PROMPT], method="occlusion", metrics=["faithfulness"]),
        partial(noiser.rule, lm, "The fox. It sings. A dog.", fresh=10),
        partial(noiser.cite, lm, "Who?", ["The fox sings.", "A dog."], max_new_tokens=3),
    ]
    for call in calls:
        call()
    calls = itertools.cycle(calls)
    began = time.monotonic()
    noiser.attribute(lm, PROMPT, method="occlusion", unit="token")
    longest = 3 * (time.monotonic() - began)
    before = state_of(lm)
    former = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a process in the background ignores it
    try:
        while stopped < count:
            delay = chance.uniform(0, longest)
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                next(calls)()
                timer.join()
            except KeyboardInterrupt:
                stopped += 1
            assert state_of(lm) == before
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_process_that_is_forked_while_another_thread_runs_the_model_can_run_it_too():
    lm = careless()
    before = state_of(lm)
    held, done = threading.Event(), threading.Event()

    def hold():
        with lm.running():
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)
        with lm.running():
            pass
        os._exit(0 if state_of(lm) == before else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0
    assert state_of(lm) == before


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_an_answer_ends_the_server_and_aborts_nothing(tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "noiser", "serve", "--port", str(port)]
    command += ["-m", str(save_tiny("llama", tmp_path))]
    question = {"prompt": "The quick fox sings. " * 40, "chat": False, "methods": "noiser"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/ask",
        json.dumps(question).encode(),
        {"Content-Type": "application/json", "Accept": "text/event-stream"},
    )
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/", process)
            with urllib.request.urlopen(request, timeout=60) as events:
                assert events.readline().startswith(b"event: progress")
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
        finally:
            process.kill()
        assert "terminate called" not in process.stderr.read()


BUSY = """
import threading, time, torch
from noiser.server import leave_running_work

def work():
    while True:
        torch.ones(300, 300) @ torch.ones(300, 300)

threading.Thread(target=work, name="noiser-job", daemon=True).start()
time.sleep(0.2)
try:
    raise KeyboardInterrupt
finally:
    leave_running_work(0.1)
"""


def test_a_process_is_left_at_once_where_a_thread_still_works():
    ended = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120, check=False
    )
    # Python's own end would print KeyboardInterrupt, and could abort within torch.
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
