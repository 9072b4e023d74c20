"""The CPU kernel: threads, and memory beyond the end of a tensor."""

import os
import signal

import pytest
import torch
from numba import njit
from step_args import make_args

from covon_avalanche.optim import cpu_kernel
from covon_avalanche.optim.noise import OPTIONS


def test_the_number_of_threads_changes_nothing(monkeypatch):
    results = []
    for n in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        args = make_args(torch.float32, "tensors", sizes=(cpu_kernel._ONE_THREAD + 77, 300))
        args[1].hess[7] = -1.0
        assert cpu_kernel.draw_samples(args, 11) is False
        args[1].hess[7] = args[1].sample[7] = 1.0
        cpu_kernel.step(args, squared=False, limit=1e9)
        results.append([torch.cat([a.mean, a.hess, a.momentum, a.sample]) for a in args])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("prior", ["tensors", "numbers"])
@pytest.mark.parametrize("size", [1, 1000, 1024, 16 * 1024 + 1])
def test_nothing_beyond_the_tensors_is_written_or_read(prior, size):
    """Each lies in the middle of NaN, 16-entry aligned on neither side."""
    args = make_args(torch.float32, prior, sizes=(size,))
    whole, inside = [], {}
    for field, value in args[0]._asdict().items():
        if isinstance(value, torch.Tensor):
            whole.append(torch.full((size + 6,), torch.nan))
            inside[field] = whole[-1][3:-3].copy_(value)
    guarded = [args[0]._replace(**inside)]
    for rows in (args, guarded):
        assert cpu_kernel.draw_samples(rows, 5)
        cpu_kernel.step(rows, squared=False, limit=1e9)
        cpu_kernel.step(rows, squared=True, limit=1e9)
    assert all(w[:3].isnan().all() and w[-3:].isnan().all() for w in whole)
    for field in ("mean", "momentum", "hess", "sample"):
        assert torch.equal(getattr(args[0], field), inside[field])


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    """A fork does not inherit threads: without them it would wait for ever."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    args = make_args(torch.float32, "tensors", sizes=(cpu_kernel._ONE_THREAD + 1,))
    assert cpu_kernel.draw_samples(args, 1)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if cpu_kernel.draw_samples(args, 1) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_kernels_are_loaded_from_files():
    """Compiling again would cost each process seconds."""
    args = make_args(torch.float32, "mixed", sizes=(3,) * 8)
    assert cpu_kernel.draw_samples(args, 1)
    for squared in (True, False):
        assert cpu_kernel.step(args, squared=squared, limit=1e9)
    again = njit(**OPTIONS)(cpu_kernel._step.py_func)  # as another process makes it
    again(*cpu_kernel._tables(args), True, 0, 1)
    assert sum(again.stats.cache_hits.values()) == 1
    assert not again.stats.cache_misses
    kernels = (cpu_kernel._check, cpu_kernel._draw, cpu_kernel._step)
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1, 1]
