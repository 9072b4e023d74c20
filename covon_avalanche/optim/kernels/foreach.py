"""CoVON's step by torch's multi-tensor operations, in place, for any device.

Tensors are cut into blocks and small ones bundled, so that a bundle stays in the cache of a
CPU and temporaries are no larger (those of a tensor with gaps are of its size). The sample of the
next step can be drawn while a bundle is there (``step`` with ``noise``), by the very operations of
``draw``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
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

    def draw(self, noise: NoiseSource) -> list[Tensor]:
        """Write a sample of each job's posterior into its ``sample``.

        :return: the lowest precision of each part, 1/weight².
        """
        lowest = []
        for bundle in self.bundles():
            lowest += bundle.draw(bundle.precision(), noise)
        return lowest

    def step(self, noise: NoiseSource | None) -> list[Tensor]:
        """Algorithm 1, lines 6 to 9, in place. The samples are used up.

        :param noise: draw the next samples, too.
        :return: as :meth:`draw`; nothing without noise.
        """
        lowest = []
        grads, momenta = self._parts("grad"), self._parts("momentum")
        for bundle in self.bundles():
            n = len(bundle.mean)
            precision = bundle.step(list(islice(grads, n)), list(islice(momenta, n)))
            if noise is not None:
                lowest += bundle.draw(precision, noise)
        return lowest

    def bundles(self) -> list[_Bundle]:
        """What may be worked on together, in the order of the jobs; made anew where settings have
        become others."""
        kinds = list(zip(self._kinds, map(_settings, self.jobs), strict=True))
        alike = [a == b for a, b in pairwise(kinds)]
        if alike == self._alike:
            return self._bundles
        self._alike, self._bundles = alike, []
        size, last = 0, None
        for job, kind in zip(self.jobs, kinds, strict=True):
            fields = (self._cut(job, getattr(job, field)) for field in _FIELDS)
            for parts in zip(*fields, strict=True):
                entries = parts[0].numel()
                if kind != last or size + entries > self._block:
                    self._bundles.append(_Bundle(job))
                    size, last = 0, kind
                size += entries
                self._bundles[-1].add(parts)
        return self._bundles

    def _parts(self, field: str) -> Iterator[Tensor]:
        for job in self.jobs:
            yield from self._cut(job, getattr(job, field))

    def _cut(self, job: Job, value: Tensor | float) -> Sequence[Any]:
        """A tensor's parts, in order of memory; a number as often."""
        n, dense = job.mean.numel(), is_dense(job.mean)
        whole = n <= self._block or not dense
        if not isinstance(value, Tensor):
            return [value] * (1 if whole else -(-n // self._block))
        flat = value.as_strided((n,), (1,)) if dense else value
        return [flat] if whole else flat.split(self._block)


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    norms = torch._foreach_norm([job.grad for job in jobs])  # type: ignore[misc]
    return bool((torch.stack(norms) < min(job.largest_gradient for job in jobs)).all())


def _kind(job: Job) -> tuple:
    """What jobs have in common, beside settings, that may be worked on together."""
    values = (getattr(job, field) for field in _FIELDS)
    settings = ("tensor" if isinstance(v, Tensor) else v for v in values)
    return (*settings, job.mean.dtype, job.mean.device)


class _Bundle:
    """Parts of jobs of one kind and with the same settings.

    :param job: with these settings.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.mean: list[Tensor] = []
        self.sample: list[Tensor] = []
        self.hess: list[Any] = []  # tensors, or all the same number; as are the next two
        self.prior_mean: list[Any] = []
        self.prior_precision: list[Any] = []

    def add(self, parts: tuple[Any, ...]) -> None:
        """Take in a part of a job, of the same entries in each tensor.

        :param parts: of mean, sample, hess, prior mean and prior precision.
        """
        for field, part in zip(_FIELDS, parts, strict=True):
            getattr(self, field).append(part)

    def precision(self) -> list[Tensor]:
        """That of the posterior, from Hessian and prior; 1/weight²."""
        ess, hess, prior = self._job.ess, self.hess, self.prior_precision
        if not isinstance(hess[0], Tensor):
            known = [torch.full_like(mean, ess * hess[0]) for mean in self.mean]
        elif isinstance(prior[0], Tensor):
            return list(torch._foreach_add(prior, hess, alpha=ess))
        else:
            known = list(torch._foreach_mul(hess, ess))
        torch._foreach_add_(known, prior)
        return known

    def draw(self, precision: list[Tensor], noise: NoiseSource) -> list[Tensor]:
        """Write samples.

        :param precision: of the posterior, 1/weight²; used up.
        :return: the lowest of each part.
        """
        lowest = [p.amin() for p in precision]
        torch._foreach_sqrt_(precision)
        for sample in self.sample:
            noise.fill(sample)
        torch._foreach_div_(self.sample, precision)
        torch._foreach_add_(self.sample, self.mean)
        return lowest

    def step(self, grad: list[Tensor], momentum: list[Tensor]) -> list[Tensor]:
        """The step, which uses up the samples.

        :param grad: loss/weight, like ``mean``; as ``momentum``, which is changed in place.
        :return: the precision of the new posterior.

        Line 9 is in units of the precision, ``ess`` times Algorithm 1's, which saves operations.
        """
        job, mean, hess, work = self._job, self.mean, self.hess, self.sample
        precision = self.precision()
        # line 8: work becomes the estimate of the curvature, then what it is off hess
        if job.holds == "theta":
            torch._foreach_sub_(work, mean)
            torch._foreach_mul_(work, grad)
        if job.holds in ("theta", "product"):
            torch._foreach_mul_(work, precision)
        elif job.holds == "nothing":
            work = list(torch._foreach_mul(grad, grad))
            torch._foreach_mul_(work, job.batch_size)
        torch._foreach_sub_(work, hess)
        rest2 = 1 - job.beta2
        torch._foreach_add_(hess, work, alpha=rest2)
        ratio = torch._foreach_div(work, precision)  # before the square, which might overflow
        torch._foreach_addcmul_(hess, work, ratio, value=0.5 * job.ess * rest2**2)
        del work, ratio, precision
        # lines 6 and 9
        torch._foreach_lerp_(momentum, grad, 1 - job.beta1)
        precision = self.precision()
        direction = list(torch._foreach_sub(mean, self.prior_mean))
        torch._foreach_mul_(direction, self.prior_precision)
        torch._foreach_add_(direction, momentum, alpha=job.ess * job.correction)
        torch._foreach_div_(direction, precision)
        torch._foreach_clamp_min_(direction, -job.clip_radius)
        torch._foreach_clamp_max_(direction, job.clip_radius)
        torch._foreach_add_(mean, direction, alpha=-job.lr)
        return precision
