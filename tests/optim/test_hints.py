"""Hints to LLVM and to the processor arrive, and leave exact arithmetic as it is."""

import numpy as np
from numba import njit

from covon_avalanche.optim.kernels.hints import fetch, use_wide_registers


@njit
def doubled(values):
    use_wide_registers()
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = 2 * values[i]
    return out


@njit
def plain(values):
    return 2 * values


@njit
def fetched(address):
    fetch(address)
    return address


def test_a_function_asks_for_wide_registers() -> None:
    values = np.arange(100, dtype=np.float32)
    np.testing.assert_array_equal(doubled(values), plain(values))
    wanted = '"prefer-vector-width"="512"'
    assert any(wanted in text for text in doubled.inspect_llvm().values())
    assert not any(wanted in text for text in plain.inspect_llvm().values())


def test_any_address_may_be_fetched() -> None:
    values = np.zeros(8)
    for address in (values.ctypes.data, 0, -64, 2**62):
        assert fetched(address) == address
    assert any("llvm.prefetch" in text for text in fetched.inspect_llvm().values())
