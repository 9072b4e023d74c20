"""CoVON's step on a CPU in one pass over memory, compiled by numba.

All parameters go through one call: their addresses and settings stand in two small tables.
The sample of the next step can be drawn in the same pass (:func:`step` with ``next_key``),
because noise is a function of the key, and the same operations make it the very sample that
:func:`draw` would. Work is cut into tiles; with several torch threads
and a large model the tiles are shared among them, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.kernels.threefry import GROUP, OPTIONS, fill_group

LARGEST_GRADIENT = 1e9  # beyond it a float32 Hessian estimate may overflow
_TILE = 256 * GROUP  # entries that a thread takes at a time
_ONE_THREAD = 2**20  # entries below which threads cost more than they bring

_MEAN, _SAMPLE, _GRAD, _MOMENTUM, _HESS, _PRIOR_MEAN, _PRIOR_PRECISION, _SIZE, _NUMBER = range(9)

u32, u64 = np.uint32, np.uint64


@intrinsic
def _pointer(typing_context, address, like):
    """An integer address as a pointer to elements of ``like``'s type."""

    def codegen(context, builder, signature, arguments):
        kind = context.get_value_type(signature.return_type.dtype)
        return builder.inttoptr(arguments[0], ir.PointerType(kind))

    return types.CPointer(like)(address, like), codegen


@njit(inline="always")
def _entries(address, size, like):
    return carray(_pointer(address, like), (size,))


@cache
def _checker() -> Callable:
    @njit(nogil=True, cache=True, error_model="numpy")
    def check(table, like, limit, flags):
        for row in range(len(table)):
            grad = _entries(table[row, _GRAD], table[row, _SIZE], like)
            good = 0
            for i in range(len(grad)):
                good += abs(grad[i]) < limit  # not so for nan
            flags[row] = good != len(grad)

    return check


