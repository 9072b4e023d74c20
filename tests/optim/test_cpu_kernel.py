"""The CPU kernel: threads, memory beyond a tensor's end, bits and statistics of its noise."""

import os
import signal
import threading
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch
from numba import njit
from toy_optimizers import contents, in_a_task, same, step_on

from covon_avalanche.optim import CoVON, cpu_kernel
from covon_avalanche.optim.cpu_kernel import GROUP, OPTIONS, fill_normal
from covon_avalanche.optim.samples import noise_key

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


def test_only_kernels_are_compiled_by_themselves():
    """So that the process that fills numba's cache gets the bits of those that read it."""
    compiled = [f for f in vars(cpu_kernel).values() if hasattr(f, "targetoptions")]
    options = {f.__name__: f.targetoptions for f in compiled}
    inlined = {n for n, o in options.items() if "forceinline" in o or o.get("inline") == "always"}
    kernels = {"_draw", "_all_below", "_step_squares", "_inverse_rms", "_step"}
    assert options.keys() - inlined == {"fill_normal", *kernels}


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
    for kernel in (cpu_kernel._draw, cpu_kernel._all_below, cpu_kernel._step):
        assert kernel.stats.cache_path is not None
        (signature,) = kernel.signatures
        again = njit(**OPTIONS)(kernel.py_func)  # as another process makes it
        again.compile(signature)
        assert sum(again.stats.cache_hits.values()) == 1


def test_kernels_release_their_arrays(monkeypatch):
    """Small arrays that stay allocated fragment the memory of gradients."""
    tables = []

    def addresses(*columns, make=cpu_kernel._addresses, **options):
        table = make(*columns, **options)
        tables.append(weakref.ref(table))
        return table

    monkeypatch.setattr(cpu_kernel, "_addresses", addresses)
    for n in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=n: n)
        weight = torch.nn.Parameter(torch.ones(FOR_THREADS))
        optimizer = CoVON([weight], batch_size=1, implementation="compiled")
        step_on(optimizer, lambda: weight.square().sum())  # noqa: B023
    assert len(tables) == 8  # a draw, a check and a step, which has two
    assert all(table() is None for table in tables)


# Noise ---------------------------------------------------------------------------------------


def normals(key=1, number=0, groups=2000):
    out = torch.empty(groups, GROUP)
    fill_normal(out.data_ptr(), out.numel(), key, number, 0)
    return out.numpy().astype(np.float64)


def mix64(z):
    """SplitMix64's finaliser."""
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def lowbias32(x):
    """Its published form."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def group_in_float64(key, number, group):
    """A group from its definition, with numpy's logarithm, sine and cosine."""
    state = mix64((key + mix64((number * 2**32 + group + 1) % 2**64)) % 2**64)
    start, increment = state % 2**32, state >> 32 | 1
    words = [lowbias32((start + j * increment) % 2**32) for j in range(GROUP // 2)]
    radius = np.sqrt(-2 * np.log([((w >> 9) + 0.5) / 2**23 for w in words]))
    turns = np.array([w * 0x9E3779B9 % 2**32 for w in words])
    quadrant = (turns + 2**29) // 2**30 % 4
    x = (turns - quadrant * 2.0**30 + 2**31) % 2**32 - 2**31  # nearest to the quadrant's axis
    sine, cosine = np.sin(x * np.pi / 2**31), np.cos(x * np.pi / 2**31)
    radius = np.where(quadrant >= 2, -radius, radius)
    odd = quadrant % 2 == 1
    return radius * np.where(odd, sine, cosine), radius * np.where(odd, cosine, sine)


def test_published_values():
    """What the tests compare with, itself: SplittableRandom(0) and (1234567), and lowbias32."""
    gamma = 0x9E3779B97F4A7C15
    assert [mix64(i * gamma % 2**64) for i in (1, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert mix64((1234567 + gamma) % 2**64) == 6457827717110365317
    assert noise_key(0, 0) == 0xE220A8397B1DCDAF
    assert noise_key(1234567, 1) == 3203168211198807973
    x = lowbias32(0xDEADBEEF)  # undone by the inverse that its author gives
    x = (x ^ x >> 16) * 0x43021123 % 2**32
    x = (x ^ x >> 15 ^ x >> 30) * 0x1D69E2A5 % 2**32
    assert x ^ x >> 16 == 0xDEADBEEF


@pytest.mark.parametrize(
    ("key", "number", "group"), [(1, 0, 0), (2**64 - 1, 2**32 - 1, 3), (2**63 + 12345, 7, 40)]
)
def test_each_bit_and_a_relative_error_below_1e_5(key, number, group):
    got = normals(key, number, group + 1)[group]
    want = np.concatenate(group_in_float64(key, number, group))
    assert np.abs(got / want - 1).max() < 1e-5


def test_a_last_group_that_is_not_whole_is_the_start_of_one():
    whole = normals(groups=3).ravel()
    for size in (0, 1, GROUP - 1, GROUP, GROUP + 1, 3 * GROUP - 5):
        out = torch.full((size + 1,), torch.nan)
        fill_normal(out.data_ptr(), size, 1, 0, 0)
        assert (out[:size].double().numpy() == whole[:size]).all()
        assert out[size].isnan()


@pytest.mark.parametrize("what", ["entries", "groups", "numbers", "draws", "near keys"])
def test_no_correlation(what):
    """Between neighbours at short distances, and between draws that differ in one bit."""
    z = normals()
    n = z.size
    if what == "entries":
        flat = z.ravel()
        others = [(flat[:-lag], flat[lag:]) for lag in (1, 2, 16, 64, GROUP // 4, GROUP // 2)]
    elif what == "groups":
        others = [(z[:-lag], z[lag:]) for lag in (1, 2, 256)]
    elif what == "numbers":
        others = [(z, normals(number=t)) for t in (1, 2, 2**31)]
    elif what == "draws":
        draws = [normals(noise_key(seed, draw)) for seed in (0, 1) for draw in (0, 1, 2)]
        others = [(a, b) for i, a in enumerate(draws) for b in draws[:i]]
    else:
        others = [(z, normals(1 ^ 2**bit)) for bit in (0, 1, 7, 31, 32, 33, 63)]
    for a, b in others:
        for f, variance in (
            (lambda v: v, 1.0),
            (lambda v: v**2 - 1, 2.0),
            (lambda v: np.abs(v) - (2 / np.pi) ** 0.5, 1 - 2 / np.pi),
        ):
            x, y = f(a).ravel(), f(b).ravel()
            assert abs((x * y).mean()) < 5 * variance / n**0.5 * 1.01
