"""A step kernel as the optimizer uses it, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from covon_avalanche.optim.buffers import moved
from covon_avalanche.optim.kernels import foreach
from covon_avalanche.optim.kernels.foreach import Fill
from covon_avalanche.optim.kernels.job import Job
from covon_avalanche.optim.noise import NoiseSource


class Kernel(Protocol):
    """Draws samples and makes steps for one or more parameters on one device.

    What is derived from a list of jobs is kept for as long as the same list is given.
    """

    def draw(self, jobs: list[Job], noise: NoiseSource, fill: Fill) -> list[Job]:
        """Write samples; return the jobs with a precision that is not positive.

        :param fill: writes the standard normals of a parameter's number into a tensor, for
            kernels that do not make their own.
        """

    def safe(self, jobs: list[Job]) -> bool:
        """Whether a step cannot meet or make a number that is not finite."""

    def step(self, jobs: list[Job], noise: NoiseSource, ahead: bool = True) -> bool:
        """Change mean, momentum and hess in place, and use up the samples.

        :param ahead: whether ``sample`` is where the next draw writes, too.
        :return: whether it was :meth:`safe`; if not, nothing is changed.
        """


class ForeachKernel:
    """Torch operations; noise from torch's generators.

    :param block: largest number of entries worked on at a time.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._draws = self._steps = foreach.Plan([], block)

    def draw(self, jobs: list[Job], noise: NoiseSource, fill: Fill) -> list[Job]:
        """See :class:`Kernel`."""
        if self._draws.jobs is not jobs:
            self._draws = foreach.Plan(jobs, self.block)
        return self._draws.draw(fill)

    def safe(self, jobs: list[Job]) -> bool:
        """See :class:`Kernel`."""
        return foreach.safe(jobs)

    def step(self, jobs: list[Job], noise: NoiseSource, ahead: bool = True) -> bool:
        """See :class:`Kernel`."""
        if self._steps.jobs is not jobs:
            self._steps = foreach.Plan(jobs, self.block)
        return foreach.safe(jobs) and self._steps.step()


class FusedKernel:
    """One pass over memory, with noise that is a function of a key.

    A step draws the next sample too, with the key that the noise source would give out
    next. It counts only if at the next draw the key and everything that the sample depends
    on are the same; otherwise it is drawn anew. So it saves time and changes nothing, as long as
    weights are changed where torch counts it (under ``no_grad``, not through ``.data``).

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

    def draw(self, jobs: list[Job], noise: NoiseSource, fill: Fill) -> list[Job]:
        """See :class:`Kernel`."""
        key = noise.key()
        missing = [job for job in jobs if self._ahead.pop(job.number, None) != _origin(job, key)]
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
            self._ahead.update((job.number, _origin(job, next_key)) for job in jobs)
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


def _origin(job: Job, key: int) -> tuple:
    """What a job's sample is a function of, beside tensors that only the optimizer changes."""
    hess, prior = job.hess, job.prior_precision
    return (
        key,
        job.ess,
        job.sample.data_ptr(),
        job.mean.data_ptr(),
        job.mean._version,
        (hess.data_ptr(), hess._version) if isinstance(hess, Tensor) else hess,
        (prior.data_ptr(), prior._version) if isinstance(prior, Tensor) else prior,
    )
