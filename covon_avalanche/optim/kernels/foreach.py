"""CoVON's step by torch's multi-tensor operations, in place, for any device.

Tensors are cut into blocks and small ones bundled, so that a bundle stays in the cache of a
CPU and the one temporary is no larger. The sample of the next step can be drawn while a bundle
is there (``step`` with ``noise``), by the very operations of ``draw``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import is_dense
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.noise import NoiseSource

_FIELDS = ("mean", "sample", "hess", "prior_mean", "prior_precision")
_settings = attrgetter(
    "ess", "beta1", "beta2", "lr", "clip_radius", "correction", "holds", "batch_size"
)


class Plan:
    """Jobs cut into blocks of memory, and these bundled.

    :param block: largest number of entries in a bundle.
    """

    def __init__(self, jobs: list[Job], block: int) -> None:
        self.jobs, self._block = jobs, block
        self._kinds = [_kind(job) for job in jobs]
        self._alike: list[bool] | None = None
        self._bundles: list[_Bundle] = []
        self._owners: list[list[_Bundle]] = []  # the bundles that have a job's parts

    def draw(self, noise: NoiseSource) -> list[Tensor]:
        """Write a sample of each job's posterior into its ``sample``.

        :return: the lowest precision of each bundle.
        """
        memory, lowest = None, []
        for bundle in self.bundles():
            memory = bundle.use(memory)
            bundle.compute_precision()
            lowest.append(bundle.draw(noise))
            bundle.release()
        return lowest

    def step(self, noise: NoiseSource | None) -> list[Tensor]:
        """Algorithm 1, lines 6 to 9, in place. The samples are used up.

        :param noise: draw the next samples, too.
        :return: as :meth:`draw`; nothing without noise.
        """
        bundles = self.bundles()
        for job, owners in zip(self.jobs, self._owners, strict=True):
            both = zip(self._cut(job, job.grad), self._cut(job, job.momentum), strict=True)
            for owner, (grad, momentum) in zip(owners, both, strict=True):
                owner.grad.append(grad)
                owner.momentum.append(momentum)
        memory, lowest = None, []
        for bundle in bundles:
            memory = bundle.use(memory)
            bundle.step()
            if noise is not None:
                lowest.append(bundle.draw(noise))
            bundle.release()
        return lowest

    def bundles(self) -> list[_Bundle]:
        """What may be worked on together; made anew where settings have become others."""
        kinds = list(zip(self._kinds, map(_settings, self.jobs), strict=True))
        alike = [a == b for a, b in pairwise(kinds)]
        if alike == self._alike:
            return self._bundles
        self._alike, self._bundles, self._owners = alike, [], []
        size, last = self._block, None
        for job, kind in zip(self.jobs, kinds, strict=True):
            self._owners.append([])
            fields = (self._cut(job, getattr(job, field)) for field in _FIELDS)
            for parts in zip(*fields, strict=False):  # a number has no end
                entries = parts[0].numel()
                if kind != last or size + entries > self._block:
                    self._bundles.append(_Bundle(job))
                    size, last = 0, kind
                size += entries
                self._bundles[-1].add(parts)
                self._owners[-1].append(self._bundles[-1])
        return self._bundles

    def _cut(self, job: Job, value: Tensor | float | None) -> Iterable[Any]:
        """A tensor's parts, in order of memory; a number as often as is asked for."""
        if not isinstance(value, Tensor):
            return repeat(value)
        if not is_dense(job.mean):
            return (value,)
        flat = value.as_strided((value.numel(),), (1,))
        return flat.split(self._block) if len(flat) > self._block else (flat,)


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    norms = torch._foreach_norm([job.grad for job in jobs if job.grad is not None])
    return bool((torch.stack(norms) < min(job.largest_gradient for job in jobs)).all())


def _kind(job: Job) -> tuple:
    """What jobs have in common, beside settings, that may be worked on together."""
    values = (getattr(job, field) for field in _FIELDS)
    return (*("tensor" if isinstance(v, Tensor) else v for v in values), job.mean.dtype)


