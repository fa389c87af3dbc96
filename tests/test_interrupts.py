import itertools
import linecache
import os
import random
import signal
import sys
import threading

import pytest
import torch

import noiser
from noiser.model import attention, packing, products, runtime
from soak import times
from test_contract import state_of
from tiny import tiny_model, tiny_tokenizer

PROMPT = "The quick fox sings"


def careless():
    """A model in training mode, in part, with settings that nobody expects."""
    model = tiny_model("llama", num_hidden_layers=1)
    model.model.layers[0].eval()
    model.model.norm.weight.requires_grad_(False)
    model.config.return_dict, model.config.output_hidden_states = False, True
    return noiser.wrap(model, tiny_tokenizer())


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
@pytest.mark.parametrize("train", [True, False])
def test_real_interrupts(train):
    lm, chance, stopped = careless(), random.Random(0), 0
    lm.model.train(train)
    methods = itertools.cycle(
        ["occlusion", "noiser", "attn_lrp", "last_attention", "input_x_gradient"]
    )
    for method in itertools.islice(methods, 5):
        noiser.attribute(lm, PROMPT, method=method, unit="token")
    before = state_of(lm)
    former = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a process in the background ignores it
    try:
        while stopped < times(50, 600):
            timer = threading.Timer(chance.uniform(0, 0.1), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                noiser.attribute(lm, PROMPT, method=next(methods), unit="token")
                timer.join()
            except KeyboardInterrupt:
                stopped += 1
            lm.context([3])
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
