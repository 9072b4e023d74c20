"""What a step kernel is given: one parameter with its state and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from covon_avalanche.optim.buffers import is_dense

Holds = Literal["theta", "product", "hess", "nothing"]

LARGEST_ESTIMATE = 1e15  # beyond it its square may overflow in float32
LARGEST_GRADIENT = 1e9  # beyond it a Hessian estimate in float32 may overflow


@dataclass
class Job:
    """One parameter of a CoVON step. Tensors have the parameter's shape and strides; where
    the state has none yet (see :class:`CoVON`), a number stands for it.

    :param name: for messages.
    :param number: of the parameter in the optimizer; part of the place of its noise.
    :param mean: the parameter, at its mean. Changed in place by a step.
    :param sample: theta; written by ``draw``. Its content is used up by a step.
    :param grad: average gradient over the samples, loss/weight.
    :param holds: what a step finds in ``sample``: ``"theta"``; ``"product"``, the average of
        ``gradient * (theta - mean)`` over several samples; ``"hess"``, a Hessian estimate; or
        ``"nothing"`` that counts: the estimate is ``batch_size * grad²``.
    :param momentum: gradient average. Changed in place.
    :param hess: Hessian average, loss/weight². Changed in place.
    :param prior_mean: of the task, weight.
    :param prior_precision: of the task, 1/weight².
    :param ess: effective sample size, in examples.
    :param batch_size: examples behind ``grad``; counts where the sample holds ``"nothing"``.
    :param beta1, beta2, lr, clip_radius: see :class:`CoVON`.
    :param correction: ``1 / (1 - beta1**step)``, or 1 without debiasing.
    """

    name: str
    number: int
    mean: Tensor
    sample: Tensor
    hess: Tensor | float
    prior_mean: Tensor | float
    prior_precision: Tensor | float
    ess: float
    grad: Tensor | None = None
    holds: Holds = "theta"
    momentum: Tensor | None = None
    beta1: float = 0.0
    beta2: float = 0.0
    batch_size: float = 1.0
    lr: float = 0.0
    clip_radius: float = float("inf")
    correction: float = 1.0

    @property
    def lowest_precision(self) -> Tensor:
        """Of the posterior's entries, 1/weight²."""
        prior = torch.as_tensor(self.prior_precision, dtype=self.mean.dtype)
        return torch.add(prior, self.hess, alpha=self.ess).min()

    @property
    def largest_gradient(self) -> float:
        """Beyond it a step may overflow; loss/weight."""
        if self.holds != "nothing":
            return LARGEST_GRADIENT
        return min(LARGEST_GRADIENT, (LARGEST_ESTIMATE / self.batch_size) ** 0.5)


def safe(jobs: Sequence[Job]) -> bool:
    """Whether all gradients are finite and small enough that a step cannot overflow."""
    norms = torch._foreach_norm([job.grad for job in jobs])  # type: ignore[misc]
    limit = min(job.largest_gradient for job in jobs)
    return torch.stack(norms).max().item() < limit  # not where one is NaN


def cut(job: Job, field: str, block: int) -> Sequence[Any]:
    """The parts of a tensor that has more than a block, one-dimensional and in order of memory;
    of a number as many. What has no more, or gaps, is one part as it is.

    :param field: of the job, that the tensor or number is.
    :param block: largest number of entries in a part.
    """
    value, n = getattr(job, field), job.mean.numel()
    if n <= block or not is_dense(job.mean):
        return [value]
    if not isinstance(value, Tensor):
        return [value] * -(-n // block)
    return value.as_strided((n,), (1,)).split(block)
