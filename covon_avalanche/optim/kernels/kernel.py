"""A step kernel as the optimizer uses it, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Protocol

from torch import Tensor

from covon_avalanche.optim.buffers import moved
from covon_avalanche.optim.kernels.job import Job


class Kernel:
    """Draws samples and makes steps for one or more parameters on one device.

    A step draws the next sample too, while the numbers are at hand. It counts only if at the
    next draw the key and everything that the sample depends on are the same; otherwise
    it is drawn anew. So it saves time and changes nothing, as long as weights are changed where
    torch counts it (under ``no_grad``, not through ``.data``).

    What is derived from a list of jobs is kept for as long as the same list is given.

    :param plan: class of plans, made of jobs.
    """

    def __init__(self, plan: Callable[[list[Job]], Plan]) -> None:
        self._make_plan = plan
        self._draws = self._steps = plan([])
        self._ahead: dict[int, tuple] = {}  # number of a parameter: what its sample came from

    def draw(self, jobs: list[Job], key: int) -> list[Job]:
        """Write samples; return the jobs with a precision that is not positive."""
        missing = [job for job in jobs if self._ahead.pop(job.number, None) != (key, *_origin(job))]
        if not missing:
            return []
        known = self._draws.jobs
        if len(known) != len(missing) or not all(map(is_, known, missing)):
            self._draws = self._make_plan(missing)
        return self._draws.draw(key)

    def safe(self, jobs: list[Job]) -> bool:
        """Whether a step cannot meet or make a number that is not finite."""
        return self._steps_of(jobs).safe()

    def step(self, jobs: list[Job], next_key: int | None) -> None:
        """Change mean, momentum and hess in place, and use up the samples; to be called only
        where it is :meth:`safe`.

        :param next_key: of the next draw, if ``sample`` is where it writes, too.
        """
        self._steps_of(jobs).step(next_key)
        moved(job.mean for job in jobs)
        if next_key is not None:
            self._ahead.update((job.number, (next_key, *_origin(job))) for job in jobs)

    def _steps_of(self, jobs: list[Job]) -> Plan:
        if self._steps.jobs is not jobs:
            self._steps = self._make_plan(jobs)
        return self._steps


class Plan(Protocol):
    """What a way to run the step derives from jobs, once."""

    jobs: list[Job]

    def draw(self, key: int) -> list[Job]:
        """Write a sample of each job's posterior into its ``sample``.

        :param key: 63 bits; the same key gives the same noise.
        :return: the jobs with a precision that is not positive.
        """

    def safe(self) -> bool:
        """Whether all gradients are finite and small enough that a step cannot overflow."""

    def step(self, next_key: int | None) -> None:
        """Algorithm 1, lines 6 to 9, in place, which use up the samples; after :meth:`safe`.

        :param next_key: draw the next samples, too, as :meth:`draw` would with this key. Their
            precision is not looked at: line 8 keeps what is positive so.
        """


def _origin(job: Job) -> tuple:
    """What a job's sample is a function of, beside the key and tensors that only the optimizer
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
