"""A step kernel as the optimizer uses it, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import moved
from covon_avalanche.optim.kernels import foreach
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.noise import NoiseSource


class Kernel(Protocol):
    """Draws samples and makes steps for one or more parameters on one device.

    A step draws the next sample too, while the numbers are at hand. It counts only if at the
    next draw the noise source and everything that the sample depends on are the same; otherwise
    it is drawn anew. So it saves time and changes nothing, as long as weights are changed where
    torch counts it (under ``no_grad``, not through ``.data``).

    What is derived from a list of jobs is kept for as long as the same list is given.
    """

    def draw(self, jobs: list[Job], noise: NoiseSource) -> list[Job]:
        """Write samples; return the jobs with a precision that is not positive."""

    def safe(self, jobs: list[Job]) -> bool:
        """Whether a step cannot meet or make a number that is not finite."""

    def step(self, jobs: list[Job], noise: NoiseSource, ahead: bool = True) -> bool:
        """Change mean, momentum and hess in place, and use up the samples.

        :param ahead: whether ``sample`` is where the next draw writes, too, and nothing else is
            drawn before these jobs.
        :return: whether it was :meth:`safe`; if not, nothing is changed.
        """


class ForeachKernel:
    """Torch operations; noise from torch's generators.

    :param block: largest number of entries worked on at a time.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._draws = self._steps = foreach.Plan([], block)
        self._drawn: list[int] = []  # numbers of parameters
        self._ahead: _Ahead | None = None

    def draw(self, jobs: list[Job], noise: NoiseSource) -> list[Job]:
        """See :class:`Kernel`."""
        self._drawn = [job.number for job in jobs]
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.fits(jobs, noise):
            noise.restore(ahead.after)
            lowest = ahead.lowest
        else:
            if self._draws.jobs is not jobs:
                self._draws = foreach.Plan(jobs, self.block)
            lowest = self._draws.draw(noise)
        positive = (torch.stack(lowest) > 0).all()
        return [] if positive else [job for job in jobs if not job.lowest_precision > 0]

    def safe(self, jobs: list[Job]) -> bool:
        """See :class:`Kernel`."""
        return foreach.safe(jobs)

    def step(self, jobs: list[Job], noise: NoiseSource, ahead: bool = True) -> bool:
        """See :class:`Kernel`."""
        if self._steps.jobs is not jobs:
            self._steps = foreach.Plan(jobs, self.block)
        if not foreach.safe(jobs):
            return False
        if not ahead or self._drawn != [job.number for job in jobs]:  # others come between
            self._steps.step(None)
            return True
        before = noise.state()
        try:
            lowest = self._steps.step(noise)
            origins = [_origin(job) for job in jobs]
            self._ahead = _Ahead(before, noise.state(), lowest, origins)
        finally:
            noise.restore(before)
        return True


@dataclass
class _Ahead:
    """Samples drawn with a step, by torch's generator.

    :param before: the generator's state before them.
    :param after: its state after them.
    :param lowest: precisions, as :meth:`foreach.Plan.draw` returns them.
    :param origins: what they were made of, by job.
    """

    before: Tensor
    after: Tensor
    lowest: list[Tensor]
    origins: list[tuple]

    def fits(self, jobs: list[Job], noise: NoiseSource) -> bool:
        """Whether drawing these jobs now would give them again."""
        return self.origins == list(map(_origin, jobs)) and torch.equal(self.before, noise.state())


class FusedKernel:
    """One pass over memory, with noise that is a function of a key; the next sample's key is the
    one that the noise source would give out next.

    :param plan: class of plans: made of jobs, with ``draw(key)``, ``safe()`` and
        ``step(next_key)``.
    """

    def __init__(self, plan: Callable[[list[Job]], FusedPlan]) -> None:
        self._make_plan = plan
        self._plan: FusedPlan | None = None
        self._ahead: dict[int, tuple] = {}  # number of a parameter: what its sample came from

    def _plan_of(self, jobs: list[Job]) -> FusedPlan:
        if self._plan is None or self._plan.jobs is not jobs:
            self._plan = self._make_plan(jobs)
        return self._plan

    def draw(self, jobs: list[Job], noise: NoiseSource) -> list[Job]:
        """See :class:`Kernel`."""
        key = noise.key()
        missing = [job for job in jobs if self._ahead.pop(job.number, None) != (key, *_origin(job))]
        return self._make_plan(missing).draw(key) if missing else []

    def safe(self, jobs: list[Job]) -> bool:
        """See :class:`Kernel`."""
        return self._plan_of(jobs).safe()

    def step(self, jobs: list[Job], noise: NoiseSource, ahead: bool = True) -> bool:
        """See :class:`Kernel`."""
        next_key = noise.peek() if ahead else None
        if not self._plan_of(jobs).step(next_key):
            return False
        moved(job.mean for job in jobs)
        if next_key is not None:
            self._ahead.update((job.number, (next_key, *_origin(job))) for job in jobs)
        return True


class FusedPlan(Protocol):
    """What a compiled kernel derives from jobs, once."""

    jobs: list[Job]

    def draw(self, key: int) -> list[Job]:
        """Write samples made from the key; return the jobs with a precision not positive."""

    def safe(self) -> bool:
        """Whether a step cannot meet or make a number that is not finite."""

    def step(self, next_key: int | None) -> bool:
        """A step if it is safe, and with a key the next samples in the same pass."""


def _origin(job: Job) -> tuple:
    """What a job's sample is a function of, beside noise and tensors that only the optimizer
    changes."""
    hess, prior = job.hess, job.prior_precision
    return (
        job.ess,
        job.sample.data_ptr(),
        job.mean.data_ptr(),
        job.mean._version,
        (hess.data_ptr(), hess._version) if isinstance(hess, Tensor) else hess,
        (prior.data_ptr(), prior._version) if isinstance(prior, Tensor) else prior,
    )
