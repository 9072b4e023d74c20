"""CoVON's arithmetic on CPUs: one pass over memory for all parameters, compiled by numba.

The formulas are those of ``covon.fast_step``. Parameters are the rows of a table of
addresses; the work is cut into tiles, which torch's threads share for large models with the same
result. All tensors are float32, on the CPU, and dense, with the strides of their parameter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

from covon_avalanche.optim.multi_tensor import StepArgs
from covon_avalanche.optim.noise import FAST_MATH, GROUP, OPTIONS, array_at, fill_group

_TILE = 16 * GROUP  # entries that a thread takes at a time
_ONE_THREAD = 2**20  # entries below which starting threads takes longer than the work

_MEAN, _SAMPLE, _GRAD, _MOMENTUM, _HESS, _PRIOR_MEAN, _PRIOR_PRECISION, _SIZE, _NUMBER = range(9)
_ESS, _LR, _ONE_MINUS_BETA1, _ONE_MINUS_BETA2, _DEBIAS, _CLIP, _BATCH_SIZE, _PRIOR0 = range(8)

i32, i64, f32, u64 = np.int32, np.int64, np.float32, np.uint64


def draw_samples(rows: Sequence[StepArgs], key: int) -> bool:
    """Write a posterior sample into each row's ``sample`` (Algorithm 1, line 4).

    :return: whether all precisions are positive.
    """
    table, settings = _tables(rows)
    flags = np.zeros(len(rows), np.bool_)
    _run(_draw, table, settings, u64(key), flags)
    return not flags.any()


def step(rows: Sequence[StepArgs], squared: bool, limit: float) -> bool:
    """Update mean, momentum and hess in place (Algorithm 1, lines 6 to 9).

    :param limit: of the gradients' entries, loss/weight.
    :return: whether all gradients are finite and below the limit; if not, nothing has changed.
    """
    table, settings = _tables(rows)
    flags = np.zeros(len(rows), np.bool_)
    _run(_check, table, settings, f32(limit), flags)
    if not flags.any():
        _run(_step, table, settings, squared)
    return not flags.any()


def _tables(rows: Sequence[StepArgs]) -> tuple[np.ndarray, np.ndarray]:
    """Addresses and settings, a row for each parameter."""
    table = np.array([n for row in rows for n in _addresses(row)], i64).reshape(-1, 9)
    settings = np.array([x for row in rows for x in _settings(row)], f32).reshape(-1, 8)
    return table, settings


def _run(kernel: Callable, table: np.ndarray, settings: np.ndarray, *arguments: object) -> None:
    """Call a kernel, in several threads where that pays."""
    threads = torch.get_num_threads() if table[:, _SIZE].sum() > _ONE_THREAD else 1
    if threads == 1:
        kernel(table, settings, *arguments, 0, 1)
        return
    futures = [
        _pool(threads, os.getpid()).submit(kernel, table, settings, *arguments, first, threads)
        for first in range(threads)
    ]
    for future in futures:
        future.result()


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """A forked process does not inherit threads."""
    return ThreadPoolExecutor(threads, thread_name_prefix="covon-step")


def _addresses(row: StepArgs) -> tuple[int, ...]:
    mean, precision = row.prior_mean, row.prior_precision
    return (
        row.mean.data_ptr(),
        row.sample.data_ptr(),
        0 if row.grad is None else row.grad.data_ptr(),
        0 if row.momentum is None else row.momentum.data_ptr(),
        row.hess.data_ptr(),
        mean.data_ptr() if isinstance(mean, Tensor) else 0,
        precision.data_ptr() if isinstance(precision, Tensor) else 0,
        row.mean.numel(),
        row.number,
    )


def _settings(row: StepArgs) -> tuple[float, ...]:
    prior0 = 0.0 if isinstance(row.prior_precision, Tensor) else row.prior_precision
    r = row.rates
    return (
        r.ess,
        r.lr,
        1 - r.beta1,
        r.one_minus_beta2,
        1 / r.bias_correction,
        min(r.clip_radius, 3e38),
        r.batch_size,
        prior0,
    )


# Kernels -----------------------------------------------------------------------------------


@njit(**OPTIONS)
def _check(table, settings, limit, flags, first, stride):
    for row in range(first, len(table), stride):
        grad = array_at(table[row, _GRAD], table[row, _SIZE])
        largest = i32(0)  # the bits of a float32 without its sign; those of NaN are largest of all
        for i in range(len(grad)):
            largest = max(largest, i32(f32(grad[u64(i)]).view(np.int32) & i32(0x7FFFFFFF)))
        flags[row] = largest >= f32(limit).view(np.int32)


@njit(fastmath=FAST_MATH, **{**OPTIONS, "cache": False})  # its caller is cached
def _draw_group(mean, sample, hess, prior, prior_given, noise, ess, prior0, begin, size):
    good = i32(0)
    for j in range(size):
        i = u64(begin) + u64(j)
        precision = ess * hess[i] + (prior[i] if prior_given else prior0)
        good = i32(good + i32(precision > f32(0)))
        sample[i] = mean[i] + noise[u64(j)] * (f32(1) / np.sqrt(precision))
    return good


@njit(**OPTIONS)
def _draw(table, settings, key, flags, first, stride):
    noise = np.empty(GROUP, f32)
    tile = 0
    for row in range(len(table)):
        size, number = table[row, _SIZE], table[row, _NUMBER]
        mean = array_at(table[row, _MEAN], size)
        sample = array_at(table[row, _SAMPLE], size)
        hess = array_at(table[row, _HESS], size)
        prior = array_at(table[row, _PRIOR_PRECISION], size)
        given = table[row, _PRIOR_PRECISION] != 0
        ess, prior0 = settings[row, _ESS], settings[row, _PRIOR0]
        for begin in range(0, size, _TILE):
            tile += 1
            if tile % stride != first:
                continue
            for start in range(begin, min(begin + _TILE, size), GROUP):
                n = min(GROUP, size - start)
                fill_group(noise, key, number, start // GROUP)
                good = _draw_group(mean, sample, hess, prior, given, noise, ess, prior0, start, n)
                if good != n:
                    flags[row] = True


@njit(**{**OPTIONS, "cache": False})
def _step_tile(
    squared, mean, sample, grad, momentum, hess, prior_mean, mean_given, prior, prior_given,
    ess, prior0, rate1, rate2, lr, clip, debias, batch_size, begin, end,
):  # fmt: skip
    half, one = f32(0.5), f32(1)
    per_example = one / ess
    for j in range(end - begin):
        i = u64(begin) + u64(j)
        g, m, h = grad[i], mean[i], hess[i]
        delta = (prior[i] if prior_given else prior0) * per_example
        signed = g * (sample[i] - m) * ess * (h + delta)  # line 6
        estimate = batch_size * g * g if squared else signed
        b = momentum[i] + rate1 * (g - momentum[i])  # line 7
        change = rate2 * (estimate - h)
        h = h + change + half * change * change / (h + delta)  # line 8
        pull = delta * (m - prior_mean[i] if mean_given else m)
        direction = (b * debias + pull) / (h + delta)
        mean[i] = m - lr * min(max(direction, -clip), clip)  # line 9
        momentum[i] = b
        hess[i] = h


@njit(**OPTIONS)
def _step(table, settings, squared, first, stride):
    tile = 0
    for row in range(len(table)):
        size = table[row, _SIZE]
        mean = array_at(table[row, _MEAN], size)
        sample = array_at(table[row, _SAMPLE], size)
        grad = array_at(table[row, _GRAD], size)
        momentum = array_at(table[row, _MOMENTUM], size)
        hess = array_at(table[row, _HESS], size)
        prior_mean = array_at(table[row, _PRIOR_MEAN], size)
        prior = array_at(table[row, _PRIOR_PRECISION], size)
        mean_given, prior_given = table[row, _PRIOR_MEAN] != 0, table[row, _PRIOR_PRECISION] != 0
        ess, prior0, lr = settings[row, _ESS], settings[row, _PRIOR0], settings[row, _LR]
        rate1, rate2 = settings[row, _ONE_MINUS_BETA1], settings[row, _ONE_MINUS_BETA2]
        debias, clip = settings[row, _DEBIAS], settings[row, _CLIP]
        batch_size = settings[row, _BATCH_SIZE]
        for begin in range(0, size, _TILE):
            tile += 1
            if tile % stride == first:
                _step_tile(
                    squared, mean, sample, grad, momentum, hess, prior_mean, mean_given, prior,
                    prior_given, ess, prior0, rate1, rate2, lr, clip, debias, batch_size,
                    begin, min(begin + _TILE, size),
                )  # fmt: skip
