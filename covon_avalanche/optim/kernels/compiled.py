"""CoVON's step on a CPU in one pass over memory, compiled by numba.

All parameters go through one call: their addresses and settings stand in two small tables.
The sample of the next step can be drawn in the same pass (``step`` with ``next_key``),
because noise is a function of the key, and the same operations make it the very sample that
``draw`` would. The noise of a group of entries is computed while memory brings the group.
Work is cut into tiles; with several torch threads and a large model the tiles are shared
among them, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numba import njit

from covon_avalanche.optim.kernels.hints import entries, fetch, use_wide_registers
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.kernels.tables import Tables, by_kind, is_tensor
from covon_avalanche.optim.kernels.threefry import GROUP, OPTIONS, PARTS, SOURCE, fill_part

_TILE = 256 * GROUP  # entries that a thread takes at a time
_ONE_THREAD = 2**20  # entries below which threads cost more than they bring

_MEAN, _SAMPLE, _GRAD, _MOMENTUM, _HESS, _PRIOR_MEAN, _PRIOR_PRECISION, _SIZE, _NUMBER = range(9)
_ESS, _HESS0, _PRIOR_MEAN0, _PRIOR_PRECISION0, _REST1, _REST2, _LR, _CLIP, _CORRECTION = range(9)
_BATCH_SIZE = 9

i32, u32, u64 = np.int32, np.uint32, np.uint64
_WITHIN = {**OPTIONS, "cache": False}  # what calls it is cached, and has its code


def _compiled(*variant: object) -> Callable[[Callable], Callable]:
    """Compile a function, with files of compiled code for this variant of it alone.

    Numba keeps one index for all functions of a name; two processes that write to it at the
    same time could give one the code of the other.
    """

    def compile(function: Callable) -> Callable:
        function.__qualname__ += "".join(f"-{getattr(v, '__name__', v)}" for v in variant)
        return njit(**OPTIONS)(function)

    return compile


def _bits_of(dtype: type) -> type:
    return np.int32 if dtype is np.float32 else np.int64


@cache
def _checker(dtype: type) -> Callable:
    bits = _bits_of(dtype)
    absolute = bits(np.iinfo(bits).max)

    @_compiled(dtype)
    def check(table, settings, limit, flags, first, stride):
        use_wide_registers()
        for row in range(first, len(table), stride):
            grad = entries(table[row, _GRAD], table[row, _SIZE], bits(0))
            worst = bits(0)  # as integers, numbers without sign keep their order; nan is last
            for i in range(len(grad)):
                worst = max(worst, bits(grad[i] & absolute))
            if worst >= limit:
                flags[row] = True

    return check


@njit(**_WITHIN)
def _noise_and_entries(noise, key0, key1, number, start, size, addresses, itemsize):
    """The noise of a group; meanwhile, as it takes no memory, the tensors' entries come in."""
    for part in range(PARTS):
        fill_part(noise, key0, key1, u32(number), start // GROUP, part)
        begin = start + part * (GROUP // PARTS)
        if begin < size:
            for address in addresses:
                if address != 0:
                    for line in range(itemsize):  # 64 entries are as many lines of 64 bytes
                        fetch(address + begin * itemsize + 64 * line)


@njit(**_WITHIN)
def _draw_group(
    like, hess_given, prior_given, mean, sample, hess, prior, noise, spread, per_example, hess0,
    prior0, start, size,
):  # fmt: skip
    """Some entries; what is given is None or True, so that numba leaves out the other branch."""
    use_wide_registers()
    dtype = type(like)
    good = i32(0)
    for j in range(size):
        i = u64(start) + u64(j)
        d = (prior0 if prior_given is None else prior[i]) * per_example
        total = (hess0 if hess_given is None else hess[i]) + d
        good = i32(good + i32(total > dtype(0)))
        root = dtype(1) / np.sqrt(total)
        sample[i] = mean[i] + dtype(noise[u64(j)]) * (spread * root)
    return good


@cache
def _drawer(dtype: type, has_hess: bool, has_prior: bool, source: int = SOURCE) -> Callable:
    """Compile the sampling of parameters whose hess and prior precision are tensors or not.

    :param source: of the noise: numba's files of compiled code do not see it change.
    """

    hess_given, prior_given = has_hess or None, has_prior or None
    itemsize = np.dtype(dtype).itemsize

    @_compiled(dtype, has_hess, has_prior)
    def draw(table, settings, key0, key1, flags, first, stride):
        noise = np.empty(GROUP if source else 0, np.float32)
        tile = 0
        for row in range(len(table)):
            addresses, size, number = table[row, :_SIZE], table[row, _SIZE], table[row, _NUMBER]
            one = dtype(0)
            mean = entries(table[row, _MEAN], size, one)
            sample = entries(table[row, _SAMPLE], size, one)
            hess = entries(table[row, _HESS], size, one)
            prior = entries(table[row, _PRIOR_PRECISION], size, one)
            ess, hess0 = dtype(settings[row, _ESS]), dtype(settings[row, _HESS0])
            prior0 = dtype(settings[row, _PRIOR_PRECISION0])
            spread, per_example = dtype(1) / np.sqrt(ess), dtype(1) / ess
            for begin in range(0, size, _TILE):
                tile += 1
                if tile % stride != first:
                    continue
                for start in range(begin, min(begin + _TILE, size), GROUP):
                    n = min(GROUP, size - start)
                    _noise_and_entries(noise, key0, key1, number, start, size, addresses, itemsize)
                    good = _draw_group(
                        one, hess_given, prior_given, mean, sample, hess, prior, noise, spread,
                        per_example, hess0, prior0, start, n,
                    )  # fmt: skip
                    if good != n:
                        flags[row] = True

    return draw


@njit(**_WITHIN)
def _step_group(
    like, theta_held, nothing_held, scaled, mean_given, prior_given, drawn, mean, sample, grad,
    momentum, hess, prior_mean, prior, noise, ess, spread, per_example, rest1, rest2, lr, clip,
    correction, batch_size, prior_mean0, prior0, start, size,
):  # fmt: skip
    """Some entries; flags are None or True, as for ``_draw_group``."""
    use_wide_registers()
    dtype = type(like)
    half = dtype(0.5)
    for j in range(size):
        i = u64(start) + u64(j)
        g, m, h = grad[i], mean[i], hess[i]
        d = (prior0 if prior_given is None else prior[i]) * per_example
        a = h + d
        estimate = g * g * batch_size if nothing_held is not None else sample[i]
        if theta_held is not None:
            estimate = g * (estimate - m)
        if scaled is not None:
            estimate = estimate * ess * a
        change = rest2 * (estimate - h)
        h = h + change + half * change * change / a  # Algorithm 1, line 8
        b = momentum[i] + rest1 * (g - momentum[i])
        root = dtype(1) / np.sqrt(h + d)
        pull = d * (m - (prior_mean0 if mean_given is None else prior_mean[i]))
        direction = (b * correction + pull) * root * root
        m = m - lr * min(max(direction, -clip), clip)  # line 9
        mean[i] = m
        momentum[i] = b
        hess[i] = h
        if drawn is not None:
            sample[i] = m + dtype(noise[u64(j)]) * (spread * root)


@cache
def _stepper(
    dtype: type,
    holds: str,
    has_prior_mean: bool,
    has_prior: bool,
    ahead: bool,
    source: int = SOURCE,
) -> Callable:
    """Compile the step for what is a tensor and what is not, with or without the next sample."""
    theta_held, nothing_held = holds == "theta" or None, holds == "nothing" or None
    scaled = holds in ("theta", "product") or None
    mean_given, prior_given, drawn = has_prior_mean or None, has_prior or None, ahead or None
    itemsize = np.dtype(dtype).itemsize

    @_compiled(dtype, holds, has_prior_mean, has_prior, ahead)
    def step(table, settings, key0, key1, first, stride):
        noise = np.empty(GROUP if source else 0, np.float32)
        tile = 0
        for row in range(len(table)):
            addresses, size, number = table[row, :_SIZE], table[row, _SIZE], table[row, _NUMBER]
            one = dtype(0)
            mean = entries(table[row, _MEAN], size, one)
            sample = entries(table[row, _SAMPLE], size, one)
            grad = entries(table[row, _GRAD], size, one)
            momentum = entries(table[row, _MOMENTUM], size, one)
            hess = entries(table[row, _HESS], size, one)
            prior_mean = entries(table[row, _PRIOR_MEAN], size, one)
            prior = entries(table[row, _PRIOR_PRECISION], size, one)
            ess, prior0 = dtype(settings[row, _ESS]), dtype(settings[row, _PRIOR_PRECISION0])
            spread, per_example = dtype(1) / np.sqrt(ess), dtype(1) / ess
            prior_mean0 = dtype(settings[row, _PRIOR_MEAN0])
            rest1, rest2 = dtype(settings[row, _REST1]), dtype(settings[row, _REST2])
            lr, clip = dtype(settings[row, _LR]), dtype(settings[row, _CLIP])
            correction = dtype(settings[row, _CORRECTION])
            batch_size = dtype(settings[row, _BATCH_SIZE])
            for begin in range(0, size, _TILE):
                tile += 1
                if tile % stride != first:
                    continue
                for start in range(begin, min(begin + _TILE, size), GROUP):
                    if ahead:
                        _noise_and_entries(
                            noise, key0, key1, number, start, size, addresses, itemsize
                        )
                    _step_group(
                        one, theta_held, nothing_held, scaled, mean_given, prior_given, drawn,
                        mean, sample, grad, momentum, hess, prior_mean, prior, noise, ess, spread,
                        per_example, rest1, rest2, lr, clip, correction, batch_size, prior_mean0,
                        prior0, start, min(GROUP, size - start),
                    )  # fmt: skip

    return step


# From jobs to tables -------------------------------------------------------------------


class CompiledPlan:
    """Jobs with their tables, by what one compiled kernel can do together."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._parts = [
            (kind, some, Tables(some)) for kind, some in by_kind(jobs, _what_is_a_tensor)
        ]

    def draw(self, key: int) -> list[Job]:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        bad: list[Job] = []
        for (dtype, has_hess, _, has_prior), some, tables in self._parts:
            flags = np.zeros(len(some), np.bool_)
            kernel = _drawer(dtype, has_hess, has_prior)
            _run(kernel, tables, *_halves(key), flags)
            bad += [job for job, flag in zip(some, flags, strict=True) if flag]
        return bad

    def safe(self) -> bool:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        for (dtype, *_), some, tables in self._parts:
            tables.refresh()
            flags = np.zeros(len(some), np.bool_)
            limit = dtype(min(job.largest_gradient for job in some))
            _run(_checker(dtype), tables, limit.view(_bits_of(dtype)), flags)
            if flags.any():
                return False
        return True

    def step(self, next_key: int | None) -> None:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        for (dtype, _, has_prior_mean, has_prior), some, tables in self._parts:
            kernel = _stepper(dtype, some[0].holds, has_prior_mean, has_prior, next_key is not None)
            _run(kernel, tables, *_halves(next_key or 0))


def _what_is_a_tensor(job: Job) -> tuple[bool, bool, bool]:
    return is_tensor(job.hess), is_tensor(job.prior_mean), is_tensor(job.prior_precision)


def _run(kernel: Callable, tables: Tables, *arguments: object) -> None:
    """Run a kernel, by several threads if that is worth it."""
    threads = torch.get_num_threads() if tables.entries > _ONE_THREAD else 1
    if threads == 1:
        kernel(tables.places, tables.settings, *arguments, 0, 1)
        return

    def work(first: int) -> None:
        kernel(tables.places, tables.settings, *arguments, first, threads)

    list(_pool(threads).map(work, range(threads)))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="covon-step")


def _halves(key: int) -> tuple[np.uint32, np.uint32]:
    return u32(key & 0xFFFFFFFF), u32(key >> 32 & 0xFFFFFFFF)
