"""A step kernel as the optimizer uses it, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from covon_avalanche.optim.kernels import foreach
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.noise import NoiseSource


class Kernel(Protocol):
    """Draws samples and makes steps for parameters on one device."""

    def draw(
        self, jobs: Sequence[Job], noise: NoiseSource, fill: Callable[[Job], None]
    ) -> list[Job]:
        """Write samples; return the jobs with a precision that is not positive.

        :param fill: writes a job's standard normals into its ``sample``, for kernels that
            do not make their own.
        """

    def safe(self, jobs: Sequence[Job]) -> bool:
        """Whether a step cannot meet or make a number that is not finite."""

    def step(self, jobs: Sequence[Job], noise: NoiseSource) -> None:
        """Change mean, momentum and hess in place, and use up the samples."""


class ForeachKernel:
    """Torch operations; noise from torch's generators.

    :param block: largest number of entries worked on at a time.
    """

    def __init__(self, block: int) -> None:
        self.block = block

    def draw(
        self, jobs: Sequence[Job], noise: NoiseSource, fill: Callable[[Job], None]
    ) -> list[Job]:
        """See :class:`Kernel`."""
        return foreach.draw(jobs, fill, self.block)

    def safe(self, jobs: Sequence[Job]) -> bool:
        """See :class:`Kernel`."""
        return foreach.safe(jobs)

    def step(self, jobs: Sequence[Job], noise: NoiseSource) -> None:
        """See :class:`Kernel`."""
        foreach.step(jobs, self.block)


class FusedKernel:
    """One pass over memory, with noise that is a function of a key.

    A step draws the next sample too, with the key that the noise source would give out
    next. It counts only if at the next draw the key and everything that the sample depends
    on are the same; otherwise it is drawn anew. So it saves time and changes nothing.

    :param module: has ``draw(jobs, key)``, ``safe(jobs)`` and ``step(jobs, next_key)``.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._ahead: dict[int, tuple] = {}  # number of a parameter: what its sample came from

    def draw(
        self, jobs: Sequence[Job], noise: NoiseSource, fill: Callable[[Job], None]
    ) -> list[Job]:
        """See :class:`Kernel`."""
        if not jobs:
            return []
        key = noise.key(jobs[0].mean.device)
        missing = [job for job in jobs if self._ahead.pop(job.number, None) != _origin(job, key)]
        return self.module.draw(missing, key) if missing else []

    def safe(self, jobs: Sequence[Job]) -> bool:
        """See :class:`Kernel`."""
        return self.module.safe(jobs)

    def step(self, jobs: Sequence[Job], noise: NoiseSource) -> None:
        """See :class:`Kernel`."""
        if not jobs:
            return
        next_key = noise.peek(jobs[0].mean.device) if not jobs[0].averaged else None
        self.module.step(jobs, next_key)
        for job in jobs:
            for tensor in (job.mean, job.momentum, job.hess):
                torch.autograd.graph.increment_version(tensor)
            if next_key is not None:
                self._ahead[job.number] = _origin(job, next_key)


def _origin(job: Job, key: int) -> tuple:
    """What a job's sample is a function of."""

    def identity(value: Tensor | float) -> tuple:
        return (value.data_ptr(), value._version) if isinstance(value, Tensor) else (value,)

    tensors = (job.mean, job.hess, job.prior_precision)
    return key, job.ess, job.sample.data_ptr(), *(identity(t) for t in tensors)
