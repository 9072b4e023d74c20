"""CoVON's step by torch's multi-tensor operations, in place, for any device.

Tensors are cut into blocks and small ones bundled, so that a bundle stays in the cache of a
CPU and no temporary is larger than a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import flat_blocks
from covon_avalanche.optim.kernels.job import Job

LARGEST_GRADIENT = 1e9  # beyond it a float32 Hessian estimate may overflow
_TENSORS = [f.name for f in fields(Job) if "Tensor" in str(f.type)]
_SHARED = [f.name for f in fields(Job) if f.name not in (*_TENSORS, "name", "number")]


def draw(jobs: Sequence[Job], fill: Callable[[Job], None], block: int) -> list[Job]:
    """Write a sample of each job's posterior into its ``sample``.

    :param fill: writes a job's standard normals into its ``sample``.
    :param block: largest number of entries worked on at a time.
    :return: the jobs with a precision that is not positive.
    """
    for job in jobs:
        fill(job)
    lowest: list[Tensor] = []
    owners: list[Job] = []
    for bundle in _bundles(jobs, block):
        first = bundle[0]
        if isinstance(first.hess, Tensor):
            precision = torch._foreach_mul(_all(bundle, "hess"), first.ess)
        else:
            precision = [torch.full_like(job.mean, first.ess * first.hess) for job in bundle]
        _add_(precision, bundle, "prior_precision")
        owners += bundle
        lowest += [p.min() for p in precision]
        torch._foreach_sqrt_(precision)
        sample = _all(bundle, "sample")
        torch._foreach_div_(sample, precision)
        torch._foreach_add_(sample, _all(bundle, "mean"))
    if not jobs or (torch.stack(lowest) > 0).all():
        return []
    names = {job.name for job, low in zip(owners, lowest, strict=True) if not low > 0}
    return [job for job in jobs if job.name in names]


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    norms = torch._foreach_norm(_all(jobs, "grad"))
    return not jobs or bool((torch.stack(norms) < LARGEST_GRADIENT).all())


def step(jobs: Sequence[Job], block: int) -> None:
    """Algorithm 1, lines 6 to 9, in place. The samples are used up.

    :param block: largest number of entries worked on at a time.
    """
    for bundle in _bundles(jobs, block):
        _step(bundle)


def _step(bundle: list[Job]) -> None:
    first = bundle[0]
    mean, hess = _all(bundle, "mean"), _all(bundle, "hess")
    momentum, grad = _all(bundle, "momentum"), _all(bundle, "grad")
    work = _all(bundle, "sample")
    if not first.averaged:
        torch._foreach_sub_(work, mean)
        torch._foreach_mul_(work, grad)
    if isinstance(first.prior_precision, Tensor):
        prior_hess = torch._foreach_mul(_all(bundle, "prior_precision"), 1 / first.ess)
        both = torch._foreach_add(prior_hess, hess)
    else:
        prior_hess = first.prior_precision / first.ess
        both = torch._foreach_add(hess, prior_hess)
    # line 8: work becomes the estimate, then the change of hess, then its square
    torch._foreach_mul_(work, both)
    torch._foreach_mul_(work, first.ess)
    torch._foreach_sub_(work, hess)
    torch._foreach_mul_(work, 1 - first.beta2)
    torch._foreach_add_(hess, work)
    torch._foreach_mul_(work, work)
    torch._foreach_addcdiv_(hess, work, both, value=0.5)
    # lines 6 and 9: work becomes the direction
    torch._foreach_lerp_(momentum, grad, 1 - first.beta1)
    torch._foreach_copy_(work, mean)
    if isinstance(first.prior_mean, Tensor):
        torch._foreach_sub_(work, _all(bundle, "prior_mean"))
    elif first.prior_mean:
        torch._foreach_sub_(work, first.prior_mean)
    torch._foreach_mul_(work, prior_hess)
    torch._foreach_add_(work, momentum, alpha=first.correction)
    torch._foreach_copy_(both, hess)
    torch._foreach_add_(both, prior_hess)
    torch._foreach_div_(work, both)
    if first.clip_radius != float("inf"):
        torch._foreach_clamp_min_(work, -first.clip_radius)
        torch._foreach_clamp_max_(work, first.clip_radius)
    torch._foreach_add_(mean, work, alpha=-first.lr)


def _all(jobs: Sequence[Job], field: str) -> list[Tensor]:
    return [getattr(job, field) for job in jobs]


def _add_(values: list[Tensor], bundle: list[Job], field: str) -> None:
    other = getattr(bundle[0], field)
    torch._foreach_add_(values, _all(bundle, field) if isinstance(other, Tensor) else other)


def _bundles(jobs: Sequence[Job], block: int) -> Iterator[list[Job]]:
    """Pieces of jobs that may be worked on together, at most ``block`` entries in all."""
    bundle: list[Job] = []
    size, kind = 0, None
    for job in jobs:
        tensors = {k: v for k in _TENSORS if isinstance(v := getattr(job, k), Tensor)}
        settings = tuple(getattr(job, k) for k in _SHARED)
        own_kind = (job.mean.dtype, job.mean.device, tuple(tensors), settings)
        small = job.mean.numel() <= block
        pieces = [list(tensors.values())] if small else flat_blocks([*tensors.values()], block)
        for piece in pieces:
            entries = piece[0].numel()
            if bundle and (own_kind != kind or size + entries > block):
                yield bundle
                bundle, size = [], 0
            kind = own_kind
            bundle.append(replace(job, **dict(zip(tensors, piece, strict=True))))
            size += entries
    if bundle:
        yield bundle
