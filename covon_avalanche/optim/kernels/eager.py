"""CoVON's step by single torch operations on blocks, for CPUs.

A block's tensors stay in the cache from the first operation on them to the last; beside them there
is one temporary, no larger than a block (than the tensor, where it has gaps). Each operation is a
call for each block, so accelerators are better served by ``foreach``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from covon_avalanche.optim import noise
from covon_avalanche.optim.kernels.job import Job, cut, safe

_BLOCK = 2**15  # entries whose tensors fit a core's cache together; torch gives a thread no fewer
_WHOLE = 2**17  # entries up to which a tensor is one block: there calls cost more than the cache
_FIELDS = ("mean", "sample", "hess", "prior_mean", "prior_precision")


class EagerPlan:
    """Jobs cut into blocks; see :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._blocks = [_block(job) for job in jobs]
        self._parts = [
            list(zip(*(cut(job, field, block) for field in _FIELDS), strict=True))
            for job, block in zip(jobs, self._blocks, strict=True)
        ]

    def draw(self, key: int) -> list[Job]:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        bad = []
        for job, block, parts in zip(self.jobs, self._blocks, self._parts, strict=True):
            positive = True
            for i, (mean, sample, hess, _, prior) in enumerate(parts):
                precision = _precision(job.ess, hess, prior, mean)
                positive &= bool(precision.amin() > 0)
                _draw(mean, sample, precision, key, job.number, i * block)
            if not positive:
                bad.append(job)
        return bad

    def safe(self) -> bool:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        return safe(self.jobs)

    def step(self, next_key: int | None) -> None:
        """See :class:`~covon_avalanche.optim.kernels.kernel.Plan`."""
        for job, block, parts in zip(self.jobs, self._blocks, self._parts, strict=True):
            grads, momenta = cut(job, "grad", block), cut(job, "momentum", block)
            for i, (part, *changing) in enumerate(zip(parts, grads, momenta, strict=True)):
                precision = _step(job, *part, *changing)
                if next_key is not None:
                    _draw(part[0], part[1], precision, next_key, job.number, i * block)


def _block(job: Job) -> int:
    """Entries of a job worked on at a time."""
    return _WHOLE if job.mean.numel() <= _WHOLE else _BLOCK * torch.get_num_threads()


def _precision(
    ess: float,
    hess: Tensor | float,
    prior: Tensor | float,
    like: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Of the posterior, from Hessian and prior; 1/weight².

    :param out: where it may be written, if ``hess`` is a tensor.
    """
    if not isinstance(hess, Tensor):
        return torch.full_like(like, ess * hess).add_(prior)
    if not isinstance(prior, Tensor):
        return torch.mul(hess, ess, out=out).add_(prior)
    return torch.add(prior, hess, alpha=ess, out=out)


def _draw(
    mean: Tensor, sample: Tensor, precision: Tensor, key: int, number: int, start: int
) -> None:
    """Write a sample.

    :param precision: of the posterior, 1/weight²; used up.
    :param key, number, start: see :func:`noise.fill_normal`.
    """
    noise.fill_normal(sample, key, number, start)
    torch.addcdiv(mean, sample, precision.sqrt_(), out=sample)


def _step(
    job: Job,
    mean: Tensor,
    sample: Tensor,
    hess: Tensor,
    prior_mean: Tensor | float,
    prior: Tensor | float,
    grad: Tensor,
    momentum: Tensor,
) -> Tensor:
    """Algorithm 1, lines 6 to 9, which use up the sample: its memory serves for two temporaries.

    :return: the precision of the new posterior, 1/weight².
    """
    precision = _precision(job.ess, hess, prior, mean)
    # line 8, by how far hess is above the new estimate
    if job.holds == "theta":
        sample.sub_(mean).mul_(grad)
    if job.holds in ("theta", "product"):
        excess = torch.addcmul(hess, sample, precision, value=-1, out=sample)
    elif job.holds == "hess":
        excess = torch.sub(hess, sample, out=sample)
    else:
        excess = torch.addcmul(hess, grad, grad, value=-job.batch_size, out=sample)
    rest2 = 1 - job.beta2
    ratio = torch.div(excess, precision, out=precision)  # before the square, which might overflow
    hess.sub_(excess, alpha=rest2).addcmul_(excess, ratio, value=0.5 * job.ess * rest2**2)
    # lines 6 and 9, the direction in units of the gradient
    momentum.lerp_(grad, 1 - job.beta1)
    precision = _precision(job.ess, hess, prior, mean, out=ratio)
    scale = job.ess * job.correction
    direction = torch.sub(mean, prior_mean, out=sample)
    if isinstance(prior, Tensor):
        torch.addcmul(momentum, direction, prior, value=1 / scale, out=direction)
    else:
        torch.add(momentum, direction, alpha=prior / scale, out=direction)
    clip = job.clip_radius / scale
    mean.add_(direction.div_(precision).clamp_(-clip, clip), alpha=-job.lr * scale)
    return precision
