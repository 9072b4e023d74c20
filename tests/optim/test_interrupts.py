"""Ctrl-C takes effect between operations: in the block of code, and in whole runs."""

import itertools
import random
import signal
import sys
import threading
import time

import pytest
import torch
from torch import nn
from toy_optimizers import contents, make_covon, make_vcl, step_on

from covon_avalanche.optim.interrupts import defer_interrupt


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handle():
    """Sets a handler, at first Python's own; puts back the former one after the test."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


class TestDeferring:
    def test_the_handler_is_called_once_at_the_end_of_the_outermost_block(self, handle):
        done = []

        def handler(number, frame):
            done.append(number)

        handle(handler)
        with defer_interrupt():
            with defer_interrupt():
                interrupt()
                interrupt()
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer", signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler

    @pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
    def test_what_is_not_a_function_is_left_alone(self, handle, handler):
        handle(handler)
        with defer_interrupt():
            assert signal.getsignal(signal.SIGINT) == handler
            if handler == signal.SIG_IGN:
                interrupt()
        assert signal.getsignal(signal.SIGINT) == handler

    def test_other_threads_do_not_touch_handlers(self):
        seen = []

        def work():
            with defer_interrupt():
                seen.append(signal.getsignal(signal.SIGINT))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [signal.default_int_handler]


def run(optimizer, parameters, batches, snapshot=lambda: None):
    """Two tasks; a snapshot after each operation that changes something."""
    snapshot()
    for task in batches:
        for batch in task:
            step_on(optimizer, distance(parameters, batch))
            snapshot()
        optimizer.consolidate()
        snapshot()


def distance(parameters, batch):
    return lambda: (torch.cat([p.flatten() for p in parameters]) - batch).square().sum()


@pytest.mark.parametrize(
    ("make", "options", "times"),
    [
        (make_covon, {"implementation": "compiled"}, 100),
        (make_covon, {"implementation": "foreach", "mc_samples": 2}, 40),
        (make_covon, {"implementation": "reference"}, 40),
        (make_vcl, {}, 40),
    ],
)
def test_a_run_interrupted_at_any_moment_is_between_operations(make, options, times, request):
    """Weights and state are those of an uninterrupted run at one of its snapshots, bit by bit."""
    if request.config.getoption("cov_source", None):
        pytest.skip("coverage takes locks while it traces, which an interrupt may leave locked")
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (2, 2), ()] * 2 + [(4,)]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    size = sum(s.numel() for s in starts)
    batches = torch.randn(2, 2, size, generator=generator)

    def fresh():
        parameters = [nn.Parameter(start.clone()) for start in starts]
        return make(parameters, **options), parameters

    def snapshot(optimizer):
        return [(key, value.numpy().tobytes()) for key, value in contents(optimizer).items()]

    optimizer, parameters = fresh()
    known = []
    run(optimizer, parameters, batches, lambda: known.append(snapshot(optimizer)))
    begin = time.perf_counter()
    run(*fresh(), batches)
    duration = time.perf_counter() - begin
    assert len(known) == 7
    assert all(a != b for a, b in itertools.combinations(known, 2))

    rng, reached = random.Random(0), set()
    before = signal.signal(signal.SIGALRM, lambda number, frame: interrupt())
    try:
        for attempt in range(10 * times):
            if attempt >= times and len(reached) >= 4:
                break  # on a busy machine a run may take longer than it did above
            optimizer, parameters = fresh()
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, duration))
                run(optimizer, parameters, batches)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            assert torch.is_grad_enabled()
            optimizer.discard_samples()
            reached.add(known.index(snapshot(optimizer)))
            step_on(optimizer, distance(parameters, batches[0, 0]))  # training continues
            assert all(p.isfinite().all() for p in parameters)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)
    assert len(reached) >= 4  # the moments were spread over the run


def test_an_interrupt_where_no_grad_begins_or_ends_leaves_gradients_on(request):
    """torch's own ``no_grad`` would leave them off, so it is only used where interrupts wait."""
    if request.config.getoption("cov_source", None):
        pytest.skip("coverage traces, too")
    batches = torch.zeros(1, 1, 2)
    count, last = 0, 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename != torch.autograd.grad_mode.__file__:
            return None  # the functions that it calls are traced
        frame.f_trace_opcodes = True
        count += 1
        if count == last:
            sys.settrace(None)
            interrupt()
        return trace

    def attempt(at):
        nonlocal count, last
        count, last = 0, at
        optimizer = make_covon([nn.Parameter(torch.ones(2))], implementation="foreach")
        sys.settrace(trace)
        try:
            run(optimizer, optimizer.param_groups[0]["params"], batches)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)

    attempt(at=0)
    total = count
    assert total > 100
    try:
        for at in range(1, total + 1, 2):  # one that is open is so for several moments
            attempt(at)
            assert torch.is_grad_enabled(), at
    finally:
        torch.set_grad_enabled(True)
