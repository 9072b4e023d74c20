"""The compiled kernels' own noise: its bits against published vectors, its statistics.

Limits are five standard errors of each statistic under exact normality and independence.
"""

import os
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from numba import njit
from scipy import stats

from covon_avalanche.optim.kernels.threefry import GROUP, fill_group, threefry2x32
from covon_avalanche.optim.noise import NoiseSource, fill_normal

u32 = np.uint32


@njit
def _bits(key0, key1, counter0, counter1):
    return threefry2x32(key0, key1, counter0, counter1)


@njit
def _normals(key0, key1, tensor, first, groups):
    out = np.empty((groups, GROUP), np.float32)
    for group in range(groups):
        fill_group(out[group], key0, key1, tensor, first + group)
    return out


def normals(key=(1, 2), tensor=0, first=0, groups=2000):
    return _normals(u32(key[0]), u32(key[1]), u32(tensor), first, groups).astype(np.float64)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0xFD36D048, 0x2D17272C)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_the_bits_are_those_of_random123(counter, key, answer):
    """Known answers of threefry2x32 with 13 rounds, from the authors' ``kat_vectors``."""
    assert _bits(*map(u32, key), *map(u32, counter)) == answer


def test_moments_and_distribution():
    z = normals().ravel()
    n = len(z)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):
        variance = stats.norm.moment(2 * power) - moment**2
        assert abs((z**power).mean() - moment) < 5 * (variance / n) ** 0.5, power
    assert stats.kstest(z, "norm").pvalue > 1e-4


