"""CoVON's step by torch's multi-tensor operations, in place, for any device.

Tensors are cut into blocks and small ones bundled, so that a bundle stays in the cache of a
CPU and no temporary is larger than a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import is_dense
from covon_avalanche.optim.kernels.job import Job

Fill = Callable[[Tensor, int], None]

_TENSORS = ("mean", "sample", "hess", "prior_mean", "prior_precision")
_SHARED = ("ess", "beta1", "beta2", "lr", "clip_radius", "correction", "holds", "batch_size")


class Plan:
    """Jobs cut into pieces and bundled.

    :param block: largest number of entries in a bundle.
    """

    def __init__(self, jobs: list[Job], block: int) -> None:
        self.jobs, self._block = jobs, block
        self._cut: list[list[_Piece]] = []
        self._alike: list[bool] | None = None

    def _bundles(self) -> list[list[_Piece]]:
        """Pieces that may be worked on together; cut anew where settings have become others."""
        kinds = [_kind(job) for job in self.jobs]
        alike = [a == b for a, b in pairwise(kinds)]
        if alike != self._alike:
            self._cut, self._alike = list(_bundles(self.jobs, kinds, self._block)), alike
        return self._cut

    def draw(self, fill: Fill) -> list[Job]:
        """Write a sample of each job's posterior into its ``sample``.

        :param fill: writes the standard normals of a parameter's number into a tensor.
        :return: the jobs with a precision that is not positive.
        """
        for job in self.jobs:
            fill(job.sample, job.number)
        bundles = self._bundles()
        lowest = [low for bundle in bundles for low in _draw([p.job for p in bundle])]
        if (torch.stack(lowest) > 0).all():
            return []
        owners = [piece.whole for bundle in bundles for piece in bundle]
        bad = {id(job) for job, low in zip(owners, lowest, strict=True) if not low > 0}
        return [job for job in self.jobs if id(job) in bad]

    def step(self) -> bool:
        """Algorithm 1, lines 6 to 9, in place. The samples are used up."""
        for bundle in self._bundles():
            for piece in bundle:
                piece.refresh()
            _step([piece.job for piece in bundle])
            for piece in bundle:
                piece.job.grad = None
        return True


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    norms = torch._foreach_norm(_all(jobs, "grad"))
    return bool((torch.stack(norms) < min(job.largest_gradient for job in jobs)).all())


def _draw(bundle: list[Job]) -> list[Tensor]:
    first = bundle[0]
    if isinstance(first.hess, Tensor):
        precision = list(torch._foreach_mul(_all(bundle, "hess"), first.ess))
    else:
        precision = [torch.full_like(job.mean, first.ess * first.hess) for job in bundle]
    other = first.prior_precision
    torch._foreach_add_(
        precision, _all(bundle, "prior_precision") if isinstance(other, Tensor) else other
    )
    lowest = [p.min() for p in precision]
    torch._foreach_sqrt_(precision)
    sample = _all(bundle, "sample")
    torch._foreach_div_(sample, precision)
    torch._foreach_add_(sample, _all(bundle, "mean"))
    return lowest


def _step(bundle: list[Job]) -> None:
    first = bundle[0]
    mean, hess = _all(bundle, "mean"), _all(bundle, "hess")
    momentum, grad = _all(bundle, "momentum"), _all(bundle, "grad")
    work = _all(bundle, "sample")
    if first.holds == "theta":
        torch._foreach_sub_(work, mean)
        torch._foreach_mul_(work, grad)
    elif first.holds == "nothing":
        torch._foreach_copy_(work, grad)
        torch._foreach_mul_(work, work)
        torch._foreach_mul_(work, first.batch_size)
    prior_hess: Any
    if isinstance(first.prior_precision, Tensor):
        prior_hess = torch._foreach_mul(_all(bundle, "prior_precision"), 1 / first.ess)
        both = torch._foreach_add(prior_hess, hess)
    else:
        prior_hess = first.prior_precision / first.ess
        both = torch._foreach_add(hess, prior_hess)
    # line 8: work becomes the estimate, then the change of hess, then its square
    if first.holds in ("theta", "product"):
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
    """What jobs have in common that may be worked on together."""
    values = (getattr(job, k) for k in (*_TENSORS, *_SHARED))
    settings = ("tensor" if isinstance(v, Tensor) else v for v in values)
    return (*settings, job.mean.dtype, job.mean.device)


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
    if job.mean.numel() <= block or not is_dense(job.mean):
        yield _Piece(job, job)
        return
    for start in range(0, job.mean.numel(), block):
        size = min(block, job.mean.numel() - start)
        views = {k: _block(t, start, size) for k, t in tensors.items()}
        part = copy(job)
        vars(part).update(views)
        yield _Piece(part, job, start)
