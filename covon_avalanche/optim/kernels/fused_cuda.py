"""CoVON's step on a GPU: one Triton launch over all parameters, noise by Triton's Philox.

Not timed yet; its arithmetic is tested in Triton's interpreter.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from covon_avalanche.optim.kernels.job import Job, safe
from covon_avalanche.optim.kernels.tables import Tables, by_kind

_QUARTER = 512  # entries that get the first of Philox's four outputs, and so on

# Columns of the two tables, see Tables.
_MEAN = tl.constexpr(0)
_SAMPLE = tl.constexpr(1)
_GRAD = tl.constexpr(2)
_MOMENTUM = tl.constexpr(3)
_HESS = tl.constexpr(4)
_PRIOR_MEAN = tl.constexpr(5)
_PRIOR_PRECISION = tl.constexpr(6)
_SIZE = tl.constexpr(7)
_NUMBER = tl.constexpr(8)
_ESS = tl.constexpr(0)
_HESS0 = tl.constexpr(1)
_PRIOR_MEAN0 = tl.constexpr(2)
_PRIOR_PRECISION0 = tl.constexpr(3)
_REST1 = tl.constexpr(4)
_REST2 = tl.constexpr(5)
_LR = tl.constexpr(6)
_CLIP = tl.constexpr(7)
_CORRECTION = tl.constexpr(8)
_BATCH_SIZE = tl.constexpr(9)


@triton.jit
def _pointer(table, row, column: tl.constexpr, DOUBLE: tl.constexpr):
    address = tl.load(table + row * 9 + column)
    if DOUBLE:
        return address, address.to(tl.pointer_type(tl.float64))
    return address, address.to(tl.pointer_type(tl.float32))


@triton.jit
def _setting(settings, row, column: tl.constexpr, DOUBLE: tl.constexpr):
    value = tl.load(settings + row * 10 + column)
    if DOUBLE:
        return value
    return value.to(tl.float32)


@triton.jit
def _entries(address, pointer, where, size, other):
    """Entries of a tensor, or a number where there is no tensor."""
    return tl.load(pointer + where, mask=where < tl.where(address == 0, 0, size), other=other)


@triton.jit
def _draw(table, settings, chunks, flags, key, QUARTER: tl.constexpr, DOUBLE: tl.constexpr):
    row = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64)
    size, number = tl.load(table + row * 9 + _SIZE), tl.load(table + row * 9 + _NUMBER)
    _, mean = _pointer(table, row, _MEAN, DOUBLE)
    _, sample = _pointer(table, row, _SAMPLE, DOUBLE)
    hess_at, hess = _pointer(table, row, _HESS, DOUBLE)
    prior_at, prior = _pointer(table, row, _PRIOR_PRECISION, DOUBLE)
    ess, hess0 = _setting(settings, row, _ESS, DOUBLE), _setting(settings, row, _HESS0, DOUBLE)
    prior0 = _setting(settings, row, _PRIOR_PRECISION0, DOUBLE)
    lane = tl.arange(0, QUARTER)
    counter = (chunk * QUARTER + lane).to(tl.uint32)
    n0, n1, n2, n3 = tl.randn4x(key + number * 0x9E3779B97F4A7C1, counter)
    for part in tl.static_range(4):
        noise = n0 if part == 0 else (n1 if part == 1 else (n2 if part == 2 else n3))
        where = chunk * 4 * QUARTER + part * QUARTER + lane
        inside = where < size
        d = _entries(prior_at, prior, where, size, prior0) / ess
        total = _entries(hess_at, hess, where, size, hess0) + d
        m = tl.load(mean + where, mask=inside, other=0.0)
        bad = tl.where(inside, tl.where(total > 0, 0, 1), 0)  # nan is bad, too
        tl.atomic_max(flags + row, tl.max(bad))
        tl.store(sample + where, m + noise * (1 / tl.sqrt(ess * total)), mask=inside)


@triton.jit
def _step(
    table, settings, chunks, key,
    QUARTER: tl.constexpr, DOUBLE: tl.constexpr, HOLDS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.load(chunks + 2 * tl.program_id(0)).to(tl.int64)
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64)
    size, number = tl.load(table + row * 9 + _SIZE), tl.load(table + row * 9 + _NUMBER)
    _, mean = _pointer(table, row, _MEAN, DOUBLE)
    _, sample = _pointer(table, row, _SAMPLE, DOUBLE)
    _, grad = _pointer(table, row, _GRAD, DOUBLE)
    _, momentum = _pointer(table, row, _MOMENTUM, DOUBLE)
    _, hess = _pointer(table, row, _HESS, DOUBLE)
    centre_at, centre = _pointer(table, row, _PRIOR_MEAN, DOUBLE)
    prior_at, prior = _pointer(table, row, _PRIOR_PRECISION, DOUBLE)
    ess, centre0 = (
        _setting(settings, row, _ESS, DOUBLE),
        _setting(settings, row, _PRIOR_MEAN0, DOUBLE),
    )
    prior0 = _setting(settings, row, _PRIOR_PRECISION0, DOUBLE)
    rest1, rest2 = _setting(settings, row, _REST1, DOUBLE), _setting(settings, row, _REST2, DOUBLE)
    lr, clip = _setting(settings, row, _LR, DOUBLE), _setting(settings, row, _CLIP, DOUBLE)
    correction = _setting(settings, row, _CORRECTION, DOUBLE)
    batch_size = _setting(settings, row, _BATCH_SIZE, DOUBLE)
    lane = tl.arange(0, QUARTER)
    if AHEAD:
        counter = (chunk * QUARTER + lane).to(tl.uint32)
        n0, n1, n2, n3 = tl.randn4x(key + number * 0x9E3779B97F4A7C1, counter)
    for part in tl.static_range(4):
        where = chunk * 4 * QUARTER + part * QUARTER + lane
        inside = where < size
        m = tl.load(mean + where, mask=inside, other=0.0)
        h = tl.load(hess + where, mask=inside, other=1.0)
        g = tl.load(grad + where, mask=inside, other=0.0)
        b = tl.load(momentum + where, mask=inside, other=0.0)
        if HOLDS == "nothing":
            estimate = g * g * batch_size
        else:
            estimate = tl.load(sample + where, mask=inside, other=0.0)
        if HOLDS == "theta":
            estimate = g * (estimate - m)
        d = _entries(prior_at, prior, where, size, prior0) / ess
        a = h + d
        if HOLDS == "theta" or HOLDS == "product":
            estimate = estimate * ess * a
        change = rest2 * (estimate - h)
        h = h + change + 0.5 * change * change / a  # Algorithm 1, line 8
        b = b + rest1 * (g - b)
        pull = d * (m - _entries(centre_at, centre, where, size, centre0))
        direction = (b * correction + pull) / (h + d)
        m = m - lr * tl.minimum(tl.maximum(direction, -clip), clip)  # line 9
        tl.store(mean + where, m, mask=inside)
        tl.store(hess + where, h, mask=inside)
        tl.store(momentum + where, b, mask=inside)
        if AHEAD:
            noise = n0 if part == 0 else (n1 if part == 1 else (n2 if part == 2 else n3))
            tl.store(sample + where, m + noise * (1 / tl.sqrt(ess * (h + d))), mask=inside)


class CudaPlan:
    """Jobs of one dtype each with their tables, and how a launch is cut into programs."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._parts = [
            (kind[0] is np.float64, some, Tables(some), _chunks(some))
            for kind, some in by_kind(jobs, lambda j: ())
        ]

    def draw(self, key: int) -> list[Job]:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        bad: list[Job] = []
        for double, some, tables, chunks in self._parts:
            flags = torch.zeros(len(some), dtype=torch.int32, device=chunks.device)
            arguments = (*_on(chunks.device, tables), chunks, flags, key)
            with torch.cuda.device_of(chunks):  # Triton launches on the current device
                _draw[(len(chunks),)](*arguments, QUARTER=_QUARTER, DOUBLE=double)
            bad += [job for job, flag in zip(some, flags.tolist(), strict=True) if flag]
        return bad

    def safe(self) -> bool:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        return safe(self.jobs)

    def step(self, next_key: int | None) -> None:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        for double, some, tables, chunks in self._parts:
            tables.refresh()
            with torch.cuda.device_of(chunks):
                _step[(len(chunks),)](
                    *_on(chunks.device, tables),
                    chunks,
                    next_key or 0,
                    QUARTER=_QUARTER,
                    DOUBLE=double,
                    HOLDS=some[0].holds,
                    AHEAD=next_key is not None,
                )


def _chunks(jobs: list[Job]) -> torch.Tensor:
    """For each program of a launch the job and the piece of it that it does, int32."""
    pieces = [-(-job.mean.numel() // (4 * _QUARTER)) for job in jobs]
    rows = np.repeat(np.arange(len(jobs)), pieces)
    places = np.concatenate([np.arange(n) for n in pieces])
    chunks = np.stack([rows, places], 1).astype(np.int32)
    return torch.from_numpy(chunks).to(jobs[0].mean.device)


def _on(device: torch.device, tables: Tables) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the tables; from pinned memory, so that nobody waits."""
    both = torch.from_numpy(tables.places), torch.from_numpy(tables.settings)
    if device.type == "cpu":  # Triton's interpreter
        return both
    places, settings = (t.pin_memory().to(device, non_blocking=True) for t in both)
    return places, settings
