"""Gaussian noise that is a pure function of (key, tensor, place), compiled by numba.

Random bits: Threefry-2x32 with 13 rounds, the fewest that pass all of TestU01's BigCrush
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2). Each of
its two 32-bit words makes a pair of normals by the Box-Muller transform: the radius from
the word, the angle from the word times the golden ratio. The 2**32 pairs of (radius,
angle) fill the square as evenly as a Fibonacci lattice, every thin slice of it too, so the
far tails point in all directions.

No state, so noise does not depend on how the work is cut into blocks or threads. It is
drawn in groups of ``GROUP`` entries, each in ``PARTS`` parts.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
from numba import njit

from covon_avalanche.optim.kernels import hints

_FILES = (__file__, hints.__file__)
SOURCE = zlib.crc32(b"".join(Path(file).read_bytes() for file in _FILES)) | 1
"""Of the code here, on which callers that are compiled elsewhere depend."""

GROUP = 512
PARTS = 8
_QUARTER = GROUP // 4
_WORDS = _QUARTER // PARTS  # pairs of words of a part

OPTIONS = dict(nogil=True, cache=True, error_model="numpy")

u32, i32, f32, u64 = np.uint32, np.int32, np.float32, np.uint64


@njit(inline="always")
def _rotate(x, bits):
    return u32(u32(x << u32(bits)) | u32(x >> u32(32 - bits)))


@njit(inline="always")
def _four_rounds(x0, x1, a, b, c, d):
    x0 = u32(x0 + x1)
    x1 = u32(_rotate(x1, a) ^ x0)
    x0 = u32(x0 + x1)
    x1 = u32(_rotate(x1, b) ^ x0)
    x0 = u32(x0 + x1)
    x1 = u32(_rotate(x1, c) ^ x0)
    x0 = u32(x0 + x1)
    x1 = u32(_rotate(x1, d) ^ x0)
    return x0, x1


@njit(inline="always")
def threefry2x32(key0, key1, counter0, counter1):
    """Two random 32-bit words of a 64-bit key and a 64-bit counter; 13 rounds."""
    key2 = u32(key0 ^ key1 ^ u32(0x1BD11BDA))
    x0, x1 = u32(counter0 + key0), u32(counter1 + key1)
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = u32(x0 + key1), u32(x1 + u32(key2 + u32(1)))
    x0, x1 = _four_rounds(x0, x1, 17, 29, 16, 24)
    x0, x1 = u32(x0 + key2), u32(x1 + u32(key0 + u32(2)))
    x0, x1 = _four_rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = u32(x0 + key0), u32(x1 + u32(key1 + u32(3)))
    x0 = u32(x0 + x1)
    return x0, u32(_rotate(x1, 17) ^ x0)


@njit(inline="always")
def _log(u):
    """Natural logarithm of a normal float32 in (0, 1): exponent, and a polynomial in the
    mantissa (the minimax coefficients of Cephes' logf, relative error below 1e-7)."""
    bits = f32(u).view(np.int32)
    exponent = i32(i32(bits - i32(0x3F3504F3)) >> i32(23))
    x = i32(bits - i32(exponent << i32(23))).view(np.float32) - f32(1)
    y = f32(7.0376836292e-2)
    y = y * x + f32(-1.1514610310e-1)
    y = y * x + f32(1.1676998740e-1)
    y = y * x + f32(-1.2420140846e-1)
    y = y * x + f32(1.4249322787e-1)
    y = y * x + f32(-1.6668057665e-1)
    y = y * x + f32(2.0000714765e-1)
    y = y * x + f32(-2.4999993993e-1)
    y = y * x + f32(3.3333331174e-1)
    y = y * x - f32(0.5)
    return y * x * x + x + f32(exponent) * f32(0.6931471805599453)


@njit(inline="always")
def _pair(word):
    """Two independent standard normals, float32, from one 32-bit word."""
    uniform = (f32(i32(word >> u32(9))) + f32(0.5)) * f32(1.0 / 2**23)
    square = f32(-2) * _log(uniform)
    radius = square * (f32(1) / np.sqrt(square))
    # The angle: the nearest of four quadrants, and the rest in [-pi/4, pi/4).
    bits = u32(word * u32(0x9E3779B9))
    quadrant = u32(u32(bits + u32(2**29)) >> u32(30))
    x = f32(i32(u32(bits - u32(quadrant << u32(30))))) * f32(2 * np.pi / 2**32)
    z = x * x
    sine = ((f32(-1.9515295891e-4) * z + f32(8.3321608736e-3)) * z + f32(-1.6666654611e-1)) * z
    sine = sine * x + x
    cosine = (f32(2.443315711809948e-5) * z + f32(-1.388731625493765e-3)) * z
    cosine = (cosine + f32(4.166664568298827e-2)) * z * z - f32(0.5) * z + f32(1)
    turned = i32(quadrant & u32(1)) != i32(0)
    signed = radius - radius * f32(i32(quadrant & u32(2)))
    return signed * (sine if turned else cosine), signed * (cosine if turned else sine)


@njit(fastmath={"contract", "nsz", "arcp", "afn"}, **OPTIONS)
def fill_part(out, key0, key1, tensor, group, part):
    """Write an eighth of the standard normals of one group of a tensor's entries.

    :param out: array of ``GROUP`` entries.
    :param key0, key1: the draw; every draw of a tensor has another key.
    :param tensor: number of the tensor, below 2**32.
    :param group: number of the group within it, below 2**25.
    :param part: below ``PARTS``.
    """
    hints.use_wide_registers()
    first = u32(group * _QUARTER)
    for k in range(_WORDS):
        j = part * _WORDS + k
        word0, word1 = threefry2x32(key0, key1, u32(first + u32(j)), tensor)
        i = u64(j)
        out[i], out[i + u64(_QUARTER)] = _pair(word0)
        out[i + u64(2 * _QUARTER)], out[i + u64(3 * _QUARTER)] = _pair(word1)


@njit(**OPTIONS)
def fill_group(out, key0, key1, tensor, group):
    """Write all parts of a group; see :func:`fill_part`."""
    for part in range(PARTS):
        fill_part(out, key0, key1, tensor, group, part)


@njit("void(intp, intp, uint64, uint32, intp)", **OPTIONS)
def fill(address, size, key, tensor, start):
    """Write some of a tensor's standard normals, float32.

    :param address: where to, in bytes.
    :param size: how many.
    :param key: the draw.
    :param tensor: number of the tensor.
    :param start: place of the first of them in the tensor.
    """
    key0, key1 = u32(key & u64(0xFFFFFFFF)), u32(key >> u64(32))
    out, noise = hints.entries(address, size, f32(0)), np.empty(GROUP, f32)
    done = 0
    while done < size:
        group, skip = divmod(start + done, GROUP)
        n = min(GROUP - skip, size - done)
        if n == GROUP:
            fill_group(out[done : done + GROUP], key0, key1, tensor, group)
        else:
            fill_group(noise, key0, key1, tensor, group)
            for i in range(n):
                out[done + i] = noise[skip + i]
        done += n
