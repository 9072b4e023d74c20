"""CoVON's step by torch's multi-tensor operations, in place, for accelerators.

Tensors are bundled, so that an operation is one launch for many; large ones are cut, so that
temporaries are no larger than a bundle (those of a tensor with gaps are of its size).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.optim import noise
from covon_avalanche.optim.buffers import DEVICE_BLOCK
from covon_avalanche.optim.kernels.job import Job, cut, safe

_FIELDS = ("mean", "sample", "hess", "prior_mean", "prior_precision")
_settings = attrgetter(
    "ess", "beta1", "beta2", "lr", "clip_radius", "correction", "holds", "batch_size"
)


class ForeachPlan:
    """Jobs cut into blocks of memory, and these bundled.

    :param block: largest number of entries in a bundle.
    """

    def __init__(self, jobs: list[Job], block: int = DEVICE_BLOCK) -> None:
        self.jobs, self._block = jobs, block
        self._kinds = [_kind(job) for job in jobs]
        self._alike: list[bool] | None = None
        self._bundles: list[_Bundle] = []

    def draw(self, key: int) -> list[Job]:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        positive = True
        for bundle in self.bundles():
            precision = bundle.precision()
            positive &= bool((torch.stack([p.amin() for p in precision]) > 0).all())
            bundle.draw(precision, key)
        return [] if positive else [job for job in self.jobs if not job.lowest_precision > 0]

    def safe(self) -> bool:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        return safe(self.jobs)

    def step(self, next_key: int | None) -> None:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        grads, momenta = self._parts("grad"), self._parts("momentum")
        for bundle in self.bundles():
            n = len(bundle.mean)
            precision = bundle.step(list(islice(grads, n)), list(islice(momenta, n)))
            if next_key is not None:
                bundle.draw(precision, next_key)

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
            fields = (cut(job, field, self._block) for field in _FIELDS)
            for i, parts in enumerate(zip(*fields, strict=True)):
                entries = parts[0].numel()
                if kind != last or size + entries > self._block:
                    self._bundles.append(_Bundle(job))
                    size, last = 0, kind
                size += entries
                self._bundles[-1].add(parts, job.number, i * self._block)
        return self._bundles

    def _parts(self, field: str) -> Iterator[Tensor]:
        for job in self.jobs:
            yield from cut(job, field, self._block)


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
        self._places: list[tuple[int, int]] = []  # number of the tensor, entries before the part
        self.mean: list[Tensor] = []
        self.sample: list[Tensor] = []
        self.hess: list[Any] = []  # tensors, or all the same number; as are the next two
        self.prior_mean: list[Any] = []
        self.prior_precision: list[Any] = []

    def add(self, parts: tuple[Any, ...], number: int, start: int) -> None:
        """Take in a part of a job, of the same entries in each tensor.

        :param parts: of mean, sample, hess, prior mean and prior precision.
        :param number, start: of the job, and its entries before this part.
        """
        self._places.append((number, start))
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

    def draw(self, precision: list[Tensor], key: int) -> None:
        """Write samples.

        :param precision: of the posterior, 1/weight²; used up.
        :param key: see :func:`noise.fill_normal`.
        """
        torch._foreach_sqrt_(precision)
        for sample, place in zip(self.sample, self._places, strict=True):
            noise.fill_normal(sample, key, *place)
        torch._foreach_div_(self.sample, precision)
        torch._foreach_add_(self.sample, self.mean)

    def step(self, grad: list[Tensor], momentum: list[Tensor]) -> list[Tensor]:
        """The step, which uses up the samples.

        :param grad: loss/weight, like ``mean``; as ``momentum``, which is changed in place.
        :return: the precision of the new posterior.
        """
        job, mean, hess, sample = self._job, self.mean, self.hess, self.sample
        prior = self.prior_precision
        precision = self.precision()
        # line 8, by how far hess is above the new estimate
        if job.holds == "nothing":
            excess = torch._foreach_addcmul(hess, grad, grad, value=-job.batch_size)
        elif job.holds == "hess":
            excess = torch._foreach_sub(hess, sample)
        else:
            if job.holds == "theta":
                torch._foreach_sub_(sample, mean)
                torch._foreach_mul_(sample, grad)
            excess = torch._foreach_addcmul(hess, sample, precision, value=-1)
        rest2 = 1 - job.beta2
        torch._foreach_add_(hess, excess, alpha=-rest2)
        ratio = torch._foreach_div(excess, precision)  # before the square, which might overflow
        torch._foreach_addcmul_(hess, excess, ratio, value=0.5 * job.ess * rest2**2)
        del excess, ratio, precision
        # lines 6 and 9, the direction in units of the gradient
        torch._foreach_lerp_(momentum, grad, 1 - job.beta1)
        precision = self.precision()
        scale = job.ess * job.correction
        pull = torch._foreach_sub(mean, self.prior_mean)
        if isinstance(prior[0], Tensor):
            direction = torch._foreach_addcmul(momentum, pull, prior, value=1 / scale)
        else:
            direction = torch._foreach_add(momentum, pull, alpha=prior[0] / scale)
        torch._foreach_div_(direction, precision)
        torch._foreach_clamp_min_(direction, -job.clip_radius / scale)
        torch._foreach_clamp_max_(direction, job.clip_radius / scale)
        torch._foreach_add_(mean, direction, alpha=-job.lr * scale)
        return precision
