"""The CPU kernel: threads, and memory beyond the end of a tensor."""

import os
import signal
import threading
from contextlib import suppress

import pytest
import torch
from numba import njit
from numba.core.dispatcher import Dispatcher
from toy_optimizers import contents, in_a_task, same, step_on

from covon_avalanche.optim import cpu_kernel
from covon_avalanche.optim.noise import OPTIONS

FOR_THREADS = 2**20 + 77


def test_the_number_of_threads_changes_nothing(monkeypatch):
    results = []
    for n in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        optimizer = in_a_task("compiled", torch.float32, sizes=(FOR_THREADS, 300))
        large, small = (group["params"][0] for group in optimizer.param_groups)
        step_on(optimizer, lambda: large.square().sum() + small.square().sum())  # noqa: B023
        results.append(contents(optimizer))
        optimizer.state[small]["hess"][7] = -1.0
        with pytest.raises(ValueError, match=r"precision of '1\.0' must be > 0"):
            optimizer.sampled_params().__enter__()
    assert same(*results)
    assert any(thread.name.startswith("covon-step") for thread in threading.enumerate())


@pytest.mark.parametrize("prior", ["tensors", "numbers"])
@pytest.mark.parametrize("size", [1, 1000, 1024, 16 * 1024 + 1])
@pytest.mark.parametrize("hess_approx", ["gradsq", "reparam"])
@pytest.mark.parametrize("around", [torch.nan, 7.0])
def test_nothing_beyond_the_tensors_is_written_or_read(prior, size, hess_approx, around):
    """Each lies between other numbers, 16-entry aligned on neither side."""
    whole = []

    def guarded(value):
        whole.append(torch.full((size + 6,), around))
        return whole[-1][3:-3].copy_(value)

    found = []
    for place in (torch.clone, guarded):
        options = dict(prior=prior, sizes=(size,), hess_approx=hess_approx)
        optimizer = in_a_task("compiled", torch.float32, **options)
        (p,) = optimizer.param_groups[0]["params"]
        p.data, state = place(p.data), optimizer.state[p]
        state |= {key: place(value) for key, value in state.items() if torch.is_tensor(value)}
        with optimizer.sampled_params():
            p.square().sum().backward()
        p.grad = place(p.grad)
        optimizer.step()
        found.append(contents(optimizer))
    assert same(*found)
    edges = torch.stack([torch.cat([w[:3], w[-3:]]) for w in whole])
    torch.testing.assert_close(edges, torch.full_like(edges, around), equal_nan=True)


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    """A fork does not inherit threads: without them it would wait for ever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    optimizer = in_a_task("compiled", torch.float32, sizes=(FOR_THREADS,))
    with optimizer.sampled_params():
        pass
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        with suppress(Exception), optimizer.sampled_params(train=False):
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_kernels_are_loaded_from_files():
    """Compiling again would cost each process seconds."""
    for hess_approx in ("gradsq", "reparam"):
        optimizer = in_a_task("compiled", torch.float32, prior="mixed", hess_approx=hess_approx)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for _ in range(4):  # keys of the noise below and above 2**63
            step_on(optimizer, lambda: sum(p.square().sum() for p in parameters))  # noqa: B023
    kernels = [k for k in vars(cpu_kernel).values() if isinstance(k, Dispatcher) and k.signatures]
    own = [k for k in kernels if k.py_func.__module__ == cpu_kernel.__name__]
    cached = [kernel for kernel in own if kernel.stats.cache_path is not None]
    assert len(cached) == 3  # of a draw, of the check of gradients and of a step
    for kernel in cached:
        (signature,) = kernel.signatures
        again = njit(**OPTIONS)(kernel.py_func)  # as another process makes it
        again.compile(signature)
        assert sum(again.stats.cache_hits.values()) == 1
