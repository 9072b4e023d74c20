"""CoVON's step by torch's multi-tensor operations, in place, for any device.

Tensors are cut into blocks and small ones bundled, so that a bundle stays in the cache of a
CPU and the one temporary is no larger. The sample of the next step can be drawn while a bundle
is there (``step`` with ``noise``), by the very operations of ``draw``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import is_dense
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.noise import NoiseSource

_TENSORS = ("mean", "sample", "hess", "prior_mean", "prior_precision")
_settings = attrgetter(
    "ess", "beta1", "beta2", "lr", "clip_radius", "correction", "holds", "batch_size"
)


class Plan:
    """Jobs cut into pieces and bundled.

    :param block: largest number of entries in a bundle.
    """

    def __init__(self, jobs: list[Job], block: int) -> None:
        self.jobs, self._block = jobs, block
        self._kinds = [_kind(job) for job in jobs]
        self._cut: list[list[_Piece]] = []
        self._alike: list[bool] | None = None

    def _bundles(self) -> list[list[_Piece]]:
        """Pieces that may be worked on together; cut anew where settings have become others."""
        kinds = list(zip(self._kinds, map(_settings, self.jobs), strict=True))
        alike = [a == b for a, b in pairwise(kinds)]
        if alike != self._alike:
            self._cut, self._alike = list(_bundles(self.jobs, kinds, self._block)), alike
        return self._cut

    def draw(self, noise: NoiseSource) -> list[Tensor]:
        """Write a sample of each job's posterior into its ``sample``.

        :return: the lowest precision of each bundle.
        """
        memory, lowest = torch.empty(0), []
        for bundle in self._bundles():
            precision = _Precision([piece.job for piece in bundle], memory)
            precision.compute()
            lowest.append(precision.sample(noise))
            memory = precision.memory
        return lowest

    def step(self, noise: NoiseSource | None) -> list[Tensor]:
        """Algorithm 1, lines 6 to 9, in place. The samples are used up.

        :param noise: draw the next samples, too.
        :return: as :meth:`draw`; nothing without noise.
        """
        memory, lowest = torch.empty(0), []
        for bundle in self._bundles():
            for piece in bundle:
                piece.refresh()
            jobs = [piece.job for piece in bundle]
            precision = _Precision(jobs, memory)
            _step(jobs, precision)
            if noise is not None:
                lowest.append(precision.sample(noise))
            memory = precision.memory
            for job in jobs:
                job.grad = None
        return lowest


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    norms = torch._foreach_norm(_all(jobs, "grad"))
    return bool((torch.stack(norms) < min(job.largest_gradient for job in jobs)).all())


class _Precision:
    """That of a bundle's posterior, in memory that the next bundle uses again.

    :param known: memory of the last bundle.
    """

    def __init__(self, jobs: list[Job], known: Tensor) -> None:
        self._jobs = jobs
        mean, sizes = jobs[0].mean, [job.mean.numel() for job in jobs]
        total = sum(sizes)
        if len(known) < total or (known.dtype, known.device) != (mean.dtype, mean.device):
            known = torch.empty(total, dtype=mean.dtype, device=mean.device)
        self.memory, self._flat = known, known[:total]
        parts = zip(self._flat.split(sizes), jobs, strict=True)
        self.parts = [part.view(job.mean.shape) for part, job in parts]

    def compute(self) -> None:
        """Write it."""
        for job, precision in zip(self._jobs, self.parts, strict=True):
            prior, hess = job.prior_precision, job.hess
            if isinstance(prior, Tensor) and isinstance(hess, Tensor):
                torch.add(prior, hess, alpha=job.ess, out=precision)
            elif isinstance(hess, Tensor):
                torch.mul(hess, job.ess, out=precision).add_(prior)
            else:
                precision.fill_(job.ess * hess).add_(prior)

    def sample(self, noise: NoiseSource) -> Tensor:
        """Write samples of the posterior with it, which uses it up; return its lowest entry."""
        lowest = self._flat.amin()
        self._flat.sqrt_()
        for job, root in zip(self._jobs, self.parts, strict=True):
            noise.fill(job.sample)
            torch.addcdiv(job.mean, job.sample, root, out=job.sample)
        return lowest


def _step(jobs: list[Job], precision: _Precision) -> None:
    """Leaves the precision of the new posterior behind.

    Line 9 is in units of the precision, ``ess`` times Algorithm 1's, which saves operations.
    """
    first = jobs[0]
    mean, hess, grad = _all(jobs, "mean"), _all(jobs, "hess"), _all(jobs, "grad")
    momentum, work = _all(jobs, "momentum"), _all(jobs, "sample")
    precision.compute()
    # line 8: work becomes the estimate, then what it is off hess
    if first.holds == "theta":
        torch._foreach_sub_(work, mean)
        torch._foreach_mul_(work, grad)
    if first.holds in ("theta", "product"):
        torch._foreach_mul_(work, precision.parts)
    elif first.holds == "nothing":
        torch._foreach_copy_(work, grad)
        torch._foreach_mul_(work, work)
        torch._foreach_mul_(work, first.batch_size)
    torch._foreach_sub_(work, hess)
    rest2 = 1 - first.beta2
    torch._foreach_add_(hess, work, alpha=rest2)
    for off, part in zip(work, precision.parts, strict=True):
        torch.div(off, part, out=part)  # before the square, which might overflow
    torch._foreach_addcmul_(hess, work, precision.parts, value=0.5 * first.ess * rest2**2)
    # lines 6 and 9: work becomes the direction
    torch._foreach_lerp_(momentum, grad, 1 - first.beta1)
    precision.compute()
    for job, off in zip(jobs, work, strict=True):
        torch.sub(job.mean, job.prior_mean, out=off)
    prior = first.prior_precision
    torch._foreach_mul_(work, _all(jobs, "prior_precision") if isinstance(prior, Tensor) else prior)
    torch._foreach_add_(work, momentum, alpha=first.ess * first.correction)
    torch._foreach_div_(work, precision.parts)
    for direction in work:
        direction.clamp_(-first.clip_radius, first.clip_radius)
    torch._foreach_add_(mean, work, alpha=-first.lr)


def _all(jobs: Sequence[Job], field: str) -> list[Tensor]:
    return [getattr(job, field) for job in jobs]


@dataclass
class _Piece:
    """A part of a job, as a job: all of it, or a block of its entries in order of memory."""

    job: Job
    whole: Job
    start: int | None = None

    def refresh(self) -> None:
        """Take over what changes from step to step."""
        whole, job = self.whole, self.job
        if job is whole:
            return
        job.holds, job.batch_size = whole.holds, whole.batch_size
        job.correction = whole.correction
        job.beta1, job.beta2 = whole.beta1, whole.beta2
        job.lr, job.clip_radius = whole.lr, whole.clip_radius
        for field in ("grad", "momentum"):
            tensor = getattr(whole, field)
            setattr(job, field, _block(tensor, self.start, job.mean.numel()))


def _block(tensor: Tensor, start: int | None, size: int) -> Tensor:
    if start is None:
        return tensor
    return tensor.as_strided((size,), (1,), tensor.storage_offset() + start)


def _kind(job: Job) -> tuple:
    """What jobs have in common, beside settings, that may be worked on together."""
    values = (getattr(job, k) for k in _TENSORS)
    return (*("tensor" if isinstance(v, Tensor) else v for v in values), job.mean.dtype)


def _bundles(jobs: list[Job], kinds: list[tuple], block: int) -> Iterator[list[_Piece]]:
    """Pieces of jobs of one kind, at most ``block`` entries in all."""
    bundle: list[_Piece] = []
    size, kind = 0, None
    for job, own_kind in zip(jobs, kinds, strict=True):
        tensors = {k: v for k in _TENSORS if isinstance(v := getattr(job, k), Tensor)}
        for piece in _pieces(job, tensors, block):
            entries = piece.job.mean.numel()
            if bundle and (own_kind != kind or size + entries > block):
                yield bundle
                bundle, size = [], 0
            kind = own_kind
            bundle.append(piece)
            size += entries
    if bundle:
        yield bundle


def _pieces(job: Job, tensors: dict[str, Tensor], block: int) -> Iterator[_Piece]:
    mean = job.mean
    if not is_dense(mean) or (mean.numel() <= block and mean.is_contiguous()):
        yield _Piece(job, job)
        return
    for start in range(0, job.mean.numel(), block):
        size = min(block, job.mean.numel() - start)
        views = {k: _block(t, start, size) for k, t in tensors.items()}
        part = copy(job)
        vars(part).update(views)
        yield _Piece(part, job, start)