@cache
def _drawer(dtype: type, has_hess: bool, has_prior: bool) -> Callable:
    """Compile the sampling of parameters whose hess and prior precision are tensors or not."""

    @njit(fastmath={"contract"}, **OPTIONS)
    def group(
        mean, sample, hess, prior, noise, spread, per_example, hess0, prior0, start, size
    ):  # fmt: skip
        good = 0
        for j in range(size):
            i = u64(start) + u64(j)
            d = (prior[i] if has_prior else prior0) * per_example
            total = (hess[i] if has_hess else hess0) + d
            good += 1 if total > dtype(0) else 0
            root = dtype(1) / np.sqrt(total)
            sample[i] = mean[i] + dtype(noise[u64(j)]) * (spread * root)
        return good

    @njit(**OPTIONS)
    def draw(table, settings, key0, key1, flags, first, stride):
        noise = np.empty(GROUP, np.float32)
        tile = 0
        for row in range(len(table)):
            size = table[row, _SIZE]
            one = dtype(0)
            mean = _entries(table[row, _MEAN], size, one)
            sample = _entries(table[row, _SAMPLE], size, one)
            hess = _entries(table[row, _HESS], size, one)
            prior = _entries(table[row, _PRIOR_PRECISION], size, one)
            ess, hess0 = dtype(settings[row, 0]), dtype(settings[row, 1])
            prior0 = dtype(settings[row, 2])
            spread, per_example = dtype(1) / np.sqrt(ess), dtype(1) / ess
            for begin in range(0, size, _TILE):
                tile += 1
                if tile % stride != first:
                    continue
                for start in range(begin, min(begin + _TILE, size), GROUP):
                    n = min(GROUP, size - start)
                    fill_group(noise, key0, key1, u32(table[row, _NUMBER]), start // GROUP)
                    good = group(
                        mean, sample, hess, prior, noise, spread, per_example, hess0, prior0,
                        start, n,
                    )  # fmt: skip
                    if good != n:
                        flags[row] = True

    return draw


@cache
def _stepper(
    dtype: type, averaged: bool, has_prior_mean: bool, has_prior: bool, ahead: bool
) -> Callable:
    """Compile the step for what is a tensor and what is not, with or without the next sample."""

    @njit(fastmath={"contract"}, **OPTIONS)
    def group(
        mean, sample, grad, momentum, hess, prior_mean, prior, noise, ess, spread, per_example,
        rest1, rest2, lr, clip, correction, prior_mean0, prior0, start, size,
    ):  # fmt: skip
        half = dtype(0.5)
        for j in range(size):
            i = u64(start) + u64(j)
            g, m, h = grad[i], mean[i], hess[i]
            d = (prior[i] if has_prior else prior0) * per_example
            a = h + d
            product = sample[i] if averaged else g * (sample[i] - m)
            change = rest2 * (product * ess * a - h)
            h = h + change + half * change * change / a  # Algorithm 1, line 8
            b = momentum[i] + rest1 * (g - momentum[i])
            root = dtype(1) / np.sqrt(h + d)
            pull = d * (m - (prior_mean[i] if has_prior_mean else prior_mean0))
            direction = (b * correction + pull) * root * root
            m = m - lr * min(max(direction, -clip), clip)  # line 9
            mean[i] = m
            momentum[i] = b
            hess[i] = h
            if ahead:
                sample[i] = m + dtype(noise[u64(j)]) * (spread * root)

    @njit(**OPTIONS)
    def step(table, settings, key0, key1, first, stride):
        noise = np.empty(GROUP, np.float32)
        tile = 0
        for row in range(len(table)):
            size = table[row, _SIZE]
            one = dtype(0)
            mean = _entries(table[row, _MEAN], size, one)
            sample = _entries(table[row, _SAMPLE], size, one)
            grad = _entries(table[row, _GRAD], size, one)
            momentum = _entries(table[row, _MOMENTUM], size, one)
            hess = _entries(table[row, _HESS], size, one)
            prior_mean = _entries(table[row, _PRIOR_MEAN], size, one)
            prior = _entries(table[row, _PRIOR_PRECISION], size, one)
            ess, prior0 = dtype(settings[row, 0]), dtype(settings[row, 2])
            spread, per_example = dtype(1) / np.sqrt(ess), dtype(1) / ess
            prior_mean0, rest1 = dtype(settings[row, 3]), dtype(settings[row, 4])
            rest2, lr = dtype(settings[row, 5]), dtype(settings[row, 6])
            clip, correction = dtype(settings[row, 7]), dtype(settings[row, 8])
            for begin in range(0, size, _TILE):
                tile += 1
                if tile % stride != first:
                    continue
                for start in range(begin, min(begin + _TILE, size), GROUP):
                    if ahead:
                        fill_group(noise, key0, key1, u32(table[row, _NUMBER]), start // GROUP)
                    group(
                        mean, sample, grad, momentum, hess, prior_mean, prior, noise, ess,
                        spread, per_example, rest1, rest2, lr, clip, correction, prior_mean0,
                        prior0, start, min(GROUP, size - start),
                    )  # fmt: skip

    return step


# From tensors to tables ----------------------------------------------------------------


def draw(jobs: Sequence[Job], key: int) -> list[Job]:
    """Write a sample of each job's posterior into its ``sample``.

    :param key: 64 bits; the same key gives the same noise.
    :return: the jobs with a precision that is not positive.
    """
    bad: list[Job] = []
    for kind, some in _by_kind(jobs, lambda j: (_tensor(j.hess), _tensor(j.prior_precision))):
        table, settings = _tables(some)
        flags = np.zeros(len(some), np.bool_)
        kernel, keys = _drawer(*kind), _halves(key)
        _run(
            lambda first, stride: kernel(table, settings, *keys, flags, first, stride),  # noqa: B023
            table,
        )
        bad += [job for job, flag in zip(some, flags, strict=True) if flag]
    return bad


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    for (dtype,), some in _by_kind(jobs, lambda j: ()):
        table, _ = _tables(some)
        flags = np.zeros(len(some), np.bool_)
        _checker()(table, dtype(0), dtype(LARGEST_GRADIENT), flags)
        if flags.any():
            return False
    return True


def step(jobs: Sequence[Job], next_key: int | None) -> None:
    """Algorithm 1, lines 6 to 9, in place.

    :param next_key: draw the next sample into ``sample`` in the same pass.
    """
    for kind, some in _by_kind(
        jobs, lambda j: (j.averaged, _tensor(j.prior_mean), _tensor(j.prior_precision))
    ):
        table, settings = _tables(some)
        kernel, keys = _stepper(*kind, next_key is not None), _halves(next_key or 0)
        _run(lambda first, stride: kernel(table, settings, *keys, first, stride), table)  # noqa: B023


def _run(work: Callable[[int, int], None], table: np.ndarray) -> None:
    threads = torch.get_num_threads() if table[:, _SIZE].sum() > _ONE_THREAD else 1
    if threads == 1:
        work(0, 1)
        return
    list(_pool(threads).map(work, range(threads), [threads] * threads))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="covon-step")


def _tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


def _by_kind(jobs: Sequence[Job], kind: Callable[[Job], tuple]) -> list[tuple[tuple, list[Job]]]:
    """Jobs that one compiled kernel can do together, with the arguments to compile it."""
    kinds: dict[tuple, list[Job]] = {}
    for job in jobs:
        kinds.setdefault((_TYPES[job.mean.dtype], *kind(job)), []).append(job)
    return list(kinds.items())


def _halves(key: int) -> tuple[np.uint32, np.uint32]:
    return u32(key & 0xFFFFFFFF), u32(key >> 32 & 0xFFFFFFFF)


def _tables(jobs: Sequence[Job]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses, sizes and numbers of the jobs, and their settings, one row each."""
    table = [
        (
            job.mean.data_ptr(),
            job.sample.data_ptr(),
            _address(job.grad),
            _address(job.momentum),
            _address(job.hess),
            _address(job.prior_mean),
            _address(job.prior_precision),
            job.mean.numel(),
            job.number,
        )
        for job in jobs
    ]
    settings = [
        (
            job.ess,
            _number(job.hess),
            _number(job.prior_precision),
            _number(job.prior_mean),
            1 - job.beta1,
            1 - job.beta2,
            job.lr,
            min(job.clip_radius, 3e38),
            job.correction,
        )
        for job in jobs
    ]
    return np.array(table, np.int64), np.array(settings, np.float64)


def _address(value: torch.Tensor | float | None) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _number(value: torch.Tensor | float) -> float:
    return 0.0 if isinstance(value, torch.Tensor) else value
