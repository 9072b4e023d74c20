"""Jobs as two small tables of numbers, for kernels that do all of them in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from covon_avalanche.optim.kernels.job import Job

_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


def is_tensor(value: object) -> bool:
    """Whether a job's field is a tensor, not the number that stands for one."""
    return isinstance(value, torch.Tensor)


def by_kind(jobs: Sequence[Job], kind: Callable[[Job], tuple]) -> list[tuple[tuple, list[Job]]]:
    """Jobs that one kernel can do together: same numpy dtype, which begins each key, and kind."""
    kinds: dict[tuple, list[Job]] = {}
    for job in jobs:
        kinds.setdefault((_TYPES[job.mean.dtype], *kind(job)), []).append(job)
    return list(kinds.items())


class Tables:
    """Addresses, sizes and settings of jobs.

    ``places``: int64 of shape (jobs, 9): addresses of mean, sample, grad, momentum, hess,
    prior mean and prior precision (0 where there is no tensor), size, number.
    ``settings``: float64 of shape (jobs, 10): ess; hess, prior mean and prior precision where
    they are no tensors; 1 - beta1, 1 - beta2, lr, clip radius, correction, batch size.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.jobs = jobs
        self.places = np.array(
            [
                (
                    job.mean.data_ptr(),
                    job.sample.data_ptr(),
                    0,
                    0,
                    _address(job.hess),
                    _address(job.prior_mean),
                    _address(job.prior_precision),
                    job.mean.numel(),
                    job.number,
                )
                for job in jobs
            ],
            np.int64,
        )
        numbers = [
            (job.ess, _value(job.hess), _value(job.prior_mean), _value(job.prior_precision))
            for job in jobs
        ]
        self.settings = np.zeros((len(jobs), 10))
        self.settings[:, :4] = numbers
        self.entries = int(self.places[:, 7].sum())

    def refresh(self) -> None:
        """Take over what changes from step to step."""
        self.places[:, 2:4] = [(_address(j.grad), _address(j.momentum)) for j in self.jobs]
        self.settings[:, 4:] = [
            (1 - j.beta1, 1 - j.beta2, j.lr, min(j.clip_radius, 3e38), j.correction, j.batch_size)
            for j in self.jobs
        ]


def _address(value: torch.Tensor | float | None) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0


def _value(value: torch.Tensor | float) -> float:
    return 0.0 if isinstance(value, torch.Tensor) else value
