"""LLVM instructions: what they compute, and that the hints among them arrive."""

import numpy as np
import pytest
from numba import njit

from covon_avalanche.optim.numba_intrinsics import (
    array_at,
    hash32,
    multiply32,
    prefetch,
    use_512_bit_registers,
)

u32 = np.uint32


@njit
def doubled(values):
    use_512_bit_registers()
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = 2 * values[i]
    return out


@njit
def plain(values):
    return 2 * values


@njit
def prefetched(address):
    prefetch(address)
    return address


@njit
def hashed(x):
    return hash32(x)


@njit
def product(x, y):
    return multiply32(x, y)


@njit
def negated(address, size):
    values = array_at(address, size)
    for i in range(size):
        values[i] = -values[i]


def lowbias32(x):
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def test_a_function_asks_for_wide_registers():
    values = np.arange(100, dtype=np.float32)
    np.testing.assert_array_equal(doubled(values), plain(values))
    wanted = '"prefer-vector-width"="512"'
    assert any(wanted in text for text in doubled.inspect_llvm().values())
    assert not any(wanted in text for text in plain.inspect_llvm().values())


def test_any_address_may_be_prefetched():
    values = np.zeros(8)
    for address in (values.ctypes.data, 0, -64, 2**62):
        assert prefetched(address) == address
    assert any("llvm.prefetch" in text for text in prefetched.inspect_llvm().values())


@pytest.mark.parametrize("x", [0, 1, 0x12345678, 0x9ABCDEF1, 2**32 - 1])
def test_hash32_is_lowbias32(x):
    assert hashed(u32(x)) == lowbias32(x)


def test_products_wrap_around():
    for x, y in ((3, 5), (2**32 - 1, 2**32 - 1), (0x9E3779B9, 0xDEADBEEF)):
        assert product(u32(x), u32(y)) == x * y % 2**32


def test_an_array_at_an_address_is_that_memory():
    values = np.arange(5, dtype=np.float32)
    negated(values.ctypes.data + 4, 3)
    assert values.tolist() == [0, -1, -2, -3, 4]
