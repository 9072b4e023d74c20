"""Standard normal noise on CPUs, compiled by numba.

Entries come in groups of ``GROUP``. A group's 64-bit state is a SplitMix64 hash of (key,
parameter, group); it seeds a 32-bit sequence with its own start and increment, as in
SplittableRandom (Steele, Lea and Flood, OOPSLA 2014), hashed by lowbias32. Each 32-bit word
becomes a pair of normals by the Box-Muller transform: the radius from its upper 23 bits, the
angle from the word times the golden ratio, which spreads the far tails over all directions.
Logarithm, sine and cosine are minimax polynomials with relative errors of about 1e-6.

Nothing here has a state: noise does not depend on how work is divided among threads.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

GROUP = 1024
_HALF = GROUP // 2
OPTIONS = dict(nogil=True, cache=True, error_model="numpy")
FAST_MATH = {"contract", "nsz", "arcp", "afn"}

u32, i32, f32, u64 = np.uint32, np.int32, np.float32, np.uint64


@intrinsic
def _pointer(typing_context, address):
    def codegen(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type.dtype)
        return builder.inttoptr(arguments[0], ir.PointerType(kind))

    return types.CPointer(types.float32)(address), codegen


@njit(inline="always")
def array_at(address, size):
    """The float32 array of ``size`` entries at an integer address."""
    return carray(_pointer(address), (size,))


def _word_operation(name):
    """An operation on two 32-bit words. numba's own turns them into 64-bit integers, of which a
    vector holds half as many, and which processors multiply slowly."""

    @intrinsic
    def operation(typing_context, a, b):
        def codegen(context, builder, signature, arguments):
            return getattr(builder, name)(*arguments)

        return types.uint32(types.uint32, types.uint32), codegen

    return operation


_add, _mul, _shl, _shr, _xor = map(_word_operation, ("add", "mul", "shl", "lshr", "xor"))


@njit(inline="always")
def _hash32(x):
    """``lowbias32``, Chris Wellons' 32-bit integer hash."""
    x = _mul(_xor(x, _shr(x, u32(16))), u32(0x7FEB352D))
    x = _mul(_xor(x, _shr(x, u32(15))), u32(0x846CA68B))
    return _xor(x, _shr(x, u32(16)))


@njit(inline="always")
def _mix64(z):
    """SplitMix64's finaliser."""
    z = u64(z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = u64(z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return u64(z ^ (z >> u64(31)))


@njit(inline="always")
def _log(u):
    """Natural logarithm of a normal float32 in (0, 1): exponent, and log(1 + x) by a polynomial
    on sqrt(1/2) <= 1 + x < sqrt(2)."""
    bits = f32(u).view(np.int32)
    exponent = i32(i32(bits - i32(0x3F3504F3)) >> i32(23))
    x = i32(bits - i32(exponent << i32(23))).view(np.float32) - f32(1)
    y = f32(1.1949442e-1)
    y = y * x - f32(1.8587615e-1)
    y = y * x + f32(2.0449122e-1)
    y = y * x - f32(2.4919062e-1)
    y = y * x + f32(3.3319221e-1)
    y = y * x - f32(5.0000849e-1)
    return y * x * x + x + f32(exponent) * f32(0.6931471805599453)


@njit(inline="always")
def _pair(word):
    """Two independent standard normals from one 32-bit word."""
    uniform = (f32(i32(_shr(word, u32(9)))) + f32(0.5)) * f32(1.0 / 2**23)
    radius = f32(np.sqrt(f32(-2) * _log(uniform)))
    # The angle is the nearest multiple of pi/2 plus x in [-pi/4, pi/4).
    turn = _mul(word, u32(0x9E3779B9))
    quadrant = _shr(_add(turn, u32(2**29)), u32(30))
    x = f32(i32(_shl(turn, u32(2)))) * f32(2 * np.pi / 2**34)
    z = x * x
    sine = (f32(8.15298e-3) * z - f32(1.6662833e-1)) * z * x + x
    cosine = ((f32(-1.35978e-3) * z + f32(4.165629e-2)) * z - f32(4.9999895e-1)) * z + f32(1)
    odd = _shl(quadrant, u32(31)) != u32(0)
    sign = _shl(_shr(quadrant, u32(1)), u32(31))
    signed = u32(_xor(radius.view(np.uint32), sign)).view(np.float32)
    return signed * (sine if odd else cosine), signed * (cosine if odd else sine)


@njit(fastmath=FAST_MATH, **OPTIONS)
def fill_group(out, key, number, group):
    """Write a group of a parameter's standard normals.

    :param out: float32 array of ``GROUP`` entries.
    :param key: of the draw, 64 bits.
    :param number: of the parameter, below 2**32.
    :param group: index of the group within the parameter.
    """
    state = _mix64(u64(key + _mix64(u64(u64(u64(number) << u64(32)) + u64(group) + u64(1)))))
    word, increment = u32(state), u32(u32(state >> u64(32)) | u32(1))
    for k in range(_HALF):
        i = u64(k)
        out[i], out[i + u64(_HALF)] = _pair(_hash32(word))
        word = _add(word, increment)


@njit("void(intp, intp, uint64, intp, intp)", **OPTIONS)
def fill_normal(address, size, key, number, first):
    """Write standard normals to ``size`` float32 entries at an address.

    :param first: the group that they begin with.
    """
    out, noise = array_at(address, size), np.empty(GROUP, f32)
    whole = size // GROUP
    for group in range(whole):
        fill_group(out[group * GROUP : (group + 1) * GROUP], key, number, first + group)
    if size > whole * GROUP:
        fill_group(noise, key, number, first + whole)
        for i in range(whole * GROUP, size):
            out[i] = noise[i - whole * GROUP]
