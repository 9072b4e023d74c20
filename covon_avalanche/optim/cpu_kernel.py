"""Noise and CoVON's arithmetic on CPUs, compiled by numba.

They share a file because numba's cache of a function does not notice a change of what it inlines
from another file.

The formulas of a step are those of ``fast_step``, in one pass over memory. Parameters are
the columns of a table of addresses; the work is cut into tiles, which threads share for large
models with the same result. The inner loops go over ``GROUP`` entries and have no branches: where a
prior is one number, or bfloat16, they get a float32 array filled with it. All other tensors are
float32, and all are on the CPU and dense, with the strides of their parameter.

Standard normals come in groups of ``GROUP``. A group's 64-bit state is a SplitMix64 hash of (key,
parameter, group); it seeds a 32-bit sequence with its own start and increment, as in
SplittableRandom (Steele, Lea and Flood, OOPSLA 2014), hashed by lowbias32. Each 32-bit word
becomes a pair of normals by the Box-Muller transform: the radius from its upper 23 bits, the
angle from the word times the golden ratio, which spreads the far tails over all directions.
Logarithm, sine and cosine are minimax polynomials with relative errors of about 1e-6.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from torch import Tensor

from covon_avalanche.optim.fast_step import StepSettings
from covon_avalanche.optim.natural_units import AVERAGING, NO_GRADIENT

GROUP = 1024
_HALF = GROUP // 2
_TILE = 16 * GROUP  # entries that a thread takes at a time
_ONE_THREAD = 2**20  # entries below which starting threads takes longer than the work
OPTIONS = dict(nogil=True, cache=True, error_model="numpy")
# Without forceinline, a function is compiled by itself and with its cached caller, which may round
# differently, and the cache decides which of the two runs.
_INLINED = dict(nogil=True, error_model="numpy", forceinline=True)
_FAST_MATH = {"contract", "nsz", "arcp", "afn"}

i32, i64, u32, u64, f32 = np.int32, np.int64, np.uint32, np.uint64, np.float32


def draw(
    means: list[Tensor],
    samples: list[Tensor],
    hessians: list[Tensor],
    prior_precisions: list[Tensor] | float,
    numbers: list[int],
    *,
    ess: float,
    key: int,
) -> bool:
    """Write posterior samples (Algorithm 1, line 4), with noise as in ``samples.fill_normal_``.

    :return: whether all precisions are positive.
    """
    table = _addresses(means, samples, hessians, priors=[prior_precisions])
    flags = np.zeros(len(means), np.bool_)
    prior0 = 0.0 if isinstance(prior_precisions, list) else prior_precisions
    _run(_draw, table, np.array(numbers), f32(ess), f32(prior0), u64(key), flags)
    return not flags.any()


def all_below(grads: list[Tensor], limit: float) -> bool:
    """Whether all entries are finite and of a magnitude below the limit, loss/weight."""
    table = _addresses(grads)
    flags = np.zeros(len(grads), np.bool_)
    _run(_all_below, table, f32(limit), flags)
    return not flags.any()


def step(
    means: list[Tensor],
    samples: list[Tensor],
    grads: list[Tensor],
    momenta: list[Tensor],
    hessians: list[Tensor],
    prior_means: list[Tensor] | float,
    prior_precisions: list[Tensor] | float,
    settings: StepSettings,
    *,
    step_squares: list[Tensor] | None = None,
) -> None:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9), in natural units
    ``step_squares``, too. See ``fast_step``.

    :param samples: theta.
    :param prior_means: tensors, or 0.
    """
    i, ess, lr, beta1, weight, beta2, clip_radius, hess_approx, batch_size, retraction = settings
    prior0 = 0.0 if isinstance(prior_precisions, list) else prior_precisions
    debiasing = 1 / weight
    clip = min(clip_radius, 3e38)
    # in the order of the kernel's arguments
    numbers = ess, lr, 1 - beta1, 1 - beta2, debiasing, clip, batch_size, retraction, prior0
    priors = prior_means, prior_precisions
    table = _addresses(means, samples, grads, momenta, hessians, priors=priors)
    squared, factors = hess_approx == "gradsq", np.ones(len(means), f32)
    if step_squares is not None:
        sums = np.zeros(int((-(-table[0] // _TILE)).sum()))  # of tiles, whatever the threads
        of_hess = ess, 1 - beta2, batch_size, retraction, prior0
        _run(_step_squares, table, sums, squared, *map(f32, of_hess))
        running = _addresses(step_squares)[1]
        _inverse_rms(table[0], sums, running, f32(1 - AVERAGING), f32(1 - AVERAGING**i), factors)
    _run(_step, table, factors, step_squares is not None, squared, *map(f32, numbers))


def _addresses(*columns: list[Tensor], priors: Iterable[list[Tensor] | float] = ()) -> np.ndarray:
    """A column for each parameter: its size, and the addresses of its tensors. Those of its prior
    are negative for bfloat16, and 0 for a number."""
    count = len(columns[0])
    table = [list(map(Tensor.numel, columns[0]))]
    table += [list(map(Tensor.data_ptr, column)) for column in columns]
    table += [
        [-t.data_ptr() if t.dtype == torch.bfloat16 else t.data_ptr() for t in prior]
        if isinstance(prior, list)
        else [0] * count
        for prior in priors
    ]
    return np.array(table, i64)


def _run(kernel: Callable, table: np.ndarray, *arguments: object) -> None:
    """Call a kernel, in several threads where that pays."""
    threads = torch.get_num_threads()
    if threads == 1 or table[0].sum() <= _ONE_THREAD:
        kernel(table, *arguments, 0, 1)
        return
    futures = [
        _pool(threads, os.getpid()).submit(kernel, table, *arguments, first, threads)
        for first in range(threads)
    ]
    for future in futures:
        future.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """A forked process does not inherit threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="covon-step")


# Noise -------------------------------------------------------------------------------------


@intrinsic
def _pointer(typing_context, address):
    def codegen(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type.dtype)
        return builder.inttoptr(arguments[0], ir.PointerType(kind))

    return types.CPointer(types.float32)(address), codegen


@njit(inline="always")
def _array_at(address, size):
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


@njit(fastmath=_FAST_MATH, **_INLINED)
def _fill_group(out, key, number, group):
    """Write a group of standard normals of a parameter, whose number is below 2**32."""
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
    out, noise = _array_at(address, size), np.empty(GROUP, f32)
    whole = size // GROUP
    for group in range(whole):
        _fill_group(out[group * GROUP : (group + 1) * GROUP], key, number, first + group)
    if size > whole * GROUP:
        _fill_group(noise, key, number, first + whole)
        for i in range(whole * GROUP, size):
            out[i] = noise[i - whole * GROUP]


# Kernels -----------------------------------------------------------------------------------


@njit(**_INLINED)
def _groups(sizes, first, stride):
    """Parameter, tile, start and stop of each group that a thread works on. A list, since numba's
    generators never release their arrays."""
    groups = []
    tile = 0
    for k in range(len(sizes)):
        for begin in range(0, sizes[k], _TILE):
            if tile % stride == first:
                for start in range(begin, min(begin + _TILE, sizes[k]), GROUP):
                    groups.append((k, tile, start, min(start + GROUP, sizes[k])))
            tile += 1
    return groups


@njit(inline="always")
def _part(address, start, stop):
    """Entries ``start`` to ``stop`` of a float32 tensor."""
    return _array_at(address + 4 * start, stop - start)


@njit(inline="always")
def _prior_group(address, size, start, stop, group):
    """Entries ``start`` to ``stop`` of a prior, in ``group`` if it is bfloat16; if it is one
    number, ``group`` is filled with it."""
    if address > 0:
        return _array_at(address, size)[start:stop]
    if address < 0:  # bfloat16 is the upper half of float32
        halves, words = _array_at(-address, (size + 1) // 2).view(np.uint16), group.view(np.uint32)
        for j in range(stop - start):
            words[j] = _shl(u32(halves[u64(start + j)]), u32(16))
    return group[: stop - start]


@njit(**OPTIONS)
def _all_below(table, limit, flags, first, stride):
    for k in range(first, table.shape[1], stride):
        grad = _array_at(table[1, k], table[0, k])
        largest = i32(0)  # the bits of a float32 without its sign; those of NaN are largest of all
        for i in range(len(grad)):
            largest = max(largest, i32(f32(grad[u64(i)]).view(np.int32) & i32(0x7FFFFFFF)))
        flags[k] = largest >= f32(limit).view(np.int32)


@njit(fastmath=_FAST_MATH, **_INLINED)
def _draw_group(mean, sample, hess, prior, noise, ess):
    """Write a group of samples; return whether all precisions are positive."""
    good = i32(0)
    for j in range(len(mean)):
        i = u64(j)
        precision = ess * hess[i] + prior[i]
        good = i32(good + i32(precision > f32(0)))
        sample[i] = mean[i] + noise[i] * (f32(1) / np.sqrt(precision))
    return good == len(mean)


@njit(**OPTIONS)
def _draw(table, numbers, ess, prior0, key, flags, first, stride):
    noise, precision = np.empty(GROUP, f32), np.full(GROUP, prior0)
    for k, _, start, stop in _groups(table[0], first, stride):
        mean, sample = _part(table[1, k], start, stop), _part(table[2, k], start, stop)
        hess = _part(table[3, k], start, stop)
        prior = _prior_group(table[4, k], table[0, k], start, stop, precision)
        _fill_group(noise, key, numbers[k], start // GROUP)
        if not _draw_group(mean, sample, hess, prior, noise, ess):
            flags[k] = True


@njit(fastmath=_FAST_MATH, **_INLINED)  # in this order nothing overflows
def _new_hess(squared, g, theta_minus_m, h, delta, ess, one_minus_beta2, batch_size, retraction):
    reparam = g * theta_minus_m * ess * (h + delta)  # line 6
    hess_hat = batch_size * g * g if squared else reparam
    change = one_minus_beta2 * (hess_hat - h)
    return h + change + retraction * change * (change / (h + delta))  # line 8


@njit(fastmath=_FAST_MATH | {"reassoc"}, **_INLINED)  # a sum in vectors
def _step_squares_of_group(
    squared, mean, sample, grad, hess, prior, ess, one_minus_beta2, batch_size, retraction
):
    per_example = f32(1) / ess
    total = f32(0)
    for j in range(len(grad)):
        i = u64(j)
        g, delta = grad[i], prior[i] * per_example
        noise = f32(0) if squared else sample[i] - mean[i]
        h = _new_hess(
            squared, g, noise, hess[i], delta, ess, one_minus_beta2, batch_size, retraction
        )
        total += g * g / (h + delta)
    return total


@njit(**OPTIONS)
def _step_squares(
    table, sums, squared, ess, one_minus_beta2, batch_size, retraction, prior0, first, stride
):  # of the raw steps grad / sqrt(hess + delta), with the hess that the step will write
    precision = np.full(GROUP, prior0)
    for k, tile, start, stop in _groups(table[0], first, stride):
        mean, sample = _part(table[1, k], start, stop), _part(table[2, k], start, stop)
        grad, hess = _part(table[3, k], start, stop), _part(table[5, k], start, stop)
        prior = _prior_group(table[7, k], table[0, k], start, stop, precision)
        arrays = mean, sample, grad, hess, prior
        settings = ess, one_minus_beta2, batch_size, retraction
        if squared:
            sums[tile] += _step_squares_of_group(True, *arrays, *settings)
        else:
            sums[tile] += _step_squares_of_group(False, *arrays, *settings)


@njit(fastmath={"contract"}, **OPTIONS)
def _inverse_rms(sizes, sums, running, weight, correction, factors):
    """Average each parameter's squared raw steps, and see ``natural_units.inverse_rms``."""
    tile = 0
    for k in range(len(sizes)):
        total = 0.0
        for _ in range(0, sizes[k], _TILE):
            total += sums[tile]
            tile += 1
        square = _array_at(running[k], 1)
        square[0] += weight * (f32(total / sizes[k]) - square[0])
        factors[k] = np.sqrt(correction / square[0]) if square[0] > NO_GRADIENT else f32(0)


@njit(**_INLINED)
def _step_group(
    squared, mean, sample, grad, momentum, hess, prior_mean, prior,
    ess, one_minus_beta1, one_minus_beta2, lr, clip_radius, debiasing, batch_size, retraction,
    inverse_rms, natural,
):  # fmt: skip
    """Update a group in place, see :func:`step`; ``prior`` is a precision (1/weight²)."""
    per_example = f32(1) / ess
    for j in range(len(mean)):
        i = u64(j)
        g, m, delta = grad[i], mean[i], prior[i] * per_example
        average = momentum[i] + one_minus_beta1 * (g - momentum[i])  # line 7
        noise = f32(0) if squared else sample[i] - m
        h = _new_hess(
            squared, g, noise, hess[i], delta, ess, one_minus_beta2, batch_size, retraction
        )
        slope = average * debiasing + delta * (m - prior_mean[i])
        scale = np.sqrt(h + delta) if natural else h + delta
        raw = slope / scale * inverse_rms
        mean[i] = m - lr * min(max(raw, -clip_radius), clip_radius)  # line 9
        momentum[i] = average
        hess[i] = h


@njit(**OPTIONS)
def _step(
    table, factors, natural, squared, ess, lr, one_minus_beta1, one_minus_beta2, debiasing,
    clip_radius, batch_size, retraction, prior0, first, stride,
):  # fmt: skip
    centre, precision = np.zeros(GROUP, f32), np.full(GROUP, prior0)
    for k, _, start, stop in _groups(table[0], first, stride):
        mean, sample = _part(table[1, k], start, stop), _part(table[2, k], start, stop)
        grad, momentum = _part(table[3, k], start, stop), _part(table[4, k], start, stop)
        hess = _part(table[5, k], start, stop)
        prior_mean = _prior_group(table[6, k], table[0, k], start, stop, centre)
        prior = _prior_group(table[7, k], table[0, k], start, stop, precision)
        arrays = mean, sample, grad, momentum, hess, prior_mean, prior
        settings = (
            ess, one_minus_beta1, one_minus_beta2, lr, clip_radius, debiasing, batch_size,
            retraction, factors[k], natural,
        )  # fmt: skip
        if squared:  # a constant, so that each estimate gets a loop of its own
            _step_group(True, *arrays, *settings)
        else:
            _step_group(False, *arrays, *settings)
