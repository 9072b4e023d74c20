"""CoVON's arithmetic on CPUs: one pass over memory, compiled by numba.

The formulas are those of ``covon.fast_step``. Parameters are the columns of a table of
addresses; the work is cut into tiles, which threads share for large models with the same
result. The inner loops go over ``GROUP`` entries and have no branches: where a prior is one number,
they get an array filled with it. All tensors are float32, on the CPU, and dense, with the strides
of their parameter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit
from torch import Tensor

from covon_avalanche.optim.noise import FAST_MATH, GROUP, OPTIONS, array_at, fill_group

# numba's cache of these kernels does not notice a change of noise.py, which they inline.
_TILE = 16 * GROUP  # entries that a thread takes at a time
_ONE_THREAD = 2**20  # entries below which starting threads takes longer than the work

i32, i64, f32, u64 = np.int32, np.int64, np.float32, np.uint64


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
    """Write posterior samples (Algorithm 1, line 4).

    :param numbers: of the parameters within the optimizer, for their noise.
    :param key: of the noise.
    :return: whether all precisions are positive.
    """
    table = _addresses(means, samples, hessians, prior_precisions)
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
    *,
    i: int,
    ess: float,
    lr: float,
    beta1: float,
    beta2: float,
    debias: bool,
    clip_radius: float,
    hess_approx: str,
    batch_size: float,
) -> None:
    """Update means, momenta and hessians in place (Algorithm 1, lines 6 to 9). See ``fast_step``.

    :param samples: theta.
    :param prior_means: tensors, or 0.
    """
    prior0 = 0.0 if isinstance(prior_precisions, list) else prior_precisions
    debiasing = 1 / (1 - beta1**i) if debias else 1.0
    # in the order of the kernel's arguments
    clip_radius = min(clip_radius, 3e38)
    settings = ess, lr, 1 - beta1, 1 - beta2, debiasing, clip_radius, batch_size, prior0
    table = _addresses(means, samples, grads, momenta, hessians, prior_means, prior_precisions)
    _run(_step, table, hess_approx == "gradsq", *map(f32, settings))


def _addresses(*columns: list[Tensor] | float) -> np.ndarray:
    """A column for each parameter: its size, and the addresses of its tensors, 0 for a number."""
    first = columns[0]
    assert isinstance(first, list)
    addresses = [
        [t.data_ptr() for t in column] if isinstance(column, list) else [0] * len(first)
        for column in columns
    ]
    return np.array([[t.numel() for t in first], *addresses], i64)


def _run(kernel: Callable, table: np.ndarray, *arguments: object) -> None:
    """Call a kernel, in several threads where that pays."""
    threads = torch.get_num_threads() if table[0].sum() > _ONE_THREAD else 1
    if threads == 1:
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


# Kernels -----------------------------------------------------------------------------------


@njit(**OPTIONS)
def _all_below(table, limit, flags, first, stride):
    for k in range(first, table.shape[1], stride):
        grad = array_at(table[1, k], table[0, k])
        largest = i32(0)  # the bits of a float32 without its sign; those of NaN are largest of all
        for i in range(len(grad)):
            largest = max(largest, i32(f32(grad[u64(i)]).view(np.int32) & i32(0x7FFFFFFF)))
        flags[k] = largest >= f32(limit).view(np.int32)


@njit(fastmath=FAST_MATH, **{**OPTIONS, "cache": False})  # its caller is cached
def _draw_group(mean, sample, hess, prior, noise, ess):
    """Whether all precisions are positive."""
    good = i32(0)
    for j in range(len(mean)):
        i = u64(j)
        precision = ess * hess[i] + prior[i]
        good = i32(good + i32(precision > f32(0)))
        sample[i] = mean[i] + noise[i] * (f32(1) / np.sqrt(precision))
    return good == len(mean)


@njit(**OPTIONS)
def _draw(table, numbers, ess, prior0, key, flags, first, stride):
    noise, same_prior = np.empty(GROUP, f32), np.full(GROUP, prior0)
    tile = 0
    for k in range(table.shape[1]):
        size = table[0, k]
        mean, sample = array_at(table[1, k], size), array_at(table[2, k], size)
        hess, prior = array_at(table[3, k], size), array_at(table[4, k], size)
        for begin in range(0, size, _TILE):
            tile += 1
            if tile % stride != first:
                continue
            for start in range(begin, min(begin + _TILE, size), GROUP):
                stop = min(start + GROUP, size)
                fill_group(noise, key, numbers[k], start // GROUP)
                if not _draw_group(
                    mean[start:stop],
                    sample[start:stop],
                    hess[start:stop],
                    prior[start:stop] if table[4, k] else same_prior[: stop - start],
                    noise,
                    ess,
                ):
                    flags[k] = True


@njit(**{**OPTIONS, "cache": False})
def _step_group(
    squared, mean, sample, grad, momentum, hess, prior_mean, prior,
    ess, one_minus_beta1, one_minus_beta2, lr, clip_radius, debiasing, batch_size,
):  # fmt: skip
    half, one = f32(0.5), f32(1)
    per_example = one / ess
    for j in range(len(mean)):
        i = u64(j)
        g, m, h, delta = grad[i], mean[i], hess[i], prior[i] * per_example
        reparam = g * (sample[i] - m) * ess * (h + delta)  # line 6
        hess_hat = batch_size * g * g if squared else reparam
        average = momentum[i] + one_minus_beta1 * (g - momentum[i])  # line 7
        change = one_minus_beta2 * (hess_hat - h)
        h = h + change + half * change * change / (h + delta)  # line 8
        newton = (average * debiasing + delta * (m - prior_mean[i])) / (h + delta)
        mean[i] = m - lr * min(max(newton, -clip_radius), clip_radius)  # line 9
        momentum[i] = average
        hess[i] = h


@njit(**OPTIONS)
def _step(
    table, squared, ess, lr, one_minus_beta1, one_minus_beta2, debiasing, clip_radius, batch_size,
    prior0, first, stride,
):  # fmt: skip
    zeros, same_prior = np.zeros(GROUP, f32), np.full(GROUP, prior0)
    tile = 0
    for k in range(table.shape[1]):
        size = table[0, k]
        mean, sample = array_at(table[1, k], size), array_at(table[2, k], size)
        grad, momentum = array_at(table[3, k], size), array_at(table[4, k], size)
        hess = array_at(table[5, k], size)
        prior_mean, prior = array_at(table[6, k], size), array_at(table[7, k], size)
        for begin in range(0, size, _TILE):
            tile += 1
            if tile % stride != first:
                continue
            for start in range(begin, min(begin + _TILE, size), GROUP):
                stop = min(start + GROUP, size)
                arrays = (
                    mean[start:stop],
                    sample[start:stop],
                    grad[start:stop],
                    momentum[start:stop],
                    hess[start:stop],
                    prior_mean[start:stop] if table[6, k] else zeros[: stop - start],
                    prior[start:stop] if table[7, k] else same_prior[: stop - start],
                )
                settings = (
                    ess, one_minus_beta1, one_minus_beta2, lr, clip_radius, debiasing, batch_size,
                )  # fmt: skip
                if squared:  # a constant, so that each estimate gets a loop of its own
                    _step_group(True, *arrays, *settings)
                else:
                    _step_group(False, *arrays, *settings)
