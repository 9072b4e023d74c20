"""Hints for LLVM arrive; ``test_noise`` shows what the arithmetic computes."""

import numpy as np
from numba import njit

from covon_avalanche.optim.numba_intrinsics import prefetch, use_512_bit_registers


@njit
def hinted(values, address):
    use_512_bit_registers()
    prefetch(address)
    return 2 * values


def test_hints_arrive_and_change_no_values():
    """Any address may be prefetched."""
    values = np.arange(100, dtype=np.float32)
    for address in (values.ctypes.data, 0, -64, 2**62):
        np.testing.assert_array_equal(hinted(values, address), 2 * values)
    for hint in ('"prefer-vector-width"="512"', "llvm.prefetch"):
        assert any(hint in text for text in hinted.inspect_llvm().values())