class _Bundle:
    """Parts of jobs of one kind and with the same settings.

    :param job: with these settings.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.mean: list[Tensor] = []
        self.sample: list[Tensor] = []
        self.hess: list[Any] = []  # tensors, or all numbers; as are the next two
        self.prior_mean: list[Any] = []
        self.prior_precision: list[Any] = []
        self._sizes: list[int] = []
        self.grad: list[Tensor] = []
        self.momentum: list[Tensor] = []
        self.precision: list[Tensor] = []
        self._flat = torch.empty(0)

    def add(self, parts: tuple[Any, ...]) -> None:
        """Take in a part of a job.

        :param parts: of mean, sample, hess, prior mean and prior precision.
        """
        for field, part in zip(_FIELDS, parts, strict=True):
            getattr(self, field).append(part)
        self._sizes.append(parts[0].numel())

    def use(self, memory: Tensor | None) -> Tensor:
        """Put the precision into some memory; into new one, if it does not fit.

        :return: the memory.
        """
        first, entries = self.mean[0], sum(self._sizes)
        kind = (first.dtype, first.device)
        if memory is None or len(memory) < entries or kind != (memory.dtype, memory.device):
            memory = torch.empty(entries, dtype=first.dtype, device=first.device)
        self._flat = memory[:entries]
        parts = zip(torch.split_with_sizes(self._flat, self._sizes), self.mean, strict=True)
        self.precision = [p if mean.ndim == 1 else p.view(mean.shape) for p, mean in parts]
        return memory

    def release(self) -> None:
        """Forget the memory, and what changes from step to step."""
        self._flat, self.precision = torch.empty(0), []
        self.grad, self.momentum = [], []

    def compute_precision(self) -> None:
        """That of the posterior, from Hessian and prior."""
        ess = self._job.ess
        for prior, hess, out in zip(self.prior_precision, self.hess, self.precision, strict=True):
            if isinstance(prior, Tensor) and isinstance(hess, Tensor):
                torch.add(prior, hess, alpha=ess, out=out)
            elif isinstance(hess, Tensor):
                torch.mul(hess, ess, out=out).add_(prior)
            else:
                out.fill_(ess * hess).add_(prior)

    def draw(self, noise: NoiseSource) -> Tensor:
        """Write samples, which uses up the precision; return its lowest entry."""
        lowest = self._flat.amin()
        self._flat.sqrt_()
        for sample, mean, root in zip(self.sample, self.mean, self.precision, strict=True):
            noise.fill(sample)
            torch.addcdiv(mean, sample, root, out=sample)
        return lowest

    def step(self) -> None:
        """The step; it leaves the precision of the new posterior behind.

        Line 9 is in units of the precision, ``ess`` times Algorithm 1's, which saves operations.
        """
        job, mean, hess, grad = self._job, self.mean, self.hess, self.grad
        work, precision = self.sample, self.precision
        self.compute_precision()
        # line 8: work becomes the estimate, then what it is off hess
        if job.holds == "theta":
            torch._foreach_sub_(work, mean)
            torch._foreach_mul_(work, grad)
        if job.holds in ("theta", "product"):
            torch._foreach_mul_(work, precision)
        elif job.holds == "nothing":
            torch._foreach_copy_(work, grad)
            torch._foreach_mul_(work, grad)
            torch._foreach_mul_(work, job.batch_size)
        torch._foreach_sub_(work, hess)
        rest2 = 1 - job.beta2
        torch._foreach_add_(hess, work, alpha=rest2)
        for off, part in zip(work, precision, strict=True):
            torch.div(off, part, out=part)  # before the square, which might overflow
        torch._foreach_addcmul_(hess, work, precision, value=0.5 * job.ess * rest2**2)
        # lines 6 and 9: work becomes the direction
        torch._foreach_lerp_(self.momentum, grad, 1 - job.beta1)
        self.compute_precision()
        for old, prior_mean, direction in zip(mean, self.prior_mean, work, strict=True):
            torch.sub(old, prior_mean, out=direction)
        torch._foreach_mul_(work, self.prior_precision)
        torch._foreach_add_(work, self.momentum, alpha=job.ess * job.correction)
        torch._foreach_div_(work, precision)
        for direction in work:
            direction.clamp_(-job.clip_radius, job.clip_radius)
        torch._foreach_add_(mean, work, alpha=-job.lr)
