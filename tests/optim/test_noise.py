"""Noise as a function of seed, draw and parameter number, on CPUs with and without numba."""

import sys
import warnings
from unittest import mock

import numba
import pytest
import torch
from numba.core.caching import CacheImpl
from scipy import stats

from covon_avalanche import optim
from covon_avalanche.optim import cpu_noise, noise  # noqa: F401
from covon_avalanche.optim.noise import fill_normal_, is_dense, noise_key


@pytest.fixture(params=["numba", "torch"])
def source(request):
    """With numba and without."""
    if request.param == "numba":
        yield request.param
        return
    with mock.patch("covon_avalanche.optim.noise.compiled_fill", return_value=None):
        yield request.param


def filled(out, key=5, number=7):
    assert fill_normal_(out, key, number) is out
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_standard_normals_that_depend_on_key_and_number_alone(source, dtype):
    pairs = [(key, number) for key in (5, 2**64 - 3) for number in (0, 1, 2**31)]
    torch.manual_seed(0)
    z = [filled(torch.empty(3000, dtype=dtype), *pair) for pair in pairs]
    torch.manual_seed(1)
    assert torch.equal(z[-1], filled(torch.empty(3000, dtype=dtype), *pairs[-1]))
    assert stats.kstest(torch.cat(z), "norm").pvalue > 1e-4
    for i, a in enumerate(z):
        for b in z[:i]:
            assert abs((a * b).mean()) < 5 / 3000**0.5


def test_layouts(source):
    """Gaps are left alone. With numba the order is that of memory, and with gaps of entries."""
    shape = (5, 4, 6, 6)
    plain = filled(torch.empty(shape)).flatten()
    if source == "numba":
        last = filled(torch.empty(shape).to(memory_format=torch.channels_last))
        assert torch.equal(last.permute(0, 2, 3, 1).flatten(), plain)
    for dtype in (torch.float32, torch.float64):
        wide = torch.zeros(5, 4, 6, 12, dtype=dtype)
        alone = filled(torch.empty(shape, dtype=dtype))
        assert filled(wide[..., ::2]).ne(0).all()
        if source == "numba":
            assert torch.equal(wide[..., ::2], alone)
        assert not wide[..., 1::2].any()
    assert filled(torch.empty(())).isfinite()
    assert filled(torch.empty(0, 3)).numel() == 0


@pytest.mark.parametrize(
    ("p", "dense"),
    [
        (torch.empty(3, 4).t(), True),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.empty(()), True),
        (torch.empty(1, 5)[:, :3], True),
        (torch.empty(4, 5)[:, :3], False),
        (torch.empty(4, 6)[:, ::2], False),
        (torch.empty(3, 1).expand(3, 4), False),
    ],
)
def test_is_dense(p, dense):
    assert is_dense(p) == dense


def test_keys_of_seeds_and_draws_differ():
    keys = {noise_key(seed, draw) for seed in range(100) for draw in range(100)}
    assert len(keys) == 10_000
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize("trouble", ["not installed", "no folder", "switched off"])
def test_where_numba_does_not_work_torch_does(trouble, monkeypatch):
    """No folder for its files: as in a container without a home."""
    if trouble == "not installed":
        monkeypatch.setitem(sys.modules, "numba", None)
    elif trouble == "no folder":
        monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    else:
        monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    monkeypatch.setattr(optim, "cpu_noise", optim.cpu_noise)  # put back afterwards
    monkeypatch.delitem(sys.modules, "covon_avalanche.optim.cpu_noise")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = noise.compiled_fill.__wrapped__()
    assert found is None
    told = ["numba does not work here" in str(w.message) for w in caught]
    assert told == ([True] if trouble == "no folder" else [])
    with mock.patch.object(noise, "compiled_fill", return_value=None):
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = optim.CoVON([p], ess=9.0, batch_size=4)
        for _ in range(2):
            with optimizer.sampled_params():
                p.sum().backward()
            optimizer.step()
        assert (p < 1).all()