def test_the_far_tails_point_both_ways():
    """Beyond 4.5 deviations in either direction, for each of the four outputs of a counter."""
    z = normals(groups=40_000).reshape(-1, 4, GROUP // 4)
    expected = stats.norm.sf(4.5) * z[:, 0].size
    for output in range(4):
        for sign in (1, -1):
            count = (sign * z[:, output] > 4.5).sum()
            assert abs(count - expected) < 5 * expected**0.5 + 5
    assert 4.9 < z.max() < 6
    assert -6 < z.min() < -4.9


def test_pairs_are_independent():
    """Radius and angle of each pair of outputs: uniform together, in a table of 64 x 64."""
    z = normals(groups=20_000).reshape(-1, 4, GROUP // 4)
    for a, b in ((0, 1), (2, 3), (0, 2), (1, 3)):
        x, y = z[:, a].ravel(), z[:, b].ravel()
        radius = 1 - np.exp(-(x**2 + y**2) / 2)
        angle = np.arctan2(y, x) / (2 * np.pi) + 0.5
        counts, *_ = np.histogram2d(radius, angle, bins=64, range=[[0, 1], [0, 1]])
        assert stats.chisquare(counts.ravel()).pvalue > 1e-5


@pytest.mark.parametrize("what", ["entries", "groups", "tensors", "steps", "near keys"])
def test_no_correlation(what):
    """Between neighbours at all short distances, and between draws that differ in one bit."""
    z = normals()
    n = z.size
    if what == "entries":
        flat = z.ravel()
        others = [(flat[:-lag], flat[lag:]) for lag in (1, 2, 16, 64, GROUP // 4, GROUP // 2)]
    elif what == "groups":
        others = [(z[:-lag], z[lag:]) for lag in (1, 2, 256)]
    elif what == "tensors":
        others = [(z, normals(tensor=t)) for t in (1, 2, 2**31)]
    elif what == "steps":
        source = NoiseSource(torch.Generator().manual_seed(0))
        keys = [source.key() for _ in range(4)]
        draws = [normals((k & 0xFFFFFFFF, k >> 32)) for k in keys]
        others = [(a, b) for i, a in enumerate(draws) for b in draws[:i]]
    else:
        others = [(z, normals((1 ^ 2**bit, 2))) for bit in (0, 7, 31)]
        others += [(z, normals((1, 2 ^ 2**bit))) for bit in (0, 7, 31)]
    for a, b in others:
        for f, scale in ((lambda v: v, 1.0), (lambda v: v**2 - 1, 2.0), (np.abs, None)):
            x, y = f(a).ravel(), f(b).ravel()
            if scale is None:
                x, y = x - (2 / np.pi) ** 0.5, y - (2 / np.pi) ** 0.5
                scale = 1 - 2 / np.pi
            assert abs((x * y).mean()) < 5 * scale / n**0.5 * 1.01


@pytest.fixture(params=["numba", "torch"])
def source(request):
    """With numba and without."""
    if request.param == "numba":
        yield request.param
        return
    with mock.patch("covon_avalanche.optim.noise.compiled_fill", return_value=None):
        yield request.param


def filled(key=5, number=7, start=0, out=None):
    out = torch.empty(3000) if out is None else out
    fill_normal(out, key, number, start)
    return out


class TestFilling:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_standard_normals_that_depend_on_key_number_and_place_alone(self, source, dtype):
        z = [
            filled(key, number, start, torch.empty(3000, dtype=dtype))
            for key in (5, 2**62)
            for number in (0, 2**31)
            for start in (0, 2**20)
        ]
        again = filled(2**62, 2**31, 2**20, torch.empty(3000, dtype=dtype))
        assert torch.equal(z[-1], again)
        assert stats.kstest(torch.cat(z), "norm").pvalue > 1e-4
        for i, a in enumerate(z):
            for b in z[:i]:
                assert abs((a * b).mean()) < 5 / 3000**0.5

    def test_a_part_is_that_of_the_whole(self):
        whole = filled()
        assert torch.equal(whole[:GROUP].double(), torch.from_numpy(normals((5, 0), 7)[0]))
        for start in (1, GROUP - 1, GROUP, 1700):
            for size in (1, GROUP, 1300):
                part = filled(start=start, out=torch.empty(size))
                assert torch.equal(part, whole[start : start + size])

    def test_layouts(self, source):
        """In order of memory; with gaps, which are left alone, in order of entries."""
        plain = filled(out=torch.empty(5, 4, 6, 6)).flatten()
        last = filled(out=torch.empty(5, 4, 6, 6).to(memory_format=torch.channels_last))
        assert torch.equal(last.permute(0, 2, 3, 1).flatten(), plain)
        wide = torch.zeros(5, 4, 6, 12)
        assert torch.equal(filled(out=wide[..., ::2]).flatten(), plain)
        assert not wide[..., 1::2].any()
        assert filled(out=torch.empty(())).isfinite()


def test_where_numba_does_not_work_torch_does():
    """It finds no folder for its files, as in a container without a home; or is switched off."""
    script = (
        "import torch; from covon_avalanche.optim import CoVON\n"
        "p = torch.nn.Parameter(torch.ones(3)); o = CoVON([p], ess=9.0, batch_size=4)\n"
        "with o.sampled_params(): p.sum().backward()\n"
        "o.step(); assert (p < 1).all()"
    )
    homeless = "from numba.core.caching import CacheImpl; CacheImpl._locator_classes = []\n"
    for before, changes in ((homeless, {}), ("", {"NUMBA_DISABLE_JIT": "1"})):
        done = subprocess.run(
            [sys.executable, "-c", before + script],
            env={**os.environ, **changes},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("numba does not work here" in done.stderr) == bool(before)


class TestKeys:
    def test_a_peek_is_the_next_key_and_takes_nothing(self):
        for generator in (torch.Generator().manual_seed(3), None):
            source = NoiseSource(generator)
            peeked = [source.peek(), source.peek()]
            assert peeked == [source.key()] * 2
            assert source.key() != peeked[0]

    def test_keys_of_a_seed_and_of_an_offset_differ(self):
        from covon_avalanche.optim.noise import _mix

        keys = {_mix(seed, offset) for seed in range(100) for offset in range(0, 400, 4)}
        assert len(keys) == 10_000
